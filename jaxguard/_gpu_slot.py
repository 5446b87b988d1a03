"""`gpu_slot`: hold devices for this process while a block or a function runs."""

from __future__ import annotations

import functools
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar, overload

from . import (
    _asking,
    _descriptors,
    _devices,
    _environment,
    _gpus,
    _guard,
    _holds,
    _in_force,
    _interrupts,
    _jax_state,
    _leases,
    _line,
    _linux,
    _packing,
    _settings,
    _shares,
    errors,
)

P = ParamSpec("P")
R = TypeVar("R")

_kept: list[_leases.Lease] = []
"""Leases of GPUs on which JAX has started here: their memory is this process's until it ends, so they are too."""
_turn = threading.Lock()


@dataclass(frozen=True, slots=True)
class Slot:
    """Devices that this process holds."""

    devices: tuple[_gpus.Device, ...]
    """The devices, each with `id`, `index`, `kind` and `memory_bytes`."""
    share: float
    """The part of each device that is held; 1 is all of it."""
    env: dict[str, str]
    """What a process needs in its environment to see these devices and no others, for `subprocess`."""
    waited_s: float
    """Seconds that passed until the slot was there."""


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A guard at rest: data. It opens a fresh hold for each call, and for each `with`."""

    gpus: float = 1
    slot_timeout: float = math.inf
    devices: _devices.Listed | None = None

    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]:
        """Hold the slot while a function runs in this process."""
        if not callable(function):
            text = f"gpu_slot guards a function, not {function!r}. Its options are keyword-only."
            raise TypeError(text)
        _guard.refuse_unfinished(function, "Write `with gpu_slot():` inside it.")

        @functools.wraps(function)
        def holding(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._opened():
                return function(*args, **kwargs)

        return holding

    def __enter__(self) -> Slot:
        return _holds.enter(self, self._opened())

    def __exit__(self, *exception: object) -> bool | None:
        return _holds.leave(self, *exception)

    @contextmanager
    def _opened(self) -> Iterator[Slot]:
        _jax_state.refuse_if_forked("gpu_slot")
        hold = _holds.current()
        if hold is not None and (hold.slot is not None or hold.call is None):
            _holds.refuse_more(hold, "gpu_slot", self.gpus)
            if hold.slot is not None:
                self._refuse_others(hold)
            with _used(_blocks[hold.nonce]) if hold.nonce in _blocks else nullcontext():
                yield hold.slot or _slot_of_this_worker(hold)
            return
        if hold is not None:
            text = (
                "gpu_slot was called inside `with isolated_jax_worker() as worker`, whose slot is for its workers. "
                "Give the function to worker(...), or end that block first."
            )
            raise errors.JaxguardError(text)
        _linux.check_platform()
        with _used(self._block()) as block:
            yield block.slot

    def _refuse_others(self, hold: _holds.Hold) -> None:
        """Raise if the hold that is there is not one of the devices that are asked for."""
        if self.devices is None:
            return
        ids = {device.id for device in _devices.request(self.gpus and 1, self.devices).candidates}
        others = [device.id for device in hold.devices if device.id not in ids]
        if others:
            text = (
                f"gpu_slot asks for devices={list(self.devices)} inside a hold of {', '.join(others)}: it would wait "
                "for its own ancestor. Ask for them outside, or for no others inside."
            )
            raise errors.JaxguardError(text)

    def _block(self) -> _Block:
        lease = self._take()
        with ExitStack() as stack:
            stack.callback(_let_go, lease)
            slot = _slot(lease)
            stack.enter_context(_holds.opened(_holds.Hold(lease.gpus, lease.nonce, lease.devices, slot)))
            news = {**slot.env, _settings.HOLD: lease.nonce}
            stack.enter_context(_in_force.in_force(news, _jax_settings(slot, lease.gpus)))
            return _Block(lease, slot, stack.pop_all())

    def _take(self) -> _leases.Lease:
        if (lease := self._kept_one()) is not None:
            return lease
        listed = self.devices
        if (lease := self._one_in_use()) is not None:
            listed = tuple(device.id for device in lease.devices)
        else:
            _refuse_started(self.gpus, self.devices)
        with _interrupts.call("gpu_slot") as running:
            options = _packing.Options(gpus=self.gpus, slot_timeout=self.slot_timeout, devices=listed)
            return _asking.lease_here(running, options, self._kept_one)

    def _kept_one(self) -> _leases.Lease | None:
        """A lease that this process keeps, and that suffices: its JAX is there."""
        with _turn:
            lease = next(filter(self._suffices, _kept), None)
            if lease is not None:
                _kept.remove(lease)
                lease.resume()
                lease.tell(phase="running")
            return lease

    def _one_in_use(self) -> _leases.Lease | None:
        """A lease under which JAX has started here, of another thread's block: once JAX is there no other would do."""
        if not _is_on_gpus():
            return None
        return next(filter(self._suffices, (block.lease for block in list(_blocks.values()))), None)

    def _suffices(self, lease: _leases.Lease) -> bool:
        if not 0 < self.gpus <= lease.gpus or not lease.devices[0].is_gpu:
            return False
        if self.devices is None:
            return True
        ids = {device.id for device in _devices.request(1, self.devices).candidates}
        return ids.issuperset(device.id for device in lease.devices)


