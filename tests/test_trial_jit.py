"""`trial_jit`: what `jax.jit` gives, built where it is called. The bodies run in workers: JAX never starts here."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
import types
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from jaxguard import isolated_jax_worker, trial_jit

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


def in_worker(body: Callable[..., None]) -> Callable[..., None]:
    """Run the body of a test in a worker."""

    @functools.wraps(body)
    def test(**parameters: Any) -> None:
        isolated_jax_worker(body)(**parameters)

    return test


class Traced:
    """A function that counts how often JAX traces it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.traces = 0
        self._call = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.traces += 1
        return self._call(*args, **kwargs)


def affine(x: Any, w: Any = 2.0, b: Any = 1.0, *, flag: bool = False) -> Any:
    """Scale and shift."""
    return x * w + b if not flag else x


# ---------------------------------------------------------------------------------------- equal to jax.jit


@pytest.mark.parametrize(
    "options",
    [{}, {"static_argnames": ("flag",)}, {"static_argnums": (1,)}, {"donate_argnums": (0,)}, {"inline": True}],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # JAX 0.6, of an int that becomes a float
@in_worker
def test_it_equals_jax_jit(options: dict[str, Any]) -> None:
    """Results and number of traces are `jax.jit`'s, call by call, with each option."""
    import jax
    import jax.numpy as jnp

    one, other = Traced(affine), Traced(affine)
    ours, theirs = trial_jit(one, **options), jax.jit(other, **options)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ((1.0,), {}),
        ((2.0,), {}),
        ((1,), {}),
        ((lambda: jnp.arange(3.0),), {}),
        ((lambda: jnp.arange(4.0),), {}),
        ((1.0, 3.0), {}),
        ((1.0, 4.0), {"b": 2.0}),
    ]
    if "static_argnames" in options:
        calls += [((1.0,), {"flag": True}), ((2.0,), {"flag": True}), ((1.0,), {"flag": False})]
    for args, kwargs in calls:
        a, b = (tuple(x() if callable(x) else x for x in args) for _ in range(2))
        assert jnp.array_equal(ours(*a, **kwargs), theirs(*b, **kwargs))
        assert one.traces == other.traces, (args, kwargs)
        assert [getattr(x, "is_deleted", bool)() for x in a] == [getattr(x, "is_deleted", bool)() for x in b]
    assert one.traces >= 4


@in_worker
def test_traced_arguments_are_arguments() -> None:
    """`trial_jit(f, traced=t)(*a)` equals `jax.jit(f)(*a, **t)`: scalars and pytrees are traced, into one program."""
    import jax
    import jax.numpy as jnp

    def step(params: Any, *, lr: Any, decay: Any) -> Any:
        assert isinstance(lr, jax.core.Tracer)
        assert isinstance(decay["a"], jax.core.Tracer)
        return {name: value - lr * decay["a"] * value for name, value in params.items()}

    params = {"w": jnp.ones(3)}
    programs, constants = set(), set()
    for lr in (0.1, 0.2, 0.3):
        traced = {"lr": lr, "decay": {"a": jnp.float32(lr)}}
        mine = trial_jit(step, traced=traced)
        assert jnp.array_equal(mine(params)["w"], jax.jit(step)(params, **traced)["w"])
        programs.add(mine.lower(params).as_text())
        constants.add(jax.jit(lambda x, lr=lr: x * lr).lower(1.0).as_text())
    assert len(programs) == 1, "all trials share one program"
    assert len(constants) == 3, "as they would not with a constant"


@in_worker
def test_traced_arguments_do_not_retrace() -> None:
    """Step after step of one trial is one trace; a call may still give the other keyword arguments."""
    counted = Traced(lambda x, lr, flag=1.0: x - lr * flag)
    step = trial_jit(counted, traced={"lr": 0.5})
    x: Any = 1.0
    for _ in range(5):
        x = step(x)
    assert counted.traces <= 2  # a Python float first, then JAX's own
    assert float(step(1.0, flag=2.0)) == 0.0


