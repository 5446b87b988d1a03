"""The keeper: one single-threaded process per program, parent of all its workers.

It imports JAX and never starts it, so a worker is a fork away. It alone judges death, by `waitpid` and pidfds: never by
end-of-file, which a grandchild can delay. It is the subreaper of its workers, and they of their children, so any child
of the keeper that is no worker belonged to a dead one, and is ended. Only then is the lease closed, and only then is
the end reported.

    parent --> keeper   (control)  F or X, modules to import, with: line, pipe, stdout, stderr, stacks, phases, lease...
    keeper --> parent   (line)     P pid        the worker exists
                                   E status     it has ended, nothing of it is left, its lease is closed
    parent --> keeper   (line)     T, K         send SIGTERM, SIGKILL;  hang-up: SIGKILL
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NoReturn, Protocol

from . import _descriptors, _linux, _whereabouts

FORK, EXEC = b"F", b"X"
STARTED, ENDED, FAILED = b"P", b"E", b"!"
TERMINATE, KILL = b"T", b"K"
_SIGNALS = {TERMINATE: signal.SIGTERM, KILL: signal.SIGKILL}
_MAX_DESCRIPTORS = 64
_SWEEP_BOUND_S = 5.0
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP, signal.SIGTTOU, signal.SIGTTIN)


@dataclass(eq=False)
class _Worker:
    pid: int
    pidfd: int
    line: socket.socket
    lease: list[int]
    status: int | None = None
    sweep_until: float = 0.0


class Begin(Protocol):
    """What a forked child does to become a worker."""

    def __call__(self, pipe: int, stacks: int, phases: int, lease: list[int], *, by_exec: bool) -> NoReturn: ...


def main(control: Connection, parent: int, preload: list[str], mask: set[signal.Signals], begin: Begin) -> None:
    """Be the keeper of `parent`, until it ends."""
    # A process group of its own, so that a terminal's Ctrl-C is the parent's to pass on; but in the parent's session:
    # when the parent ends, the kernel wakes a keeper that somebody has stopped. Source: setpgid(2), orphaned groups.
    os.setpgid(0, 0)
    _linux.become_subreaper()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a parent that ignores it would have deaths go unseen here too
    for number in _IGNORED:  # the parent decides; it ends us by ending
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):  # 2 stays: what goes wrong here must be seen
        os.dup2(null, descriptor)
    try:
        parent_pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != parent:
        os._exit(0)
    _whereabouts.answer_here(_whereabouts.KEEPER)  # an import may hang
    _import(preload)
    connection = socket.socket(fileno=os.dup(control.fileno()))
    control.close()
    _Keeper(connection, parent_pidfd, null, begin).serve()


def _import(names: list[str]) -> None:
    """Import once for all workers to come."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        try:
            importlib.import_module(name)
        except Exception:  # noqa: BLE001, S110 – the trial that needs it will say so
            pass
    if missing:
        gc.collect()
        gc.freeze()


