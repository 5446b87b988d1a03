"""Calls: what travels, and in which form; large buffers once per parent, never by reference."""

from __future__ import annotations

import array
import gc
import os
import pickle
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from jaxguard import _calls, _descriptors, _frames

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

MIB = 1 << 20
ITEMS = MIB // 8  # float64s in one MiB


def memory_files() -> int:
    """Count the memory files with arrays that this process has open."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:jaxguard (")
        except OSError:  # the folder's own descriptor
            continue
    return count


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Give the sizes of what is written to memory files."""
    sizes: list[int] = []
    real = _calls._write

    def write(view: memoryview) -> Any:
        sizes.append(view.nbytes)
        return real(view)

    monkeypatch.setattr(_calls, "_write", write)
    return sizes


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Any:
    """Each test gives back all memory files, once its arrays are gone."""
    gc.collect()
    before = memory_files()
    yield
    gc.collect()
    assert memory_files() == before


def there(value: Any) -> Any:
    """Pack as for a worker, and unpack as in one."""
    packed = _calls.pack(value, plain=False)
    return _calls.unpack(packed.data, packed.descriptors)


def back(value: Any) -> Any:
    """Pack as for the parent, and unpack as there."""
    packed = _calls.pack(value, plain=True)
    return _calls.unpack(packed.data, packed.descriptors)


# ---------------------------------------------------------------------------------------- large buffers, once


def test_an_array_is_written_once_per_parent(writes: list[int]) -> None:
    """Packed ten times, by itself or within something, an array is written once and has one memory file."""
    weights = np.arange(2.0 * ITEMS)
    before = memory_files()
    for value in [weights, {"w": weights}, [weights, weights], lambda: weights.sum() + 1] * 3:
        packed = _calls.pack(value, plain=False)
        assert len(packed.descriptors) == 1 or isinstance(value, list)
        assert len(packed.data) < 10_000
        _descriptors.close(*packed.descriptors)

    assert writes == [2 * MIB]
    assert memory_files() == before + 1


def test_views_of_the_same_memory_share_the_file(writes: list[int]) -> None:
    """The file belongs to the memory: two views of one array that come and go are one write."""
    weights = np.arange(2.0 * ITEMS)
    for _ in range(3):
        np.testing.assert_array_equal(there(weights[:]), weights)
        np.testing.assert_array_equal(there(weights.reshape(2, -1)), weights.reshape(2, -1))

    assert writes == [2 * MIB]


def test_small_buffers_stay_in_the_pickle(writes: list[int]) -> None:
    """Below 1 MiB there is no file; from 1 MiB on there is one."""
    small, large = np.zeros(MIB - 1, np.uint8), np.zeros(MIB, np.uint8)

    assert len(_calls.pack(small, plain=False).data) > MIB - 1
    assert writes == []
    np.testing.assert_array_equal(there(large), large)
    assert writes == [MIB]


def test_a_change_in_place_is_seen(writes: list[int]) -> None:
    """What travels is what the array holds at the call; the data of the two calls differ, so that nobody mixes them."""
    weights = np.zeros(ITEMS)
    first = _calls.pack(weights, plain=False)
    weights[-1] = 1.0
    second = _calls.pack(weights, plain=False)

    assert first.data != second.data
    assert writes == [MIB, MIB]
    assert _calls.unpack(first.data, first.descriptors)[-1] == 0.0, "sent before the change"
    assert _calls.unpack(second.data, second.descriptors)[-1] == 1.0
    assert memory_files() >= 1


def test_not_a_number_is_no_change(writes: list[int]) -> None:
    """Bytes are compared, not numbers: NaN equals itself, and -0.0 is not 0.0."""
    weights = np.full(ITEMS, np.nan)
    there(weights)
    there(weights)
    assert len(writes) == 1

    zeros = np.zeros(ITEMS)
    there(zeros)
    zeros[0] = -0.0
    assert np.signbit(there(zeros)[0])


def test_the_file_is_gone_with_its_array() -> None:
    """When the array dies its file is closed; a new array at the same address is not mistaken for it."""
    before = memory_files()
    for number in range(5):
        weights = np.full(ITEMS, float(number))
        assert there(weights)[0] == number
        assert memory_files() == before + 1
        del weights
        gc.collect()
        assert memory_files() == before


