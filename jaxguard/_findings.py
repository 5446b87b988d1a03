"""What `jaxguard doctor` finds: a fact with its numbers, and where it is wrong, why it matters and what to type."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.Enum):
    """What a finding means for guarded trials."""

    OK = "ok"
    NOTE = "note"
    """They run, but perhaps not as somebody thinks."""
    BAD = "BAD"
    """They fail, hang or are not safe."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found."""

    check: str
    verdict: Verdict
    fact: str
    why: str = ""
    do: str = ""

    def __str__(self) -> str:
        lines = [f"{self.verdict.value:<4}  {self.check:<12}  {self.fact}"]
        lines += [f"{'':20}{words}" for words in (self.why, self.do and f"-> {self.do}") if words]
        return "\n".join(lines)
