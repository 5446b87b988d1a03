"""The store of compiled programs: one for each user, on a local disk.

    private/NAME/               where one worker's JAX reads and writes; gone with the worker
    KIND/entries/KEY/           a program: JAX's file, and a seal that says what it is and what its bytes are
    KIND/marks/KEY              a program that JAX does not store
    KIND/flights                one byte for each program: locked while somebody compiles it

JAX writes its cache entries in place, and keeps one that was torn by a kill for ever. Here an entry is written in the
worker's own directory, checked, sealed, and moved into the store by one rename: it is there whole, or not at all. A
reader takes it by a hard link, so removing it takes it from nobody.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from . import _descriptors, _entries, _folders, _linux, _settings

MARKS_LAST_S = 24 * 3600.0
MOST_BYTES = 10_000_000_000
"""How big the store gets before those programs go that were not used for longest."""
_LAYOUT = "v1"
_ALIVE = ".alive"
_TIDY_EVERY_S = 3600.0
_TRIES, _TRY_AGAIN_S = 100, 0.01


def root() -> str:
    """Where the store is: JAXGUARD_CACHE_DIR, or the user's cache directory, or, if that is on a network, /var/tmp."""
    if (given := _settings.cache_directory()) is not None:
        return given
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    path = os.path.join(base, "jaxguard")
    if not os.path.isabs(path) or _linux.is_on_network(path):
        return f"/var/tmp/jaxguard-{os.geteuid()}"  # noqa: S108 – its owner is checked when it is opened
    return path


def private_path(root: str, name: str) -> str:
    """The directory of one worker."""
    return os.path.join(root, _LAYOUT, "private", name)


def remove_private(path: str) -> None:
    """Remove the directory of a worker that has ended; what cannot be removed now is swept by a later worker."""
    shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Entry:
    """A program in the store."""

    key: str
    path: str
    bytes: int
    used: float
    """When it was last used, in seconds since 1970."""


