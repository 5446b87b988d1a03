"""Phases: what a worker tells of itself, and that a death in any of them is noticed and named."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import phases
import pytest

import jaxguard
from jaxguard import _frames, _linux, _phases, _records, _warm, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.parametrize("phase", list(phases.WORDS))
def test_a_worker_tells_its_phase(phase: str, staying: Callable[..., phases.Caller]) -> None:
    """While it is there, and the call is as good as any when it goes on."""
    caller = staying(phase)
    caller.go_on()
    assert caller.result in {"answer", str(caller.folder)}, caller.error


@pytest.mark.parametrize("phase", list(phases.WORDS))
@pytest.mark.parametrize("victim", ["worker", "keeper"])
def test_a_death_in_each_phase(
    phase: str, victim: str, staying: Callable[..., phases.Caller], slots: Callable[[int], None]
) -> None:
    """It is noticed and named, nothing is left of the worker, the slot is free, and no half answer is taken."""
    slots(1)
    caller = staying(phase)
    worker = caller.worker
    status = _linux.status(worker)
    assert status is not None

    os.kill(worker if victim == "worker" else status.parent, signal.SIGKILL)
    caller.join(30)

    assert not caller.is_alive()
    if phase == "ending":
        assert caller.result == "answer", "it was there already"
    else:
        assert isinstance(caller.error, jaxguard.WorkerDied), caller.error
        assert caller.error.phase.startswith(phases.WORDS[phase])
        assert f"while {caller.error.phase}" in str(caller.error)
        assert ("keeper was killed" if victim == "keeper" else "SIGKILL") in str(caller.error)
        assert caller.error.devices == ("cpu:0",)
    assert getattr(_linux.status(worker), "state", "X") in "ZX"
    assert isolated_jax_worker(lambda: 5, slot_timeout=30)() == 5


def test_a_keeper_that_dies_while_calls_wait(
    staying: Callable[..., phases.Caller], slots: Callable[[int], None], wait_until: Callable[..., None]
) -> None:
    """Only the call whose worker it kept fails; the one that waits for the slot gets it, and another keeper."""
    slots(1)
    first = staying("running")
    results: list[int] = []
    waiter = threading.Thread(target=lambda: results.append(isolated_jax_worker(lambda: 7)()))
    waiter.start()
    wait_until(
        lambda: "waiting" in {f.get("phase") for f in _records.read_all(os.getpid()).values()}, "the waiter waits"
    )

    status = _linux.status(first.worker)
    assert status is not None
    os.kill(status.parent, signal.SIGKILL)
    first.join(30)
    waiter.join(60)

    assert isinstance(first.error, jaxguard.WorkerDied)
    assert results == [7]


@pytest.mark.parametrize("phase", ["starting", "running", "ending"])
def test_a_worker_that_is_stopped_meets_its_timeout(
    phase: str, staying: Callable[..., phases.Caller], slots: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the time is up, the error says that it was stopped, and it is gone."""
    monkeypatch.setattr("jaxguard._deadlines.END_S", 1.0)
    monkeypatch.setattr("jaxguard._deadlines.GRACE_S", 0.3)
    slots(1)
    caller = staying(phase, timeout=4)
    os.kill(caller.worker, signal.SIGSTOP)
    caller.join(30)
    assert not caller.is_alive()
    if phase == "ending":
        assert caller.result == "answer"
    else:
        assert isinstance(caller.error, jaxguard.WorkerTimeout), caller.error
        assert "stopped, by SIGSTOP" in caller.error.stacks or phase == "starting"
        assert caller.error.phase.startswith(phases.WORDS[phase])
    assert _linux.status(caller.worker) is None
    assert isolated_jax_worker(lambda: 5, slot_timeout=30)() == 5


