"""Which devices this host offers this process, without starting JAX or CUDA.

GPUs are those of `_gpus`, narrowed by what the caller was given; CPU slots are shares of the cores that this process
may use, each user's own.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from . import _driver, _gpus, _in_force, _settings, _shares, errors
from ._gpus import Device

_CORES_PER_SLOT = 2
_MOST, _LONGEST = 10**9, 200
"""Of indices and ids in `devices=`."""

Listed = tuple[int | str, ...]
"""What `devices=` names, and JAXGUARD_DEVICES: positions among the usable devices, or ids."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a call asks for: `units` of each of `take` of the `candidates`, for JAX to see `gpus` devices."""

    gpus: float
    take: int
    candidates: tuple[Device, ...]
    units: int = _shares.UNITS

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.line for device in self.candidates))


def request(gpus: float, listed: Listed | None = None) -> Request:
    """Turn `gpus=` and `devices=` into a request.

    Raises:
        NoDevices: If the host offers this process no such devices.
        ValueError: If more GPUs are asked for than there are, or a setting is not valid.
    """
    _settings.directory()  # what is not valid is said at once, whether this call needs it or not
    _settings.allow_foreign()
    if gpus == 0:
        return Request(0, 1, _chosen(cpu_slots(), listed, "devices="))
    candidates = _chosen(usable(), listed, "devices=")
    if not candidates[0].is_gpu:
        # A laptop has fewer CPU slots than a server has GPUs: code that shards over more still runs, on all of them.
        return Request(gpus, min(max(1, int(gpus)), len(candidates)), candidates, _shares.units(gpus))
    _refuse_without_plugin(candidates)
    if gpus > 1 and any(device.is_slice for device in candidates):
        candidates = _without_slices(gpus, candidates)
    if gpus > len(candidates):
        text = (
            f"gpus={gpus} asks for more than there are: this process may use {len(candidates)} "
            f"({_names(candidates)}). Lower gpus=, or widen devices=, CUDA_VISIBLE_DEVICES or {_settings.DEVICES}."
        )
        raise ValueError(text)
    if _shares.is_share(gpus):
        candidates = _without_exclusive(gpus, candidates)
    return Request(gpus, max(1, int(gpus)), candidates, _shares.units(gpus))


def slot_count(*, gpus: float = 1, devices: Sequence[int | str] | None = None) -> int:
    """Count the slots that this host offers this process: the right `n_jobs`.

    Neither JAX nor CUDA is started. Slots that others hold are counted too: a call that finds all of them held waits.

    Args:
        gpus: Devices per slot, or the share of one, as for `isolated_jax_worker`; 0 counts CPU slots on any host.
        devices: Which devices to count, as for `isolated_jax_worker`; None for all.

    Returns:
        How many such slots there are, at least 1.

    Raises:
        NoDevices: If the host offers this process no such devices.
        TypeError: If `gpus` is not a number, or `devices` not a sequence of indices and ids.
        ValueError: If `gpus` is negative, neither whole nor a share, or exceeds the GPUs there are; if `devices` names
            one twice; if a setting is not valid.

    Example:
        >>> from jaxguard import slot_count
        >>> from jaxguard.testing import fake_slots
        >>> with fake_slots(4):
        ...     slot_count(), slot_count(gpus=2), slot_count(gpus=0.5), slot_count(devices=[0, 2])
        (4, 2, 8, 2)
    """
    asked = request(_shares.checked(gpus), checked_devices(devices))
    if _shares.is_share(asked.gpus) and asked.candidates[0].is_gpu:
        for device in asked.candidates:
            _shares.memory_fraction(asked.gpus, device.memory_bytes)
    return len(asked.candidates) // asked.take * _shares.per_device(asked.gpus)


