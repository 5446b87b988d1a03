"""What NVML tells of the GPUs, where it is installed (the extra `cuda`): asking it starts neither CUDA nor JAX.

Source: NVML API reference; `pynvml` is NVIDIA's own binding, from the package nvidia-ml-py.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Slice:
    """A MIG slice of a card."""

    uuid: str
    alias: str
    """How drivers before R470 named it: by card, GPU instance and compute instance."""
    kind: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU of the host, as the driver tells."""

    uuid: str
    """Empty where the driver does not tell it."""
    address: str
    """On the PCI bus, as in /sys: `0000:1a:00.0`."""
    kind: str
    memory_bytes: int | None = None
    mode: str = ""
    """`exclusive` or `prohibited`: who may compute on it, where its compute mode says so."""
    mig: bool = False
    slices: tuple[Slice, ...] = ()


@dataclass(frozen=True, slots=True)
class Process:
    """A process that computes on a device."""

    pid: int
    """As the driver counts: in the host's own namespace."""
    memory_bytes: int | None


@functools.cache
def _library() -> Any | None:
    """NVML, ready; None where there is none, or no driver."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an old package of the same name speaks up
            import pynvml
        pynvml.nvmlInit()
    except Exception:  # noqa: BLE001 – not installed, no driver, a driver of another version: /proc tells the rest
        return None
    return pynvml


def is_there() -> bool:
    """Say whether NVML can be asked."""
    return _library() is not None


def cards() -> list[Card] | None:
    """The GPUs of which NVML lets this process know; None if it tells nothing."""
    nvml = _library()
    if nvml is None:
        return None
    found = []
    for index in range(_told(nvml.nvmlDeviceGetCount) or 0):
        # A card that a cgroup keeps from this job says NO_PERMISSION: CUDA does not count it either.
        handle = _told(nvml.nvmlDeviceGetHandleByIndex, index)
        if handle is not None:
            found.append(_card(nvml, handle))
    return found


def processes(uuid: str) -> list[Process] | None:
    """Who computes on a GPU or MIG slice; None if NVML does not tell."""
    nvml = _library()
    handle = None if nvml is None else _told(nvml.nvmlDeviceGetHandleByUUID, uuid)
    if nvml is None or handle is None:
        return None
    running = _told(nvml.nvmlDeviceGetComputeRunningProcesses, handle)
    return None if running is None else [Process(one.pid, one.usedGpuMemory) for one in running]


def _card(nvml: Any, handle: Any) -> Card:
    uuid = _text(_told(nvml.nvmlDeviceGetUUID, handle))
    modes = {nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive", nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited"}
    mig = (_told(nvml.nvmlDeviceGetMigMode, handle) or [0])[0] == 1
    return Card(
        uuid=uuid,
        address=short_address(_text(getattr(_told(nvml.nvmlDeviceGetPciInfo, handle), "busId", ""))),
        kind=_text(_told(nvml.nvmlDeviceGetName, handle)) or "NVIDIA GPU",
        memory_bytes=_memory_bytes(nvml, handle),
        mode=modes.get(_told(nvml.nvmlDeviceGetComputeMode, handle), ""),
        mig=mig,
        slices=tuple(_slices(nvml, handle, uuid)) if mig else (),
    )


def _slices(nvml: Any, handle: Any, card: str) -> list[Slice]:
    found = []
    for index in range(_told(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0):
        part = _told(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is None:  # no slice has this number
            continue
        numbers = _told(nvml.nvmlDeviceGetGpuInstanceId, part), _told(nvml.nvmlDeviceGetComputeInstanceId, part)
        alias = f"MIG-{card}/{numbers[0]}/{numbers[1]}"
        kind = _text(_told(nvml.nvmlDeviceGetName, part)) or "MIG slice"
        found.append(Slice(_text(_told(nvml.nvmlDeviceGetUUID, part)), alias, kind, _memory_bytes(nvml, part)))
    return found


def _memory_bytes(nvml: Any, handle: Any) -> int | None:
    memory = _told(nvml.nvmlDeviceGetMemoryInfo, handle)
    return None if memory is None else int(memory.total)


def _told(ask: Callable[..., T], *about: Any) -> T | None:
    """What NVML answers; None where it has no answer: not supported, not permitted, not there."""
    nvml = _library()
    try:
        return ask(*about)
    except nvml.NVMLError:  # type: ignore[union-attr]
        return None


def _text(value: Any) -> str:
    """Older bindings answer in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""


def short_address(address: str) -> str:
    """The address as /sys and /proc write it: NVML writes a domain of eight digits."""
    domain, _, rest = address.lower().partition(":")
    return f"{domain[-4:] if domain[:-4].strip('0') == '' else domain}:{rest}" if rest else address