@dataclass(eq=False)
class _Block:
    """An open hold of this process. It ends with the last `with` that uses it, in whatever order they end."""

    lease: _leases.Lease
    slot: Slot
    end: ExitStack
    users: int = 0


_blocks: dict[str, _Block] = {}
"""The open holds, by the words of their leases."""


@contextmanager
def _used(block: _Block) -> Iterator[_Block]:
    _blocks[block.lease.nonce] = block
    block.users += 1
    owner = os.getpid()
    try:
        yield block
        if block.users == 1:
            _check_came_up(block.lease)
    finally:
        block.users -= 1
        if not block.users and os.getpid() == owner:  # a forked child drops its blocks, and must not end them
            del _blocks[block.lease.nonce]
            block.end.close()


def _check_came_up(lease: _leases.Lease) -> None:
    """A GPU that was held, and on which JAX did not come up, is an error, not hours on the CPU."""
    devices = _jax_state.local_devices() if lease.devices[0].is_gpu else []
    if devices and all(device.platform == "cpu" for device in devices):
        names = ", ".join(device.id for device in lease.devices)
        text = (
            f"the held GPU {names} did not come up in JAX, which ran on the CPU. See JAX's warning above, and whether "
            f"the driver is new enough for the CUDA plugin.{_devices.versions_that_do_not_fit()}"
        )
        raise errors.NoDevices(text)


def _slot(lease: _leases.Lease) -> Slot:
    env = _environment.variables(lease.devices, lease.gpus)
    env |= _environment.memory_variables(lease.devices, lease.gpus, _in_force.environment())
    return Slot(lease.devices, lease.share, env, lease.waited_s)


def _slot_of_this_worker(hold: _holds.Hold) -> Slot:
    env = {name: os.environ[name] for name in (*_environment.FROM_THE_LEASE, _environment.MEMORY) if name in os.environ}
    return Slot(hold.devices, _shares.units(hold.gpus) / _shares.UNITS, env, 0.0)


def _refuse_started(gpus: float, listed: _devices.Listed | None) -> None:
    """Raise if JAX has started here in a way that a slot cannot be reconciled with."""
    if not _jax_state.started():
        return
    devices = _jax_state.local_devices()
    request = _devices.request(gpus, listed)
    if request.candidates[0].is_gpu:
        seen = sum(device.platform == "gpu" for device in devices)
        usable = len(_devices.usable())
        if seen and gpus == usable and not _kept:
            return  # it sees no GPU that it will not hold
        text = (
            f"JAX has started in this process (pid {os.getpid()}) on {_names(devices)}{_jax_state.starters()}, before "
            f"gpu_slot could choose its devices. Open gpu_slot before the first JAX operation (jax.devices() and "
            f"arrays count), hold all that JAX sees (gpus={usable}), or use isolated_jax_worker, "
            "which starts JAX in a clean process."
        )
        raise errors.JaxAlreadyStarted(text)
    if len(devices) < gpus:
        text = (
            f"JAX has started in this process (pid {os.getpid()}) on {_names(devices)}, and gpus={gpus} asks for more. "
            "Open gpu_slot before the first JAX operation, or ask for no more than that."
        )
        raise errors.JaxAlreadyStarted(text)


