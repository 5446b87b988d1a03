"""The worker: environment first, then what the parent had set, then the job, then a normal end.

    frames in    S set-up     U what changed since      F a function     J a job      Q end
    frames out   R a remote access to the trial        L a log record   D done       X an exception

A worker never outlives its pipe: when the other end is gone in the middle of a job, nobody wants the answer.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import socket
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from . import (
    _answers,
    _caching,
    _calls,
    _descriptors,
    _devices,
    _ending,
    _frames,
    _gpus,
    _holds,
    _inherited,
    _jax_state,
    _linux,
    _phases,
    _trials,
    _whereabouts,
    errors,
)

SETUP, CHANGED, FUNCTION, JOB, QUIT = b"S", b"U", b"F", b"J", b"Q"
REMOTE, RECORD = b"R", b"L"
FUNCTIONS_KEPT = 32
"""How many functions a warm worker remembers, with what they captured and compiled."""
_ALONE = 96
"""Exit code of a worker whose parent is gone; nobody is left to read it."""
_AFTER_EXEC = "import sys; sys.path[:] = {path!r}; from jaxguard import _worker; _worker.after_exec({descriptors!r})"


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker needs to know before any user code runs; read before anything else is imported."""

    env: dict[str, str]
    path: list[str]
    cores: list[int]
    gpus: float
    devices: tuple[_gpus.Device, ...]
    nonce: str
    preload: list[str]
    cache: _caching.Plan
    picture: bytes
    """The parent's `_inherited.capture`, pickled: reading it may import things, so the environment comes first."""


@dataclass(frozen=True, slots=True)
class Job:
    """One call."""

    call: str
    name: str
    function: bytes
    """The key of a function that was sent before."""
    arguments: _calls.Packed
    last: bool


def begin(pipe: int, stacks: int, phases: int, lease: list[int], *, by_exec: bool) -> NoReturn:
    """Become a worker, as a fork of the keeper or, when the environment at import matters, by exec."""
    connection = _frames.BlockingPipe(socket.socket(fileno=pipe))
    frame = connection.receive()
    if not by_exec:
        _run(connection, frame, stacks, phases, lease, forked=True)
    setup: Setup = pickle.loads(frame.data)
    copy = os.memfd_create("jaxguard-setup")
    os.write(copy, frame.data)
    descriptors = [copy, connection.connection.detach(), stacks, phases, *lease]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, True)
    code = _AFTER_EXEC.format(path=setup.path, descriptors=descriptors)
    optimize = ["-O"] * sys.flags.optimize
    os.execve(sys.executable, [sys.executable, *optimize, "-c", code], setup.env)


def after_exec(descriptors: list[int]) -> NoReturn:
    """Go on in the fresh interpreter."""
    copy, pipe, stacks, phases, *lease = _descriptors.without_inheritance(descriptors)
    data = os.pread(copy, os.fstat(copy).st_size, 0)
    os.close(copy)
    connection = _frames.BlockingPipe(socket.socket(fileno=pipe))
    _run(connection, _frames.Frame(SETUP, data, []), stacks, phases, lease, forked=False)


def _run(
    pipe: _frames.BlockingPipe, frame: _frames.Frame, stacks: int, phases: int, lease: list[int], *, forked: bool
) -> NoReturn:
    try:
        setup: Setup = pickle.loads(frame.data)
        _descriptors.own(pipe.connection.fileno(), stacks, phases, *lease)
        _phases.begin(setup.nonce, phases)
        _become(setup, pipe, stacks, forked=forked)
        exit_code = _Desk(setup, pipe).serve()
    except _frames.Closed as why:
        if why.args:
            sys.stderr.write(f"jaxguard: {why}\n")
        os._exit(_ALONE)
    _ending.end(exit_code)


# ---------------------------------------------------------------- before any user code


def _become(setup: Setup, pipe: _frames.BlockingPipe, stacks: int, *, forked: bool) -> None:
    os.environ.clear()
    os.environ.update(setup.env)
    os.sched_setaffinity(0, setup.cores)
    _fresh_streams()
    faulthandler.enable(2)
    _whereabouts.answer(stacks)
    _whereabouts.answer_carefully(stacks)
    sys.breakpointhook = _no_breakpoint
    if forked and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # a fork of the keeper has its state, and so has every other
    sys.path[:] = setup.path
    _import(setup.preload)
    picture = pickle.loads(setup.picture)
    _inherited.apply(picture)
    _inherited.log_to(lambda record: _trials.post(RECORD, record))
    import jax

    jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
    if not setup.devices[0].is_gpu:
        jax.config.update("jax_num_cpu_devices", max(1, int(setup.gpus)))
    _inherited.apply_changing(picture)
    _trials.open_call(pipe, "")
    _holds.opened_for_process(_holds.Hold(setup.gpus, setup.nonce, setup.devices))


def _import(names: list[str]) -> None:
    """What the keeper has imported, an exec'd worker imports too: both are the same to user code."""
    import importlib

    with warnings.catch_warnings():
        for name in names:
            try:
                importlib.import_module(name)
            except Exception:  # noqa: BLE001, S110 – the trial that needs it will say so
                pass


