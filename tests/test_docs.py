"""Every Python block of README.md, of docs/ and of the docstrings runs, and does what its page says."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import pytest
from sybil.document import Document
from sybil.parsers.myst import PythonCodeBlockParser, SkipParser

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted(pathlib.Path(jaxguard.__file__).parent.glob("*.py"))

# What a reader does who pastes a page, block by block, into one session. In a process of its own, since a page may
# start JAX or change settings.
PASTE = """
import sys
from sybil import document
from sybil.parsers import myst, rest
if sys.argv[1].endswith(".md"):
    page = document.Document.parse(sys.argv[1], myst.PythonCodeBlockParser(), myst.SkipParser())
else:
    page = document.PythonDocStringDocument.parse(sys.argv[1], rest.DocTestParser())
    page.evaluators.clear()  # not the module's own names: an example imports what it needs, as its reader must
page.namespace["__name__"] = "__main__"
for example in page.examples():
    example.evaluate()
print("blocks:", len(page.regions))
"""


def blocks(page: pathlib.Path) -> list[tuple[int, str]]:
    """Line and text of each Python block of a page of Markdown."""
    document = Document.parse(str(page), PythonCodeBlockParser(), SkipParser())
    return [(e.line, str(e.parsed)) for e in document.examples() if hasattr(e.parsed, "line_offset")]


def is_pytest(page: pathlib.Path) -> bool:
    """Say whether a page shows tests, which pytest must collect, rather than a session."""
    return any(block.startswith("def test_") or "\ndef test_" in block for _, block in blocks(page))


@pytest.mark.parametrize("page", [p for p in PAGES if not is_pytest(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_runs_from_top_to_bottom(page: pathlib.Path, run_python: Callable[..., Any]) -> None:
    """Whoever pastes the blocks of a page one after the other sees what the page says."""
    done = run_python(PASTE, args=[str(page)], timeout=240).check()
    assert "blocks:" in done.stdout


@pytest.mark.parametrize("page", [p for p in PAGES if is_pytest(p)], ids=lambda p: str(p.relative_to(ROOT)))
def test_a_page_of_tests_passes_under_pytest(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The tests that a page shows are collected, get jaxguard's fixtures, and pass."""
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_page.py").write_text("\n\n".join(block for _, block in blocks(page)))
    plugin = [] if _installed() else ["-p", "jaxguard.pytest_plugin"]
    path = os.pathsep.join([str(pathlib.Path(jaxguard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, "test_page.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


@pytest.mark.parametrize("module", [m for m in MODULES if ">>> " in m.read_text("utf-8")], ids=lambda m: m.stem)
def test_the_examples_of_docstrings_hold(module: pathlib.Path, run_python: Callable[..., Any]) -> None:
    """An example in a docstring prints what it says."""
    done = run_python(PASTE, args=[str(module)], timeout=240).check()
    assert "blocks: 0" not in done.stdout


def test_a_false_page_is_noticed(tmp_path: pathlib.Path, run_python: Callable[..., Any]) -> None:
    """The tests above can fail: a page whose second block contradicts its first does not run."""
    page = tmp_path / "false.md"
    page.write_text("```python\nx = 1\n```\n\nand so\n\n```python\nassert x == 2\n```\n")
    assert len(blocks(page)) == 2
    done = run_python(PASTE, args=[str(page)])
    assert done.returncode == 1
    assert "assert x == 2" in done.stderr
    assert f'{page}", line 8' in done.stderr


def _installed() -> bool:
    """Say whether pytest finds the plugin by itself: not where the tests run on a bare checkout."""
    return any(point.name == "jaxguard" for point in entry_points(group="pytest11"))
