"""What travels between a call and its worker, and in which form.

Importable functions travel by name, all others by value (cloudpickle), with the file names of their code. Large
buffers (arrays) travel out of band, as memory files: the receiver maps them privately, copy on write, so arrays stay
writable and nobody sees the other's changes. JAX values become NumPy on the way back, so that the parent's JAX stays
unstarted. Trials and studies never travel: `_trials` puts paths in their place.

Sources: PEP 574 (out-of-band buffers), memfd_create(2), mmap(2).
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import linecache
import mmap
import os
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _descriptors, _frames, _linux

LARGE = 1 << 20
"""Buffers of this many bytes and more travel out of band."""


class Packed(NamedTuple):
    """A value, ready to travel."""

    data: bytes
    descriptors: list[int]

    @property
    def size(self) -> int:
        """In bytes, with the buffers that travel out of band."""
        return len(self.data) + sum(os.fstat(descriptor).st_size for descriptor in self.descriptors)


def pack(value: object, *, plain: bool, replace: Callable[[object], Any] | None = None, large: int = LARGE) -> Packed:
    """Pickle a value.

    Args:
        value: What shall travel.
        plain: Whether JAX values become NumPy (all ways into the parent).
        replace: Gives another reduction for an object, or None.
        large: From how many bytes on a buffer travels out of band.

    Returns:
        The data, and the descriptors of the large buffers: the caller owns them.
    """

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        view = buffer.raw()
        if view.nbytes < large or len(files) >= _frames.MAX_DESCRIPTORS:
            return True  # in band
        files.append(_write(view) if plain else _shared.file_of(view))
        return False

    sources: dict[str, Any] = {}
    files: list[_File] = []
    stream = io.BytesIO()
    try:
        _pickler()(stream, plain, replace, sources, out_of_band).dump(value)
    except BaseException:
        _descriptors.close(*(file.descriptor for file in files))
        raise
    # The serial numbers make the data of two calls differ if a buffer changed in between, see `_dialogue`.
    head = pickle.dumps((sources, [(file.size, file.serial) for file in files]))
    return Packed(_frames.join(head, stream.getbuffer()), [file.descriptor for file in files])


@functools.cache
def _pickler() -> Any:
    import cloudpickle  # loky stands on it, and so do we

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def __init__(self, stream: Any, plain: Any, replace: Any, sources: Any, out_of_band: Any) -> None:
            super().__init__(stream, protocol=5, buffer_callback=out_of_band)
            self._plain, self._replace, self._sources = plain, replace, sources

        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, types.CodeType):
                return _reduce_code(self.dispatch_table[types.CodeType](obj), obj, self._sources)
            if self._replace is not None and (reduced := self._replace(obj)) is not None:
                return reduced
            if self._plain and (reduced := _reduce_jax(obj)) is not None:
                return reduced
            return super().reducer_override(obj)

    return Pickler


def unpack(data: bytes | memoryview, descriptors: list[int]) -> Any:
    """Undo `pack`; the descriptors are closed, whatever happens."""
    head, stream = _frames.split(data)
    buffers = []
    try:
        sources, files = pickle.loads(head)
        for descriptor, (length, _) in zip(descriptors, files, strict=True):
            buffers.append(_mapped(descriptor, length))
    finally:
        _descriptors.close(*descriptors)
    for name, entry in sources.items():
        linecache.cache.setdefault(name, entry)
    return pickle.loads(stream, buffers=buffers)


def _mapped(descriptor: int, length: int) -> Any:
    """Map a memory file, private and writable, for as long as the result lives.

    Not by `mmap.mmap`: that keeps a descriptor of its own, so each array that a program keeps would cost it one.
    """
    import numpy as np

    libc = _linux.libc()
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, descriptor, 0)
    if address in {None, ctypes.c_void_p(-1).value}:
        raise OSError(ctypes.get_errno(), f"{length} bytes of a memory file could not be mapped")
    memory: Any = (ctypes.c_ubyte * length).from_address(address)
    weakref.finalize(memory, libc.munmap, address, length).atexit = False
    return np.frombuffer(memory, np.uint8)


# ---------------------------------------------------------------- code and JAX values


def _code(arguments: tuple[Any, ...], filename: str) -> types.CodeType:
    return types.CodeType(*arguments).replace(co_filename=filename)


def _reduce_code(reduced: tuple[Any, ...], code: types.CodeType, sources: dict[str, Any]) -> Any:
    """Keep the file name, which cloudpickle drops, and the lines of notebook cells, which are in no file."""
    name = code.co_filename
    entry = linecache.cache.get(name)
    if entry is not None and len(entry) > 1 and not os.path.exists(name):
        sources[name] = entry
    return (_code, (reduced[1], name)) if reduced[0] is types.CodeType else reduced


def _same(value: Any) -> Any:
    return value


def _reduce_jax(obj: Any) -> Any:
    """Reduce a JAX array to NumPy, a key to its data."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(obj, jax.Array):
        return None
    import numpy as np

    if isinstance(obj, jax.core.Tracer):
        return None  # cannot travel; its own error says why
    if jax.dtypes.issubdtype(obj.dtype, jax.dtypes.prng_key):
        obj = jax.random.key_data(obj)
    return _same, (np.asarray(obj),)