class _Keeper:
    def __init__(self, control: socket.socket, parent_pidfd: int, null: int, begin: Begin) -> None:
        self._pid = os.getpid()
        self._control = control
        self._parent_pidfd = parent_pidfd
        self._null = null
        self._begin = begin
        self._workers: list[_Worker] = []
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._poll.register(parent_pidfd, select.POLLIN)

    def serve(self) -> NoReturn:
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll(self._nap())}
            if self._parent_pidfd in ready:
                self._finish()
            for worker in list(self._workers):
                if worker.status is None and worker.pidfd in ready:
                    self._reap(worker)
                if worker.line.fileno() in ready:
                    self._obey(worker)
            self._sweep()
            if self._control.fileno() in ready:
                self._start()

    def _nap(self) -> float | None:
        """Look again soon while something that was ended is not gone yet."""
        return 1 if any(worker.status is not None for worker in self._workers) else None

    # ------------------------------------------------------------ beginning

    def _start(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._control, 4096, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except OSError:
            message, descriptors = b"", []
        if not message:
            self._finish()
        order, names = message[:1], message[1:].decode().split()
        if order == FORK:
            _import(names)
        _descriptors.without_inheritance(descriptors)
        line, pipe, stdout, stderr, stacks, phases, *lease = descriptors
        connection = socket.socket(fileno=line)
        try:
            pid = os.fork()
        except OSError as error:
            connection.send(FAILED + str(error).encode())
            connection.close()
            _descriptors.close(pipe, stdout, stderr, stacks, phases, *lease)
            return
        if pid == 0:
            self._become_worker(order, connection, stdout, stderr, pipe, stacks, phases, lease)
        _descriptors.close(pipe, stdout, stderr, stacks, phases)
        worker = _Worker(pid, os.pidfd_open(pid), connection, lease)
        self._workers.append(worker)
        self._poll.register(worker.pidfd, select.POLLIN)
        self._poll.register(connection, select.POLLIN)
        self._tell(worker, STARTED + struct.pack("i", pid))

    def _become_worker(
        self,
        order: bytes,
        line: socket.socket,
        stdout: int,
        stderr: int,
        pipe: int,
        stacks: int,
        phases: int,
        lease: list[int],
    ) -> NoReturn:
        try:
            _linux.die_with_parent()
            if os.getppid() != self._pid:  # it ended before we asked
                os._exit(97)
            _linux.become_subreaper()
            os.setsid()  # a terminal's Ctrl-C is the parent's to pass on
            for number in _IGNORED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.dup2(stdout, 1)
            os.dup2(stderr, 2)
            others = [
                other for worker in self._workers for other in (worker.pidfd, worker.line.detach(), *worker.lease)
            ]
            mine = [self._control.detach(), line.detach(), self._parent_pidfd, self._null, stdout, stderr]
            _descriptors.close(*others, *mine)
            self._begin(pipe, stacks, phases, lease, by_exec=order == EXEC)
        except BaseException:  # noqa: BLE001 – whatever it is, this process is no keeper
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(98)

    # ------------------------------------------------------------ ending

    def _obey(self, worker: _Worker) -> None:
        try:
            order = worker.line.recv(16)
        except OSError:
            order = b""
        if not order:
            self._poll.unregister(worker.line)
        if worker.status is None:  # not reaped, so the pid is still this worker's
            os.kill(worker.pid, _SIGNALS.get(order, signal.SIGKILL))

    def _reap(self, worker: _Worker) -> None:
        pid, status = os.waitpid(worker.pid, os.WNOHANG)
        if pid:
            worker.status = status
            worker.sweep_until = time.monotonic() + _SWEEP_BOUND_S
            self._poll.unregister(worker.pidfd)

    def _sweep(self) -> None:
        """End what dead workers left behind, then close their leases and report.

        Children appear here as their parents end, so this comes back until there are none: the fixed point. A child
        that cannot be ended (state D) holds up only its own worker's report, and only for a while.
        """
        ended = [worker for worker in self._workers if worker.status is not None]
        if not ended:
            return
        alive = {worker.pid for worker in self._workers if worker.status is None}
        left = _end_children_but(alive)
        now = time.monotonic()
        for worker in ended:
            if left and now < worker.sweep_until:
                continue
            self._workers.remove(worker)
            _descriptors.close(*worker.lease, worker.pidfd)
            self._tell(worker, ENDED + struct.pack("i", worker.status))
            try:
                self._poll.unregister(worker.line)
            except KeyError:  # it hung up before
                pass
            worker.line.close()

    def _tell(self, worker: _Worker, message: bytes) -> None:
        try:
            worker.line.send(message)
        except OSError:  # the call is gone; the hang-up is on its way
            pass

    def _finish(self) -> NoReturn:
        """The parent has ended: end all, then this process."""
        until = time.monotonic() + _SWEEP_BOUND_S
        while _end_children_but(set()) and time.monotonic() < until:
            time.sleep(0.001)
        os._exit(0)


def _end_children_but(alive: set[int]) -> bool:
    """Kill and reap the other children of this process; say whether any are left."""
    strays = _linux.children(os.getpid()) - alive
    for pid in strays:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, os.WNOHANG)
        except (ProcessLookupError, ChildProcessError, PermissionError):  # gone; or another user's, and not ours to end
            continue
    return bool(strays)
