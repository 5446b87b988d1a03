"""What travels to a worker and back: functions, arrays, exceptions; and what is said about things that cannot."""

from __future__ import annotations

import functools
import importlib
import os
import textwrap
import threading
import traceback
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jaxguard

if TYPE_CHECKING:
    import pathlib
    import types
    from collections.abc import Callable

MIB = 1 << 20


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], types.ModuleType]:
    """Give a function that makes an importable module of some code."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(code: str) -> types.ModuleType:
        name = f"user_{uuid.uuid4().hex[:8]}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return importlib.import_module(name)

    return make


def next_call_works(slots: Callable[[int], None], guard: Callable[..., Any] = jaxguard.isolated_jax_worker) -> bool:
    """Say whether another call gets the only slot and its answer."""
    slots(1)
    return bool(guard(os.getpid, slot_timeout=30)() != os.getpid())


# ---------------------------------------------------------------- importable functions, by name

BY_NAME = """
    import functools
    import os
    import threading
    from jaxguard import isolated_jax_worker

    LOCK = threading.Lock()
    DATA = bytearray(50_000_000)
    IMPORTED_BY = os.getpid()


    class Heavy:
        def __reduce__(self):
            raise TypeError("module data must not travel")


    HEAVY = Heavy()


    def logged(function):
        @functools.wraps(function)
        def wrapper(*args):
            return ["logged", *function(*args)]
        return wrapper


    @isolated_jax_worker
    def plain(x):
        with LOCK:
            DATA[0] += 1
            return [x, DATA[0], type(HEAVY).__name__, IMPORTED_BY == os.getpid()]


    @isolated_jax_worker
    @logged
    def guard_outside(x):
        return [x, DATA[0], type(LOCK).__name__]


    @logged
    @isolated_jax_worker
    def guard_inside(x):
        return [x, DATA[0], type(LOCK).__name__]


    @logged
    @logged
    @isolated_jax_worker(reuse=True)
    @logged
    @logged
    def deep(x):
        return [x, DATA[0], type(LOCK).__name__]


    class Model:
        def __init__(self, width):
            self.width = width

        @isolated_jax_worker
        def train(self, x):
            with LOCK:
                return self.width * x

        @classmethod
        @isolated_jax_worker
        def of_class(cls, x):
            return cls.__name__, x

        @staticmethod
        @isolated_jax_worker
        def static(x):
            return x, type(LOCK).__name__


    def unguarded(x):
        with LOCK:
            return x + 1
"""


def test_importable_functions_travel_by_name(module: Callable[[str], types.ModuleType]) -> None:
    """Neither a module's lock nor its data travel; every decorator of the stack acts once, where it stands."""
    user = module(BY_NAME)

    assert user.plain(3) == [3, 1, "Heavy", True]
    assert user.plain(3) == [3, 1, "Heavy", True], "a fresh process has fresh module data"
    assert user.guard_outside(3) == ["logged", 3, 0, "lock"]
    assert user.guard_inside(3) == ["logged", 3, 0, "lock"]
    assert user.deep(3) == ["logged"] * 4 + [3, 0, "lock"]
    assert user.DATA[0] == 0


def test_methods_of_importable_classes(module: Callable[[str], types.ModuleType]) -> None:
    """A guarded method takes its object along; static and class methods work in the usual order."""
    user = module(BY_NAME)

    assert user.Model(4).train(3) == 12
    assert user.Model.of_class(3) == ("Model", 3)
    assert user.Model.static(3) == (3, "lock")
    assert jaxguard.isolated_jax_worker(user.unguarded)(3) == 4


def test_import_by_name_in_each_way(guard: Callable[..., Any], module: Callable[[str], types.ModuleType]) -> None:
    """A function of an importable module travels by name to forked, exec'd and warm workers."""
    user = module(BY_NAME)
    guarded = guard(user.unguarded)

    assert [guarded(1), guarded(2)] == [2, 3]


