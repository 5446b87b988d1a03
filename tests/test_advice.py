"""The usual advice: each row of the table in the Hydra guide says what really happens, where a CPU can show it."""

from __future__ import annotations

import os
import pathlib
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import jax
import joblib
import optuna
import pytest

from jaxguard import _jax_state, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (pathlib.Path(__file__).resolve().parents[1] / "docs" / "how-to" / "hydra.md").read_text(encoding="utf-8")
TABLE = PAGE[PAGE.index("| One is told") :]
ADVICE = re.findall(r"^\| (.*?) \| .* \| .* \|$", TABLE, re.MULTILINE)[1:]

HYDRA = """
import hydra, os, sys
@hydra.main(version_base=None)
def main(cfg):
    print("ran with", cfg)
if __name__ == "__main__":
    main()
"""


def the_sweepers_configuration_knows_no_backend(run_python: Any) -> None:
    words = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.joblib_backend=loky", "+x=1,2"]
    done = run_python(HYDRA, args=words)
    assert done.returncode != 0
    assert "joblib_backend" in done.stderr


def there_is_no_resolver_for_the_count(run_python: Any) -> None:
    words = ["--multirun", "hydra/launcher=joblib", "hydra.launcher.n_jobs=${jax_device_count}", "+x=1,2"]
    done = run_python(HYDRA, args=words)
    assert done.returncode != 0
    assert "jax_device_count" in done.stderr


def counting_devices_starts_jax(run_python: Any) -> None:
    code = "import jax\nfrom jaxguard import _jax_state, slot_count\nslot_count()\n"
    code += "print(_jax_state.started(), jax.device_count(), _jax_state.started())"
    assert run_python(code).check().stdout.split() == ["False", "1", "True"]


def study_of(objective: Any, trials: int, jobs: int) -> optuna.Study:
    study = optuna.create_study()
    study.optimize(objective, n_trials=trials, n_jobs=jobs)
    return study


def a_backend_around_optimize_does_nothing(_: Any) -> None:
    pids = set()

    def objective(trial: optuna.Trial) -> float:
        pids.add((os.getpid(), threading.get_ident()))
        time.sleep(0.05)
        return trial.suggest_float("x", 0, 1)

    with joblib.parallel_backend("loky"):
        study_of(objective, 4, 2)
    assert {pid for pid, _ in pids} == {os.getpid()}


def start_jax(_: int) -> tuple[int, int]:
    jax.numpy.ones(3).block_until_ready()
    return os.getpid(), _jax_state.threads_of_xla()


def joblibs_processes_keep_jax(_: Any) -> None:
    from joblib.externals.loky import get_reusable_executor

    try:
        first = joblib.Parallel(n_jobs=2)(joblib.delayed(start_jax)(n) for n in range(2))
        later = joblib.Parallel(n_jobs=2)(joblib.delayed(start_jax)(n) for n in range(2))
    finally:  # they would live on into other tests, with the slots of this one
        get_reusable_executor(reuse=True).shutdown(wait=True)
    assert {pid for pid, _ in later} & {pid for pid, _ in first}, "the same processes, which still have what they took"
    assert os.getpid() not in {pid for pid, _ in first}


def nobody_sets_a_trial_id(_: Any) -> None:
    names: set[str] = set()
    study_of(lambda trial: names.update(os.environ) or trial.suggest_float("x", 0, 1), 1, 1)
    assert not [name for name in names if name.startswith("OPTUNA_")]


def the_remainder_is_not_exclusive(_: Any) -> None:
    both, here = threading.Event(), [0, 0]

    def objective(trial: optuna.Trial) -> float:
        gpu = trial.number % 2
        here[gpu] += 1
        if here[gpu] == 2:
            both.set()
        if trial.number == 0:  # takes longer than the others
            both.wait(30)
        here[gpu] -= 1
        return 0.0

    study_of(objective, 3, 2)
    assert both.is_set(), "trials 0 and 2 were on one GPU at the same time"


def the_environment_belongs_to_the_process_and_to_its_start(_: Any) -> None:
    seen: dict[int, str] = {}
    meet = threading.Barrier(2, timeout=30)

    def objective(trial: optuna.Trial) -> float:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(trial.number)
        meet.wait()
        seen[trial.number] = os.environ["CUDA_VISIBLE_DEVICES"]
        return 0.0

    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        study_of(objective, 2, 2)
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    assert len(set(seen.values())) == 1, "both trials have the value of the later one"

    def too_late() -> tuple[int, int]:
        import jax

        before = jax.device_count()
        os.environ["JAX_NUM_CPU_DEVICES"] = "4"
        return before, jax.device_count()

    assert isolated_jax_worker(too_late)() == (1, 1)


