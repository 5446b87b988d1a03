"""Compiled once per host: whoever needs a program that another worker compiles takes it from there."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import signal
import textwrap
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import optuna
import pytest
import steps

import jaxguard
from jaxguard import _caching, _descriptors, _gpus, _jax_state, _linux, _phases, _store, isolated_jax_worker

if TYPE_CHECKING:
    from collections.abc import Callable

WORKERS = 6


def together(trial: optuna.Trial, folder: pathlib.Path, work: Callable[[], float], workers: int = WORKERS) -> float:
    """Do some work when so many trials have come to this point."""
    (folder / str(trial.number)).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < workers and time.monotonic() < deadline:
        time.sleep(0.005)
    return work()


def run(
    slots: Any, tmp_path: pathlib.Path, work: Callable[[], float], workers: int = WORKERS, **options: Any
) -> list[dict[str, Any]]:
    """Run some work in cold workers side by side; return the attribute of each trial."""
    slots(workers)
    meeting = tmp_path / f"meeting{time.monotonic_ns()}"
    meeting.mkdir()
    options.setdefault("compile_cache", str(tmp_path / "store"))

    @isolated_jax_worker(**options)
    def objective(trial: optuna.Trial) -> float:
        return together(trial, meeting, work, workers)

    study = optuna.create_study()
    study.optimize(objective, n_trials=workers, n_jobs=workers)
    assert len({trial.value for trial in study.trials}) == 1, "each computes the same"
    return [trial.user_attrs["jaxguard"] for trial in study.trials]


def programs_in(folder: pathlib.Path) -> list[_store.Entry]:
    return [entry for kind in _store.kinds(str(folder)) for entry in _store.Store(str(folder), kind).entries()]


@pytest.mark.parametrize(
    "work",
    [
        steps.plain,
        steps.operations,
        steps.with_nnx,
        steps.with_equinox,
        steps.with_optax,
        steps.with_trial_jit,
    ],
    ids=lambda work: work.__name__,
)
def test_six_cold_workers_compile_each_program_once(
    slots: Any, tmp_path: pathlib.Path, work: Callable[[], float]
) -> None:
    """Over all workers there is one compilation per program; all the others are hits."""
    module = {"with_nnx": "flax", "with_equinox": "equinox", "with_optax": "optax"}.get(work.__name__, "jax")
    pytest.importorskip(module)
    told = run(slots, tmp_path, work)
    programs = programs_in(tmp_path / "store")
    compiled = collections.Counter(p["key"] for facts in told for p in facts["programs"] for _ in range(p["compiles"]))
    assert not [key for key, times in compiled.items() if times > 1], told
    assert sum(facts["compiles"] for facts in told) == len(programs) > 0
    assert sum(facts["cache_hits"] for facts in told) >= (WORKERS - 1) * len(programs)
    assert not any((tmp_path / "store" / "v1" / "private").iterdir()), "no worker leaves a directory"


def test_a_warm_store_compiles_nothing(slots: Any, tmp_path: pathlib.Path) -> None:
    """A second study on the same host compiles nothing, and says what it saved."""
    run(slots, tmp_path, steps.plain, 1)
    (told,) = run(slots, tmp_path, steps.plain, 1)
    assert told["compiles"] == 0
    assert told["compile_s"] == 0
    assert told["cache_hits"] > 0
    assert told["saved_s"] > 0


def test_each_program_has_its_key(slots: Any, tmp_path: pathlib.Path) -> None:
    """The door through which keys are learnt is JAX's, and half private: this goes red when it closes."""
    (told,) = run(slots, tmp_path, steps.plain, 1)
    assert "plain_step" in [program["function"] for program in told["programs"]]
    assert all(program["key"] for program in told["programs"])


# ---------------------------------------------------------------- what JAX does not store, what fails