def test_functions_of_one_name_are_not_mixed_up(fresh_guard: Callable[..., Any]) -> None:
    """What was decorated runs, though the name means something else by now."""

    @fresh_guard
    def objective() -> str:
        return "first"

    first = objective

    @fresh_guard
    def objective() -> str:
        return "second"

    assert (first(), objective()) == ("first", "second")


def test_a_shadowed_module_function(module: Callable[[str], types.ModuleType]) -> None:
    """A function whose name in its module means another one now travels by value."""
    user = module("""
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker(reuse=True)
        def objective():
            return "first"

        first = objective

        @isolated_jax_worker(reuse=True)
        def objective():
            return "second"
    """)

    assert (user.first(), user.objective()) == ("first", "second")


# ---------------------------------------------------------------- callables, by value


class Scaler:
    """A callable object with state and a method."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, number: int) -> int:
        """Scale."""
        return self.factor * number

    def method(self, number: int) -> int:
        """Scale too."""
        return self.factor * number


def scale(factor: int, number: int) -> int:
    """Scale, as a plain function."""
    return factor * number


def scaling_closure(factor: int) -> Callable[[int], int]:
    """Give a function that remembers its factor."""

    def closure(number: int) -> int:
        return factor * number

    return closure


CALLABLES = {
    "lambda": lambda number: 3 * number,
    "partial": functools.partial(scale, 3),
    "partial of a lambda": functools.partial(lambda factor, number: factor * number, 3),
    "callable object": Scaler(3),
    "bound method": Scaler(3).method,
    "closure": scaling_closure(3),
    "builtin": (3).__mul__,
}


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("kind", CALLABLES)
def test_any_callable_travels(kind: str, reuse: bool) -> None:  # noqa: FBT001
    """Lambdas, partials, callable objects, bound methods, closures and builtins can be guarded."""
    guarded = jaxguard.isolated_jax_worker(CALLABLES[kind], reuse=reuse)

    assert [guarded(14), guarded(number := 2), number] == [42, 6, 2]


def test_captures_of_every_kind(guard: Callable[..., Any]) -> None:
    """A closure may hold other callables, jitted and trial-jitted functions, and use them in each kind of worker."""
    import jax

    jitted = jax.jit(lambda x: x + 1)
    tried = jaxguard.trial_jit(lambda x, lr: x * lr, traced={"lr": 2.0})
    held = dict(CALLABLES)

    @guard
    def objective(number: int) -> tuple[list[int], float, float]:
        return [function(number) for function in held.values()], float(jitted(number)), float(tried(number))

    assert objective(2) == ([6] * len(CALLABLES), 3.0, 4.0)


JITTED = """
    import jax
    import jax.numpy as jnp
    from jaxguard import isolated_jax_worker, trial_jit

    @jax.jit
    def step(x):
        print("traced step")
        return x * 2

    @trial_jit
    def tried(x):
        print("traced tried")
        return x * 3

    with_options = jax.jit(lambda x, n: x * n, static_argnums=1)
    gradient = jax.jit(jax.grad(lambda x: x ** 2))

    def objective(x):
        return [float(f(x)) for f in (step, tried, gradient)] + [float(with_options(x, 4))]

    by_decorator = isolated_jax_worker(objective)
    by_lambda = isolated_jax_worker(lambda x: objective(x))
    warm = isolated_jax_worker(objective, reuse=True)
