"""The line: first come, first served, and nobody waits for the dead, the stopped, or those who want something else."""

from __future__ import annotations

import logging
import math
import os
import pwd
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from test_devices import Script
from test_leases import CARDS, HOLD, cards, holder_of, is_free, take

import jaxguard
from jaxguard import _beacons, _devices, _leases, _line, _linux, _locks, _shares

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

WAIT = (
    CARDS
    + """
import math
from jaxguard import _devices, _line
devices = cards(*sys.argv[2:])
request = _devices.Request(1, int(sys.argv[1]), devices)
wake = os.eventfd(0, os.EFD_NONBLOCK)
def attempt(free): return _leases.try_take(free, request.take)
lease = _line.wait("objective", request, math.inf, attempt, wake, lambda: None)
with open(os.environ["ORDER"], "a") as order:
    order.write(f"{os.getpid()}\\n")
lease.close()
print("got"); input()
"""
)


@pytest.fixture
def card() -> str:
    """Give the name of a card that no other test has."""
    return f"GPU-{uuid.uuid4()}"


def wait_for(
    *names: str, number: int = 1, timeout: float = 30.0, wake: int = -1, interrupted: Callable[[], None] = lambda: None
) -> _leases.Lease:
    """Wait for cards as a guarded call does."""
    request = _devices.Request(number, number, cards(*names))
    own = wake if wake >= 0 else os.eventfd(0, os.EFD_NONBLOCK)
    try:
        return _line.wait(
            "objective", request, timeout, lambda free: _leases.try_take(free, request.take), own, interrupted
        )
    finally:
        if wake < 0:
            os.close(own)


def waiters(name: str) -> list[int]:
    """Pids of those in the line of a card, in its order."""
    return [b.pid for b in _beacons.seen() if b.kind == _beacons.WAITER and b.place == _beacons.place(name)]


def thread(function: Callable[[], object]) -> threading.Thread:
    """Start a thread that cannot keep the test run alive."""
    started = threading.Thread(target=function, daemon=True)
    started.start()
    return started


# ---------------------------------------------------------------------------------------- the order


def test_threads_are_served_in_the_order_they_came(card: str, wait_until: Callable[..., None]) -> None:
    """Six threads that came one after the other get the card in that order."""
    held, order = take(card), []

    def want(number: int) -> None:
        lease = wait_for(card)
        order.append(number)
        lease.close()

    threads = []
    for number in range(6):
        threads.append(thread(lambda number=number: want(number)))
        wait_until(lambda number=number: len(waiters(card)) == number + 1, f"thread {number} is in the line")
    held.close()  # type: ignore[union-attr]
    for one in threads:
        one.join(30)

    assert order == list(range(6))
    assert waiters(card) == []


