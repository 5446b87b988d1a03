"""Frames: what was sent arrives whole, in order, once; whatever breaks does not hang."""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxguard import _descriptors, _frames

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEADER = struct.Struct("!cQB")
frames = st.lists(st.tuples(st.sampled_from([b"S", b"J", b"D"]), st.binary(max_size=60)), max_size=6)
kinds_of_sizes = pytest.mark.parametrize("size", [0, 1, 1 << 16, 1 << 20, (1 << 20) + 1, 5_000_001])


@pytest.fixture
def pipes() -> Iterator[tuple[_frames.PollingPipe, _frames.BlockingPipe]]:
    """Give the parent's end and the worker's end of one pipe."""
    here, there = socket.socketpair()
    parent, worker = _frames.PollingPipe(here), _frames.BlockingPipe(there)
    yield parent, worker
    parent.close()
    there.close()


def read(pipe: _frames.PollingPipe, count: int, within_s: float = 30.0) -> list[_frames.Frame]:
    """Read so many frames as the parent does."""
    found: list[_frames.Frame] = []
    deadline = time.monotonic() + within_s
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count} frames came"
        select.select([pipe.connection], [], [], 1)
        found += pipe.read()
    return found


def write_all(pipe: _frames.PollingPipe) -> None:
    """Write until all is out, as the parent does when `poll` says so."""
    while pipe.unwritten:
        select.select([], [pipe.connection], [], 30)
        pipe.write()


def beside(function: Callable[[], object]) -> threading.Thread:
    """Do it in another thread."""
    started = threading.Thread(target=function, daemon=True)
    started.start()
    return started


def open_descriptors() -> set[str]:
    """Name the descriptors of this process."""
    return set(os.listdir("/proc/self/fd"))


def memory_file(text: bytes) -> int:
    """Make a memory file to send; it belongs to who gets it."""
    descriptor = os.memfd_create("frames")
    os.write(descriptor, text)
    return descriptor


# ---------------------------------------------------------------------------------------- there and back


@kinds_of_sizes
def test_from_worker_to_parent(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe], size: int) -> None:
    """Frames of any size arrive as they were sent, in their order."""
    parent, worker = pipes
    data = os.urandom(size)
    sender = beside(lambda: [worker.send(b"D", data), worker.send(b"X", b"end")])

    assert read(parent, 2) == [(b"D", data, []), (b"X", b"end", [])]
    sender.join(30)


@kinds_of_sizes
def test_from_parent_to_worker(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe], size: int) -> None:
    """The other way too, though the parent never blocks and the worker always does."""
    parent, worker = pipes
    data = os.urandom(size)
    parent.put(b"J", data)
    parent.put(b"Q", b"")
    assert parent.unwritten
    writer = beside(lambda: write_all(parent))

    assert worker.receive() == (b"J", data, [])
    assert worker.receive() == (b"Q", b"", [])
    writer.join(30)
    assert not parent.unwritten


@given(sent=frames, data=st.data())
@settings(deadline=None)
def test_wherever_the_stream_is_cut(sent: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    """However the bytes come in pieces, the frames are the same, and each is given as soon as it is complete."""
    stream = b"".join(HEADER.pack(kind, len(body), 0) + body for kind, body in sent)
    ends, total = [], 0
    for _, body in sent:
        total += HEADER.size + len(body)
        ends.append(total)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=12)) | {len(stream)})
    here, there = socket.socketpair()
    pipe = _frames.PollingPipe(here)
    got, start = [], 0
    for cut in cuts:
        there.sendall(stream[start:cut])
        start = cut
        got += pipe.read()
        assert len(got) == sum(end <= cut for end in ends)
    there.close()
    with pytest.raises(_frames.Closed):
        list(pipe.read())
    pipe.close()

    assert got == [(kind, body, []) for kind, body in sent]


@given(sent=frames)
@settings(deadline=None)
def test_the_worker_reads_not_a_byte_more(sent: list[tuple[bytes, bytes]]) -> None:
    """After each frame what follows is still in the pipe: a worker may exec between two frames."""
    here, there = socket.socketpair()
    parent, worker = _frames.PollingPipe(here), _frames.BlockingPipe(there)
    for kind, body in sent:
        parent.put(kind, body)
    write_all(parent)
    for kind, body in sent:
        assert _frames.BlockingPipe(there).receive() == (kind, body, [])
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(1)
    parent.close()
    worker.connection.close()


# ---------------------------------------------------------------------------------------- what breaks