def compiles(compile_cache: str) -> int:
    number = time.monotonic()

    @isolated_jax_worker(compile_cache=compile_cache)
    def objective(trial: optuna.Trial) -> float:
        import jax

        return float(jax.jit(lambda x: x * number)(1.0)) + trial.number

    study = study_of(objective, 2, 1)
    rows = [row for trial in study.trials for row in trial.user_attrs["jaxguard"]["programs"]]
    return sum(row["compiles"] for row in rows if row["function"] == "<lambda>")


def a_directory_per_process_shares_nothing(_: Any) -> None:
    assert compiles("private") == 2
    assert compiles("shared") == 1


def no_directory_is_the_default(_: Any) -> None:
    assert jax.config.jax_compilation_cache_dir is None
    jax.config.update("jax_compilation_cache_dir", None)
    assert compiles("shared") == 1


def the_platforms_name_is_not_the_workers(run_python: Any) -> None:
    code = """
import jax
jax.config.update("jax_platform_name", "cpu")
from jaxguard import isolated_jax_worker
print(isolated_jax_worker(lambda: __import__("jax").config.jax_platforms)())
"""
    assert run_python(code).check().stdout.split() == ["cpu"]


def there_is_no_such_log_level(_: Any) -> None:
    with pytest.raises(AttributeError, match="jax_log_level"):
        jax.config.update("jax_log_level", "DEBUG")
    assert "jax_logging_level" in jax.config.values


def module_level_jit_starts_nothing(run_python: Any) -> None:
    code = """
import jax
from jaxguard import _jax_state, isolated_jax_worker
step = jax.jit(lambda x: x + 1)
print(_jax_state.started(), float(isolated_jax_worker(lambda: step(1.0))()), _jax_state.started())
"""
    assert run_python(code).check().stdout.split() == ["False", "2.0", "False"]


def full_errors_are_a_matter_of_when(run_python: Any) -> None:
    job = HYDRA.replace('    print("ran with", cfg)', "    HERE\n    raise LookupError('on purpose')")
    setting = 'os.environ["HYDRA_FULL_ERROR"] = "1"'
    in_main = job.replace("HERE", "pass").replace("    main()\n", f"    {setting}\n    main()\n")
    assert "hydra/_internal/utils.py" in run_python(in_main).stderr
    guarded = "from jaxguard import isolated_jax_worker\n" + job.replace("HERE", setting).replace(
        "def main", "@isolated_jax_worker\ndef main"
    )
    done = run_python(guarded)
    assert "on purpose" in done.stderr
    assert "Set the environment variable HYDRA_FULL_ERROR=1" in done.stderr


SHOWN: dict[str, Callable[[Any], None]] = {
    "`joblib_backend: loky` in the sweeper's configuration": the_sweepers_configuration_knows_no_backend,
    "`n_jobs: ${jax_device_count}`": there_is_no_resolver_for_the_count,
    "`n_jobs=jax.device_count()`": counting_devices_starts_jax,
    '`parallel_backend("loky")` around `study.optimize`': a_backend_around_optimize_does_nothing,
    "joblib's default backend": joblibs_processes_keep_jax,
    "`OPTUNA_TRIAL_ID`": nobody_sets_a_trial_id,
    "`trial.number % n_gpus`": the_remainder_is_not_exclusive,
    "`CUDA_VISIBLE_DEVICES` inside the objective": the_environment_belongs_to_the_process_and_to_its_start,
    "a temporary cache directory per process": a_directory_per_process_shares_nothing,
    "`jax_compilation_cache_dir=None`": no_directory_is_the_default,
    "`jax_platform_name`": the_platforms_name_is_not_the_workers,
    "`jax_log_level`": there_is_no_such_log_level,
    "never jit at module level": module_level_jit_starts_nothing,
    "`HYDRA_FULL_ERROR` set inside `__main__`": full_errors_are_a_matter_of_when,
}


def test_the_table_is_shown_row_by_row() -> None:
    """No advice is answered without a test, and none is tested that is not answered."""
    assert list(SHOWN) == ADVICE


@pytest.mark.filterwarnings("ignore:.*parallel_backend.*")
@pytest.mark.parametrize("advice", list(SHOWN))
def test_what_it_really_does(advice: str, run_python: Callable[..., Any]) -> None:
    """As the table says."""
    SHOWN[advice](run_python)
