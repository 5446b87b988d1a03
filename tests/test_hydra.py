"""Hydra: a guarded job knows what an unguarded one knows, in every way to launch it, and fails as Hydra's jobs fail."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

import jaxguard
from jaxguard import isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

APP = pathlib.Path(__file__).resolve().parent / "hydra_app"
PLACE = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))
LAUNCHERS = {
    "run": ["lr=0.5"],
    "basic": ["--multirun", "lr=0.1,0.2,0.3"],
    "joblib": ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "lr=0.1,0.2,0.3"],
}


def run(script: str, *words: str, cwd: pathlib.Path, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Run an application as a user does, with its output in `cwd`."""
    where = ["hydra.run.dir=outputs/run", "hydra.sweep.dir=outputs"]
    done = subprocess.run(
        [sys.executable, str(APP / script), *words, *where],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")]), **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def jobs_of(folder: pathlib.Path) -> dict[str, Any]:
    """What each job wrote down, by the name of its output directory."""
    return {path.parent.name: json.loads(path.read_text()) for path in (folder / "outputs").glob("*/facts.json")}


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_a_job_is_as_without_the_guard(launcher: str, tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """Configuration, structured types, resolvers, HydraConfig, directories, `job.env_set`, the job's log file."""
    slots(2)
    seen, logs = {}, {}
    for guarded in "01":
        folder = tmp_path / guarded
        folder.mkdir()
        run("tune.py", *LAUNCHERS[launcher], cwd=folder, GUARDED=guarded)
        text = json.dumps(jobs_of(folder)).replace(str(folder), "FOLDER")
        seen[guarded] = json.loads(text)
        logs[guarded] = {
            path.parent.name: [line.partition("]")[2] for line in path.read_text().splitlines()]
            for path in (folder / "outputs").glob("*/tune.log")
        }
    assert seen["1"] == seen["0"]
    assert len(seen["1"]) == (1 if launcher == "run" else 3)
    assert all(facts["is_checked"] and facts["env_set"] == "yes" for facts in seen["1"].values())
    assert logs["1"] == logs["0"]
    assert all(len(lines) == 2 and "a library says" in lines[1] for lines in logs["1"].values())


def test_four_jobs_on_four_slots(tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """Started by joblib's launcher at the same moment, they are on four different slots, in four processes."""
    slots(4)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    words = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=4", "lr=0.1,0.2,0.3,0.4"]
    done = run("tune.py", *words, "together=4", f"folder={meeting}", cwd=tmp_path)
    assert sorted(path.read_text() for path in meeting.iterdir()) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    pids = [json.loads(line)["pid"] for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(set(pids)) == 4


@pytest.mark.parametrize("launcher", ["run", "basic", "joblib"])
@pytest.mark.parametrize("full", ["0", "1"])
def test_a_job_that_fails(launcher: str, full: str, tmp_path: pathlib.Path) -> None:
    """As Hydra reports it, with the worker's traceback; `HYDRA_FULL_ERROR=1` shows all."""
    done = run("tune.py", *LAUNCHERS[launcher], "fail=true", cwd=tmp_path, code=1, HYDRA_FULL_ERROR=full)
    assert "the job has failed on purpose" in done.stderr
    assert "In the worker:" in done.stderr
    assert re.search(r"line \d+, in job\n", done.stderr)
    if launcher != "joblib":  # whose processes forget the names of files
        assert f'{APP / "tune.py"}", line' in done.stderr
        assert "Error executing job with overrides: ['lr=" in done.stderr
        assert ("Set the environment variable HYDRA_FULL_ERROR=1" in done.stderr) == (full == "0")
        assert ("hydra/_internal/utils.py" in done.stderr) == (full == "1")


@pytest.mark.parametrize("words", [[], ["--multirun", "seed=1,2"]])
def test_a_study_inside_of_main(words: list[str], tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """A guarded objective has main's configuration in its closure, and composes others."""
    slots(2)
    done = run("study.py", *words, cwd=tmp_path)
    assert done.stdout.count("True 3 4 5 6") == (2 if words else 1)


def test_a_guarded_objective_in_a_guarded_main(run_python: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """It runs in main's own worker and slot, and does not wait for itself."""
    slots(1)
    code = textwrap.dedent("""
        import os
        import hydra, optuna
        from jaxguard import isolated_jax_worker

        @isolated_jax_worker
        def objective(trial):
            trial.set_user_attr("pid", os.getpid())
            return trial.suggest_float("x", 0, 1)

        @hydra.main(version_base=None)
        @isolated_jax_worker
        def main(cfg):
            study = optuna.create_study()
            study.optimize(objective, n_trials=3)
            print(len(study.trials), {trial.user_attrs["pid"] for trial in study.trials} == {os.getpid()})

        main()
    """)
    assert run_python(code).check().stdout.splitlines() == ["3 True"]


def test_configurations_travel(guard: Callable[..., Any]) -> None:
    """As arguments, in closures and as results they stay what they are: types, flags, interpolations, gaps."""
    from omegaconf import MISSING, DictConfig, OmegaConf, ReadonlyConfigError

    config = OmegaConf.create({"lr": 0.1, "twice": "${lr}", "layers": [1, {"a": "${twice}"}], "later": MISSING})
    OmegaConf.set_readonly(config, True)

    def change(given: DictConfig) -> tuple[DictConfig, Any, bool, float]:
        from omegaconf import ReadonlyConfigError

        try:
            given.lr = 3
            readonly = False
        except ReadonlyConfigError:
            readonly = True
        return given, given.layers, readonly, config.layers[1].a

    with guard() as worker:
        again, layers, readonly, of_closure = worker(change, config)
    assert isinstance(again, DictConfig)
    assert again == config
    assert (layers[1].a, readonly, of_closure) == (0.1, True, 0.1)
    assert OmegaConf.is_missing(again, "later")
    with pytest.raises(ReadonlyConfigError):
        again.lr = 2


def test_the_state_of_hydra_is_the_calls(fresh_guard: Any) -> None:
    """Outside of Hydra a worker has no HydraConfig, as its caller has none."""

    def has_one() -> bool:
        from hydra.core.hydra_config import HydraConfig

        return HydraConfig.initialized()

    assert fresh_guard(has_one)() is False
    assert isolated_jax_worker(has_one, reuse=True)() is False


@pytest.mark.parametrize(
    "launcher", [[], ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]], ids=["basic", "joblib"]
)
def test_the_optuna_sweeper(launcher: list[str], tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """Hydra's Optuna sweeper, which needs an Optuna of its own time, gets what guarded jobs return.

    Its environment is made by .ci/run; it cannot be installed beside the Optuna of the other tests.
    """
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    slots(2)
    sweeper = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=2"]
    run("sweep.py", "--multirun", *sweeper, "+x=interval(0,1)", "hydra.sweeper.sampler.seed=1", *launcher, cwd=tmp_path)
    best = (tmp_path / "outputs" / "optimization_results.yaml").read_text()
    x, value = map(float, re.findall(r": ([0-9.e-]+)$", best, re.MULTILINE))
    assert value == pytest.approx((x - 0.3) ** 2, abs=1e-6)


def test_the_page_works_by_pasting(tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """Each program of the how-to, saved under the name it is given there, and each command."""
    slots(2)
    page = (APP.parents[1] / "docs" / "how-to" / "hydra.md").read_text(encoding="utf-8")
    programs = re.findall(r"This is\s+`(\w+\.py)`:.*?```python\n(.*?)```", page, re.DOTALL)
    assert [name for name, _ in programs] == ["tune.py", "study.py"]
    for name, text in programs:
        (tmp_path / name).write_text(text)
    commands = re.findall(r"^\$ python (.*)$", page, re.MULTILINE)
    assert len(commands) == 2
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
    for command in [*commands, "study.py +highest=2"]:
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert "best value 0." in done.stdout
    logs = [path.read_text() for path in tmp_path.rglob("tune.log")]
    assert sorted(log.rpartition(" ")[2].strip() for log in logs) == sorted(["1.0", "2.0", "3.0", "4.0"] * 2)