class Store:
    """The programs of one kind: those that one jaxlib made for one sort of hardware."""

    def __init__(self, root: str, kind: str, *, make: bool = True) -> None:
        """Open a store, or make it.

        Raises:
            JaxguardError: If others could change what is in it, or locks cannot be relied on there.
            OSError: If it cannot be made or written.
        """
        _folders.refuse_unsafe(root)
        self.root = os.path.join(root, _LAYOUT)
        self.path = os.path.join(self.root, kind)
        if make:
            for folder in (os.path.join(self.path, "entries"), os.path.join(self.path, "marks"), self._workers):
                _folders.make(folder)
        _folders.refuse_unsafe(root)  # made just now, or by somebody else meanwhile

    @property
    def _workers(self) -> str:
        return os.path.join(self.root, "private")

    # ------------------------------------------------------------ a worker's own directory

    def enter(self, name: str) -> str:
        """Make the directory of a worker, and hold it for as long as this process lives."""
        path = os.path.join(self._workers, name)
        for _ in range(_TRIES):
            _folders.make(path)
            try:
                descriptor = _folders.open_file(os.path.join(path, _ALIVE))
            except FileNotFoundError:  # swept in this moment
                continue
            if _linux.lock_range(descriptor, 0, 1) and _folders.is_at(descriptor, os.path.join(path, _ALIVE)):
                self._sweep()
                return path
            _descriptors.close(descriptor)
            time.sleep(_TRY_AGAIN_S)
        raise OSError(errno.EBUSY, "another process holds the directory of this worker", path)

    def _sweep(self) -> None:
        """Remove the directories of workers that ended without anybody to do it for them."""
        for name in os.listdir(self._workers):
            path = os.path.join(self._workers, name)
            try:
                descriptor = _folders.open_file(os.path.join(path, _ALIVE))
            except OSError as error:  # being removed
                if _linux.is_a_users(error):
                    raise
                continue
            try:
                if _linux.lock_range(descriptor, 0, 1):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                _descriptors.close(descriptor)

    # ------------------------------------------------------------ programs

    def fetch(self, key: str, into: str) -> dict[str, Any] | None:
        """Put a program where JAX looks for it; return its seal, or None if there is none that is whole."""
        folder = self._entry(key)
        if not _linux.is_directory(folder):  # asked first: it may be published in the next moment
            return None
        found = _entries.sealed(folder)
        if found is None:
            self.discard(key)
            return None
        name, seal = found
        try:
            _entries.link(os.path.join(folder, name), os.path.join(into, name))
            os.utime(folder)
        except FileNotFoundError:  # pruned in this moment
            return None
        return seal

    def fetch_all(self, into: str) -> None:
        """The same for all programs, for a JAX that does not tell which one it wants."""
        there = {_entries.key_of(name) for name in os.listdir(into)}
        for key in os.listdir(os.path.join(self.path, "entries")):
            if key not in there:
                self.fetch(key, into)

    def publish(self, key: str, private: str, **facts: Any) -> bool:
        """Move what JAX wrote for a program into the store; say whether there was anything.

        Raises:
            _entries.Torn: If JAX could not write all of it.
            OSError: If the store cannot be written.
        """
        name = next((name for name in os.listdir(private) if name.endswith(f"-{key}{_entries.SUFFIX}")), None)
        if name is None:
            return False
        path = os.path.join(private, name)
        with open(path, "rb") as file:
            whole, digest = _entries.is_whole(file), _entries.digest(file)
        if not whole:
            os.unlink(path)
            raise _entries.Torn(name)
        building = os.path.join(private, f".new-{secrets.token_hex(8)}")
        os.mkdir(building, 0o700)
        try:
            _entries.link(path, os.path.join(building, name))
            seal = {"sha256": digest, "bytes": os.path.getsize(path), **facts}
            with open(os.path.join(building, _entries.SEAL), "w", encoding="utf-8") as file:
                json.dump(seal, file)
            if _linux.is_file(self._entry(key)):  # nothing of ours
                os.unlink(self._entry(key))
            os.rename(building, self._entry(key))
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            shutil.rmtree(building, ignore_errors=True)
            if not _linux.is_directory(self._entry(key)):  # else another was faster, with the same program
                raise
        return True

    def publish_all(self, private: str) -> None:
        """The same for all that JAX wrote, for a JAX that does not tell which program is which."""
        for name in os.listdir(private):
            if (key := _entries.key_of(name)) is not None and not _linux.is_directory(self._entry(key)):
                self.publish(key, private)

    def discard(self, key: str, private: str | None = None) -> None:
        """Take a program out of the store; those who read it go on reading."""
        for name in os.listdir(private) if private else []:
            if name.endswith(f"-{key}{_entries.SUFFIX}"):
                os.unlink(os.path.join(private or "", name))
        grave = os.path.join(self._workers, f".gone-{secrets.token_hex(8)}")
        try:
            os.rename(self._entry(key), grave)
        except OSError as error:  # somebody else has done it
            if _linux.is_a_users(error):
                raise
            return
        shutil.rmtree(grave, ignore_errors=True)

    def entries(self) -> Iterator[Entry]:
        """All programs."""
        folder = os.path.join(self.path, "entries")
        for key in os.listdir(folder):
            path = os.path.join(folder, key)
            try:
                files = [os.stat(os.path.join(path, name)) for name in os.listdir(path)]
                yield Entry(key, path, sum(found.st_size for found in files), os.stat(path).st_mtime)
            except OSError as error:  # removed in this moment
                if _linux.is_a_users(error):
                    raise
                continue

    def is_sound(self, entry: Entry) -> bool:
        """Say whether the bytes of a program are those that were sealed."""
        return _entries.sealed(entry.path) is not None

    def tidy(self) -> None:
        """Keep the store within its bounds; looked at once an hour, by one worker."""
        stamp = os.path.join(self.path, "tidied")
        try:
            if 0 <= time.time() - os.stat(stamp).st_mtime < _TIDY_EVERY_S:
                return
        except FileNotFoundError:
            pass
        import filelock

        try:
            with filelock.FileLock(os.path.join(self.path, "tidy.lock"), timeout=0):
                with open(stamp, "w", encoding="utf-8"):
                    pass
                root = os.path.dirname(self.root)
                prune([Store(root, kind, make=False) for kind in kinds(root)])
                marks = os.path.join(self.path, "marks")
                for key in os.listdir(marks):
                    if not self.is_marked(key):
                        os.unlink(os.path.join(marks, key))
        except filelock.Timeout:  # another does it
            pass
        except OSError as error:  # there is something that is not ours: no harm
            if _linux.is_a_users(error):
                raise

    # ------------------------------------------------------------ who compiles, and what cannot be kept

    def open_flights(self) -> int:
        """Open the file in which flights are taken, for one of them: it lasts until the descriptor is closed."""
        return _folders.open_file(os.path.join(self.path, "flights"))

    @staticmethod
    def take_flight(flights: int, key: str) -> bool:
        """Become the one who compiles a program, unless somebody is."""
        return _linux.lock_range(flights, int(key[:15], 16), 1)

    @staticmethod
    def end_flight(flights: int) -> None:
        """Let another be the one, before the file is closed."""
        _linux.unlock_range(flights, 0, 0)

    def mark(self, key: str, why: str) -> None:
        """Note that nobody shall wait for a program: JAX does not store it."""
        with open(os.path.join(self.path, "marks", key), "w", encoding="utf-8") as file:
            file.write(why)

    def is_marked(self, key: str) -> bool:
        """Say whether nobody shall wait for a program. Marks expire, and one from the future counts as expired."""
        try:
            return 0 <= time.time() - os.stat(os.path.join(self.path, "marks", key)).st_mtime < MARKS_LAST_S
        except FileNotFoundError:
            return False

    def _entry(self, key: str) -> str:
        return os.path.join(self.path, "entries", key)


def prune(
    stores: list[Store], goes: Callable[[Entry], bool] = lambda _: False, most_bytes: float = MOST_BYTES
) -> list[Entry]:
    """Remove programs: those that `goes` names, and those not used for longest until the rest fits.

    Returns:
        What was removed.
    """
    gone, total = [], 0
    everything = [(entry, store) for store in stores for entry in store.entries()]
    for entry, store in sorted(everything, key=lambda pair: -pair[0].used):
        total += 0 if goes(entry) else entry.bytes
        if goes(entry) or total > most_bytes:  # and with the first that does not fit all that are older
            store.discard(entry.key)
            gone.append(entry)
    return gone


def kinds(root: str) -> list[str]:
    """The kinds of programs that there are in a store."""
    try:
        names = os.listdir(os.path.join(root, _LAYOUT))
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in names if _linux.is_directory(os.path.join(root, _LAYOUT, name, "entries")))
