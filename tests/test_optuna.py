"""A guarded objective in a real study: the trial, the study behind it, what goes in, comes back, goes wrong."""

from __future__ import annotations

import datetime
import functools
import json
import os
import pathlib
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optuna
import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable

COMPLETE, FAIL, PRUNED, RUNNING = (optuna.trial.TrialState[s] for s in ("COMPLETE", "FAIL", "PRUNED", "RUNNING"))

needs_constraints = pytest.mark.skipif(
    not hasattr(optuna.trial.Trial, "set_constraint"), reason="Trial.set_constraint is new in Optuna 5"
)


class Broken(Exception):
    """An exception of the user's own."""


def square(trial: optuna.Trial) -> float:
    """Be the plainest objective: a function of a module."""
    return trial.suggest_float("x", -1, 1) ** 2


@jax.jit
def loss(x: Any) -> Any:
    """Be a jitted function at module level."""
    return jnp.sum((x - 0.5) ** 2)


class Search:
    """Holds an objective in each of the ways a class can."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, trial: optuna.Trial) -> float:
        """Be an objective as a callable object."""
        return self.scale * trial.suggest_float("x", -1, 1)

    def method(self, trial: optuna.Trial) -> float:
        """Be an objective as a bound method."""
        return self.scale * trial.suggest_float("x", -1, 1)

    @classmethod
    def of_class(cls, trial: optuna.Trial) -> float:
        """Be an objective as a class method."""
        return cls(3.0).method(trial)

    @jaxguard.isolated_jax_worker
    def guarded(self, trial: optuna.Trial) -> float:
        """Be an objective that is guarded where it is defined."""
        return self.scale * trial.suggest_float("x", -1, 1)


def states(study: optuna.Study) -> list[optuna.trial.TrialState]:
    return [t.state for t in study.get_trials()]


def slots_are_free(number: int) -> bool:
    """Take all slots at once: a slot that was not given back makes this raise SlotTimeout."""
    return jaxguard.isolated_jax_worker(gpus=number, slot_timeout=20)(abs)(-1) == 1


# The trial


def test_every_suggest_method_gives_what_the_study_records(guard: Any) -> None:
    """Each suggest_* returns in the worker exactly the value that the study stores, twice the same for one name."""

    def objective(trial: optuna.Trial) -> float:
        seen = {
            "x": trial.suggest_float("x", -1, 1),
            "lr": trial.suggest_float("lr", 1e-5, 1e-1, log=True),
            "q": trial.suggest_float("q", 0, 1, step=0.25),
            "n": trial.suggest_int("n", 1, 9),
            "width": trial.suggest_int("width", 1, 1024, log=True),
            "tens": trial.suggest_int("tens", 0, 100, step=10),
            "act": trial.suggest_categorical("act", ["relu", None, 3, 2.5, True]),
        }
        again = trial.suggest_float("x", -1, 1)
        trial.set_user_attr("seen", seen)
        trial.set_user_attr("again", again == seen["x"])
        return seen["x"]

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    study.optimize(guard(objective), n_trials=2)
    for trial in study.trials:
        assert trial.state == COMPLETE
        assert trial.user_attrs["seen"] == trial.params
        assert trial.user_attrs["again"] is True
        assert trial.value == trial.params["x"]
        assert trial.distributions["lr"] == optuna.distributions.FloatDistribution(1e-5, 1e-1, log=True)
        assert trial.distributions["tens"] == optuna.distributions.IntDistribution(0, 100, step=10)
        assert {name: type(value) for name, value in trial.user_attrs["seen"].items() if name != "act"} == {
            **dict.fromkeys(["x", "lr", "q"], float),
            **dict.fromkeys(["n", "width", "tens"], int),
        }
    assert len({t.params["x"] for t in study.trials}) == 2


@pytest.mark.filterwarnings("ignore:suggest_.*has been deprecated:FutureWarning")
def test_the_deprecated_suggest_methods_work(fresh_guard: Any) -> None:
    """Objectives written for old Optuna run: suggest_uniform, suggest_loguniform, suggest_discrete_uniform."""

    def objective(trial: optuna.Trial) -> float:
        a = trial.suggest_uniform("a", 0, 1)
        b = trial.suggest_loguniform("b", 0.1, 1)
        c = trial.suggest_discrete_uniform("c", 0, 1, 0.5)
        return a + b + c

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=1)
    assert set(study.trials[0].params) == {"a", "b", "c"}
    assert study.trials[0].value == sum(study.trials[0].params.values())


def test_every_property_of_the_trial_reads_as_in_the_study(guard: Any) -> None:
    """number, params, distributions, user_attrs, datetime_start and relative_params show the real trial."""

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("note", {"a": [1, 2]})
        seen = {
            "number": trial.number,
            "params": trial.params,
            "distributions": {n: optuna.distributions.distribution_to_json(d) for n, d in trial.distributions.items()},
            "note": trial.user_attrs["note"],
            "datetime_start": trial.datetime_start.isoformat(),
            "relative_params": trial.relative_params,
        }
        trial.set_user_attr("seen", seen)
        return x

    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=1, multivariate=True))
    study.optimize(guard(objective), n_trials=2)
    for trial in study.trials:
        seen = trial.user_attrs["seen"]
        assert seen["number"] == trial.number
        assert seen["params"] == trial.params
        assert {n: optuna.distributions.json_to_distribution(d) for n, d in seen["distributions"].items()} == (
            trial.distributions
        )
        assert seen["note"] == trial.user_attrs["note"] == {"a": [1, 2]}
        assert datetime.datetime.fromisoformat(seen["datetime_start"]) == trial.datetime_start
    # A multivariate TPE suggests all at once as soon as one trial is there: else relative_params proves nothing.
    assert [t.user_attrs["seen"]["relative_params"] for t in study.trials][1:] == [t.params for t in study.trials][1:]


@needs_constraints
def test_constraints_reach_the_study(guard: Any) -> None:
    """set_constraint from the worker is stored, readable at once, and makes trials feasible or not."""

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.set_constraint("small", x - 0.5)
        trial.set_user_attr("seen", trial.constraints)
        return x

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=1))
    study.optimize(guard(objective), n_trials=2)
    assert [t.constraints for t in study.trials] == [{"small": t.params["x"] - 0.5} for t in study.trials]
    assert [t.user_attrs["seen"] for t in study.trials] == [t.constraints for t in study.trials]
    values = [t.value for t in study.trials]
    assert max(values) > 0.5 >= study.best_value == max(v for v in values if v <= 0.5)


def test_reports_reach_the_study_and_its_pruner_answers(guard: Any) -> None:
    """report and should_prune talk to the real pruner: bad trials end as PRUNED with their reports and last value."""

    def objective(trial: optuna.Trial) -> float:
        bad = trial.number == 1
        for step in range(4):
            trial.report(10.0 + step if bad else float(step), step)
            if trial.should_prune():
                message = f"at step {step}"
                raise optuna.TrialPruned(message)
        return 3.0

    pruner = optuna.pruners.MedianPruner(n_startup_trials=1, n_warmup_steps=1)
    study = optuna.create_study(pruner=pruner)
    study.optimize(guard(objective), n_trials=2)
    assert states(study) == [COMPLETE, PRUNED]
    assert study.trials[0].intermediate_values == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}
    assert study.trials[1].intermediate_values == {0: 10.0, 1: 11.0}
    assert study.trials[1].value == 11.0


def test_a_pruned_trial_keeps_its_message_and_type() -> None:
    """A caller outside a study sees TrialPruned itself, with its text."""

    def objective() -> None:
        message = "enough of this"
        raise optuna.TrialPruned(message)

    with pytest.raises(optuna.TrialPruned, match=r"^enough of this$"):
        jaxguard.isolated_jax_worker(objective)()


def test_mistakes_with_the_trial_raise_what_they_raise_without_the_guard(guard: Any) -> None:
    """A wrong suggest, report or attribute raises in the objective what Optuna raises, and can be caught there."""

    def objective(trial: optuna.Trial) -> float:
        def attempt(action: Callable[[], object]) -> str:
            try:
                action()
            except Exception as e:  # noqa: BLE001 - which type it is is the question
                return f"{type(e).__name__}: {e}"
            return "nothing"

        trial.suggest_float("x", 0, 1)
        mistakes = [
            attempt(lambda: trial.suggest_float("low", 2, 1)),
            attempt(lambda: trial.suggest_float("both", 0.1, 1, step=0.1, log=True)),
            attempt(lambda: trial.suggest_int("x", 0, 1)),
            attempt(lambda: trial.report("much", 0)),
            attempt(lambda: trial.report(1.0, -1)),
            attempt(lambda: trial.no_such_thing),
            attempt(lambda: trial.suggest_float("missing")),
            attempt(lambda: trial.study.best_value),
        ]
        trial.set_user_attr("mistakes", mistakes)
        return 0.0

    plain, guarded = optuna.create_study(), optuna.create_study()
    plain.optimize(objective, n_trials=1)
    guarded.optimize(guard(objective), n_trials=1)
    expected = plain.trials[0].user_attrs["mistakes"]
    assert [m.split(":")[0] for m in expected] == [
        "ValueError",
        "ValueError",
        "ValueError",
        "TypeError",
        "ValueError",
        "AttributeError",
        "TypeError",
        "ValueError",
    ]
    assert guarded.trials[0].user_attrs["mistakes"] == expected


def test_the_trial_is_a_trial(guard: Any) -> None:
    """Code that asks isinstance(trial, optuna.Trial) or isinstance(trial.study, optuna.Study) is content."""

    def objective(trial: optuna.Trial) -> float:
        answers = [
            isinstance(trial, optuna.Trial),
            isinstance(trial, optuna.trial.BaseTrial),
            isinstance(trial, optuna.trial.FixedTrial),
            isinstance(trial.study, optuna.Study),
        ]
        trial.set_user_attr("answers", answers)
        return 0.0

    study = optuna.create_study()
    study.optimize(guard(objective), n_trials=1)
    assert study.trials[0].user_attrs["answers"] == [True, True, False, True]


def test_several_threads_of_an_objective_use_the_trial_at_once(guard: Any) -> None:
    """Suggests, reports and attributes from eight threads neither mix nor get lost."""

    def objective(trial: optuna.Trial) -> float:
        start = threading.Barrier(8)

        def work(i: int) -> None:
            start.wait(30)
            for k in range(5):
                value = trial.suggest_float(f"p{i}_{k}", i, i + 0.5)
                trial.set_user_attr(f"seen{i}_{k}", value)
                trial.report(float(i), 10 * i + k)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 0.0

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    study.optimize(guard(objective), n_trials=1)
    trial = study.trials[0]
    names = [f"{i}_{k}" for i in range(8) for k in range(5)]
    assert {f"p{n}" for n in names} == set(trial.params)
    for n in names:
        assert trial.user_attrs[f"seen{n}"] == trial.params[f"p{n}"]
        assert int(n[0]) <= trial.params[f"p{n}"] <= int(n[0]) + 0.5
    assert trial.intermediate_values == {10 * i + k: float(i) for i in range(8) for k in range(5)}


def test_a_fixed_trial_travels_as_it_is(guard: Any) -> None:
    """FixedTrial works in a guarded objective as in a plain one, its errors too."""
    guarded = guard(square)
    assert guarded(optuna.trial.FixedTrial({"x": 0.5})) == 0.25
    with pytest.raises(ValueError, match="'x'"):
        guarded(optuna.trial.FixedTrial({"y": 0.5}))


def test_a_frozen_trial_travels_as_it_is(guard: Any) -> None:
    """Re-evaluating study.best_trial, guarded, gives its value again."""
    study = optuna.create_study()
    study.optimize(square, n_trials=3)
    guarded = guard(lambda trial: (square(trial), trial.number, trial.params, trial.state))
    best = study.best_trial
    assert guarded(best) == (study.best_value, best.number, study.best_params, COMPLETE)


def test_enqueued_trials_are_run_first(guard: Any) -> None:
    """enqueue_trial gives its parameters and attributes to the guarded objective."""

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("copy", trial.user_attrs.get("why", "none"))
        return trial.suggest_float("x", -1, 1) ** 2

    study = optuna.create_study()
    study.enqueue_trial({"x": 0.25}, user_attrs={"why": "a good start"})
    study.enqueue_trial({"x": -0.5})
    study.optimize(guard(objective), n_trials=2)
    assert [t.params["x"] for t in study.trials] == [0.25, -0.5]
    assert [t.value for t in study.trials] == [0.0625, 0.25]
    assert [t.user_attrs["copy"] for t in study.trials] == ["a good start", "none"]


def test_a_trial_inside_other_arguments_is_the_real_one(guard: Any) -> None:
    """A trial in a tuple, a list in a dict, a keyword, a partial or a closure is served, and it is one object."""

    def nested(pair: tuple[Any, int], *, config: dict[str, Any], call: Callable[..., float]) -> float:
        trial, number = pair
        assert config["trials"][0] is trial
        assert call.args[0] is trial
        trial.report(0.5, number)
        config["trials"][0].set_user_attr("from", "the dict")
        return call(scale=2.0) + trial.suggest_float("y", 0, 1)

    def scaled(trial: optuna.Trial, scale: float) -> float:
        return scale * trial.suggest_float("x", 0, 1)

    guarded, run = guard(nested), guard(lambda f: f())

    def objective(trial: optuna.Trial) -> float:
        value = guarded((trial, 7), config={"trials": [trial]}, call=functools.partial(scaled, trial))
        assert run(lambda: trial.suggest_float("z", 0, 1)) == trial.params["z"]
        return value

    study = optuna.create_study()
    study.optimize(objective, n_trials=1)
    trial = study.trials[0]
    assert trial.intermediate_values == {7: 0.5}
    assert trial.user_attrs["from"] == "the dict"
    assert trial.value == 2.0 * trial.params["x"] + trial.params["y"]


def test_two_trials_in_one_call_stay_apart(fresh_guard: Any) -> None:
    """A call may take several trials, of one study or of two: each call of a method reaches its own trial."""

    def both(a: optuna.Trial, b: optuna.Trial, c: optuna.Trial) -> tuple[int, int, str]:
        a.suggest_float("x", 0, 1)
        b.suggest_float("x", 1, 2)
        c.set_user_attr("only", "c")
        return a.number, b.number, c.study.study_name

    one, two = optuna.create_study(study_name="one"), optuna.create_study(study_name="two")
    a, b, c = one.ask(), one.ask(), two.ask()
    assert fresh_guard(both)(a, b, c) == (0, 1, "two")
    assert 0 <= a.params["x"] <= 1 <= b.params["x"] <= 2
    assert c.params == {}
    assert c.user_attrs["only"] == "c"
    assert "only" not in a.user_attrs


# The study behind the trial


def test_the_study_is_read_from_the_worker(guard: Any) -> None:
    """trial.study answers for the real study: directions, names, attributes, trials and the best so far."""

    def objective(trial: optuna.Trial) -> float:
        study = trial.study
        study.set_user_attr(f"seen by {trial.number}", trial.number)
        seen = {
            "study_name": study.study_name,
            "direction": study.direction.name,
            "directions": [d.name for d in study.directions],
            "dataset": study.user_attrs["dataset"],
            "trials": [(t.number, t.state.name) for t in study.trials],
            "get_trials": len(study.get_trials(deepcopy=False, states=(COMPLETE,))),
        }
        if trial.number:
            seen["best"] = [study.best_value, study.best_params, study.best_trial.number]
        trial.set_user_attr("seen", seen)
        return trial.suggest_float("x", -1, 1)

    study = optuna.create_study(study_name="read me", direction="maximize")
    study.set_user_attr("dataset", "digits")
    study.optimize(guard(objective), n_trials=2)
    best = study.trials[0]
    assert study.trials[1].user_attrs["seen"] == {
        "study_name": "read me",
        "direction": "MAXIMIZE",
        "directions": ["MAXIMIZE"],
        "dataset": "digits",
        "trials": [(0, "COMPLETE"), (1, "RUNNING")],
        "get_trials": 1,
        "best": [best.value, best.params, best.number],
    }
    assert {"seen by 0": 0, "seen by 1": 1}.items() <= study.user_attrs.items()


def test_an_objective_stops_its_study(guard: Any) -> None:
    """trial.study.stop() from the worker ends the study."""

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            trial.study.stop()
        return trial.suggest_float("x", -1, 1)

    study = optuna.create_study()
    study.optimize(guard(objective), n_trials=40)
    assert states(study) == [COMPLETE, COMPLETE]


def test_an_objective_stops_a_study_with_several_jobs(fresh_guard: Any) -> None:
    """With several jobs, trials that run when one says stop are finished, and no others begin."""

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 2:
            trial.study.stop()
        return trial.suggest_float("x", -1, 1)

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=400, n_jobs=2)
    assert 3 <= len(study.trials) < 400
    assert set(states(study)) == {COMPLETE}


def test_a_study_inside_an_objective_is_its_own(fresh_guard: Any) -> None:
    """An objective may run a whole study of its own in the worker: the outer one does not see its trials."""

    def objective(trial: optuna.Trial) -> float:
        inner = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=trial.number))
        inner.optimize(lambda t: t.suggest_float("y", 0, 1), n_trials=3)
        trial.set_user_attr("inner", len(inner.trials))
        return inner.best_value

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=2)
    assert [t.user_attrs["inner"] for t in study.trials] == [3, 3]
    assert [t.params for t in study.trials] == [{}, {}]


# What can be guarded


@pytest.mark.parametrize("kind", ["function", "lambda", "partial", "object", "bound", "class method", "jit", "method"])
def test_any_callable_is_an_objective(guard: Any, kind: str) -> None:
    """Functions, lambdas, partials, objects, methods, closures over jitted functions: all are guarded alike."""
    offset = 0.25
    functions: dict[str, tuple[Any, Callable[[float], float]]] = {
        "function": (square, lambda x: x**2),
        "lambda": (lambda trial: trial.suggest_float("x", -1, 1) + offset, lambda x: x + offset),
        "partial": (functools.partial(Search.method, Search(2.0)), lambda x: 2 * x),
        "object": (Search(4.0), lambda x: 4 * x),
        "bound": (Search(5.0).method, lambda x: 5 * x),
        "class method": (Search.of_class, lambda x: 3 * x),
        "jit": (lambda trial: loss(trial.suggest_float("x", -1, 1)), lambda x: (x - 0.5) ** 2),
        "method": (None, lambda x: 7 * x),
    }
    function, expected = functions[kind]
    study = optuna.create_study()
    study.optimize(Search(7.0).guarded if kind == "method" else guard(function), n_trials=1)
    assert study.best_value == pytest.approx(expected(study.best_params["x"]), rel=1e-6, abs=1e-6)


def test_the_guarded_function_keeps_its_face() -> None:
    """Name, docstring and the original are where functools.wraps puts them."""
    guarded = jaxguard.isolated_jax_worker(square)
    assert (guarded.__name__, guarded.__qualname__, guarded.__module__) == ("square", "square", __name__)
    assert guarded.__doc__ == square.__doc__
    assert guarded.__wrapped__ is square


def test_no_name_of_an_argument_is_taken(fresh_guard: Any) -> None:
    """Keyword arguments named like options of the guard reach the function."""
    names = {"self": 1, "function": 2, "timeout": 3, "gpus": 4, "trial": 5, "args": 6, "env": 7}
    assert fresh_guard(lambda **kwargs: kwargs)(**names) == names


def test_each_call_is_a_new_process_unless_workers_are_reused(guard: Any) -> None:
    """reuse=False: each trial has a process of its own; reuse=True: trials in a row share one."""
    study = optuna.create_study()
    study.optimize(guard(lambda trial: trial.set_user_attr("worker", os.getpid()) or 0.0), n_trials=2)
    pids = {t.user_attrs["worker"] for t in study.trials}
    assert len(pids) == (1 if guard.reuse else 2)
    assert os.getpid() not in pids


# What comes back


def test_values_arrive_as_python_numbers(guard: Any) -> None:
    """JAX and NumPy scalars and JAX reports become what the study stores: plain floats."""

    def objective(trial: optuna.Trial) -> Any:
        x = trial.suggest_float("x", 0, 1)
        trial.report(jnp.float32(0.5), 0)
        trial.report(np.float32(0.25), 1)
        trial.set_user_attr("accuracy", jnp.float32(0.75))
        trial.set_user_attr("curve", jnp.arange(3))
        return jnp.asarray(x)

    study = optuna.create_study()
    study.optimize(guard(objective), n_trials=1)
    trial = study.trials[0]
    assert trial.state == COMPLETE
    assert type(trial.value) is float
    assert trial.value == pytest.approx(trial.params["x"], rel=1e-6)
    assert trial.intermediate_values == {0: 0.5, 1: 0.25}
    assert {type(v) for v in trial.intermediate_values.values()} == {float}
    accuracy, curve = trial.user_attrs["accuracy"], trial.user_attrs["curve"]
    assert isinstance(accuracy, (int, float, np.generic, np.ndarray))
    assert float(accuracy) == 0.75
    assert isinstance(curve, (list, np.ndarray))
    assert list(curve) == [0, 1, 2]


def test_several_objectives_arrive_as_several_values(fresh_guard: Any) -> None:
    """A multi-objective study gets its tuple; report is refused there as Optuna refuses it."""

    def objective(trial: optuna.Trial) -> tuple[Any, float]:
        x = trial.suggest_float("x", 0, 1)
        try:
            trial.report(x, 0)
        except NotImplementedError:
            trial.set_user_attr("refused", True)
        return jnp.float32(0.5), np.float64(x)

    study = optuna.create_study(directions=["minimize", "maximize"])
    study.optimize(fresh_guard(objective), n_trials=2)
    assert [t.values for t in study.trials] == [[0.5, t.params["x"]] for t in study.trials]
    assert all(t.user_attrs["refused"] for t in study.trials)
    assert len(study.best_trials) == 1


def test_a_value_that_is_no_number_fails_the_trial(fresh_guard: Any) -> None:
    """None, nan and a wrong number of values end as FAIL, as without the guard, and the study goes on."""

    def objective(trial: optuna.Trial) -> Any:
        return [None, float("nan"), (1.0, 2.0), "much", 1.0][trial.number]

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=5)
    assert states(study) == [FAIL, FAIL, FAIL, FAIL, COMPLETE]


def test_each_trial_says_where_it_ran(guard: Any) -> None:
    """The user attribute `jaxguard` is a JSON object: version, host, pid, devices, share, waited_s, run_s."""

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("worker", os.getpid())
        return 0.0

    study = optuna.create_study()
    study.optimize(guard(objective), n_trials=1)
    trial = study.trials[0]
    facts = trial.user_attrs["jaxguard"]
    assert isinstance(facts, dict)
    assert json.loads(json.dumps(facts)) == facts
    assert {"version", "host", "pid", "devices", "share", "waited_s", "run_s"} <= set(facts)
    assert isinstance(facts["version"], int)
    assert facts["host"] == socket.gethostname()
    assert facts["pid"] == trial.user_attrs["worker"] != os.getpid()
    assert isinstance(facts["devices"], list)
    assert len(facts["devices"]) == 1
    assert facts["share"] == 1
    assert facts["waited_s"] >= 0
    assert 0 < facts["run_s"] <= (trial.datetime_complete - trial.datetime_start).total_seconds() + 0.01


def test_a_trial_that_fails_or_is_pruned_says_where_it_ran_too(fresh_guard: Any) -> None:
    """The attribute is there however the trial ended: failed, pruned, its process dead."""

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("worker", os.getpid())
        if trial.number == 0:
            raise Broken
        if trial.number == 1:
            raise optuna.TrialPruned
        os._exit(1)

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=3, catch=(Broken, jaxguard.WorkerDied))
    assert states(study) == [FAIL, PRUNED, FAIL]
    assert [t.user_attrs["jaxguard"]["pid"] for t in study.trials] == [t.user_attrs["worker"] for t in study.trials]


def test_the_attribute_says_how_long_a_trial_waited(fresh_guard: Any, slots: Any) -> None:
    """waited_s is the time in line: two jobs on one slot, and the second waits for as long as the first runs."""
    slots(1)

    def objective(trial: optuna.Trial) -> float:
        time.sleep(0.3)
        return 0.0

    study = optuna.create_study()
    study.optimize(fresh_guard(objective), n_trials=2, n_jobs=2)
    first, second = sorted((t.user_attrs["jaxguard"] for t in study.trials), key=lambda facts: facts["waited_s"])
    assert first["run_s"] >= 0.3
    assert second["waited_s"] >= 0.3


def test_the_parents_jax_stays_unstarted(run_python: Any) -> None:
    """Results, reports and attributes with JAX values start no JAX backend in the parent, decoration neither."""
    code = """