def checked_devices(devices: Any) -> Listed | None:
    """Give a valid `devices=` back.

    Raises:
        TypeError: If it is not a sequence of indices and ids.
        ValueError: If it names none, or one twice, or an index is negative.
    """
    if devices is None:
        return None
    entries = tuple(devices) if isinstance(devices, Iterable) and not isinstance(devices, str | bytes) else (None,)
    if not all(isinstance(entry, int | str) and not isinstance(entry, bool) for entry in entries):
        text = f"devices must be a sequence of indices or ids, such as [0, 1] or ['GPU-1f0c'], not {devices!r}"
        raise TypeError(text)
    if not entries or len(set(entries)) < len(entries) or "" in entries:
        text = f"devices must name one device or more, each once, not {devices!r}; None, the default, means all"
        raise ValueError(text)
    if any(not 0 <= entry < _MOST if isinstance(entry, int) else len(entry) > _LONGEST for entry in entries):
        small = [entry for entry in entries if isinstance(entry, str) or abs(entry) < _MOST]
        text = f"devices must be positions from 0 on, or ids; what is valid in itself: {small!r:.80}"
        raise ValueError(text)
    return entries


def usable() -> tuple[Device, ...]:
    """All devices that this process may use: the GPUs of its mask, or CPU slots.

    Raises:
        NoDevices: If there should be GPUs, and are none.
        ValueError: If a setting is not valid.
    """
    setting = _settings.devices()
    if setting.cpus:
        return cpu_slots()
    everywhere = _gpus.everywhere()
    mask = _in_force.outside("CUDA_VISIBLE_DEVICES")
    if not everywhere:
        if setting.listed or _cuda_plugin():
            raise errors.NoDevices(_why_no_gpu(setting))
        return cpu_slots()
    found = everywhere
    if mask is not None:
        if _gpus.is_ambiguous(everywhere, mask, _in_force.outside("CUDA_DEVICE_ORDER")):
            raise ValueError(_why_ambiguous(everywhere, mask))
        found = _gpus.masked(everywhere, mask)
        if not found:
            raise errors.NoDevices(_why_masked(everywhere, mask))
    found = [replace(device, index=index) for index, device in enumerate(found)]
    if setting.listed:
        chosen = _chosen(tuple(found), setting.listed, f"{_settings.DEVICES}=")
        found = [replace(device, index=index) for index, device in enumerate(chosen)]
    allowed = tuple(device for device in found if device.mode != "prohibited")
    if not allowed:
        text = (
            f"the compute mode of {_names(found)} is PROHIBITED: no process may use it. An administrator changes that "
            "with `nvidia-smi -c DEFAULT`."
        )
        raise errors.NoDevices(text)
    return allowed


def usable_or_cpu() -> tuple[Device, ...]:
    """The devices that this process may use, or the CPU slots where it should have GPUs and has none."""
    try:
        return usable()
    except errors.NoDevices:
        return cpu_slots()


