"""The report: what trials compiled, what it cost, and that only constants changed."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import steps
from hypothesis import given
from hypothesis import strategies as st

from jaxguard import _programs, _recompiles, compile_report, isolated_jax_worker, trial_jit
from jaxguard._report import CompiledFunction, CompileReport

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Give each test a store of its own, and a program that has seen nothing yet."""
    monkeypatch.setattr(_recompiles, "_functions", {})
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(tmp_path / "store"))


def with_a_closure(trial: optuna.Trial) -> float:
    """Train with a learning rate that is a constant of the step."""
    import jax

    lr = trial.suggest_float("lr", 1e-3, 1e-1)
    weights, x = steps.weights_and_data()

    @jax.jit
    def closed_step(weights: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (steps.forward(w, x) ** 2).mean())(weights)
        return jax.tree.map(lambda p, g: p - lr * g, weights, gradient), loss

    return float(closed_step(weights)[1])


def with_traced(trial: optuna.Trial) -> float:
    """Train with a learning rate that is an argument."""
    import jax

    weights, x = steps.weights_and_data()

    def traced_step(weights: Any, lr: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (steps.forward(w, x) ** 2).mean())(weights)
        return jax.tree.map(lambda p, g: p - lr * g, weights, gradient), loss

    step = trial_jit(traced_step, traced={"lr": trial.suggest_float("lr", 1e-3, 1e-1)})
    return float(step(weights)[1])


