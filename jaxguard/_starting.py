"""Starting a worker: the parent's way to its keeper, one interface with two ways, fork and exec.

The keeper comes with the first call, through loky, and goes with this process. It reads its environment when it
begins; a call whose environment differs in a variable that JAX or a numerical library reads at import gets a worker
that execs, all others one that forks.
"""

from __future__ import annotations

import atexit
import io
import multiprocessing
import os
import secrets
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from . import (
    _descriptors,
    _environment,
    _keeper,
    _leases,
    _linux,
    _orphans,
    _phases,
    _records,
    _settings,
    _whereabouts,
    _worker,
    errors,
)

_READ_AT_IMPORT = (
    *("JAX_", "JAXLIB_", "XLA_", "LIBTPU_", "TF_", "PJRT_", "CUDA_", "NVIDIA_", "NCCL_"),
    *("OMP_", "KMP_", "GOMP_", "OPENBLAS_", "MKL_", "BLIS_", "NUMEXPR_", "VECLIB_", "GOTO_"),
    *("LD_", "PYTHON", "MALLOC_", "GLIBC_"),
)
"""Variables, by prefix, that JAX, a numerical library, Python or the loader reads when a process begins."""
_SET_BY_LIBRARIES = ("KMP_INIT_AT_FORK", "KMP_DUPLICATE_LIB_OK", "TF_CPP_MIN_LOG_LEVEL", "TPU_ML_PLATFORM")
"""Variables that joblib, scikit-learn and JAX set for themselves when they are imported: no user's wish for an exec."""
_PRELOADED = ("numpy", "jax", "jax.numpy", "filelock", "cloudpickle")
_PRELOADED_IF_USED = ("optuna", "optax", "flax.nnx", "equinox", "orbax.checkpoint")
"""Imports that take long and start neither JAX nor threads."""
_SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
_ENDING_S = 0.5
"""How long a process that has closed its sockets takes to be gone, at most."""
GONE = b"-"
"""Stands for the word of a keeper that says nothing any more."""


class Started:
    """A worker on its way: the parent's ends of what connects the two."""

    def __init__(self, lease: _leases.Lease, at_import: dict[str, str]) -> None:
        keeper = _keeper_of_this_process()
        with ExitStack() as stack, _descriptors.creating():  # whatever is raised in here, nothing stays open
            pipe, pipe_there = self._pair(stack, socket.SOCK_STREAM)
            line, line_there = self._pair(stack, socket.SOCK_SEQPACKET)
            stdout, stdout_there = self._pipe(stack)
            stderr, stderr_there = self._pipe(stack)
            self.stacks = self._own(stack, _whereabouts.new_file(_whereabouts.WORKER))
            self.phases = self._own(stack, _records.new_file(_phases.word(lease.nonce)))
            there = [line_there.detach(), pipe_there.detach(), stdout_there, stderr_there]
            stack.pop_all()
        self.pipe, self.line = pipe, line
        self._worker_pidfd = -1
        self.mark = keeper.mark
        self._keeper = keeper
        self.keeper_pid = keeper.pid
        self.outputs = {stdout: "stdout", stderr: "stderr"}
        line.setblocking(False)
        for descriptor in self.outputs:
            os.set_blocking(descriptor, False)
        way = _keeper.FORK if at_import == keeper.read_at_import else _keeper.EXEC
        try:
            keeper.order(way, [*there, self.stacks, self.phases, *lease.descriptors])
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError) or _linux.is_a_users(error):
                raise
            text = f"no worker could be started: the keeper (pid {keeper.pid}) is gone ({error}). Call again."
            raise errors.WorkerDied(text) from error
        finally:
            _descriptors.close(*there)

    def hear(self) -> tuple[bytes, int, bytes]:
        """What the keeper says: its word with a number or a text; no word if it says nothing, GONE if it is gone."""
        try:
            message = self.line.recv(512)
        except BlockingIOError:
            return b"", 0, b""
        except OSError as error:
            if _linux.is_a_users(error):
                raise
            message = b""
        if not message and not self._keeper.is_gone():
            return _keeper.ENDED, 0, b""  # it had said so, when a user's time limit came between
        kind, rest = message[:1] or GONE, message[1:]
        number = struct.unpack("i", rest)[0] if kind in {_keeper.STARTED, _keeper.ENDED} else 0
        return kind, number, rest

    def know_worker(self, pid: int) -> None:
        """Keep an eye on the worker itself: should the keeper die, nobody else tells when it is gone."""
        try:
            with _descriptors.creating():
                self._worker_pidfd = os.pidfd_open(pid)
                _descriptors.own(self._worker_pidfd)
        except OSError as error:  # gone already, or no descriptor is left
            if _linux.is_a_users(error):
                raise

    def wait_for_worker(self) -> None:
        """Wait until a worker whose keeper is gone is gone too, with all that it had open."""
        if self._worker_pidfd >= 0:
            _linux.wait_readable(self._worker_pidfd, _orphans.SWEEP_BOUND_S)

    def order(self, order: bytes) -> None:
        """Have the keeper send the worker a signal."""
        with _descriptors.creating():  # not while it is closed: its number may be a stranger's a moment later
            try:
                self.line.send(order)
            except OSError as error:  # the keeper is gone, and the worker with it
                if _linux.is_a_users(error):
                    raise

    def wake_keeper(self) -> None:
        """A keeper that somebody has stopped ends nobody."""
        try:
            os.kill(self.keeper_pid, signal.SIGCONT)
        except (ProcessLookupError, PermissionError):
            pass

    @staticmethod
    def _own(stack: ExitStack, descriptor: int) -> int:
        _descriptors.own(descriptor)
        stack.callback(_descriptors.close, descriptor)
        return descriptor

    @classmethod
    def _pair(cls, stack: ExitStack, kind: int) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair(socket.AF_UNIX, kind)
        for end in pair:
            _descriptors.own_socket(end)
            stack.callback(_descriptors.close_socket, end)
        return pair

    @classmethod
    def _pipe(cls, stack: ExitStack) -> tuple[int, int]:
        reads, writes = os.pipe2(os.O_CLOEXEC)
        return cls._own(stack, reads), cls._own(stack, writes)

    def close(self) -> None:
        """Let go of the worker; the keeper ends one that still runs."""
        _descriptors.close_socket(self.pipe)
        _descriptors.close_socket(self.line)
        _descriptors.close(self.stacks, self.phases, self._worker_pidfd, *self.outputs)