"""


def test_module_level_jitted_functions(
    module: Callable[[str], types.ModuleType], capfd: pytest.CaptureFixture[str]
) -> None:
    """Jitted functions of a module work in the worker, and a warm worker traces them once."""
    user = module(JITTED)
    expected = [4.0, 6.0, 4.0, 8.0]

    assert user.by_decorator(2.0) == expected
    assert user.by_lambda(2.0) == expected
    capfd.readouterr()
    assert [user.warm(2.0), user.warm(2.0), user.warm(2.0)] == [expected] * 3
    assert capfd.readouterr().out.splitlines() == ["traced step", "traced tried"]


def test_jitted_functions_of_a_script(run_python: Callable[..., Any]) -> None:
    """The same in `__main__`, where functions travel by value: they are unpickled, and traced, once per worker."""
    code = textwrap.dedent(JITTED) + textwrap.dedent("""
        print(by_decorator(2.0))
        print(by_lambda(2.0))
        print("warm")
        print(warm(2.0), warm(2.0), warm(2.0))
        from jax._src import xla_bridge
        print("jax started:", xla_bridge.backends_are_initialized())
    """)

    lines = run_python(code).check().stdout.splitlines()

    traced, result = ["traced step", "traced tried"], "[4.0, 6.0, 4.0, 8.0]"
    assert lines == [
        *(*traced, result) * 2,
        "warm",
        *traced,
        " ".join([result] * 3),
        "jax started: False",
    ]


# ---------------------------------------------------------------- exceptions


def test_an_exception_arrives_as_its_own_class(guard: Callable[..., Any]) -> None:
    """A class of one's own, even a local one, can be caught; its text, arguments, state and notes arrive."""

    class MyError(Exception):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.code = 7

    @guard
    def fails() -> None:
        error = MyError("no luck")
        error.__dict__["__notes__"] = ["a note"]
        raise error

    for _ in range(2):
        with pytest.raises(MyError, match="no luck") as caught:
            fails()
        assert caught.value.args == ("no luck",)
        assert caught.value.code == 7
        assert caught.value.__notes__ == ["a note"]


def test_the_cause_shows_where_it_happened(guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """The traceback that the caller prints has the worker's frames, with file, line number and source line."""
    slots(1)

    def innermost(number: int) -> float:
        return number / 0  # the guilty line

    @guard
    def fails() -> float:
        try:
            return innermost(3)
        except ZeroDivisionError as error:
            message = "training failed"
            raise ValueError(message) from error

    with pytest.raises(ValueError, match="training failed") as caught:
        fails()

    assert caught.value.__cause__ is not None
    text = "".join(traceback.format_exception(caught.value))
    line = innermost.__code__.co_firstlineno + 1
    assert f'File "{__file__}", line {line}, in innermost' in text
    assert "return number / 0  # the guilty line" in text
    assert "ZeroDivisionError" in text


def test_tracebacks_of_scripts(run_python: Callable[..., Any]) -> None:
    """Functions and exception classes of `__main__`: caught by class, shown with file, line number and source line."""
    code = textwrap.dedent("""
        import sys
        from jaxguard import isolated_jax_worker

        class MyError(Exception):
            pass

        @isolated_jax_worker
        def fails():
            raise MyError("first")  # line of the first

        @isolated_jax_worker(reuse=True)
        def fails_warm():
            raise MyError("second")  # line of the second

        try:
            fails()
        except MyError as error:
            print("caught", error)
        fails_warm()
    """)

    done = run_python(code)

    assert done.stdout == "caught first\n"
    assert done.returncode == 1
    assert 'raise MyError("second")  # line of the second' in done.stderr
    assert "script_" in done.stderr
    assert "line 14, in fails_warm" in done.stderr
    assert done.stderr.splitlines()[-1] == "MyError: second" or done.stderr.rstrip().endswith("MyError: second")


class NeedsTwo(Exception):
    """An exception class as people write them; it does not unpickle."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


class HoldsLock(Exception):
    """Has an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


class OnlyInTheWorker(Exception):
    """Unpickles in one process only."""

    def __init__(self, pid: int) -> None:
        super().__init__(pid)
        if os.getpid() != pid:
            message = "not here"
            raise RuntimeError(message)

    def __str__(self) -> str:
        return "only there"


class BadText(Exception):
    """Cannot even be printed."""

    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("make", "name", "text"),
    [
        (lambda: NeedsTwo("spill", "aisle 3"), "NeedsTwo", "spill at aisle 3"),
        (HoldsLock, "HoldsLock", "held"),
        (lambda: OnlyInTheWorker(os.getpid()), "OnlyInTheWorker", "only there"),
        (BadText, "BadText", ""),
    ],
    ids=["two arguments", "holds a lock", "not in the parent", "no text"],
)
@pytest.mark.parametrize("reuse", [False, True])
def test_an_exception_that_cannot_travel(
    slots: Callable[[int], None],
    make: Callable[[], Exception],
    name: str,
    text: str,
    reuse: bool,  # noqa: FBT001
) -> None:
    """`RemoteError` stands for it, with type, text and traceback; the slot is free and the next call works."""

    def raise_it() -> None:
        raise make()

    fails = jaxguard.isolated_jax_worker(raise_it, reuse=reuse)

    with pytest.raises(jaxguard.RemoteError) as caught:
        fails()

    assert caught.value.type.endswith(name)
    assert text in caught.value.text
    assert text in str(caught.value)
    assert name in str(caught.value)
    assert "in raise_it" in caught.value.traceback
    assert next_call_works(slots, functools.partial(jaxguard.isolated_jax_worker, reuse=reuse))


