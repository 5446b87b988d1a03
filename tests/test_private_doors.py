"""Doors that are not public: each one that jaxguard uses is still open, or this file says which closed."""

from __future__ import annotations

import atexit
import importlib
import inspect
import multiprocessing
import multiprocessing.process
import os
import pathlib
import re
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
DOORS = {
    "jax._src.xla_bridge.backends_are_initialized": "_jax_state counts the threads of XLA instead",
    "jax._src.compiler.compile_or_get_cached": "_jax_state finds no key: nobody waits for another who compiles",
    "threading._shutdown": "_ending prints what happens, and non-daemon threads of a trial are cut off",
    "atexit._run_exitfuncs": "_ending prints what happens, and atexit handlers of a trial do not run",
    "multiprocessing.process._children": "_starting and _inherited must find another way to disown the keeper",
    "multiprocessing.process._config": "_starting and _inherited must find another way to be no daemon",
}


def closed(door: str) -> str:
    """Say what it means that a door is closed."""
    return f"the private door {door} has closed: {DOORS[door]}. See docs/architecture.md, 'Doors that are not public'."


def open_door(door: str) -> Any:
    """Give what is behind a door, or fail with what that means."""
    module, _, name = door.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        pytest.fail(closed(door))


def test_this_file_and_the_page_name_the_same_doors() -> None:
    """Each row of the table in docs/architecture.md has its tests here."""
    table = PAGE.read_text("utf-8").partition("## Doors that are not public")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = set()
    for row in rows:
        *_, module = (word.rpartition(".")[0] for word in re.findall(r"`([\w.]+\.[\w]+)`", row))
        named |= {word if "." in word else f"{module}.{word}" for word in re.findall(r"`([\w.]+)`", row)}

    assert named == set(DOORS)


def test_a_closed_door_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of this file names the door and what to do: the tests here can fail."""
    monkeypatch.delattr(atexit, "_run_exitfuncs")
    with pytest.raises(pytest.fail.Exception, match=r"the private door atexit\._run_exitfuncs has closed: _ending"):
        open_door("atexit._run_exitfuncs")


def test_backends_are_initialized(run_python: Callable[..., Any]) -> None:
    """JAX's own word on whether it has started: no before the first operation, yes after it."""
    door = "jax._src.xla_bridge.backends_are_initialized"
    open_door(door)
    done = run_python(
        "import jax\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())\n"
        "jax.numpy.ones(2)\n"
        "print(xla_bridge.backends_are_initialized())\n",
        env={"JAX_PLATFORMS": "cpu"},
    )

    assert done.stdout.split() == ["False", "True"], closed(door) + done.stderr


def test_who_looks_for_a_program(run_python: Callable[..., Any]) -> None:
    """The function that sends JAX's event has the name of the entry, and the module, in its variables."""
    door = "jax._src.compiler.compile_or_get_cached"
    open_door(door)
    done = run_python(
        "import jax, os\n"
        "from jaxguard import _entries, _jax_state, _programs\n"
        "jax.config.update('jax_compilation_cache_dir', 'here')\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)\n"
        "watch, texts = _programs.Watch(), []\n"
        "watch.before = lambda program: texts.append(_jax_state.text_of(program.module))\n"
        "watch.listen()\n"
        "jax.jit(lambda x: x * 2.5)(1.0)\n"
        "keys = {program.key for program in watch.take()}\n"
        "assert keys == {_entries.key_of(name) for name in os.listdir('here') if name.endswith('-cache')}, keys\n"
        "assert keys and None not in keys, keys\n"
        "assert 'stablehlo.constant dense<2.500000e+00>' in texts[-1], texts\n"
        "assert _jax_state.program_in_need() is None\n",
        env={"JAX_PLATFORMS": "cpu"},
    )

    assert done.returncode == 0, closed(door) + done.stderr


def test_shutdown_joins_threads(run_python: Callable[..., Any]) -> None:
    """`threading._shutdown` takes nothing, winds executors up and waits for non-daemon threads."""
    door = "threading._shutdown"
    assert not inspect.signature(open_door(door)).parameters, closed(door)
    done = run_python(
        "import os, sys, threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(1)\n"
        "pool.submit(lambda: [time.sleep(0.2), print('job', flush=True)])\n"
        "threading.Thread(target=lambda: [time.sleep(0.2), print('thread', flush=True)]).start()\n"
        "threading._shutdown()\n"
        "print('after', flush=True)\n"
        "os._exit(0)\n"
    )

    assert sorted(done.stdout.split()[:2]) == ["job", "thread"], closed(door) + done.stderr
    assert done.stdout.split()[2:] == ["after"], closed(door) + done.stderr


def test_exit_handlers_can_be_run(run_python: Callable[..., Any]) -> None:
    """`atexit._run_exitfuncs` runs the handlers, the last one first, and forgets them."""
    door = "atexit._run_exitfuncs"
    open_door(door)
    done = run_python(
        "import atexit\n"
        "atexit.register(print, 'first')\n"
        "atexit.register(print, 'last')\n"
        "atexit._run_exitfuncs()\n"
        "print('after', flush=True)\n"
    )

    assert done.stdout.split() == ["last", "first", "after"], closed(door) + done.stderr


def test_children_of_multiprocessing() -> None:
    """`multiprocessing.process._children` is the set of those that it would wait for at exit."""
    door = "multiprocessing.process._children"
    children = vars(multiprocessing.process).get("_children")
    assert isinstance(children, set), closed(door)

    process = multiprocessing.get_context("spawn").Process(target=threading.Event)
    process.start()
    assert process in children, closed(door)
    process.join(60)
    assert process not in multiprocessing.active_children()


def test_config_of_multiprocessing() -> None:
    """A process has `_config`, whose `daemon` decides whether it may have children."""
    door = "multiprocessing.process._config"
    process = multiprocessing.get_context("spawn").Process(target=threading.Event, daemon=True)
    config = vars(process).get("_config")

    assert isinstance(config, dict), closed(door)
    assert config.get("daemon") is True, closed(door)
    config.pop("daemon")
    assert process.daemon is False, closed(door)
    assert isinstance(vars(multiprocessing.current_process()).get("_config"), dict), closed(door)


def test_the_keeper_is_no_child_to_wait_for(fresh_guard: Callable[..., Any]) -> None:
    """`multiprocessing` does not know the keeper, so the program's end does not wait for it."""
    from jaxguard import _starting

    fresh_guard(os.getpid)()
    assert _starting._current is not None
    assert _starting._current.pid not in {child.pid for child in multiprocessing.active_children()}


def test_a_worker_is_a_program_of_its_own(fresh_guard: Callable[..., Any]) -> None:
    """In a worker `multiprocessing` sees a main process without parent and children, that is no daemon."""

    def look() -> tuple[Any, ...]:
        me = multiprocessing.current_process()
        return me.name, me.daemon, multiprocessing.parent_process(), multiprocessing.active_children(), me._identity

    assert fresh_guard(look)() == ("MainProcess", False, None, [], ())
