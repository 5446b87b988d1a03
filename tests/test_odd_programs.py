"""Programs that do unusual things around a guarded call: each once broke one, and must not again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

GUARDED = """
import os, sys, time
from jaxguard import isolated_jax_worker

@isolated_jax_worker(slot_timeout=30)
def one(*args):
    return 1
"""

SETTINGS = {
    "more than 1024 descriptors": """
import os, resource
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
""",
    "SIGCHLD ignored": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "a path object in sys.path": "import pathlib, sys; sys.path.insert(0, pathlib.Path('/nowhere'))",
    "no stdout": "import sys; sys.stdout = None",
    "warnings are errors": "import warnings; warnings.simplefilter('error')",
}


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_program_with(setting: str, run_python: Callable[..., Any]) -> None:
    """Calls work by fork and by exec, one after the other."""
    code = f"""
{SETTINGS[setting]}
{GUARDED}
forked = one()
again = one()
execed = isolated_jax_worker(one.__wrapped__, env={{"OMP_DYNAMIC": "FALSE"}})()
print(forked, again, execed, file=sys.stderr)
"""
    assert run_python(code).check().stderr.splitlines()[-1] == "1 1 1"


def test_a_module_that_runs_its_study_when_imported(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """The worker that imports it does not run the study again: the call fails and says what to do."""
    (tmp_path / "tune_at_import.py").write_text(f"{GUARDED}\nresult = one()\n")
    done = run_python("import tune_at_import", cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert "imports the module of one" in done.stderr
    assert 'if __name__ == "__main__"' in done.stderr


def test_a_fork_beside_calls(run_python: Callable[..., Any]) -> None:
    """A fork ends nothing of the parent's: not a running call, not a warm worker in a block, not a slot."""
    code = f"""
{GUARDED}
import threading
os.environ["JAXGUARD_DEVICES"] = "cpu:2@fork-beside"
slow = isolated_jax_worker(time.sleep)
results = []
started = threading.Event()
thread = threading.Thread(target=lambda: results.append(isolated_jax_worker(lambda: time.sleep(1.5) or "slow")()))
with isolated_jax_worker(reuse=True) as worker:
    pid = worker(os.getpid)
    thread.start()
    time.sleep(0.7)
    for _ in range(3):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    assert worker(os.getpid) == pid
    thread.join()
print(results)
"""
    assert run_python(code).check().stdout.splitlines()[-1] == "['slow']"


def test_a_forked_child_keeps_its_files(run_python: Callable[..., Any]) -> None:
    """An array that was sent dies in a forked child: no file that the child has opened is closed."""
    code = f"""
{GUARDED}
import numpy as np
array = np.ones(1 << 20)
one(array)
child = os.fork()
if child == 0:
    files = [open("/dev/null") for _ in range(40)]
    del array
    for file in files:
        os.fstat(file.fileno())
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""
    run_python(code).check()


def test_results_hold_no_descriptor(fresh_guard: Any) -> None:
    """Large results that a program keeps cost it no descriptors."""
    import os

    import numpy as np

    def large() -> Any:
        return np.ones(1 << 18)

    guarded = fresh_guard(large)
    kept = [guarded()]
    before = len(os.listdir("/proc/self/fd"))
    kept += [guarded() for _ in range(3)]
    assert len(os.listdir("/proc/self/fd")) <= before
    kept[0][0] = 5
    assert kept[1][0] == 1
    assert [array.sum() for array in kept[1:]] == [1 << 18] * 3


def test_a_handler_that_calls_the_one_before(run_python: Callable[..., Any]) -> None:
    """A Ctrl-C handler that was put in front of ours, and calls what it found, ends in KeyboardInterrupt."""
    code = f"""
{GUARDED}
import signal, threading
def in_a_thread():
    thread = threading.Thread(target=one)
    thread.start()
    thread.join()
in_a_thread()
before = signal.getsignal(signal.SIGINT)
signal.signal(signal.SIGINT, lambda number, frame: before(number, frame))
in_a_thread()
try:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5)
except KeyboardInterrupt:
    print("interrupted")
