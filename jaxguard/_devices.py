"""Which devices this host offers this process, without starting JAX or CUDA; and what a process needs to use some.

Identity is physical: a GPU is its UUID (its PCI address where the driver tells none), never an index. CPU slots are
shares of the cores this process may use, each user's own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from . import _settings, errors

DRIVER = Path("/proc/driver/nvidia/gpus")
"""Where the NVIDIA driver lists its GPUs."""
FROM_THE_LEASE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
"""Variables that say which devices JAX starts on."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that the numerical libraries read when they are imported: threads to start."""
_CORES_PER_SLOT = 2
OUTSIDE: dict[str, str | None] = {}
"""What the variables said before `gpu_slot` put its own in force here: other threads still choose among all of that."""


@dataclass(frozen=True, slots=True)
class Device:
    """One device that can be held."""

    id: str
    """Physical identity: the UUID or PCI address of a GPU, `cpu:0` and so on for CPU slots."""
    index: int
    """Position among the devices that this process may use."""
    kind: str
    """Model name of the GPU, or `cpu`."""
    memory_bytes: int | None
    """Memory of the device, where known."""
    lock: str = field(repr=False)
    """Name of what is locked to hold the device: unique among all devices of the host."""
    line: str = field(repr=False)
    """Name of the line in which requests for it wait."""

    @property
    def is_gpu(self) -> bool:
        return self.kind != "cpu"


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for: `take` of the `candidates`, on which JAX shall see `gpus` devices."""

    gpus: int
    take: int
    candidates: tuple[Device, ...]

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.line for device in self.candidates))


def request(gpus: int) -> Request:
    """Turn a number of GPUs into a request.

    Raises:
        NoDevices: If the host offers this process no such devices.
        ValueError: If more GPUs are asked for than there are, or a setting is not valid.
    """
    if gpus == 0:
        return Request(0, 1, _cpu_slots(_settings.devices()))
    candidates = _usable()
    if not candidates[0].is_gpu:
        # A laptop has fewer CPU slots than a server has GPUs: code that shards over more still runs, on all of them.
        return Request(gpus, min(gpus, len(candidates)), candidates)
    if gpus > len(candidates):
        text = (
            f"gpus={gpus} asks for more than there are: this process may use {len(candidates)} "
            f"({', '.join(device.id for device in candidates)}). Lower gpus=, or widen CUDA_VISIBLE_DEVICES or "
            f"{_settings.DEVICES}."
        )
        raise ValueError(text)
    return Request(gpus, gpus, candidates)


def slot_count(*, gpus: int = 1) -> int:
    """Count the slots that this host offers this process: the right `n_jobs`.

    Neither JAX nor CUDA is started. Slots that others hold are counted too: a call that finds all of them held waits.

    Args:
        gpus: Devices per slot, as for `isolated_jax_worker`; 0 counts CPU slots on any host.

    Returns:
        How many such slots there are, at least 1.

    Raises:
        NoDevices: If the host offers this process no such devices.
        TypeError: If `gpus` is not a whole number.
        ValueError: If `gpus` is negative or exceeds the GPUs there are, or a setting is not valid.

    Example:
        >>> from jaxguard import slot_count
        >>> from jaxguard.testing import fake_slots
        >>> with fake_slots(4):
        ...     slot_count(), slot_count(gpus=2)
        (4, 2)
    """
    check_gpus(gpus)
    asked = request(gpus)
    return len(asked.candidates) // asked.take


def check_gpus(gpus: object) -> None:
    """Raise unless `gpus` is a whole number, 0 or more."""
    if not isinstance(gpus, int) or isinstance(gpus, bool):
        text = f"gpus must be a whole number (0 for the CPU only), not {gpus!r}"
        raise TypeError(text)
    if gpus < 0:
        text = f"gpus must be 0 (the CPU only) or more, not {gpus}"
        raise ValueError(text)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def cores_of(devices: tuple[Device, ...], gpus: int) -> list[int]:
    """The share of the cores that goes with some devices: all slots together use each core about once."""
    mine = cores()
    slots = len(_cpu_slots(_settings.devices()) if gpus == 0 else _usable())
    chosen = sorted({core for device in devices for core in mine[device.index % slots :: slots]})
    return chosen or [mine[devices[0].index % len(mine)]]


def variables(devices: tuple[Device, ...], gpus: int) -> dict[str, str]:
    """The environment in which a process sees these devices and no others."""
    if devices[0].is_gpu:
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(_as_cuda_reads(devices)),
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "JAX_PLATFORMS": "cuda,cpu",
        }
    # The platform too: an empty list alone makes JAX look for a GPU, and some programs crash on it.
    return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(max(1, gpus))}


def _as_cuda_reads(devices: tuple[Device, ...]) -> list[str]:
    """CUDA takes UUIDs and indices; it would read a PCI address as the number in front of its colon."""
    ids = [device.id for device in devices]
    if all(name.startswith(("GPU-", "MIG-")) for name in ids):
        return ids
    everywhere = [gpu.id for gpu in _gpus()]
    return [str(everywhere.index(name)) for name in ids]


def thread_variables() -> dict[str, str]:
    """Threads for the numerical libraries: one slot's share of the cores."""
    share = max(1, len(cores()) // len(_usable_or_cpu()))
    return dict.fromkeys(THREADS, str(share))


def _usable_or_cpu() -> tuple[Device, ...]:
    try:
        return _usable()
    except errors.NoDevices:
        return _cpu_slots(_settings.devices())


def _usable() -> tuple[Device, ...]:
    setting = _settings.devices()
    if setting.cpus:
        return _cpu_slots(setting)
    found = _gpus()
    mask = OUTSIDE.get("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES"))
    if setting.listed:
        found = found if mask is None else _masked(found, mask)  # a list counts within what the job was given
        wanted = _masked(found, ",".join(setting.listed))
        if len(wanted) < len(setting.listed):
            missing = setting.listed[len(wanted)]
            text = (
                f"{_settings.DEVICES} names {missing!r}, which is not there: this process may use {len(found)} GPUs "
                f"({', '.join(gpu.id for gpu in found) or 'none'}). Name devices that `nvidia-smi -L` shows."
            )
            raise errors.NoDevices(text)
        return _numbered(wanted)
    if not found:
        if plugin := _cuda_plugin():
            text = (
                f"JAX's GPU plugin {plugin} is installed, but the NVIDIA driver lists no GPU in {DRIVER}: no driver is "
                f"loaded, or this container was started without GPUs. Mend that, or set {_settings.DEVICES}=cpu:N or "
                "gpus=0 to run on the CPU."
            )
            raise errors.NoDevices(text)
        return _cpu_slots(setting)
    usable = found if mask is None else _masked(found, mask)
    if not usable:
        text = (
            f"CUDA_VISIBLE_DEVICES={mask!r} leaves none of the {len(found)} GPUs of this host "
            f"({', '.join(gpu.id for gpu in found)}). Name one of them, unset the variable, or use gpus=0 to run on "
            "the CPU."
        )
        raise errors.NoDevices(text)
    return _numbered(usable)


