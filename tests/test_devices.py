"""Devices: what this host offers this process, found without starting JAX or CUDA."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, Self

import host
import pytest
from host import Host
from hypothesis import given
from hypothesis import strategies as st

import jaxguard
from jaxguard import _devices, _driver, _environment, _gpus, slot_count

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

NOT_YET_KNOWN = "GPU-????????-????-????-????-????????????"
PLACE = str(pathlib.Path(jaxguard.__file__).resolve().parents[1])


class Script:
    """A Python process of its own, steered over pipes: `tell` it lines, `hear` its lines."""

    def __init__(self, code: str, *args: str, **env: str) -> None:
        path = os.pathsep.join([PLACE, *filter(None, [os.environ.get("PYTHONPATH")])])
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, **env},
        )
        self.pid = self.process.pid
        self._heard = b""

    def tell(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def hear(self, within_s: float = 60.0) -> str:
        """Give the next line; fail if none comes."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + within_s
        while b"\n" not in self._heard:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                pytest.fail(f"the script (pid {self.pid}) said nothing for {within_s} s; so far: {self._heard!r}")
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            if not data:
                pytest.fail(f"the script ended with {self.process.wait(30)}; its last line: {self._heard!r}")
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def silent(self, for_s: float) -> bool:
        """Say whether nothing came in that time."""
        return not self._heard and not select.select([self.process.stdout], [], [], for_s)[0]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(30)
        for stream in (self.process.stdin, self.process.stdout):
            try:
                stream.close()  # type: ignore[union-attr]
            except BrokenPipeError:  # what it was told last, it did not read
                pass


class Driver(Host):
    """The same, for tests that ask in this process."""

    def see(self, mask: str | None, setting: str | None = None, order: str | None = None) -> list[str]:
        """Name the devices that a process with these variables may use."""
        given = {"CUDA_VISIBLE_DEVICES": mask, "JAXGUARD_DEVICES": setting, "CUDA_DEVICE_ORDER": order}
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
            return [device.id for device in _devices.request(1).candidates]