def test_nobody_waits_for_what_jax_does_not_store(slots: Any, tmp_path: pathlib.Path, capfd: Any) -> None:
    """A program with a host callback is marked by the first who compiled it, and the report says why."""
    (first,) = run(slots, tmp_path, steps.printing, 1)
    (row,) = [program for program in first["programs"] if program["function"] == "step"]
    if "stored" not in row:
        pytest.skip("this JAX stores programs with host callbacks")
    store = _store.Store(str(tmp_path / "store"), _store.kinds(str(tmp_path / "store"))[0])
    (key,) = os.listdir(os.path.join(store.path, "marks"))
    assert key.startswith(row["key"])
    assert row["stored"] is False
    flight = store.open_flights()
    assert store.take_flight(flight, key), "somebody compiles it for ever"
    try:
        (second,) = run(slots, tmp_path, steps.printing, 1, timeout=60)
    finally:
        _descriptors.close(flight)
    assert second["compiles"] == 1
    assert capfd.readouterr().out.count("the loss is 3.0") == 2


def failing() -> float:
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, compiler_options={"no_such_option": True})
    def step(x: Any) -> Any:
        return x * 2

    try:
        step(jnp.ones(3))
    except Exception as error:  # noqa: BLE001 - whatever this JAX raises
        return float("no_such_option" in str(error))
    return 0.0


def test_a_compilation_that_failed_is_not_marked(slots: Any, tmp_path: pathlib.Path) -> None:
    """The next one tries again, and waits for nobody."""
    for _ in range(2):
        (told,) = run(slots, tmp_path, failing, 1, timeout=60)
        assert told["compiles"] > 0
    (kind,) = _store.kinds(str(tmp_path / "store"))
    assert os.listdir(tmp_path / "store" / "v1" / kind / "marks") == []


def die_compiling() -> float:
    """Be killed while compiling: after JAX has asked for the program, before it has it."""
    import jax

    def kill(event: str, **_: Any) -> None:
        if event.endswith("compile_requests_use_cache"):
            os.kill(os.getpid(), signal.SIGKILL)

    jax.monitoring.register_event_listener(kill)
    return steps.plain()


def test_a_worker_that_is_killed_while_it_compiles(slots: Any, tmp_path: pathlib.Path) -> None:
    """It takes its flight and its directory with it: the next one compiles, and waits for nobody."""
    guarded = isolated_jax_worker(compile_cache=str(tmp_path / "store"))
    with pytest.raises(jaxguard.WorkerDied):
        guarded(die_compiling)()
    assert not any((tmp_path / "store" / "v1" / "private").iterdir())
    (told,) = run(slots, tmp_path, steps.plain, 1, timeout=60)
    assert told["compiles"] > 0


# ---------------------------------------------------------------- threads, logging, user's own settings


def in_threads() -> float:
    """Compile the same programs, and others, in eight threads at once."""
    import jax
    import jax.numpy as jnp

    def work(number: int) -> float:
        @jax.jit
        def step(x: Any) -> Any:
            for _ in range(10):
                x = jnp.sin(x) + number % 4
            return x

        return float(step(jnp.ones(3)).sum()) + steps.plain()

    with ThreadPoolExecutor(8) as pool:
        return round(sum(pool.map(work, range(8))), 3)


def test_threads_of_one_worker(slots: Any, tmp_path: pathlib.Path) -> None:
    """Threads that compile at once do not wait for each other in a circle, and share what they compile."""
    told = run(slots, tmp_path, in_threads, 3, timeout=120)
    assert sum(facts["compiles"] for facts in told) == len(programs_in(tmp_path / "store"))


def without_keys() -> float:
    _jax_state.program_in_need = lambda: None
    return steps.plain()


def test_without_keys_programs_are_shared_all_the_same(slots: Any, tmp_path: pathlib.Path) -> None:
    """Where keys cannot be learnt, a program that is there is found; what is compiled goes into the store."""
    run(slots, tmp_path, without_keys, 1)
    assert programs_in(tmp_path / "store")
    (told,) = run(slots, tmp_path, without_keys, 1)
    assert told["compiles"] == 0


