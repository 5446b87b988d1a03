"""Records: what a holder or waiter says of itself to its own user, beside what `ps` shows to all.

A record is a memory file of the process, found by its name among that process's descriptors: the kernel lets the same
user read it there, and root. It goes with the process; nothing lies in a directory. Source: proc(5), /proc/pid/fd.
"""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Any

from . import _descriptors, _linux

_NAME = "jaxguard-{}"
_TARGET = re.compile(r"/memfd:jaxguard-([a-z0-9-]+) \(deleted\)")
_SIZE = 8192
_TRIES = 3
_TEXT = 200
"""How much is told of a name, which its user may have made very long."""


class Record:
    """The record of one hold, one wait or one worker; whoever makes it closes it."""

    def __init__(self, word: str, facts: dict[str, Any], file: int | None = None) -> None:
        """Make a record under a word, or go on in the memory file of one that another process has made."""
        self._file = new_file(word) if file is None else file
        self._identity = _linux.identity(self._file)
        self._facts: dict[str, Any] = {}
        try:
            self.tell(**facts)
        except BaseException:  # a user's time limit
            self.close()
            raise

    def tell(self, **facts: Any) -> None:
        """Add to what the record says, or change it."""
        with _descriptors.creating():  # not while it is closed: its number may be a stranger's file a moment later
            self._facts.update({name: cut(value) for name, value in facts.items()})
            try:
                if self._is_open():
                    os.pwrite(self._file, json.dumps(self._facts).encode().ljust(_SIZE), 0)
            except OSError as error:  # a limit on files, or no memory: nobody's work shall fail for want of words
                if _linux.is_a_users(error):
                    raise

    def close(self) -> None:
        """Withdraw the record; once more, if that was interrupted."""
        with _descriptors.creating():
            if self._is_open():
                _descriptors.close(self._file)
            self._file = -1

    def _is_open(self) -> bool:
        """Say whether the file is still this record's: a user may close all files, and open others."""
        try:
            return self._file >= 0 and _linux.identity(self._file) == self._identity
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            return False


def new_file(word: str) -> int:
    """Make the memory file of a record, to be given to the process that will fill it."""
    with _descriptors.creating():
        file = os.memfd_create(_NAME.format(word), os.MFD_CLOEXEC)
        _descriptors.own(file)
    return file


def read(pid: int, word: str) -> dict[str, Any]:
    """What a process says under a word; nothing if it is another user's, or gone."""
    return next(_found(pid, lambda other: other == word), ("", {}))[1]


def read_all(pid: int) -> dict[str, dict[str, Any]]:
    """All that a process says, by the words."""
    return dict(_found(pid, lambda _: True))


def read_file(file: int) -> dict[str, Any]:
    """What a record says whose file is open here."""
    return _whole(lambda: os.pread(file, _SIZE, 0))


def _found(pid: int, wanted: Callable[[str], bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"{folder}/{name}")
            match = _TARGET.fullmatch(target)
            if match and wanted(match[1]):
                yield match[1], _whole(functools.partial(_read, f"{folder}/{name}", target))
        except OSError:  # closed meanwhile, as is the one that listed them
            continue


def _whole(read: Callable[[], bytes]) -> dict[str, Any]:
    """Read once more what is being written at this moment."""
    return next((facts for _ in range(_TRIES) if (facts := _facts(read()))), {})


def _facts(data: bytes) -> dict[str, Any]:
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):  # no record, or one that is just being written
        return {}
    return {key: cut(value) for key, value in facts.items()} if isinstance(facts, dict) else {}


def _read(path: str, target: str) -> bytes:
    """Read a record, and nothing else that its owner may have put in its place since: it must not make us wait."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if os.readlink(f"/proc/self/fd/{file}") != target or not stat.S_ISREG(os.fstat(file).st_mode):
            return b""
        return os.pread(file, _SIZE, 0)
    finally:
        os.close(file)


def cut(value: Any) -> Any:
    """What a record tells of a value: a long text is cut."""
    return value[:_TEXT] if isinstance(value, str) else value
