"""The keeper: whoever dies, nothing is left behind, and the slot is free when the caller knows."""

from __future__ import annotations

import gc
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from test_devices import Script

import jaxguard
from jaxguard import _keeper, _linux, _starting, _warm, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable


def alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    status = _linux.status(pid)
    return status is not None and status.state not in "ZX"


def keeper_pid() -> int:
    """Process id of this program's keeper, which must be there."""
    assert _starting._current is not None
    return _starting._current.pid


def slot_is_free() -> bool:
    """Say whether a call would find a slot at once."""
    try:
        with jaxguard.gpu_slot(slot_timeout=0):
            return True
    except jaxguard.SlotTimeout:
        return False


# What a trial may leave behind: each prints, or returns, the pids.

DAEMON = textwrap.dedent("""
    import os, sys, time
    if os.fork() == 0:  # the way daemons leave their parents
        os.setsid()
        if os.fork() == 0:
            print(os.getpid(), flush=True)
            os.close(1)
            time.sleep(1000)
    os._exit(0)
""")
MOVING_TARGET = textwrap.dedent("""
    import os, time
    if os.fork():
        os._exit(0)
    os.setsid()
    began = time.monotonic()
    while time.monotonic() - began < 60:  # lives in a new process every few milliseconds
        if os.fork():
            os._exit(0)
        with open("last", "w") as file:
            file.write(str(os.getpid()))
        time.sleep(0.005)
""")


def leave_behind() -> dict[str, int]:
    """Start a child, a grandchild in a session of its own, and a daemon; and end before them."""
    plain = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    words = ["setsid", "sh", "-c", "sleep 1000 >&2 & echo $!"]
    session = subprocess.run(words, stdout=subprocess.PIPE, check=True, timeout=60, stderr=subprocess.DEVNULL)
    daemon = subprocess.run([sys.executable, "-c", DAEMON], stdout=subprocess.PIPE, check=True, timeout=60)
    return {"child": plain, "grandchild": int(session.stdout), "daemon": int(daemon.stdout)}


def wait_for_ever(path: str) -> None:
    """Leave a daemon and a child, say who they are and who we are, and stay."""
    left = leave_behind()
    pathlib.Path(path).write_text(" ".join(map(str, [os.getpid(), *left.values()])))
    time.sleep(1000)


def pids_in(path: pathlib.Path, wait_until: Callable[..., None]) -> list[int]:
    """Read the pids that `wait_for_ever` wrote."""
    wait_until(lambda: path.exists() and len(path.read_text().split()) == 4, "the trial has said its pids")
    return [int(word) for word in path.read_text().split()]


# ---------------------------------------------------------------------------------------- a worker ends


def test_what_a_worker_leaves_behind_is_ended(fresh_guard: Callable[..., Any]) -> None:
    """Children, children in sessions of their own and daemons are gone before the call returns."""
    left = fresh_guard(leave_behind)()

    assert len(left) == 3
    assert [name for name, pid in left.items() if alive(pid)] == []
    assert slot_is_free()