@pytest.fixture(name="empty_host")
def no_cards(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Give a host without a card, and a CUDA plugin; cards can be added."""
    made = Driver(tmp_path / "host")
    for name in ("GPUS", "NODES", "BUS"):
        monkeypatch.setattr(_driver, name, getattr(_driver, name))
    monkeypatch.setattr(_devices, "_cuda_plugin", _devices._cuda_plugin)
    for name in ("JAXGUARD_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    made.enter()
    yield made
    host.leave()


@pytest.fixture(name="driver")
def four_cards(tmp_path: pathlib.Path, empty_host: Driver) -> Driver:
    """Give a host with four GPUs."""
    made = Driver(tmp_path / "four", 4)
    made.enter()
    return made


@pytest.fixture
def no_gpu(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a host without a driver."""
    monkeypatch.setattr(_driver, "GPUS", tmp_path / "none")
    monkeypatch.setattr(_devices, "_cuda_plugin", lambda: None)
    monkeypatch.delenv("JAXGUARD_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


# ---------------------------------------------------------------------------------------- GPUs, by their UUID


def test_one_slot_per_gpu_by_uuid(driver: Driver) -> None:
    """Each card is one slot, known by its UUID, in the order of the PCI addresses."""
    found = _devices.request(1).candidates

    assert [device.id for device in found] == driver.ids
    assert [device.index for device in found] == [0, 1, 2, 3]
    assert {device.kind for device in found} == {"NVIDIA A100-SXM4-80GB"}
    assert all(device.is_gpu and device.memory_bytes is None for device in found)
    assert len({device.lock for device in found} | {device.line for device in found}) == 4
    assert (slot_count(), slot_count(gpus=2), slot_count(gpus=3), slot_count(gpus=4)) == (4, 2, 1, 1)


def test_a_card_whose_uuid_is_not_known_yet_is_known_by_its_address(driver: Driver) -> None:
    """Before a card is first used the driver may write question marks: then it is its PCI address."""
    driver.add("ffff:ff:00.0", NOT_YET_KNOWN)

    assert _devices.request(1).candidates[4].id == "ffff:ff:00.0"


def test_a_tree_in_motion(driver: Driver) -> None:
    """A card that falls off the bus while the tree is read is left out."""
    (driver.root / "gpus" / "0000:99:00.0").mkdir()

    assert slot_count() == 4


# ---------------------------------------------------------------------------------------- CUDA_VISIBLE_DEVICES


def test_the_mask_selects_and_orders(driver: Driver) -> None:
    """Index, UUID and unique prefix each name a card, in the order of the mask."""
    a, b, c, d = driver.ids

    assert driver.see(None) == [a, b, c, d]
    assert driver.see("2,3") == [c, d]
    assert driver.see("3,0") == [d, a]
    assert driver.see(f"{d},1") == [d, b]
    assert driver.see(f" {c[:12]} , {a} ") == [c, a]


@pytest.mark.parametrize("end", ["-1", "4", "x", "", "GPU-", "GPU-00000000-0000-0000-0000-000000000000", "1.0", "0x1"])
def test_an_invalid_entry_ends_the_mask(driver: Driver, end: str) -> None:
    """What stands before an entry that names no card is used, what stands behind it is not."""
    a, _, c, _ = driver.ids

    assert driver.see(f"2,0,{end},1") == [c, a]


def test_a_prefix_of_two_cards_ends_the_mask(empty_host: Driver) -> None:
    """A prefix counts only where it names one card."""
    made = empty_host
    made.add("0000:1a:00.0", "GPU-aaaa1111-0000-0000-0000-000000000000")
    made.add("0000:2a:00.0", "GPU-aaaa2222-0000-0000-0000-000000000000")
    assert made.see("1,GPU-aaaa,0") == [made.ids[1]]
    assert made.see("GPU-aaaa1") == [made.ids[0]]


def test_a_card_named_twice_ends_the_mask(driver: Driver) -> None:
    """No card is two slots, under whichever names the mask has it."""
    a, b, _, _ = driver.ids

    assert driver.see(f"1,0,{b},2") == [b, a]


@pytest.mark.parametrize("mask", ["", " ", "-1", "-1,0", "x,0", ",0"])
def test_an_empty_mask_leaves_nothing(driver: Driver, mask: str) -> None:
    """Where the mask leaves no card, the error says so, and what to do."""
    with pytest.raises(jaxguard.NoDevices) as caught:
        driver.see(mask)

    assert f"CUDA_VISIBLE_DEVICES={mask!r} leaves none of the 4 GPUs of this host" in str(caught.value)
    assert "gpus=0" in str(caught.value)
    assert driver.ids[3] in str(caught.value)


POOL = [f"GPU-{number}{number:07d}-0000-4000-8000-000000000000" for number in range(1, 6)]


@given(picked=st.permutations(range(5)), count=st.integers(1, 5), data=st.data())
def test_every_way_to_name_the_same_cards(picked: list[int], count: int, data: st.DataObject) -> None:
    """A mask of valid names gives exactly these cards in this order, and nothing behind its first invalid entry."""
    found = [_gpus.Device(name, i, "gpu", None, name, name, i, name) for i, name in enumerate(POOL)]
    chosen = picked[:count]
    words = [data.draw(st.sampled_from([str(i), f"{i:03d}", POOL[i], POOL[i][:5], f" {i} "])) for i in chosen]

    assert [gpu.id for gpu in _gpus.masked(found, ",".join(words))] == [POOL[i] for i in chosen]

    place = data.draw(st.integers(0, count))
    words.insert(place, data.draw(st.sampled_from(["-1", "", "5", "no", "GPU", words[0] if place else "-1"])))
    assert [gpu.id for gpu in _gpus.masked(found, ",".join(words))] == [POOL[i] for i in chosen[:place]]


@given(mask=st.text(max_size=40))
def test_any_mask_gives_different_cards(mask: str) -> None:
    """Whatever stands in the mask, no card comes twice and none from elsewhere."""
    found = [_gpus.Device(name, i, "gpu", None, name, name, i, name) for i, name in enumerate(POOL)]
    ids = [gpu.id for gpu in _gpus.masked(found, mask)]

    assert len(set(ids)) == len(ids)
    assert set(ids) <= set(POOL)


def test_numbers_of_different_cards(empty_host: Driver) -> None:
    """CUDA counts different cards by speed, unless it is told not to: a number that is not clear is refused."""
    for number, kind in enumerate(["NVIDIA T400", "NVIDIA A100", "NVIDIA A100"]):
        empty_host.add(f"00b0:{number:02x}:00.0", f"GPU-{number}{number}", kind=kind)
    empty_host.enter()

    for order in (None, "FASTEST_FIRST"):
        with pytest.raises(
            ValueError, match=r"'0' is not clear: .* \(NVIDIA T400, NVIDIA A100\).*CUDA_DEVICE_ORDER=PCI"
        ):
            empty_host.see("0", order=order)
        assert empty_host.see("GPU-11", order=order) == ["GPU-11"], "a UUID is clear"
        assert len(empty_host.see("2,1,0", order=order)) == 3, "so are all of them"
        assert empty_host.see(None, order=order) == ["GPU-00", "GPU-11", "GPU-22"]
    assert empty_host.see("0", order="PCI_BUS_ID") == ["GPU-00"]


def test_numbers_of_equal_cards(driver: Driver) -> None:
    """Equal cards are counted along the bus, with and without CUDA_DEVICE_ORDER."""
    assert driver.see("2") == driver.see("2", order="PCI_BUS_ID") == [driver.ids[2]]


# ---------------------------------------------------------------------------------------- JAXGUARD_DEVICES


def test_a_list_of_devices(driver: Driver) -> None:
    """JAXGUARD_DEVICES takes what a mask takes, in its order."""
    a, _, c, d = driver.ids

    assert driver.see(None, f"3,{a},{c[:13]}") == [d, a, c]
    assert driver.see(None, "auto") == driver.ids
    assert [device.index for device in _devices.request(1).candidates] == [0, 1, 2, 3]


def test_a_list_stays_within_what_the_job_was_given(driver: Driver) -> None:
    """Under CUDA_VISIBLE_DEVICES=2,3 the list counts within these two: a neighbour's card is out of reach."""
    _, _, c, d = driver.ids

    assert driver.see("2,3", "0") == [c]
    assert driver.see("2,3", f"1,{c}") == [d, c]
    with pytest.raises(jaxguard.NoDevices, match=re.escape(driver.ids[0])):
        driver.see("2,3", driver.ids[0])


def test_a_device_of_the_list_that_is_not_there(driver: Driver) -> None:
    """Unlike a mask, a list is not cut short in silence: the error names the entry and what there is."""
    with pytest.raises(
        jaxguard.NoDevices, match=r"JAXGUARD_DEVICES= names '7', which is not there.*may use 4 "
    ) as caught:
        driver.see(None, "0,7,1")
    assert driver.ids[0] in str(caught.value)

    with pytest.raises(jaxguard.NoDevices, match="names 'MIG-"):
        driver.see(None, "MIG-GPU-1/1/0")


def test_cpu_slots_on_a_host_with_gpus(driver: Driver) -> None:
    """`cpu:N` keeps off the cards, and so does `gpus=0`, whose slots are then the host's."""
    assert driver.see(None, "cpu:3") == ["cpu:0", "cpu:1", "cpu:2"]
    assert not any(device.is_gpu for device in _devices.request(0).candidates)
    assert driver.see("2", None) == [driver.ids[2]]


# ---------------------------------------------------------------------------------------- what cannot be had


def test_a_plugin_without_a_driver(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX's GPU plugin on a host whose driver lists nothing is an error, not hours on the CPU."""
    monkeypatch.setattr(_devices, "_cuda_plugin", lambda: "jax_cuda12_plugin")

    with pytest.raises(jaxguard.NoDevices, match="jax_cuda12_plugin is installed, but the NVIDIA driver lists no GPU"):
        slot_count()
    assert slot_count(gpus=0) >= 1, "the CPU is there"
    assert _environment.thread_variables(), "and so are its threads"


def test_the_plugins_of_jax_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin is found by its module, without importing it."""
    look = _devices._cuda_plugin.__wrapped__
    assert look() == next((name for name in ("jax_cuda13_plugin", "jax_cuda12_plugin") if installed(name)), None)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name == "jax_cuda12_plugin" else None)
    assert look() == "jax_cuda12_plugin"
    assert "jax_cuda12_plugin" not in sys.modules


def installed(name: str) -> bool:
    """Say whether a module could be imported."""
    return importlib.util.find_spec(name) is not None


def test_a_driver_without_a_plugin(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs on which this JAX cannot run are an error that says what to install; the CPU is there on purpose only."""
    monkeypatch.setattr(_devices, "_cuda_plugin", lambda: None)
    monkeypatch.setattr(_devices, "_other_plugin", lambda: False)
    with pytest.raises(jaxguard.NoDevices, match=r"has 4 GPUs .* no GPU plugin.*pip install 'jaxguard\[cuda\]'"):
        slot_count()
    assert slot_count(gpus=0) >= 1
    monkeypatch.setenv("JAXGUARD_DEVICES", "cpu:2")
    assert slot_count() == 2
    monkeypatch.delenv("JAXGUARD_DEVICES")
    monkeypatch.setattr(_devices, "_other_plugin", lambda: True)
    assert slot_count() == 4, "one's own build of a plugin may be there"


def test_a_plugin_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX passes over a plugin that is not of jaxlib's version: a GPU that did not come up tells."""
    versions = {"jaxlib": "0.10.2", "jax_cuda13_plugin": "0.10.1"}
    monkeypatch.setattr(_devices, "_cuda_plugin", lambda: "jax_cuda13_plugin")
    monkeypatch.setattr(_devices.importlib.metadata, "version", versions.__getitem__)
    assert "jax_cuda13_plugin is of version 0.10.1 and jaxlib of 0.10.2" in _devices.versions_that_do_not_fit()
    versions["jax_cuda13_plugin"] = "0.10.2"
    assert _devices.versions_that_do_not_fit() == ""


def test_a_ray_task_without_gpus(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray hides the GPUs from a task that asked for none: the error says how to ask."""
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    with pytest.raises(jaxguard.NoDevices, match=r"@ray.remote\(num_gpus=1\)"):
        driver.see("")
    monkeypatch.delenv("RAY_JOB_ID")
    with pytest.raises(jaxguard.NoDevices, match="unset the variable"):
        driver.see("")


def test_the_users_xla_flags_stay(fresh_guard: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is put in their place, on either way to start."""
    flags = "--xla_cpu_enable_fast_math=false"

    @fresh_guard
    def told() -> str:
        return os.environ["XLA_FLAGS"]

    monkeypatch.setenv("XLA_FLAGS", flags)
    assert told() == flags


def test_no_plugin_and_no_driver_is_a_cpu_host(no_gpu: None) -> None:
    """Without GPUs there is one slot per two cores, at least one, each user's own."""
    slots = _devices.request(1).candidates

    assert [device.id for device in slots] == [f"cpu:{i}" for i in range(max(1, len(os.sched_getaffinity(0)) // 2))]
    assert all(device.line.startswith(f"cpu/{os.getuid()}/") for device in slots)


def test_more_gpus_than_there_are(driver: Driver) -> None:
    """Asking for more cards than the process may use is an error that counts and names them."""
    with pytest.raises(ValueError, match=r"gpus=5 asks for more than there are: this process may use 4") as caught:
        slot_count(gpus=5)
    assert driver.ids[2] in str(caught.value)


def test_more_gpus_than_cpu_slots(slots: Callable[[int], None]) -> None:
    """On a laptop the same code runs: `gpus=8` takes all CPU slots there are, and JAX sees 8 devices."""
    slots(2)
    asked = _devices.request(8)

    assert (asked.gpus, asked.take) == (8, 2)
    assert slot_count(gpus=8) == 1
    assert _environment.variables(asked.candidates, 8)["JAX_NUM_CPU_DEVICES"] == "8"


@pytest.mark.parametrize("gpus", [True, "1", None, [1], 1j])
def test_gpus_is_a_number(gpus: Any) -> None:
    """Text and truth values are refused by type."""
    with pytest.raises(TypeError, match=r"gpus must be a whole number .* or a share of one GPU"):
        slot_count(gpus=gpus)


# ---------------------------------------------------------------------------------------- what a process needs


def test_variables_for_gpus(driver: Driver) -> None:
    """A worker sees its cards by UUID, in the order of the PCI bus, and JAX starts on CUDA."""
    two = _devices.request(2).candidates[1:3]

    assert _environment.variables(two, 2) == {
        "CUDA_VISIBLE_DEVICES": f"{driver.ids[1]},{driver.ids[2]}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "JAX_PLATFORMS": "cuda,cpu",
    }


def test_a_card_without_uuid_is_named_as_cuda_reads_it(driver: Driver) -> None:
    """CUDA takes indices and UUIDs, and reads a PCI address as the number in front of its colon: another card."""
    driver.add("ffff:ff:00.0", NOT_YET_KNOWN)
    last = _devices.request(1).candidates[4:]

    assert _environment.variables(last, 1)["CUDA_VISIBLE_DEVICES"] == "4"


def test_variables_for_cpu_slots() -> None:
    """A CPU worker sets the platform, not only an empty list, and has the devices that were asked for."""
    slots = _devices.request(1).candidates

    for gpus, count in ((0, "1"), (1, "1"), (2, "2")):
        assert _environment.variables(slots[:1], gpus) == {
            "CUDA_VISIBLE_DEVICES": "",
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": count,
        }


@pytest.mark.parametrize(("cores", "slots_", "share"), [(8, 4, "2"), (8, 3, "2"), (2, 4, "1"), (7, 1, "7")])
def test_threads_are_one_slots_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, slots: Callable[[int], None], cores: int, slots_: int, share: str
) -> None:
    """BLAS and its kin get the same number of threads in every worker: cores over slots, at least one."""
    monkeypatch.setattr(_environment, "cores", lambda: list(range(cores)))
    slots(slots_)

    assert _environment.thread_variables() == dict.fromkeys(_environment.THREADS, share)


@given(cores=st.sets(st.integers(0, 255), min_size=1, max_size=64), slots_=st.integers(1, 70), gpus=st.integers(0, 3))
def test_the_slots_share_the_cores(cores: set[int], slots_: int, gpus: int) -> None:
    """All slots together use each core once where there are enough, and none is without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGUARD_DEVICES", f"cpu:{slots_}@cores")
        patch.setattr(_environment, "cores", lambda: sorted(cores))
        devices = _devices.request(gpus).candidates
        shares = [_environment.cores_of((device,), gpus) for device in devices]

        used = [core for share in shares for core in share]
        assert all(shares)
        assert set(used) == cores
        assert slots_ >= len(cores) or len(used) == len(cores), "a partition"
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
        assert _environment.cores_of(devices, gpus) == sorted(cores), "whoever holds all slots has all cores"


# ---------------------------------------------------------------------------------------- several programs at once

HOLD_ONE_GPU = """
from jaxguard import gpu_slot
print("ready"); input()
with gpu_slot(slot_timeout=0) as slot:
    print(slot.devices[0].id, slot.env["CUDA_VISIBLE_DEVICES"]); input()
"""


def test_programs_with_masks_take_their_own_cards(driver: Driver) -> None:
    """A job that was given cards 2 and 3 takes one of these, though card 0 is free."""
    _, b, c, d = driver.ids
    env = {"JAXGUARD_DEVICES": "auto"}
    with (
        Script(driver.prelude + HOLD_ONE_GPU, CUDA_VISIBLE_DEVICES="2,3", **env) as first,
        Script(driver.prelude + HOLD_ONE_GPU, CUDA_VISIBLE_DEVICES=f"2,{b}", **env) as second,
        Script(driver.prelude + HOLD_ONE_GPU, CUDA_VISIBLE_DEVICES="3", **env) as third,
    ):
        held = []
        for script in (first, second, third):
            assert script.hear() == "ready"
            script.tell()
            held.append(script.hear())

    assert held == [f"{c} {c}", f"{b} {b}", f"{d} {d}"]


def test_programs_that_start_at_once_take_different_cards(driver: Driver) -> None:
    """Four scripts that look in the same moment hold four cards: they lock first, then use."""
    scripts = [Script(driver.prelude + HOLD_ONE_GPU, JAXGUARD_DEVICES="auto") for _ in range(4)]
    try:
        assert [script.hear() for script in scripts] == ["ready"] * 4
        for script in scripts:
            script.tell()
        held = [script.hear().split()[0] for script in scripts]
        assert sorted(held) == sorted(driver.ids)

        with pytest.raises(jaxguard.SlotTimeout, match="no GPU slot free") as caught, jaxguard.gpu_slot(slot_timeout=0):
            pass
        assert set(caught.value.holders) == {script.pid for script in scripts}
    finally:
        for script in scripts:
            script.__exit__()
