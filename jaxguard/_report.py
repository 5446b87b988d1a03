"""`compile_report`: what the trials of a study compiled, what that cost, and why."""

from __future__ import annotations

import html
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from . import _recompiles
from ._guard import ATTRIBUTE

if TYPE_CHECKING:
    import optuna

_OTHERS = "(others)"
_WORTH_A_LINE_S = 0.05
_HEAD = ("function", "trials", "programs", "compilations", "compile_s", "saved_s", "why")


@dataclass(frozen=True, slots=True)
class CompiledFunction:
    """One function in the report."""

    function: str
    """Its name; functions of one name share a row. "(others)" sums the small ones of trials with many programs."""
    trials: int
    """In how many trials it was compiled, or loaded from a cache."""
    programs: int
    """How many different programs it had."""
    compilations: int
    compile_s: float
    """Spent on compiling, in seconds, summed over the trials."""
    saved_s: float
    """What compiling had taken elsewhere, in seconds, where a program was loaded instead."""
    stored: bool
    """False if JAX does not store it: it has a host callback, such as `jax.debug.print`."""
    constants: tuple[str, ...]
    """The constants in which its programs differ, where nothing else differs; as far as they are known."""


class CompileReport(list[CompiledFunction]):
    """Rows, the function that took longest first; prints as a table."""

    def __str__(self) -> str:
        if not self:
            return "No trial of this study has compiled anything in a guarded call (inline() records nothing)."
        shown = [row for row in self if row.compile_s + row.saved_s >= _WORTH_A_LINE_S or row.constants] or self[:1]
        rows = [_HEAD, *(_words(row) for row in shown)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
        lines = []
        for row in rows:
            first, *numbers, last = row
            middle = [text.rjust(width) for text, width in zip(numbers, widths[1:-1], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *middle, last]).rstrip())
        if len(shown) < len(self):
            rest = len(self) - len(shown)
            lines.append(f"and {rest} function{'' if rest == 1 else 's'} of less than {_WORTH_A_LINE_S} s")
        advice = [
            _recompiles.describe(row.function, row.programs, list(row.constants)) for row in shown if row.constants
        ]
        return "\n".join([*lines, *(f"\n{text}" for text in advice)])

    def _repr_html_(self) -> str:
        """As a notebook shows it."""
        return f"<pre>{html.escape(str(self))}</pre>"


def compile_report(study: optuna.Study) -> CompileReport:
    """Tell, per function, what the guarded trials of a study compiled, what that cost, and why.

    It reads the user attribute `jaxguard` of the trials, so it works on any storage, and after the program has ended.

    Args:
        study: An Optuna study whose objective is guarded by `isolated_jax_worker`.

    Returns:
        A list of rows, one per function, the one that took longest first, which prints as a table: trials, programs,
        compilations, seconds spent and saved, and which constants made programs differ. Empty if nothing was compiled.

    Raises:
        TypeError: If it is not a study.

    Example:
        >>> import optuna
        >>> from jaxguard import compile_report
        >>> print(compile_report(optuna.create_study()))
        No trial of this study has compiled anything in a guarded call (inline() records nothing).
    """
    if not hasattr(study, "get_trials"):
        text = f"compile_report takes an Optuna study, not {type(study).__name__}"
        raise TypeError(text)
    functions: dict[str, list[dict[str, Any]]] = {}
    for trial in study.get_trials(deepcopy=False):
        facts = trial.user_attrs.get(ATTRIBUTE)
        if isinstance(facts, dict):
            for program in _programs_of(facts):
                functions.setdefault(program["function"], []).append({**program, "trial": trial.number})
    rows = [_row(name, programs) for name, programs in functions.items()]
    return CompileReport(sorted(rows, key=lambda row: (row.function == _OTHERS, -row.compile_s, -row.saved_s)))


def _programs_of(facts: dict[str, Any]) -> Iterable[dict[str, Any]]:
    yield from facts.get("programs", [])
    if "other_programs" in facts:
        yield {"function": _OTHERS, **facts["other_programs"]}


def _row(name: str, programs: list[dict[str, Any]]) -> CompiledFunction:
    trials: dict[int, list[dict[str, Any]]] = {}
    for program in programs:
        trials.setdefault(program["trial"], []).append(program)
    constants = _recompiles.reasons(list(trials.values()))
    counts = [program.get("programs", 0) for program in programs if name == _OTHERS]
    return CompiledFunction(
        function=name,
        trials=len(trials),
        programs=max(counts) if counts else len({program["key"] for program in programs}),
        compilations=sum(program["compiles"] for program in programs),
        compile_s=round(sum(program["compile_s"] for program in programs), 4),
        saved_s=round(sum(program["saved_s"] for program in programs), 4),
        stored=all(program.get("stored", True) for program in programs),
        constants=tuple(constants),
    )


def _words(row: CompiledFunction) -> tuple[str, ...]:
    why = ""
    words = list(dict.fromkeys(_recompiles.in_words(constant) for constant in row.constants))
    if not row.stored:
        why = "not stored by JAX: a host callback, such as jax.debug.print"
    elif row.constants:
        why = f"only constants changed ({', '.join(words[:3])}{' …' if len(words) > 3 else ''})"
    numbers = (row.trials, row.programs, row.compilations)
    return row.function, *(str(number) for number in numbers), f"{row.compile_s:.2f}", f"{row.saved_s:.2f}", why