@pytest.mark.parametrize("reuse", [False, True])
def test_an_ordinary_tracing_error(reuse: bool, slots: Callable[[int], None]) -> None:  # noqa: FBT001
    """`if x > 0` under jit: the user sees JAX's own words, and other trials are unharmed."""
    import jax

    guard = functools.partial(jaxguard.isolated_jax_worker, reuse=reuse)

    @guard
    def objective(x: float) -> Any:
        @jax.jit
        def step(x: Any) -> Any:
            return x if x > 0 else -x

        return step(x) if x else 0.0

    with pytest.raises((jax.errors.TracerBoolConversionError, jaxguard.RemoteError)) as caught:
        objective(1.0)

    text = "".join(traceback.format_exception(caught.value))
    assert "TracerBoolConversionError" in text
    assert "Attempted boolean conversion of traced array" in str(caught.value)
    assert "return x if x > 0 else -x" in text
    assert objective(0.0) == 0.0
    assert next_call_works(slots, guard)


# ---------------------------------------------------------------- large arrays


def test_arrays_arrive_writable_and_private(guard: Callable[..., Any]) -> None:
    """Arguments and captures can be written in the worker; the parent does not see it."""
    argument, capture = np.arange(MIB, dtype=float), np.ones((1024, 1024))

    @guard
    def change(array: np.ndarray) -> tuple[float, float]:
        array += 1
        capture[:] = array[-1]
        return float(array[0]), float(capture.mean())

    assert change(argument) == (1.0, float(MIB))
    assert argument[0] == 0
    assert capture[0, 0] == 1


def test_a_change_between_two_calls_is_seen(guard: Callable[..., Any]) -> None:
    """What the worker gets is what the array holds at the call, in argument and capture."""
    argument, capture = np.zeros(MIB), np.zeros(MIB)

    @guard
    def read(array: np.ndarray) -> tuple[float, float]:
        return float(array[-1]), float(capture[-1])

    seen = [read(argument)]
    for number in (1.0, 2.0):
        argument[-1] = number
        capture[-1] = 10 * number
        seen.append(read(argument))

    assert seen == [(0.0, 0.0), (1.0, 10.0), (2.0, 20.0)]


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(2 * MIB, dtype=np.float32).reshape(2048, 1024)),
        np.arange(4 * MIB, dtype=np.int32)[::2],
        np.zeros((0, 5)),
        np.array(3.5, dtype=np.float32),
        np.zeros(MIB, dtype=[("a", "i4"), ("b", "f8")]),
        np.array([{"a": 1}, None, "text"], dtype=object),
        np.full(3 * MIB, True),
        np.full(MIB, "2026-01-01", dtype="datetime64[D]"),
    ],
    ids=["fortran", "strided", "empty", "scalar", "records", "objects", "bools", "dates"],
)
def test_arrays_of_every_layout(fresh_guard: Callable[..., Any], array: np.ndarray) -> None:
    """An array of any layout and type makes the way there and back."""
    back = fresh_guard(lambda given: [given, {"again": given}])(array)

    for result in (back[0], back[1]["again"]):
        assert result.dtype == array.dtype
        np.testing.assert_array_equal(result, array)
        assert result.flags.writeable