def _fresh_streams() -> None:
    """Streams of this process: the keeper's, after a fork, have its buffers."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        unbuffered = 0 if name == "stderr" else -1
        raw = open(descriptor, "wb", buffering=unbuffered, closefd=False)  # noqa: SIM115 – it lives as long as we do
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace", line_buffering=True, write_through=name == "stderr")
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.stdin = sys.__stdin__ = open(os.devnull, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115 – as above


def _no_breakpoint(*_: object, **__: object) -> None:
    text = (
        "breakpoint() was reached in a worker, which has no terminal. Set JAXGUARD_INLINE=1: guarded functions then "
        "run in your own process, one at a time, and the debugger works."
    )
    raise errors.JaxguardError(text)


# ---------------------------------------------------------------- jobs


class _Desk:
    """Takes jobs from the pipe, one at a time."""

    def __init__(self, setup: Setup, pipe: _frames.BlockingPipe) -> None:
        self._setup = setup
        self._pipe = pipe
        self._functions: dict[bytes, Callable[[], Callable[..., Any]]] = {}
        self._cache = _caching.Cache(setup.cache, setup.devices)

    def serve(self) -> int:
        """Serve until it is over; return the exit code."""
        while True:
            kind, data, descriptors = self._pipe.receive()
            if kind == QUIT:
                _phases.enter(_phases.ENDING)
                _trials.end()
                return 0
            if kind == CHANGED:
                self._change(data)
            elif kind == FUNCTION:
                key, packed = data[:16], data[16:]
                self._functions[key] = _once(packed, descriptors)
                if len(self._functions) > FUNCTIONS_KEPT:  # the parent forgets the same one
                    del self._functions[next(iter(self._functions))]
            else:
                job: Job = pickle.loads(data)
                exit_code = self._do(job, descriptors)
                if exit_code is not None:
                    return exit_code

    def _change(self, data: bytes) -> None:
        env, picture = pickle.loads(data)
        if env is not None:
            os.environ.clear()
            os.environ.update(env)
        if picture is not None:
            _inherited.apply(pickle.loads(picture))
            _inherited.apply_changing(pickle.loads(picture))
            self._cache.keep_quiet()

    def _do(self, job: Job, descriptors: list[int]) -> int | None:
        """Do one job and answer; return an exit code if this worker is over."""
        _phases.enter(_phases.READING)
        _trials.open_call(self._pipe, job.call)
        began = time.monotonic()
        exit_code = 0 if job.last else None
        kind: bytes = _answers.EXCEPTION
        trusted = True
        try:
            args, kwargs = _calls.unpack(job.arguments.data, descriptors)
            trusted = False  # a function that fails to arrive is sent to another worker next time
            function = self._functions[job.function]()
            trusted = True
            _phases.enter(_phases.RUNNING)
            value = function(*args, **kwargs)
            del args, kwargs
            _phases.enter(_phases.ANSWERING)
            self._check_devices()
            answer = _answers.result(value, job.name)
            kind = _answers.DONE
        except SystemExit as leaving:
            _ending.flush()
            return _exit_code(leaving)
        except BaseException as error:  # noqa: BLE001 – it is the caller's to judge
            trusted = trusted and not _is_runtime_error(error)
            answer = _answers.exception(error)
        _ending.flush()
        facts = {
            "run_s": round(time.monotonic() - began, 4),
            "trusted": trusted,
            "memory_bytes": _linux.memory_bytes(),
            "peak_memory_bytes": _peak_memory_bytes(),
            **self._cache.take_facts(),
        }
        _trials.close_call(kind, _answers.with_facts(facts, answer), last=job.last)
        _phases.enter(_phases.ENDING if job.last else _phases.IDLE)
        _descriptors.close(*answer.descriptors)
        return exit_code

    def _check_devices(self) -> None:
        """A leased GPU on which JAX did not come up is an error, not hours on the CPU."""
        if self._setup.devices[0].is_gpu and _jax_state.started():
            import jax

            if jax.default_backend() == "cpu":
                names = ", ".join(device.id for device in self._setup.devices)
                text = (
                    f"the leased GPU {names} did not come up in JAX, which ran on the CPU. See JAX's warning above, "
                    f"and whether the driver is new enough for the CUDA plugin.{_devices.versions_that_do_not_fit()}"
                )
                raise errors.NoDevices(text)


def _once(packed: bytes, descriptors: list[int]) -> Callable[[], Callable[..., Any]]:
    """Unpickle a function at its first call only: a new function object would be traced and compiled again."""
    made: list[Callable[..., Any]] = []

    def function() -> Callable[..., Any]:
        if not made:
            value = _calls.unpack(packed, descriptors)
            if isinstance(value, _calls.Reference):
                with _holds.importing(value.qualname):
                    value = value.resolve()
            made.append(value)
        return made[0]

    return function


def _exit_code(leaving: SystemExit) -> int:
    """As the interpreter does it."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    print(leaving.code, file=sys.stderr)  # noqa: T201 – as the interpreter does
    return 1


def _is_runtime_error(error: BaseException) -> bool:
    """Out of memory and its kin, after which a process is not to be trusted with another trial."""
    return type(error).__name__ in {"JaxRuntimeError", "XlaRuntimeError"} or isinstance(error, MemoryError)


def _peak_memory_bytes() -> int | None:
    """Peak memory of the devices, where the backend tells."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in _jax_state.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    return max(known) if known else None
