"""Foreign use: who computes on a card without a slot is seen, waited for within bounds, and named."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures

import jaxguard
from jaxguard import _descriptors, _devices, _leases, _line, _locks, _tenants, gpu_slot, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def stranger() -> Iterator[int]:
    """Give the pid of a process that is not of this program's family: its parent has gone."""
    code = "import os,sys\nif os.fork(): os._exit(0)\nprint(os.getpid(), flush=True)\nsys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.wait(30)  # as long as its parent is there it descends from the tests, which may hold a slot
    yield pid
    process.stdin.close()
    process.stdout.close()


@pytest.fixture(autouse=True)
def as_the_driver_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process count process ids as the driver does, wherever the tests run."""
    monkeypatch.setattr(_tenants, "_FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    monkeypatch.setattr(_tenants, "_warned", set())


def put_on(driver: Driver, processes: dict[int, list[int]]) -> None:
    """Have NVML name these processes on the cards of these numbers."""
    driver.give_nvml(**{f"_{n}": {"processes": [[pid, 1 << 30] for pid in pids]} for n, pids in processes.items()})
    driver.enter()


def test_a_foreign_card_is_left_alone(driver: Driver, stranger: int) -> None:
    """A free card with a foreign program on it is passed over for one without."""
    put_on(driver, {0: [stranger], 2: [stranger]})
    with gpu_slot(slot_timeout=0) as first:
        assert [device.id for device in first.devices] == [driver.ids[1]]
        watch = _locks.open_locks()
        assert not _locks.units_held(watch, _devices.usable()[0].lock), "what was locked on the way is free at once"
        _descriptors.close(watch)
    with gpu_slot(gpus=2, slot_timeout=0) as both:
        assert [device.id for device in both.devices] == [driver.ids[1], driver.ids[3]]
    with pytest.raises(jaxguard.SlotTimeout, match=rf"pid {stranger} \(.*, 1024 MiB\) on GPU 0 .* without a slot"):
        gpu_slot(gpus=3, slot_timeout=0).__enter__()
    lease = _leases.try_take(_devices.usable(), 2)
    assert lease is not None, "what was locked on the way is free again"
    lease.close()


def test_foreign_programs_can_be_allowed(driver: Driver, stranger: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAXGUARD_ALLOW_FOREIGN=1 uses the card beside them."""
    put_on(driver, {key: [stranger] for key in range(4)})
    monkeypatch.setenv("JAXGUARD_ALLOW_FOREIGN", "1")
    with gpu_slot(slot_timeout=0) as slot:
        assert slot.devices[0].id == driver.ids[0]
    monkeypatch.setenv("JAXGUARD_ALLOW_FOREIGN", "yes")
    with pytest.raises(
        ValueError, match=r"JAXGUARD_ALLOW_FOREIGN='yes' is not valid. Valid are: 1 \(use GPUs on which"
    ):
        gpu_slot(slot_timeout=0).__enter__()


