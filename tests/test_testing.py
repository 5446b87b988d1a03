"""`jaxguard.testing` and the pytest plugin: what users put into their own tests."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
import venv
from typing import TYPE_CHECKING, Any

import optuna
import pytest

import jaxguard
from jaxguard import testing

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]


# ---------------------------------------------------------------- fake slots


def test_fake_slots_are_counted_and_taken_back(slots: Callable[[int], None]) -> None:
    """Inside there are as many as asked for, nested blocks count for themselves, outside all is as before."""
    slots(2)
    with testing.fake_slots(5):
        assert jaxguard.slot_count() == 5
        with testing.fake_slots(1):
            assert jaxguard.slot_count() == 1
        assert jaxguard.slot_count() == 5
        assert jaxguard.slot_count(gpus=2) == 2
    assert jaxguard.slot_count() == 2

    with pytest.raises(KeyError), testing.fake_slots(3):
        raise KeyError
    assert jaxguard.slot_count() == 2


def test_fake_slots_without_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where JAXGUARD_DEVICES was not set, it is not set afterwards."""
    monkeypatch.delenv("JAXGUARD_DEVICES")
    with testing.fake_slots(3):
        assert jaxguard.slot_count() == 3
    assert "JAXGUARD_DEVICES" not in os.environ


def test_fake_slots_are_real_slots() -> None:
    """Guarded calls hold them and wait for them, and child processes share them."""
    with testing.fake_slots(1):
        child = [sys.executable, "-c", "import jaxguard; print(jaxguard.slot_count())"]
        place = str(pathlib.Path(jaxguard.__file__).resolve().parents[1])
        env = {**os.environ, "PYTHONPATH": place}
        done = subprocess.run(child, env=env, capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout == "1\n"

        assert jaxguard.isolated_jax_worker(os.getpid)() != os.getpid()
        caught: list[BaseException] = []

        def attempt() -> None:
            try:
                jaxguard.isolated_jax_worker(os.getpid, slot_timeout=0)()
            except jaxguard.SlotTimeout as error:
                caught.append(error)

        with jaxguard.gpu_slot():
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join(60)
        assert len(caught) == 1


def test_fake_slots_are_nobody_elses() -> None:
    """Two blocks share nothing: what one holds, the other has free."""
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with jaxguard.gpu_slot():
            entered.set()
            leave.wait(60)

    with testing.fake_slots(1):
        thread = threading.Thread(target=hold)
        thread.start()
        assert entered.wait(60)
    try:
        with testing.fake_slots(1), jaxguard.gpu_slot(slot_timeout=0) as slot:
            assert len(slot.devices) == 1
    finally:
        leave.set()
        thread.join(60)


@pytest.mark.parametrize("number", [0, -1, True, "2", 1.5, None])
def test_bad_numbers_of_fake_slots(number: Any) -> None:
    """A number of slots is a whole number from 1."""
    with pytest.raises((TypeError, ValueError)), testing.fake_slots(number):
        pass


# ---------------------------------------------------------------- inline


@pytest.fixture(params=["inline()", "JAXGUARD_INLINE=1"])
def inline(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run guarded functions in this process, by either way."""
    if request.param == "inline()":
        with testing.inline():
            yield
    else:
        monkeypatch.setenv("JAXGUARD_INLINE", "1")
        yield


@pytest.mark.usefixtures("inline")
def test_inline_runs_here() -> None:
    """Guarded functions run in this process, in each form, and see and change what is here."""
    seen: list[int] = []

    @jaxguard.isolated_jax_worker(timeout=10, env={"A": "1"}, gpus=0)
    def work(number: int) -> int:
        seen.append(number)
        return os.getpid()

    assert work(3) == os.getpid()
    with jaxguard.isolated_jax_worker(reuse=True) as worker:
        assert worker(os.getpid) == os.getpid()
        assert worker(work, 4) == os.getpid()
    assert seen == [3, 4]


@pytest.mark.usefixtures("inline")
def test_inline_raises_the_exception_itself() -> None:
    """An exception comes with the frames of the function, as a debugger wants it, and as the same object."""
    lock = threading.Lock()

    class MyError(Exception):
        pass

    error = MyError("a", 2)

    def fails(number: int) -> None:
        error.lock = threading.Lock()
        raise error if number else MyError

    with pytest.raises(MyError) as caught:
        jaxguard.isolated_jax_worker(fails)(3)

    assert caught.value is error
    assert caught.traceback[-1].frame.f_locals["number"] == 3
    assert not lock.locked()


@pytest.mark.usefixtures("inline")
def test_inline_refuses_what_could_not_travel() -> None:
    """A capture or argument that a worker could not get is refused here, too, with the same words."""
    my_lock = threading.Lock()

    @jaxguard.isolated_jax_worker
    def my_objective(thing: Any = None) -> Any:
        return my_lock if thing is None else thing

    with pytest.raises(TypeError, match="my_lock") as caught:
        my_objective()
    assert "my_objective" in str(caught.value)

    with pytest.raises(TypeError, match="lock"):
        jaxguard.isolated_jax_worker(lambda thing: thing)(my_lock)


@pytest.mark.usefixtures("inline")
def test_inline_runs_one_at_a_time() -> None:
    """Threads take turns, so that a debugger has one function before it; nested calls do not wait for themselves."""
    busy, most = 0, 0

    @jaxguard.isolated_jax_worker
    def inner() -> None:
        time.sleep(0.01)

    @jaxguard.isolated_jax_worker
    def work(number: int) -> int:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        inner()
        busy -= 1
        return number

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert (busy, most) == (0, 1)


@pytest.mark.usefixtures("inline")
def test_a_study_inline() -> None:
    """An objective has its trial itself; pruning, attributes and errors work as without a guard."""

    @jaxguard.isolated_jax_worker
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        trial.set_user_attr("pid", os.getpid())
        if trial.number == 1:
            raise optuna.TrialPruned
        return x

    study = optuna.create_study()
    study.optimize(objective, n_trials=3)

    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert {trial.user_attrs["pid"] for trial in study.trials} == {os.getpid()}


def test_after_inline_calls_go_out_again() -> None:
    """When the block ends, also by an exception, guarded calls have workers again."""
    with pytest.raises(KeyError), testing.inline():
        raise KeyError
    with testing.inline():
        pass

    assert jaxguard.isolated_jax_worker(os.getpid)() != os.getpid()


# ---------------------------------------------------------------- a project downstream

DOWNSTREAM = {
    "pyproject.toml": """
        [build-system]
        requires = ["hatchling"]
        build-backend = "hatchling.build"

        [project]
        name = "downstream-tuning"
        version = "0.0.1"
        dependencies = ["jaxguard", "optuna"]

        [tool.hatch.build.targets.wheel]
        packages = ["src/downstream_tuning"]

        [tool.pytest.ini_options]
        filterwarnings = ["error"]
        testpaths = ["tests"]
    """,
    "src/downstream_tuning/__init__.py": """
        import os
        import threading

        import jax
        import optuna
        from jaxguard import isolated_jax_worker, slot_count

        LOCK = threading.Lock()

        @jax.jit
        def loss(x):
            return (x - 2.0) ** 2

        @isolated_jax_worker
        def objective(trial):
            with LOCK:
                trial.set_user_attr("pid", os.getpid())
                return float(loss(trial.suggest_float("x", -10.0, 10.0)))

        def tune(n_trials):
            study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
            study.optimize(objective, n_trials=n_trials, n_jobs=slot_count())
            return study
    """,
    "tests/test_tuning.py": """
        import os

        import downstream_tuning
        import jaxguard
        import pytest

        def pids(study):
            return {trial.user_attrs["pid"] for trial in study.trials}

        def test_two_slots(jaxguard_fake_slots):
            assert jaxguard.slot_count() == 2
            study = downstream_tuning.tune(4)
            assert len(study.trials) == 4
            assert len(pids(study)) == 4
            assert os.getpid() not in pids(study)

        def test_another_number(jaxguard_fake_slots):
            jaxguard_fake_slots(3)
            assert jaxguard.slot_count() == 3
            jaxguard_fake_slots(1)
            assert jaxguard.slot_count() == 1

        def test_inline(jaxguard_inline):
            study = downstream_tuning.tune(2)
            assert pids(study) == {os.getpid()}

        def test_inline_is_checked(jaxguard_inline):
            lock = downstream_tuning.LOCK
            with pytest.raises(TypeError, match="lock"):
                jaxguard.isolated_jax_worker(lambda: lock)()

        def test_with_nothing():
            assert jaxguard.isolated_jax_worker(os.getpid)() != os.getpid()

        def test_slot(jaxguard_slot):
            import jax.numpy as jnp

            assert len(jaxguard_slot.devices) == 1
            assert float(jnp.arange(4.0).sum()) == 6.0
    """,
}


def run(*command: object, cwd: pathlib.Path, env: dict[str, str]) -> str:
    """Run a command; fail with all that it said unless it ends well."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_project_downstream(tmp_path: pathlib.Path) -> None:
    """A project that depends on jaxguard is built, installed beside it, and its own tests use the plugin's fixtures."""
    pytest.importorskip("hatchling")
    project, place = tmp_path / "downstream", tmp_path / "venv"
    for name, text in DOWNSTREAM.items():
        path = project / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    # Everything but jaxguard and the project comes from this environment, so that nothing is fetched.
    venv.create(place, with_pip=False)
    python = place / "bin" / "python"
    inside = {"base": str(place), "platbase": str(place)}
    outside = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    pth = pathlib.Path(sysconfig.get_path("purelib", "venv", inside)) / "outside.pth"
    pth.write_text("".join(f"{folder}\n" for folder in outside))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "JAXGUARD", "PYTHONPATH", "PIP_"))}
    env["JAXGUARD_DEVICES"] = os.environ["JAXGUARD_DEVICES"]

    offline = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    # Not --upgrade: this environment's own jaxguard, if it has one, must not count as already installed.
    run(python, "-m", "pip", "install", *offline, "--ignore-installed", ROOT, project, cwd=tmp_path, env=env)
    code = "import jaxguard, downstream_tuning; print(jaxguard.__file__, downstream_tuning.__file__)"
    where = run(python, "-c", code, cwd=tmp_path, env=env)
    out = run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rs", cwd=project, env=env)

    assert all(file.startswith(str(place)) for file in where.split())
    assert "6 passed" in out, out
    assert "skipped" not in out, out
