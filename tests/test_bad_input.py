"""Bad input is refused early, in words that help, and costs nothing."""

from __future__ import annotations

import functools
import inspect
import math
import os
import pickle
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

BAD_GPUS = [-1, True, "1", 1.5, -0.5, float("nan"), None]
BAD_TIMEOUTS = [0, -1, 0.0, -math.inf, math.nan, "x", None, [1], True]
BAD_SLOT_TIMEOUTS = [-1, -0.1, math.nan, "x", None, [1], True]
BAD_ENVS = [["A=1"], "A=1", {"A": 1}, {1: "a"}, {"A": b"1"}, {"": "1"}, {"A=B": "1"}, {"A": "nul\0"}, 3]
BAD_REUSES = [1, 0, None, "yes"]
BAD_OPTIONS = [
    *(("gpus", value) for value in BAD_GPUS),
    *(("timeout", value) for value in BAD_TIMEOUTS),
    *(("slot_timeout", value) for value in BAD_SLOT_TIMEOUTS),
    *(("env", value) for value in BAD_ENVS),
    *(("reuse", value) for value in BAD_REUSES),
]


@pytest.mark.parametrize(("option", "value"), BAD_OPTIONS, ids=[f"{name}={value!r}" for name, value in BAD_OPTIONS])
def test_bad_options_of_isolated_jax_worker(option: str, value: Any) -> None:
    """A bad value is refused at decoration, in both forms, and the message has its name and the value."""
    for build in (
        lambda: jaxguard.isolated_jax_worker(**{option: value}),
        lambda: jaxguard.isolated_jax_worker(os.getpid, **{option: value}),
    ):
        with pytest.raises((TypeError, ValueError), match=option):
            build()


@pytest.mark.parametrize(
    ("option", "value"),
    [*(("gpus", value) for value in BAD_GPUS), *(("slot_timeout", value) for value in BAD_SLOT_TIMEOUTS)],
)
def test_bad_options_of_gpu_slot(option: str, value: Any) -> None:
    """The same for `gpu_slot`, before anything is held."""
    for build in (
        lambda: jaxguard.gpu_slot(**{option: value}),
        lambda: jaxguard.gpu_slot(os.getpid, **{option: value}),
    ):
        with pytest.raises((TypeError, ValueError), match=option):
            build()


@pytest.mark.parametrize("value", BAD_GPUS)
def test_bad_gpus_of_slot_count(value: Any) -> None:
    """`slot_count` reads `gpus` as the guards do."""
    with pytest.raises((TypeError, ValueError), match="gpus"):
        jaxguard.slot_count(gpus=value)


@pytest.mark.parametrize(
    "options",
    [
        {"gpus": 0},
        {"timeout": math.inf, "slot_timeout": math.inf},
        {"timeout": 0.5, "slot_timeout": 0},
        {"timeout": np.float64(3)},
        {"env": None},
        {"env": {}},
        {"env": {"A": None, "B": ""}},
        {"reuse": True},
    ],
)
def test_good_options(options: dict[str, Any]) -> None:
    """All that the documentation allows is taken."""
    assert callable(jaxguard.isolated_jax_worker(os.getpid, **options))
    assert jaxguard.isolated_jax_worker(**options) is not None


def test_options_are_those_that_work() -> None:
    """All options are keyword-only, and none is there before it works."""
    expected = {
        jaxguard.isolated_jax_worker: [
            "gpus",
            "devices",
            "timeout",
            "slot_timeout",
            "reuse",
            "compile_cache",
            "cpus",
            "env",
        ],
        jaxguard.gpu_slot: ["gpus", "devices", "slot_timeout"],
        jaxguard.slot_count: ["gpus", "devices"],
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == names
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY] in ([], ["function"])

    with pytest.raises(TypeError):
        jaxguard.isolated_jax_worker(os.getpid, 2)
    with pytest.raises(TypeError, match="gpu"):
        jaxguard.isolated_jax_worker(gpu=2)


def a_generator() -> Iterator[int]:
    """Yield."""
    yield 1


async def a_coroutine() -> int:
    """Return later."""
    return 1


async def an_async_generator() -> AsyncIterator[int]:
    """Yield later."""
    yield 1


class GeneratorCall:
    """Its calls are generators."""

    def __call__(self) -> Iterator[int]:
        """Yield."""
        yield 1


@pytest.mark.parametrize(
    "function",
    [
        a_generator,
        a_coroutine,
        an_async_generator,
        functools.partial(a_generator),
        GeneratorCall(),
        GeneratorCall().__call__,
    ],
    ids=["generator", "coroutine", "async generator", "partial", "object", "method"],
)
@pytest.mark.parametrize("guard", [jaxguard.isolated_jax_worker, jaxguard.gpu_slot])
def test_functions_that_run_later_are_refused(guard: Callable[..., Any], function: Callable[..., Any]) -> None:
    """A body that runs after the guard has let go would run unguarded: refused at decoration, with the reason."""
    for decorate in (guard, guard()):
        with pytest.raises(TypeError, match=r"generator|coroutine"):
            decorate(function)