def test_a_daemon_that_keeps_moving_is_ended(fresh_guard: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A daemon that hops from process to process is followed to a fixed point: after the call nobody hops."""

    def hop() -> None:
        os.chdir(tmp_path)
        subprocess.run([sys.executable, "-c", MOVING_TARGET], check=True, timeout=60)
        while not os.path.exists("last"):
            time.sleep(0.01)

    fresh_guard(hop)()

    last = (tmp_path / "last").read_text()
    time.sleep(0.1)  # it would have hopped twenty times
    assert (tmp_path / "last").read_text() == last
    assert not alive(int(last or 0))


def test_a_death_is_known_though_a_child_lives_on(fresh_guard: Callable[..., Any]) -> None:
    """A grandchild that keeps pipe, output and lease open delays nothing: death is judged by the process."""

    def leave() -> None:
        subprocess.Popen(["sleep", "1000"], close_fds=False)
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(3)

    began = time.monotonic()
    with pytest.raises(jaxguard.WorkerDied) as caught:
        fresh_guard(leave)()

    assert caught.value.exit_code == 3
    assert time.monotonic() - began < 30
    assert not alive(caught.value.pid or 0)
    assert slot_is_free()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_worker_fails_its_call_alone(fresh_guard: Callable[..., Any], number: int) -> None:
    """The error has pid, signal and last words; the call beside it and the next one do not notice."""
    threads, beside = [], []

    def die() -> None:
        sys.stderr.write("last words\n")
        os.kill(os.getpid(), number)

    threads.append(
        threading.Thread(target=lambda: beside.append(fresh_guard(lambda: [time.sleep(0.3), os.getpid()])()))
    )
    threads[0].start()
    with pytest.raises(jaxguard.WorkerDied, match=signal.Signals(number).name) as caught:
        fresh_guard(die)()
    threads[0].join(60)

    assert (caught.value.signal, caught.value.exit_code) == (number, None)
    assert "last words" in caught.value.output
    assert f"pid {caught.value.pid}" in str(caught.value)
    assert len(beside) == 1
    assert fresh_guard(os.getpid)() > 0


def test_the_slot_is_free_when_the_call_returns(slots: Callable[[int], None]) -> None:
    """Fifty calls, one after the other, on one slot and without waiting: each finds it free."""
    slots(1)
    square = isolated_jax_worker(lambda x: x * x, slot_timeout=0)

    assert [square(x) for x in range(50)] == [x * x for x in range(50)]


def test_the_slot_is_free_when_the_call_has_failed(slots: Callable[[int], None]) -> None:
    """The same for calls that raise, that die, and that run out of time."""
    slots(1)

    @isolated_jax_worker(slot_timeout=0, timeout=1)
    def fail(how: str) -> None:
        if how == "raise":
            message = "no"
            raise LookupError(message)
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(5)
        time.sleep(1000)

    expected = {"raise": LookupError, "die": jaxguard.WorkerDied, "exit": jaxguard.WorkerDied}
    for how in ["raise", "die", "exit"] * 3 + ["late"]:
        with pytest.raises(expected.get(how, jaxguard.WorkerTimeout)):
            fail(how)
        assert slot_is_free()


def test_nothing_accumulates(fresh_guard: Callable[..., Any], wait_until: Callable[..., None]) -> None:
    """After many calls the keeper has no zombies, no descriptor and no memory more than after the first."""
    _warm.retire_all()  # of earlier tests
    fresh_guard(leave_behind)()
    keeper = keeper_pid()
    descriptors = len(os.listdir(f"/proc/{keeper}/fd"))
    gc.collect()  # what earlier tests have dropped
    own = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        fresh_guard(os.getpid)()
    fresh_guard(leave_behind)()

    assert keeper_pid() == keeper
    assert _linux.children(keeper) == set()
    # It reports before it closes the line of the report.
    wait_until(lambda: len(os.listdir(f"/proc/{keeper}/fd")) <= descriptors, "the keeper has as many descriptors again")
    assert len(os.listdir("/proc/self/fd")) <= own


# ---------------------------------------------------------------------------------------- the keeper is killed


@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_the_keeper_is_killed_during_a_call(
    tmp_path: pathlib.Path, wait_until: Callable[..., None], slots: Callable[[int], None], *, reuse: bool
) -> None:
    """The call fails and names the keeper, all that the worker started is ended, and the next call works."""
    slots(1)
    caught: list[BaseException] = []
    guarded = isolated_jax_worker(wait_for_ever, reuse=reuse)

    def call() -> None:
        try:
            guarded(str(tmp_path / "pids"))
        except BaseException as error:  # noqa: BLE001 - it is looked at below
            caught.append(error)

    calling = threading.Thread(target=call, daemon=True)
    calling.start()
    pids = pids_in(tmp_path / "pids", wait_until)
    assert all(map(alive, pids))
    killed = keeper_pid()
    os.kill(killed, signal.SIGKILL)
    calling.join(30)

    (error,) = caught
    assert isinstance(error, jaxguard.WorkerDied)
    assert "its keeper was killed, and it with it" in str(error)
    assert error.pid == pids[0]
    # One that was already dying, and has no environment any more, may take another moment.
    wait_until(lambda: not any(map(alive, pids)), "all that the worker had started is gone", timeout=5)

    again = isolated_jax_worker(os.getppid, slot_timeout=5, reuse=reuse)
    assert again() == keeper_pid() != killed


def test_the_keeper_is_killed_between_calls(fresh_guard: Callable[..., Any]) -> None:
    """The next call gets a new keeper and does not notice; the old one is reaped, though a worker died with it."""
    isolated_jax_worker(os.getpid, reuse=True)()
    killed = keeper_pid()
    os.kill(killed, signal.SIGKILL)
    os.waitid(os.P_PID, killed, os.WEXITED | os.WNOWAIT)

    assert fresh_guard(os.getppid)() == keeper_pid() != killed
    assert _linux.status(killed) is None


def test_the_keeper_ignores_a_terminals_signals(fresh_guard: Callable[..., Any]) -> None:
    """Ctrl-C, SIGTERM and SIGHUP are the parent's to pass on: the keeper stays, in a process group of its own."""
    fresh_guard(os.getpid)()
    keeper = keeper_pid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(keeper, number)

    assert fresh_guard(os.getppid)() == keeper
    assert os.getpgid(keeper) == keeper
    assert len(os.listdir(f"/proc/{keeper}/task")) == 1 or "jax" in sys.modules, "one thread forks"


def test_the_keeper_never_starts_jax(fresh_guard: Callable[..., Any]) -> None:
    """A worker is forked from a keeper that has imported JAX and not started it, whatever workers did before."""

    def started() -> tuple[bool, bool]:
        import jax

        from jaxguard import _jax_state

        before = _jax_state.started()
        jax.numpy.ones(2).sum().block_until_ready()
        return before, _jax_state.started()

    assert [fresh_guard(started)() for _ in range(2)] == [(False, True)] * 2


# ---------------------------------------------------------------------------------------- the parent is killed

PARENT = """
import sys
sys.path.insert(0, sys.argv[2])
from jaxguard import isolated_jax_worker, _starting
from test_keeper import wait_for_ever
_starting.warm_up()
print(_starting._current.pid, flush=True)
isolated_jax_worker(wait_for_ever, reuse=sys.argv[3] == "warm")(sys.argv[1])
"""


@pytest.mark.parametrize("how", ["fresh", "warm"])
def test_the_parent_is_killed(
    tmp_path: pathlib.Path, wait_until: Callable[..., None], slots: Callable[[int], None], how: str
) -> None:
    """After SIGKILL of the program keeper, worker, daemons and lock are gone within moments."""
    slots(1)
    with Script(PARENT, str(tmp_path / "pids"), str(pathlib.Path(__file__).parent), how) as parent:
        keeper = int(parent.hear())
        pids = [keeper, *pids_in(tmp_path / "pids", wait_until)]
        assert all(map(alive, pids))
        assert not slot_is_free()
        parent.kill()

        wait_until(lambda: not any(map(alive, pids)), "the parent's processes are gone", timeout=10)
        assert slot_is_free()


def test_a_parent_that_is_killed_while_its_keeper_begins(wait_until: Callable[..., None]) -> None:
    """A keeper whose parent is gone before it has begun ends itself."""
    code = "from jaxguard import _starting\n_starting.warm_up()\nprint(_starting._current.pid, flush=True)\ninput()"
    with Script(code) as parent:
        keeper = int(parent.hear())
        parent.kill()
        wait_until(lambda: not alive(keeper), "the keeper is gone", timeout=30)


def test_the_orders_are_one_byte_each() -> None:
    """What parent and keeper say to each other cannot be mistaken for something else."""
    words = [_keeper.FORK, _keeper.EXEC, _keeper.STARTED, _keeper.ENDED, _keeper.FAILED]
    words += [_keeper.TERMINATE, _keeper.KILL]

    assert len(set(words)) == len(words)
    assert {len(word) for word in words} == {1}