def test_large_results(guard: Callable[..., Any]) -> None:
    """Results with large arrays, nested and from JAX, arrive as NumPy arrays of the caller's own."""

    @guard
    def make(number: int) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp

        return {
            "numpy": np.full(MIB, number),
            "jax": [jnp.full((1024, 1024), number, dtype=jnp.float32)],
            "key": jax.random.key(number),
            "small": jnp.float32(number),
        }

    for number in (1, 2):
        made = make(number)
        made["numpy"][0] += 1
        assert (made["numpy"][0], made["numpy"][-1]) == (number + 1, number)
        assert type(made["jax"][0]) is np.ndarray
        assert made["jax"][0].dtype == np.float32
        assert made["jax"][0].sum() == number * MIB
        assert type(made["key"]) is np.ndarray
        assert made["small"] == number


def test_a_large_capture_travels_once_per_parent(fresh_guard: Callable[..., Any]) -> None:
    """Two workers, of two guards, map one memory file, and their own memory does not grow by the array's size."""
    size = 64 * MIB
    capture = np.ones(size, dtype=np.uint8)

    def own_memory() -> int:
        with open("/proc/self/smaps_rollup", encoding="ascii") as rollup:
            return 1024 * next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:"))

    def look() -> tuple[int, str, int]:
        """Give a checksum, the file under the array, and this process's own memory after reading all of it."""
        total = int(capture.sum(dtype=np.int64))
        address = capture.ctypes.data
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= address < high:
                    device_and_inode = " ".join(line.split()[3:5])
        return total, device_and_inode, own_memory()

    before = fresh_guard(own_memory)()
    first, second = fresh_guard(look)(), fresh_guard(look, env={"OMP_DYNAMIC": "FALSE"})()

    assert first[0] == second[0] == size
    assert first[1] == second[1], "not the same file in both workers"
    assert not first[1].endswith(" 0"), "no file at all"
    assert first[2] - before < size // 2, "the array was copied into the worker's own memory"


# ---------------------------------------------------------------- what cannot be pickled


def captured_lock(guard: Callable[..., Any]) -> Any:
    """A lock in a closure."""
    my_lock = threading.Lock()

    @guard
    def my_objective() -> None:
        with my_lock:
            pass

    return my_objective


def captured_file(guard: Callable[..., Any]) -> Any:
    """An open file in a closure."""
    with open(os.devnull, encoding="ascii") as my_file:

        @guard
        def my_objective() -> str:
            return my_file.read()

    return my_objective


def captured_deep(guard: Callable[..., Any]) -> Any:
    """A lock in a container in a function that the objective calls."""
    settings = {"optimizer": [threading.Lock()]}

    def helper() -> Any:
        return settings["optimizer"]

    @guard
    def my_objective() -> Any:
        return helper()

    return my_objective


def default_value(guard: Callable[..., Any]) -> Any:
    """A lock as default of a parameter."""

    @guard
    def my_objective(my_lock: Any = threading.Lock()) -> Any:  # noqa: B008
        return my_lock

    return my_objective


def in_a_partial(guard: Callable[..., Any]) -> Any:
    """A lock bound by a partial."""

    def my_objective(my_lock: Any) -> Any:
        return my_lock

    return guard(functools.partial(my_objective, my_lock=threading.Lock()))


@pytest.mark.parametrize(
    ("build", "variable"),
    [
        (captured_lock, "my_lock"),
        (captured_file, "my_file"),
        (captured_deep, "settings"),
        (default_value, "my_lock"),
        (in_a_partial, "my_lock"),
    ],
)
def test_a_capture_that_cannot_travel(
    fresh_guard: Callable[..., Any], slots: Callable[[int], None], build: Callable[..., Any], variable: str
) -> None:
    """The error names the variable and the function; the slot is free and the next call works."""
    objective = build(fresh_guard)

    with pytest.raises(TypeError) as caught:
        objective()

    assert variable in str(caught.value)
    assert "my_objective" in str(caught.value)
    assert next_call_works(slots)