def with_shapes(trial: optuna.Trial) -> float:
    """Train with another shape each time: no constant is the reason."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def shaped_step(x: Any) -> Any:
        return jnp.tanh(x).sum() * 0.5

    return float(shaped_step(jnp.ones(trial.number + 1)))


def study_of(objective: Callable[[optuna.Trial], float], n_trials: int = 6, **options: Any) -> optuna.Study:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(isolated_jax_worker(**options)(objective), n_trials=n_trials)
    return study


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "only constants changed" in record.getMessage()]


@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_programs_that_differ_only_in_constants(
    caplog: pytest.LogCaptureFixture,
    reuse: bool,  # noqa: FBT001
) -> None:
    """One warning per function, with values and cures; the report has the same, from the attributes alone."""
    study = study_of(with_a_closure, reuse=reuse)
    (warning,) = said(caplog)
    assert warning.startswith("jaxguard: closed_step needed ")
    for cure in ("traced=", "as array arguments", "build the optimizer inside the step", "optax.inject_hyperparams"):
        assert cure in warning
    rates = {f"{trial.params['lr']:g}" for trial in study.trials}
    report = compile_report(study)
    row = report[0]
    assert (row.function, row.trials, row.programs, row.compilations) == ("closed_step", 6, 6, 6)
    assert row.compile_s > 0
    assert len(row.constants) >= 2
    assert {f"{float(constant):.4g}" for constant in row.constants} <= {f"{float(rate):.4g}" for rate in rates}
    assert "only constants changed" in str(report)
    assert "function" in str(report).splitlines()[0]


def test_studies_do_not_tell_of_each_other(caplog: pytest.LogCaptureFixture) -> None:
    """Two studies in one program may have functions of one name: each has its own reasons, and its own warning."""
    for _ in range(2):
        (row,) = [row for row in compile_report(study_of(with_a_closure)) if row.function == "closed_step"]
        assert row.constants
    assert len(said(caplog)) == 2


def test_what_is_no_study() -> None:
    """Say what it takes."""
    with pytest.raises(TypeError, match="compile_report takes an Optuna study, not list"):
        compile_report([])  # type: ignore[arg-type]


def test_a_notebook_shows_the_table() -> None:
    """The last value of a cell is the table, not a list."""
    row = CompiledFunction("<lambda>", 1, 1, 1, 0.5, 0.0, stored=True, constants=())
    small = CompiledFunction("small", 1, 1, 1, 0.001, 0.0, stored=True, constants=())
    report = CompileReport([row, small])
    assert "&lt;lambda&gt;" in report._repr_html_()
    assert str(report).splitlines()[-1] == "and 1 function of less than 0.05 s"


def test_one_program_with_traced(caplog: pytest.LogCaptureFixture) -> None:
    """With traced= all trials share one program: compiled once, found in all the others."""
    (row,) = [row for row in compile_report(study_of(with_traced)) if row.function == "traced_step"]
    assert (row.trials, row.programs, row.compilations) == (6, 1, 1)
    assert row.saved_s > 0
    assert not said(caplog)


def test_programs_of_other_shapes_are_no_matter_of_constants(caplog: pytest.LogCaptureFixture) -> None:
    """They are looked at, found to differ in more, and nothing is said."""
    (row,) = [row for row in compile_report(study_of(with_shapes)) if row.function == "shaped_step"]
    assert row.programs == 6
    assert not row.constants
    assert not said(caplog)


def test_what_jax_does_not_store(capfd: Any) -> None:
    """The report says why a program is compiled in every trial."""
    report = compile_report(study_of(lambda _: steps.printing(), 2))
    (row,) = [row for row in report if row.function == "step"]
    if row.stored:
        pytest.skip("this JAX stores programs with host callbacks")
    assert (row.programs, row.compilations, row.stored) == (1, 2, False)
    assert "not stored by JAX: a host callback" in str(report)


def test_a_study_on_disk(tmp_path: pathlib.Path) -> None:
    """The report needs the study alone: later, elsewhere, on any storage; trials without a guard do not count."""
    url = f"sqlite:///{tmp_path / 'study.db'}"
    study = optuna.create_study(storage=url, study_name="one")
    study.optimize(isolated_jax_worker(lambda _: steps.plain()), n_trials=2)
    study.optimize(lambda _: 0.0, n_trials=1)
    loaded = optuna.load_study(storage=url, study_name="one")
    assert compile_report(loaded) == compile_report(study)
    (row,) = [row for row in compile_report(loaded) if row.function == "plain_step"]
    assert row.trials == 2
    assert str(compile_report(optuna.create_study())).startswith("No trial of this study has compiled anything")


def test_many_programs_do_not_swell_the_study() -> None:
    """The attribute lists the sixteen that count most, and sums the others up."""
    programs = [_programs.Program(f"{n:064x}", f"f{n}", compile_s=float(n)) for n in range(20)]
    facts = _programs.facts(programs)
    assert [program["function"] for program in facts["programs"]] == [f"f{n}" for n in range(19, 3, -1)]
    assert facts["other_programs"] == {
        "programs": 4,
        "compiles": 4,
        "compile_s": 6.0,
        "cache_hits": 0,
        "saved_s": 0,
    }
    study = optuna.create_study()
    trial = study.ask()
    trial.set_user_attr("jaxguard", facts)
    study.tell(trial, 0.0)
    *listed, others = compile_report(study)
    assert [row.function for row in listed] == [f"f{n}" for n in range(19, 3, -1)]
    assert others.function == "(others)"
    assert (others.programs, others.compilations, others.compile_s) == (4, 4, 6.0)


# ---------------------------------------------------------------- what differs


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_constants_are_taken_out(values: list[float]) -> None:
    """Two modules that differ in constants have one text; the constants are told; attributes are no constants."""
    lines = [f"%{n} = stablehlo.constant dense<{v:e}> : tensor<f32>\n" for n, v in enumerate(values)]
    module, other = (
        "".join(lines),
        "".join(f"{line.partition('dense<')[0]}dense<1.0> : tensor<f32>\n" for line in lines),
    )
    text, constants = _recompiles.without_constants(module)
    assert (text, ["1.0"] * len(values)) == _recompiles.without_constants(other)
    assert [float(constant) for constant in constants] == pytest.approx(values, rel=1e-5)
    assert _recompiles.without_constants(module.replace("f32", "f64"))[0] != text
    padding = "padding = dense<[[0, 1]]> : tensor<1x2xi64>"
    wider = padding.replace("[0, 1]", "[0, 2]")
    assert _recompiles.without_constants(padding)[0] != _recompiles.without_constants(wider)[0]


def test_arrays_are_not_shown() -> None:
    """A constant array is named, not spelt out; a large one, which is not in the text, is found by what is the same."""
    one, other = (_recompiles.without_constants(f"stablehlo.constant dense<[{n}.0, 1.0]>")[1][0] for n in (1, 2))
    assert one != other
    assert _recompiles.differing([["1", one], ["1", other]]) == [one, other]
    assert _recompiles.describe("step", 3, [one, other]).endswith(
        "only constants changed (an array). Pass captured arrays to it as arguments."
    )
    (large,) = _recompiles.without_constants("stablehlo.constant dense_resource<__elided__>")[1]
    assert _recompiles.differing([["1", large], ["1", large]]) == [large]
    assert _recompiles.differing([["1", large], ["2", large]]) == ["1", "2"]
    assert _recompiles.differing([["1"], ["1"]]) == []


def program(key: str, constant: str, text: str = "t") -> dict[str, Any]:
    return {"function": "f", "key": key, "text": text, "constants": [constant]}


def test_what_one_call_needs_twice_is_no_matter_of_trials() -> None:
    """Two functions of one name in one objective, such as two lambdas, are not each other's other version."""
    both = [program("a", "2.0"), program("b", "3.0")]
    assert _recompiles.reasons([both, both]) == []
    assert _recompiles.reasons([[program("a", "2.0")], [program("b", "3.0")]]) == ["2.0", "3.0"]
    assert _recompiles.reasons([[program("a", "2.0")], [program("b", "3.0", "other")]]) == []


def test_whole_numbers_may_be_lengths() -> None:
    """They are compared to the last digit, and the advice says what cannot be cured."""
    assert _recompiles.reasons([[program("a", "2000000001")], [program("b", "2000000002")]])
    assert "unless they are lengths" in _recompiles.describe("f", 3, ["2", "3"])
    assert "optax" in _recompiles.describe("f", 3, ["-1.000000e-01", "2.000000e+00"])
    assert "(-0.1, 2)" in _recompiles.describe("f", 3, ["-1.000000e-01", "2.000000e+00"])
