"""Warm workers: one process for many calls, whoever makes them, until it should make room."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import raising
from test_devices import Script

import jaxguard
from jaxguard import _linux, _starting, _warm, isolated_jax_worker

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator


@pytest.fixture(autouse=True)
def nobody_stays() -> Iterator[None]:
    """End the idle workers of each test."""
    yield
    _warm.retire_all()


@pytest.fixture
def stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let idle workers stay for long, so that nothing but what is tested ends them."""
    monkeypatch.setattr(_warm, "_IDLE_S", 600.0)


warm_pid = isolated_jax_worker(os.getpid, reuse=True)


def gone(pid: int) -> bool:
    """Say whether a process has ended, and been reaped."""
    return _linux.status(pid) is None


def dead(pid: int) -> bool:
    """Say whether a process has ended, reaped or not."""
    status = _linux.status(pid)
    return status is None or status.state in "ZX"


def in_thread(function: Callable[[], Any]) -> Any:
    """Do it in a new thread."""
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(function()), daemon=True)
    thread.start()
    thread.join(60)
    assert got, "the thread's call has not returned"
    return got[0]


# ---------------------------------------------------------------------------------------- one process, many calls


def test_threads_hand_one_worker_on() -> None:
    """Calls of different threads, one after the other, run in one process; with `reuse=False` in as many as calls."""
    pids = {in_thread(warm_pid) for _ in range(4)} | {warm_pid()}
    assert len(pids) == 1
    assert len({in_thread(isolated_jax_worker(os.getpid)) for _ in range(3)}) == 3


def test_calls_at_once_have_a_worker_each(slots: Callable[[int], None]) -> None:
    """Two calls at once are two processes, and the next calls use these two."""
    slots(2)
    both = threading.Barrier(2)
    wait = isolated_jax_worker(lambda: [time.sleep(0.2), os.getpid()][1], reuse=True)

    def call() -> int:
        both.wait(30)
        return int(wait())

    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(call())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(set(got)) == 2
    assert {warm_pid(), warm_pid()} <= set(got)


def test_functions_share_a_worker_and_are_unpickled_once() -> None:
    """Guards with the same options share workers; a function is one object there, so its jit cache lives on."""
    calls: list[int] = []

    def count() -> tuple[int, int]:
        calls.append(1)
        return len(calls), os.getpid()

    guarded = isolated_jax_worker(count, reuse=True)
    assert [guarded()[0] for _ in range(3)] == [1, 2, 3]
    assert guarded()[1] == warm_pid()
    assert calls == [], "here nothing was called"


def test_another_environment_at_import_is_another_worker(slots: Callable[[int], None]) -> None:
    """A variable that libraries read at import tells workers apart; any other is changed where the worker is."""
    slots(2)
    read = isolated_jax_worker(
        lambda: (os.getpid(), os.environ.get("OMP_DYNAMIC"), os.environ.get("FLAVOUR")), reuse=True
    )
    plain = read()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLAVOUR", "vanilla")
        assert read() == (plain[0], None, "vanilla")
        patch.setenv("OMP_DYNAMIC", "FALSE")
        other = read()
        assert other[0] != plain[0]
        assert other[1:] == ("FALSE", "vanilla")
    assert read() == plain


def test_an_exception_keeps_the_worker() -> None:
    """An ordinary exception says nothing against the process: the next call runs there."""

    def fail() -> None:
        raise LookupError(os.getpid())

    with pytest.raises(LookupError) as caught:
        isolated_jax_worker(fail, reuse=True)()
    assert warm_pid() == caught.value.args[0]


# ---------------------------------------------------------------------------------------- when it should not stay


def test_out_of_memory_retires(slots: Callable[[int], None]) -> None:
    """After a memory error, of Python or of XLA, the process is not trusted with another call."""
    slots(1)

    class XlaRuntimeError(RuntimeError):
        """As JAX's is named in some versions."""

    for kind in (MemoryError, XlaRuntimeError):
        before = warm_pid()

        def fail(kind: type[Exception] = kind) -> None:
            message = "RESOURCE_EXHAUSTED: Out of memory"
            raise kind(message)

        with pytest.raises(kind, match="Out of memory"):
            isolated_jax_worker(fail, reuse=True)()
        assert gone(before)
        assert warm_pid() != before


