"""Importing jaxguard costs nothing, its modules keep to their floors, and nobody else's private doors are used."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import jaxguard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = pathlib.Path(jaxguard.__file__).resolve().parent
HEAVY = {"cloudpickle", "filelock", "jax", "jaxlib", "joblib", "loky", "numpy", "optuna"}
OTHERS = HEAVY | {"hydra", "sklearn", "tqdm"}
# The one module that looks where others have no public door.
OWNER_OF_PRIVATE_DOORS = "_jax_state.py"


def loaded_by(code: str, run_python: Callable[..., Any]) -> set[str]:
    """Run `code` in a fresh interpreter and name the heavy packages that are loaded afterwards."""
    report = f"\nimport json, sys\nprint(json.dumps(sorted({HEAVY!r} & set(sys.modules))))\n"
    return set(json.loads(run_python(code + report, how="-c").check().stdout))


# ---- Nothing happens at import ---------------------------------------------------------------------------------------


def test_import_loads_nothing_heavy(run_python: Callable[..., Any]) -> None:
    """`import jaxguard` loads none of jax, optuna, joblib, loky, numpy."""
    assert loaded_by("import jaxguard", run_python) == set()


def test_every_public_name_is_there_without_anything_heavy(run_python: Callable[..., Any]) -> None:
    """Looking at each public name, and listing them, loads nothing heavy either."""
    code = """
import jaxguard
assert set(jaxguard.__all__) <= set(dir(jaxguard))
for name in jaxguard.__all__:
    getattr(jaxguard, name)
"""
    assert loaded_by(code, run_python) == set()


def test_guards_at_rest_load_nothing_heavy(run_python: Callable[..., Any]) -> None:
    """Decorating a function and making a guard are free: JAX is loaded where a call runs."""
    code = """
import jaxguard

@jaxguard.isolated_jax_worker
def f(): ...

@jaxguard.gpu_slot
def g(): ...

@jaxguard.trial_jit
def h(x): return x

jaxguard.isolated_jax_worker(gpus=2, timeout=3, reuse=True)
jaxguard.gpu_slot(gpus=2)
"""
    assert loaded_by(code, run_python) == set()


@pytest.mark.parametrize("heavy", ["numpy", "jax"])
def test_the_test_of_the_import_can_fail(heavy: str, run_python: Callable[..., Any]) -> None:
    """A package that is loaded after all is seen by the tests above."""
    assert heavy in loaded_by(f"import jaxguard, {heavy}", run_python)


def test_import_is_quick(run_python: Callable[..., Any]) -> None:
    """`import jaxguard` takes under 60 ms, the best of five on a noisy machine."""
    code = "import time; t = time.perf_counter(); import jaxguard; print(time.perf_counter() - t)"
    assert min(float(run_python(code, how="-c").check().stdout) for _ in range(5)) < 0.06


# ---- Floors ----------------------------------------------------------------------------------------------------------


def lint_floors(root: pathlib.Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter on the package in `root`, with the contracts of its pyproject.toml."""
    code = "import sys; from importlinter import cli; sys.exit(cli.lint_imports(no_cache=True))"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the tree in `root`, no other
    return subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def other_tree(tmp_path: pathlib.Path) -> pathlib.Path:
    """Give a copy of the package and its contracts that a test may spoil."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "jaxguard", tmp_path / "jaxguard", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_modules_import_only_from_floors_below() -> None:
    """The contracts of import-linter in pyproject.toml hold."""
    done = lint_floors(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_import_from_above_is_noticed(other_tree: pathlib.Path) -> None:
    """The test above can fail: a module of the lowest floor that imports from a higher one breaks the contract."""
    with (other_tree / "jaxguard" / "errors.py").open("a") as file:
        file.write("\nfrom jaxguard import _settings\n")
    done = lint_floors(other_tree)
    assert done.returncode == 1
    assert "jaxguard.errors is not allowed to import jaxguard._settings" in done.stdout


def test_a_module_without_a_floor_is_noticed(other_tree: pathlib.Path) -> None:
    """Each module has its floor: one that pyproject.toml does not list breaks the contract."""
    (other_tree / "jaxguard" / "_utils.py").touch()
    done = lint_floors(other_tree)
    assert done.returncode == 1
    assert "_utils" in done.stdout


# ---- Others' private doors -------------------------------------------------------------------------------------------


def private(path: str) -> bool:
    """Say whether a dotted path leads into another package through a name that starts with one underscore."""
    first, *rest = path.split(".")
    return first in OTHERS and any(part.startswith("_") and not part.endswith("__") for part in rest)


def private_doors(source: str) -> Iterator[str]:
    """Find where code imports, reaches or names something private of another package."""
    tree = ast.parse(source)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                if private(alias.name):
                    yield f"line {node.lineno}: {alias.name}"
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if private(f"{node.module}.{alias.name}"):
                    yield f"line {node.lineno}: {node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            base, _, rest = ast.unparse(node).partition(".")
            if base in names and private(f"{names[base]}.{rest}"):
                yield f"line {node.lineno}: {names[base]}.{rest}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and private(node.value.strip()):
            yield f"line {node.lineno}: {node.value!r}"


def test_only_one_module_uses_others_private_doors() -> None:
    """What may change without notice in JAX, Optuna, joblib or loky is used in one place."""
    found = {path.name: list(private_doors(path.read_text("utf-8"))) for path in sorted(PACKAGE.glob("*.py"))}
    assert found.pop(OWNER_OF_PRIVATE_DOORS), "the exception is not needed any more"
    assert {name: doors for name, doors in found.items() if doors} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import jax._src.xla_bridge",
        "from jax._src import xla_bridge",
        "from optuna.storages import _heartbeat",
        "def f():\n    import optuna as o\n    o.trial._trial",
        "import sys\nsys.modules.get('jax._src.core')",
    ],
)
def test_each_kind_of_private_door_is_noticed(code: str) -> None:
    """The test above can fail."""
    assert list(private_doors(code))


def test_public_doors_are_no_private_ones() -> None:
    """Names with two underscores, one's own privates and public paths are no finding."""
    code = (
        "import jax, optuna\nfrom . import _line\njax.monitoring.record_event\noptuna.__version__\n_line._x\n'jax.jit'"
    )
    assert list(private_doors(code)) == []
