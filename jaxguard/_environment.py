"""What a process needs to use its devices and no others: variables, cores, its part of the memory."""

from __future__ import annotations

import os
from typing import Any

from . import _devices, _driver, _shares
from ._gpus import Device

FROM_THE_LEASE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")
"""Variables that say which devices JAX starts on."""
MEMORY = "XLA_CLIENT_MEM_FRACTION"
"""The part of a card's memory for JAX's pool, by the name that all jaxlibs from 0.6 on read."""
_MEMORY_OF_OLD = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""Its older name: jaxlib refuses to start when both are set."""
READ_LATER = ("PJRT_NPROC", MEMORY, _MEMORY_OF_OLD)
"""Variables that JAX reads only when it starts."""
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that the numerical libraries read when they are imported: threads to start."""


def variables(devices: tuple[Device, ...], gpus: float) -> dict[str, str]:
    """The environment in which a process sees these devices and no others."""
    if not devices[0].is_gpu:
        # The platform too: an empty list alone makes JAX look for a GPU, and some programs crash on it.
        return {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(max(1, int(gpus)))}
    return {
        "CUDA_VISIBLE_DEVICES": ",".join(_as_cuda_reads(device) for device in devices),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "JAX_PLATFORMS": "cuda,cpu",
    }


def check_memory(env: dict[str, str]) -> bool:
    """Say whether a user sets the part of the memory.

    Raises:
        ValueError: If the value is not valid, or both names are used.
    """
    own = {name: env[name] for name in (MEMORY, _MEMORY_OF_OLD) if env.get(name)}
    if len(own) == 2:
        text = f"{MEMORY} and {_MEMORY_OF_OLD} are both set, and JAX refuses that. Unset the second one, the old name."
        raise ValueError(text)
    for name, value in own.items():
        if not _is_fraction(value):
            text = (
                f"{name}={value!r} is not valid. Valid is a part of the device's memory: more than 0, and at most 1. "
                "Unset it, and jaxguard sets it for shares."
            )
            raise ValueError(text)
    return bool(own)


def memory_variables(devices: tuple[Device, ...], gpus: float, env: dict[str, str]) -> dict[str, str]:
    """The part of the memory that a share has; nothing if `env`, the user's own, says it, or the device is whole.

    Raises:
        ValueError: If the user's own value is not valid, or nothing would be left.
    """
    if check_memory(env) or not devices[0].is_gpu or not _shares.is_share(gpus):
        return {}
    return {MEMORY: str(_shares.memory_fraction(gpus, devices[0].memory_bytes))}


def _is_fraction(value: str) -> bool:
    try:
        return 0 < float(value) <= 1
    except ValueError:
        return False


def _as_cuda_reads(device: Device) -> str:
    """CUDA takes UUIDs and numbers; it would read a PCI address as the number in front of its colon."""
    return device.id if device.id.startswith(("GPU-", "MIG-")) else str(device.card)


# ---------------------------------------------------------------- cores


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def cores_of(devices: tuple[Device, ...], gpus: float, cpus: int | None = None, offset: int = 0) -> list[int]:
    """The share of the cores that goes with some devices: all slots together use each core about once.

    Args:
        devices: What is held.
        gpus: How much of it, as a guard was told.
        cpus: How many cores, instead of the share.
        offset: At which unit of the device a share begins: its sharers divide the device's cores.

    Raises:
        ValueError: If this process may not use so many.
    """
    mine = cores()
    everything = _devices.cpu_slots() if gpus == 0 else _devices.usable_or_cpu()
    chosen = sorted({core for device in devices for core in _near(device, everything, mine)})
    if _shares.is_share(gpus):
        first = offset * len(chosen) // _shares.UNITS
        chosen = chosen[first : max(first + 1, (offset + _shares.units(gpus)) * len(chosen) // _shares.UNITS)]
    if cpus is None:
        return chosen
    check_cpus(cpus, mine)
    others = [core for core in _from(mine, chosen[0]) if core not in chosen]
    return sorted([*chosen, *others][:cpus])


def check_cpus(cpus: int, mine: list[int]) -> None:
    """Raise unless this process may use so many cores."""
    if cpus > len(mine):
        text = (
            f"cpus={cpus} asks for more cores than there are: this process may use {len(mine)} "
            "(its affinity, see `taskset -p`). Lower cpus=, or let the job have more."
        )
        raise ValueError(text)


def checked_cpus(cpus: Any) -> int | None:
    """Give a valid `cpus=` back.

    Raises:
        TypeError: If it is not a whole number.
        ValueError: If it is less than 1.
    """
    if cpus is None:
        return None
    if isinstance(cpus, bool) or not isinstance(cpus, int):
        text = f"cpus must be a whole number of cores (None, the default, for a fair share), not {cpus!r}"
        raise TypeError(text)
    if cpus < 1:
        text = f"cpus must be 1 core or more, not {cpus}; None, the default, gives a fair share"
        raise ValueError(text)
    return cpus


def thread_variables(cpus: int | None = None) -> dict[str, str]:
    """Threads for the numerical libraries: as many as cores, by default one slot's share of them."""
    share = cpus or max(1, len(cores()) // len(_devices.usable_or_cpu()))
    return dict.fromkeys(THREADS, str(share))


def _near(device: Device, everything: tuple[Device, ...], mine: list[int]) -> list[int]:
    """A device's part of the cores near it, which it divides with the other devices that are near the same ones."""
    near = {other.id: tuple(_driver.near(other.address, mine)) for other in (*everything, device) if other.address}
    local = near.get(device.id, tuple(mine))
    sharers = [other.id for other in everything if near.get(other.id, tuple(mine)) == local]
    place = sharers.index(device.id) if device.id in sharers else device.index
    part = list(local[place % len(sharers) :: len(sharers)]) if sharers else list(local)
    return part or [local[place % len(local)]]


def _from(mine: list[int], core: int) -> list[int]:
    start = mine.index(core)
    return mine[start:] + mine[:start]