def programs_of(**options: Any) -> dict[str, Any]:
    study = optuna.create_study()
    study.optimize(isolated_jax_worker(**options)(lambda _: steps.plain()), n_trials=1)
    told: dict[str, Any] = study.trials[0].user_attrs["jaxguard"]
    return told


def test_a_directory_of_ones_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's own cache is JAX's affair: jaxguard stands aside, says so once, and refuses contradictions."""
    monkeypatch.setattr(_caching, "_told", set())
    mine = tmp_path / "mine"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(mine))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    assert programs_of()["compiles"] > 0
    assert list(mine.glob("*plain_step*-cache"))
    assert programs_of()["compiles"] == 0
    said = [record.getMessage() for record in caplog.records if record.name == "jaxguard"]
    assert len(said) == 1
    assert "because JAX_COMPILATION_CACHE_DIR is set" in said[0]
    assert programs_of(compile_cache="off")["compiles"] == 0
    with pytest.raises(ValueError, match="compile_cache='private' of the guard and JAX_COMPILATION_CACHE_DIR"):
        isolated_jax_worker(compile_cache="private")(steps.plain)()


def test_settings_of_a_cache_that_is_not_there(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a directory they mean nothing to JAX, and are no reason to share nothing."""
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "100")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_MAX_SIZE", "1")
    store = str(tmp_path / "store")
    assert programs_of(compile_cache=store)["compiles"] > 0
    assert programs_of(compile_cache=store)["compiles"] == 0
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
    assert programs_of(compile_cache=store)["compiles"] == 0
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    monkeypatch.setattr(_caching, "_told", set())
    assert programs_of()["compiles"] > 0
    assert "JAX_ENABLE_COMPILATION_CACHE is set" in caplog.text


def test_a_directory_set_by_hand_in_the_parent(tmp_path: pathlib.Path, run_python: Any) -> None:
    """`jax.config.update` in the parent is in force in the worker."""
    code = f"""
        import jax, steps
        from jaxguard import isolated_jax_worker
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path / "mine")!r})
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        for reuse in (False, True):
            isolated_jax_worker(reuse=reuse)(steps.plain)()
    """
    done = run_python(textwrap.dedent(code), env={"PYTHONPATH": str(pathlib.Path(__file__).parent)}).check()
    assert list((tmp_path / "mine").glob("*plain_step*-cache"))
    assert done.stderr.count("jax.config.jax_compilation_cache_dir") == 1


def test_a_directory_of_one_guard(tmp_path: pathlib.Path, run_python: Any) -> None:
    """`env=` of a guard is nearer to the call than what the parent has: it sets a cache, and unsets one."""
    code = f"""
        import jax, steps
        from jaxguard import isolated_jax_worker
        mine = {{"JAX_COMPILATION_CACHE_DIR": {str(tmp_path / "mine")!r}}}
        mine["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        isolated_jax_worker(env=mine)(steps.plain)()
        jax.config.update("jax_compilation_cache_dir", {str(tmp_path / "parent")!r})
        store = {str(tmp_path / "store")!r}
        isolated_jax_worker(env={{"JAX_COMPILATION_CACHE_DIR": None}}, compile_cache=store)(steps.plain)()
    """
    run_python(textwrap.dedent(code), env={"PYTHONPATH": str(pathlib.Path(__file__).parent)}).check()
    assert list((tmp_path / "mine").glob("*plain_step*-cache"))
    assert programs_in(tmp_path / "store")
    assert not (tmp_path / "parent").exists()


def own_directory_inside(path: pathlib.Path) -> float:
    import jax

    jax.config.update("jax_compilation_cache_dir", str(path))
    return steps.plain()


@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_a_directory_set_in_the_objective(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reuse: bool,  # noqa: FBT001
) -> None:
    """JAX uses it, jaxguard stands aside and says so once."""
    monkeypatch.setattr(_caching, "_told", set())
    guarded = isolated_jax_worker(reuse=reuse, compile_cache=str(tmp_path / "store"))(own_directory_inside)
    for _ in range(2):
        guarded(tmp_path / "mine")
    assert list((tmp_path / "mine").glob("*plain_step*-cache"))
    assert not programs_in(tmp_path / "store")
    assert sum("has changed the directory" in record.getMessage() for record in caplog.records) == 1


