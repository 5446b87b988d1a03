"""What the parent had set is in force in the worker.

Environment, working directory, `sys.path`, `sys.argv`, JAX settings changed by hand, loggers' levels, warnings
filters, Hydra's state, `multiprocessing`'s start method and key. Not: the platform, the visible devices, memory and
the default device, which come from the lease. Log records and warnings travel the other way: the parent handles them
as if they had been made there.
"""

from __future__ import annotations

import builtins
import logging
import multiprocessing
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any

from . import _calls

_NOT_CARRIED = (
    "jax_platforms",
    "jax_platform_name",
    "jax_default_device",
    "jax_num_cpu_devices",
    "jax_cuda",
    "jax_rocm",
    "jax_compilation_cache",
    "jax_enable_compilation_cache",
    "jax_persistent_cache",
)
"""JAX settings, by prefix, that belong to the lease, or that each worker reads from its environment."""
_to_parent: Callable[[bytes], None] | None = None
_to_parent_pid = 0


def capture() -> dict[str, Any]:
    """Take a picture of this process, for a worker that begins now."""
    return {
        "cwd": _cwd(),
        "path": search_path(),
        "argv": list(sys.argv),
        "start_method": multiprocessing.get_start_method(allow_none=True),
        "authkey": bytes(multiprocessing.current_process().authkey),
        **changing(),
    }


def changing() -> dict[str, Any]:
    """The part of the picture that is taken again for each call of a warm worker."""
    return {
        "jax": _jax_config(),
        "levels": _levels(),
        "captures_warnings": getattr(warnings.showwarning, "__module__", "") == "logging",
        "warnings": _warning_filters(),
        "hydra": _hydra(),
    }


def search_path() -> list[str]:
    """`sys.path` as another process can use it: the import system itself passes over what is no text."""
    entries: list[object] = list(sys.path)
    return [entry or _cwd() for entry in entries if isinstance(entry, str)]


def apply(picture: dict[str, Any]) -> None:
    """Make a picture true here, before any user code runs."""
    try:
        os.chdir(picture["cwd"])
    except OSError:  # removed meanwhile: the parent could not use it either
        pass
    sys.path[:] = picture["path"]
    sys.argv[:] = picture["argv"]
    _like_a_main_process(picture["start_method"], picture["authkey"])


