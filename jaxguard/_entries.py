"""One entry of JAX's compilation cache: is it whole, and is it what was sealed?

Sources: JAX's documentation of its persistent compilation cache; RFC 1950 (zlib), RFC 8878 (zstd).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
import zlib
from typing import Any

SUFFIX = "-cache"
"""How the names of JAX's entries end; before it stand the function's name and the key."""
SEAL = "seal.json"
_KEY = re.compile(r"[0-9a-f]{16,128}")
_ZSTD = b"\x28\xb5\x2f\xfd"


class Torn(Exception):
    """JAX could not write a program whole."""


def is_key(text: object) -> bool:
    """Say whether a text can be the key of a program."""
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def key_of(name: str) -> str | None:
    """The key in the name of one of JAX's entries."""
    key = name.removesuffix(SUFFIX).rpartition("-")[2]
    return key if name.endswith(SUFFIX) and is_key(key) else None


def is_whole(data: bytes) -> bool:
    """Say whether an entry of JAX can be decompressed to its end; one in a form that is not known here counts so."""
    try:
        if data[:4] == _ZSTD:
            return _zstd_is_whole(data)
        stream = zlib.decompressobj()
        rest = data
        while rest and not stream.eof:
            stream.decompress(rest, 1 << 24)
            rest = stream.unconsumed_tail
    except Exception:  # noqa: BLE001 – each library has its own
        return False
    return stream.eof


def _zstd_is_whole(data: bytes) -> bool:
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return True
        return bool(zstd.decompress(data))
    return bool(zstandard.ZstdDecompressor().decompress(data))


def sealed(folder: str) -> tuple[str, dict[str, Any]] | None:
    """The name of a program's file and its seal, if the one is what the other says."""
    try:
        seal = json.loads(read(os.path.join(folder, SEAL)))
        name = next(name for name in os.listdir(folder) if name.endswith(SUFFIX))
        data = read(os.path.join(folder, name))
        sound = seal["sha256"] == hashlib.sha256(data).hexdigest()
    except (OSError, ValueError, TypeError, KeyError, StopIteration):
        return None
    return (name, seal) if sound else None


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def check_writable(folder: str) -> None:
    """Raise OSError if a file cannot be made in a directory."""
    path = os.path.join(folder, f".try-{secrets.token_hex(8)}")
    with open(path, "xb"):
        pass
    os.unlink(path)


def link(source: str, target: str) -> None:
    """A second name for a file; a copy where the file system knows no such names."""
    try:
        os.link(source, target)
    except FileExistsError:
        pass
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