def test_an_idle_worker_is_retired(
    monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None], slots: Callable[[int], None]
) -> None:
    """After some idle seconds the process is gone, its slot is free, and the thread that looked after it has ended."""
    slots(1)
    assert _warm._IDLE_S == 5.0
    monkeypatch.setattr(_warm, "_IDLE_S", 0.3)
    pid = warm_pid()
    assert not gone(pid)
    with pytest.raises(jaxguard.SlotTimeout), jaxguard.gpu_slot(slot_timeout=0):
        pass

    wait_until(lambda: gone(pid), "the idle worker is gone")
    with jaxguard.gpu_slot(slot_timeout=10):
        pass
    wait_until(lambda: "jaxguard-warm" not in {t.name for t in threading.enumerate()}, "its thread is gone")
    assert warm_pid() != pid


FOREIGN = """
import itertools
import os
from jaxguard import gpu_slot
print("ready"); input()
with gpu_slot(slot_timeout=60) as slot:
    print(slot.waited_s); input()
"""


@pytest.mark.usefixtures("stays")
def test_another_program_gets_the_slot(slots: Callable[[int], None]) -> None:
    """An idle worker makes room as soon as another process waits for its slot, long before its idle time is up."""
    slots(1)
    with Script(FOREIGN) as other:
        assert other.hear() == "ready"
        pid = warm_pid()
        other.tell()
        assert float(other.hear(20)) < 20
        assert gone(pid)

        other.tell()
        assert warm_pid() != pid


@pytest.mark.usefixtures("stays")
def test_another_program_gets_the_slot_between_two_calls(
    slots: Callable[[int], None], wait_until: Callable[..., None]
) -> None:
    """A program that calls again and again keeps no slot that another one waits for."""
    slots(1)
    stop, pids = threading.Event(), []

    def again_and_again() -> None:
        while not stop.is_set():
            pids.append(warm_pid())

    calling = threading.Thread(target=again_and_again, daemon=True)
    with Script(FOREIGN) as other:
        assert other.hear() == "ready"
        calling.start()
        wait_until(lambda: len(pids) > 3, "some calls are done")
        other.tell()
        assert float(other.hear(20)) < 20
        before = len(set(pids))
        other.tell()
        count = len(pids)
        wait_until(lambda: len(pids) > count + 1, "and the calls go on")
        stop.set()
        calling.join(60)

    assert len(set(pids)) > before


@pytest.mark.usefixtures("stays")
def test_a_call_that_cannot_use_it_gets_its_slot(slots: Callable[[int], None]) -> None:
    """On one slot, a call with other options does not wait for the idle worker of the first for ever."""
    slots(1)
    pid = warm_pid()
    other = isolated_jax_worker(os.getpid, reuse=True, env={"OMP_DYNAMIC": "FALSE"}, slot_timeout=30)()

    assert other != pid
    assert isolated_jax_worker(os.getpid, slot_timeout=30)() not in {pid, other}


# ---------------------------------------------------------------------------------------- killed while idle


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("who", ["worker", "keeper"])
def test_one_that_died_while_idle_is_replaced(
    slots: Callable[[int], None], wait_until: Callable[..., None], who: str
) -> None:
    """A call that comes the moment after the idle worker was killed, alone or with its keeper, does not fail."""
    slots(1)
    for _ in range(3):
        pid = warm_pid()
        keeper = _starting._current
        assert keeper is not None
        os.kill(pid if who == "worker" else keeper.pid, signal.SIGKILL)
        wait_until(lambda pid=pid: dead(pid), "it is dead, though perhaps not reaped")

        again = isolated_jax_worker(os.getpid, reuse=True, slot_timeout=30)()
        assert again != pid


@pytest.mark.usefixtures("stays")
@pytest.mark.parametrize("how", ["decorated", "with"])
def test_one_whose_death_is_not_told_yet_is_replaced(
    slots: Callable[[int], None], wait_until: Callable[..., None], how: str
) -> None:
    """A keeper may be slow to say that the idle worker was killed: here it is stopped until somebody asks."""
    slots(1)
    with isolated_jax_worker(reuse=True) if how == "with" else nullcontext() as worker:
        call = isolated_jax_worker(os.getpid, reuse=True) if worker is None else (lambda: worker(os.getpid))
        pid = call()
        keeper = _starting._current
        assert keeper is not None
        os.kill(keeper.pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: dead(pid), "it is dead, and not reaped")

        assert call() != pid


