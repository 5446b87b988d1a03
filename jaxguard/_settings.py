"""Settings: environment variables, read here and nowhere else, at each call, so that a change is seen at once."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

DEVICES = "JAXGUARD_DEVICES"
DIR = "JAXGUARD_DIR"
CACHE_DIR = "JAXGUARD_CACHE_DIR"
ALLOW_FOREIGN = "JAXGUARD_ALLOW_FOREIGN"
INLINE = "JAXGUARD_INLINE"
HOLD = "JAXGUARD_HOLD"
"""Not a setting: names the hold under which a process was started, see `_holds`."""
RUN = "JAXGUARD_RUN"
"""Not a setting: names the program whose worker, or worker's child, a process is, see `_starting`."""

_LONGEST_PATH = 1024
_CPU = re.compile(r"cpu:([1-9][0-9]{0,5})(?:@([\w.-]{1,64}))?")


@dataclass(frozen=True, slots=True)
class Devices:
    """Which devices to use: found by looking (`auto`), `cpu` slots in a namespace, or a list of CUDA devices."""

    auto: bool = False
    cpus: int = 0
    namespace: str = ""
    listed: tuple[str, ...] = ()


def devices() -> Devices:
    """Read JAXGUARD_DEVICES.

    Raises:
        ValueError: If the value is none of those that are valid.
    """
    text = os.environ.get(DEVICES, "").strip()
    if text in {"", "auto"}:
        return Devices(auto=True)
    if match := _CPU.fullmatch(text):
        return Devices(cpus=int(match[1]), namespace=match[2] or "")
    names = tuple(name.strip() for name in text.split(","))
    if all(re.fullmatch(r"[0-9]{1,9}|(GPU|MIG)-[A-Za-z0-9_/-]+", name) for name in names) and len(set(names)) == len(
        names
    ):
        return Devices(listed=names)
    message = (
        f"{DEVICES}={text!r} is not valid. Valid are: auto; cpu:N for N CPU slots (cpu:4); "
        "a list of different positions or ids of GPUs (0,2 or GPU-1f0c,GPU-83ab)."
    )
    raise ValueError(message)


def directory() -> str | None:
    """Read JAXGUARD_DIR: where the lock file is, if not on /dev/null.

    Raises:
        ValueError: If the value is not an absolute path.
    """
    return _absolute_path(DIR, "owned by root")


def cache_directory() -> str | None:
    """Read JAXGUARD_CACHE_DIR: where compiled programs are kept, if not in the user's cache directory.

    Raises:
        ValueError: If the value is not an absolute path.
    """
    return _absolute_path(CACHE_DIR, "your own")


def inline() -> bool:
    """Read JAXGUARD_INLINE.

    Raises:
        ValueError: If the value is none of those that are valid.
    """
    return _switch(INLINE, "run guarded functions in this process")


def allow_foreign() -> bool:
    """Read JAXGUARD_ALLOW_FOREIGN.

    Raises:
        ValueError: If the value is none of those that are valid.
    """
    return _switch(ALLOW_FOREIGN, "use GPUs on which programs compute that hold no slot")


def _absolute_path(name: str, whose: str) -> str | None:
    text = os.environ.get(name, "")
    if not text:
        return None
    if not os.path.isabs(text) or len(text) > _LONGEST_PATH:
        message = f"{name}={text!r} is not valid. Valid is: the absolute path of a directory, {whose}, on this host."
        raise ValueError(message)
    return "/" + text.lstrip("/")


def _switch(name: str, what: str) -> bool:
    text = os.environ.get(name, "").strip()
    if text in {"", "0"}:
        return False
    if text == "1":
        return True
    message = f"{name}={text!r} is not valid. Valid are: 1 ({what}), 0 or empty."
    raise ValueError(message)
