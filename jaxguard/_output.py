"""What a worker writes: passed on to the streams here, and its end kept for errors."""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Container

from . import _linux, _whereabouts

_KEPT_BYTES = 16000


class Outputs:
    """All that a worker writes, until each stream has come to its end."""

    def __init__(self, names: dict[int, str]) -> None:
        self.tail = Tail()
        self._open = {descriptor: Output(name, self.tail) for descriptor, name in names.items()}

    @property
    def descriptors(self) -> list[int]:
        """What to poll."""
        return list(self._open)

    def pass_on(self, ready: Container[int]) -> None:
        """Pass on what is there on those that are ready."""
        for descriptor, output in list(self._open.items()):
            if descriptor in ready and not output.pass_on(descriptor):
                del self._open[descriptor]

    def drain(self) -> None:
        """Pass on all that a worker has left that is gone."""
        for descriptor, output in self._open.items():
            output.pass_on(descriptor, limit=1 << 20)


class Tail:
    """The end of what a worker wrote, however many pieces it came in: a crash is written word by word."""

    def __init__(self) -> None:
        self._data = bytearray()

    def append(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * _KEPT_BYTES:
            del self._data[:-_KEPT_BYTES]

    def text(self) -> str:
        return _whereabouts.from_the_job_on(self._data.decode("utf-8", "backslashreplace")).strip()


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
            except OSError as error:
                if _linux.is_a_users(error):
                    raise
                data = b""
            text = self._decoder.decode(data, final=not data)
            if text:
                self._tail.append(data)
                try:  # looked up now: pytest, notebooks and contextlib replace it
                    stream = getattr(sys, self._name)
                    stream.write(text)
                    stream.flush()
                except Exception as error:  # closed, or gone with its terminal: the trial is worth more
                    if _linux.is_a_users(error):
                        raise
            if not data:
                return False
        return True
