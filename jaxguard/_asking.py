"""Asking for a slot: what a guard was told becomes a request, waits in the line, and comes back as a lease."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from . import (
    _devices,
    _dialogue,
    _environment,
    _holds,
    _in_force,
    _interrupts,
    _jax_state,
    _leases,
    _line,
    _shares,
    _warm,
    errors,
)
from ._gpus import Device
from ._packing import Options

logger = logging.getLogger("jaxguard")

Found = TypeVar("Found", bound=_leases.Lease | _dialogue.Worker)

_warned = False


def lease(running: _interrupts.Call, options: Options) -> _leases.Lease:
    """Wait for a slot for a worker, and take it."""
    request = _request(running, options)
    return _queue(running, options, request, lambda devices: _leases.try_take(devices, request.take, request.units))


def lease_here(running: _interrupts.Call, options: Options, ours: Callable[[], _leases.Lease | None]) -> _leases.Lease:
    """Wait for a slot for this process, or until `ours` gives one that this process has already, and take it."""
    request = _request(running, options, for_this_process=True)

    def attempt(devices: tuple[Device, ...]) -> _leases.Lease | None:
        taken = _leases.try_take(devices, request.take, request.units, for_this_process=True)
        if taken is not None:
            taken.gpus = request.gpus
        return taken

    return _queue(running, options, request, attempt, ours)


def lease_or_warm(running: _interrupts.Call, options: Options, key: Hashable) -> _leases.Lease | _dialogue.Worker:
    """Take the warm worker that fits and the slot it has, or wait for either."""
    request = _request(running, options)

    def attempt(devices: tuple[Device, ...]) -> _leases.Lease | _dialogue.Worker | None:
        worker = _warm.take(key)
        return _leases.try_take(devices, request.take, request.units) if worker is None else worker

    if (worker := _warm.take(key)) is not None:  # ahead of the line: it holds its slot already
        worker.lease.waited_s = 0.0
        worker.lease.tell(**_facts(running), phase="running")
        return worker
    return _queue(running, options, request, attempt)


def _request(running: _interrupts.Call, options: Options, *, for_this_process: bool = False) -> _devices.Request:
    """What is asked for; all that cannot be had is said before anybody waits for it."""
    _holds.refuse_under_ancestor(running.name)
    request = _devices.request(options.gpus, options.devices)
    if options.cpus is not None:
        _environment.check_cpus(options.cpus, _environment.cores())
    if _shares.is_share(options.gpus):
        env = _in_force.environment()
        for device in request.candidates:
            _environment.memory_variables((device,), options.gpus, env)
    if not for_this_process:  # `gpu_slot` has looked at that in its own way
        _refuse_occupied(request)
    return request


def _queue(
    running: _interrupts.Call,
    options: Options,
    request: _devices.Request,
    attempt: Callable[[tuple[Device, ...]], Found | None],
    ours: Callable[[], Found | None] = lambda: None,
) -> Found:
    began = time.monotonic()
    facts = _facts(running)
    found = _line.wait(running.name, request, options.slot_timeout, attempt, running.wake, running.check, facts, ours)
    taken = found if isinstance(found, _leases.Lease) else found.lease
    taken.waited_s = time.monotonic() - began
    taken.tell(**_facts(running), phase="running")
    return found


def _facts(running: _interrupts.Call) -> dict[str, Any]:
    """What a holder tells its own user: which function, for which trial."""
    trial = next(iter(running.roots.trials), None)
    return {
        "function": running.name,
        "study": running.roots.study_name,
        "trial": None if trial is None else trial.number,
        "since": time.time(),
    }


def _refuse_occupied(request: _devices.Request) -> None:
    """A parent whose own JAX sits on the only GPUs that could serve would make its trials wait or die for ever."""
    global _warned  # noqa: PLW0603 – once per process
    if not request.candidates[0].is_gpu or not _jax_state.started():
        return
    mine = [device for device in _jax_state.local_devices() if device.platform == "gpu"]
    if not mine:
        return
    usable = len(_devices.usable())  # not the candidates: which of all GPUs JAX is on cannot be told from here
    text = (
        f"JAX has started in this process (pid {os.getpid()}) on {len(mine)} of the {usable} GPUs "
        f"that its trials could use{_jax_state.starters()}, and keeps their memory until it ends. Start the program "
        "with JAX_PLATFORMS=cpu (workers still get their GPUs), or use no JAX arrays outside of the guarded function."
    )
    if usable - len(mine) < request.take:
        raise errors.JaxAlreadyStarted(text)
    if not _warned:
        _warned = True
        logger.warning(text)
