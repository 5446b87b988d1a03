"""`jaxguard doctor`: look at the host, then prove with real workers that guarded trials work on it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from . import _checks, _devices, _rehearsal
from ._findings import Finding, Verdict

_VERSION = 1
_IMPORT_S = 300.0
_IMPORT = """
import builtins, sys
sys.path.insert(0, "")
from jaxguard import _jax_state
real, found = builtins.__import__, []
def watched(name, globals=None, locals=None, fromlist=(), level=0):
    absolute = name if level == 0 else ((globals or {}).get("__package__") or "") + "." + name
    is_new = absolute not in sys.modules
    module = real(name, globals, locals, fromlist, level)
    # Not at the imports of JAX itself: some of them happen while it starts, under its own lock.
    if is_new and not found and _is_the_users(absolute.partition(".")[0]) and _jax_state.threads_of_xla():
        found.append(absolute)
    return module
def _is_the_users(first):
    return not first.startswith(("jax", "numpy", "ml_dtypes")) and first not in sys.stdlib_module_names
builtins.__import__ = watched
import importlib
importlib.import_module(sys.argv[1])
builtins.__import__ = real
print(sys.argv[2] + ((found or sys.argv[1:])[0] + _jax_state.starters() if _jax_state.started() else ""))
"""
"""Run in a process of its own: imports a module, and prints which import started JAX, if one did."""


def run(options: argparse.Namespace) -> int:
    """Print a verdict per line; the exit status is 1 if something is bad."""
    found = []
    for finding in _findings(options):
        found.append(finding)
        if not options.json:
            print(finding, flush=True)  # noqa: T201 – this is what was asked for
    bad = sum(finding.verdict is Verdict.BAD for finding in found)
    if options.json:
        print(json.dumps({"version": _VERSION, "bad": bad, "findings": list(map(_plain, found))}, indent=2))  # noqa: T201
    else:
        print(_summary(bad, found))  # noqa: T201 – as above
    return int(bad > 0)


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    bad = False
    for finding in (*map(_imported, options.module), *_checks.of_all()):
        bad = bad or finding.verdict is Verdict.BAD
        yield finding
    if not options.quick:
        yield from _rehearsal.steps(log_compiles=options.log_compiles)


def _imported(module: str) -> Finding:
    """Whether importing a module of the user's starts JAX, which costs a parent its GPUs."""
    module, mark = module.removesuffix(".py"), f"jaxguard-{secrets.token_hex(6)} "  # the module may print, too
    words = [sys.executable, "-c", _IMPORT, module, mark]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_IMPORT_S, check=False)
    except subprocess.TimeoutExpired:
        why = "each worker imports it too, and waits as long"
        return Finding("import", Verdict.BAD, f"{module} is not imported within {_IMPORT_S:.0f} s", why)
    answer = [line.removeprefix(mark) for line in done.stdout.splitlines() if line.startswith(mark)]
    if not answer:
        last = (done.stderr.strip().splitlines() or [f"it ends the program (exit code {done.returncode})"])[-1]
        do = f"python -c 'import {module}', in the directory of your program"
        return Finding("import", Verdict.BAD, f"{module} cannot be imported: {last}", "workers import it too", do)
    if answer[-1]:
        return Finding(
            "import",
            Verdict.BAD if _on_gpus() else Verdict.NOTE,
            f"importing {module} starts JAX: {answer[-1]}",
            "in a parent on a GPU it takes that GPU's memory, and trials cannot have it",
            "make arrays inside of functions, or start the parent with JAX_PLATFORMS=cpu (workers still get GPUs)",
        )
    return Finding("import", Verdict.OK, f"{module} can be imported and leaves JAX unstarted")


def _on_gpus() -> bool:
    """Whether a parent whose JAX starts takes a GPU."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    return _devices.usable_or_cpu()[0].is_gpu and (not platforms or "cuda" in platforms or "gpu" in platforms)


def _plain(finding: Finding) -> dict[str, Any]:
    return {**dataclasses.asdict(finding), "verdict": finding.verdict.value.lower()}


def _summary(bad: int, found: list[Finding]) -> str:
    notes = sum(finding.verdict is Verdict.NOTE for finding in found)
    if bad:
        return f"\n{bad} of {len(found)} findings are bad: mend these first."
    return f"\nNothing bad in {len(found)} findings{f', {notes} to note' if notes else ''}."