def test_a_file_outlives_its_array_while_it_travels() -> None:
    """An array may die between packing and unpacking."""
    packed = _calls.pack(np.full(ITEMS, 7.0), plain=False)
    gc.collect()
    np.full(ITEMS, 8.0)

    assert _calls.unpack(packed.data, packed.descriptors)[0] == 7.0


def test_threads_that_pack_one_array_write_it_once(writes: list[int]) -> None:
    """Eight study threads with one data set make one file."""
    weights = np.arange(4.0 * ITEMS)
    start, sums = threading.Barrier(8), []

    def pack() -> None:
        start.wait(30)
        sums.append(float(there(weights).sum()))

    threads = [threading.Thread(target=pack) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert sums == [float(weights.sum())] * 8
    assert writes == [4 * MIB]


def test_more_large_arrays_than_descriptors() -> None:
    """150 large arrays in one value: those for which there is no descriptor travel in the pickle."""
    arrays = [np.full(MIB, number, np.uint8) for number in range(_frames.MAX_DESCRIPTORS + 22)]
    packed = _calls.pack(arrays, plain=False)
    assert len(packed.descriptors) == _frames.MAX_DESCRIPTORS

    again = _calls.unpack(packed.data, packed.descriptors)
    assert [int(one[-1]) for one in again] == list(range(150))


def test_results_are_not_kept(writes: list[int]) -> None:
    """A worker's answer is written for this one way: no file stays behind."""
    result = np.arange(1.0 * ITEMS)
    before = memory_files()
    for _ in range(2):
        np.testing.assert_array_equal(back(result), result)

    assert memory_files() == before
    assert len(writes) == 2


def test_a_value_that_fails_half_way_leaves_nothing_open() -> None:
    """The buffers that were written before the error are closed again."""
    weights = np.zeros(ITEMS)
    there(weights)
    before = memory_files()
    for plain in (False, True):
        with pytest.raises(TypeError, match="lock"):
            _calls.pack([weights, threading.Lock()], plain=plain)

    assert memory_files() == before


class Buffered:
    """Gives its bytes out of band, as data frames of other libraries do."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return bytes, (pickle.PickleBuffer(self.content),)


def array_of_bytes(data: bytes) -> Any:
    """Make an array of the standard library."""
    return array.array("B", data)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, array_of_bytes])
def test_buffers_that_are_no_arrays(kind: Callable[[bytes], Any]) -> None:
    """Large out-of-band buffers of any owner travel, also of one that has no weak references."""
    assert there(Buffered(kind(b"abcd" * MIB))) == b"abcd" * MIB
    assert back(Buffered(kind(b"abcd" * MIB))) == b"abcd" * MIB


# ---------------------------------------------------------------------------------------- arrays of each kind


def test_layouts_survive() -> None:
    """C order, Fortran order, transposed, sliced, reversed, empty and scalar arrays arrive equal, in their layout."""
    base = np.arange(4.0 * ITEMS).reshape(2048, -1)
    fortran = np.asfortranarray(base)
    for one in (base, fortran, base.T, base[::2], base[:, ::-1], base[:0], np.float32(3), np.array(5)):
        for again in (there(one), back(one)):
            np.testing.assert_array_equal(again, one)
            assert again.dtype == one.dtype
    assert there(fortran).flags.f_contiguous
    assert not there(fortran).flags.c_contiguous


@pytest.mark.parametrize("dtype", ["f2", "c16", "?", ">f8", "i1", "M8[s]", "U3", ml_dtypes.bfloat16, "f8,i4"])
def test_types_survive(dtype: Any) -> None:
    """Large arrays of any element type arrive as they were."""
    one = np.zeros(2 * MIB, dtype)

    for again in (there(one), back(one)):
        assert again.dtype == one.dtype
        assert again.tobytes() == one.tobytes()


def test_arrays_stay_writable_and_private() -> None:
    """Who gets an array may write to it; the sender, and the next receiver, do not see that."""
    weights = np.zeros(ITEMS)
    first = there(weights)
    first[:] = 1.0

    assert weights.sum() == 0.0
    assert there(weights).sum() == 0.0
    assert first.sum() == ITEMS


def test_read_only_arrays_stay_read_only() -> None:
    """An array that its owner locked arrives locked, large or small."""
    for size in (10, ITEMS):
        weights = np.zeros(size)
        weights.flags.writeable = False
        for again in (there(weights), back(weights)):
            assert not again.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                again[0] = 1.0


def test_an_array_of_objects() -> None:
    """Object arrays have no buffer, and travel with what they hold."""
    one = np.array([1, "two", np.zeros(ITEMS)], dtype=object)

    assert there(one)[1] == "two"
    assert there(one)[2].nbytes == MIB


def test_identity_within_a_value_survives() -> None:
    """Two names for one array are still one array there."""
    weights = np.zeros(ITEMS)
    first, second = there([weights, weights])

    assert first is second


# ---------------------------------------------------------------------------------------- JAX values


def test_jax_values_become_numpy(run_python: Callable[..., Any]) -> None:
    """On the way to the parent arrays, bfloat16 and keys, nested ones too, are NumPy: reading them starts no JAX."""
    made = run_python(
        """
        import sys, dataclasses, collections
        import jax, jax.numpy as jnp, numpy as np
        from jaxguard import _calls
        Point = collections.namedtuple("Point", "x y")
        value = {
            "array": jnp.arange(3.0),
            "bf16": jnp.ones(4, jnp.bfloat16),
            "old key": jax.random.PRNGKey(7),
            "new key": jax.random.key(7),
            "scalar": jnp.float32(2.5),
            "nested": [(jnp.zeros((2, 2)), {"deep": jnp.int32(1)})],
            "closure": (lambda x: lambda: x)(jnp.ones(2)),
            "large": jnp.zeros(1 << 19),
            "numpy": np.float64(1.5),
        }
        packed = _calls.pack(value, plain=True)
        assert len(packed.descriptors) == 1
        again = _calls.unpack(packed.data, packed.descriptors)
        for name, one in again.items():
            if name in {"nested", "closure"}:
                continue
            print(name, type(one).__module__.split(".")[0], one.dtype, one.shape)
        print("nested", type(again["nested"][0][0]).__name__, type(again["nested"][0][1]["deep"]).__name__)
        print("closure", type(again["closure"]()).__name__)
        assert (again["new key"] == np.asarray(value["old key"])).all()
        assert (again["array"] == [0, 1, 2]).all()
        sys.stdout.flush()
        data = _calls.pack({**value, "large": 0}, plain=True).data
        open(sys.argv[1], "wb").write(data)
    """.replace("\n        ", "\n"),
        args=["plain.bin"],
    ).check()

    assert made.stdout.splitlines() == [
        "array numpy float32 (3,)",
        "bf16 numpy bfloat16 (4,)",
        "old key numpy uint32 (2,)",
        "new key numpy uint32 (2,)",
        "scalar numpy float32 ()",
        "large numpy float32 (524288,)",
        "numpy numpy float64 ()",
        "nested ndarray ndarray",
        "closure ndarray",
    ]

    read = run_python(
        """
        import sys
        from jaxguard import _calls, _jax_state
        value = _calls.unpack(open("plain.bin", "rb").read(), [])
        assert value["array"].tolist() == [0, 1, 2]
        print(_jax_state.started(), "jax" in sys.modules)
    """.replace("\n        ", "\n")
    ).check()
    assert read.stdout == "False False\n"


def test_values_without_jax() -> None:
    """What is reported to the trial is a number: a JAX scalar's; other values are left as they are."""
    for value in (1, 1.5, "text", None, np.float32(2), [1]):
        assert _calls.without_jax(value) is value


# ---------------------------------------------------------------------------------------- functions and code


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """Give a function that makes an importable module of some code."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str) -> types.ModuleType:
        import importlib

        name = f"user_{len(list(tmp_path.iterdir()))}_{os.getpid()}"
        (tmp_path / f"{name}.py").write_text(code)
        importlib.invalidate_caches()
        made = importlib.import_module(name)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    return make


DECORATED = """
import functools
def wrap(function):
    @functools.wraps(function)
    def wrapper(*args):
        return "wrapped", function(*args)
    return wrapper
def hide(function):
    return lambda *args: function(*args)

def plain(): return "plain"
@wrap
def once(): return "once"
@wrap
@wrap
def twice(): return "twice"
@hide
def hidden(): return "hidden"
class Model:
    class Inner:
        @staticmethod
        def step(): return "inner"
    def method(self): return "method"
    @classmethod
    def of_class(cls): return "class"
    @wrap
    def wrapped(self): return "wrapped method"
def make():
    def local(): return "local"
    return local
"""


def test_references_to_importable_functions(module: Callable[[str], types.ModuleType]) -> None:
    """A function is named by where it is and by how many wrappers must be taken off, as deep as it lies."""
    user = module(DECORATED)
    cases = [
        (user.plain, "plain", 0),
        (user.once, "once", 0),
        (user.once.__wrapped__, "once", 1),
        (user.twice.__wrapped__, "twice", 1),
        (user.twice.__wrapped__.__wrapped__, "twice", 2),
        (user.Model.method, "Model.method", 0),
        (user.Model.wrapped.__wrapped__, "Model.wrapped", 1),
        (user.Model.Inner.step, "Model.Inner.step", 0),
    ]
    for function, qualname, depth in cases:
        found = _calls.reference(function)
        assert found == (user.__name__, qualname, depth)
        assert found.resolve() is function


def test_what_has_no_reference(module: Callable[[str], types.ModuleType]) -> None:
    """Lambdas, local functions, bound methods and functions that their name does not lead to travel by value."""
    user = module(DECORATED)
    main = types.ModuleType("__main__")
    exec("def f(): ...", vars(main))
    by_hand = types.ModuleType("made_by_hand")
    exec("def f(): ...", vars(by_hand))
    sys.modules["made_by_hand"] = by_hand
    try:
        for function in (
            lambda: 0,
            user.make(),
            user.hidden,
            user.Model().method,
            user.Model.of_class,
            main.f,
            by_hand.f,
        ):
            assert _calls.reference(function) is None
    finally:
        del sys.modules["made_by_hand"]

    stale = user.plain
    user.plain = user.once
    assert _calls.reference(stale) is None, "the name means another function by now"


def test_code_keeps_its_file_name() -> None:
    """Functions that travel by value keep file name and line, at each depth, for tracebacks and debuggers."""

    def outer() -> Any:
        def inner() -> Any:
            numbers = lambda: (1, 2)  # noqa: E731 - code within code within code
            return list(numbers())

        return inner

    again = there(outer)
    assert again is not outer
    code = again.__code__
    assert (code.co_filename, code.co_firstlineno) == (__file__, outer.__code__.co_firstlineno)
    assert again()() == [1, 2]
    assert again().__code__.co_filename == __file__


def test_cells_of_a_notebook_bring_their_lines() -> None:
    """The source of code that is in no file travels with it."""
    import linecache

    name = "<ipython-input-1-abc>"
    source = "def cell():\n    return 1 / 0\n"
    namespace: dict[str, Any] = {"__name__": "__main__"}
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    try:
        exec(compile(source, name, "exec"), namespace)
        packed = _calls.pack(namespace["cell"], plain=False)
        del linecache.cache[name]
        again = _calls.unpack(packed.data, packed.descriptors)

        assert again.__code__.co_filename == name
        assert linecache.getline(name, 2) == "    return 1 / 0\n"
    finally:
        linecache.cache.pop(name, None)


def test_another_reduction_for_an_object() -> None:
    """`replace` puts something else in an object's place, wherever it lies: so trials travel as paths."""

    class Trial:
        def __reduce__(self) -> Any:
            message = "a trial must not travel"
            raise TypeError(message)

    def replace(obj: object) -> Any:
        return (str, ("a path",)) if isinstance(obj, Trial) else None

    trial = Trial()
    packed = _calls.pack([trial, {"deep": trial}, lambda: trial], plain=False, replace=replace)
    first, second, third = _calls.unpack(packed.data, packed.descriptors)

    assert (first, second["deep"], third()) == ("a path",) * 3


def test_a_forked_child_starts_anew(run_python: Callable[..., Any]) -> None:
    """A fork keeps none of the parent's memory files, and can pack the same array by itself."""
    run_python(
        """
        import os, sys
        import numpy as np
        from jaxguard import _calls, _descriptors
        weights = np.arange(1.0 * (1 << 18))
        held = _calls.pack(weights, plain=False)
        count = lambda: sum("memfd:jaxguard" in os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")
                            if os.path.exists(f"/proc/self/fd/{n}") or True and os.path.islink(f"/proc/self/fd/{n}"))
        assert count() == 2, count()
        child = os.fork()
        if child == 0:
            try:
                assert count() == 0, count()
                packed = _calls.pack(weights, plain=False)
                assert (_calls.unpack(packed.data, packed.descriptors) == weights).all()
                assert count() == 1, count()
            except BaseException as error:
                print(repr(error), flush=True)
                os._exit(1)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert (_calls.unpack(held.data, held.descriptors) == weights).all()
        assert count() == 1, count()
    """.replace("\n        ", "\n")
    ).check()