def restored(folder: pathlib.Path) -> float:
    """Use a directory of one's own for a while."""
    import jax

    before = jax.config.values["jax_compilation_cache_dir"]
    jax.config.update("jax_compilation_cache_dir", str(folder))
    value = steps.operations()
    jax.config.update("jax_compilation_cache_dir", before)
    return value + steps.plain()


def test_a_directory_for_a_while(tmp_path: pathlib.Path) -> None:
    """It harms no program of others, also when the objective has put it back."""
    store = str(tmp_path / "store")
    expected = isolated_jax_worker(compile_cache=store)(lambda: steps.operations() + steps.plain())()
    before = {entry.key for entry in programs_in(tmp_path / "store")}
    assert isolated_jax_worker(compile_cache=store)(restored)(tmp_path / "mine") == expected
    assert {entry.key for entry in programs_in(tmp_path / "store")} == before


def late(folder: pathlib.Path) -> float:
    import jax

    steps.operations()
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return steps.plain()


def test_a_directory_that_is_set_late(tmp_path: pathlib.Path) -> None:
    """It is used though JAX has compiled before: from the next program on."""
    isolated_jax_worker(compile_cache=str(tmp_path / "store"))(late)(tmp_path / "mine")
    assert list((tmp_path / "mine").glob("*plain_step*-cache"))


def with_a_threshold() -> float:
    import jax

    jax.config.update("jax_persistent_cache_min_compile_time_secs", 100.0)
    return steps.plain()


def test_a_threshold_in_the_objective_marks_nothing(tmp_path: pathlib.Path) -> None:
    """That one trial wants nothing stored is no word about the program."""
    isolated_jax_worker(compile_cache=str(tmp_path / "store"))(with_a_threshold)()
    (kind,) = _store.kinds(str(tmp_path / "store"))
    assert os.listdir(tmp_path / "store" / "v1" / kind / "marks") == []


