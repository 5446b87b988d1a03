"""The end of a parent, however it comes: nothing of its calls is left, and the study can go on from its storage."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest

import jaxguard
from jaxguard import _linux, gpu_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACE = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))

# Each trial has a child, and a grandchild in a session of its own, and compiles something: so there is a private
# directory too.
PROGRAM = """
import os, pathlib, signal, subprocess, sys, threading, time
from jaxguard import isolated_jax_worker

folder, way = pathlib.Path(sys.argv[1]), sys.argv[2]

def note(name, pid):
    (folder / f"{name}.part").write_text(str(pid))
    (folder / f"{name}.part").rename(folder / f"{name}.pid")

@isolated_jax_worker
def work(number):
    import jax
    jax.jit(lambda x: x + 1)(number)
    note(f"child{number}", subprocess.Popen(["sleep", "600"]).pid)
    forked = os.fork()
    if not forked:
        os.setsid()
        if os.fork():
            os._exit(0)
        note(f"daemon{number}", os.getpid())
        os.closerange(0, 3)
        os.execvp("sleep", ["sleep", "600"])
    os.waitpid(forked, 0)
    while not (folder / f"daemon{number}.pid").exists():
        time.sleep(0.001)
    note(f"worker{number}", os.getpid())
    while not (folder / "go").exists():
        time.sleep(0.01)
    return number

def both():
    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    return threads

signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # a shell ignores it in the name of its background jobs
threads = both()
while len(list(folder.glob("worker*.pid"))) < 2:
    time.sleep(0.001)
note("parent", os.getpid())
if way == "exception":
    raise RuntimeError("on purpose")
elif way == "sys.exit":
    sys.exit(7)
elif way == "os._exit":
    os._exit(8)
elif way != "return":
    for thread in threads:
        thread.join()
print("end")
"""
STARTED = ("child0", "child1", "daemon0", "daemon1", "worker0", "worker1")


@pytest.fixture
def start(tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Give a function that starts a script in a session of its own, and is there when its calls are under way."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str, *args: object, ready: str) -> subprocess.Popen[str]:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
        env["JAXGUARD_CACHE_DIR"] = str(tmp_path / "programs")
        words = [sys.executable, str(script), str(tmp_path), *map(str, args)]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(words, env=env, stdout=log, stderr=log, text=True, start_new_session=True)
        started.append(process)
        wait_until(lambda: (tmp_path / ready).exists() or process.poll() is not None, "the calls", timeout=60)
        assert (tmp_path / ready).exists(), (tmp_path / "log").read_text()
        return process

    yield run
    for process in started:
        with process:
            process.kill()


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if getattr(_linux.status(pid), "state", "X") not in "ZX"]


WAYS = {
    "return": (None, 0),
    "exception": (None, 1),
    "sys.exit": (None, 7),
    "os._exit": (None, 8),
    "Ctrl-C of the group": (lambda pid: os.killpg(pid, signal.SIGINT), None),
    "Ctrl-C of the parent": (lambda pid: os.kill(pid, signal.SIGINT), None),
    "SIGTERM": (lambda pid: os.kill(pid, signal.SIGTERM), -signal.SIGTERM),
    "SIGHUP": (lambda pid: os.kill(pid, signal.SIGHUP), -signal.SIGHUP),
    "SIGQUIT": (lambda pid: os.killpg(pid, signal.SIGQUIT), -signal.SIGQUIT),
    "SIGKILL": (lambda pid: os.kill(pid, signal.SIGKILL), -signal.SIGKILL),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_nothing_outlives_its_parent(
    way: str, start: Any, tmp_path: pathlib.Path, slots: Callable[[int], None], wait_until: Callable[..., None]
) -> None:
    """No worker, no descendant of a trial however it hides, no slot, no directory; also with calls in two threads."""
    slots(2)
    parent = start(PROGRAM, way, ready="worker0.pid")
    send, status = WAYS[way]
    if send is not None:
        wait_until((tmp_path / "parent.pid").exists, "both calls")
        send(parent.pid)
    assert parent.wait(60) == status or status is None, (tmp_path / "log").read_text()
    began = time.monotonic()

    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in STARTED]
    wait_until(lambda: not alive(pids), f"the end of all; {alive(pids)}", timeout=10)
    with gpu_slot(gpus=2, slot_timeout=10):
        pass
    print(f"gone {time.monotonic() - began:.3f} s after the parent")
    left = [path.name for path in (tmp_path / "programs").glob("*/private/*")]
    if left:  # a parent that was given no chance: the next one to come sweeps
        assert way in {"SIGKILL", "SIGHUP", "SIGQUIT", "os._exit"} or send is None
        os.environ["JAXGUARD_CACHE_DIR"], before = str(tmp_path / "programs"), os.environ["JAXGUARD_CACHE_DIR"]
        try:
            jaxguard.isolated_jax_worker(lambda: float(__import__("jax").jit(lambda x: x + 2)(1)))()
        finally:
            os.environ["JAXGUARD_CACHE_DIR"] = before
        left = [path.name for path in (tmp_path / "programs").glob("*/private/*")]
    assert not left


def test_a_parent_that_is_stopped_goes_on(
    start: Any, tmp_path: pathlib.Path, slots: Callable[[int], None], wait_until: Callable[..., None]
) -> None:
    """Ctrl-Z and fg: its workers work on meanwhile, and their answers are taken afterwards."""
    slots(2)
    parent = start(PROGRAM, "join", ready="parent.pid")
    os.killpg(parent.pid, signal.SIGSTOP)
    wait_until(lambda: getattr(_linux.status(parent.pid), "state", "") == "T", "it is stopped")
    workers = [int((tmp_path / f"worker{number}.pid").read_text()) for number in range(2)]
    (tmp_path / "go").touch()
    wait_until(lambda: not alive(workers), "both workers are done, though nobody reads their answers yet")
    os.killpg(parent.pid, signal.SIGCONT)
    assert parent.wait(60) == 0
    assert (tmp_path / "log").read_text().endswith("end\n")


HANDLERS = """
import pathlib, signal, sys, threading, time
import optuna
from jaxguard import isolated_jax_worker