@in_worker
def test_mistakes_are_those_of_a_call() -> None:
    """An argument given twice, one too many, or a static one that is traced: the errors are Python's and JAX's."""
    step = trial_jit(lambda x, lr: x * lr, traced={"lr": 0.5})
    for bad in (lambda: step(1.0, lr=2.0), lambda: step(1.0, 2.0), step, lambda: step(1.0, other=1)):
        with pytest.raises(TypeError):
            bad()
    assert float(step(4.0)) == 2.0, "and the step still works"


@in_worker
def test_the_other_entries() -> None:
    """`lower`, `trace`, `eval_shape` and `clear_cache` are `jax.jit`'s, traced arguments included."""
    import jax

    counted = Traced(affine)
    step = trial_jit(counted, traced={"w": 3.0})
    shape = jax.ShapeDtypeStruct((2,), "float32")

    assert step.eval_shape(shape).shape == (2,)
    assert step.trace(shape).jaxpr.in_avals[0].shape == (2,)
    assert step.lower(shape).compile()(jax.numpy.ones(2), w=3.0).tolist() == [4.0, 4.0]
    assert step.lower(shape).as_text() == jax.jit(affine).lower(shape, w=3.0).as_text()

    step(1.0)
    before = counted.traces
    step(2.0)
    assert counted.traces == before
    step.clear_cache()
    step(3.0)
    assert counted.traces == before + 1
    trial_jit(affine).clear_cache()  # nothing was built: nothing to do


@in_worker
def test_transformations_around_and_inside() -> None:
    """`grad`, `vmap`, `scan` and `jit` take it as they take any function, and it takes them."""
    import jax
    import jax.numpy as jnp

    @trial_jit
    def square(x: Any) -> Any:
        return x * x

    scaled = trial_jit(lambda x, w: jnp.sum(x) * w, traced={"w": 3.0})
    body = trial_jit(lambda carry, x: (carry + x, carry * x))

    assert float(jax.grad(square)(3.0)) == 6.0
    assert jax.vmap(square)(jnp.arange(3.0)).tolist() == [0.0, 1.0, 4.0]
    assert jax.grad(scaled)(jnp.ones(2)).tolist() == [3.0, 3.0]
    assert float(jax.lax.scan(body, 0.0, jnp.arange(4.0))[0]) == 6.0
    assert float(jax.jit(square)(4.0)) == 16.0
    assert float(trial_jit(jax.grad(square))(3.0)) == 6.0
    assert float(trial_jit(jax.jit(square))(3.0)) == 9.0
    assert jax.value_and_grad(square)(2.0)[1] == 4.0


def test_shardings() -> None:
    """Shardings are `jax.jit`'s: over the devices of the slot."""

    def sharded() -> list[Any]:
        import jax
        import jax.numpy as jnp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        mesh = Mesh(jax.devices(), ("batch",))
        split = NamedSharding(mesh, PartitionSpec("batch"))
        step = trial_jit(lambda x, w: x * w, traced={"w": 3.0}, out_shardings=split)
        result = step(jax.device_put(jnp.arange(4.0), split))
        return [len(result.sharding.device_set), result.sharding == split, result.tolist()]

    assert isolated_jax_worker(gpus=2)(sharded)() == [2, True, [0.0, 3.0, 6.0, 9.0]]


# ---------------------------------------------------------------------------------------- what it wraps