def test_what_it_prints_between_two_calls_arrives(
    capfd: pytest.CaptureFixture[str], wait_until: Callable[..., None]
) -> None:
    """A thread of an idle worker may print a megabyte: it is passed on, and blocks nobody."""

    def start_printing() -> None:
        def flood() -> None:
            time.sleep(0.2)  # after the call has returned
            for _ in range(1024):
                sys.stdout.write("x" * 1023 + "\n")
            sys.stdout.write("the end\n")

        threading.Thread(target=flood).start()

    isolated_jax_worker(start_printing, reuse=True)()
    seen: list[str] = []
    wait_until(lambda: seen.append(capfd.readouterr().out) or "the end" in "".join(seen), "the flood has passed")

    assert "".join(seen).count("x" * 1023) == 1024


# ---------------------------------------------------------------------------------------- the end of the program

AT_EXIT = """
import atexit, os, sys
from jaxguard import isolated_jax_worker, _warm
_warm._IDLE_S = 600
def work(path):
    def late():
        with open(path, "a") as file:
            file.write(f"handler of {os.getpid()}\\n")
    atexit.register(late)
    return os.getpid()
if __name__ == "__main__":
    print(isolated_jax_worker(work, reuse=True)(sys.argv[1]))
    {end}
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(3)", "raise LookupError('the program fails')"])
def test_at_the_programs_end(run_python: Callable[..., Any], tmp_path: pathlib.Path, end: str) -> None:
    """However the program ends, its idle workers end normally before it: their atexit handlers have run."""
    done = run_python(AT_EXIT.replace("{end}", end), args=[str(tmp_path / "words")])
    pid = int(done.stdout)

    assert (tmp_path / "words").read_text() == f"handler of {pid}\n"
    assert gone(pid)
    assert done.returncode == {"pass": 0, "sys.exit(3)": 3}.get(end, 1)


def test_a_forked_child_has_no_idle_workers(run_python: Callable[..., Any]) -> None:
    """Idle workers are their program's: a fork neither uses nor ends them, and gets its own."""
    run_python("""
import os, sys, warnings
warnings.simplefilter("ignore")
from jaxguard import isolated_jax_worker
pid = isolated_jax_worker(os.getpid, reuse=True)
mine = pid()
child = os.fork()
if child == 0:
    code = 0 if pid() != mine else 1
    from jaxguard import _warm
    _warm.retire_all()
    os._exit(code)
assert os.waitpid(child, 0)[1] == 0
assert pid() == mine
""").check()


# ---------------------------------------------------------------- a user's own time limit


def told(number: int) -> tuple[int, str]:
    """Give back what it got, and what it finds in its environment."""
    return number, os.environ["NUMBER"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.usefixtures("stays")
def test_a_users_time_limit_ends_a_call_and_spoils_none(
    slots: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever a signal handler raises, it comes out of that call; and the next one has an answer, its own."""
    slots(1)
    guarded = isolated_jax_worker(told, reuse=True, timeout=20, slot_timeout=60)
    numbers = itertools.count()

    def call(number: int) -> None:
        monkeypatch.setenv("NUMBER", str(number))
        assert guarded(number) == (number, str(number))

    call(next(numbers))
    places = []
    for place in raising.everywhere(
        lambda: call(next(numbers)), most=1000, code=r"jaxguard/_(dialogue|frames|guard)\.py", whole=10
    ):
        places.append(place)
        number = next(numbers)  # in the environment of the call that was ended
        assert guarded(number) == (number, os.environ["NUMBER"]), place
    for step in ("in write", "in put", "in _receive", "in _judge", "in change", "in converse"):
        assert any(step in place for place in places), step


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_users_time_limit_while_a_worker_starts(slots: Callable[[int], None]) -> None:
    """It is not taken for the death of the keeper, nor of the worker."""
    slots(1)
    pid = isolated_jax_worker(os.getpid, timeout=20, slot_timeout=60)
    pid()
    keeper = _starting._keeper_of_this_process().pid
    code = r"jaxguard/_starting\.py:(__init__|hear|know_worker|order|_pair|_pipe|_own)$"
    places = list(raising.everywhere(pid, most=200, code=code, whole=10))
    assert any("in hear" in place for place in places)
    assert pid() != os.getpid()
    assert _starting._keeper_of_this_process().pid == keeper
