"""`jaxguard cache`: the store of compiled programs, looked at, checked and pruned."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from dataclasses import dataclass
from typing import Any

from . import _entries, _store

_VERSION = 1
_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_TIMES = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_JUST_NOW_S = 60.0
"""A file of a plain cache directory that was changed so recently may be in the middle of being written."""


def show(options: argparse.Namespace) -> int:
    """Say where the store is and what is in it."""
    view = look(_store.root())
    print(json.dumps(view, indent=2) if options.json else as_text(view))  # noqa: T201 – this is what was asked for
    return 0


def verify(options: argparse.Namespace) -> int:
    """Find entries that are torn, and remove them."""
    result = verified(options.path or _store.root(), plain=options.path is not None)
    if options.json:
        print(json.dumps(vars(result) | {"version": _VERSION}, indent=2))  # noqa: T201 – as above
    else:
        print(result.in_words())  # noqa: T201 – as above
    return 0


def prune(options: argparse.Namespace) -> int:
    """Remove programs by age, by size, or both."""
    if options.older_than is None and options.max_size is None:
        options.refuse("say what shall go: --older-than AGE, --max-size SIZE, or both")
    oldest = None if options.older_than is None else time.time() - options.older_than
    most = float("inf") if options.max_size is None else options.max_size
    gone = _store.prune(_stores(_store.root()), lambda entry: oldest is not None and entry.used < oldest, most)
    view: dict[str, Any] = {
        "version": _VERSION,
        "path": _store.root(),
        "removed": [os.path.basename(entry.path) for entry in gone],
        "bytes": sum(entry.bytes for entry in gone),
    }
    words = f"removed {_count(len(gone))} ({size(view['bytes'])})" if gone else "nothing to remove"
    print(json.dumps(view, indent=2) if options.json else words)  # noqa: T201 – as above
    return 0


def look(root: str) -> dict[str, Any]:
    """What there is, as plain data."""
    kinds = []
    for store in _stores(root):
        entries = list(store.entries())
        kinds.append(
            {
                "kind": os.path.basename(store.path),
                "programs": len(entries),
                "bytes": sum(entry.bytes for entry in entries),
                "last_used": max((entry.used for entry in entries), default=None),
            }
        )
    return {"version": _VERSION, "path": root, "kinds": kinds, "limit_bytes": _store.MOST_BYTES}


def as_text(view: dict[str, Any]) -> str:
    """The same for people."""
    if not any(kind["programs"] for kind in view["kinds"]):
        return f"{view['path']}: no program yet"
    rows = [("PROGRAMS", "SIZE", "LAST USED", "FOR")]
    for kind in view["kinds"]:
        if not kind["programs"]:
            continue
        used = (
            "never" if kind["last_used"] is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(kind["last_used"]))
        )
        rows.append((str(kind["programs"]), size(kind["bytes"]), used, kind["kind"]))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[i].rjust(widths[i]) for i in range(3)), row[3]]) for row in rows]
    return "\n".join(
        [f"{view['path']} (at most {size(view['limit_bytes'])}; those not used for longest go first)", *lines]
    )


@dataclass
class Verified:
    """What `verify` found."""

    path: str
    checked: int
    removed: list[str]
    too_young: int

    def in_words(self) -> str:
        """As people read it."""
        torn = f"{len(self.removed)} torn and removed:" if self.removed else "all whole"
        young = f"{self.too_young} not judged, written in the last minute; " if self.too_young else ""
        checked = f"{_count(self.checked)} checked, {torn}" if self.checked else "no program to check here"
        return "\n".join([f"{self.path}: {young}{checked}", *self.removed])


def verified(path: str, *, plain: bool) -> Verified:
    """Check each entry; of a plain directory of JAX's cache too.

    Raises:
        ValueError: If there is no such directory.
    """
    if plain and not os.path.isdir(path):
        message = f"{path!r} is no directory. Give that of a JAX compilation cache, or nothing for jaxguard's own."
        raise ValueError(message)
    found = Verified(path, 0, [], 0)
    for store in _stores(path):
        for entry in store.entries():
            found.checked += 1
            if not store.is_sound(entry):
                store.discard(entry.key)
                found.removed.append(os.path.basename(entry.path))
    if plain:
        for name in sorted(os.listdir(path)):
            if _entries.key_of(name) and os.path.isfile(os.path.join(path, name)):
                _verify_plain(path, name, found)
    return found


def _verify_plain(folder: str, name: str, found: Verified) -> None:
    path = os.path.join(folder, name)
    try:
        young = 0 <= time.time() - os.stat(path).st_mtime < _JUST_NOW_S
        with open(path, "rb") as file:
            whole = _entries.is_whole(file)
    except FileNotFoundError:
        return
    if young and not whole:
        found.too_young += 1
        return
    found.checked += 1
    if not whole:
        os.unlink(path)
        found.removed.append(name)


def _stores(root: str) -> list[_store.Store]:
    return [_store.Store(root, kind, make=False) for kind in _store.kinds(root)]


# ---------------------------------------------------------------- words


def size(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def as_bytes(text: str) -> int:
    """Read a size, as 500MB or 10G."""
    match = re.fullmatch(r"([0-9.]+)\s*([kmgt])b?", text.strip().lower())
    try:
        return int(float(match[1]) * _SIZES[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, OverflowError):
        message = f"{text!r} is not a size; sizes are such as 500MB and 10GB (kB, MB, GB, TB)"
        raise argparse.ArgumentTypeError(message) from None


def as_seconds(text: str) -> float:
    """Read an age, as 12h or 30d."""
    match = re.fullmatch(r"([0-9.]+)\s*([hdw])", text.strip().lower())
    try:
        return float(match[1]) * _TIMES[match[2]]  # type: ignore[index]
    except (TypeError, ValueError):
        message = f"{text!r} is not an age; ages are such as 12h, 30d and 4w (hours, days, weeks)"
        raise argparse.ArgumentTypeError(message) from None


def _count(number: int) -> str:
    return f"{number} program{'' if number == 1 else 's'}"
