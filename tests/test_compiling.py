"""Compiled once per host: whoever needs a program that another worker compiles takes it from there."""

from __future__ import annotations

import pathlib
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import steps

from jaxguard import _store, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 6


def together(trial: optuna.Trial, folder: pathlib.Path, work: Callable[[], float], workers: int = WORKERS) -> float:
    """Do some work when so many trials have come to this point."""
    (folder / str(trial.number)).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < workers and time.monotonic() < deadline:
        time.sleep(0.005)
    return work()


def run(
    slots: Any, tmp_path: pathlib.Path, work: Callable[[], float], workers: int = WORKERS, **options: Any
) -> list[dict[str, Any]]:
    """Run some work in cold workers side by side; return the attribute of each trial."""
    slots(workers)
    meeting = tmp_path / f"meeting{time.monotonic_ns()}"
    meeting.mkdir()
    options.setdefault("compile_cache", str(tmp_path / "store"))

    @isolated_jax_worker(**options)
    def objective(trial: optuna.Trial) -> float:
        return together(trial, meeting, work, workers)

    study = optuna.create_study()
    study.optimize(objective, n_trials=workers, n_jobs=workers)
    assert len(set(study.trials_dataframe()["value"])) == 1, "each computes the same"
    return [trial.user_attrs["jaxguard"] for trial in study.trials]


def programs_in(folder: pathlib.Path) -> list[_store.Entry]:
    return [entry for kind in _store.kinds(str(folder)) for entry in _store.Store(str(folder), kind).entries()]


@pytest.mark.parametrize(
    "work",
    [
        steps.plain,
        steps.operations,
        steps.with_nnx,
        steps.with_equinox,
        steps.with_optax,
        steps.with_trial_jit,
    ],
    ids=lambda work: work.__name__,
)
def test_six_cold_workers_compile_each_program_once(
    slots: Any, tmp_path: pathlib.Path, work: Callable[[], float]
) -> None:
    """Over all workers there is one compilation per program; all the others are hits."""
    module = {"with_nnx": "flax", "with_equinox": "equinox", "with_optax": "optax"}.get(work.__name__, "jax")
    pytest.importorskip(module)
    told = run(slots, tmp_path, work)
    programs = programs_in(tmp_path / "store")
    assert sum(facts["compiles"] for facts in told) == len(programs) > 0
    assert sum(facts["cache_hits"] for facts in told) >= (WORKERS - 1) * len(programs)
    assert not any((tmp_path / "store" / "v1" / "private").iterdir()), "no worker leaves a directory"


def test_a_warm_store_compiles_nothing(slots: Any, tmp_path: pathlib.Path) -> None:
    """A second study on the same host compiles nothing, and says what it saved."""
    run(slots, tmp_path, steps.plain, 1)
    (told,) = run(slots, tmp_path, steps.plain, 1)
    assert told["compiles"] == 0
    assert told["compile_s"] == 0
    assert told["cache_hits"] > 0
    assert told["saved_s"] > 0
