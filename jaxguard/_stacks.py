"""`jaxguard stacks`: where this user's guarded programs on this host are at this moment, without stopping them.

For each parent: what its threads wait for or run, the phase of each worker, and the Python stacks of all threads. All
is read from memory files of those processes (`_records`, `_phases`, `_whereabouts`), so it can be told of one's own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import textwrap
import time
from typing import Any

from . import _linux, _phases, _records, _whereabouts

_VERSION = 1
_HOLD = re.compile(r"[0-9a-f]{12}")
_LARGEST_PID, _LATEST = 1 << 31, 1 << 40


def run(options: argparse.Namespace) -> int:
    """Print what there is; the exit status is 1 if there is none of the processes that were asked for."""
    view = look(options.pid)
    text = json.dumps(view, indent=2) if options.json else as_text(view, options.pid)
    print(text)  # noqa: T201 – this is what was asked for
    return 0 if view["parents"] or not options.pid else 1


def look(pids: list[int]) -> dict[str, Any]:
    """What is known at this moment, as plain data.

    Args:
        pids: Parents or workers to look at, or who has started them; all if it is empty.
    """
    kinds = {pid: _whereabouts.kinds(pid) for pid in _own_processes()}
    parents = [_parent(pid, kinds) for pid, of_it in kinds.items() if _whereabouts.PARENT in of_it]
    everybody = [call for parent in parents for call in parent["calls"]]
    chosen = [parent for parent in parents if not pids or _family(parent) & set(pids)]
    for parent in chosen:
        _add_stacks(parent)
        for call in parent["calls"]:
            _name_who_compiles(call, everybody)
    return {"version": _VERSION, "host": socket.gethostname(), "time": time.time(), "parents": chosen}


def _own_processes() -> list[int]:
    me = os.geteuid()
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in sorted(pids) if _linux.owner(pid) == me]


def _parent(pid: int, kinds: dict[int, set[str]]) -> dict[str, Any]:
    records = _records.read_all(pid)
    calls = []
    for word, facts in records.items():
        if _HOLD.fullmatch(word) and "phase" in facts:
            calls.append(_call(facts, records.get(_phases.word(word), {})))
    calls.sort(key=lambda call: call["since"] or 0.0)
    keepers = [
        other
        for other, of_it in kinds.items()
        if _whereabouts.KEEPER in of_it and getattr(_linux.status(other), "parent", None) == pid
    ]
    return {
        "pid": pid,
        "command": _command(pid),
        "state": _linux.state(pid),
        "calls": calls,
        "keepers": [{"pid": keeper, "state": _linux.state(keeper)} for keeper in keepers],
    }


def _call(facts: dict[str, Any], work: dict[str, Any]) -> dict[str, Any]:
    """What the records of a call say, of which nothing is believed but what has the right form."""
    worker, trial, since = facts.get("worker"), facts.get("trial"), facts.get("since")
    worker = worker if isinstance(worker, int) and 0 < worker < _LARGEST_PID else None
    programs, devices = work.get("programs"), facts.get("devices")
    phase = str(facts["phase"])
    # A waiter has no worker, and a `gpu_slot` block none either: there the parent's own stacks tell.
    has_worker = worker is not None and phase == "running"
    return {
        "function": _text(facts.get("function")),
        "study": _text(facts.get("study")),
        "trial": trial if isinstance(trial, int) else None,
        "since": since if isinstance(since, int | float) and 0 <= since < _LATEST else None,
        "devices": [device for device in devices if isinstance(device, str)] if isinstance(devices, list) else [],
        "phase_since": _phases.since(work) if has_worker else None,
        "phase": "waiting for a slot" if phase == "waiting" else _phases.in_words(work) if has_worker else phase,
        "worker": worker,
        "state": None if worker is None else _linux.state(worker),
        "programs": [
            {name: _text(program.get(name)) for name in ("doing", "function", "key")}
            for program in (programs if isinstance(programs, list) else [])
            if isinstance(program, dict)
        ],
        "compiled_by": [],
    }


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _command(pid: int) -> str:
    """What `ps` shows; of joblib's processes, the program that they belong to."""
    command = _linux.command(pid)
    status = _linux.status(pid)
    if "popen_loky" in command and status is not None:
        return f"a process of joblib, of {_linux.command(status.parent)}, pid {status.parent}"
    return command