def _cpu_slots(setting: _settings.Devices) -> tuple[Device, ...]:
    count = setting.cpus or max(1, len(os.sched_getaffinity(0)) // _CORES_PER_SLOT)
    line = f"cpu/{os.getuid()}/{setting.namespace}"
    return tuple(Device(f"cpu:{i}", i, "cpu", None, f"{line}/{i}", line) for i in range(count))


def _gpus() -> list[Device]:
    """All GPUs of the host, in the order of their PCI addresses."""
    found = []
    try:
        folders = sorted(DRIVER.iterdir())
    except OSError:
        return []
    for index, folder in enumerate(folders):
        try:
            text = (folder / "information").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        facts = dict(re.findall(r"^(.+?):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        uuid = facts.get("GPU UUID", "")
        name = uuid if re.fullmatch(r"GPU-[0-9a-f-]+", uuid) else folder.name
        found.append(Device(name, index, facts.get("Model", "NVIDIA GPU"), None, name, name))
    return found


def _masked(found: list[Device], mask: str) -> list[Device]:
    """Narrow by CUDA's rules: in the mask's order, and the first entry that names no GPU ends the list.

    Source: CUDA C++ Programming Guide, environment variables.
    """
    chosen: list[Device] = []
    for raw in mask.split(","):
        entry = raw.strip()
        if entry.isdecimal():
            named = found[int(entry) : int(entry) + 1]
        else:
            named = [gpu for gpu in found if entry and gpu.id.startswith(entry)]
        if len(named) != 1 or named[0] in chosen:
            break
        chosen += named
    return chosen


def _numbered(gpus: list[Device]) -> tuple[Device, ...]:
    return tuple(Device(g.id, i, g.kind, g.memory_bytes, g.lock, g.line) for i, g in enumerate(gpus))


@functools.cache
def _cuda_plugin() -> str | None:
    names = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)