def _names(devices: list[Any]) -> str:
    return ", ".join(str(device) for device in devices) or "no device"


def _jax_settings(slot: Slot, gpus: float) -> dict[str, Any]:
    """What JAX reads from the environment when it is imported, and from here when it starts."""
    settings: dict[str, Any] = {"jax_platforms": slot.env["JAX_PLATFORMS"]}
    if not slot.devices[0].is_gpu:
        settings["jax_num_cpu_devices"] = max(1, int(gpus))
    return settings


def _is_on_gpus() -> bool:
    return any(device.platform == "gpu" for device in _jax_state.local_devices())


def _let_go(lease: _leases.Lease) -> None:
    if lease.devices[0].is_gpu and _is_on_gpus():
        with _turn:
            _kept.append(lease)  # first: whatever goes wrong with saying so, the memory is still this process's
            lease.rest()
        _interrupts.wake_all()  # another thread may be waiting for it
    else:
        lease.close()


def _after_fork_in_child() -> None:
    global _turn  # noqa: PLW0603 – the old lock may be held by a thread that does not exist here
    _turn = threading.Lock()
    _kept.clear()
    _blocks.clear()


_descriptors.after_fork_in_child(_after_fork_in_child)


@overload
def gpu_slot(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def gpu_slot(
    *, gpus: float = 1, devices: Sequence[int | str] | None = None, slot_timeout: float = math.inf
) -> GpuSlot: ...
def gpu_slot(
    function: Callable[..., Any] | None = None,
    /,
    *,
    gpus: float = 1,
    devices: Sequence[int | str] | None = None,
    slot_timeout: float = math.inf,
) -> Any:
    """Hold devices for this process while a block or a function runs.

    Use it where the code itself must run in this process. If JAX has not started here, it starts on exactly these
    devices. Once it has started on GPUs, this process keeps their memory until it ends, and so it keeps the slot: the
    next block gets it back at once. Threads that want different devices need `isolated_jax_worker`.

    Args:
        function: The function, when used as a decorator without options.
        gpus: How many GPUs to hold, or the share of one (0.5, 1/3); 0 keeps to the CPU. On a host without GPUs, how
            many CPU devices JAX sees.
        devices: Which devices to choose from: positions among those that this process may use, or ids; None for all.
        slot_timeout: Seconds to wait for the slot; 0 tries once, `inf` never gives up.

    Returns:
        The guarded function; or, without a function, a guard that is both decorator and context manager. `with` gives
        a slot: `devices` (each with `id`, `index`, `kind`, `memory_bytes`), `share`, `env`, `waited_s`.

    Raises:
        TypeError: At decoration, for options of a wrong type, generator and coroutine functions.
        ValueError: At decoration, for options out of range. At entry, for more GPUs than there are.
        SlotTimeout: At entry, if no slot came free within `slot_timeout`.
        NoDevices: At entry, if this host offers this process no such devices.
        JaxAlreadyStarted: At entry, if JAX has started here and cannot be reconciled with the slot.
        ForkedAfterJax: At entry, in a process forked from one in which JAX had started.

    Example:
        >>> from jaxguard import gpu_slot
        >>> from jaxguard.testing import fake_slots
        >>> with fake_slots(2), gpu_slot() as slot:
        ...     slot.devices[0].id, slot.env["JAX_PLATFORMS"]
        ('cpu:0', 'cpu')
    """
    _line.check_slot_timeout(slot_timeout)
    guard = GpuSlot(_shares.checked(gpus), slot_timeout, _devices.checked_devices(devices))
    return guard if function is None else guard(function)