@pytest.mark.parametrize("reuse", [False, True])
def test_an_argument_that_cannot_travel(slots: Callable[[int], None], reuse: bool) -> None:  # noqa: FBT001
    """The error names the argument and the function, whether it was given by position or by name."""
    guard = functools.partial(jaxguard.isolated_jax_worker, reuse=reuse)

    @guard
    def my_objective(first: int, config: Any = None) -> int:
        return first if config is None else 0

    for args, kwargs, word in [((1, [threading.Lock()]), {}, "config"), ((1,), {"config": threading.Lock()}, "config")]:
        with pytest.raises(TypeError) as caught:
            my_objective(*args, **kwargs)
        assert word in str(caught.value)
        assert "my_objective" in str(caught.value)
        assert "lock" in str(caught.value)

    assert my_objective(3) == 3
    assert next_call_works(slots, guard)


@pytest.mark.parametrize("reuse", [False, True])
def test_a_result_that_cannot_travel(slots: Callable[[int], None], reuse: bool) -> None:  # noqa: FBT001
    """The error says that it is the result, of which function and of which type."""
    guard = functools.partial(jaxguard.isolated_jax_worker, reuse=reuse)

    @guard
    def my_objective() -> Any:
        return {"model": threading.Lock()}

    with pytest.raises(TypeError, match="result") as caught:
        my_objective()

    assert "my_objective" in str(caught.value)
    assert "lock" in str(caught.value)
    assert next_call_works(slots, guard)


def test_jax_objects_that_belong_to_their_process(run_python: Callable[..., Any]) -> None:
    """A captured `Mesh` or compiled executable: the error names it and says to make it inside the function."""
    code = textwrap.dedent("""
        import os

        import jax
        import numpy as np

        from jaxguard import isolated_jax_worker

        my_mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
        my_compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
        my_sharding = jax.sharding.NamedSharding(my_mesh, jax.sharding.PartitionSpec("x"))

        @isolated_jax_worker(slot_timeout=0)
        def uses_mesh():
            return my_mesh.shape

        @isolated_jax_worker(slot_timeout=0, reuse=True)
        def uses_compiled():
            return my_compiled(1.0)

        @isolated_jax_worker(slot_timeout=0)
        def uses_sharding():
            return my_sharding.spec

        @isolated_jax_worker(slot_timeout=0)
        def takes(argument):
            return argument

        @isolated_jax_worker(gpus=2, slot_timeout=0)
        def fine():
            return os.getpid()

        for name, call in {
            "my_mesh": uses_mesh,
            "my_compiled": uses_compiled,
            "my_sharding": uses_sharding,
            "argument": lambda: takes(my_mesh),
        }.items():
            function = call.__name__.replace("<lambda>", "takes")
            try:
                call()
            except TypeError as error:
                text = str(error)
                print(name, name in text, function in text, "the worker" in text)
            print(fine() != os.getpid())
    """)

    assert run_python(code).check().stdout.splitlines() == [
        *("my_mesh True True True", "True"),
        *("my_compiled True True True", "True"),
        *("my_sharding True True True", "True"),
        *("argument True True True", "True"),
    ]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_value_that_breaks_while_it_is_read(slots: Callable[[int], None], reuse: bool) -> None:  # noqa: FBT001
    """An argument that pickles but does not unpickle fails that call alone, with its own words."""
    guard = functools.partial(jaxguard.isolated_jax_worker, reuse=reuse)
    argument = FailsToUnpickle()

    @guard
    def my_objective(given: Any) -> int:
        return 0 if given else 1

    with pytest.raises(ValueError, match="cannot be built here"):
        my_objective(argument)

    assert my_objective(0) == 1
    assert next_call_works(slots, guard)


class FailsToUnpickle:
    """Pickles, and raises when it is read."""

    def __reduce__(self) -> Any:
        return _refuse, (os.getpid(),)


def _refuse(pid: int) -> None:
    message = f"cannot be built here, only in {pid}"
    raise ValueError(message)
