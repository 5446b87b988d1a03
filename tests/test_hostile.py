"""Hostile and clumsy neighbours: they can make you wait or get an error, never more, and never for no reason."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import resource
import socket
import subprocess
import sys
import threading
import time
import types
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from conftest import NOBODY, PLACE
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures
from test_leases import CARDS, cards, take

import jaxguard
from jaxguard import (
    _beacons,
    _descriptors,
    _devices,
    _gpu_slot,
    _jax_state,
    _leases,
    _line,
    _linux,
    _locks,
    _parties,
    _records,
    _slots,
    gpu_slot,
    isolated_jax_worker,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def card() -> str:
    """Give the name of a card that no other test has."""
    return f"GPU-{uuid.uuid4()}"


@pytest.fixture
def false_beacons() -> Iterator[Callable[..., str]]:
    """Give a function that lights beacons which say anything."""
    lit: list[socket.socket] = []

    def light(kind: str, about: str, *, number: int = 840, pid: int = 1, since: int = 1, word: str = "") -> str:
        word = word or f"{len(lit):012x}"
        beacon = socket.socket(socket.AF_UNIX)
        beacon.bind(f"\0jaxguard/1/{kind}/{_beacons.place(about):012x}/{number}/{pid}/{since}/{word}")
        beacon.listen(100)
        lit.append(beacon)
        return word

    yield light
    for beacon in lit:
        beacon.close()


# ---------------------------------------------------------------------------------------- locks


def test_a_lock_where_the_null_device_is_tried(card: str) -> None:
    """Whoever locks that place makes nobody believe that there are no locks: all still meet at /dev/null."""
    lease = take(card)
    assert lease is not None
    hostile = os.open("/dev/null", os.O_RDONLY)
    assert _linux.lock_range(hostile, 1 << 61, 1 << 33, shared=True)
    try:
        code = CARDS + "from jaxguard import _locks\nprint(take(sys.argv[1]) is None, _locks._null_works())"
        done = subprocess.run(
            [sys.executable, "-c", code, card], env={**os.environ, "PYTHONPATH": PLACE}, capture_output=True, text=True
        )
        assert done.stdout == "True True\n", done.stderr
    finally:
        os.close(hostile)
        lease.close()


def test_a_probe_that_fails_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files say nothing about locks, and are not remembered."""
    _locks._null_works.cache_clear()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        with pytest.raises(jaxguard.JaxguardError, match="Too many open files"):
            _locks.open_locks()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    _descriptors.close(_locks.open_locks())
    assert _locks._null_works()

    def full(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOLCK, "No locks available")

    _locks._null_works.cache_clear()
    monkeypatch.setattr(_linux, "lock_range", full)
    with pytest.raises(OSError, match="No locks"):
        _locks._null_works()
    monkeypatch.undo()
    assert _locks._null_works()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes the directory")