def test_a_stopped_keeper_is_woken_to_end_a_worker(
    staying: Callable[..., phases.Caller], slots: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call whose time is up does not wait for whoever has stopped its keeper."""
    monkeypatch.setattr("jaxguard._deadlines.GRACE_S", 0.3)
    slots(1)
    caller = staying("running", timeout=3)
    status = _linux.status(caller.worker)
    assert status is not None
    os.kill(status.parent, signal.SIGSTOP)
    caller.join(30)
    assert not caller.is_alive()
    assert isinstance(caller.error, jaxguard.WorkerTimeout)
    assert _linux.status(caller.worker) is None
    assert isolated_jax_worker(lambda: 5, slot_timeout=30)() == 5


def test_a_stopped_keeper_is_woken_to_start_a_worker(
    slots: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call that gets no worker says so, wakes its keeper, and goes on."""
    monkeypatch.setattr("jaxguard._deadlines.NO_PID_S", 0.5)
    slots(1)
    keeper = isolated_jax_worker(os.getppid)()
    os.kill(keeper, signal.SIGSTOP)
    assert isolated_jax_worker(os.getppid, slot_timeout=30)() == keeper
    assert "has no worker after" in caplog.text


def test_a_trial_and_its_devices_are_named(slots: Callable[[int], None]) -> None:
    """The error of a trial's worker has the number of the trial and the device, in words and as fields."""
    import optuna

    slots(1)
    caught: list[Any] = []

    @isolated_jax_worker
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 1:
            os._exit(3)
        return trial.suggest_float("x", 0, 1)

    def note(study: optuna.Study, trial: optuna.Trial) -> float:
        del study
        try:
            return float(objective(trial))
        except jaxguard.WorkerDied as error:
            caught.append(error)
            raise

    study = optuna.create_study()
    study.optimize(lambda trial: note(study, trial), n_trials=3, catch=(jaxguard.WorkerDied,))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    (error,) = caught
    assert (error.trial, error.devices, error.phase) == (1, ("cpu:0",), "running")
    assert f"(pid {error.pid}, trial 1, on cpu:0)" in str(error)


def test_threads_that_compile_are_told_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs come and go in any order; at most eight are told of, the latest, and none stays."""
    file = _records.new_file("work-" + "0" * 12)
    monkeypatch.setattr(_phases, "_record", _records.Record("", {}, file))
    monkeypatch.setattr(_phases, "_programs", {})
    _phases.enter(_phases.RUNNING)
    for number in range(10):
        _phases.program(number, f"step{number}", "k" * 64, _phases.COMPILING)
    words = _phases.in_words(_records.read_file(file))
    assert "step9" in words
    assert "step1 " not in words
    for number in (9, 0, 1, 2, 3, 4, 5, 6, 8):
        _phases.program_done(number)
    words = _phases.in_words(_records.read_file(file))
    assert words.startswith("compiling step7 for 0.")
    _phases.program_done(7)
    _phases.program_done(7)
    assert _phases.in_words(_records.read_file(file)) == "running"


@pytest.mark.parametrize(
    "facts", [{}, {"phase": 3}, {"phase": "running", "programs": "x"}, {"phase": "running", "programs": [1, {}]}]
)
def test_whatever_a_record_says_there_are_words(facts: dict[str, Any]) -> None:
    """A record that is torn, or made up, fails nobody."""
    assert _phases.in_words(facts)


def test_a_child_of_a_trial_tells_nothing(fresh_guard: Any) -> None:
    """What a forked child compiles or does is not what its worker does."""

    def objective() -> tuple[str, bool]:
        from jaxguard import _phases

        child = os.fork()
        if child == 0:
            _phases.enter("of the child")
            os._exit(0 if _phases._record is None else 1)
        fine = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return _phases._record._facts["phase"], fine

    assert fresh_guard(objective)() == ("running", True)


def test_telling_fails_no_trial(guard: Any) -> None:
    """Where no file may be written any more, a trial compiles and returns as ever, and ends normally."""

    def objective() -> float:
        import resource
        import signal as signals

        import jax

        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        signals.signal(signals.SIGXFSZ, signals.SIG_IGN)
        return float(jax.jit(lambda x: x + 1)(1.0))

    assert guard(objective, compile_cache="off")() == 2.0


def test_time_in_a_phase_is_told() -> None:
    """How long a program is being compiled is counted from when that began."""
    program = {"doing": "compiling", "function": "step", "since": time.time() - 61}
    assert _phases.in_words({"phase": "running", "programs": [program]}).startswith("compiling step for 61.")


@pytest.mark.parametrize("reuse", [False, True])
def test_half_an_answer_is_none(
    reuse: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    slots: Callable[[int], None],
) -> None:
    """A worker that dies in the middle of its answer has not answered, and nobody gets the rest."""
    slots(1)
    _warm.retire_all()  # those of other tests
    real, killed = _frames._receive, []

    def receive(connection: Any, size: int) -> Any:
        data, descriptors = real(connection, size)
        workers = [facts["worker"] for facts in _records.read_all(os.getpid()).values() if facts.get("worker")]
        if len(data) > 10_000 and not killed:
            killed.extend(workers)
            os.kill(workers[0], signal.SIGKILL)
        return data, descriptors

    monkeypatch.setattr(_frames, "_receive", receive)
    guarded = isolated_jax_worker(lambda letter, size: letter * size, reuse=reuse)
    with pytest.raises(jaxguard.WorkerDied, match=r"while answering: ended by SIGKILL") as caught:
        guarded(b"a", 50_000_000)
    assert [caught.value.pid] == killed
    assert guarded(b"b", 20_000) == b"b" * 20_000
