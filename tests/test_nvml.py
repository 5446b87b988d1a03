"""NVML: what it tells of cards, slices and processes; and that the fake one of these tests is like the real one."""

from __future__ import annotations

import inspect
import json
import os
import pathlib
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import host
import pytest
from test_devices import Driver, four_cards, no_cards  # noqa: F401 - fixtures

from jaxguard import _devices, _driver, _nvml

if TYPE_CHECKING:
    from collections.abc import Callable

REAL = """
import inspect, json, pynvml
names = {names!r}
print(json.dumps({{name: list(inspect.signature(getattr(pynvml, name)).parameters) for name in names}}))
print(json.dumps({{name: getattr(pynvml, name) for name in {constants!r}}}))
try:
    pynvml.nvmlInit()
    print("driver")
except pynvml.NVMLError as error:
    print(type(error).__name__)
print(issubclass(pynvml.NVMLError_NoPermission, pynvml.NVMLError))
"""


def test_the_fake_is_like_the_real_one() -> None:
    """Each function of the fake exists in NVIDIA's binding, with the same arguments; so do the constants."""
    functions = {name: call for name, call in vars(host.Nvml).items() if name.startswith("nvml")}
    constants = {name: value for name, value in vars(host.Nvml).items() if name.startswith("NVML_")}
    code = REAL.format(names=sorted(functions), constants=sorted(constants))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    signatures, values, began, kin = done.stdout.splitlines()

    for name, arguments in json.loads(signatures).items():
        assert list(inspect.signature(functions[name]).parameters)[1:] == arguments, name
    assert json.loads(values) == constants
    assert kin == "True"
    assert began in {"driver", "NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"}


def test_the_product_uses_nothing_else_of_it() -> None:
    """What the fake has is all that jaxguard asks for."""
    source = pathlib.Path(_nvml.__file__).read_text("utf-8")
    used = {word for word in source.replace("(", " ").replace(",", " ").replace(")", " ").split() if "nvml.n" in word}
    assert {word.partition(".")[2] for word in used} <= set(vars(host.Nvml))


def test_without_nvml_proc_tells(no_pynvml: None, driver: Driver) -> None:
    """On a host whose driver has no NVML for us, cards are found all the same; their memory is not known."""
    assert not _nvml.is_there()
    assert _nvml.cards() is None
    assert _nvml.processes(driver.ids[0]) is None
    assert [card.uuid for card in _driver.cards()] == driver.ids