folder, jobs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
heard = []

def mine(number, frame):
    heard.append(signal.Signals(number).name)
    states = [trial.state.name for trial in study.trials]
    print(*heard, *states, flush=True)
    sys.exit(9)

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, mine)

@isolated_jax_worker
def objective(trial):
    trial.suggest_float("x", 0, 1)
    (folder / f"{trial.number}.here").touch()
    time.sleep(600)

def tell():
    while len(list(folder.glob("*.here"))) < jobs:
        time.sleep(0.001)
    (folder / "ready").touch()

optuna.logging.set_verbosity(optuna.logging.CRITICAL)
study = optuna.create_study(storage=f"sqlite:///{folder}/s.db")
threading.Thread(target=tell, daemon=True).start()
study.optimize(objective, n_trials=jobs, n_jobs=jobs, catch=(Exception,))
"""


@pytest.mark.parametrize("jobs", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_users_own_handler_runs(
    number: signal.Signals, jobs: int, start: Any, tmp_path: pathlib.Path, slots: Callable[[int], None]
) -> None:
    """Its handler is called, with n_jobs 1 and 2; then the trials are FAIL."""
    slots(2)
    parent = start(HANDLERS, jobs, ready="ready")
    parent.send_signal(number)
    parent.wait(60)
    log = (tmp_path / "log").read_text()
    assert log.split()[:1] == [number.name], log
    study = optuna.load_study(study_name=None, storage=f"sqlite:///{tmp_path}/s.db")
    assert [trial.state.name for trial in study.trials] == ["FAIL"] * jobs, log


RETRIED = """
import pathlib, sys, time, warnings
import optuna
from jaxguard import isolated_jax_worker

folder, keyword, name = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
warnings.simplefilter("ignore")
callback = {keyword: getattr(optuna.storages, name)(max_retry=2)}
storage = optuna.storages.RDBStorage(f"sqlite:///{folder}/s.db", heartbeat_interval=1, grace_period=2, **callback)
study = optuna.create_study(storage=storage, study_name="s", load_if_exists=True)

