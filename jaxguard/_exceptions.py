"""How an exception of a worker reaches the caller: as itself where it survives the way, else as RemoteError."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
import traceback
from typing import Any

from . import _calls, errors


class WorkerTraceback(Exception):
    """Shows the worker's traceback above the exception that was raised from it."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


def pack(error: BaseException) -> bytes:
    """Pickle an exception with its text, whatever it is."""
    name = f"{type(error).__module__}.{type(error).__qualname__}"
    facts = name, _text(error), _trace(error)
    return pickle.dumps((_survivor(error), facts))


def _trace(error: BaseException) -> str:
    """The traceback from the user's first frame on."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("jaxguard._"):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames)).rstrip()


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 – a user's __str__
        return f"<its __str__ raised {type(broken).__name__}>"


def _survivor(error: BaseException) -> bytes | None:
    """The pickled exception, if what comes out at the other end says the same."""
    try:
        packed = _calls.pack(error.with_traceback(None), plain=True, large=sys.maxsize)
        again = _calls.unpack(packed.data, [])
        same = type(again) is type(error) and str(again) == str(error) and len(again.args) == len(error.args)
    except Exception:  # noqa: BLE001 – whatever a class does when it is pickled, RemoteError does it better
        return None
    return packed.data if same else None


def _is_a_job_in_another_process() -> bool:
    """Say whether Hydra's joblib launcher runs this: it pickles a job's exception, which loses its cause on the way."""
    hydra = sys.modules.get("hydra.core.hydra_config")
    return (
        hydra is not None
        and bool(hydra.HydraConfig.initialized())
        and multiprocessing.current_process().name != "MainProcess"
    )


def unpack(data: bytes | memoryview) -> BaseException:
    """Undo `pack`; the result has the worker's traceback as its cause."""
    pickled, (name, text, trace) = pickle.loads(data)
    error: Any = None
    if pickled is not None:
        try:
            error = _calls.unpack(pickled, [])
        except Exception:  # noqa: BLE001 – imports that work in the worker and not here, say
            error = None
    if not isinstance(error, BaseException):
        message = f"the worker raised {name}: {text}. It could not travel here as itself; its traceback is shown above."
        error = errors.RemoteError(message, type=name, text=text, traceback=trace)
    error.__cause__ = WorkerTraceback(f"In the worker:\n{trace}")
    if _is_a_job_in_another_process():
        error.add_note(f"In the worker:\n{trace}")
    return error  # type: ignore[no-any-return]
