"""Guarded or not, a study with one job and one seed is the same study: any sampler, any pruner."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import optuna
import pytest
from objectives import GRID, constrained, discrete, failing, mixed, numbers, on_grid, trade_off

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def make_random() -> optuna.samplers.BaseSampler:
    return optuna.samplers.RandomSampler(seed=5)


def make_cmaes() -> optuna.samplers.BaseSampler:
    pytest.importorskip("cmaes")
    return optuna.samplers.CmaEsSampler(seed=5, n_startup_trials=2)


def make_qmc() -> optuna.samplers.BaseSampler:
    pytest.importorskip("scipy")
    return optuna.samplers.QMCSampler(seed=5, scramble=True)


def make_tpe(**options: Any) -> optuna.samplers.BaseSampler:
    return optuna.samplers.TPESampler(seed=5, n_startup_trials=3, **options)


Case = tuple["Callable[[], optuna.samplers.BaseSampler]", "Callable[[optuna.Trial], Any]", dict[str, Any]]

median = optuna.pruners.MedianPruner(n_startup_trials=2, n_warmup_steps=1)
hyperband = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=9, reduction_factor=3)
halving = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
two = {"directions": ["minimize", "minimize"]}

CASES: dict[str, Case] = {
    "random": (make_random, mixed, {}),
    "tpe": (make_tpe, mixed, {"pruner": median}),
    "tpe-univariate": (lambda: make_tpe(multivariate=False), mixed, {}),
    "tpe-group": (lambda: make_tpe(multivariate=True, group=True), mixed, {}),
    "cmaes": (make_cmaes, numbers, {}),
    "nsga2": (lambda: optuna.samplers.NSGAIISampler(seed=5, population_size=4), trade_off, two),
    "nsga3": (lambda: optuna.samplers.NSGAIIISampler(seed=5, population_size=4), trade_off, two),
    "tpe-two-objectives": (make_tpe, trade_off, two),
    "grid": (lambda: optuna.samplers.GridSampler(GRID, seed=5), on_grid, {}),
    "brute-force": (lambda: optuna.samplers.BruteForceSampler(seed=5), discrete, {}),
    "qmc": (make_qmc, numbers, {}),
    "hyperband": (make_tpe, mixed, {"pruner": hyperband}),
    "successive-halving": (make_random, mixed, {"pruner": halving}),
    "median-constraints": (make_tpe, constrained, {"pruner": median}),
    "failures": (make_tpe, failing, {}),
    "maximize": (make_tpe, numbers, {"direction": "maximize"}),
}
FRESH = ("random", "tpe", "cmaes", "nsga2", "grid", "qmc", "hyperband", "failures")
"""Also with a fresh process for each trial, which is slower."""
PRUNES = {"tpe", "hyperband", "successive-halving", "median-constraints"}


def run(case: Case, guard: Callable[[Any], Any], n_trials: int | None) -> optuna.Study:
    make_sampler, objective, options = case
    # The name takes part in what Hyperband decides.
    study = optuna.create_study(study_name="one name", sampler=make_sampler(), **options)
    study.optimize(guard(objective), n_trials=n_trials, catch=(ArithmeticError,))
    return study


def facts(study: optuna.Study) -> list[dict[str, Any]]:
    """List all that a study knows of its trials but for times, and what the guard adds."""
    return [
        {
            "number": t.number,
            "state": t.state.name,
            "values": t.values,
            "params": t.params,
            "distributions": t.distributions,
            "reports": t.intermediate_values,
            "constraints": getattr(t, "constraints", None),
            "user_attrs": {k: v for k, v in t.user_attrs.items() if k != "jaxguard"},
        }
        for t in study.trials
    ]


@pytest.mark.parametrize(
    ("name", "reuse"),
    [
        pytest.param(name, reuse, id=f"{name}-{'warm' if reuse else 'fresh'}")
        for name in CASES
        for reuse in (True, False)
        if reuse or name in FRESH
    ],
)
def test_a_seeded_study_is_the_same_with_the_guard(fresh_guard: Any, name: str, reuse: bool) -> None:  # noqa: FBT001
    """With one job and one seed every trial equals that of an unguarded run: values, states, reports, constraints."""
    n_trials = None if name in {"grid", "brute-force"} else 14
    expected = facts(run(CASES[name], lambda function: function, n_trials))
    assert facts(run(CASES[name], lambda function: fresh_guard(function, reuse=reuse), n_trials)) == expected
    # The comparison is worth something only if what it compares happened.
    assert len(expected) == {"grid": 12, "brute-force": 7}.get(name, 14)
    assert len({str(t["params"]) for t in expected}) == len(expected) or name in {"nsga2", "nsga3", "brute-force"}
    assert name not in PRUNES or {"PRUNED", "COMPLETE"} <= {t["state"] for t in expected}
    assert name != "failures" or "FAIL" in {t["state"] for t in expected}


def test_the_way_a_worker_starts_changes_no_trial(guard: Any) -> None:
    """Forked or started by exec, fresh or warm: a seeded study is the same."""
    case = (make_tpe, mixed, {"pruner": median})
    assert facts(run(case, guard, 4)) == facts(run(case, lambda function: function, 4))


@pytest.mark.parametrize("make_sampler", [make_random, make_tpe, make_cmaes])
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_parallel_trials_do_not_repeat_each_other(
    fresh_guard: Any,
    make_sampler: Callable[[], optuna.samplers.BaseSampler],
    reuse: bool,  # noqa: FBT001
) -> None:
    """With a seeded sampler and four jobs each trial has suggestions of its own."""
    study = optuna.create_study(sampler=make_sampler())
    study.optimize(fresh_guard(numbers, reuse=reuse), n_trials=12, n_jobs=4)
    assert len({tuple(t.params.values()) for t in study.trials}) == 12


def test_a_sampler_of_ones_own_stays_in_the_study(fresh_guard: Any) -> None:
    """A sampler that cannot be pickled works, because it never leaves the parent."""

    class Mine(optuna.samplers.RandomSampler):
        def __init__(self) -> None:
            super().__init__(seed=5)
            self.asked = []
            self.cannot_travel = (i for i in range(3))

        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            self.asked.append((trial.number, name, next(self.cannot_travel)))
            return super().sample_independent(study, trial, name, distribution)

    sampler = Mine()
    study = optuna.create_study(sampler=sampler)
    study.optimize(fresh_guard(lambda trial: trial.suggest_float("x", 0, 1)), n_trials=3)
    assert sampler.asked == [(0, "x", 0), (1, "x", 1), (2, "x", 2)]


def test_a_grid_is_walked_once_by_several_jobs(fresh_guard: Any) -> None:
    """GridSampler ends the study when the grid is done, with four jobs too."""
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(GRID, seed=5))
    study.optimize(fresh_guard(on_grid, reuse=True), n_trials=60, n_jobs=4)
    assert {(t.params["x"], t.params["n"], t.params["kind"]) for t in study.trials} == {
        (x, n, kind) for x in GRID["x"] for n in GRID["n"] for kind in GRID["kind"]
    }
    assert len(study.trials) < 60
