"""Directories that belong to this user alone, on a local disk: made so, and refused if they are not."""

from __future__ import annotations

import os
import stat

from . import _descriptors, _linux, errors


def make(folder: str) -> None:
    """Make a directory, and those above it, for this user alone, whatever the umask says."""
    missing = []
    while not _linux.is_directory(folder):
        missing.append(folder)
        folder = os.path.dirname(folder)
    for path in reversed(missing):
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:  # made by another at the same time; else it is no directory
            if not _linux.is_directory(path):
                raise


def open_file(path: str) -> int:
    """Open a file, made if it is not there, for locks; no forked child keeps it."""
    with _descriptors.creating():
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _descriptors.own(descriptor)
    return descriptor


def is_at(descriptor: int, path: str) -> bool:
    """Say whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def refuse_unsafe(root: str) -> None:
    """Raise unless all that is there of a path can be changed by this user and root only: programs are code.

    Raises:
        JaxguardError: With who else could, or the kind of file system.
    """
    if _linux.is_on_network(root):
        text = f"{root} is on a network file system, where its locks cannot be relied on"
        raise errors.JaxguardError(text)
    me, part, first = os.geteuid(), os.path.realpath(root), True
    while True:
        try:
            found = os.stat(part)
        except FileNotFoundError:
            found = None
        if found is not None:
            writable = stat.S_IWOTH | (stat.S_IWGRP if first else 0)
            if found.st_uid != me and (first or found.st_uid != 0):
                text = f"{part} belongs to {_linux.user(found.st_uid)}, and programs are code"
                raise errors.JaxguardError(text)
            if found.st_mode & writable and (first or not found.st_mode & stat.S_ISVTX):
                text = f"others can write in {part} (mode {found.st_mode & 0o7777:o}), and programs are code"
                raise errors.JaxguardError(text)
        first = False
        if part == "/":
            return
        part = os.path.dirname(part)