import threading
import jax, jax.numpy as jnp, optuna
from jax._src import xla_bridge
from jaxguard import isolated_jax_worker, slot_count, trial_jit

@trial_jit
def step(x):
    return x * 2

def objective(trial):
    value = step(jnp.float32(trial.suggest_float("x", 0, 1)))
    trial.report(value, 0)
    trial.set_user_attr("value", value)
    return value

assert slot_count() == 2
for reuse in (False, True):
    study = optuna.create_study()
    study.optimize(isolated_jax_worker(objective, reuse=reuse), n_trials=2, n_jobs=2)
    assert all(abs(t.value - 2 * t.params["x"]) < 1e-6 for t in study.trials)
result = isolated_jax_worker(lambda: {"w": jnp.ones(3), "key": jax.random.key(0), "half": jnp.bfloat16(2)})()
assert result["w"].sum() == 3
assert not xla_bridge.backends_are_initialized(), "the guard started JAX here"
jnp.ones(1).block_until_ready()
assert xla_bridge.backends_are_initialized(), "this question cannot tell a started JAX"
print("unstarted")
"""
    assert run_python(code).check().stdout.splitlines()[-1] == "unstarted"


# What goes wrong


def test_a_failing_objective_fails_its_trial_and_gives_the_slot_back(guard: Any, slots: Any) -> None:
    """The exception reaches the caller of optimize with type, text and arguments; the only slot is free again."""
    slots(1)

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("x", 0, 1)
        message = "no such luck"
        raise Broken(message, trial.number)

    study = optuna.create_study()
    with pytest.raises(Broken) as caught:
        study.optimize(guard(objective), n_trials=3)
    assert caught.value.args == ("no such luck", 0)
    assert states(study) == [FAIL]
    assert "x" in study.trials[0].params
    study.optimize(guard(square), n_trials=1)
    assert states(study) == [FAIL, COMPLETE]


def test_catch_takes_exceptions_by_type(guard: Any) -> None:
    """catch=(MyError,) catches what the objective raised, and nothing else."""

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 0:
            raise Broken
        raise LookupError

    study = optuna.create_study()
    with pytest.raises(LookupError):
        study.optimize(guard(objective), n_trials=6, catch=(Broken,))
    assert states(study) == [FAIL, FAIL]


def test_catch_takes_an_exception_class_of_the_script(run_python: Any) -> None:
    """An exception class that lives in the script itself matches catch= too."""
    code = """
