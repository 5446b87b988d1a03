"""`isolated_jax_worker`: each call in a process of its own that holds a slot."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from . import (
    _asking,
    _caching,
    _devices,
    _dialogue,
    _environment,
    _guard,
    _holds,
    _interrupts,
    _leases,
    _line,
    _packing,
    _settings,
    _shares,
)

P = ParamSpec("P")
R = TypeVar("R")


_IN_USE = (
    "this worker is in use by another thread: its one slot runs one function at a time. To run several, decorate the "
    "function with isolated_jax_worker instead, or open a block in each thread."
)


class Worker:
    """What `with isolated_jax_worker() as worker` gives: runs functions in the slot that the block holds."""

    def __init__(self, options: _packing.Options, lease: _leases.Lease | None) -> None:
        self._options = options
        self._lease = lease
        self._warm: _dialogue.Worker | None = None
        self._busy = threading.Lock()

    def __call__(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run `function(*args, **kwargs)` in a worker that has this slot.

        Raises:
            WorkerDied: If the worker ended without an answer.
            WorkerTimeout: If it took longer than the guard's `timeout`.
            RuntimeError: If another thread is using this worker, or its block has ended.
        """
        if not callable(function):
            text = (
                f"worker(function, *args) takes a function and its arguments, not {function!r}: it calls the function"
            )
            raise TypeError(text)
        inner = unguarded(function)
        if self._lease is None:  # inside another hold, or inline
            return _guard.call(inner, self._options, args, kwargs)  # type: ignore[no-any-return]
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(_IN_USE)
        try:
            return self._run(inner, args, kwargs)  # type: ignore[no-any-return]
        finally:
            self._busy.release()

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lease = self._lease
        if lease is None or lease.closed:
            raise RuntimeError("this worker's block has ended, and its slot with it: use it inside its `with`")
        name = _guard.name_of(function)
        with _interrupts.call(name) as running:
            packed = _packing.PackedCall(name, running.roots, self._options, function, args, kwargs)
            try:
                worker = self._take_warm(packed.key) or _guard.start(lease, self._options, packed)
                return _guard.converse(running, self._options, worker, packed, keep=self._keep)
            finally:
                packed.close()

    def _take_warm(self, key: object) -> _dialogue.Worker | None:
        """The worker of the last call, if it lives and its environment is still right."""
        worker, self._warm = self._warm, None
        if worker is None:
            return None
        worker.drain()
        if not worker.ended and not worker.is_dead() and worker.key == key:
            return worker
        worker.end()
        return None

    def _keep(self, worker: _dialogue.Worker) -> None:
        if not worker.ended and worker.trusted:
            self._warm = worker
        else:
            worker.end()

    def close(self) -> None:
        """End a warm worker and let the slot go."""
        try:
            if self._warm is not None:
                self._warm.end()
        finally:
            self._warm = None
            if self._lease is not None:
                self._lease.close()


@dataclass(frozen=True, slots=True)
class IsolatedJaxWorker:
    """A guard at rest: data. It opens a fresh hold for each call, and for each `with`."""

    options: _packing.Options

    def __call__(self, function: Callable[P, R], /, *rest: object, **named: object) -> Callable[P, R]:
        """Guard a function."""
        if rest or named:
            text = (
                "isolated_jax_worker(...) guards a function. To run one at once, hold the slot first: "
                "`with isolated_jax_worker() as worker: worker(function, *args)`."
            )
            raise TypeError(text)
        _refuse(function)
        options = self.options

        # A plain function: a callable object would not pickle in joblib's multiprocessing backend.
        def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
            return _guard.call(function, options, args, kwargs)  # type: ignore[no-any-return]

        if isinstance(function, functools.partial):
            guarded.__name__ = guarded.__qualname__ = _guard.name_of(function)
        else:
            functools.update_wrapper(guarded, function)
        # Set here: a callable object that has a __wrapped__ of its own has passed that on.
        vars(guarded).update(__wrapped__=function, __jaxguard__=options)
        return guarded

    def __enter__(self) -> Worker:
        return _holds.enter(self, self._opened())

    def __exit__(self, *exception: object) -> bool | None:
        return _holds.leave(self, *exception)

    @contextmanager
    def _opened(self) -> Iterator[Worker]:
        if _settings.inline() or _holds.current() is not None:
            yield Worker(self.options, None)
            return
        with _interrupts.call("isolated_jax_worker()") as running:
            lease = _asking.lease(running, self.options)
        worker = Worker(self.options, lease)
        owner = os.getpid()
        try:
            with _holds.opened(_holds.Hold(self.options.gpus, lease.nonce, lease.devices, call=worker)):
                yield worker
        finally:
            if os.getpid() == owner:  # a forked child drops this block when it begins, and must not end it
                worker.close()


