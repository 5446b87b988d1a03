"""Has JAX started? Told without starting it, also after a fork, and by whom."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable


def check(run_python: Callable[..., Any], code: str, **options: Any) -> str:
    """Run code that asserts, and give what it printed."""
    return str(run_python(textwrap.dedent(code), **options).check().stdout)


def test_importing_and_building_start_nothing(run_python: Callable[..., Any]) -> None:
    """JAX is said to have started from its first operation on: not at import, `jit`, `eval_shape` or a setting."""
    check(
        run_python,
        """
        import sys
        from jaxguard import _jax_state as state
        assert not state.started() and state.local_devices() == [] and state.starters() == ""
        assert "jax" not in sys.modules, "asking imports nothing"

        import jax
        jax.config.update("jax_enable_x64", True)
        jax.eval_shape(jax.jit(lambda x: x + 1), jax.ShapeDtypeStruct((2,), "float32"))
        assert not state.started() and state.local_devices() == [] and state.starters() == ""
        assert not state.started(), "asking starts nothing"

        jax.numpy.ones(2)
        assert state.started() and len(state.local_devices()) == 1
        """,
        env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    )


def test_the_threads_tell_the_same(run_python: Callable[..., Any]) -> None:
    """The fallback agrees with the private door: no threads of XLA before the start, some after it."""
    check(
        run_python,
        """
        import os, sys, types
        import jax
        from jax._src import xla_bridge
        from jaxguard import _jax_state as state

        def without_the_door():
            del_name = "backends_are_initialized"
            real = getattr(xla_bridge, del_name)
            delattr(xla_bridge, del_name)
            try:
                return state.started()
            finally:
                setattr(xla_bridge, del_name, real)

        assert state.threads_of_xla() == 0 and not without_the_door()
        jax.jit(lambda x: x + 1)(1.0).block_until_ready()
        names = {open(f"/proc/self/task/{task}/comm").read() for task in os.listdir("/proc/self/task")}
        if len(names) == 1:
            sys.exit()  # an old JAX, which names no threads; its door is where it was
        assert state.threads_of_xla() > 0 and without_the_door()
        moved = sys.modules.pop("jax._src.xla_bridge")
        assert state.started(), "the module is gone too"
        """,
        env={"JAX_PLATFORMS": "cpu"},
    )


def test_who_started_it_is_named(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A module with an array at its top level is named, with the array; one without is not."""
    (tmp_path / "model_zoo.py").write_text("import jax.numpy as jnp\nLIMIT = 3\nSCALE = jnp.ones(2)\n")
    (tmp_path / "innocent.py").write_text("import jax.numpy as jnp\nimport numpy as np\nSCALE = np.ones(2)\n")
    check(
        run_python,
        """
        import innocent
        from jaxguard import _jax_state as state
        assert state.starters() == ""
        import model_zoo
        text = state.starters()
        assert "model_zoo.SCALE" in text and "innocent" not in text and "__main__" not in text, text
        """,
        env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tmp_path)},
    )


def test_the_search_for_the_starter_touches_nothing(run_python: Callable[..., Any]) -> None:
    """Modules that are odd (lazy, without `__dict__`, with values that raise) disturb nobody."""
    check(
        run_python,
        """
        import sys, types
        import jax
        from jaxguard import _jax_state as state

        class Odd:
            def __getattribute__(self, name):
                raise RuntimeError(name)

        class Lazy(types.ModuleType):
            def __getattr__(self, name):
                raise RuntimeError(f"{name} was looked up")

        odd = types.ModuleType("odd")
        odd.value = Odd()
        sys.modules.update(odd=odd, lazy=Lazy("lazy"), nothing=None)
        jax.numpy.ones(2)
        assert state.starters() == ""
        """,
        env={"JAX_PLATFORMS": "cpu"},
    )


FORKED = """
import os, sys, warnings
warnings.simplefilter("ignore")
import jax
import jaxguard
from jaxguard import _jax_state as state

@jaxguard.trial_jit
def step(x): return x + 1
{before}

def in_child():
    child = os.fork()
    if child == 0:
        try:
            {child}
            print("fine", flush=True)
        except jaxguard.ForkedAfterJax as error:
            print("refused", error, flush=True)
        except BaseException as error:
            print("wrong", repr(error), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0) == (child, 0)
in_child()
"""
START = "jax.numpy.ones(2).block_until_ready()"


@pytest.mark.parametrize("child", ["step(1.0)", "jaxguard.gpu_slot().__enter__()"])
def test_a_fork_before_the_start_is_fine(run_python: Callable[..., Any], child: str) -> None:
    """A child forked while JAX was only imported may use it."""
    done = check(run_python, FORKED.format(before="", child=child), env={"JAX_PLATFORMS": "cpu"})

    assert done == "fine\n"


@pytest.mark.parametrize(
    ("before", "child", "name"),
    [
        (START, "step(1.0)", "trial_jit"),
        (START, "step.lower(1.0)", "trial_jit"),
        (START, "jaxguard.gpu_slot().__enter__()", "gpu_slot"),
        (START, "jaxguard.gpu_slot()(lambda: 0)()", "gpu_slot"),
        ("step(1.0)", "step(2.0)", "trial_jit"),
        ("step(1.0)", "step(jax.ShapeDtypeStruct((3,), 'float32'))", "trial_jit"),
    ],
    ids=["call", "lower", "with", "decorator", "call again", "call again, compiling"],
)
def test_a_fork_after_the_start_is_refused(run_python: Callable[..., Any], before: str, child: str, name: str) -> None:
    """In a child forked after JAX started guards raise at once, with the fix, also those that worked before."""
    done = check(run_python, FORKED.format(before=before, child=child), env={"JAX_PLATFORMS": "cpu"}, timeout=60)

    assert done.startswith(f"refused {name} cannot be used in this process (pid ")
    assert "isolated_jax_worker" in done


def test_grandchildren_know_it_too(run_python: Callable[..., Any]) -> None:
    """A fork of a fork is no better, though JAX was not used in between."""
    child = """
            again = os.fork()
            if again:
                os.waitpid(again, 0)
                os._exit(0)
            state.refuse_if_forked("a grandchild")"""
    done = check(run_python, FORKED.format(before=START, child=child), env={"JAX_PLATFORMS": "cpu"})

    assert done.startswith("refused a grandchild cannot be used")
