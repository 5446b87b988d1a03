"""The trial stays where it is; the worker has a path to it.

An `optuna.Trial` (or `Study`) found among arguments and captures is replaced, on its way, by its number among the
*roots* of the call. In the worker stands a `Remote`: it knows the way from a root (`study`, `pruner`, ...) and sends
each access back over the call's pipe, where the study's own thread serves it on the real object. So every sampler,
pruner and storage works, and nothing is a silent copy.

    worker                                   the study's thread
    trial.suggest_float("lr", 0, 1)  --R-->  roots[0].suggest_float("lr", 0, 1)
                                     <--A--  (True, 0.42)
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from . import _calls, _descriptors, _exceptions, _frames

Path = tuple[str, ...]
_ENDED = "this trial belongs to a call that has ended: keep no trial between calls"


# ---------------------------------------------------------------- in the parent


class Roots:
    """The real objects of one call."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.objects: list[Any] = []
        self._study_name: str | None = None

    @property
    def trials(self) -> list[Any]:
        return [root for root in self.objects if isinstance(root, sys.modules["optuna"].trial.Trial)]

    @property
    def study_name(self) -> str | None:
        """The study of the first trial; looked up once, as it may be in a database."""
        if self._study_name is None and (trial := next(iter(self.trials), None)) is not None:
            self._study_name = str(trial.study.study_name)
        return self._study_name

    def replace(self, obj: object) -> Any:
        """The reduction of an object that stays here, for `_calls.pack`."""
        if type(obj) is Remote:
            return _remote, _place(obj)
        optuna = sys.modules.get("optuna")
        if optuna is None or not isinstance(obj, (optuna.trial.Trial, optuna.study.Study)):
            return None
        for index, root in enumerate(self.objects):
            if root is obj:
                break
            if isinstance(root, optuna.trial.Trial) and root.study is obj:
                return _remote, (self.call, index, ("study",), False)
        else:
            index = len(self.objects)
            self.objects.append(obj)
        return _remote, (self.call, index, (), isinstance(obj, optuna.trial.Trial))

    def serve(self, frame: _frames.Frame) -> _calls.Packed:
        """Do what the worker asks on the real object; the answer says its number, and what came of it."""
        number = -1
        try:
            with _resolving(self):
                number, call, index, path, verb, args, kwargs = _calls.unpack(frame.data, frame.descriptors)
            target = self._walk(call, index, path)
            if verb == "call":
                answer = target(*args, **kwargs)
                _refuse_resident(answer, path)
                return _calls.pack((number, True, answer), plain=True)
            if verb == "set":
                setattr(target, *args)
                return _calls.pack((number, True, None), plain=True)
            if isinstance(target, (types.MethodType, types.FunctionType, types.BuiltinMethodType)):
                return _calls.pack((number, True, METHOD), plain=True)
            if _stays(target):
                return _calls.pack((number, True, _At(path)), plain=True)
            return _calls.pack((number, True, target), plain=True)
        except Exception as error:  # noqa: BLE001 – it is the objective's to catch
            return _calls.pack((number, False, _exceptions.pack(error)), plain=True)

    def _walk(self, call: str, index: int, path: Path) -> Any:
        if call != self.call:
            raise RuntimeError(_ENDED)
        target = self.objects[index]
        for name in path:
            target = getattr(target, name)
        return target


def _stays(obj: object) -> bool:
    """Say whether an object is part of the study's machinery, of which a copy would be worthless."""
    optuna = sys.modules["optuna"]
    kinds = (
        optuna.trial.Trial,
        optuna.study.Study,
        optuna.samplers.BaseSampler,
        optuna.pruners.BasePruner,
        optuna.storages.BaseStorage,
    )
    return isinstance(obj, kinds)


def _refuse_resident(obj: object, path: Path) -> None:
    if _stays(obj):
        text = f"{'.'.join(path)}() gives a {type(obj).__name__}, which stays in the study's process: call it there"
        raise TypeError(text)


_context = threading.local()


@contextmanager
def _resolving(roots: Roots) -> Iterator[None]:
    _context.roots = roots
    try:
        yield
    finally:
        del _context.roots


# ---------------------------------------------------------------- in the worker


class _Method:
    """Says that the thing at a path is called, not read."""

    def __reduce__(self) -> str:
        return "METHOD"


METHOD = _Method()


class _At:
    """Says that the thing at a path stays there."""

    def __init__(self, path: Path) -> None:
        self.path = path


_turn = threading.Lock()
"""Whoever uses the pipe has it, from the request to the answer: an objective may use its trial from several threads."""
_pipe: _frames.BlockingPipe | None = None
_call = ""
_pid = 0
_methods: set[tuple[str, Path]] = set()
_posted: deque[tuple[bytes, bytes]] = deque(maxlen=10_000)
_numbers = itertools.count()
_cut_off = False
_listening = False
"""Whether the parent reads the pipe at this moment."""


def open_call(pipe: _frames.BlockingPipe, call: str) -> None:
    """From now on, remote objects of this call may use the pipe, and what is posted is sent."""
    global _pipe, _call, _pid, _listening
    with _turn:
        _pipe, _call, _pid, _listening = pipe, call, os.getpid(), True
    _send_posted()


