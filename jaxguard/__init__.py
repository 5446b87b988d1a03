"""Guards for parallel trials with JAX: one GPU for one process, one clean process for one trial.

Importing this package imports nothing heavy; each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._devices import slot_count
    from ._gpu_slot import gpu_slot
    from ._isolated_worker import isolated_jax_worker
    from ._report import compile_report
    from ._trial_jit import trial_jit
    from .errors import (
        ForkedAfterJax,
        JaxAlreadyStarted,
        JaxguardError,
        NoDevices,
        RemoteError,
        SlotTimeout,
        WorkerDied,
        WorkerTimeout,
    )

__all__ = [
    "ForkedAfterJax",
    "JaxAlreadyStarted",
    "JaxguardError",
    "NoDevices",
    "RemoteError",
    "SlotTimeout",
    "WorkerDied",
    "WorkerTimeout",
    "compile_report",
    "gpu_slot",
    "isolated_jax_worker",
    "slot_count",
    "trial_jit",
]

__version__ = "0.1.0"

_HOMES = {
    "compile_report": "_report",
    "gpu_slot": "_gpu_slot",
    "isolated_jax_worker": "_isolated_worker",
    "slot_count": "_devices",
    "trial_jit": "_trial_jit",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f".{_HOMES.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