import optuna
from jaxguard import isolated_jax_worker

class Mine(Exception):
    pass

@isolated_jax_worker
def objective(trial):
    raise Mine(trial.number)

study = optuna.create_study()
study.optimize(objective, n_trials=2, catch=(Mine,))
print([t.state.name for t in study.trials])
"""
    assert run_python(code).check().stdout.splitlines()[-1] == "['FAIL', 'FAIL']"


def test_a_failing_trial_loses_no_other(guard: Any) -> None:
    """With four jobs on two slots, trials that raise leave the others complete and both slots free."""

    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        if trial.number % 3 == 1:
            raise Broken(trial.number)
        return x

    study = optuna.create_study()
    study.optimize(guard(objective), n_trials=6, n_jobs=4, catch=(Broken,))
    assert states(study) == [FAIL if n % 3 == 1 else COMPLETE for n in range(6)]
    assert all(t.value == t.params["x"] for t in study.trials if t.state == COMPLETE)
    assert slots_are_free(2)


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: exec("raise SystemExit(3)"), 3),
        (lambda: os._exit(7), 7),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
    ],
    ids=["SystemExit", "_exit", "SIGKILL"],
)
def test_an_objective_that_ends_its_process_fails_only_its_trial(
    guard: Any, slots: Any, end: Callable[[], None], code: int
) -> None:
    """SystemExit, os._exit or a kill become WorkerDied with the code; the next trial runs in the only slot."""
    slots(1)

    def objective(trial: optuna.Trial) -> float:
        trial.suggest_float("x", 0, 1)
        if trial.number == 0:
            end()
        return 1.0

    guarded, died = guard(objective), []

    def remember(trial: optuna.Trial) -> float:
        try:
            return guarded(trial)
        except jaxguard.WorkerDied as e:
            died.append(str(e))
            raise

    study = optuna.create_study()
    study.optimize(remember, n_trials=2, catch=(jaxguard.WorkerDied,))
    assert states(study) == [FAIL, COMPLETE]
    assert len(died) == 1
    assert str(code) in died[0] or (code < 0 and "SIGKILL" in died[0])


# The options of optimize


def test_callbacks_run_in_the_parent_with_the_finished_trial(guard: Any) -> None:
    """Callbacks see each finished trial in order, in the study's own process, and can stop the study."""
    seen = []

    def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        seen.append((os.getpid(), trial.number, trial.state, trial.value == trial.params["x"] ** 2))
        if trial.number == 1:
            study.stop()

    study = optuna.create_study()
    study.optimize(guard(square), n_trials=10, callbacks=[callback])
    assert seen == [(os.getpid(), n, COMPLETE, True) for n in range(2)]


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_a_callback_that_raises_ends_the_study_as_without_the_guard(fresh_guard: Any, n_jobs: int) -> None:
    """Its exception comes out of optimize, and the trial that it was called for stays as it was told."""

    def callback(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        del study
        if trial.number == 1:
            raise LookupError("of the callback")

    def run(objective: Any) -> list[Any]:
        study = optuna.create_study()
        with pytest.raises(LookupError, match="of the callback"):
            study.optimize(objective, n_trials=20, n_jobs=n_jobs, callbacks=[callback])
        return states(study)[:2]

    assert run(fresh_guard(square)) == run(square) == [COMPLETE] * 2


def test_max_trials_callback_counts_guarded_trials(fresh_guard: Any) -> None:
    """Optuna's own MaxTrialsCallback ends a guarded study."""
    study = optuna.create_study()
    callback = optuna.study.MaxTrialsCallback(3, states=(COMPLETE,))
    study.optimize(fresh_guard(square), n_trials=10, callbacks=[callback])
    assert states(study) == [COMPLETE] * 3


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_timeout_of_optimize_ends_the_study_between_trials(fresh_guard: Any, n_jobs: int) -> None:
    """optimize(timeout=) lets running trials finish and starts no others."""
    start = time.monotonic()
    study = optuna.create_study()
    study.optimize(fresh_guard(square), timeout=0.5, n_jobs=n_jobs)
    assert set(states(study)) == {COMPLETE}
    assert time.monotonic() - start < 60


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
@pytest.mark.parametrize("n_jobs", [1, 2])
def test_the_progress_bar_counts_guarded_trials(
    fresh_guard: Any, capsys: pytest.CaptureFixture[str], n_jobs: int
) -> None:
    """show_progress_bar shows all trials done."""
    pytest.importorskip("tqdm")
    study = optuna.create_study()
    study.optimize(fresh_guard(square), n_trials=3, n_jobs=n_jobs, show_progress_bar=True)
    assert "3/3" in capsys.readouterr().err
    assert states(study) == [COMPLETE] * 3


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_gc_after_trial_is_harmless(fresh_guard: Any, n_jobs: int) -> None:
    """gc_after_trial collects in the parent while others run."""
    study = optuna.create_study()
    study.optimize(fresh_guard(square), n_trials=4, n_jobs=n_jobs, gc_after_trial=True)
    assert states(study) == [COMPLETE] * 4


def test_optimize_again_continues_the_study(guard: Any) -> None:
    """A second optimize, with another objective or without a guard, continues the same study."""
    study = optuna.create_study()
    study.optimize(guard(square), n_trials=1)
    study.optimize(square, n_trials=1)
    study.optimize(guard(lambda trial: trial.suggest_float("x", -1, 1)), n_trials=1)
    assert [t.number for t in study.trials] == [0, 1, 2]
    assert states(study) == [COMPLETE] * 3


def test_an_objective_leaves_its_files_where_the_parent_is(
    guard: Any, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path in an objective means the directory of the caller at the call."""

    def objective(trial: optuna.Trial) -> float:
        pathlib.Path(f"trial-{trial.number}.txt").write_text("checkpoint")
        return 0.0

    guarded = guard(objective)
    monkeypatch.chdir(tmp_path)
    study = optuna.create_study()
    study.optimize(guarded, n_trials=1)
    assert [p.name for p in tmp_path.glob("*.txt")] == ["trial-0.txt"]
