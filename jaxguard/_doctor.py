"""`jaxguard doctor`: look at the host, then prove with real workers that guarded trials work on it."""

from __future__ import annotations

import argparse
import builtins
import contextlib
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from . import _checks, _devices, _jax_state, _rehearsal, _settings, errors
from ._findings import Finding, Verdict
from ._isolated_worker import isolated_jax_worker
from .testing import fake_slots

_VERSION = 1
_IMPORT_S = 300.0


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
    yield from map(_imported, options.module)
    yield from _checks.of_all()
    if not options.quick:
        yield from _rehearsal.steps(log_compiles=options.log_compiles)


def _imported(module: str) -> Finding:
    """Whether importing a module of the user's starts JAX, which costs a parent its GPUs."""
    module = module.removesuffix(".py")
    do = f"python -c 'import {module}', in the directory of your program"
    guard = isolated_jax_worker(timeout=_IMPORT_S, compile_cache="off")
    try:
        # On a slot that is nobody else's: no wait. Not inline, or JAX would start here. What it prints is no JSON.
        with _without_inline(), fake_slots(1), contextlib.redirect_stdout(sys.stderr):
            starter = guard(starter_of_jax)(module, os.getcwd())
    except errors.WorkerTimeout as error:
        return Finding("import", Verdict.BAD, str(error), "each worker imports it too, and waits as long", do)
    except errors.WorkerDied as error:
        how = f"exit code {error.exit_code}" if error.signal is None else f"signal {error.signal}"
        fact = f"{module} cannot be imported: it ends the program ({how})"
        return Finding("import", Verdict.BAD, fact, "workers import it too", do)
    except Exception as error:  # noqa: BLE001 – a module may raise anything
        fact = f"{module} cannot be imported: {type(error).__name__}: {error}"
        return Finding("import", Verdict.BAD, fact, "workers import it too", do)
    if starter:
        return Finding(
            "import",
            Verdict.BAD if _on_gpus() else Verdict.NOTE,
            f"importing {module} starts JAX: {starter}",
            "in a parent on a GPU it takes that GPU's memory, and trials cannot have it",
            "make arrays inside of functions, or start the parent with JAX_PLATFORMS=cpu (workers still get GPUs)",
        )
    return Finding("import", Verdict.OK, f"{module} can be imported and leaves JAX unstarted")


def starter_of_jax(module: str, folder: str) -> str:
    """In a worker: import a module, and name the import that started JAX, with arrays that are left; empty if none."""
    real, found = builtins.__import__, [module]

    def watched(name: str, scope: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        absolute = name if level == 0 else f"{(scope or {}).get('__package__') or ''}.{name}"
        is_new = absolute not in sys.modules
        loaded = real(name, scope, local, wanted, level)
        # Not at the imports of JAX itself: some of them happen while it starts, under its own lock.
        first = absolute.partition(".")[0]
        users = not first.startswith(("jax", "numpy", "ml_dtypes")) and first not in sys.stdlib_module_names
        if is_new and users and len(found) == 1 and _jax_state.threads_of_xla():
            found.append(absolute)
        return loaded

    sys.path.insert(0, folder)
    builtins.__import__ = watched  # type: ignore[assignment]
    try:
        importlib.import_module(module)
    finally:
        builtins.__import__ = real
    return found[-1] + _jax_state.starters() if _jax_state.started() else ""


@contextlib.contextmanager
def _without_inline() -> Iterator[None]:
    before = os.environ.pop(_settings.INLINE, None)
    try:
        yield
    finally:
        if before is not None:
            os.environ[_settings.INLINE] = before


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
