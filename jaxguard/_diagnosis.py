"""Why a call cannot travel, or only with a heavy load, in words: which variable of which function, and what to do."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from . import _calls, _descriptors

_DEPTH = 4
_INSTEAD = (
    ("Mesh", "Build the Mesh inside the guarded function: it names devices, and the worker has its own."),
    ("Sharding", "Build the sharding inside the guarded function: it names devices, and the worker has its own."),
    ("Compiled", "Let the function travel instead of its executable (jax.jit or trial_jit): the worker compiles it."),
    ("Lowered", "Let the function travel instead of its lowering (jax.jit or trial_jit): the worker lowers it."),
    ("Device", "Ask for devices inside the guarded function (jax.devices()): the worker has its own."),
    ("Tracer", "Call the guarded function outside of jax.jit, grad and vmap: a tracer has no value to send."),
    ("Connection", "Open connections inside the guarded function."),
    ("TextIOWrapper", "Open the file inside the guarded function, and pass its path."),
    ("Buffered", "Open the file inside the guarded function, and pass its path."),
    ("lock", "Make the lock inside the guarded function, or use a lock file: processes share no thread lock."),
    ("generator", "Pass a list, or make the generator inside the guarded function."),
)


class Arguments(NamedTuple):
    """The arguments of a call, under the names that the function has for them."""

    named: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        try:
            return cls(dict(inspect.signature(function).bind(*args, **kwargs).arguments))
        except (TypeError, ValueError):  # the call itself will say what is wrong with them
            return cls({str(index): value for index, value in enumerate(args)} | kwargs)


def explain(suspect: Any, name: str, error: BaseException, replace: Callable[[object], Any]) -> str:
    """Say what of a function, or of its `Arguments`, cannot be pickled."""
    where, value = _find(suspect, name, replace)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    advice = _advice(value) or "Make it inside the guarded function, or pass what it is made from."
    return f"{name} cannot travel to a worker: {where} is a {kind}, which cannot be pickled ({error}). {advice}"


def explain_weight(function: Callable[..., Any], name: str, size: int, replace: Callable[[object], Any]) -> str:
    """Say what makes a function that travels by value so large."""
    where, value = name, function
    for _ in range(_DEPTH):
        heaviest = max(
            ((_weight(part, replace), label, part) for label, part in _parts(value, where)), default=None, key=_first
        )
        if heaviest is None or heaviest[0] < size / 2:
            break
        _, where, value = heaviest
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    what = f", most of it {where}, a {kind}," if value is not function else ""
    return (
        f"{name} carries {size / 1e6:.0f} MB{what} to each worker, because it captures that by value. Large arrays are "
        "written once and compared at each call, anything else is copied at each call. Load the data inside the "
        "function, or keep it in a module that workers import."
    )


def _first(found: tuple[int, str, Any]) -> int:
    return found[0]


def _weight(value: Any, replace: Callable[[object], Any]) -> int:
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    try:
        packed = _calls.pack(value, plain=False, replace=replace)
    except Exception:  # noqa: BLE001 – a user's __reduce__ may raise anything
        return 0
    size = packed.size
    _descriptors.close(*packed.descriptors)
    return size


def _advice(value: Any) -> str | None:
    names = [cls.__name__ for cls in type(value).__mro__]
    return next((advice for word, advice in _INSTEAD if any(word in name for name in names)), None)


def _travels(value: Any, replace: Callable[[object], Any]) -> bool:
    try:
        packed = _calls.pack(value, plain=False, replace=replace)
    except Exception:  # noqa: BLE001 – a user's __reduce__ may raise anything
        return False
    _descriptors.close(*packed.descriptors)
    return True


def _find(suspect: Any, name: str, replace: Callable[[object], Any]) -> tuple[str, Any]:
    """Go down to the smallest part that cannot travel, or to the first for which there is advice."""
    where, value, parts = name, suspect, list(_parts(suspect, name))
    for _ in range(_DEPTH):
        bad = next(((label, part) for label, part in parts if not _travels(part, replace)), None)
        if bad is None:
            break
        where, value = bad
        if _advice(value) is not None:
            break
        parts = list(_parts(value, where))
    return where, value


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """What a value carries, with words for each part."""
    if isinstance(value, Arguments):
        yield from ((f"argument {key!r} of {name}", part) for key, part in value.named.items())
    elif isinstance(value, functools.partial):
        yield f"the function of {name}", value.func
        yield from ((f"argument {index} of {name}", part) for index, part in enumerate(value.args))
        yield from ((f"argument {key}= of {name}", part) for key, part in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield f"the object of {name}", value.__self__
    elif isinstance(value, types.FunctionType):
        label = f"function {value.__qualname__}"
        try:
            found = inspect.getclosurevars(value)
        except ValueError:  # a cell that is still empty
            return
        yield from ((f"variable {key!r} of {label}", part) for key, part in found.nonlocals.items())
        yield from ((f"global variable {key!r} of {label}", part) for key, part in found.globals.items())
        for parameter in inspect.signature(value).parameters.values():
            if parameter.default is not parameter.empty:
                yield f"default of {parameter.name!r} in {label}", parameter.default
    elif isinstance(value, dict):
        yield from ((f"entry {key!r} of {name}", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"entry {index} of {name}", part) for index, part in enumerate(value))
    elif hasattr(value, "__wrapped__"):
        yield name, value.__wrapped__
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, type | types.ModuleType):
        yield from ((f"attribute {key!r} of {name}", part) for key, part in vars(value).items())