def close_call(kind: bytes, answer: _calls.Packed, *, last: bool) -> None:
    """Send the call's answer; no thread that it left behind uses the trial after it.

    What is posted later waits for the next call, unless this was the last: then the parent listens to the end.
    """
    global _call, _listening
    _send_posted()
    with _turn:
        _call, _listening = "", last
        if _pipe is not None:
            _send(_pipe, kind, answer)


def _send(pipe: _frames.BlockingPipe, kind: bytes, packed: _calls.Packed) -> None:
    """Send a frame whole, or never another one.

    Raises:
        Closed: If an earlier one was cut off in the middle, because a signal handler of the objective raised.
    """
    global _cut_off  # noqa: PLW0603 – see open_call
    if _cut_off:
        raise _frames.Closed("a signal handler raised while this worker was sending, so the line cannot be used again")
    _cut_off = True
    pipe.send(kind, packed.data, packed.descriptors)
    _cut_off = False


def end() -> None:
    """The parent listens until this process is gone: what is posted is sent."""
    global _listening  # noqa: PLW0603 – see open_call
    _listening = True
    _send_posted()


def post(kind: bytes, data: bytes) -> None:
    """Send a frame that wants no answer, now or as soon as the pipe is free; never wait for it.

    Never: a log record may be made anywhere, also by a finalizer that the garbage collector runs in the thread that
    has the pipe at this moment. In a child process of the worker there is no pipe: it prints as any program does.
    """
    if os.getpid() == _pid:
        _posted.append((kind, data))
        _send_posted()


def _send_posted() -> None:
    """Send what was posted, unless another thread has the pipe: that one sends it then."""
    while _posted and _listening and _turn.acquire(blocking=False):
        try:
            while _posted and _pipe is not None:
                kind, data = _posted.popleft()
                _send(_pipe, kind, _calls.Packed(data, []))
        finally:
            _turn.release()


def _answer(pipe: _frames.BlockingPipe, number: int) -> tuple[bool, Any]:
    while True:
        frame = pipe.receive()
        answered, good, value = _calls.unpack(frame.data, frame.descriptors)
        if answered == number:  # else one that nobody waits for any more: a signal handler had raised
            return good, value


def _ask(call: str, index: int, path: Path, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if os.getpid() != _pid:
        raise RuntimeError(
            "a trial can be used in the worker itself (from all its threads), not in its child processes"
        )
    plain_args = tuple(map(_calls.without_jax, args))
    plain_kwargs = {name: _calls.without_jax(value) for name, value in kwargs.items()}
    number = next(_numbers)
    request = _calls.pack((number, call, index, path, verb, plain_args, plain_kwargs), plain=True)
    try:
        with _turn:
            if _pipe is None or not call or call != _call:
                raise RuntimeError(_ENDED)
            _send(_pipe, b"R", request)
            good, value = _answer(_pipe, number)
    finally:
        _descriptors.close(*request.descriptors)
    _send_posted()
    if not good:
        raise _exceptions.unpack(value)
    return value


class Remote:
    """Stands in the worker for a trial, a study or a part of them."""

    __slots__ = ("_jaxguard_place",)

    def __init__(self, call: str, index: int, path: Path, is_trial: bool) -> None:  # noqa: FBT001 – pickled
        object.__setattr__(self, "_jaxguard_place", (call, index, path, is_trial))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        # isinstance(trial, optuna.Trial) holds, as in an unguarded objective.
        optuna = sys.modules.get("optuna")
        _, _, path, is_trial = _place(self)
        if optuna is None:
            return Remote
        if is_trial and not path:
            return optuna.trial.Trial
        return optuna.study.Study if path in {(), ("study",)} else Remote

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        call, index, path, is_trial = _place(self)
        there = (*path, name)
        key = ("trial" if is_trial else "study", there)
        if key not in _methods:
            value = _ask(call, index, there, "get", (), {})
            if type(value) is _At:
                return Remote(call, index, value.path, is_trial)
            if type(value) is not _Method:
                return value
            _methods.add(key)

        def method(*args: Any, **kwargs: Any) -> Any:
            return _ask(call, index, there, "call", args, kwargs)

        method.__name__ = method.__qualname__ = name
        return method

    def __setattr__(self, name: str, value: Any) -> None:
        call, index, path, _ = _place(self)
        _ask(call, index, path, "set", (name, value), {})

    def __eq__(self, other: object) -> bool:
        return type(other) is Remote and _place(self) == _place(other)

    def __hash__(self) -> int:
        return hash(_place(self))

    def __repr__(self) -> str:
        _, index, path, is_trial = _place(self)
        return f"<{'.'.join(('trial' if is_trial else 'study', *path))} {index} of the study's process>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _remote, _place(self)


def _place(remote: Any) -> Any:
    return object.__getattribute__(remote, "_jaxguard_place")


def _remote(call: str, index: int, path: Path, is_trial: bool) -> Any:  # noqa: FBT001 – pickled
    """Rebuild: in the parent that serves it, a remote object is the real one again."""
    roots: Roots | None = getattr(_context, "roots", None)
    if roots is not None and roots.call == call:
        return roots._walk(call, index, path)  # noqa: SLF001 – same module
    return Remote(call, index, path, is_trial)
