"""`jaxguard stacks`: a stuck run tells what each part of it waits for, to its own user, and goes on unharmed."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import phases
import pytest

from jaxguard import _linux, _records, _stacks, _warm, gpu_slot, isolated_jax_worker
from jaxguard.__main__ import main

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STUDY = textwrap.dedent("""
    import os, sys, time
    sys.path.insert(0, sys.argv[2])
    import optuna, phases
    from jaxguard import isolated_jax_worker

    folder = sys.argv[1]

    @isolated_jax_worker
    def objective(trial):
        trial.suggest_float("x", 0, 1)
        def waits_for_a_file():
            phases.stay(folder + "/" + str(trial.number))
        waits_for_a_file()
        return 1.0

    for number in range(3):
        os.makedirs(folder + "/" + str(number))
    study = optuna.create_study(study_name="mnist")
    study.optimize(objective, n_trials=3, n_jobs=3)
    print(*[trial.state.name for trial in study.trials])
""")


@pytest.fixture
def stuck_study(tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> Iterator[subprocess.Popen[str]]:
    """A study of three trials on two slots that does not go on."""
    script = tmp_path / "tune.py"
    script.write_text(STUDY)
    place = os.path.dirname(os.path.dirname(os.path.abspath(_stacks.__file__)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, str(script), str(tmp_path / "trials"), os.path.dirname(__file__)]
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_until(lambda: len(list(tmp_path.glob("trials/*/here"))) == 2, "two trials run", timeout=60)
            wait_until(
                lambda: [call["phase"] for call in calls_of(process)].count("waiting for a slot") == 1, "one waits"
            )
            yield process
        finally:
            for number in range(3):
                (tmp_path / "trials" / str(number) / "go").touch()
            assert process.wait(60) == 0
            assert process.stdout is not None
            assert process.stdout.read().split() == ["COMPLETE"] * 3


def calls_of(process: subprocess.Popen[str]) -> list[dict[str, Any]]:
    return calls_of_pid(process.pid)


def calls_of_pid(pid: int) -> list[dict[str, Any]]:
    """The calls of a process itself: joblib's processes are shown under their program, too."""
    parents = [parent for parent in _stacks.look([pid])["parents"] if parent["pid"] == pid]
    return parents[0]["calls"] if parents else []


