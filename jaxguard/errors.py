"""What can go wrong, in words: every error that jaxguard raises on purpose.

A message says *the fact with its numbers – who or why – what to do*. The fields repeat its facts for programs. Every
error pickles with its fields, and is caught by its built-in parent where it has one.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "ForkedAfterJax",
    "JaxAlreadyStarted",
    "JaxguardError",
    "NoDevices",
    "RemoteError",
    "SlotTimeout",
    "WorkerDied",
    "WorkerTimeout",
]


class JaxguardError(Exception):
    """Parent of all errors that jaxguard raises on purpose.

    Args:
        message: The whole text that a person reads.
        **fields: The facts of the message under the names that the class declares.
    """

    def __init__(self, message: str = "", /, **fields: Any) -> None:
        super().__init__(message)
        unknown = [name for name in fields if not hasattr(type(self), name)]
        if unknown:
            text = f"{type(self).__name__} has no field {unknown[0]!r}"
            raise TypeError(text)
        self.__dict__.update(fields)

    def __reduce__(self) -> tuple[Any, ...]:
        # Not the default: an OSError among the parents would read two arguments as an error number.
        fields = {name: value for name, value in self.__dict__.items() if hasattr(type(self), name)}
        notes = {"__notes__": self.__notes__} if hasattr(self, "__notes__") else None
        return _rebuild, (type(self), str(self), fields), notes


def _rebuild(cls: type[JaxguardError], message: str, fields: dict[str, Any]) -> JaxguardError:
    return cls(message, **fields)


class SlotTimeout(JaxguardError, TimeoutError):
    """No slot came free within `slot_timeout`."""

    waited_s: float | None = None
    """How long the call waited, in seconds."""
    holders: tuple[int, ...] = ()
    """Process ids of those who held the slots at the end of the wait, the oldest first."""


class NoDevices(JaxguardError):
    """This host offers this process no device of the kind that was asked for."""


class WorkerDied(JaxguardError):
    """A worker ended without an answer: it was killed, crashed, or left by `sys.exit`."""

    pid: int | None = None
    """Process id of the worker, as its host counts."""
    exit_code: int | None = None
    """What the worker gave to `exit`, if it left by itself."""
    signal: int | None = None
    """Number of the signal that ended the worker, if one did."""
    output: str = ""
    """The last lines that the worker wrote to its stderr and stdout."""
    trial: int | None = None
    """Number of the trial that it ran, if it ran one."""
    devices: tuple[str, ...] = ()
    """The devices that it held, as `jaxguard slots` names them."""
    phase: str = ""
    """What it did at last, such as `"running"` or `"compiling step for 3.1 s"`."""


class WorkerTimeout(JaxguardError, TimeoutError):
    """A call ran longer than `timeout` and was ended."""

    pid: int | None = None
    """Process id of the worker, as its host counts."""
    timeout_s: float | None = None
    """The limit, in seconds."""
    stacks: str = ""
    """Where each thread of the worker was at that moment."""
    trial: int | None = None
    """Number of the trial that it ran, if it ran one."""
    devices: tuple[str, ...] = ()
    """The devices that it held, as `jaxguard slots` names them."""
    phase: str = ""
    """What it did at that moment, such as `"running"` or `"compiling step for 3.1 s"`."""


class JaxAlreadyStarted(JaxguardError):
    """JAX has started in this process on other devices than those that were asked for."""


class ForkedAfterJax(JaxguardError):
    """This process was forked from one in which JAX had started, so JAX must not be used here."""


class RemoteError(JaxguardError):
    """Stands for an exception of a worker that could not travel."""

    type: str = ""
    """Qualified name of the exception's class."""
    text: str = ""
    """What `str` of the exception gave."""
    traceback: str = ""
    """The traceback, as the worker would have printed it."""


for _name in __all__:
    globals()[_name].__module__ = "jaxguard"  # users see, and pickles name, the public place
del _name