@pytest.fixture
def no_pynvml(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nvidia-ml-py not installed."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    _nvml._library.cache_clear()


def test_both_sources_name_and_lock_the_same(driver: Driver) -> None:
    """A program with NVML and one without it mean the same card, and meet at the same lock."""
    by_proc = _devices.usable()
    driver.give_nvml()
    driver.enter()
    by_nvml = _devices.usable()

    assert [(device.id, device.lock, device.line) for device in by_proc] == [
        (device.id, device.lock, device.line) for device in by_nvml
    ]
    assert {device.memory_bytes for device in by_nvml} == {80 << 30}


def test_a_card_without_a_uuid_is_locked_as_with_one(empty_host: Driver) -> None:
    """Before its first use the driver writes question marks for the UUID: the lock must not change afterwards."""
    empty_host.add("0000:1a:00.0", "GPU-????????-????-????-????-????????????")
    (before,) = _devices.usable()
    (empty_host.root / "gpus" / "0000:1a:00.0" / "information").write_text(
        host.INFORMATION.format(uuid="GPU-1b2c", address="0000:1a:00.0", minor=0, kind=host.A100)
    )
    _driver.look_again()
    (after,) = _devices.usable()

    assert (before.id, after.id) == ("0000:1a:00.0", "GPU-1b2c")
    assert (before.lock, before.line) == (after.lock, after.line)


@pytest.mark.parametrize(
    ("told", "short"),
    [
        ("00000000:1A:00.0", "0000:1a:00.0"),
        ("0000:1a:00.0", "0000:1a:00.0"),
        ("00010000:1a:00.0", "00010000:1a:00.0"),
        ("", ""),
    ],
)
def test_addresses_are_written_one_way(told: str, short: str) -> None:
    """NVML writes a domain of eight digits, /proc and /sys of four, where four suffice."""
    assert _nvml.short_address(told) == short


# ---------------------------------------------------------------------------------------- jobs that were given a part


def test_cards_of_another_job_do_not_count(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a Slurm job on a part of a node, NVML denies the other cards, and CUDA counts from 0 over the rest."""
    driver.give_nvml(_0={"denied": True}, _1={"denied": True})
    driver.enter()

    assert driver.see(None) == driver.ids[2:]
    assert driver.see("0") == [driver.ids[2]], "the job's own number 0"
    assert driver.see("0,1") == driver.ids[2:]


def test_cards_that_may_not_be_opened_do_not_count(
    driver: Driver, as_nobody: Callable[[str], list[str]], open_to_all: Callable[[pathlib.Path], None]
) -> None:
    """Without NVML it is the device node that is denied."""
    for minor in range(4):
        (driver.root / "dev" / f"nvidia{minor}").touch(0o600 if minor < 3 else 0o666)
    open_to_all(driver.root)
    code = driver.prelude + "from jaxguard import _devices\nprint([d.id for d in _devices.usable()])"

    assert as_nobody(code) == [str([driver.ids[3]])]


# ---------------------------------------------------------------------------------------- MIG


@pytest.fixture
def sliced(driver: Driver) -> list[dict[str, Any]]:
    """Have the second of four cards in MIG mode, with two slices, and the last one with none."""
    cards = driver.give_nvml(_1={"mig": 1, "slices": [host.part(2), host.part(5)]}, _3={"mig": 1})
    driver.enter()
    return cards


def test_slices_and_cards_side_by_side(driver: Driver, sliced: list[dict[str, Any]]) -> None:
    """A slice is a device with a name, memory and lock of its own; a card in MIG mode is none."""
    a, _, c, _ = driver.ids
    first, second = (part["uuid"] for part in sliced[1]["slices"])
    found = _devices.usable()

    assert [device.id for device in found] == [a, first, second, c]
    assert [device.index for device in found] == [0, 1, 2, 3]
    assert [device.memory_bytes for device in found] == [80 << 30, 10 << 30, 10 << 30, 80 << 30]
    assert len({device.lock for device in found}) == len({device.line for device in found}) == 4
    assert found[1].kind.endswith("MIG 1g.10gb")


def test_masks_name_slices(driver: Driver, sliced: list[dict[str, Any]]) -> None:
    """By UUID, by its beginning, by the older name; the number or UUID of a card stands for its slices."""
    a, b, c, d = driver.ids
    first, second = (part["uuid"] for part in sliced[1]["slices"])

    assert driver.see(second) == [second]
    assert driver.see(f"{first[:20]},{c}") == [first, c]
    assert driver.see(f"MIG-{b}/12/0,{a}") == [second, a], "GPU instance 12, compute instance 0"
    assert driver.see("1") == driver.see(b) == [first, second]
    assert driver.see(f"2,{first},1,0") == [c, first], "a slice that is named twice ends the mask"
    assert driver.see(f"0,3,{first}") == [a], "a card in MIG mode without slices ends it"
    assert driver.see(f"0,{d},2") == [a]


def test_a_request_for_several_takes_whole_cards(driver: Driver, sliced: list[dict[str, Any]]) -> None:
    """CUDA shows a process one slice at most, so two devices for one process are two whole cards."""
    a, _, c, _ = driver.ids
    assert [device.id for device in _devices.request(2).candidates] == [a, c]
    with pytest.raises(ValueError, match=r"gpus=3 cannot be had: CUDA shows a process one MIG slice at most"):
        _devices.request(3)
    assert len(_devices.request(0.5).candidates) == 4, "a slice can be shared like a card"


def test_a_mask_of_slices_without_nvml(driver: Driver, no_pynvml: None) -> None:
    """Slices are not seen without NVML: the error says how to have it."""
    with pytest.raises(_devices.errors.NoDevices, match=r"pip install 'jaxguard\[cuda\]'"):
        driver.see("MIG-7a2c3e1b-0000-4000-8000-000000000000")


# ---------------------------------------------------------------------------------------- compute modes


def test_prohibited_cards_are_no_devices(driver: Driver) -> None:
    """A card on which nobody may compute is left out; where none is left the error says why."""
    driver.give_nvml(_0={"computeMode": 2})
    driver.enter()
    assert driver.see(None) == driver.ids[1:]
    with pytest.raises(_devices.errors.NoDevices, match=r"compute mode of GPU-.* is PROHIBITED.*nvidia-smi -c DEFAULT"):
        driver.see("0")


def test_exclusive_cards_are_not_shared(driver: Driver) -> None:
    """A card that lets one process at a time in takes no shares; where no other is left the error says why."""
    driver.give_nvml(_0={"computeMode": 3})
    driver.enter()
    assert [device.id for device in _devices.request(0.5).candidates] == driver.ids[1:]
    assert len(_devices.request(1).candidates) == 4
    driver.give_nvml(**{f"_{number}": {"computeMode": 3} for number in range(4)})
    driver.enter()
    with pytest.raises(_devices.errors.NoDevices, match=r"gpus=0\.5 cannot be had: .* EXCLUSIVE_PROCESS"):
        _devices.request(0.5)


def test_an_answer_is_good_for_a_moment(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call asks several times, and the driver once; a second later it is asked again."""
    asked: list[int] = []
    monkeypatch.setattr(_driver, "_listed", lambda: asked.append(os.getpid()) or [])
    _driver.look_again()
    for _ in range(3):
        _driver.cards()
    assert len(asked) == 1
    monkeypatch.setattr(_driver, "_FRESH_S", 0.0)
    _driver.cards()
    assert len(asked) == 2
