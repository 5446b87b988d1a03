"""Ctrl-C and SIGTERM: whose handler is in force when, and that every interrupted trial is told."""

from __future__ import annotations

import os
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

from jaxguard import _interrupts, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def own_handlers() -> Any:
    """Have this test's handlers restored, whatever it does to them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_idle_process_has_the_handlers_it_had(own_handlers: None, fresh_guard: Any) -> None:
    """After a call of the main thread SIGTERM does what it did: a pool's idle worker must end by it at once."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    before = signal.getsignal(signal.SIGINT)
    assert fresh_guard(lambda: 1)() == 1
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_a_call_stands_in_front_of_the_handlers(own_handlers: None, fresh_guard: Any, tmp_path: Any) -> None:
    """During a call SIGTERM ends the worker first, and then the program's own handler runs."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    started = tmp_path / "started"

    def objective(path: str) -> None:
        import time

        with open(path, "w"):
            pass
        time.sleep(120)

    def tell() -> None:
        for _ in range(3000):
            if started.exists():
                break
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        fresh_guard(objective)(str(started))
    thread.join(60)
    assert heard == [signal.SIGTERM]
    assert fresh_guard(lambda: 2)() == 2, "a handler that returns lets the program go on"


def test_a_forked_child_has_the_handlers_of_the_program(own_handlers: None, fresh_guard: Any) -> None:
    """A child that is forked while a thread is in a call is not held back by the handlers of that call."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def objective() -> int:
        return 3

    results = []
    thread = threading.Thread(target=lambda: results.append(fresh_guard(objective)()))
    thread.start()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    thread.join(60)
    assert results == [3]


def test_a_lost_nudge(own_handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A main thread that goes to sleep just after it was nudged is nudged again, so handlers are always there."""
    nudge, nudges = signal.pthread_kill, []

    def lose_the_first(ident: int, number: int) -> None:
        nudges.append(number)
        if len(nudges) > 1:
            nudge(ident, number)

    monkeypatch.setattr(signal, "pthread_kill", lose_the_first)
    heard: list[bool] = []

    def call() -> None:
        threading.Event().wait(0.1)  # most likely the main thread sleeps by then; else it needs no nudge: once more
        with _interrupts.call("objective"):
            heard.append(signal.getsignal(signal.SIGTERM) is _interrupts._on_signal)

    before = signal.getsignal(signal.SIGTERM)
    for _ in range(50):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(60)
        assert heard.pop(), nudges
        _interrupts._uninstall()
        assert signal.getsignal(signal.SIGTERM) is before
        if len(nudges) > 1:
            return
    pytest.fail("no call ever had to nudge the main thread")


def test_ctrl_c_and_sigterm_leave_no_trial_running(run_python: Callable[..., Any], tmp_path: Any) -> None:
    """With one job and with two, every trial that was running when the signal came is FAIL in the storage."""
    code = """
import faulthandler, os, signal, sys, threading, time
import optuna
from jaxguard import _interrupts, isolated_jax_worker

faulthandler.dump_traceback_later(60)
number, jobs, url, flags = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]

@isolated_jax_worker
def objective(trial):
    trial.suggest_float("x", 0, 1)
    open(os.path.join(flags, str(trial.number)), "w").close()
    time.sleep(120)

def tell():
    while len(os.listdir(flags)) < jobs:
        time.sleep(0.01)
    os.kill(os.getpid(), number)

threading.Thread(target=tell, daemon=True).start()
study = optuna.create_study(storage=url)
study.optimize(objective, n_trials=jobs, n_jobs=jobs, catch=(Exception,))
"""
    import optuna

    for number in (signal.SIGINT, signal.SIGTERM):
        for jobs in (1, 2):
            flags = tmp_path / f"{number}-{jobs}"
            flags.mkdir()
            url = f"sqlite:///{tmp_path}/{number}-{jobs}.db"
            done = run_python(code, args=[str(int(number)), str(jobs), url, str(flags)])
            assert done.returncode == -number, done.stderr
            study = optuna.load_study(study_name=None, storage=url)
            assert [trial.state.name for trial in study.trials] == ["FAIL"] * jobs, done.stderr


def test_a_guard_at_rest_installs_nothing() -> None:
    """Decorating leaves the process's handlers alone."""
    before = signal.getsignal(signal.SIGTERM)
    isolated_jax_worker(lambda: 1)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_call_that_is_over_is_told_nothing(tmp_path: Any) -> None:
    """Whoever still means to wake a call that has just ended writes nothing: its descriptor may be a file by now."""
    with _interrupts.call("objective") as running:
        number = running.wake
    files = [open(tmp_path / str(index), "w") for index in range(64)]  # noqa: SIM115 – all at once
    try:
        assert number in {file.fileno() for file in files}, "the number was given again"
        running.ring()
        running.interrupt("SIGTERM")
    finally:
        for file in files:
            file.close()
    assert not any(path.stat().st_size for path in tmp_path.iterdir())
