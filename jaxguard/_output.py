"""What a worker writes: passed on to the streams here, and its end kept for errors."""

from __future__ import annotations

import codecs
import os
import re
import sys

_KEPT_BYTES, _TAIL_BYTES = 16000, 4000
_OWN_FRAME = re.compile(r'jaxguard/_worker\.py", line \d+ in _do$')


class Tail:
    """The end of what a worker wrote, however many pieces it came in: a crash is written word by word."""

    def __init__(self) -> None:
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * _KEPT_BYTES:
            del self._data[:-_KEPT_BYTES]

    def text(self) -> str:
        return from_the_job_on(bytes(self._data))[-_TAIL_BYTES:].strip()


class Output:
    """One output stream of a worker: what arrives is written to the stream of the same name here."""

    def __init__(self, name: str, tail: Tail) -> None:
        self._name = name
        self._tail = tail
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")

    def pass_on(self, descriptor: int, limit: int = 16) -> bool:
        """Pass on what is there (of a flood, a part: the other lines have their turn); False at the end."""
        for _ in range(limit):
            try:
                data = os.read(descriptor, 1 << 16)
            except BlockingIOError:
                return True
            except OSError:
                data = b""
            text = self._decoder.decode(data, final=not data)
            if text:
                self._tail.append(data)
                try:  # looked up now: pytest, notebooks and contextlib replace it
                    stream = getattr(sys, self._name)
                    stream.write(text)
                    stream.flush()
                except Exception:  # noqa: BLE001, S110 – closed, or gone with its terminal: the trial is worth more
                    pass
            if not data:
                return False
        return True


def from_the_job_on(stacks: bytes) -> str:
    """Leave out the frames below the user's function, which are the worker's own."""
    lines, skipping = [], False
    for line in stacks.decode("utf-8", "backslashreplace").strip().splitlines():
        if line.startswith("Extension modules: "):
            continue
        skipping = line.startswith("  ") and (skipping or bool(_OWN_FRAME.search(line)))
        if not skipping:
            lines.append(line)
    return "\n".join(lines)