def apply_changing(picture: dict[str, Any]) -> None:
    """Make the changing part true here."""
    _apply_jax(picture["jax"])
    _apply_levels(picture["levels"])
    logging.captureWarnings(picture["captures_warnings"])
    if not picture["captures_warnings"]:
        warnings.showwarning = _warning_to_parent
    if picture["hydra"] is not None:  # before the filters: what its import warns of is not the user's doing
        _apply_hydra(picture["hydra"])
    _apply_warning_filters(picture["warnings"])


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def _warning_filters() -> list[tuple[str, str, str, str, int]]:
    return [
        (action, _pattern(message), _full_name(category), _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _full_name(category: Any) -> str:
    return f"{category.__module__}:{category.__name__}"  # a class that travels by value loses its __qualname__


def _pattern(text: Any) -> str:
    if text is None:
        return ""
    return (
        text
        if isinstance(text, str) and not text
        else rf"{re.escape(text)}\Z"
        if isinstance(text, str)
        else text.pattern
    )


def _apply_warning_filters(filters: list[tuple[Any, str, str, str, int]]) -> None:
    warnings.resetwarnings()
    for action, message, name, module, line in filters:
        warnings.filterwarnings(action, message, _category(name), module, line, append=True)


class _ByName(type):
    """A category that stands for the one of its name: no worker imports a library because the parent filters it."""

    stands_for = ""

    def __subclasscheck__(cls, subclass: type) -> bool:
        return any(_full_name(base) == cls.stands_for for base in subclass.__mro__)


def _category(name: str) -> type[Warning]:
    module, _, qualname = name.partition(":")
    if module == "builtins":
        return getattr(builtins, qualname)  # type: ignore[no-any-return]
    named: Any = _ByName("_ByName", (Warning,), {"stands_for": name})
    return named  # type: ignore[no-any-return]


def _known_category(names: list[str]) -> type[Warning]:
    """The category of a worker's warning, or the nearest of its bases that is known here."""
    known: dict[str, type[Warning]] = {}
    todo: list[type[Warning]] = [Warning]
    while todo:
        category = todo.pop()
        known[_full_name(category)] = category
        todo += category.__subclasses__()
    return next((known[name] for name in names if name in known), Warning)


# ---------------------------------------------------------------- JAX


def _jax_config() -> dict[str, Any]:
    """JAX's settings as the calling thread sees them; empty where JAX was not imported."""
    jax = sys.modules.get("jax")
    if jax is None:
        return {}
    settings = {}
    for name in jax.config.values:
        value = getattr(jax.config, name, None)
        if _simple(value) and not name.startswith(_NOT_CARRIED):
            settings[name] = value
    return settings


def _apply_jax(settings: dict[str, Any]) -> None:
    import jax

    for name, value in settings.items():
        if getattr(jax.config, name, value) == value:
            continue
        try:
            jax.config.update(name, value)
        except Exception:  # noqa: BLE001 – one that cannot change any more, or that this version does not know
            logging.getLogger("jaxguard").debug("jax.config.%s=%r could not be set in the worker", name, value)


# ---------------------------------------------------------------- logging


class _ToParent(logging.Handler):
    """Sends records to the parent."""

    def emit(self, record: logging.LogRecord) -> None:
        if _to_parent is None or os.getpid() != _to_parent_pid:
            logging.lastResort.handle(record)  # type: ignore[union-attr]  # a child process of the worker: as without handlers
            return
        try:
            fields = dict(record.__dict__, msg=record.getMessage(), args=None)
            if record.exc_info:
                fields["exc_text"] = record.exc_text or logging.Formatter().formatException(record.exc_info)
                fields["exc_info"] = None
            _to_parent(pickle.dumps({name: value for name, value in fields.items() if _simple(value)}))
        except Exception:  # noqa: BLE001 – as all handlers do
            self.handleError(record)


def _simple(value: object) -> bool:
    return value is None or isinstance(value, str | int | float | bool)


def log_to(send: Callable[[bytes], None]) -> None:
    """Send each record and warning of this worker through `send`, and print none here."""
    global _to_parent, _to_parent_pid
    _to_parent, _to_parent_pid = send, os.getpid()
    for logger in _loggers():
        logger.handlers.clear()
        logger.propagate = True
    logging.getLogger().handlers[:] = [_ToParent()]


def _warning_to_parent(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: Any = None,
    line: str | None = None,
) -> None:
    """Stands for `warnings.showwarning`: the parent shows it, or catches it, or has shown it before."""
    if _to_parent is not None and file is None and os.getpid() == _to_parent_pid:
        names = [_full_name(base) for base in category.__mro__]
        _to_parent(pickle.dumps((str(message), names, filename, lineno)))
        return
    stream = sys.stderr if file is None else file
    stream.write(warnings.formatwarning(message, category, filename, lineno, line))


_shown: dict[Any, Any] = {}
"""The registry of `warnings` for those of workers: many workers warn of one place, and one line is enough."""


def handle(data: bytes) -> None:
    """Let a worker's log record or warning be handled here as if it had been made here."""
    news = pickle.loads(data)
    if isinstance(news, tuple):
        message, names, filename, lineno = news
        category = _known_category(names)
        try:
            warnings.warn_explicit(message, category, filename, lineno, registry=_shown)
        except Warning:  # a filter that became "error" since the call began: the trial is worth more
            warnings.showwarning(message, category, filename, lineno)
        return
    record = logging.makeLogRecord(news)
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


def _loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logger for logger in known if isinstance(logger, logging.Logger)]


def _levels() -> dict[str, tuple[int, bool]]:
    levels = {logger.name: (logger.level, logger.disabled) for logger in _loggers() if logger.level or logger.disabled}
    return levels | {"": (logging.getLogger().level, False), "/": (logging.root.manager.disable, False)}


def _apply_levels(levels: dict[str, tuple[int, bool]]) -> None:
    for logger in _loggers():
        if logger.name not in levels:
            logger.setLevel(logging.NOTSET)
            logger.disabled = False
    for name, (level, disabled) in levels.items():
        if name == "/":
            logging.disable(level)
        else:
            logging.getLogger(name).setLevel(level)
            logging.getLogger(name).disabled = disabled


# ---------------------------------------------------------------- Hydra, multiprocessing


def _hydra() -> bytes | None:
    """Hydra's state, where it has one: being imported, by pytest's plugin for one, is none."""
    known = (("hydra.core.global_hydra", "GlobalHydra"), ("hydra.core.hydra_config", "HydraConfig"))
    if not any(_initialized(getattr(sys.modules.get(module), name, None)) for module, name in known):
        return None
    from hydra.core.singleton import Singleton

    try:
        return _calls.pack(Singleton.get_state(), plain=True).data
    except Exception:  # noqa: BLE001 – a plugin's state that cannot travel: the trial goes on without Hydra's state
        return None


def _initialized(singleton: Any) -> bool:
    if singleton is None:
        return False
    asked = getattr(singleton, "initialized", None) or singleton.instance().is_initialized
    return bool(asked())


def _apply_hydra(state: bytes) -> None:
    from hydra.core.singleton import Singleton
    from hydra.core.utils import setup_globals

    setup_globals()
    Singleton.set_state(_calls.unpack(state, []))


def _like_a_main_process(start_method: str | None, authkey: bytes) -> None:
    """Let `multiprocessing` see a program of its own, not a child of the keeper.

    A trial may use pools and data loaders as if it ran alone: its start method is the parent's (or the default, where
    the parent's is loky's, which no grandchild knows), and it may have children.
    """
    known = multiprocessing.get_all_start_methods()
    multiprocessing.set_start_method(start_method if start_method in known else None, force=True)
    process = multiprocessing.current_process()
    process.name = "MainProcess"
    process.authkey = authkey
    own = process.__dict__
    own.update(_identity=(), _parent_pid=None, _popen=None)
    own["_config"] = {"authkey": process.authkey, "semprefix": "/mp"}
    vars(multiprocessing.process).update(_parent_process=None)
    vars(multiprocessing.process).get("_children", set()).clear()