def test_processes_are_served_in_the_order_they_came(
    card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Four programs that came one after the other get the card in that order; nobody overtakes by trying once."""
    held, order = take(card), tmp_path / "order"
    scripts: list[Script] = []
    try:
        for number in range(4):
            scripts.append(Script(WAIT, "1", card, ORDER=str(order)))
            wait_until(lambda number=number: len(waiters(card)) == number + 1, f"program {number} is in the line")
        assert waiters(card) == [script.pid for script in scripts]
        held.close()  # type: ignore[union-attr]
        for script in scripts:
            assert script.hear() == "got"
    finally:
        for script in scripts:
            script.__exit__()

    assert order.read_text().split() == [str(script.pid) for script in scripts]


def test_nobody_overtakes(card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> None:
    """While somebody waits for two cards of which one is free, a newcomer who could use that one stands behind."""
    one, two = f"{card}-1", f"{card}-2"
    held = take(one)
    with Script(WAIT, "2", one, two, ORDER=str(tmp_path / "order")) as first:
        wait_until(lambda: waiters(two) == [first.pid], "the first is in the line")
        assert is_free(two)

        with pytest.raises(jaxguard.SlotTimeout, match=rf"1 in the line before this call, the last pid {first.pid}"):
            wait_for(two, timeout=0)
        assert first.silent(0)

        held.close()  # type: ignore[union-attr]
        assert first.hear() == "got"
        wait_for(two).close()


def test_only_overlapping_requests_wait_for_each_other(
    card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Who wants other cards than those in the line, or has one that nobody ahead wants, is served at once."""
    one, two, three = (f"{card}-{i}" for i in range(3))
    held = take(one)
    with Script(WAIT, "1", one, ORDER=str(tmp_path / "order")) as first:
        wait_until(lambda: waiters(one) == [first.pid], "the first is in the line")

        wait_for(two, timeout=0).close()
        wait_for(two, three, number=2, timeout=0).close()
        lease = wait_for(one, two, timeout=0)
        assert [device.id for device in lease.devices] == [two], "the one ahead cannot use it"
        held.close()
        with pytest.raises(jaxguard.SlotTimeout, match="1 in the line before this call"):
            wait_for(one, two, number=2, timeout=0)
        lease.close()  # type: ignore[union-attr]
        assert first.hear() == "got"


def test_a_killed_waiter_leaves_the_line(card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> None:
    """A waiter that is SIGKILLed is gone from the line, and the next one is served."""
    held, order = take(card), str(tmp_path / "order")
    with Script(WAIT, "1", card, ORDER=order) as first, Script(WAIT, "1", card, ORDER=order) as second:
        wait_until(lambda: set(waiters(card)) == {first.pid, second.pid}, "both are in the line")
        ahead, behind = (first, second) if waiters(card)[0] == first.pid else (second, first)
        ahead.kill()
        assert waiters(card) == [behind.pid]
        held.close()  # type: ignore[union-attr]
        assert behind.hear(5) == "got"


def test_a_waiter_that_is_stopped_in_the_middle(
    card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits behind one that is stopped notices when the one before that is served, however seldom it looks."""
    monkeypatch.setattr(_line, "_LOOK_SELDOM_S", 600)
    monkeypatch.setattr(_line, "_WARN_AFTER_S", 600)
    held, got = take(card), []
    order = str(tmp_path / "order")
    with Script(WAIT, "1", card, ORDER=order) as first, Script(WAIT, "1", card, ORDER=order) as second:
        wait_until(lambda: len(waiters(card)) == 2, "two are in the line")
        ahead, behind = (first, second) if waiters(card)[0] == first.pid else (second, first)
        with Script(WAIT, "1", card, ORDER=order) as third:
            wait_until(lambda: len(waiters(card)) == 3, "three are in the line")
            third.process.send_signal(signal.SIGSTOP)
            last = thread(lambda: got.append(wait_for(card)))
            wait_until(lambda: len(waiters(card)) == 4, "four are in the line")
            held.close()  # type: ignore[union-attr]
            assert (ahead.hear(), behind.hear()) == ("got", "got")
            last.join(30)
            assert got, "the one that is stopped was passed over"
            got[0].close()
            third.process.send_signal(signal.SIGCONT)
            assert third.hear() == "got"


def test_a_stopped_waiter_is_passed_over(card: str, tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> None:
    """A waiter in Ctrl-Z holds the others up for about 2 s, not for ever, and is served when it goes on."""
    held = take(card)
    with Script(WAIT, "1", card, ORDER=str(tmp_path / "order")) as first:
        wait_until(lambda: waiters(card) == [first.pid], "the first is in the line")
        first.process.send_signal(signal.SIGSTOP)
        held.close()  # type: ignore[union-attr]

        began = time.monotonic()
        lease = wait_for(card)
        took = time.monotonic() - began
        assert 1.9 <= took < 10
        assert waiters(card) == [first.pid], "it is still in the line"

        first.process.send_signal(signal.SIGCONT)
        assert first.silent(0.2)
        lease.close()
        assert first.hear(10) == "got"


# ---------------------------------------------------------------------------------------- how long, and what is said


def test_timeout_zero_tries_once(card: str) -> None:
    """`slot_timeout=0` takes what is free, and otherwise raises at once."""
    wait_for(card, timeout=0).close()

    held = take(card)
    began = time.monotonic()
    with pytest.raises(jaxguard.SlotTimeout) as caught:
        wait_for(card, timeout=0)
    assert time.monotonic() - began < 5, "no waiting"
    assert caught.value.waited_s < 5
    assert caught.value.holders == (os.getpid(),)
    held.close()  # type: ignore[union-attr]


def test_the_time_is_kept(card: str) -> None:
    """The error comes when the time is up, and leaves neither place nor mark."""
    held = take(card)
    with pytest.raises(TimeoutError, match=r"no GPU slot free after 0\.3 s") as caught:
        wait_for(card, timeout=0.3)

    assert 0.3 <= caught.value.waited_s < 5  # type: ignore[attr-defined]
    assert waiters(card) == []
    locks = _locks.open_locks()
    assert not _locks.somebody_waits(locks, [card])
    os.close(locks)
    held.close()  # type: ignore[union-attr]


def test_the_message_names_who_holds(card: str, slots: Callable[[int], None]) -> None:
    """Pid, user, command, since when, how many; and what to do."""
    names = [f"{card}-{i}" for i in range(2)]
    with Script(HOLD, *names) as holder:
        assert holder.hear() == "held"
        with pytest.raises(jaxguard.SlotTimeout) as caught:
            wait_for(*names, timeout=0)
        assert caught.value.holders == (holder.pid,)
    assert re.fullmatch(
        rf"no GPU slot free after 0\.\d s: GPU 0 \({names[0]}\), GPU 1 \({names[1]}\) held, the oldest by pid "
        rf"{holder.pid} \({pwd.getpwuid(os.getuid()).pw_name}, `.+`, since \d\d:\d\d:\d\d\)\. "
        r"Raise slot_timeout=, lower n_jobs, or end what holds it\. `jaxguard slots` shows all\.",
        str(caught.value),
        re.DOTALL,
    )

    slots(1)
    request = _devices.request(1)
    with jaxguard.gpu_slot(), pytest.raises(jaxguard.SlotTimeout, match=r"no CPU slot free after .* s: cpu:0 held"):
        _line.wait("objective", request, 0, lambda free: _leases.try_take(free, 1), -1, lambda: None)


def test_the_holders_named_are_proved(card: str) -> None:
    """`SlotTimeout.holders` are the pids that the kernel proves, whatever a beacon's name says."""
    locks = _locks.open_locks()
    assert _linux.lock_range(locks, _locks.start_of(card), _shares.UNITS)
    with socket.socket(socket.AF_UNIX) as false:
        false.bind(f"\0jaxguard/1/h/{_beacons.place(card):012x}/0/1/1700000000/abcdefabcdef")
        false.listen()
        with pytest.raises(jaxguard.SlotTimeout, match=rf"pid {os.getpid()}\b") as caught:
            wait_for(card, timeout=0)
    os.close(locks)
    assert caught.value.holders == (os.getpid(),)


def test_the_commands_of_holders(tmp_path: pathlib.Path) -> None:
    """What a message shows of a holder is its script or its module, with nothing of its other arguments."""
    (tmp_path / "train.py").write_text("print(flush=True); input()")
    for words, shown in ((["train.py", "--token=x"], "train.py"), (["-m", "train", "--token=x"], "train")):
        with subprocess.Popen(
            [sys.executable, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            assert _linux.command(holder.pid) == shown
            holder.kill()
    assert _linux.command(holder.pid) == "?", "gone"


def test_a_long_path_ends_in_the_name_of_its_script(tmp_path: pathlib.Path) -> None:
    """What is cut off is its beginning."""
    folder = tmp_path / ("deep" * 20)
    folder.mkdir()
    (folder / "train.py").write_text("print(flush=True); input()")
    with subprocess.Popen(
        [sys.executable, str(folder / "train.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        shown = _linux.command(holder.pid)
        holder.kill()
    assert shown.startswith("…")
    assert shown.endswith("deepdeep/train.py")
    assert len(shown) == 60


def test_a_warning_says_what_is_waited_for(
    card: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After 10 s one WARNING with the holder, then one every few minutes; none before."""
    assert (_line._WARN_AFTER_S, _line._WARN_EVERY_S) == (10.0, 300.0)
    held = take(card)
    with caplog.at_level(logging.WARNING, "jaxguard"):
        with pytest.raises(jaxguard.SlotTimeout):
            wait_for(card, timeout=0.2)
        assert caplog.records == []

        monkeypatch.setattr(_line, "_WARN_AFTER_S", 0.05)
        with pytest.raises(jaxguard.SlotTimeout):
            wait_for(card, timeout=0.5)
        (record,) = caplog.records
        assert record.name == "jaxguard"
        assert record.levelno == logging.WARNING
        assert re.search(
            rf"objective waits for a slot since 0 s: GPU 0 \({card}\) held, .* \(pid {os.getpid()}: ", record.message
        )

        monkeypatch.setattr(_line, "_WARN_EVERY_S", 0.05)
        with pytest.raises(jaxguard.SlotTimeout):
            wait_for(card, timeout=0.5)
        assert len(caplog.records) > 3
    held.close()  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- waking up


def test_an_interrupted_wait_ends(card: str, wait_until: Callable[..., None]) -> None:
    """A wait that is told to end by its eventfd raises at once what it was told, and leaves the line."""
    held, wake, told, got = take(card), os.eventfd(0, os.EFD_NONBLOCK), threading.Event(), []

    def interrupted() -> None:
        if told.is_set():
            message = "ended by SIGTERM"
            raise KeyboardInterrupt(message)

    def want() -> None:
        try:
            wait_for(card, timeout=math.inf, wake=wake, interrupted=interrupted)
        except KeyboardInterrupt as error:
            got.append(str(error))

    waiting = thread(want)
    wait_until(lambda: waiters(card), "the thread is in the line")
    told.set()
    os.eventfd_write(wake, 1)
    waiting.join(30)

    assert got == ["ended by SIGTERM"]
    assert waiters(card) == []
    held.close()  # type: ignore[union-attr]
    os.close(wake)
    assert is_free(card)


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Count how often a waiter looks at the line."""
    looks: list[Any] = []
    real = _line._Place.look

    def look(place: Any) -> Any:
        looks.append(time.monotonic())
        return real(place)

    monkeypatch.setattr(_line._Place, "look", look)
    return looks


def test_the_end_of_a_holder_wakes(card: str, monkeypatch: pytest.MonkeyPatch, wait_until: Callable[..., None]) -> None:
    """Waiting is no polling: the holder's end wakes who waits, though the next look is minutes away."""
    monkeypatch.setattr(_line, "_LOOK_AGAIN_S", 600)
    monkeypatch.setattr(_line, "_LOOK_SELDOM_S", 600)
    looks, got = count_looks(monkeypatch), []
    with Script(HOLD, card) as holder:
        assert holder.hear() == "held"
        waiting = thread(lambda: got.append(wait_for(card)))
        wait_until(lambda: waiters(card), "the thread is in the line")
        waiting.join(0.3)
        assert len(looks) <= 2, "nothing happens, so nobody looks"
        holder.kill()
        waiting.join(10)

    assert got, "woken"
    assert len(looks) <= 8
    got[0].close()


def test_the_end_of_the_one_before_wakes(
    card: str, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """Only the one before is watched: its end wakes, and nobody else's."""
    monkeypatch.setattr(_line, "_LOOK_AGAIN_S", 600)
    monkeypatch.setattr(_line, "_LOOK_SELDOM_S", 600)
    looks, got = count_looks(monkeypatch), []
    held = take(card)
    with Script(WAIT, "1", card, ORDER=str(tmp_path / "order")) as first:
        wait_until(lambda: waiters(card) == [first.pid], "the first is in the line")
        waiting = thread(lambda: got.append(wait_for(card)))
        wait_until(lambda: len(waiters(card)) == 2, "the thread is in the line")
        held.close()  # type: ignore[union-attr]
        assert first.hear() == "got"
        waiting.join(10)

    assert got, "woken"
    assert len(looks) <= 12
    got[0].close()


def test_a_holder_without_a_beacon_in_sight(card: str) -> None:
    """Where the holder's beacon cannot be seen (another network namespace) the lock is looked at now and then."""
    locks, got = _locks.open_locks(), []
    assert _linux.lock_range(locks, _locks.start_of(card), _shares.UNITS)
    assert holder_of(card) == []
    with pytest.raises(jaxguard.SlotTimeout, match="held by processes that cannot be seen from here") as caught:
        wait_for(card, timeout=0.05)
    assert caught.value.holders == ()

    waiting = thread(lambda: got.append(wait_for(card)))
    waiting.join(0.2)
    assert not got
    os.close(locks)
    waiting.join(10)

    assert got
    got[0].close()


@pytest.mark.parametrize(("value", "error"), [("1", TypeError), (True, TypeError), (None, TypeError)])
@pytest.mark.parametrize("guard", [jaxguard.gpu_slot, jaxguard.isolated_jax_worker])
def test_slot_timeout_is_a_number(guard: Any, value: Any, error: type[Exception]) -> None:
    """What is no number of seconds is refused at decoration."""
    with pytest.raises(error, match="slot_timeout must be a number of seconds"):
        guard(slot_timeout=value)
    for bad in (-1, math.nan, -math.inf):
        with pytest.raises(ValueError, match=r"slot_timeout must be 0 \(try once\) or more"):
            guard(slot_timeout=bad)