def unguarded(function: Callable[P, R]) -> Callable[P, R]:
    """The function under a guard: a worker that is asked for it already is what the guard would give."""
    return vars(function)["__wrapped__"] if hasattr(function, "__jaxguard__") else function


def _refuse(function: Any) -> None:
    """Raise for what cannot be guarded, with what to do instead."""
    name = getattr(function, "__qualname__", repr(function))
    if not callable(function):
        text = f"isolated_jax_worker guards a function, not {function!r}. Its options are keyword-only."
        raise TypeError(text)
    _guard.refuse_unfinished(function, "Guard a plain function that does the work and returns the result.")
    if isinstance(function, staticmethod | classmethod):
        text = f"{name} is a {type(function).__name__}: write @{type(function).__name__} above the guard, not below it."
        raise TypeError(text)
    if isinstance(function, type):
        text = f"{name} is a class: guard the function or method that does the work."
        raise TypeError(text)
    if _is_hydra_main(function):
        text = (
            f"{name} is already wrapped by @hydra.main, which must be the outermost. Write the guard below it:\n\n"
            f"    @hydra.main(version_base=None, ...)\n    @isolated_jax_worker\n    def {name}(cfg): ..."
        )
        raise TypeError(text)


def _is_hydra_main(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return (
        code is not None and code.co_name == "decorated_main" and function.__globals__.get("__name__") == "hydra.main"
    )


@overload
def isolated_jax_worker(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def isolated_jax_worker(
    *,
    gpus: float = 1,
    devices: Sequence[int | str] | None = None,
    timeout: float = math.inf,
    slot_timeout: float = math.inf,
    reuse: bool = False,
    compile_cache: str | os.PathLike[str] = "shared",
    cpus: int | None = None,
    env: Mapping[str, str | None] | None = None,
) -> IsolatedJaxWorker: ...
def isolated_jax_worker(
    function: Callable[..., Any] | None = None,
    /,
    *,
    gpus: float = 1,
    devices: Sequence[int | str] | None = None,
    timeout: float = math.inf,
    slot_timeout: float = math.inf,
    reuse: bool = False,
    compile_cache: str | os.PathLike[str] = "shared",
    cpus: int | None = None,
    env: Mapping[str, str | None] | None = None,
) -> Any:
    """Run each call in a process of its own that holds a slot.

    As a decorator it guards a function: each call waits for a slot, runs the function in a clean process that sees the
    slot's devices and no others, and returns its result. When the call returns or raises, the slot is free again and no
    process is left; with `reuse`, a warm worker keeps the slot until somebody waits for it or some seconds are over.
    As a context manager it holds one slot for the block and gives a callable worker,
    `worker(function, *args, **kwargs)`, so that a trial can be asked for after the slot is there.

    A guarded Optuna objective works with any sampler, pruner and storage: the trial stays in the study's process, and
    its calls travel. Results arrive as NumPy where they were JAX arrays. Nothing of JAX starts in the calling process.

    Inside another guarded call or `gpu_slot` the function runs in the process that is there, on its devices.

    Args:
        function: The function, when used without options.
        gpus: How many GPUs each call holds, or the share of one (0.5, 1/3, 0.25); 0 keeps to the CPU. On a host without
            GPUs, how many CPU devices JAX sees; more than there are slots is no error there, the call holds them all.
        devices: Which devices to choose from: positions among those that the calling process may use, or ids; None for
            all.
        timeout: Seconds that a run may take, from the moment its process exists; `inf` for no limit.
        slot_timeout: Seconds to wait for a slot; 0 tries once, `inf` never gives up.
        reuse: Whether calls share warm processes, one at a time, instead of each having a fresh one.
        compile_cache: Where compiled programs go: "shared" for this user's store, where a worker takes what another one
            has compiled; "private" for a directory that goes with the worker; "off" for what JAX does by itself; or the
            absolute path of a directory, for a store of its own.
        cpus: How many cores the worker may use; None for its slot's share of them, near its GPU where the system tells.
        env: Environment variables of the worker, in force before anything is imported there; None unsets one.

    Returns:
        The guarded function; or, without a function, a guard that is both decorator and context manager.

    Raises:
        TypeError: At decoration, for options of a wrong type, generator and coroutine functions, a function already
            wrapped by `@hydra.main`. At a call, for an argument, capture or result that cannot be pickled.
        ValueError: At decoration, for options out of range. At a call, for more GPUs than there are, or a
            `compile_cache` that is not "shared" or "off" where the user has set up JAX's cache too.
        SlotTimeout: At a call, if no slot came free within `slot_timeout`.
        NoDevices: At a call, if this host offers this process no such devices.
        WorkerTimeout: At a call, if it ran longer than `timeout`.
        WorkerDied: At a call, if its process ended without an answer.
        JaxAlreadyStarted: At a call, if JAX in this process sits on the only GPUs that could serve.
        RemoteError: At a call, for an exception that could not travel.

    Example:
        >>> from jaxguard import isolated_jax_worker
        >>> @isolated_jax_worker
        ... def norm(values):
        ...     import jax.numpy as jnp
        ...     return jnp.linalg.norm(jnp.asarray(values))
        >>> float(norm([3.0, 4.0]))
        5.0
    """
    _check_timeout(timeout)
    _line.check_slot_timeout(slot_timeout)
    if not isinstance(reuse, bool):
        text = f"reuse must be True or False, not {reuse!r}"
        raise TypeError(text)
    options = _packing.Options(
        _shares.checked(gpus),
        timeout,
        slot_timeout,
        reuse,
        _checked_env(env),
        _devices.checked_devices(devices),
        _environment.checked_cpus(cpus),
        _caching.checked(compile_cache),
    )
    guard = IsolatedJaxWorker(options)
    return guard if function is None else guard(function)


def _check_timeout(timeout: object) -> None:
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        text = f"timeout must be a number of seconds (inf, the default, sets no limit), not {timeout!r}"
        raise TypeError(text)
    if math.isnan(timeout) or timeout <= 0:
        text = f"timeout must be more than 0 seconds, not {timeout}; inf sets no limit"
        raise ValueError(text)


def _checked_env(env: object) -> tuple[tuple[str, str | None], ...]:
    if env is None:
        return ()
    if not isinstance(env, Mapping):
        text = f"env must map names to text (or to None, to unset them), not {env!r}"
        raise TypeError(text)
    for name, value in env.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, str)):
            text = f"env must map names to text (or to None, to unset them), not {name!r} to {value!r}"
            raise TypeError(text)
        if not name or "=" in name or "\0" in name + (value or ""):
            text = f"env: {name!r}={value!r} is not a valid environment variable"
            raise ValueError(text)
        if name in _environment.FROM_THE_LEASE or name in {_settings.HOLD, _settings.RUN}:
            text = (
                f"env: {name} comes from the slot that a call holds, and cannot be set. Use gpus= (gpus=0 for the "
                f"CPU), or {_settings.DEVICES} for the whole program."
            )
            raise ValueError(text)
    return tuple(sorted(env.items()))
