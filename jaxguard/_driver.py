"""The GPUs of this host, and how CUDA counts them: by NVML where it is, by /proc where not."""

from __future__ import annotations

import functools
import os
import re
import time
from pathlib import Path

from . import _nvml
from ._nvml import Card

GPUS = Path("/proc/driver/nvidia/gpus")
"""Where the NVIDIA driver lists its GPUs."""
NODES = Path("/dev")
"""Where the device nodes are."""
BUS = Path("/sys/bus/pci/devices")
"""Where the system tells which cores are near a card."""
_FRESH_S = 1.0
"""For how long an answer is good: hosts do not change in the meantime, and a call asks several times."""

_last: tuple[float, Path, tuple[Card, ...]] | None = None


def cards() -> tuple[Card, ...]:
    """All GPUs that this process may open, in the order of their PCI addresses."""
    global _last  # noqa: PLW0603 – two threads that race ask twice
    now = time.monotonic()
    if _last is not None and now - _last[0] < _FRESH_S and _last[1] == GPUS:
        return _last[2]
    told = _nvml.cards()
    found = tuple(sorted(_listed() if told is None else told, key=lambda card: card.address))
    _last = now, GPUS, found
    return found


def look_again() -> None:
    """Forget the last answer."""
    global _last  # noqa: PLW0603
    _last = None


def near(address: str, cores: list[int]) -> list[int]:
    """Those of the cores that are near a card; all of them where the system does not tell."""
    near = _near(BUS / address / "local_cpulist")
    return [core for core in cores if core in near] or cores


@functools.cache
def _near(file: Path) -> frozenset[int]:
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeError):
        return frozenset()
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(core for first, last in ranges for core in range(int(first), int(last or first) + 1))


def _listed() -> list[Card]:
    """What /proc tells."""
    found = []
    try:
        folders = sorted(GPUS.iterdir())
    except OSError:
        return []
    for folder in folders:
        try:
            text = (folder / "information").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        facts = dict(re.findall(r"^(.+?):[ \t]*(.*?)[ \t]*$", text, re.MULTILINE))
        if not _may_open(facts.get("Device Minor", "")):
            continue
        uuid = facts.get("GPU UUID", "")
        if not re.fullmatch(r"GPU-[0-9a-f-]+", uuid):  # question marks, until somebody has used the card
            uuid = ""
        found.append(Card(uuid, _nvml.short_address(folder.name), facts.get("Model", "NVIDIA GPU")))
    return found


def _may_open(minor: str) -> bool:
    """Say whether a card may be this process's: the cgroup of a job forbids to open those of others.

    CUDA leaves such cards out when it counts. A node that is missing says nothing: the driver makes it when needed.
    """
    if not minor.isdecimal():
        return True
    try:
        os.close(os.open(NODES / f"nvidia{minor}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return False
    except OSError:
        pass
    return True
