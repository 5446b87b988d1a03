"""Leases: one holder for each device, whoever asks, and free the moment the last holder is gone."""

from __future__ import annotations

import os
import pathlib
import select
import socket
import subprocess
import sys
import time
import uuid
from typing import TYPE_CHECKING

import pytest
from test_devices import Script

from jaxguard import _beacons, _descriptors, _leases, _linux, _locks, _shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxguard._gpus import Device

# Seen by other processes as they would see cards: the name of the lock is the device's own, not its user's.
CARDS = """
import os, sys
from jaxguard import _leases
from jaxguard._gpus import Device
def cards(*names):
    return tuple(Device(name, i, "gpu", None, name, name) for i, name in enumerate(names))
def take(*names, number=1):
    return _leases.try_take(cards(*names), number)
"""
exec(CARDS)
HOLD = CARDS + "lease = take(*sys.argv[1:], number=len(sys.argv) - 1)\nprint('held' if lease else 'refused'); input()\n"

if TYPE_CHECKING:

    def cards(*names: str) -> tuple[Device, ...]: ...
    def take(*names: str, number: int = 1) -> _leases.Lease | None: ...


@pytest.fixture
def card() -> str:
    """Give the name of a card that no other test has."""
    return f"GPU-{uuid.uuid4()}"


def holder_of(name: str) -> list[_beacons.Sighting]:
    """Look which beacons shine for a card."""
    return [b for b in _beacons.seen() if b.kind == _beacons.HOLDER and b.place == _beacons.place(name)]


def is_free(name: str) -> bool:
    """Take a card and give it back."""
    lease = take(name)
    if lease is not None:
        lease.close()
    return lease is not None


# ---------------------------------------------------------------------------------------- exclusion

UNSAFE_INCREMENTS = """
import pathlib, sys, time
from jaxguard import gpu_slot
folder = pathlib.Path(sys.argv[1])
print("ready"); input()
for _ in range(25):
    with gpu_slot(slot_timeout=120) as slot:
        counter = folder / slot.devices[0].id
        value = int(counter.read_text())
        time.sleep(0.001)
        counter.write_text(str(value + 1))
print("done")
"""


def test_exclusion_by_arithmetic(tmp_path: pathlib.Path, slots: Callable[[int], None]) -> None:
    """8 processes, 4 devices, 25 unsafe increments each: none is lost, so no two ever held one device."""
    slots(4)
    for number in range(4):
        (tmp_path / f"cpu:{number}").write_text("0")
    scripts = [Script(UNSAFE_INCREMENTS, str(tmp_path)) for _ in range(8)]
    try:
        for script in scripts:
            assert script.hear() == "ready"
        for script in scripts:
            script.tell()
        for script in scripts:
            assert script.hear(120) == "done"
    finally:
        for script in scripts:
            script.__exit__()

    counts = [int((tmp_path / f"cpu:{number}").read_text()) for number in range(4)]
    assert sum(counts) == 200
    assert min(counts) > 0, f"all devices were used: {counts}"


def test_two_leases_of_one_process_exclude_each_other(card: str) -> None:
    """The lock belongs to the lease, not to the process: threads exclude each other too."""
    first = take(card)
    assert first is not None
    assert take(card) is None
    first.close()
    assert is_free(card)


def test_all_or_nothing(card: str) -> None:
    """Who asks for three of four, with two held, gets none and keeps none."""
    names = [f"{card}-{i}" for i in range(4)]
    held = [take(names[0]), take(names[2])]
    before = len(os.listdir("/proc/self/fd"))

    assert take(*names, number=3) is None
    assert len(os.listdir("/proc/self/fd")) == before
    assert [is_free(name) for name in names] == [False, True, False, True]

    two = take(*names, number=2)
    assert two is not None
    assert [device.id for device in two.devices] == [names[1], names[3]]
    for lease in (*held, two):
        lease.close()  # type: ignore[union-attr]
    assert all(map(is_free, names))


def test_neighbouring_ranges_do_not_touch(card: str) -> None:
    """A device's range, the mark of its line and the next device's range are disjoint."""
    start = _locks.start_of(card)
    locks = _locks.open_locks()
    lease = take(card)
    try:
        assert lease is not None
        assert not _locks.somebody_waits(locks, [card]), "a holder is no waiter"
        assert _linux.range_is_locked(locks, start, 1)
        assert _linux.range_is_locked(locks, start + _shares.UNITS - 1, 1)
        assert not _linux.range_is_locked(locks, start + _shares.UNITS, 1)
        assert not _linux.range_is_locked(locks, start - 1, 1)
        assert all(_shares.UNITS % parts == 0 for parts in range(1, 9)), "halves to eighths are whole"
        _locks.mark_waiting(locks, [card])
        other = _locks.open_locks()
        assert _locks.somebody_waits(other, [card])
        assert not is_free(card)
        _descriptors.close(other)
    finally:
        _descriptors.close(locks)
        lease.close()  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- ends