def test_root_makes_nothing_behind_a_link(tmp_path: pathlib.Path) -> None:
    """A link of another user in JAXGUARD_DIR is refused before anything is made."""
    (tmp_path / "secret").mkdir(0o700)
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.chown(tmp_path / "link", NOBODY, NOBODY, follow_symlinks=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGUARD_DIR", str(tmp_path / "link" / "jg"))
        with pytest.raises(jaxguard.JaxguardError, match="leads through a link"):
            _locks.open_locks()
    assert os.listdir(tmp_path / "secret") == []


def test_a_request_for_two_locks_nothing_in_vain(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one of two is held the other is not locked, not even for a moment: others may try just once."""
    held = take(f"{card}-1")
    locked: list[Any] = []
    real = _linux.lock_range
    monkeypatch.setattr(_linux, "lock_range", lambda *about, **how: locked.append(about) or real(*about, **how))
    assert _leases.try_take(cards(f"{card}-0", f"{card}-1"), 2) is None
    assert not locked
    held.close()  # type: ignore[union-attr]


# ---------------------------------------------------------------------------------------- beacons


def test_a_thousand_looks_leave_a_holder_as_it_is(driver: Driver) -> None:
    """However often others try and ask who holds, the holder is known, and its own processes are no strangers."""
    with gpu_slot(devices=[0], gpus=0.5):
        driver.give_nvml(_0={"processes": [[os.getpid(), 1 << 30]]})
        driver.enter()
        asked = _devices.request(0.5, (0,))
        for _ in range(300):
            (beacon,) = (b for b in _beacons.seen() if b.place == _beacons.place(asked.candidates[0].lock))
            assert _parties.behind(beacon).proved
            lease = _leases.try_take(asked.candidates, 1, asked.units)
            assert lease is not None
            lease.close()


def test_times_that_are_none(slots: Callable[[int], None], false_beacons: Callable[..., str], capsys: Any) -> None:
    """A beacon may say that it shines since the year 33658: messages and the table show what can be shown."""
    slots(1)
    (device,) = _devices.usable()
    false_beacons("h", device.lock, since=999_999_999_999, number=99_999_999_999_999_999_999)
    false_beacons("w", device.line, since=999_999_999_999, number=0)
    locks = _locks.open_locks()
    assert _locks.lock_units(locks, device.lock, 840)
    with pytest.raises(jaxguard.SlotTimeout, match=r"since \?\)"):
        gpu_slot(slot_timeout=0).__enter__()
    assert _slots.look((device,))["devices"][0]["holders"][0]["share"] == 1
    assert "since ?" in _slots.as_table(_slots.look((device,)))
    _descriptors.close(locks)


def test_many_beacons_take_few_descriptors(card: str, false_beacons: Callable[..., str]) -> None:
    """Thousands of false holders do not use up a waiter's descriptors."""
    locks = _locks.open_locks()
    assert _locks.lock_units(locks, card, 840)
    for _ in range(400):
        false_beacons("h", card)
    most: list[int] = []

    def interrupted() -> None:
        most.append(len(os.listdir("/proc/self/fd")))

    request = _devices.Request(1, 1, cards(card))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(jaxguard.SlotTimeout):
        _line.wait("x", request, 0.3, lambda _: None, os.eventfd(0, os.EFD_NONBLOCK), interrupted)
    assert max(most) - before < 100
    _descriptors.close(locks)


@pytest.mark.parametrize("how", ["hangs up", "talks"])
def test_a_beacon_that_is_none_costs_no_time(card: str, how: str) -> None:
    """One that hangs up at once, or sends something, does not make a waiter spin."""
    locks = _locks.open_locks()
    assert _locks.lock_units(locks, card, 840)
    beacon = socket.socket(socket.AF_UNIX)
    beacon.bind(f"\0jaxguard/1/h/{_beacons.place(card):012x}/840/1/1/{'a' * 12}")
    beacon.listen(100)
    over = threading.Event()
    kept = []

    def serve() -> None:
        beacon.settimeout(0.1)
        while not over.is_set():
            try:
                connection, _ = beacon.accept()
            except TimeoutError:
                continue
            if how == "talks":
                kept.append(connection)
                try:
                    connection.send(b"x" * 1000)
                except BrokenPipeError:
                    pass
            else:
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    looks: list[None] = []
    try:
        with pytest.raises(jaxguard.SlotTimeout):
            _line.wait(
                "x",
                _devices.Request(1, 1, cards(card)),
                1.5,
                lambda _: None,
                os.eventfd(0, os.EFD_NONBLOCK),
                lambda: looks.append(None),
            )
    finally:
        over.set()
        thread.join(30)
        for connection in (beacon, *kept):
            connection.close()
        _descriptors.close(locks)
    assert len(looks) < 100


# ---------------------------------------------------------------------------------------- records


def test_a_record_that_turns_into_a_pipe(card: str) -> None:
    """A record is opened, then looked at: what its owner has put in its place meanwhile makes nobody wait."""
    word = "0" * 12
    target = f"/memfd:jaxguard-{word} (deleted)"
    reads, writes = os.pipe()
    done: list[bytes] = []
    thread = threading.Thread(target=lambda: done.append(_records._read(f"/proc/self/fd/{reads}", target)), daemon=True)
    thread.start()
    thread.join(10)
    assert done == [b""]
    os.close(reads)
    os.close(writes)


def test_a_record_that_turns_into_a_pipe_without_a_writer(tmp_path: pathlib.Path) -> None:
    """To open that would wait for ever."""
    os.mkfifo(tmp_path / "fifo")
    done: list[bytes] = []
    thread = threading.Thread(
        target=lambda: done.append(_records._read(str(tmp_path / "fifo"), "a record")), daemon=True
    )
    thread.start()
    thread.join(10)
    assert done == [b""]


def test_a_record_that_is_too_deep() -> None:
    """Brackets without end, and texts without end."""
    for number, content in enumerate([b"[" * 8192, b'{"study": "' + b"x" * 8000 + b'"}']):
        word = f"{number:012x}"
        file = os.memfd_create(f"jaxguard-{word}")
        os.write(file, content)
        assert len(_records.read(os.getpid(), word).get("study", "")) in {0, 200}
        os.close(file)


# ---------------------------------------------------------------------------------------- forks


@pytest.mark.parametrize("what", ["gpu_slot", "worker", "warm"])
def test_a_forked_child_closes_no_file_of_its_own(tmp_path: pathlib.Path, what: str) -> None:
    """Sockets that a child does not keep are closed once, before its own code: their numbers are other files later."""
    code = f"""
import gc, os
from jaxguard import gpu_slot, isolated_jax_worker
what = {what!r}
kept = []

def child():
    pid = os.fork()
    if pid == 0:
        kept.extend(open(os.path.join({str(tmp_path)!r}, str(i)), "w") for i in range(40))
    return pid

if what == "gpu_slot":
    pid = gpu_slot(child)()
elif what == "worker":
    with isolated_jax_worker(reuse=True) as worker:
        worker(len, "abc")
        pid = child()
    del worker
else:
    isolated_jax_worker(reuse=True)(len)("abc")
    pid = child()
gc.collect()
if pid == 0:
    for file in kept:
        os.fstat(file.fileno())
        file.write("x")
        file.flush()
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": PLACE},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.stdout == "0\n", done.stderr


# ---------------------------------------------------------------------------------------- idle holders, threads


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Give a function that makes this process one whose JAX has started on a GPU; let go of what is kept for it."""
    on: list[bool] = []
    monkeypatch.setattr(_jax_state, "started", lambda: bool(on))
    monkeypatch.setattr(_jax_state, "local_devices", lambda: [types.SimpleNamespace(platform="gpu")] * len(on))
    monkeypatch.setattr(_jax_state, "starters", lambda: "")
    yield lambda: on.append(True)
    while _gpu_slot._kept:
        _gpu_slot._kept.pop().close()


def test_threads_get_what_their_process_keeps(driver: Driver, started: Callable[[], None]) -> None:
    """Threads that wait for a GPU on which another thread starts JAX are served by it, one after the other."""
    inside: list[str] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with gpu_slot(devices=[0]) as slot:
                if not inside:
                    started()
                inside.append(slot.devices[0].id)
                time.sleep(0.1)
                assert inside[-1:] == [slot.devices[0].id]
        except BaseException as error:  # noqa: BLE001 – for the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
        time.sleep(0.02)  # they come while the first is inside
    for thread in threads:
        thread.join(60)
    assert not errors
    assert inside == [driver.ids[0]] * 4


def test_a_kept_slot_is_for_its_devices(driver: Driver, started: Callable[[], None]) -> None:
    """A block that asks for another device does not get the one that is kept."""
    with gpu_slot(devices=[0]):
        started()
    with pytest.raises(jaxguard.JaxAlreadyStarted), gpu_slot(devices=[1], slot_timeout=0):
        pass
    with gpu_slot(devices=[1, 0], slot_timeout=0) as slot:
        assert slot.devices[0].id == driver.ids[0]


def test_a_thread_gets_no_other_card_than_jax_is_on(driver: Driver, started: Callable[[], None]) -> None:
    """While one thread is on a card, another that asks for a second one is refused: its JAX would not be there."""
    refused: list[BaseException] = []

    def other() -> None:
        try:
            gpu_slot(devices=[1], slot_timeout=0).__enter__()
        except jaxguard.JaxAlreadyStarted as error:
            refused.append(error)

    def any_card() -> None:
        try:
            gpu_slot(slot_timeout=0).__enter__()
        except jaxguard.SlotTimeout as error:  # for the card that JAX is on
            refused.append(error)

    with gpu_slot(devices=[0]):
        started()
        for work in (other, any_card):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join(60)
    assert [type(error) for error in refused] == [jaxguard.JaxAlreadyStarted, jaxguard.SlotTimeout]


def test_a_worker_may_have_a_card_beside_its_parents(driver: Driver, started: Callable[[], None]) -> None:
    """A parent whose JAX is on one of four cards keeps that one only: a call may choose another."""
    with gpu_slot(devices=[0]):
        started()
    call = isolated_jax_worker(devices=[1], slot_timeout=0)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
    assert call() == driver.ids[1]


def test_a_card_is_kept_though_it_cannot_be_said(
    driver: Driver, started: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When an idle holder has no descriptor left to say so, it still keeps the card."""

    def broken(*_: object) -> None:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many"), gpu_slot(devices=[0]):
        started()
        patch.setattr(_beacons, "light", broken)
    gc.collect()  # the exception has the frames of the block
    assert not _leases.try_take(_devices.request(1, (0,)).candidates, 1)


def test_a_probe_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two descriptors the first is closed when the second cannot be had."""
    before = os.listdir("/proc/self/fd")
    real, opened = os.open, []

    def once(*about: Any) -> int:
        if opened:
            raise OSError(24, "Too many open files")
        opened.append(real(*about))
        return opened[0]

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Too many"):
        patch.setattr(os, "open", once)
        _locks._excludes("/dev/null")
    assert os.listdir("/proc/self/fd") == before


def test_a_nested_block_asks_for_the_same_devices(driver: Driver) -> None:
    """Inside a hold another device is refused, and one that is not there too."""
    with gpu_slot(devices=[0]) as outer:
        with gpu_slot(devices=[0, 1]) as inner:
            assert inner is outer
        with pytest.raises(jaxguard.JaxguardError, match=r"asks for devices=\[1\] inside a hold of"):
            gpu_slot(devices=[1]).__enter__()
        with pytest.raises(jaxguard.NoDevices):
            gpu_slot(devices=[7]).__enter__()


HOLD_HALF = """
import types
from jaxguard import _jax_state, gpu_slot
with gpu_slot(gpus=0.5, devices=[0]) as slot:
    _jax_state.started = lambda: True
    _jax_state.local_devices = lambda: [types.SimpleNamespace(platform="gpu")]
print("idle"); input()
"""


def test_a_free_half_is_no_hopeless_case(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an idle half, whoever waits in the line for the other half waits on."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.2)
    with Script(driver.prelude + HOLD_HALF, JAXGUARD_DEVICES="auto") as idle:
        assert idle.hear() == "idle"
        request = _devices.request(0.5, (0,))
        device = request.candidates[0]
        ahead = _beacons.light(_beacons.WAITER, device.line, 1, "f" * 12)
        locks = _locks.open_locks()
        _locks.mark_waiting(locks, [device.line])
        with pytest.raises(jaxguard.SlotTimeout, match=r"no share of 0\.5 of a GPU free after .* to 50% held"):
            gpu_slot(gpus=0.5, devices=[0], slot_timeout=0.8).__enter__()
        with pytest.raises(jaxguard.SlotTimeout, match="will come free"):
            gpu_slot(devices=[0], slot_timeout=30).__enter__()
        _descriptors.close_socket(ahead)
        _descriptors.close(locks)
        with gpu_slot(gpus=0.5, devices=[0], slot_timeout=0):
            pass


def test_nobody_else_can_call_a_holder_idle(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, false_beacons: Callable[..., str]
) -> None:
    """An idle beacon counts if the kernel says that the holder itself has lit it."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.2)
    hold = driver.prelude + "from jaxguard import gpu_slot\nwith gpu_slot(devices=[0]):\n    print('held'); input()\n"
    with Script(hold, JAXGUARD_DEVICES="auto") as holder:
        assert holder.hear() == "held"
        device = _devices.usable()[0]
        (beacon,) = (b for b in _beacons.seen() if b.place == _beacons.place(device.lock))
        false_beacons("i", device.lock, pid=holder.pid, word=beacon.nonce)
        with pytest.raises(jaxguard.SlotTimeout, match="free after"):
            gpu_slot(devices=[0], slot_timeout=0.9).__enter__()


def test_one_threads_memory_is_not_anothers(driver: Driver) -> None:
    """What a block puts in the environment of its process is not taken for the user's own setting."""
    driver.give_nvml()
    driver.enter()
    seen: list[Any] = []

    def told() -> str | None:
        return os.environ.get("XLA_CLIENT_MEM_FRACTION")

    def others() -> None:
        seen.append(isolated_jax_worker(told)())
        seen.append(isolated_jax_worker(gpus=0.25)(told)())
        with gpu_slot(gpus=0.25) as slot:
            seen.append(slot.env["XLA_CLIENT_MEM_FRACTION"])

    with gpu_slot(gpus=0.5) as slot:
        assert slot.env["XLA_CLIENT_MEM_FRACTION"] == "0.4906"
        thread = threading.Thread(target=others)
        thread.start()
        thread.join(60)
    assert seen == [None, "0.2406", "0.2406"]


# ---------------------------------------------------------------------------------------- input


def test_numbers_without_end(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of digits are an entry that is not there, or a value that is not valid, like any other."""
    digits = "9" * 5000
    for bad in ([digits], [10**5000], [10**12]):
        with pytest.raises(ValueError, match="devices must be"):
            gpu_slot(devices=bad)
    with pytest.raises(ValueError, match="gpus must be 0"):
        gpu_slot(gpus=10**400)
    assert driver.see(f"1,{digits},2") == [driver.ids[1]]
    assert driver.see("1,\u0660") == [driver.ids[1]], "digits of another script are none"
    monkeypatch.setenv("JAXGUARD_DEVICES", digits)
    with pytest.raises(ValueError, match="JAXGUARD_DEVICES"):
        gpu_slot().__enter__()
    monkeypatch.delenv("JAXGUARD_DEVICES")
    monkeypatch.setenv("JAXGUARD_DIR", "/run/" + "d/" * 2100)
    with pytest.raises(ValueError, match="JAXGUARD_DIR"):
        gpu_slot().__enter__()


def test_a_mask_that_ends_early_is_unclear_too(empty_host: Driver) -> None:
    """Different cards, and a mask whose later numbers are never reached."""
    for number, kind in enumerate(["NVIDIA T400", "NVIDIA A100", "NVIDIA A100"]):
        empty_host.add(f"00c0:{number:02x}:00.0", f"GPU-{number}{number}", kind=kind)
    empty_host.enter()
    for mask in ("0,0,1,2", "0,9,1,2", "0,GPU-11"):
        with pytest.raises(ValueError, match="is not clear"):
            empty_host.see(mask)
