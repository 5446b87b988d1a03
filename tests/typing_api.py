"""Never executed: type checkers read this file, and complain when a public name loses what a user relies on.

`assert_type` is held by mypy and pyright alike. A `type: ignore` stands where the call must be refused: mypy complains
about one that is not needed.
"""

import collections.abc
import os
import subprocess
from typing import assert_type

import optuna

import jaxguard
from jaxguard import gpu_slot, isolated_jax_worker, slot_count, testing, trial_jit

# ---- isolated_jax_worker ---------------------------------------------------------------------------------------------


@isolated_jax_worker
def bare(x: int, *, name: str = "") -> float:
    return x / len(name)


@isolated_jax_worker()
def empty(x: int) -> float:
    return x / 2


@isolated_jax_worker(gpus=2, timeout=60.0, slot_timeout=0, reuse=True, env={"A": "1", "B": None})
def full(x: int) -> list[float]:
    return [x / 2]


@isolated_jax_worker
def objective(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", 0.0, 1.0)


class Model:
    @isolated_jax_worker
    def fit(self, steps: int) -> str:
        return str(steps)


assert_type(bare(1, name="a"), float)
assert_type(empty(1), float)
assert_type(full(1), list[float])
assert_type(isolated_jax_worker(os.getpid)(), int)
assert_type(Model().fit(3), str)
optuna.create_study().optimize(objective, n_trials=1, n_jobs=slot_count())

bare("1")  # type: ignore[arg-type]
bare(1, nome="a")  # type: ignore[call-arg]
isolated_jax_worker(gpus="2")  # type: ignore[call-overload]
isolated_jax_worker(os.getpid, 2)  # type: ignore[call-overload]
isolated_jax_worker(devices=0)  # type: ignore[call-overload]
isolated_jax_worker(cpus="2")  # type: ignore[call-overload]

with isolated_jax_worker(reuse=True) as worker:
    assert_type(worker(os.getpid), int)
    assert_type(worker(bare, 1, name="a"), float)
    worker(empty, "1")  # type: ignore[arg-type]

# ---- gpu_slot --------------------------------------------------------------------------------------------------------


@gpu_slot
def held(x: int) -> str:
    return str(x)


@gpu_slot(gpus=2, slot_timeout=3.5)
def held_by_two(x: int) -> str:
    return str(x)


assert_type(held(1), str)
assert_type(held_by_two(1), str)
held("1")  # type: ignore[arg-type]
gpu_slot(timeout=3)  # type: ignore[call-overload]

with gpu_slot() as slot:
    assert_type(slot.share, float)
    assert_type(slot.waited_s, float)
    assert_type(slot.env, dict[str, str])
    assert_type(slot.devices[0].id, str)
    assert_type(slot.devices[0].kind, str)
    subprocess.run(["true"], check=True, env={**os.environ, **slot.env})
    slot.share = 0.5  # type: ignore[misc]

# ---- trial_jit -------------------------------------------------------------------------------------------------------


@trial_jit
def step(x: float, y: float) -> float:
    return x + y


@trial_jit(static_argnums=(1,))
def step_with_options(x: float, n: int) -> float:
    return x * n


def update(weight: float, lr: float) -> float:
    return weight - lr


assert_type(step(1.0, 2.0), float)
assert_type(step_with_options(1.0, 2), float)
assert_type(trial_jit(os.getpid)(), int)
assert_type(trial_jit(update, traced={"lr": 0.1})(1.0), float)  # `lr` comes from `traced`, and may be left out here
step.lower(1.0, 2.0)
step.clear_cache()
step("1", 2.0)  # type: ignore[arg-type]

# ---- The rest --------------------------------------------------------------------------------------------------------

assert_type(slot_count(), int)
assert_type(slot_count(gpus=2), int)
slot_count(2)  # type: ignore[call-arg]

with testing.fake_slots(3), testing.inline():
    pass


def catch(error: Exception) -> list[TimeoutError]:
    if isinstance(error, jaxguard.SlotTimeout):
        assert_type(error.waited_s, float | None)
        assert_type(error.holders, tuple[int, ...])
        return [error]
    if isinstance(error, jaxguard.WorkerTimeout):
        assert_type(error.pid, int | None)
        assert_type(error.timeout_s, float | None)
        assert_type(error.stacks, str)
        return [error]
    if isinstance(error, jaxguard.WorkerDied):
        assert_type(error.pid, int | None)
        assert_type(error.exit_code, int | None)
        assert_type(error.signal, int | None)
        assert_type(error.output, str)
    if isinstance(error, jaxguard.RemoteError):
        assert_type(error.type, str)
        assert_type(error.text, str)
        assert_type(error.traceback, str)
    raise error


others: list[type[jaxguard.JaxguardError]] = [jaxguard.ForkedAfterJax, jaxguard.JaxAlreadyStarted, jaxguard.NoDevices]
kept: collections.abc.Callable[[int], list[float]] = full
