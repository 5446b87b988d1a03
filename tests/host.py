"""A host with GPUs that is not there: trees like those of the driver and the bus, and an NVML, read by real processes.

The tree and the state of the NVML are files, so that every process that enters the host sees the same, and what a test
changes. Only their contents are made up: what parses, locks and exports is the product.
"""

from __future__ import annotations

import json
import pathlib
import sys
import types
import uuid
from typing import Any

TESTS = pathlib.Path(__file__).resolve().parent
# What the driver writes, tabs and all.
INFORMATION = """\
Model: \t\t {kind}
IRQ:   \t\t 145
GPU UUID: \t {uuid}
Video BIOS: \t 92.00.45.00.03
Bus Type: \t PCIe
DMA Size: \t 47 bits
DMA Mask: \t 0x7fffffffffff
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Firmware: \t 550.54.15
GPU Excluded:\t No
"""
A100 = "NVIDIA A100-SXM4-80GB"


class Host:
    """A host with cards that no other test has."""

    def __init__(self, root: pathlib.Path, count: int = 0) -> None:
        self.root = root
        self.ids: list[str] = []
        for folder in ("gpus", "dev", "bus"):
            (root / folder).mkdir(parents=True)
        base = uuid.uuid4().int % 0xFFF0 * 0x100  # addresses of its own: they are what is locked
        for number in range(count):
            self.add(f"{base >> 8:04x}:{0x1A + number % 0xC0:02x}:{number // 0xC0:02x}.0", f"GPU-{uuid.uuid4()}")

    def add(self, address: str, name: str, kind: str = A100, near: str | None = None) -> None:
        """Plug a card in."""
        (self.root / "gpus" / address).mkdir()
        text = INFORMATION.format(uuid=name, address=address, minor=len(self.ids), kind=kind)
        (self.root / "gpus" / address / "information").write_text(text)
        if near is not None:
            (self.root / "bus" / address).mkdir()
            (self.root / "bus" / address / "local_cpulist").write_text(f"{near}\n")
        self.ids.append(name)

    def give_nvml(self, **changes: dict[str, Any]) -> list[dict[str, Any]]:
        """Install NVML on it; `changes` are facts of the card of that number, as `_0={...}`."""
        cards = []
        for number, folder in enumerate(sorted((self.root / "gpus").iterdir())):
            facts = dict(
                line.split(": ", 1) for line in (folder / "information").read_text().splitlines() if ": " in line
            )
            card = {
                "uuid": facts["GPU UUID"].strip(),
                "busId": f"0000{folder.name}".upper(),
                "name": facts["Model"].strip(),
                "total": 80 << 30,
                "computeMode": 0,
                "mig": None,
                "slices": [],
                "processes": [],
                "denied": False,
            }
            cards.append({**card, **changes.get(f"_{number}", {})})
        self.set_nvml(cards)
        return cards

    def set_nvml(self, cards: list[dict[str, Any]]) -> None:
        """Change what NVML tells."""
        (self.root / "nvml.tmp").write_text(json.dumps(cards))
        (self.root / "nvml.tmp").rename(self.root / "nvml.json")

    @property
    def prelude(self) -> str:
        """What a script runs first, to be on this host."""
        return f"import sys; sys.path.insert(0, {str(TESTS)!r}); import host; host.enter({str(self.root)!r})\n"

    def enter(self) -> None:
        """Have this process be on the host."""
        enter(str(self.root))


def enter(root: str) -> None:
    """Have this process be on a host."""
    from jaxguard import _devices, _driver, _nvml

    place = pathlib.Path(root)
    _driver.GPUS, _driver.NODES, _driver.BUS = place / "gpus", place / "dev", place / "bus"
    _devices._cuda_plugin = lambda: "jax_cuda13_plugin"
    sys.modules["pynvml"] = Nvml(place / "nvml.json")
    _nvml._library.cache_clear()
    _driver.look_again()


def leave() -> None:
    """Have this process be where it was."""
    from jaxguard import _driver, _nvml

    sys.modules.pop("pynvml", None)
    _nvml._library.cache_clear()
    _driver.look_again()


class NVMLError(Exception):
    """What NVML answers when it has no answer."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value


class Handle:
    """What stands for a card, or for a slice of one."""

    def __init__(self, facts: dict[str, Any], card: dict[str, Any] | None = None) -> None:
        self.facts = facts
        self.card = card


class Nvml(types.ModuleType):
    """The functions of `pynvml` that jaxguard uses, with their names, arguments, answers and errors."""

    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_NO_PERMISSION = 4
    NVML_ERROR_NOT_FOUND = 6
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_COMPUTEMODE_DEFAULT = 0
    NVML_COMPUTEMODE_PROHIBITED = 2
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    NVMLError = NVMLError

    def __init__(self, state: pathlib.Path) -> None:
        super().__init__("pynvml")
        self._state = state

    def _cards(self) -> list[dict[str, Any]]:
        return json.loads(self._state.read_text())  # type: ignore[no-any-return]

    def nvmlInit(self) -> None:
        if not self._state.exists():
            raise NVMLError(self.NVML_ERROR_DRIVER_NOT_LOADED)

    def nvmlDeviceGetCount(self) -> int:
        return len(self._cards())

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Handle:
        card = self._cards()[index]
        if card["denied"]:
            raise NVMLError(self.NVML_ERROR_NO_PERMISSION)
        return Handle(card)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Handle:
        for card in self._cards():
            for facts, of in ((card, None), *((part, card) for part in card["slices"])):
                if facts["uuid"] == uuid:
                    return Handle(facts, of)
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetUUID(self, handle: Handle) -> str:
        return str(handle.facts["uuid"])

    def nvmlDeviceGetName(self, handle: Handle) -> str:
        return str(handle.facts["name"])

    def nvmlDeviceGetPciInfo(self, handle: Handle) -> Any:
        return types.SimpleNamespace(busId=handle.facts["busId"])

    def nvmlDeviceGetMemoryInfo(self, handle: Handle, version: Any = None) -> Any:
        return types.SimpleNamespace(total=handle.facts["total"], used=0, free=handle.facts["total"])

    def nvmlDeviceGetComputeMode(self, handle: Handle) -> int:
        return int(handle.facts["computeMode"])

    def nvmlDeviceGetMigMode(self, device: Handle) -> list[int]:
        if device.facts["mig"] is None:  # a card that cannot be divided
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED)
        return [int(device.facts["mig"])] * 2

    def nvmlDeviceGetMaxMigDeviceCount(self, device: Handle) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: Handle, index: int) -> Handle:
        for part in device.facts["slices"]:
            if part["index"] == index:
                return Handle(part, device.facts)
        raise NVMLError(self.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetGpuInstanceId(self, device: Handle) -> int:
        return int(device.facts["gi"])

    def nvmlDeviceGetComputeInstanceId(self, device: Handle) -> int:
        return int(device.facts["ci"])

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Handle) -> list[Any]:
        if handle.facts["processes"] is None:
            raise NVMLError(self.NVML_ERROR_NO_PERMISSION)
        return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in handle.facts["processes"]]


def part(number: int, kind: str = "NVIDIA A100-SXM4-80GB MIG 1g.10gb", **changes: Any) -> dict[str, Any]:
    """A MIG slice, as a fact of a card."""
    facts = {"uuid": f"MIG-{uuid.uuid4()}", "name": kind, "total": 10 << 30, "index": number, "gi": number + 7, "ci": 0}
    return {**facts, "processes": [], **changes}
