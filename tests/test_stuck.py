"""The page "My study is stuck": each thing that it says one sees is seen, when its cause is there."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import optuna
import phases
import pytest

import jaxguard
from jaxguard import _linux, _stacks, gpu_slot, isolated_jax_worker
from jaxguard.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = (pathlib.Path(__file__).resolve().parents[1] / "docs" / "how-to" / "stuck.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| .*?`([^`]+)` \| .* \| \[below\]\(#([a-z-]+)\) \|$", PAGE, re.MULTILINE)
SEEN = dict(ROWS)
PLACE = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Give what `jaxguard stacks` shows."""

    def show(*words: object) -> str:
        main(["stacks", *map(str, words)])
        return capsys.readouterr().out

    return show


def test_the_table_leads_somewhere() -> None:
    """Each row has a section, and each section of a symptom a row."""
    headings = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^a-z ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert len(SEEN) == PAGE.count("[below]") == 12
    assert set(SEEN.values()) | {"it-does-not-end-by-ctrl-c".replace("ctrl-c", "ctrlc")} == anchors


def test_it_has_not_begun(as_nobody: Callable[..., list[str]]) -> None:
    """A user without a guarded program."""
    assert SEEN["No guarded program of this user runs here"] == "it-has-not-begun"
    lines = as_nobody("from jaxguard import _stacks; print(_stacks.as_text(_stacks.look([os.getpid()])))")
    assert "No guarded program of this user runs here" in lines[0]


def test_it_waits_for_a_slot(
    shown: Callable[..., str],
    slots: Callable[[int], None],
    wait_until: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """While a block of this process has the only one; and `jaxguard slots` says who that is."""
    assert SEEN["waiting for a slot"] == "it-waits-for-a-slot"
    slots(1)
    with gpu_slot():
        waiter = threading.Thread(target=isolated_jax_worker(os.getpid))
        waiter.start()
        wait_until(lambda: "waiting for a slot" in shown(os.getpid()), "the call waits")
        main(["slots"])
        assert f"pid {os.getpid()}" in capsys.readouterr().out
    waiter.join(60)
    assert not waiter.is_alive()


@pytest.mark.parametrize("phase", list(phases.WORDS))
def test_a_worker_is_stuck_in(phase: str, shown: Callable[..., str], staying: Callable[..., phases.Caller]) -> None:
    """Each phase of a worker, with the stack that says where."""
    words = phases.WORDS[phase].removesuffix(" long_step")
    assert words in SEEN
    caller = staying(phase)
    text = shown(os.getpid())
    assert re.search(rf"work: {words}\b", text), text
    if phase in {"running", "reading", "answering", "ending"}:
        assert "in stay" in text
    elif phase == "compiling":
        assert re.search(r"work: compiling long_step for \d", text)
        assert "in work" in text
    else:
        assert f"worker pid {caller.worker}" in text


def test_a_worker_waits_for_a_compilation(
    shown: Callable[..., str], tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Of two that need one program, one compiles; when that one dies, the other compiles for itself."""
    assert SEEN["waiting for the compilation of"] == "a-worker-waits-for-a-compilation"
    env, arguments = phases.call_in("compiling", tmp_path)
    guarded = isolated_jax_worker(phases.work, env=env)
    errors: list[Any] = []

    def call() -> None:
        try:
            guarded(*arguments)
        except jaxguard.WorkerDied as error:
            errors.append(error)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()

    def look() -> tuple[list[int], list[int]]:
        calls = [call for parent in _stacks.look([os.getpid()])["parents"] for call in parent["calls"]]
        return (
            [call["worker"] for call in calls if call["phase"].startswith("compiling")],
            [call["worker"] for call in calls if call["phase"].startswith("waiting for the compilation of")],
        )

    wait_until(lambda: all(map(len, look())), "one compiles, one waits")
    (compiles,), (waits,) = look()
    assert re.search(rf"waiting for the compilation of long_step for .* s, which pid {compiles} compiles", shown(waits))
    os.kill(compiles, signal.SIGKILL)
    wait_until(lambda: look() == ([waits], []), "the other one compiles now")
    os.kill(waits, signal.SIGKILL)
    for thread in threads:
        thread.join(60)
    assert sorted(error.pid for error in errors) == sorted([compiles, waits])


def test_something_is_stopped(
    shown: Callable[..., str], staying: Callable[..., phases.Caller], wait_until: Callable[..., None]
) -> None:
    """A worker, by SIGSTOP; SIGCONT has it go on."""
    assert SEEN["stopped"] == "something-is-stopped"
    caller = staying("running")
    os.kill(caller.worker, signal.SIGSTOP)
    wait_until(lambda: getattr(_linux.status(caller.worker), "state", "") == "T", "it is stopped")
    assert f"(worker pid {caller.worker}, stopped)" in shown(os.getpid())
    os.kill(caller.worker, signal.SIGCONT)
    caller.go_on()
    assert caller.result == "answer"


DATABASE = textwrap.dedent("""
    import pathlib, sys, time
    import optuna
    from jaxguard import isolated_jax_worker

    folder = pathlib.Path(sys.argv[1])

    @isolated_jax_worker
    def objective(trial):
        return trial.suggest_float("x", 0, 1)

    def between(study, trial):
        (folder / "between").touch()
        while not (folder / "locked").exists():
            time.sleep(0.01)

    storage = optuna.storages.RDBStorage(
        f"sqlite:///{folder}/s.db", engine_kwargs={"connect_args": {"timeout": 60}}
    )
    study = optuna.create_study(storage=storage)
    study.optimize(objective, n_trials=2, callbacks=[between])
""")


def test_it_is_between_two_trials(
    shown: Callable[..., str], tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Somebody has locked the study's database: the parent's own stack says so."""
    assert SEEN["no guarded call under way"] == "it-is-between-two-trials"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", DATABASE, str(tmp_path)], env=env, stderr=subprocess.DEVNULL
    ) as parent:
        wait_until(lambda: (tmp_path / "between").exists() or parent.poll() is not None, "the first trial is told")
        database = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
        database.execute("begin exclusive")
        (tmp_path / "locked").touch()
        wait_until(lambda: "sqlalchemy" in shown(parent.pid), "it waits for the database")
        text = shown(parent.pid)
        database.execute("rollback")
        database.close()
        assert parent.wait(60) == 0
    assert "no guarded call under way" in text
    assert "optuna/storages" in text


KILLED = textwrap.dedent("""
    import pathlib, sys, time
    import optuna
    from jaxguard import isolated_jax_worker

    @isolated_jax_worker
    def objective(trial):
        pathlib.Path(sys.argv[1], "here").touch()
        time.sleep(600)

    optuna.create_study(storage=f"sqlite:///{sys.argv[1]}/s.db").optimize(objective, n_trials=1)
""")


def test_trials_stay_running(
    shown: Callable[..., str], tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """After SIGKILL of the parent; `test_parents` shows that Optuna's heartbeat finds them."""
    assert SEEN["RUNNING"] == "trials-stay-running"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], env=env, stderr=subprocess.DEVNULL) as parent:
        wait_until(lambda: (tmp_path / "here").exists() or parent.poll() is not None, "the trial runs")
        parent.kill()
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/s.db")
    assert [trial.state.name for trial in study.trials] == ["RUNNING"]
    assert f"(pid {parent.pid}" not in shown()
