"""`jaxguard slots`: the devices that this process may use, who holds them, and who waits."""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
from typing import Any

from . import _beacons, _descriptors, _devices, _locks, _nvml, _parties, _shares, _tenants
from ._gpus import Device

_VERSION = 1


def run(options: argparse.Namespace) -> int:
    """Print what there is."""
    devices = _devices.usable()
    view = look(devices)
    print(json.dumps(view, indent=2) if options.json else as_table(view))  # noqa: T201 – this is what was asked for
    return 0


def look(devices: tuple[Device, ...]) -> dict[str, Any]:
    """What is known of some devices at this moment, as plain data."""
    beacons = _beacons.seen()
    locks = _locks.open_locks(make=False)
    try:
        shown = [_device(device, beacons, locks) for device in devices]
    finally:
        _descriptors.close(locks)
    lines = {_beacons.place(device.line): device for device in devices}
    waiting: dict[str, dict[str, Any]] = {}
    for beacon in beacons:
        if beacon.kind == _beacons.WAITER and beacon.place in lines:
            entry = waiting.setdefault(beacon.nonce, {**_party(beacon), "devices": []})
            if lines[beacon.place].is_gpu:
                entry["devices"].append(lines[beacon.place].id)
    return {"version": _VERSION, "host": socket.gethostname(), "devices": shown, "line": list(waiting.values())}


def _device(device: Device, beacons: list[_beacons.Sighting], locks: int) -> dict[str, Any]:
    where = _beacons.place(device.lock)
    idle = {beacon.nonce for beacon in beacons if beacon.kind == _beacons.IDLE and beacon.place == where}
    holders = [
        {**_party(beacon, idle=beacon.nonce in idle), "share": round(min(beacon.number / _shares.UNITS, 1), 4)}
        for beacon in beacons
        if beacon.kind == _beacons.HOLDER and beacon.place == where
    ]
    held = _locks.units_held(locks, device.lock)
    tenants = _tenants.of(device)
    if tenants.state is _tenants.State.FOREIGN:
        state = "FOREIGN"
    elif held:
        state = "HELD"
    else:
        state = "UNKNOWN" if tenants.state is _tenants.State.UNKNOWN else "FREE"
    return {
        "id": device.id,
        "index": device.index,
        "kind": device.kind,
        "memory_bytes": device.memory_bytes,
        "state": state,
        "held": round(held / _shares.UNITS, 4),
        "holders": holders if held else [],
        "foreign": [_foreign(process) for process in tenants.foreign],
    }


def _party(beacon: _beacons.Sighting, *, idle: bool = False) -> dict[str, Any]:
    return dataclasses.asdict(_parties.behind(beacon, idle=idle))


def _foreign(process: _nvml.Process) -> dict[str, Any]:
    return {"pid": process.pid, "memory_bytes": process.memory_bytes, "words": _tenants.who(process)}


# ---------------------------------------------------------------- for people


def as_table(view: dict[str, Any]) -> str:
    """The same for people."""
    rows = [("DEVICE", "KIND", "STATE", "WHO")]
    for device in view["devices"]:
        whole = device["held"] in {0, 1}
        state = device["state"] if whole else f"{device['state']} {device['held']:.0%}"
        who = [_holder(holder) for holder in device["holders"]]
        who += [_foreigner(process) for process in device["foreign"]]
        if device["state"] == "HELD" and not who:
            who = ["a process that cannot be seen from here (another container?)"]
        label = f"{device['index']} {device['id']}" if device["kind"] != "cpu" else device["id"]
        first, *rest = who or [""]
        rows.append((label, device["kind"], state, first))
        rows += [("", "", "", other) for other in rest]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(row[i].ljust(widths[i]) for i in range(3)), row[3]]).rstrip() for row in rows]
    if view["line"]:
        lines += ["", f"{len(view['line'])} waiting, the first in the line first:"]
        lines += [f"  {_holder(waiter)}" for waiter in view["line"]]
    if any(device["state"] == "UNKNOWN" for device in view["devices"]):
        lines += ["", "UNKNOWN: free for jaxguard; whether other programs compute there cannot be told from here."]
    return "\n".join(lines)


def _holder(facts: dict[str, Any]) -> str:
    names = [field.name for field in dataclasses.fields(_parties.Party)]
    party = _parties.Party(**{name: facts[name] for name in names})
    share = facts.get("share", 1)
    words = _parties.in_words(party)
    return words if share == 1 else f"{words}, {share:.0%} of it"


def _foreigner(process: dict[str, Any]) -> str:
    return f"{process['words']}, without a slot"