def test_sigkill_frees_at_once(card: str) -> None:
    """A holder that is SIGKILLed holds nothing by the time its parent has reaped it."""
    with Script(HOLD, card) as holder:
        assert holder.hear() == "held"
        assert take(card) is None
        holder.kill()
        assert is_free(card)
        assert holder_of(card) == []


def test_close_frees_and_wakes(card: str) -> None:
    """Who watches the beacon is woken by the lease's end, and finds the device free."""
    lease = take(card)
    assert lease is not None
    line = holder_of(card)[0].connect()
    assert line is not None
    assert not select.select([line], [], [], 0)[0]
    assert lease.anybody_waits()
    assert not lease.foreign_waiters(), "it is this process that waits"

    lease.close()

    assert select.select([line], [], [], 30)[0], "woken"
    assert line.recv(1) == b""
    assert is_free(card)
    assert lease.closed
    lease.close()  # twice does no harm
    _descriptors.close_socket(line)


def test_the_lock_goes_before_the_beacon(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment a watcher is woken the device is free already."""
    lease = take(card)
    assert lease is not None
    real, found = _descriptors.close_socket, []

    def close_socket(connection: socket.socket) -> None:
        monkeypatch.setattr(_descriptors, "close_socket", real)
        found.append(is_free(card))
        real(connection)

    monkeypatch.setattr(_descriptors, "close_socket", close_socket)
    lease.close()

    assert found == [True]


def test_a_foreign_waiter_is_told_apart(card: str) -> None:
    """The holder knows whether another process watches its beacon, and forgets it when that ends."""
    lease = take(card)
    assert lease is not None
    watch = CARDS + (
        "from jaxguard import _beacons\n"
        "line = next(b for b in _beacons.seen() if b.place == _beacons.place(sys.argv[1])).connect()\n"
        "print('watching'); input()\n"
    )
    with Script(watch, card) as watcher:
        assert watcher.hear() == "watching"
        assert lease.foreign_waiters()
    assert not lease.foreign_waiters()
    assert not lease.anybody_waits()
    lease.close()


def test_another_user_is_refused(card: str) -> None:
    """Users exclude each other: a card that root holds is not to be had by anybody else, nor the other way round."""
    if os.getuid() != 0:
        pytest.skip("only root can become another user")
    as_nobody = "import os\nos.setgid(65534); os.setgroups([]); os.setuid(65534)\n"
    start = CARDS + "from jaxguard import _beacons\nprint('ready'); input()\n"
    look = (
        "name = sys.argv[1]\n"
        "seen = [b for b in _beacons.seen() if b.place == _beacons.place(name)]\n"
        "print('free' if take(name) else 'refused', *(f'{b.proved().pid} {b.proved().uid}' for b in seen))\n"
    )
    mine, theirs = f"{card}-mine", f"{card}-theirs"
    lease = take(mine)
    with Script(start + as_nobody + f"lease = take({theirs!r})\n" + look + "input()", mine) as other:
        assert other.hear() == "ready"
        other.tell()
        assert other.hear() == f"refused {os.getpid()} 0"

        assert take(theirs) is None, "what another user holds"
        proof = holder_of(theirs)[0].proved()
        assert proof == (other.pid, 65534)
    assert is_free(theirs)
    lease.close()  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- forks and descriptors

FORK = (
    CARDS
    + """
lease = take(sys.argv[1])
go, come = os.pipe(), os.pipe()
child = os.fork()
if child == 0:  # it outlives the lease, and ends when it is told to
    os.close(go[1])
    os.write(come[1], b"!")
    os.read(go[0], 1)
    if sys.argv[2] == "closes":
        lease.close()
    os._exit(0)
os.read(come[0], 1)
print("forked")
for order in sys.stdin:
    if order == "end the child\\n":
        os.close(go[1]); os.waitpid(child, 0)
    elif order == "close\\n":
        lease.close()
    print("done")
"""
)


@pytest.mark.parametrize("how", ["closes", "ends"])
def test_a_forked_child_does_not_free(card: str, how: str) -> None:
    """A fork of the holder that ends, or closes its copy of the lease, frees nothing."""
    with Script(FORK, card, how) as holder:
        assert holder.hear() == "forked"
        holder.tell("end the child")
        assert holder.hear() == "done"
        assert take(card) is None
        assert holder_of(card) != []


def test_a_forked_child_does_not_keep(card: str) -> None:
    """A fork that outlives the lease, or the holder, keeps neither lock nor beacon."""
    with Script(FORK, card, "ends") as holder:
        assert holder.hear() == "forked"
        holder.tell("close")
        assert holder.hear() == "done"
        assert is_free(card)
        assert holder_of(card) == []
        holder.tell("end the child")
        assert holder.hear() == "done"


def test_a_fork_that_outlives_its_killed_parent_keeps_nothing(card: str) -> None:
    """The holder is SIGKILLed while its forked child lives on: the device is free at once."""
    with Script(FORK, card, "ends") as holder:
        assert holder.hear() == "forked"
        children = _linux.children(holder.pid)
        holder.kill()  # the pipe's end closes with it, which ends the child a little later
        assert len(children) == 1
        assert is_free(card)


def test_a_program_that_the_holder_starts_keeps_nothing(card: str) -> None:
    """No descriptor of a lease passes through exec, though the starter closes none."""
    lease = take(card)
    assert lease is not None
    words = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        assert child.stdout is not None
        child.stdout.readline()  # exec is over: the kernel closes descriptors one by one
        lease.close()
        assert is_free(card)
        assert child.poll() is None
        child.communicate(b"\n", 30)


def test_a_lease_travels_over_a_socket(card: str) -> None:
    """Passed on by SCM_RIGHTS, a lease is held in flight, and then by the receiver alone."""
    lease = take(card)
    assert lease is not None
    here, there = socket.socketpair()
    with here, there:
        socket.send_fds(here, [b"!"], lease.descriptors)
        lease.close()
        assert take(card) is None, "in flight"
        assert holder_of(card) != []

        _, received, _, _ = socket.recv_fds(there, 1, 8)
    assert len(received) == 2, "the lock, and one beacon"
    assert take(card) is None
    assert holder_of(card) != []

    _descriptors.close(received[0])
    assert is_free(card)
    _descriptors.close(received[1])
    assert holder_of(card) == []


# ---------------------------------------------------------------------------------------- beacons


def test_a_beacon_says_who_holds(card: str) -> None:
    """The name has the protocol, the device, the pid and since when; the kernel proves the pid."""
    before = int(time.time())
    with Script(HOLD, card) as holder:
        assert holder.hear() == "held"
        (beacon,) = holder_of(card)

        assert beacon.name.startswith(f"jaxguard/{_beacons.PROTOCOL}/h/{_beacons.place(card):012x}/840/{holder.pid}/")
        assert before <= beacon.since <= time.time()
        assert beacon.pid == holder.pid
        assert beacon.proved() == (holder.pid, os.getuid())


@pytest.mark.parametrize(
    "name",
    [
        "jaxguard/1/h/zz/0/1/1/f00dfeedcafe",
        "jaxguard/1/x/aaaaaaaaaaaa/0/1/1/f00dfeedcafe",
        "jaxguard/1/h/aaaaaaaaaaaa/0/1/1/f00dfeedcafe/more",
        "jaxguard/1/h/aaaaaaaaaaaa/-1/1/1/f00dfeedcafe",
        "jaxguard/1/h/aaaaaaaaaaaa/0/99999999999999/1/f00dfeedcafe",
        "jaxguard/\xff\xfe",
    ],
)
def test_false_beacons_are_ignored(name: str) -> None:
    """Anybody can light a beacon: one whose name is not ours to the letter is not there."""
    with socket.socket(socket.AF_UNIX) as false:
        false.bind(f"\0{name}".encode("latin-1"))
        false.listen()

        assert not any(
            name in {beacon.name, beacon.nonce} or beacon.nonce == "f00dfeedcafe" for beacon in _beacons.seen()
        )


def test_a_lie_about_the_pid_is_not_believed(card: str) -> None:
    """Whose name says pid 1 is shown under the pid that the kernel proves."""
    with socket.socket(socket.AF_UNIX) as false:
        false.bind(f"\0jaxguard/1/h/{_beacons.place(card):012x}/0/1/1700000000/abcdefabcdef")
        false.listen()
        (beacon,) = holder_of(card)

        assert beacon.pid == 1
        assert beacon.proved() == (os.getpid(), os.getuid())
    assert beacon.proved() is None, "gone"
    assert is_free(card), "a beacon decides nothing"


def test_a_full_queue_at_the_beacon_hangs_nobody(card: str) -> None:
    """The 200th watcher of one beacon is sent away instead of hanging."""
    lease = take(card)
    assert lease is not None
    (beacon,) = holder_of(card)
    lines = [beacon.connect() for _ in range(_beacons._BACKLOG + 20)]

    assert lines[0] is not None
    assert lines[-1] is None
    lease.close()
    for line in filter(None, lines):
        _descriptors.close_socket(line)


def test_many_leases_leave_no_descriptor(card: str) -> None:
    """A hundred cycles cost no descriptor, whether the lease was had or refused."""
    before = os.listdir("/proc/self/fd")
    held = take(f"{card}-held")
    for _ in range(100):
        assert is_free(card)
        assert take(f"{card}-held") is None
    held.close()  # type: ignore[union-attr]

    assert len(os.listdir("/proc/self/fd")) == len(before)