class Model:
    """Has steps as methods."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    @functools.partial(trial_jit, static_argnums=0)
    def step(self, x: float) -> float:
        """Scale."""
        return self.scale * x

    @staticmethod
    @trial_jit
    def static(x: float) -> float:
        return x + 1

    @trial_jit(static_argnums=0)
    def other(self, x: float) -> float:
        return self.scale - x


@in_worker
def test_methods() -> None:
    """As a method it gets its instance; on the class it is the function; static methods work."""
    model = Model(3.0)

    assert float(model.step(2.0)) == 6.0
    assert float(Model.step(model, 2.0)) == 6.0  # type: ignore[call-arg]
    assert float(Model(4.0).step(2.0)) == 8.0
    assert float(model.other(1.0)) == 2.0
    assert float(model.static(1.0)) == float(Model.static(1.0)) == 2.0
    assert model.step.lower(2.0).compile()(2.0) == 6.0  # type: ignore[attr-defined]
    assert model.step.eval_shape(2.0).shape == ()  # type: ignore[attr-defined]
    assert float(pickle.loads(cloudpickle.dumps(model)).step(2.0)) == 6.0


def test_a_bound_step_keeps_name_and_signature() -> None:
    """What `model.step` says of itself is what a bound method says."""
    step = Model(1.0).step

    assert (step.__name__, step.__doc__) == ("step", "Scale.")
    assert str(inspect.signature(step)) == "(x: 'float') -> 'float'"


@in_worker
def test_a_bound_step_is_itself() -> None:
    """Two looks at `model.step` compare equal, as bound methods do: so what JAX cached for one serves the other."""
    import jax

    model = Model(2.0)
    assert model.step == model.step
    assert hash(model.step) == hash(model.step)
    assert model.step != Model(2.0).step

    traces = []

    def outer(x: Any, step: Any) -> Any:
        traces.append(1)
        return step(x)

    jitted = jax.jit(outer, static_argnums=1)
    for _ in range(3):
        jitted(1.0, model.step)
    assert len(traces) == 1


@in_worker
def test_callable_objects_keep_to_themselves() -> None:
    """An object's own attributes, whatever their names, do not get mixed up with the step's."""

    class Net:
        def __init__(self) -> None:
            self._function = lambda x: -x
            self._traced = {"nonsense": 1}
            self._jit_options = {"nonsense": 1}
            self._jitted = "nonsense"

        def __call__(self, x: Any) -> Any:
            return 2 * x

    assert float(trial_jit(Net())(3.0)) == 6.0
    assert float(trial_jit(functools.partial(affine, w=5.0))(1.0)) == 6.0


@in_worker
def test_a_step_of_a_step() -> None:
    """`trial_jit` of a `trial_jit` adds its arguments to the other's, as `jax.jit` of a `jax.jit` would."""
    inner = trial_jit(affine, traced={"w": 10.0})
    outer = trial_jit(inner, traced={"b": 5.0})

    assert float(inner(1.0)) == 11.0
    assert float(outer(1.0)) == 15.0


def test_it_keeps_name_and_signature() -> None:
    """Name, doc, module, signature and the function itself are there, as after `functools.wraps`."""
    step = trial_jit(affine, traced={"w": 1.0})

    assert (step.__name__, step.__doc__, step.__module__) == ("affine", "Scale and shift.", __name__)  # type: ignore[attr-defined]
    assert inspect.signature(step) == inspect.signature(affine)
    assert step.__wrapped__ is affine  # type: ignore[attr-defined]
    assert "affine" in repr(step)


# ---------------------------------------------------------------------------------------- pickles

MODULE = """
import functools
from jaxguard import trial_jit
SCALE = 3.0
@trial_jit
def step(x):
    return SCALE * x
@trial_jit(traced={"w": 2.0}, static_argnames="flag")
def both(x, w, flag=False):
    return x * w if not flag else x
class Net:
    @functools.partial(trial_jit, static_argnums=0)
    def step(self, x):
        return 5 * x
"""