def read_at_import(env: dict[str, str]) -> dict[str, str]:
    """The part of an environment that a process cannot change after it has begun."""
    passed_over = {*_environment.FROM_THE_LEASE, *_environment.READ_LATER, *_SET_BY_LIBRARIES}
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT) and name not in passed_over}


def preload() -> list[str]:
    """What a worker has imported before any user code."""
    return [*_PRELOADED, *(name for name in _PRELOADED_IF_USED if name in sys.modules)]


# ---------------------------------------------------------------- the keeper of this process


class _KeeperOfThisProcess:
    def __init__(self) -> None:
        from multiprocessing import resource_tracker as standard_resource_tracker

        from loky.backend import resource_tracker
        from loky.backend.process import LokyProcess  # by name: in joblib's workers, "loky" means joblib's own copy

        # Both trackers unblock SIGINT when they start: so they start before it is blocked.
        resource_tracker.ensure_running()
        standard_resource_tracker.ensure_running()
        self.mark = f"{os.getpid()}-{secrets.token_hex(6)}"
        self.read_at_import = read_at_import(dict(os.environ))
        # Threads: no difference of these alone is worth an exec, as a worker is bound to its cores anyhow.
        env = _environment.thread_variables() | dict(os.environ) | {_settings.RUN: self.mark}
        with _descriptors.creating():
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            _descriptors.own_socket(here)
            _descriptors.own_socket(there)
        self._control = here
        end = Connection(there.detach())
        # Blocked until the keeper ignores them: a Ctrl-C at this moment must not end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            arguments = (end, os.getpid(), preload(), mask, _worker.begin)
            self._process = LokyProcess(target=_keeper.main, args=arguments, name="jaxguard-keeper", env=env)
            _start_though_daemonic(self._process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            with _descriptors.creating():
                _descriptors.disown(end.fileno())
                end.close()
        # It ends with this process by itself; `multiprocessing` would wait for it at exit.
        vars(multiprocessing.process).get("_children", set()).discard(self._process)
        self.pid: int = self._process.pid
        with _descriptors.creating():
            self._pidfd = os.pidfd_open(self.pid)
            _descriptors.own(self._pidfd)

    def alive(self) -> bool:
        return not _linux.wait_readable(self._pidfd, 0)

    def is_gone(self) -> bool:
        """Say whether it has ended; one that has closed its lines is given a moment to."""
        return self._pidfd < 0 or _linux.wait_readable(self._pidfd, _ENDING_S)

    def order(self, way: bytes, descriptors: list[int]) -> None:
        socket.send_fds(self._control, [way, " ".join(preload()).encode()], descriptors)

    def bury(self) -> None:
        """Reap a keeper that is dead, and let go of it."""
        # Not `join`: loky's sentinel is still open in a worker that is just dying too.
        try:
            os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:
            pass
        _descriptors.close_socket(self._control)
        pidfd, self._pidfd = self._pidfd, -1
        _descriptors.close(pidfd)


def kill_keeper(pid: int) -> None:
    """Give a keeper up that does not answer: all that it keeps ends with it, and the next call starts another."""
    with _lock:
        if _current is not None and _current.pid == pid:
            os.kill(pid, signal.SIGKILL)


def _start_though_daemonic(process: Any) -> None:
    """Start a process from a daemonic one too: `multiprocessing` forbids it for fear of orphans, ours ends itself."""
    config = vars(multiprocessing.current_process()).get("_config", {})
    daemonic = config.pop("daemon", None)
    try:
        with _streams():
            process.start()
    finally:
        if daemonic is not None:
            config["daemon"] = daemonic


@contextmanager
def _streams() -> Iterator[None]:
    """loky flushes stdout and stderr, which a program without a terminal may not have."""
    absent = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    for name in absent:
        setattr(sys, name, io.StringIO())
    try:
        yield
    finally:
        for name in absent:
            setattr(sys, name, None)


_lock = threading.Lock()
_current: _KeeperOfThisProcess | None = None


def _keeper_of_this_process() -> _KeeperOfThisProcess:
    global _current  # noqa: PLW0603 – one per process
    with _lock:
        if _current is not None and not _current.alive():
            _current.bury()
            _current = None
        if _current is None:
            atexit.unregister(_dismiss)
            atexit.register(_dismiss)
            _current = _KeeperOfThisProcess()
        return _current


def _dismiss() -> None:
    """At exit, after idle workers were retired: they were registered later."""
    global _current  # noqa: PLW0603 – as above
    with _lock:
        if _current is not None:
            _current.bury()
            _current = None


def warm_up() -> None:
    """Have the keeper started: it imports while this call waits for its slot."""
    _keeper_of_this_process()


def _after_fork_in_child() -> None:
    global _current, _lock
    _current, _lock = None, threading.Lock()


_descriptors.after_fork_in_child(_after_fork_in_child)
