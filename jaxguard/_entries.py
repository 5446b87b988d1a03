"""One entry of JAX's compilation cache: is it whole, and is it what was sealed?

Sources: JAX's documentation of its persistent compilation cache; RFC 1950 (zlib), RFC 8878 (zstd).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import secrets
import shutil
import zlib
from typing import Any

from . import _linux

SUFFIX = "-cache"
"""How the names of JAX's entries end; before it stand the function's name and the key."""
SEAL = "seal.json"
_KEY = re.compile(r"[0-9a-f]{16,128}")
_CHUNK_BYTES = 1 << 20
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


def is_whole(file: io.BufferedReader | io.BytesIO) -> bool:
    """Say whether an entry of JAX can be decompressed to its end; one in a form that is not known here counts so."""
    head = file.read(len(_ZSTD))
    file.seek(0)
    stream: Any = _zstd() if head == _ZSTD else zlib.decompressobj()
    if stream is None:
        return True
    try:
        while not stream.eof and (chunk := file.read(_CHUNK_BYTES)):
            stream.decompress(chunk)
    except OSError:  # it could not be read, or a user's time limit struck
        raise
    except Exception:  # noqa: BLE001 – each library has its own
        return False
    return bool(stream.eof)


def _zstd() -> Any:
    """A decompressor of the library that JAX uses, where it is."""
    try:
        import zstandard  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        try:
            from compression import zstd  # type: ignore[import-not-found,unused-ignore]
        except ImportError:
            return None
        return zstd.ZstdDecompressor()
    return zstandard.ZstdDecompressor().decompressobj()


def sealed(folder: str) -> tuple[str, dict[str, Any]] | None:
    """The name of a program's file and its seal, if the one is what the other says."""
    try:
        with open(os.path.join(folder, SEAL), encoding="utf-8") as file:
            seal = json.load(file)
        name = next(name for name in os.listdir(folder) if name.endswith(SUFFIX))
        with open(os.path.join(folder, name), "rb") as entry:
            sound = seal["sha256"] == digest(entry)
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, StopIteration):
        return None  # any other error, such as too many open files, says nothing of the entry
    return (name, seal) if sound else None


def digest(file: io.BufferedReader | io.BytesIO) -> str:
    """SHA-256 of what is in a file, from its beginning."""
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()


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
    except OSError as error:
        if _linux.is_a_users(error):
            raise
        beside = f"{target}.{secrets.token_hex(8)}"
        shutil.copyfile(source, beside)
        os.rename(beside, target)  # nobody reads half of it