@pytest.fixture
def module(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Give an importable module with steps."""
    import importlib

    name = f"steps_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = importlib.import_module(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps], ids=["pickle", "cloudpickle"])
def test_a_modules_step_pickles(module: types.ModuleType, dumps: Callable[[Any], bytes]) -> None:
    """A step at module level pickles, also with plain pickle, as a jitted function does; by name, so it is itself."""
    for step in (module.step, module.both):
        assert pickle.loads(dumps(step)) is step


def test_other_steps_pickle() -> None:
    """Steps of local functions, with traced arguments and options, pickle as functions do, with cloudpickle."""
    step = trial_jit(lambda x, w: x * w, traced={"w": 2.0}, static_argnames=())
    again = pickle.loads(cloudpickle.dumps(step))

    assert repr(again).startswith("trial_jit(<function ")
    assert again.__name__ == "<lambda>"
    assert isolated_jax_worker(lambda: [float(step(1.5)), float(again(1.5))])() == [3.0, 3.0]


def test_a_step_that_calls_itself_pickles() -> None:
    """A local step that refers to itself makes the way."""

    @functools.partial(trial_jit, static_argnums=1)
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1)  # type: ignore[operator]

    again = pickle.loads(cloudpickle.dumps(power))
    assert isolated_jax_worker(lambda: float(again(2.0, 3)))() == 8.0


def test_steps_travel_with_a_guarded_function(module: types.ModuleType) -> None:
    """Captured by an objective, alone, in containers or as methods, steps run in each kind of worker."""
    steps = {"step": module.step, "both": module.both, "method": module.Net().step}

    def use() -> list[float]:
        return [float(step(2.0)) for step in steps.values()]

    assert isolated_jax_worker(use)() == [6.0, 4.0, 10.0]


def test_a_built_step_pickles_without_its_program() -> None:
    """One that has run in a worker comes back, and runs in the next: no executable travels."""

    def use_and_return(step: Any) -> Any:
        step(1.0)
        return step

    step = isolated_jax_worker(use_and_return)(trial_jit(lambda x: x + 1))
    assert step._jitted is None
    assert isolated_jax_worker(lambda: float(step(1.0)))() == 2.0


# ---------------------------------------------------------------------------------------- at rest


def test_nothing_of_jax_happens_at_import(run_python: Callable[..., Any]) -> None:
    """Decorating, looking at, pickling and printing a step load nothing of JAX; its first call does."""
    run_python(
        """
import inspect, pickle, sys
from jaxguard import trial_jit

@trial_jit
def step(x): return x + 1

@trial_jit(traced={"lr": 0.1}, donate_argnums=0)
def other(x, lr): return x - lr

class Net:
    @trial_jit
    def method(self, x): return x

repr(step), inspect.signature(step), step == other, hash(step), Net().method, step.__wrapped__
step.clear_cache()
assert not {"jax", "jaxlib", "numpy"} & set(sys.modules)
assert step(1.0) == 2.0
assert "jax" in sys.modules
""",
        env={"JAX_PLATFORMS": "cpu"},
    ).check()


@pytest.mark.parametrize("bad", [1, "lr", ["lr"], {1: 2.0}, {"lr"}])
def test_traced_maps_names(bad: Any) -> None:
    """What maps no names is refused at decoration, with an example."""
    with pytest.raises(TypeError, match=r"traced must map names of arguments to values, as in traced=\{'lr': lr\}"):
        trial_jit(affine, traced=bad)
    with pytest.raises(TypeError, match="traced must map"):
        trial_jit(traced=bad)


def test_it_takes_a_function() -> None:
    """What cannot be called is refused at decoration."""
    for bad in (1, "step"):
        with pytest.raises(TypeError, match="trial_jit compiles a function, not"):
            trial_jit(bad)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="trial_jit compiles a function, not"):
        trial_jit(traced={"lr": 1})(3)  # type: ignore[arg-type]


def test_what_was_given_is_not_shared() -> None:
    """A later change of the mapping does not reach the step."""
    traced = {"w": 2.0}
    step = trial_jit(affine, traced=traced)
    traced["w"] = 100.0

    assert isolated_jax_worker(lambda: float(step(1.0)))() == 3.0


def test_jax_has_not_started_here() -> None:
    """All of this file ran without JAX's start in this process."""
    from jaxguard import _jax_state

    assert not _jax_state.started()