@isolated_jax_worker
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if not (folder / "ready").exists():
        (folder / "ready").touch()
        time.sleep(600)
    return x

study.optimize(objective, n_trials=1 if (folder / "ready").exists() else 3)
"""


@pytest.mark.parametrize(
    ("keyword", "name"),
    [
        ("failed_trial_callback", "RetryFailedTrialCallback"),
        ("heartbeat_stale_trial_callback", "RetryHeartbeatStaleTrialCallback"),
    ],
)
def test_optunas_heartbeat_retries_what_a_killed_parent_leaves(
    keyword: str, name: str, start: Any, tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """SIGKILL of the parent, the same program once more: the trial that was running is run again, with its values."""
    if not hasattr(optuna.storages, name):
        pytest.skip(f"this Optuna has no {name}")
    parent = start(RETRIED, keyword, name, ready="ready")
    parent.kill()
    parent.wait(30)
    storage = f"sqlite:///{tmp_path}/s.db"
    before = optuna.load_study(study_name="s", storage=storage).trials
    assert [trial.state.name for trial in before] == ["RUNNING"]

    def is_retried() -> bool:
        again = start(RETRIED, keyword, name, ready="ready")
        assert again.wait(60) == 0, (tmp_path / "log").read_text()
        states = [trial.state.name for trial in optuna.load_study(study_name="s", storage=storage).trials]
        return "FAIL" in states

    wait_until(is_retried, "the heartbeat is stale, and the trial run again", timeout=60)
    failed, *others = optuna.load_study(study_name="s", storage=storage).trials
    assert failed.state.name == "FAIL"
    (retried,) = [trial for trial in others if trial.system_attrs.get("failed_trial") == 0]
    assert retried.state.name == "COMPLETE"
    assert retried.params == failed.params


SLEEPER = """
import pathlib, sys, threading, time
import optuna
from jaxguard import isolated_jax_worker

folder = pathlib.Path(sys.argv[1])

@isolated_jax_worker
def objective(trial):
    import os
    (folder / "worker.part").write_text(str(os.getpid()))
    (folder / "worker.part").rename(folder / "worker.pid")
    time.sleep(600)

study = optuna.create_study()
threading.Thread(target=study.optimize, args=(objective,), kwargs={"n_trials": 1}).start()
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_main_thread_that_does_not_look(
    number: signal.Signals, start: Any, tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Handlers cannot be installed while it sleeps: SIGTERM ends the program, and Ctrl-C at the second time."""
    parent = start(SLEEPER, ready="worker.pid")
    worker = int((tmp_path / "worker.pid").read_text())
    parent.send_signal(number)
    if number == signal.SIGINT:
        wait_until(lambda: "KeyboardInterrupt" in (tmp_path / "log").read_text(), "the main thread's end")
        parent.send_signal(number)
    parent.wait(30)
    wait_until(lambda: not alive([worker]), "the end of the worker", timeout=10)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_a_parent_that_ends_while_its_keeper_is_stopped(
    number: signal.Signals,
    start: Any,
    tmp_path: pathlib.Path,
    slots: Callable[[int], None],
    wait_until: Callable[..., None],
) -> None:
    """Nobody is left to wake the keeper but the kernel, and it does: nothing is left."""
    slots(2)
    parent = start(PROGRAM, "join", ready="parent.pid")
    worker = _linux.status(int((tmp_path / "worker0.pid").read_text()))
    assert worker is not None
    keeper = worker.parent
    os.kill(keeper, signal.SIGSTOP)
    wait_until(lambda: getattr(_linux.status(keeper), "state", "") == "T", "it is stopped")
    parent.send_signal(number)
    parent.wait(60)
    pids = [int((tmp_path / f"{name}.pid").read_text()) for name in STARTED]
    wait_until(lambda: not alive([keeper, *pids]), f"the end of all; {alive([keeper, *pids])}", timeout=10)
    with gpu_slot(gpus=2, slot_timeout=10):
        pass
