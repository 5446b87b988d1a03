"""Frames: what travels over the pipe between a call and its worker.

A frame is a kind (one byte), data, and descriptors (large buffers, see `_calls`). The worker's end blocks. The parent's
end never does: a reader or writer that hangs on a half frame, because a grandchild kept the pipe open, would hang the
study.
"""

from __future__ import annotations

import array
import socket
import struct
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from . import _descriptors, _linux

_HEADER = struct.Struct("!cQB")
_CHUNK = 1 << 20
MAX_DESCRIPTORS = 128
"""Descriptors in one frame; the kernel takes 253."""


class Frame(NamedTuple):
    """One message."""

    kind: bytes
    data: bytes
    descriptors: list[int]


def join(head: bytes, body: bytes | memoryview) -> bytes:
    """Two parts in one piece of data."""
    return b"".join((len(head).to_bytes(4, "big"), head, body))


def split(data: bytes | memoryview) -> tuple[memoryview, memoryview]:
    """Undo `join`, without copying."""
    view = memoryview(data)
    start = 4 + int.from_bytes(view[:4], "big")
    return view[4:start], view[start:]


class Closed(Exception):
    """The other end is gone."""


def _receive(connection: socket.socket, size: int, flags: int = 0) -> tuple[bytes, list[int]]:
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        data, messages, _, _ = connection.recvmsg(size, space, flags | socket.MSG_CMSG_CLOEXEC)
    except (ConnectionResetError, BrokenPipeError) as error:
        raise Closed from error
    descriptors = array.array("i")
    for level, kind, payload in messages:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, _descriptors.without_inheritance(list(descriptors))


class BlockingPipe:
    """The worker's end."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        connection.setblocking(True)

    def send(self, kind: bytes, data: bytes | memoryview, descriptors: list[int] | None = None) -> None:
        """Send a frame; return when all of it is in the pipe."""
        passed = descriptors or []
        header = _HEADER.pack(kind, len(data), len(passed))
        try:
            socket.send_fds(self.connection, [header], passed) if passed else self.connection.sendall(header)
            self.connection.sendall(data)
        except (ConnectionResetError, BrokenPipeError) as error:
            raise Closed from error

    def receive(self) -> Frame:
        """Receive the next frame, and not a byte more.

        What has arrived is kept if a signal handler raises in the middle: the next call goes on from there.

        Raises:
            Closed: If the other end is gone.
        """
        wanted = _HEADER.size
        while True:
            if len(self._incoming) >= _HEADER.size:
                kind, size, count = _HEADER.unpack_from(self._incoming)
                wanted = _HEADER.size + size
                if len(self._incoming) == wanted:
                    data = bytes(memoryview(self._incoming)[_HEADER.size :])
                    self._incoming.clear()
                    return Frame(kind, data, [self._descriptors.popleft() for _ in range(count)])
            data, descriptors = _receive(self.connection, min(wanted - len(self._incoming), _CHUNK))
            if not data:
                raise Closed
            self._descriptors += descriptors
            self._incoming += data


class PollingPipe:
    """The parent's end: call `write` and `read` when `poll` says so."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._outgoing: deque[tuple[memoryview, list[int]]] = deque()
        self._incoming = bytearray()
        self._descriptors: deque[int] = deque()
        connection.setblocking(False)

    def put(self, kind: bytes, data: bytes, descriptors: list[int] | None = None) -> None:
        """Queue a frame. The descriptors belong to the pipe now, which closes them once they are sent."""
        passed = descriptors or []
        header = _HEADER.pack(kind, len(data), len(passed))
        # In one step: no signal handler that raises comes between, and leaves half a frame.
        self._outgoing.extend(((memoryview(header), passed), (memoryview(data), [])))

    @property
    def unwritten(self) -> bool:
        return bool(self._outgoing)

    def write(self) -> None:
        """Write what the pipe takes.

        Raises:
            Closed: If the other end is gone.
        """
        while self._outgoing:
            view, descriptors = self._outgoing.popleft()
            if not view:
                continue
            part = view[:_CHUNK]
            try:
                sent = (
                    socket.send_fds(self.connection, [part], descriptors) if descriptors else self.connection.send(part)
                )
            except BlockingIOError:
                self._outgoing.appendleft((view, descriptors))
                return
            except OSError as error:
                _descriptors.close(*descriptors)
                self._forget_outgoing()
                if _linux.is_a_users(error):
                    raise
                raise Closed from error
            _descriptors.close(*descriptors)
            if sent < len(view):
                self._outgoing.appendleft((view[sent:], []))

    def _forget_outgoing(self) -> None:
        while self._outgoing:
            _descriptors.close(*self._outgoing.popleft()[1])

    def read(self) -> Iterator[Frame]:
        """Read what is there, and give the frames that are complete.

        Raises:
            Closed: If the other end is gone, after the frames that came before.
        """
        closed = False
        while True:
            try:
                data, descriptors = _receive(self.connection, _CHUNK)
            except BlockingIOError:
                break
            except (Closed, OSError) as error:
                if _linux.is_a_users(error):
                    raise
                closed = True
                break
            self._descriptors += descriptors
            self._incoming += data
            if not data:
                closed = True
                break
            yield from self._complete()
        yield from self._complete()
        if closed:
            raise Closed

    def _complete(self) -> Iterator[Frame]:
        while len(self._incoming) >= _HEADER.size:
            kind, size, count = _HEADER.unpack_from(self._incoming)
            end = _HEADER.size + size
            if len(self._incoming) < end:
                return
            data = bytes(memoryview(self._incoming)[_HEADER.size : end])
            del self._incoming[:end]
            yield Frame(kind, data, [self._descriptors.popleft() for _ in range(count)])

    def close(self) -> None:
        """Close the pipe and whatever came with frames that nobody took."""
        self._forget_outgoing()
        _descriptors.close(*self._descriptors)
        self._descriptors.clear()
        _descriptors.close_socket(self.connection)