@pytest.mark.parametrize("guard", [jaxguard.isolated_jax_worker, jaxguard.gpu_slot])
@pytest.mark.parametrize("thing", [3, "objective", [os.getpid]])
def test_things_that_cannot_be_called_are_refused(guard: Callable[..., Any], thing: Any) -> None:
    """A guard takes a function; `isolated_jax_worker(2)` is a mistake for `gpus=2`."""
    for decorate in (guard, guard()):
        with pytest.raises(TypeError):
            decorate(thing)


def test_above_hydra_main() -> None:
    """Over `@hydra.main` the guard would hide the configuration: refused, with the right order in the message."""
    hydra = pytest.importorskip("hydra")

    @hydra.main(version_base=None)
    def main(config: Any) -> Any:
        return config

    with pytest.raises(TypeError) as caught:
        jaxguard.isolated_jax_worker(main)

    text = str(caught.value)
    assert 0 <= text.rindex("@hydra.main") < text.rindex("@isolated_jax_worker")


def test_below_hydra_main(run_python: Callable[..., Any]) -> None:
    """In the right order the guarded function gets its configuration, and Hydra's state is there in the worker."""
    pytest.importorskip("hydra")
    code = textwrap.dedent("""
        import os
        import hydra
        from hydra.core.hydra_config import HydraConfig
        from jaxguard import isolated_jax_worker

        PARENT = os.getpid()

        @hydra.main(version_base=None)
        @isolated_jax_worker
        def main(config):
            print(os.getpid() != PARENT, config.lr, HydraConfig.get().job.name.startswith("script_"))

        main()
    """)

    assert run_python(code, args=["+lr=0.5"]).check().stdout.splitlines() == ["True 0.5 True"]


# ---------------------------------------------------------------- at the call


def test_no_slot_free(slots: Callable[[int], None], guard: Callable[..., Any]) -> None:
    """`slot_timeout=0` tries once; the error says who holds what and what to do, is a TimeoutError, and pickles."""
    slots(1)
    caught: list[BaseException] = []
    guarded = guard(os.getpid, slot_timeout=0)

    def attempt() -> None:
        for enter in (guarded, lambda: guard(slot_timeout=0).__enter__(), jaxguard.gpu_slot(slot_timeout=0).__enter__):
            try:
                enter()
            except BaseException as error:  # noqa: BLE001 - it is looked at in the other thread
                caught.append(error)

    with jaxguard.gpu_slot():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(60)

    assert len(caught) == 3
    for error in caught:
        assert isinstance(error, jaxguard.SlotTimeout), error
        assert isinstance(error, TimeoutError)
        assert error.holders == (os.getpid(),)
        for word in (str(os.getpid()), "slot_timeout", "n_jobs", "0"):
            assert word in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.holders) == (type(error), str(error), error.holders)
    assert guarded() != os.getpid(), "free again"


def test_a_short_wait(slots: Callable[[int], None]) -> None:
    """A wait that ends in vain tells how long it was."""
    slots(1)
    caught: list[jaxguard.SlotTimeout] = []

    def attempt() -> None:
        try:
            jaxguard.isolated_jax_worker(os.getpid, slot_timeout=0.3)()
        except jaxguard.SlotTimeout as error:
            caught.append(error)

    with jaxguard.gpu_slot():
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(60)

    assert 0.3 <= (caught[0].waited_s or 0) < 30
    assert "0.3" in str(caught[0])


def test_more_than_there_are(slots: Callable[[int], None], fresh_guard: Callable[..., Any]) -> None:
    """On CPU slots, more `gpus` than slots give a worker with that many devices, which holds them all."""
    slots(2)

    @fresh_guard(gpus=5)
    def count() -> int:
        import jax

        return jax.device_count()

    assert jaxguard.slot_count(gpus=5) == 1
    assert count() == 5


@pytest.mark.parametrize("value", ["cpu:0", "cpu:-1", "cpu:x", "gpu:2", "0,0", "cpu", "1.5", "-1"])
def test_a_bad_setting(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """A bad setting is an error at the call, which names the setting, its value and the valid ones."""
    guarded = fresh_guard(os.getpid)
    monkeypatch.setenv("JAXGUARD_DEVICES", value)

    for enter in (guarded, jaxguard.slot_count, jaxguard.gpu_slot().__enter__):
        with pytest.raises(ValueError, match="JAXGUARD_DEVICES") as caught:
            enter()
        assert value in str(caught.value)
        assert "cpu:" in str(caught.value)


def test_a_bad_inline_setting(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for JAXGUARD_INLINE."""
    guarded = fresh_guard(os.getpid)
    monkeypatch.setenv("JAXGUARD_INLINE", "maybe")

    with pytest.raises(ValueError, match="JAXGUARD_INLINE"):
        guarded()


def test_wrong_arguments_of_the_function(guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """A call that does not fit the function fails as it does without the guard."""
    slots(1)

    @guard
    def objective(first: int, *, second: int) -> int:
        return first + second

    with pytest.raises(TypeError, match="second"):
        objective(1)
    with pytest.raises(TypeError, match="third"):
        objective(1, second=2, third=3)
    assert objective(1, second=2) == 3