def _family(parent: dict[str, Any]) -> set[int]:
    """A parent, its workers, and those that have started it: joblib's processes are shown under their program too."""
    found = {call["worker"] for call in parent["calls"]}
    pid = parent["pid"]
    while pid > 1 and pid not in found:
        found.add(pid)
        status = _linux.status(pid)
        pid = 0 if status is None else status.parent
    return found


def _add_stacks(parent: dict[str, Any]) -> None:
    parent["stacks"] = _whereabouts.ask(parent["pid"], _whereabouts.PARENT)
    for keeper in parent["keepers"]:
        keeper["stacks"] = _whereabouts.ask(keeper["pid"], _whereabouts.KEEPER)
    for call in parent["calls"]:
        if call["worker"] is not None:
            call["stacks"] = _whereabouts.ask(call["worker"], _whereabouts.WORKER)


def _name_who_compiles(call: dict[str, Any], everybody: list[dict[str, Any]]) -> None:
    """Find out for whom a call waits that waits for a compilation."""
    wanted = {program.get("key") for program in call["programs"] if program.get("doing") == _phases.WAITING}
    for other in everybody:
        keys = {program.get("key") for program in other["programs"] if program.get("doing") == _phases.COMPILING}
        if other is not call and wanted & keys:
            facts = {name: other[name] for name in ("worker", "function", "study", "trial")}
            call["compiled_by"].append(facts)


# ---------------------------------------------------------------- for people


def as_text(view: dict[str, Any], pids: list[int] | None = None) -> str:
    """The same for people."""
    if not view["parents"] and pids:
        asked = " or ".join(map(str, pids))
        return f"No guarded program of this user runs here as pid {asked}. jaxguard stacks shows all."
    if not view["parents"]:
        return "No guarded program of this user runs here (a program is seen from its first guarded call on)."
    return "\n\n".join(_parent_as_text(parent) for parent in view["parents"])


def _parent_as_text(parent: dict[str, Any]) -> str:
    lines = [f"{parent['command']} (pid {parent['pid']}{_state_in_words(parent['state'])})"]
    lines += [_indented(_call_as_line(call)) for call in parent["calls"]] or [_indented("no guarded call under way")]
    for call in parent["calls"]:  # first: most of the time it is there
        if call["worker"] is not None:
            lines += ["", f"  Stacks of pid {call['worker']}, the worker of {_work(call)}:"]
            lines.append(_indented(call["stacks"], 4))
    lines += ["", f"  Stacks of pid {parent['pid']}, the parent:", _indented(parent["stacks"], 4)]
    for keeper in parent["keepers"]:
        lines += ["", f"  Stacks of pid {keeper['pid']}, its keeper{_state_in_words(keeper['state'])}:"]
        lines.append(_indented(keeper["stacks"], 4))
    return "\n".join(lines)


def _call_as_line(call: dict[str, Any]) -> str:
    since = call["since"]
    stopped = "stopped while " if call["state"] in {"T", "t"} else ""
    words = [_work(call), f": {stopped}{_linux.printable(call['phase'])}"]
    if call["phase_since"] is not None:
        words.append(f" for {max(0.0, time.time() - call['phase_since']):.0f} s")
    words += [f", which pid {other['worker']} compiles ({_work(other)})" for other in call["compiled_by"]]
    if since is not None:
        words.append(f"; since {time.strftime('%H:%M:%S', time.localtime(since))}")
    if call["devices"]:
        words.append(_linux.printable(f" on {' and '.join(call['devices'])}"))
    if call["worker"] is not None:
        words.append(f" (worker pid {call['worker']}{_state_in_words(call['state'])})")
    return "".join(words)


def _work(call: dict[str, Any]) -> str:
    function = str(call["function"] or "a gpu_slot block")
    trial = f", trial {call['trial']} of study {call['study']!r}" if call["trial"] is not None else ""
    return _linux.printable(f"{function}{trial}")


def _state_in_words(state: str) -> str:
    return {"T": ", stopped", "t": ", stopped", "D": ", in the kernel", "Z": ", ended", "X": ", ended"}.get(state, "")


def _indented(text: str, width: int = 2) -> str:
    return textwrap.indent("\n".join(map(_linux.printable, text.split("\n"))), " " * width)