def test_a_stuck_study(stuck_study: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Study, trial, device and phase of each call; stacks of parent, keeper and workers; and it goes on afterwards."""
    assert main(["stacks", str(stuck_study.pid)]) == 0
    text = capsys.readouterr().out
    assert f"tune.py (pid {stuck_study.pid})" in text, "the script's name, however long its path"
    assert text.count("objective, trial ") >= 3
    assert text.count("of study 'mnist': running for ") == 2
    assert text.count("of study 'mnist': waiting for a slot; since ") == 1
    assert " on cpu:0 (worker pid " in text
    assert " on cpu:1 (worker pid " in text
    assert text.count("in waits_for_a_file") == 2
    for pid in [call["worker"] for call in calls_of(stuck_study) if call["worker"]]:
        assert f"Thread {pid}, the main one" in text
    assert 'optuna/study/study.py", line' in text
    assert "its keeper:" in text


def test_json_says_the_same(stuck_study: subprocess.Popen[str], capsys: pytest.CaptureFixture[str]) -> None:
    """For scripts: the same facts, with a version."""
    assert main(["stacks", "--json", str(stuck_study.pid)]) == 0
    view = json.loads(capsys.readouterr().out)
    assert view["version"] == 1
    (parent,) = view["parents"]
    assert parent["pid"] == stuck_study.pid
    calls = parent["calls"]
    assert sorted(call["trial"] for call in calls) == [0, 1, 2]
    assert {call["study"] for call in calls} == {"mnist"}
    running = [call for call in calls if call["phase"] == "running"]
    assert sorted(device for call in running for device in call["devices"]) == ["cpu:0", "cpu:1"]
    for call in running:
        assert "waits_for_a_file" in call["stacks"]
        assert _linux.status(call["worker"]) is not None
    # A worker's pid chooses its parent, too.
    assert main(["stacks", "--json", str(running[0]["worker"])]) == 0
    assert json.loads(capsys.readouterr().out)["parents"][0]["pid"] == stuck_study.pid


def test_what_is_stopped_is_named(
    stuck_study: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], wait_until: Callable[..., None]
) -> None:
    """A worker, and a keeper, that somebody has stopped: their state, and what to send them."""
    (worker, *_) = [call["worker"] for call in calls_of(stuck_study) if call["worker"]]
    keeper = getattr(_linux.status(worker), "parent", 0)
    for pid in (worker, keeper):
        os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _linux.state(worker) == _linux.state(keeper) == "T", "they are stopped")
        assert main(["stacks", str(stuck_study.pid)]) == 0
        text = capsys.readouterr().out
        assert f"(worker pid {worker}, stopped)" in text
        assert f"Stacks of pid {keeper}, its keeper, stopped:" in text
        assert text.count("nothing of it runs until it gets SIGCONT") == 2
    finally:
        for pid in (worker, keeper):
            os.kill(pid, signal.SIGCONT)


def test_no_root_is_needed_and_others_see_nothing(
    as_nobody: Callable[..., list[str]], open_to_all: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    """An ordinary user sees the own run, stacks included; root's command shows root's own only."""
    open_to_all(tmp_path)
    folder = tmp_path / "nobody"
    folder.mkdir()
    folder.chmod(0o777)
    code = """
import ctypes, phases
from jaxguard import _stacks
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable again, as each program that an ordinary user starts
def in_a_block():
    with gpu_slot():
        phases.stay(sys.argv[1])
thread = threading.Thread(target=in_a_block)
thread.start()
while not os.path.exists(sys.argv[1] + "/here"):
    time.sleep(0.01)
child = os.fork()
if child == 0:
    (parent,) = _stacks.look([])["parents"]
    print(parent["pid"], parent["calls"][0]["phase"], "in_a_block" in parent["stacks"], flush=True)
    os._exit(0)
os.waitpid(child, 0)
open(sys.argv[1] + "/seen", "w").close()
thread.join()
"""
    seen: list[list[str]] = []
    thread = threading.Thread(target=lambda: seen.append(as_nobody(code, str(folder))))
    thread.start()
    try:
        while thread.is_alive() and not (folder / "seen").exists():
            thread.join(0.01)
        mine = [parent["pid"] for parent in _stacks.look([])["parents"]]
    finally:
        (folder / "go").touch()
        thread.join(100)
    pid, *words = seen[0][0].split()
    assert words == ["running", "True"]
    assert int(pid) not in mine


def test_who_compiles_what_and_who_waits_for_it(
    tmp_path: pathlib.Path, wait_until: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers need one program: one compiles it, the other waits, and `stacks` says for whom."""
    env, arguments = phases.call_in("compiling", tmp_path)
    guarded = isolated_jax_worker(phases.work, env=env)
    threads = [threading.Thread(target=guarded, args=arguments) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:

        def told() -> list[str]:
            return sorted(call["phase"].partition(" for ")[0] for call in calls_of_pid(os.getpid()))

        wait_until(lambda: told() == ["compiling long_step", "waiting"], "one compiles, one waits")
        assert main(["stacks", str(os.getpid())]) == 0
        text = capsys.readouterr().out
        seen = calls_of_pid(os.getpid())
    finally:
        # One reader after the other, whichever module it is: then the compilation goes on.
        readers = [os.open(path, os.O_RDONLY | os.O_NONBLOCK) for path in tmp_path.glob("*.txt")]
        for thread in threads:
            thread.join(60)
        for reader in readers:
            os.close(reader)
    assert not any(thread.is_alive() for thread in threads)
    calls = {call["phase"].partition(" for ")[0]: call for call in seen}
    compiles, waits = calls["compiling long_step"], calls["waiting"]
    assert [other["worker"] for other in waits["compiled_by"]] == [compiles["worker"]]
    assert compiles["compiled_by"] == []
    assert "work: waiting for the compilation of long_step for " in text
    assert f"which pid {compiles['worker']} compiles (work)" in text


def test_a_slot_held_by_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    """A `gpu_slot` block runs in the parent itself, whose stacks show it."""
    with gpu_slot():
        assert main(["stacks", str(os.getpid())]) == 0
    text = capsys.readouterr().out
    assert ": running; since " in text
    assert "worker pid" not in text


def test_warm_workers_are_shown(capsys: pytest.CaptureFixture[str], slots: Callable[[int], None]) -> None:
    """One that is kept for the next call says so."""
    slots(1)
    pid = isolated_jax_worker(os.getpid, reuse=True)()
    try:
        assert main(["stacks", str(pid)]) == 0
    finally:
        _warm.retire_all()
    assert "warm; since " in capsys.readouterr().out


@pytest.mark.parametrize(
    "facts",
    [
        {"worker": 10**30, "since": 1e300, "devices": ["\x1b[2J"], "trial": "x", "function": 3},
        {"worker": -1, "since": float("nan"), "devices": 3, "study": ["x"]},
        {"worker": True, "since": "x", "devices": [1, None]},
    ],
)
def test_records_that_are_made_up(facts: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever may write them: they fail nobody, and nothing in them steers a terminal."""
    isolated_jax_worker(os.getpid)()  # so that this process is seen
    record = _records.Record("0123456789ab", {"phase": "running", **facts})
    work = _records.Record("work-0123456789ab", {"phase": "running", "programs": [{"key": [1], "doing": {}}, 3]})
    try:
        assert main(["stacks", str(os.getpid())]) == 0
        assert main(["stacks", "--json", str(os.getpid())]) == 0
    finally:
        record.close()
        work.close()
    assert "\x1b" not in capsys.readouterr().out


def test_nothing_runs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Said in words; a process that was asked for and is not there is status 1."""
    monkeypatch.setattr(_stacks, "_own_processes", list)
    assert main(["stacks"]) == 0
    assert "No guarded program" in capsys.readouterr().out
    assert main(["stacks", "1"]) == 1


def test_what_others_write_steers_no_terminal() -> None:
    """Names of studies and functions are shown as text, whatever is in them."""
    call = {
        **dict.fromkeys(("function", "study", "phase"), "a\x1b[2J"),
        "trial": 1,
        "since": 0.0,
        "devices": [],
        "worker": None,
        "state": None,
        "phase_since": None,
        "compiled_by": [],
    }
    assert "\x1b" not in _stacks._call_as_line(call)