def test_private_and_off(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither shares a program; neither leaves anything."""
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(tmp_path / "store"))
    for way in ("private", "off"):
        first, second = programs_of(compile_cache=way), programs_of(compile_cache=way)
        assert first["compiles"] == second["compiles"] > 0
    assert not programs_in(tmp_path / "store")
    assert not any((tmp_path / "store" / "v1" / "private").iterdir())


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ("sharde", ValueError, r"compile_cache='sharde' is not valid. Valid are: \"shared\""),
        ("some/where", ValueError, "absolute path"),
        (True, TypeError, "compile_cache must be text or a path, not True"),
        (None, TypeError, "not None"),
    ],
)
def test_values_that_are_not_valid(value: Any, error: type[Exception], words: str) -> None:
    """Said at decoration, with those that are."""
    with pytest.raises(error, match=words):
        isolated_jax_worker(compile_cache=value)


# ---------------------------------------------------------------- a store that cannot be used


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "compiled programs are not kept" in r.getMessage()]


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_caching, "_told", set())


@pytest.mark.usefixtures("untold")
def test_a_store_of_somebody_else(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """The trials run, and one warning says what is lost, why, and what to do."""
    folder = tmp_path / "store"
    folder.mkdir()
    folder.chmod(0o777)
    for _ in range(2):
        assert programs_of(compile_cache=str(folder))["compiles"] > 0
    (said,) = losses(caplog)
    assert re.search(r"others can write in .*store \(mode 777\).*JAXGUARD_CACHE_DIR", said)
    assert not any(folder.iterdir())


@pytest.mark.usefixtures("untold")
def test_a_store_that_is_a_file(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Or that cannot be made for another reason."""
    (tmp_path / "store").touch()
    assert programs_of(compile_cache=str(tmp_path / "store"))["compiles"] > 0
    assert len(losses(caplog)) == 1


def vanish(folder: pathlib.Path) -> float:
    value = steps.operations()
    shutil.rmtree(folder)
    return value + steps.plain()


@pytest.mark.usefixtures("untold")
@pytest.mark.filterwarnings("error")
def test_a_store_that_vanishes(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody cleans up in the middle of a trial: it goes on, the next one makes the store again."""
    guarded = isolated_jax_worker(compile_cache=str(tmp_path / "store"))
    expected = guarded(lambda: steps.operations() + steps.plain())()
    assert guarded(vanish)(tmp_path / "store") == expected
    assert len(losses(caplog)) == 1
    assert guarded(lambda: steps.operations() + steps.plain())() == expected
    assert programs_in(tmp_path / "store")


def on_a_full_disk() -> float:
    import jax

    jax.block_until_ready(jax.numpy.ones(3))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    return steps.plain()


@pytest.mark.usefixtures("untold")
@pytest.mark.filterwarnings("error")
def test_a_disk_that_is_full(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """What does not fit is not kept, nor half of it; one warning says so; with room again all is well."""
    guarded = isolated_jax_worker(compile_cache=str(tmp_path / "store"))
    expected = guarded(steps.plain)()
    shutil.rmtree(tmp_path / "store")
    assert guarded(on_a_full_disk)() == expected
    assert any("disk full" in said for said in losses(caplog))
    store = _store.Store(str(tmp_path / "store"), _store.kinds(str(tmp_path / "store"))[0])
    assert all(store.is_sound(entry) for entry in store.entries())
    assert os.listdir(os.path.join(store.path, "marks")) == [], "a full disk is no reason never to wait"
    guarded(steps.plain)()
    assert any("plain_step" in name for entry in store.entries() for name in os.listdir(entry.path))


def test_an_entry_that_jax_cannot_read(tmp_path: pathlib.Path, recwarn: pytest.WarningsRecorder) -> None:
    """One that is sealed, but no program, is taken out by the first who meets it."""
    folder = tmp_path / "store"
    programs_of(compile_cache=str(folder))
    store = _store.Store(str(folder), _store.kinds(str(folder))[0])
    for entry in store.entries():
        (name,) = [name for name in os.listdir(entry.path) if name.endswith("-cache")]
        data = zlib.compress(b"\0\0\0\1no program")
        os.unlink(os.path.join(entry.path, name))
        pathlib.Path(entry.path, name).write_bytes(data)
        seal = {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data), "compile_s": 1.0}
        pathlib.Path(entry.path, "seal.json").write_text(json.dumps(seal))
    assert programs_of(compile_cache=str(folder))["compiles"] > 0
    for entry in store.entries():  # what was compiled in its place
        assert all(pathlib.Path(entry.path, name).read_bytes() != data for name in os.listdir(entry.path))
    assert programs_of(compile_cache=str(folder))["compiles"] > 0
    assert programs_of(compile_cache=str(folder))["compiles"] == 0
    assert not recwarn.list


# ---------------------------------------------------------------- odd trials


def in_a_child(number: int) -> float:
    import jax.numpy as jnp

    return float(jnp.sin(jnp.float32(number)))


def forks_a_pool() -> list[float]:
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return pool.map(in_a_child, range(4))


def test_a_pool_that_a_trial_forks(tmp_path: pathlib.Path) -> None:
    """Children that start JAX for themselves neither wait for the worker's directory nor write into it."""
    guarded = isolated_jax_worker(compile_cache=str(tmp_path / "store"), timeout=60)(forks_a_pool)
    assert guarded() == pytest.approx([0.0, 0.8415, 0.9093, 0.1411], abs=1e-3)
    assert not programs_in(tmp_path / "store")


def with_odd_names() -> float:
    import jax

    total = 0.0
    for name in ("x" * 240, "a/b", "../../x", "é漢", "new\nline", "%s{}", "-"):

        def step(x: Any) -> Any:
            return x * 2.0

        step.__name__ = step.__qualname__ = name
        total += float(jax.jit(step)(1.0))
    return total


@pytest.mark.filterwarnings("error")
def test_functions_with_odd_names(tmp_path: pathlib.Path) -> None:
    """Whatever a function is called, it runs; one whose name is too long for a file is compiled each time."""
    guarded = isolated_jax_worker(compile_cache=str(tmp_path / "store"))(with_odd_names)
    for _ in range(5):
        assert guarded() == 14.0
    assert not [path for path in tmp_path.rglob("*-cache") if path.parent.parent.name != "entries"]
    (kind,) = _store.kinds(str(tmp_path / "store"))
    assert os.listdir(tmp_path / "store" / "v1" / kind / "marks") == []


def with_a_limit_of_its_own() -> str:
    """Set an alarm that raises while this worker waits for another's compilation."""
    import jax

    def too_long(*_: object) -> None:
        raise TimeoutError("my own limit")

    jax.devices()  # JAX is up: one that is just starting may swallow what a handler raises
    signal.signal(signal.SIGALRM, too_long)
    signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)
    try:
        steps.plain()
    except TimeoutError as error:
        return f"{error}, {len(_phases._programs)} programs on their way"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return "no limit"


def test_a_users_own_limit_ends_the_wait(slots: Any, tmp_path: pathlib.Path) -> None:
    """What a signal handler raises while a worker waits is the user's, and goes where he expects it."""
    run(slots, tmp_path, steps.plain, 1)
    store = _store.Store(str(tmp_path / "store"), _store.kinds(str(tmp_path / "store"))[0])
    flights = store.open_flights()
    for entry in list(store.entries()):
        store.discard(entry.key)
        assert store.take_flight(flights, entry.key)
    try:
        assert isolated_jax_worker(compile_cache=str(tmp_path / "store"))(with_a_limit_of_its_own)() == (
            "my own limit, 0 programs on their way"
        )
    finally:
        _descriptors.close(flights)


# ---------------------------------------------------------------- what fits together


def test_programs_are_kept_apart_by_what_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another jaxlib, another GPU model, another processor: another part of the store, whose name says which."""
    cpu = _gpus.Device("cpu:0", 0, "cpu", None, "lock", "line")
    gpu = _gpus.Device("GPU-1", 0, "NVIDIA H100 80GB HBM3", None, "lock", "line")
    names = [_caching.kind_of((cpu,)), _caching.kind_of((gpu,)), _caching.kind_of((gpu, gpu))]
    assert names[0].startswith("jaxlib-")
    assert "NVIDIA-H100-80GB-HBM3" in names[1]
    assert names[1] == names[2] != names[0]
    monkeypatch.setattr("jaxlib.version.__version__", "9.9.9")
    names.append(_caching.kind_of((cpu,)))
    assert names[3].startswith("jaxlib-9.9.9,cpu-")
    monkeypatch.setattr(_caching, "_cpu", lambda: "another")
    names.append(_caching.kind_of((cpu,)))
    assert len(set(names)) == 4


# ---------------------------------------------------------------- memory


def a_new_step(number: int) -> tuple[int, int]:
    """Build a step, run it, and forget it; return the process and its memory in bytes."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def step(x: Any) -> Any:
        return jnp.sin(x) * (1.0 + number / 1000)

    step(jnp.ones(3)).block_until_ready()
    return os.getpid(), _linux.memory_bytes()


def test_three_hundred_steps_in_one_warm_worker(slots: Any, tmp_path: pathlib.Path) -> None:
    """A warm worker does not grow with the steps that trials build: less than 10 % after the first twenty."""
    slots(1)
    guarded = isolated_jax_worker(reuse=True, compile_cache=str(tmp_path / "store"))(a_new_step)
    told = [guarded(number) for number in range(300)]
    assert len({pid for pid, _ in told}) == 1
    assert told[-1][1] < 1.1 * told[20][1]