"""
    assert run_python(code).check().stdout.splitlines()[-1] == "interrupted"


def test_a_call_from_a_signal_handler(run_python: Callable[..., Any]) -> None:
    """A handler that interrupts a call and makes one itself gets an error, no wait for that slot."""
    code = f"""
{GUARDED}
import signal
from jaxguard import JaxguardError
seen = []
def handler(number, frame):
    try:
        one()
    except JaxguardError as error:
        seen.append(str(error))
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 0.5)
isolated_jax_worker(time.sleep)(1.5)
assert "signal handler" in seen[0], seen
assert one() == 1
print("went on")
"""
    assert run_python(code).check().stdout.splitlines()[-1] == "went on"


def test_an_alarm_in_the_middle_of_a_suggestion(fresh_guard: Any) -> None:
    """An objective that gives a suggestion up half-way gets the right answers to all others."""
    import time

    import optuna

    class Slow(optuna.samplers.RandomSampler):
        def sample_independent(self, study: Any, trial: Any, name: str, distribution: Any) -> Any:
            if name == "slow":
                time.sleep(0.6)
            return super().sample_independent(study, trial, name, distribution)

    def objective(trial: optuna.Trial) -> float:
        import signal

        def give_up(*_: object) -> None:
            raise TimeoutError

        trial.suggest_float("first", 0, 1)
        signal.signal(signal.SIGALRM, give_up)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            trial.suggest_float("slow", 100, 200)
        except TimeoutError:
            pass
        return trial.suggest_float("value", 0, 1)

    study = optuna.create_study(sampler=Slow(seed=1))
    study.optimize(fresh_guard(objective), n_trials=1)
    assert study.trials[0].value == study.trials[0].params["value"]


def test_records_after_the_call(guard: Any, caplog: pytest.LogCaptureFixture, wait_until: Any) -> None:
    """What an exit handler or a thread logs after the answer reaches the parent, at the latest when the worker ends."""

    def leave() -> None:
        import atexit
        import logging

        atexit.register(lambda: logging.getLogger("late").warning("good bye"))

    with guard() as worker:
        worker(leave)
    wait_until(lambda: "good bye" in caplog.messages, "the record of the exit handler")


def test_an_idle_worker_that_logs_burns_nothing(fresh_guard: Any) -> None:
    """A record that is made between two calls waits for the next one: no thread spins for it."""
    import os
    import time

    def later() -> int:
        import logging
        import threading

        threading.Timer(0.2, lambda: logging.getLogger("late").warning("between two calls")).start()
        return os.getpid()

    def cpu_s(pid: int) -> float:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    with fresh_guard(reuse=True) as worker:
        pid = worker(later)
        before = cpu_s(pid)
        time.sleep(1.2)  # idle: what is measured is what it does meanwhile
        assert cpu_s(pid) - before < 0.5
        assert worker(os.getpid) == pid


def test_blocks_that_end_in_another_order() -> None:
    """A hold ends with the last block that uses it, not with the first that took it."""
    import contextlib

    from jaxguard import SlotTimeout, gpu_slot
    from jaxguard.testing import fake_slots

    def free() -> bool:
        import threading

        answers = []

        def attempt() -> None:
            try:
                with gpu_slot(slot_timeout=0):
                    answers.append(True)
            except SlotTimeout:
                answers.append(False)

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
        return answers[0]

    with fake_slots(1):
        first, second = contextlib.ExitStack(), contextlib.ExitStack()
        first.enter_context(gpu_slot())
        second.enter_context(gpu_slot())
        first.close()
        assert not free()
        second.close()
        assert free()


def test_a_worker_that_is_stopped_while_it_ends(fresh_guard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is kept, the worker is ended after a bound, and its slot is free."""
    from jaxguard import _deadlines

    monkeypatch.setattr(_deadlines, "END_S", 1.0)

    def leave() -> int:
        import atexit
        import os
        import signal

        atexit.register(os.kill, os.getpid(), signal.SIGSTOP)
        return 7

    assert fresh_guard(leave)() == 7
    assert fresh_guard(lambda: 8, slot_timeout=0)() == 8


def test_a_block_in_a_script_ends_without_a_word(run_python: Any) -> None:
    """A worker that is still a variable when the interpreter ends is let go of silently."""
    done = run_python(
        "import jax\n"
        "from jaxguard import isolated_jax_worker\n"
        "with isolated_jax_worker(reuse=True) as worker:\n"
        "    assert worker(int) == 0\n"
        "with isolated_jax_worker() as another:\n"
        "    assert another(int) == 0\n"
    ).check()
    assert done.stderr == ""
