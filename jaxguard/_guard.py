"""The guarded call, whole: from the arguments to the result, in the order that makes it right.

Pack (what cannot travel is said before anybody waits) – keeper up – the line – the lease – the worker – serve – ended
and swept – lease closed – only then return or raise: the next call of this thread finds the slot free.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from . import (
    _asking,
    _caching,
    _dialogue,
    _environment,
    _holds,
    _inherited,
    _interrupts,
    _leases,
    _linux,
    _settings,
    _starting,
    _warm,
    _worker,
    errors,
)
from ._packing import Options, PackedCall, check_travels

logger = logging.getLogger("jaxguard")

ATTRIBUTE = "jaxguard"
"""The user attribute of each guarded trial."""
_ATTRIBUTE_VERSION = 1


def name_of(function: Callable[..., Any]) -> str:
    """What to call a function in messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def refuse_unfinished(function: object, instead: str) -> None:
    """Raise for functions whose body runs after their call has returned.

    Raises:
        TypeError: The guard would let the slot go before the work begins.
    """
    inner: Any = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    kinds: dict[str, Callable[[Any], bool]] = {
        "a generator function": inspect.isgeneratorfunction,
        "a coroutine function": inspect.iscoroutinefunction,
        "an async generator function": inspect.isasyncgenfunction,
    }
    for kind, is_one in kinds.items():
        if is_one(inner) or is_one(getattr(type(inner), "__call__", None)):  # noqa: B004 – the method itself
            text = f"{name_of(inner)} is {kind}: its body would run after the slot is let go. {instead}"
            raise TypeError(text)


def call(function: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `function(*args, **kwargs)` in a worker of its own."""
    name = name_of(function)
    if _settings.inline():
        return _inline(function, name, args, kwargs)
    if (hold := _holds.current()) is not None:
        return _nested(hold, function, options, name, args, kwargs)
    _linux.check_platform()
    with _interrupts.call(name) as running:
        _starting.warm_up()  # the keeper imports while this call packs and waits
        packed = PackedCall(name, running.roots, options, function, args, kwargs)
        try:
            found = _ask(running, options, packed)
            worker = found if isinstance(found, _dialogue.Worker) else _start_or_close(found, options, packed)
            return converse(running, options, worker, packed, keep=_keep_warm if options.reuse else _let_go)
        finally:
            packed.close()


def _ask(running: _interrupts.Call, options: Options, packed: PackedCall) -> _leases.Lease | _dialogue.Worker:
    return _asking.lease_or_warm(running, options, packed.key) if options.reuse else _asking.lease(running, options)


def _start_or_close(lease: _leases.Lease, options: Options, packed: PackedCall) -> _dialogue.Worker:
    try:
        return start(lease, options, packed)
    except BaseException:
        lease.close()
        raise


def _keep_warm(worker: _dialogue.Worker) -> None:
    """After a call: keep the worker for the next one, if it is still to be trusted."""
    if worker.ended:
        _let_go(worker)
    else:
        _warm.keep(worker)


def _let_go(worker: _dialogue.Worker) -> None:
    """After the last call of a worker: its slot is free."""
    worker.close()
    worker.lease.close()


# ---------------------------------------------------------------- without a worker of its own


_inline_turn = threading.RLock()
"""One at a time, as a debugger wants it. The one lock that is held while user code runs; it is taken first of all."""


def _inline(function: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run in this process, after making sure that all of it could have travelled."""
    check_travels(name, function, args, kwargs)
    with _inline_turn:
        return function(*args, **kwargs)


def _nested(
    hold: _holds.Hold,
    function: Callable[..., Any],
    options: Options,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run in the hold that is there, and ask for nothing: nobody waits for an ancestor."""
    _holds.refuse_while_importing(name)
    _holds.refuse_more(hold, name, options.gpus)
    asked = [word for word, is_asked in (("env", options.env), ("timeout", options.timeout < math.inf)) if is_asked]
    if asked:
        words = " and ".join(f"{word}=" for word in asked)
        text = (
            f"{name} was called inside another guarded call, gpu_slot or `with isolated_jax_worker()`, and runs "
            f"in the slot that is held there; but its guard asks for {words}, which needs a process of its own. Put "
            "that on the outer guard, or call it outside."
        )
        raise errors.JaxguardError(text)
    if hold.call is not None:
        return hold.call(function, *args, **kwargs)
    return function(*args, **kwargs)


# ---------------------------------------------------------------- the worker


def converse(
    running: _interrupts.Call,
    options: Options,
    worker: _dialogue.Worker,
    packed: PackedCall,
    *,
    keep: Callable[[_dialogue.Worker], None],
) -> Any:
    """Run a packed call in a worker; whatever happens, `keep` gets the worker afterwards."""
    began = time.monotonic()
    talk = _dialogue.Talk(running.name, running.roots, options.timeout, running.interrupted)
    try:
        worker.change(packed.env, packed.picture)
        running.end_worker = worker.kill
        if running.interrupted() is not None:  # between the slot and here
            worker.kill()
        function, arguments = packed.hand_over()
        return worker.run(talk, function, arguments, last=not options.reuse)
    finally:
        running.end_worker = None
        try:
            _record(running, worker, talk, time.monotonic() - began)
        finally:
            keep(worker)


def start(lease: _leases.Lease, options: Options, packed: PackedCall) -> _dialogue.Worker:
    """Start a worker on a lease."""
    cores = _environment.cores_of(lease.devices, options.gpus, options.cpus, lease.offset)
    lease_env = {
        **_environment.variables(lease.devices, options.gpus),
        **_environment.memory_variables(lease.devices, options.gpus, packed.env),
        _settings.HOLD: lease.nonce,
    }
    if "PJRT_NPROC" not in packed.env:
        lease_env["PJRT_NPROC"] = str(len(cores))
    setup = _worker.Setup(
        env=packed.env | lease_env,
        path=_inherited.search_path(),
        cores=cores,
        gpus=options.gpus,
        devices=lease.devices,
        nonce=lease.nonce,
        preload=_starting.preload(),
        picture=packed.picture,
        cache=packed.cache,
    )
    return _dialogue.Worker(lease, packed.key, packed.at_import, setup, lease_env)


def _record(running: _interrupts.Call, worker: _dialogue.Worker, talk: _dialogue.Talk, run_s: float) -> None:
    """Leave in each trial how its run went, whether it succeeded or not."""
    _caching.learn((running.roots.study_name, running.name), talk.facts)
    for trial in running.roots.trials:
        lease, facts = worker.lease, talk.facts
        value = {
            "version": _ATTRIBUTE_VERSION,
            "host": socket.gethostname(),
            "pid": worker.pid,
            "devices": [device.id for device in lease.devices],
            "share": round(lease.share, 4),
            "waited_s": round(lease.waited_s, 4),
            "run_s": facts.get("run_s", round(run_s, 4)),
            **{name: facts[name] for name in _COUNTED if facts.get(name) is not None},
        }
        try:
            trial.set_user_attr(ATTRIBUTE, value)
        except Exception:
            logger.debug("the attribute %r of trial %s could not be set", ATTRIBUTE, trial, exc_info=True)


_COUNTED = ("compiles", "compile_s", "cache_hits", "saved_s", "programs", "other_programs", "peak_memory_bytes")