def without_jax(value: Any) -> Any:
    """A JAX scalar as a number, an array as NumPy; all else as it is."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.Array):
        return value
    if value.ndim == 0 and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value.item()
    return _reduce_jax(value)[1][0]


# ---------------------------------------------------------------- functions


class Reference(NamedTuple):
    """An importable function: where it is, and how many wrappers to take off."""

    module: str
    qualname: str
    depth: int

    def resolve(self) -> Callable[..., Any]:
        import importlib

        found: Any = importlib.import_module(self.module)
        for name in self.qualname.split("."):
            found = getattr(found, name)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found  # type: ignore[no-any-return]


def reference(function: Callable[..., Any]) -> Reference | None:
    """Find the name under which a function can be imported; None if it must travel by value.

    A decorated function bears its wrapper's name, so the wrappers found there are taken off one by one.
    """
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if not isinstance(module, str) or module == "__main__" or "<" in qualname or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    if getattr(found, "__spec__", None) is None:
        return None  # made by hand, not by import: nobody else finds it
    try:
        for name in qualname.split("."):
            found = getattr(found, name)
    except AttributeError:
        return None
    depth = 0
    while found is not function:
        found = getattr(found, "__wrapped__", None)
        depth += 1
        if found is None:
            return None
    return Reference(module, qualname, depth)


# ---------------------------------------------------------------- large buffers


class _File(NamedTuple):
    """A memory file that holds a copy of one buffer."""

    descriptor: int
    size: int
    serial: int


_serials = itertools.count()


def _write(view: memoryview) -> _File:
    with _descriptors.creating():
        descriptor = os.memfd_create("jaxguard", os.MFD_CLOEXEC)
        _descriptors.own(descriptor)
    try:
        done = 0
        while done < view.nbytes:
            done += os.write(descriptor, view[done:])
    except BaseException:
        _descriptors.close(descriptor)
        raise
    return _File(descriptor, view.nbytes, next(_serials))


class _Shared:
    """The memory files of this process's large buffers: written once, sent to each worker, gone with their arrays.

    An array may have changed since it was written, so its bytes are compared at each call, which costs a tenth of
    writing them.
    """

    def __init__(self) -> None:
        self._files: dict[tuple[int, int], _File] = {}
        self._lock = threading.Lock()  # while one study thread writes an array, the others wait for that file

    def file_of(self, view: memoryview) -> _File:
        """A file with the bytes of a buffer, under a descriptor that the caller owns."""
        address, owner = _address(view), _owner(view)
        key = address, view.nbytes
        with self._lock:
            known = self._files.get(key)
            if known is not None and not _equal(address, known):
                self._drop(key, known)
                known = None
            if known is None:
                known = _write(view)
                try:
                    # The lock is not taken in there: the garbage collector may call it while this thread has it.
                    weakref.finalize(owner, self._drop, key, known).atexit = False
                except TypeError:  # bytes and their like have no weak references: nobody says when they are gone
                    return known
                self._files[key] = known
            with _descriptors.creating():
                descriptor = os.dup(known.descriptor)
                _descriptors.own(descriptor)
        return known._replace(descriptor=descriptor)

    def forget(self) -> None:
        self._files.clear()

    def _drop(self, key: tuple[int, int], file: _File) -> None:
        if self._files.get(key) is file:
            del self._files[key]
            _descriptors.close(file.descriptor)


def _owner(view: memoryview) -> Any:
    """The array that owns the memory: views of it come and go."""
    owner: Any = view.obj
    while isinstance(getattr(owner, "base", None), type(owner)):
        owner = owner.base
    return owner


def _address(view: memoryview | mmap.mmap) -> int:
    import numpy as np

    return int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])


def _equal(address: int, file: _File) -> bool:
    with mmap.mmap(file.descriptor, file.size, mmap.MAP_SHARED, mmap.PROT_READ) as copy:
        pointers = ctypes.c_void_p(address), ctypes.c_void_p(_address(copy))
        return bool(_linux.libc().memcmp(*pointers, ctypes.c_size_t(file.size)) == 0)


_shared = _Shared()


def _after_fork_in_child() -> None:
    global _shared  # noqa: PLW0603 – its descriptors are closed here, its lock may be held by nobody
    _shared.forget()  # or an array's end would close a descriptor that is another's by then
    _shared = _Shared()


_descriptors.after_fork_in_child(_after_fork_in_child)
