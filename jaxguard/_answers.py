"""What a worker answers: the facts of the run, and a result or an exception."""

from __future__ import annotations

import pickle
from typing import Any

from . import _calls, _exceptions, _frames, _linux, errors

DONE, EXCEPTION = b"D", b"X"
_TRAVELS = "Return arrays, numbers, text, and containers or importable classes of them."


def result(value: object, name: str) -> _calls.Packed:
    """Pack what a function returned.

    Raises:
        TypeError: If it cannot be pickled.
    """
    try:
        return _calls.pack(value, plain=True)
    except Exception as error:
        if _linux.is_a_users(error):
            raise
        text = f"the result of {name}, of type {type(value).__name__}, cannot travel to the caller: {error}. {_TRAVELS}"
        raise TypeError(text) from error


def exception(error: BaseException) -> _calls.Packed:
    """Pack what a function raised."""
    return _calls.Packed(_exceptions.pack(error), [])


def with_facts(facts: dict[str, Any], answer: _calls.Packed) -> _calls.Packed:
    """Send the facts of the run along."""
    return answer._replace(data=_frames.join(pickle.dumps(facts), answer.data))


def facts_of(frame: _frames.Frame) -> dict[str, Any]:
    """The facts that came with an answer."""
    facts: dict[str, Any] = pickle.loads(_frames.split(frame.data)[0])
    return facts


def take(frame: _frames.Frame, name: str) -> Any:
    """Return the result of an answer, or raise its exception.

    Raises:
        RemoteError: If the result cannot be unpickled here.
    """
    body = _frames.split(frame.data)[1]
    if frame.kind == EXCEPTION:
        raise _exceptions.unpack(body)
    try:
        return _calls.unpack(body, frame.descriptors)
    except Exception as error:
        if _linux.is_a_users(error):
            raise
        kind = type(error).__name__
        text = f"the result of {name} travelled, but cannot be unpickled here: {kind}: {error}. {_TRAVELS}"
        raise errors.RemoteError(text, type=kind, text=str(error)) from error