def test_the_wait_for_foreign_programs_is_bounded(
    driver: Driver, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing but they is in the way, a wait without limit ends with an error that names them."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.3)
    put_on(driver, {key: [stranger] for key in range(4)})
    with pytest.raises(jaxguard.SlotTimeout, match=r"no GPU slot will come free: .*JAXGUARD_ALLOW_FOREIGN=1") as caught:
        isolated_jax_worker(os.getpid)()
    assert caught.value.holders == (stranger,)
    assert 0.3 <= caught.value.waited_s < 30  # type: ignore[operator]


def test_the_wait_is_bounded_only_while_it_is_hopeless(
    driver: Driver, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as one card is held by somebody who will let go, the wait goes on."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.1)
    put_on(driver, {0: [stranger], 1: [stranger], 2: [stranger]})
    done = threading.Event()

    def hold() -> None:
        with gpu_slot(slot_timeout=0):
            ready.set()
            done.wait(60)

    ready = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert ready.wait(30)
    timer = threading.Timer(0.6, done.set)
    timer.start()
    with gpu_slot() as slot:
        assert slot.devices[0].id == driver.ids[3]
    thread.join(30)
    timer.join(30)


def test_hopeless_is_what_stays_so(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound counts anew when there was hope in between."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.6)
    monkeypatch.setattr(_line, "_LAST_LOOK_S", 0.05)
    began = time.monotonic()

    def stuck(_: int, request: Any, __: Any) -> dict[Any, list[Any]]:
        hope = 0.3 < time.monotonic() - began < 0.5
        return {} if hope else {device: [] for device in request.candidates}

    monkeypatch.setattr(_line, "_stuck", stuck)
    locks = _locks.open_locks()
    for device in _devices.usable():
        assert _locks.lock_units(locks, device.lock, 840)
    with pytest.raises(jaxguard.SlotTimeout, match="will come free") as caught:
        gpu_slot().__enter__()
    _descriptors.close(locks)
    assert caught.value.waited_s >= 0.9  # type: ignore[operator]


def test_a_card_that_comes_free_is_taken(driver: Driver, stranger: int) -> None:
    """The memory of the last holder comes back a moment after its end: the next one waits for it, and no longer."""
    put_on(driver, {key: [99999999] for key in range(4)})
    timer = threading.Timer(0.3, driver.give_nvml)
    timer.start()
    with gpu_slot(slot_timeout=30) as slot:
        assert slot.waited_s >= 0.25
    timer.join(30)


def test_memory_that_does_not_come_back_is_named(driver: Driver) -> None:
    """A process that has ended, and whose memory the driver still has, is called that."""
    put_on(driver, {key: [99999999] for key in range(4)})
    with pytest.raises(
        jaxguard.SlotTimeout, match=r"pid 99999999 \(has ended, but the driver has not given its memory"
    ):
        gpu_slot(slot_timeout=0).__enter__()


HOLD_SHARE = """
from jaxguard import gpu_slot
import subprocess, sys
with gpu_slot(gpus=0.5, devices=[0]) as slot:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    print(child.pid); input()
"""


def test_sharers_are_no_strangers(driver: Driver, stranger: int) -> None:
    """What a holder of the other half has started is on the card by right; what nobody's holder started is not."""
    driver.give_nvml()
    with Script(driver.prelude + HOLD_SHARE, JAXGUARD_DEVICES="auto") as other:
        child = int(other.hear())
        put_on(driver, {0: [other.pid, child]})
        half = isolated_jax_worker(gpus=0.5, devices=[0], slot_timeout=0)(lambda: os.environ["CUDA_VISIBLE_DEVICES"])
        assert half() == driver.ids[0]
        put_on(driver, {0: [other.pid, child, stranger]})
        with pytest.raises(jaxguard.SlotTimeout):
            half()


def test_a_parent_on_a_card_is_no_reason_to_share_it(driver: Driver) -> None:
    """A worker never gets a card on which its own program computes without a slot; `gpu_slot` here may have it."""
    put_on(driver, {0: [os.getpid()]})
    assert isolated_jax_worker(lambda: os.environ["CUDA_VISIBLE_DEVICES"])() == driver.ids[1]
    with gpu_slot(slot_timeout=0) as slot:
        assert slot.devices[0].id == driver.ids[0]


# ---------------------------------------------------------------------------------------- what cannot be told


def test_in_a_container_nothing_is_known(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stranger: int
) -> None:
    """Where process ids are counted otherwise the card is usable, and one warning says so."""
    put_on(driver, {0: [stranger]})
    monkeypatch.setattr(_tenants, "_FIRST_NAMESPACE", "pid:[1]")
    with caplog.at_level(logging.WARNING, "jaxguard"):
        for _ in range(2):
            with gpu_slot(slot_timeout=0) as slot:
                assert slot.devices[0].id == driver.ids[0]
    (record,) = caplog.records
    assert "cannot tell who computes on GPU 0" in record.getMessage()


def test_the_first_namespace_has_this_number() -> None:
    """The number is of Linux's user interface: outside of containers /proc shows it."""
    source = pathlib.Path(_tenants.__file__).read_text("utf-8")
    assert f'"pid:[{0xEFFFFFFC}]"' in source


def test_without_permission_nothing_is_known(driver: Driver) -> None:
    """NVML that does not tell (a slice, without the right to see it) makes the card UNKNOWN, and usable."""
    driver.give_nvml(_0={"processes": None})
    driver.enter()
    with gpu_slot(slot_timeout=0) as slot:
        assert slot.devices[0].id == driver.ids[0]
        assert _tenants.of(slot.devices[0]).state is _tenants.State.UNKNOWN


# ---------------------------------------------------------------------------------------- idle holders

IDLE = """
import types
from jaxguard import _jax_state, gpu_slot
with gpu_slot(devices=[0, 1]) as slot:
    _jax_state.started = lambda: True
    _jax_state.local_devices = lambda: [types.SimpleNamespace(platform="gpu")]
print(slot.devices[0].id); input()
with gpu_slot(slot_timeout=0) as again:
    print(again.waited_s == 0.0 and again.devices == slot.devices); input()
print("out"); input()
"""


def test_idle_holders_are_named(driver: Driver, monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> None:
    """A waiter that only idle holders could serve gets an error that names them; one that works again is waited for."""
    monkeypatch.setattr(_line, "_HOPELESS_AFTER_S", 0.3)
    with Script(driver.prelude + IDLE, JAXGUARD_DEVICES="auto") as idle:
        held = idle.hear()
        with pytest.raises(
            jaxguard.SlotTimeout, match=r"its gpu_slot block has ended, but its JAX keeps the memory"
        ) as e:
            gpu_slot(devices=[held]).__enter__()
        assert e.value.holders == (idle.pid,)
        idle.tell()
        assert idle.hear() == "True", "its next block has the GPU at once"
        with pytest.raises(jaxguard.SlotTimeout, match="no GPU slot free after"):
            gpu_slot(devices=[held], slot_timeout=0.8).__enter__()
        idle.tell()
        assert idle.hear() == "out"
        with pytest.raises(jaxguard.SlotTimeout, match="will come free"):
            isolated_jax_worker(devices=[held])(print)()
        idle.kill()
        wait_until(lambda: _leases.try_take(_devices.request(1, (held,)).candidates, 1), "free at its end")


def test_the_bound_is_thirty_seconds() -> None:
    """As documented."""
    assert _line._HOPELESS_AFTER_S == 30.0
    assert time.monotonic() > 0