def cpu_slots() -> tuple[Device, ...]:
    """The CPU slots of this user, or of the namespace that the setting names."""
    setting = _settings.devices()
    count = setting.cpus or max(1, len(os.sched_getaffinity(0)) // _CORES_PER_SLOT)
    line = f"cpu/{os.getuid()}/{setting.namespace}"
    return tuple(Device(f"cpu:{i}", i, "cpu", None, f"{line}/{i}", line) for i in range(count))


# ---------------------------------------------------------------- which of them


def _chosen(found: tuple[Device, ...], listed: Listed | None, who: str) -> tuple[Device, ...]:
    """Those that a list names, always counted within what this process may use."""
    if listed is None:
        return found
    chosen: list[Device] = []
    for entry in listed:
        numbered = isinstance(entry, int) or re.fullmatch(r"[0-9]{1,9}", entry)
        named = [d for d in found if d.index == int(entry)] if numbered else _gpus.by_id(found, str(entry))
        if len(named) != 1 or named[0] in chosen:
            why = "names a device twice" if len(named) == 1 else f"fits {len(named)}" if named else "is not there"
            text = (
                f"{who} names {entry!r}, which {why}: this process may use {len(found)} ({_names(found)}). Name them "
                "by position in that list, or by id, or by a beginning of an id that no other has."
            )
            raise errors.NoDevices(text)
        chosen += named
    return tuple(chosen)


# ---------------------------------------------------------------- why not


def _names(devices: Iterable[Device]) -> str:
    names = [device.id for device in devices]
    return ", ".join(names[:16]) + (f" and {len(names) - 16} more" if len(names) > 16 else "") or "none"


def _why_ambiguous(everywhere: list[Device], mask: str) -> str:
    return (
        f"CUDA_VISIBLE_DEVICES={mask!r} is not clear: this host has different cards "
        f"({', '.join(dict.fromkeys(device.kind for device in everywhere))}), and CUDA counts them by speed. Set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID, so that the numbers are those of nvidia-smi, or name them by UUID "
        f"({_names(everywhere)})."
    )


def _why_no_gpu(setting: _settings.Devices) -> str:
    who = (
        f"{_settings.DEVICES} names {', '.join(setting.listed)}"
        if setting.listed
        else f"JAX's GPU plugin {_cuda_plugin()} is installed"
    )
    return (
        f"{who}, but the NVIDIA driver lists no GPU in {_driver.GPUS} that this process may use: no driver is loaded, "
        "this container was started without GPUs, or this job was given none. Mend that, or set "
        f"{_settings.DEVICES}=cpu:N or gpus=0 to run on the CPU."
    )


def _why_masked(everywhere: list[Device], mask: str) -> str:
    advice = "Name one of them, unset the variable, or use gpus=0 to run on the CPU."
    if not mask.strip() and ("ray" in sys.modules or "RAY_JOB_ID" in os.environ):
        advice = "Ray hides the GPUs from a task that asked for none: @ray.remote(num_gpus=1), or gpus=0 for the CPU."
    elif mask.strip().startswith("MIG-"):
        advice = (
            "To name a MIG slice, have its card in MIG mode and nvidia-ml-py installed (pip install 'jaxguard[cuda]'), "
            "without which jaxguard sees no slices."
        )
    return (
        f"CUDA_VISIBLE_DEVICES={mask!r} leaves none of the {len(everywhere)} GPUs of this host "
        f"({_names(everywhere)}). {advice}"
    )


def _without_slices(gpus: float, candidates: tuple[Device, ...]) -> tuple[Device, ...]:
    whole = tuple(device for device in candidates if not device.is_slice)
    if gpus > len(whole):
        text = (
            f"gpus={gpus} cannot be had: CUDA shows a process one MIG slice at most, and beside "
            f"{len(candidates) - len(whole)} slices this process may use {len(whole)} whole GPUs ({_names(whole)}). "
            "Use gpus=1: one slice for each call."
        )
        raise ValueError(text)
    return whole


def _without_exclusive(gpus: float, candidates: tuple[Device, ...]) -> tuple[Device, ...]:
    shared = tuple(device for device in candidates if device.mode != "exclusive")
    if not shared:
        text = (
            f"gpus={gpus:g} cannot be had: the compute mode of {_names(candidates)} is EXCLUSIVE_PROCESS, which lets "
            "one process at a time on a card. Use gpus=1; an administrator changes the mode with `nvidia-smi -c "
            "DEFAULT`."
        )
        raise errors.NoDevices(text)
    return shared


def _refuse_without_plugin(candidates: tuple[Device, ...]) -> None:
    if not _cuda_plugin() and not _other_plugin():
        text = (
            f"this host has {len(candidates)} GPUs ({_names(candidates)}), but JAX here has no GPU plugin, and would "
            "run on the CPU. Install it: pip install 'jaxguard[cuda]', or 'jax[cuda12]' for an older driver. Or set "
            f"{_settings.DEVICES}=cpu:N or gpus=0 to run on the CPU on purpose."
        )
        raise errors.NoDevices(text)


@functools.cache
def _cuda_plugin() -> str | None:
    names = ("jax_cuda13_plugin", "jax_cuda12_plugin")
    return next((name for name in names if importlib.util.find_spec(name) is not None), None)


@functools.cache
def _other_plugin() -> bool:
    """Something else that registers with JAX, such as one's own build."""
    return bool(importlib.metadata.entry_points(group="jax_plugins"))


def versions_that_do_not_fit() -> str:
    """Say so, in words to append, if the plugin and jaxlib are not of one version: JAX then passes the plugin over."""
    plugin = _cuda_plugin()
    try:
        jaxlib, version = importlib.metadata.version("jaxlib"), importlib.metadata.version(plugin or "")
    except (ValueError, importlib.metadata.PackageNotFoundError):
        return ""
    if version == jaxlib:
        return ""
    return f" Here {plugin} is of version {version} and jaxlib of {jaxlib}: install the same of both."