def test_a_half_frame_does_not_hang(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """The parent gives nothing for half a frame, and returns: it does not wait for the rest."""
    parent, worker = pipes
    header = HEADER.pack(b"D", 100, 0)
    for part in (header[:4], header[4:], b"x" * 99):
        worker.connection.sendall(part)
        assert list(parent.read()) == []
    worker.connection.sendall(b"y")
    assert list(parent.read()) == [(b"D", b"x" * 99 + b"y", [])]


def test_a_half_frame_before_the_end_is_lost(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """Whole frames before the end are given, the half one is not, and then the end is said."""
    parent, worker = pipes
    worker.send(b"D", b"whole")
    worker.connection.sendall(HEADER.pack(b"D", 100, 0) + b"half")
    worker.connection.close()
    got: list[_frames.Frame] = []
    with pytest.raises(_frames.Closed):
        got.extend(parent.read())

    assert got == [(b"D", b"whole", [])]


def test_the_end_of_the_parent_is_said(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """A worker whose parent is gone gets `Closed`, in reading and in writing, at any place in a frame."""
    parent, worker = pipes
    parent.connection.sendall(HEADER.pack(b"J", 10, 0) + b"half")
    parent.close()

    with pytest.raises(_frames.Closed):
        worker.receive()
    with pytest.raises(_frames.Closed):
        worker.send(b"D", b"x" * (1 << 20))


def test_the_end_of_the_worker_is_said(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """A parent whose worker is gone gets `Closed` in writing, and what it wanted to send is forgotten."""
    parent, worker = pipes
    file = memory_file(b"x")
    before = open_descriptors()
    worker.connection.close()
    parent.put(b"J", b"x" * 100)
    parent.put(b"F", b"y", [file])

    with pytest.raises(_frames.Closed):
        parent.write()
    assert not parent.unwritten
    assert str(file) not in open_descriptors()
    assert open_descriptors() < before


def test_a_full_pipe_does_not_block_the_parent(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """Writing stops where the pipe is full, and goes on there."""
    parent, worker = pipes
    data = os.urandom(3_000_000)
    parent.put(b"J", data)
    parent.write()
    assert parent.unwritten, "the pipe is full, and the parent is here"
    writer = beside(lambda: write_all(parent))

    assert worker.receive() == (b"J", data, [])
    writer.join(30)


# ---------------------------------------------------------------------------------------- descriptors


@pytest.mark.parametrize("count", [1, 2, _frames.MAX_DESCRIPTORS])
def test_descriptors_travel_in_order(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe], count: int) -> None:
    """Each frame has its own descriptors, in the order in which they were given, closed here once they are sent."""
    parent, worker = pipes
    before = open_descriptors()
    groups = [[memory_file(f"{frame} {i}".encode()) for i in range(count)] for frame in range(3)]
    for number, group in enumerate(groups):
        parent.put(b"F", bytes(number * 1000), group)
        parent.put(b"J", b"between")
    write_all(parent)
    assert open_descriptors() <= before | {str(d) for d in range(4)}, "sent, so closed here"

    for number in range(3):
        kind, data, received = worker.receive()
        assert (kind, len(data), len(received)) == (b"F", number * 1000, count)
        texts = [os.pread(descriptor, 100, 0).decode() for descriptor in received]
        assert texts == [f"{number} {i}" for i in range(count)]
        assert not any(map(os.get_inheritable, received)), "none outlives an exec"
        _descriptors.close(*received)
        assert worker.receive() == (b"J", b"between", [])
    assert open_descriptors() == before


def test_descriptors_travel_back(pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe]) -> None:
    """The worker's descriptors arrive with their frames, and stay its own."""
    parent, worker = pipes
    files = [memory_file(str(i).encode()) for i in range(3)]
    worker.send(b"D", b"one", files[:1])
    worker.send(b"D", b"none")
    worker.send(b"D", b"two", files[1:])
    got = read(parent, 3)

    assert [frame.data for frame in got] == [b"one", b"none", b"two"]
    assert [[os.pread(d, 10, 0) for d in frame.descriptors] for frame in got] == [[b"0"], [], [b"1", b"2"]]
    for frame in got:
        _descriptors.close(*frame.descriptors)
    for file in files:
        os.close(file)


def test_nobody_takes_them_so_the_pipe_closes_them(
    pipes: tuple[_frames.PollingPipe, _frames.BlockingPipe],
) -> None:
    """Descriptors that were queued, or that came with half a frame, are closed with the pipe."""
    parent, worker = pipes
    file = memory_file(b"x")
    before = open_descriptors()
    socket.send_fds(worker.connection, [HEADER.pack(b"D", 10, 2) + b"half"], [file, file])
    assert list(parent.read()) == []
    assert len(open_descriptors()) == len(before) + 2
    parent.put(b"F", b"", [file])
    parent.close()

    assert len(open_descriptors()) == len(before) - 2, "the two that came, the one that waited, and the pipe"
