"""Records: what a holder or waiter says of itself to its own user, beside what `ps` shows to all.

A record is a memory file of the process, found by its name among that process's descriptors: the kernel lets the same
user read it there, and root. It goes with the process; nothing lies in a directory. Source: proc(5), /proc/pid/fd.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any

from . import _descriptors

_SIZE = 8192
_TEXT = 200
"""How much is told of a name, which its user may have made very long."""


class Record:
    """The record of one hold or one wait; whoever makes it closes it."""

    def __init__(self, word: str, facts: dict[str, Any]) -> None:
        with _descriptors.creating():
            self._file = os.memfd_create(_name(word), os.MFD_CLOEXEC)
            _descriptors.own(self._file)
        self._facts: dict[str, Any] = {}
        try:
            self.tell(**facts)
        except BaseException:
            self.close()
            raise

    def tell(self, **facts: Any) -> None:
        """Add to what the record says, or change it."""
        self._facts.update({name: _cut(value) for name, value in facts.items()})
        data = json.dumps(self._facts).encode().ljust(_SIZE)
        with _descriptors.creating():  # not while it is closed: its number may be a stranger's file a moment later
            if self._file >= 0:
                os.pwrite(self._file, data, 0)

    def close(self) -> None:
        """Withdraw the record."""
        with _descriptors.creating():
            file, self._file = self._file, -1
            _descriptors.close(file)


def read(pid: int, word: str) -> dict[str, Any]:
    """What a process says of a hold; nothing if it is another user's, or gone."""
    folder, target = f"/proc/{pid}/fd", f"/memfd:{_name(word)} (deleted)"
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    for name in names:
        try:
            if os.readlink(f"{folder}/{name}") == target:
                facts = json.loads(_read(f"{folder}/{name}", target))
                return {key: _cut(value) for key, value in facts.items()} if isinstance(facts, dict) else {}
        except (OSError, ValueError, RecursionError):  # closed meanwhile, as is the one that listed them; or no record
            continue
    return {}


def _read(path: str, target: str) -> bytes:
    """Read a record, and nothing else that its owner may have put in its place since: it must not make us wait."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{file}") != target or not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        return os.pread(file, _SIZE, 0)
    finally:
        os.close(file)


def _cut(value: Any) -> Any:
    return value[:_TEXT] if isinstance(value, str) else value


def _name(word: str) -> str:
    return f"jaxguard-{word}"
