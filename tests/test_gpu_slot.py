"""`gpu_slot`: devices for this process, in force for a block, given back whatever happens."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import pickle
import signal
import subprocess
import sys
import threading
import types
from typing import TYPE_CHECKING, Any

import pytest
import raising
from test_devices import Driver, Script, four_cards, no_cards  # noqa: F401 - fixtures

import jaxguard
from jaxguard import _gpu_slot, _holds, _interrupts, _jax_state, _line, _records, gpu_slot, isolated_jax_worker

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

HOLD = """
from jaxguard import gpu_slot
with gpu_slot():
    print("held"); input()
"""


class BodyError(Exception):
    """What a body raises."""


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """Hold each test to what leaving means: no hold, the environment as it was."""
    before = dict(os.environ)
    yield
    assert _holds.current() is None
    after = dict(os.environ)
    for name in {*before, *after}:
        if before.get(name) != after.get(name):  # leave nothing for the tests that follow
            os.environ.pop(name, None)
            os.environ.update({name: before[name]} if name in before else {})
    changed = {
        name
        for name in {*before, *after} - {"JAXGUARD_DEVICES", "PYTEST_CURRENT_TEST"}
        if before.get(name) != after.get(name)
    }
    assert changed == set(), f"left changed: { ({name: after.get(name) for name in changed}) }"


def free() -> bool:
    """Say whether a call would find a slot at once."""
    with contextlib.suppress(jaxguard.SlotTimeout), gpu_slot(slot_timeout=0):
        return True
    return False


def run(how: str, guard: Any, body: Callable[[], Any]) -> Any:
    """Run a body in a block, or as a decorated function."""
    if how == "decorator":
        return guard(body)()
    with guard:
        return body()


hows = pytest.mark.parametrize("how", ["with", "decorator"])


# ---------------------------------------------------------------------------------------- in and out


@hows
def test_a_slot_is_held_and_given_back(slots: Callable[[int], None], how: str) -> None:
    """Inside, nobody else gets the device; outside, everybody does; the result comes through."""
    slots(1)

    def body() -> str:
        in_another: list[bool] = []
        with Script(HOLD.replace("gpu_slot()", "gpu_slot(slot_timeout=0)"), JAXGUARD_HOLD="") as other:
            in_another.append(other.process.wait(60) == 0)
        assert in_another == [False]
        return "result"

    assert run(how, gpu_slot(), body) == "result"
    assert free()


@hows
def test_the_enter_fails(slots: Callable[[int], None], how: str) -> None:
    """Without a slot the body does not run, and nothing is changed."""
    slots(1)
    ran: list[int] = []
    with Script(HOLD) as other:
        assert other.hear() == "held"
        for _ in range(2):
            with pytest.raises(jaxguard.SlotTimeout, match=f"pid {other.pid}"):
                run(how, gpu_slot(slot_timeout=0), lambda: ran.append(1))
    assert ran == []
    assert free()


@hows
@pytest.mark.parametrize("error", [BodyError, KeyboardInterrupt, SystemExit])
def test_the_body_fails(slots: Callable[[int], None], how: str, error: type[BaseException]) -> None:
    """What the body raises comes through as it is, and the slot is free."""
    slots(1)

    def body() -> None:
        assert os.environ["JAX_PLATFORMS"] == "cpu"
        raise error

    for _ in range(2):
        with pytest.raises(error):
            run(how, gpu_slot(slot_timeout=0), body)
        assert free()


@hows
def test_an_enter_that_breaks_half_way(monkeypatch: pytest.MonkeyPatch, slots: Callable[[int], None], how: str) -> None:
    """When something fails between the lock and the body, the lock is let go."""
    slots(1)

    def broken(*_: object) -> None:
        raise BodyError

    with monkeypatch.context() as patch:
        patch.setattr(_gpu_slot, "_jax_settings", broken)
        with pytest.raises(BodyError):
            run(how, gpu_slot(), lambda: None)
    assert free()


def told() -> list[str]:
    """Say what this process tells of its holds and waits."""
    return [str(facts) for facts in _records.read_all(os.getpid()).values() if facts.get("function") == "gpu_slot"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of files and sockets that were just opened
def test_a_users_time_limit_strikes_in_the_enter(slots: Callable[[int], None]) -> None:
    """What a signal handler raises there comes out as it is, and takes no slot along, nor anything else."""
    slots(1)
    before = dict(os.environ)
    guard = gpu_slot(slot_timeout=0)
    places = []
    for place in raising.everywhere(lambda: guard.__enter__() and None, most=3000):
        places.append(place)
        assert dict(os.environ) == before, place
        assert free(), place
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, place
        for stood in _interrupts._previous.values():  # what was begun to be installed stands there twice
            stood.clear()
    guard.__exit__(None, None, None)
    assert any("in _install" in place for place in places)
    assert any("in _configure_jax" in place for place in places)
    assert free()
    assert told() == []


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_users_time_limit_ends_a_wait(slots: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it strikes while somebody else holds the slot, it is not taken for an error of ours."""
    slots(1)
    monkeypatch.setattr(_line, "_LOOK_AGAIN_S", 0.0001)
    monkeypatch.setattr(_line, "_LOOK_SELDOM_S", 0.0001)

    def wait() -> None:
        with gpu_slot(slot_timeout=10):
            pytest.fail("there is a slot")

    with Script(HOLD) as other:
        assert other.hear() == "held"
        places = list(raising.everywhere(wait, most=2000))
        assert len(places) == 2000
        assert sum("in sleep" in place for place in places) > 2, "it looked again and again"
    assert free()
    assert told() == []


def test_the_slot_says_what_it_is(slots: Callable[[int], None]) -> None:
    """`devices`, `share`, `env` and `waited_s`, all data that cannot be changed."""
    slots(2)
    with gpu_slot() as slot:
        (device,) = slot.devices
        assert (device.id, device.index, device.kind, device.memory_bytes) == ("cpu:0", 0, "cpu", None)
        assert slot.share == 1.0
        assert slot.env == {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        assert 0 <= slot.waited_s < 30
        for thing, name in ((slot, "share"), (device, "id")):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(thing, name, "other")
        assert pickle.loads(pickle.dumps(slot)) == slot
    with gpu_slot(gpus=2) as slot:
        assert [device.id for device in slot.devices] == ["cpu:0", "cpu:1"]
        assert slot.env["JAX_NUM_CPU_DEVICES"] == "2"
    with gpu_slot(gpus=0) as slot:
        assert slot.env["JAX_NUM_CPU_DEVICES"] == "1"


def test_the_wait_is_told(slots: Callable[[int], None]) -> None:
    """`waited_s` is the time that passed until the slot was there."""
    slots(1)
    with Script(HOLD) as other:
        assert other.hear() == "held"
        timer = threading.Timer(0.3, other.tell)
        timer.start()
        with gpu_slot() as slot:
            assert 0.2 <= slot.waited_s < 60
        timer.join(30)


# ---------------------------------------------------------------------------------------- the guard itself


def test_a_guard_at_rest_is_data() -> None:
    """It compares, hashes, pickles and prints, and has neither lock nor descriptor."""
    guard = gpu_slot(gpus=2, slot_timeout=3)

    assert guard == gpu_slot(gpus=2, slot_timeout=3) != gpu_slot(gpus=2)
    assert len({guard, gpu_slot(gpus=2, slot_timeout=3)}) == 1
    assert pickle.loads(pickle.dumps(guard)) == guard
    assert repr(guard) == "GpuSlot(gpus=2, slot_timeout=3, devices=None)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        guard.gpus = 1  # type: ignore[misc]


def test_the_decorated_function_keeps_its_face() -> None:
    """Name, doc and signature are the function's own; arguments and result pass through."""

    @gpu_slot
    def train(x: int, *, y: int = 2) -> int:
        """Train."""
        return x * y

    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert str(inspect.signature(train)) == "(x: 'int', *, y: 'int' = 2) -> 'int'"
    assert train(3, y=5) == 15


async def coroutine() -> None: ...


def generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("function", [coroutine, generator])
def test_what_runs_after_its_call_is_refused(function: Any) -> None:
    """Generator and coroutine functions would run after the slot is let go: refused at decoration."""
    with pytest.raises(TypeError, match="its body would run after the slot is let go"):
        gpu_slot(function)
    with pytest.raises(TypeError, match="Write `with gpu_slot"):
        gpu_slot()(function)


def test_options_are_checked_at_decoration() -> None:
    """Bad values raise where they are written."""
    for bad in ("1", None, True):
        with pytest.raises(TypeError, match="gpus must be a whole number"):
            gpu_slot(gpus=bad)  # type: ignore[call-overload]
    for bad_number in (-1, 1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="gpus must be 0"):
            gpu_slot(gpus=bad_number)
    with pytest.raises(TypeError, match="guards a function, not 2"):
        gpu_slot(2)  # type: ignore[call-overload]


# ---------------------------------------------------------------------------------------- nesting, threads, order


def test_nesting_gives_the_hold_that_is_there(slots: Callable[[int], None]) -> None:
    """Inside a hold, and in a recursion, the same slot is given, without waiting; the outermost gives it back."""
    slots(1)
    seen: list[Any] = []

    @gpu_slot
    def recurse(depth: int) -> None:
        with gpu_slot(gpus=0) as slot:
            seen.append(slot)
        if depth:
            recurse(depth - 1)

    guard = gpu_slot()
    with guard as outer, guard as inner:
        recurse(3)
    assert inner is outer
    assert [slot is outer for slot in seen] == [True] * 4
    assert free()

    recurse(3)
    assert len({id(slot) for slot in seen[4:]}) == 1


def test_nesting_cannot_ask_for_more(slots: Callable[[int], None]) -> None:
    """Asking for more inside would wait for an ancestor: an error at once, and the outer block goes on."""
    slots(4)
    with gpu_slot() as slot:
        with (
            pytest.raises(jaxguard.JaxguardError, match="asks for gpus=2 inside a hold that has gpus=1"),
            gpu_slot(gpus=2),
        ):
            pass
        assert not isinstance(slot, jaxguard.JaxguardError)
        with gpu_slot() as again:
            assert again is slot


def test_blocks_may_end_in_another_order(slots: Callable[[int], None]) -> None:
    """With an ExitStack, or by hand, the first may end before the second."""
    slots(2)
    first, second = gpu_slot(), gpu_slot(gpus=0)
    one = first.__enter__()
    two = second.__enter__()
    assert one is two
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert free()

    one_guard = gpu_slot()
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(one_guard)
        assert _holds.current() is not None


def test_two_threads_on_one_guard(slots: Callable[[int], None]) -> None:
    """A hold belongs to its thread: another thread has one of its own, on another device."""
    slots(2)
    guard, both, got = gpu_slot(slot_timeout=20), threading.Barrier(2), []

    def use() -> None:
        try:
            with guard as slot:
                both.wait(20)
                got.append(slot.devices[0].id)
                both.wait(20)
        except Exception as error:  # noqa: BLE001 - it is looked at below
            both.abort()
            got.append(repr(error))

    threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert sorted(got) == ["cpu:0", "cpu:1"]


def test_two_threads_share_out_one_slot(slots: Callable[[int], None]) -> None:
    """With one slot the second thread waits for the first, as two programs would."""
    slots(1)
    inside, most, errors = [], [], []

    @gpu_slot(slot_timeout=60)
    def work() -> None:
        inside.append(1)
        most.append(len(inside))
        threading.Event().wait(0.01)
        inside.pop()

    def several() -> None:
        try:
            for _ in range(5):
                work()
        except Exception as error:  # noqa: BLE001 - it is looked at below
            errors.append(error)

    threads = [threading.Thread(target=several, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert errors == []
    assert most == [1] * 15


def test_a_guarded_call_beside_a_hold(slots: Callable[[int], None]) -> None:
    """While one thread holds a slot for this process, another thread's guarded calls run in workers as ever."""
    slots(2)
    got: list[Any] = []

    def call() -> None:
        try:
            got.append(isolated_jax_worker(os.getpid, slot_timeout=30)())
        except Exception as error:  # noqa: BLE001 - it is looked at below
            got.append(error)

    with gpu_slot():
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(60)
    assert isinstance(got[0], int), got
    assert got[0] != os.getpid()


def test_threads_that_leave_crosswise_restore_the_environment(slots: Callable[[int], None]) -> None:
    """First in, first out, and still the environment ends as it began."""
    slots(2)
    second_is_in, first_is_out, errors = threading.Event(), threading.Event(), []

    def first() -> None:
        with gpu_slot():
            started.set()
            second_is_in.wait(20)
        first_is_out.set()

    def second() -> None:
        started.wait(20)
        try:
            with gpu_slot(slot_timeout=20):
                second_is_in.set()
                first_is_out.wait(20)
                errors.append(os.environ.get("JAX_PLATFORMS"))
        except Exception as error:  # noqa: BLE001 - it is looked at below
            errors.append(error)
            second_is_in.set()

    started = threading.Event()
    threads = [threading.Thread(target=one, daemon=True) for one in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert errors == ["cpu"], "the one that is still inside has its environment"
    assert "JAXGUARD_HOLD" not in os.environ


def test_a_hold_does_not_narrow_what_other_threads_see(driver: Driver) -> None:
    """While one thread holds a card, and the environment says so, another thread still finds the other three."""
    got: list[Any] = []

    def look() -> None:
        try:
            got.append(jaxguard.slot_count())
            with gpu_slot(gpus=3, slot_timeout=0) as slot:
                got.extend(device.id for device in slot.devices)
        except Exception as error:  # noqa: BLE001 - it is looked at below
            got.append(error)

    with gpu_slot() as slot:
        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        thread.join(60)
        assert slot.devices[0].id == driver.ids[0]

    assert got == [4, *driver.ids[1:]]


def test_another_thread_may_not_end_a_block() -> None:
    """A hold belongs to the thread that opened it: leaving it elsewhere is an error, and it can still be left here."""
    guard, got = gpu_slot(), []

    def leave() -> None:
        try:
            guard.__exit__(None, None, None)
        except RuntimeError as error:
            got.append(str(error))

    with guard:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join(30)
    assert "entered by another thread" in got[0]
    assert free()


def test_inside_a_worker_it_is_the_workers_slot(fresh_guard: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """A trial that opens gpu_slot gets the slot that its worker has, in each of its threads."""
    slots(1)

    def look() -> list[Any]:
        import threading

        found: list[Any] = []

        def use() -> None:
            with gpu_slot(slot_timeout=0) as slot:
                found.append(([device.id for device in slot.devices], slot.env["JAX_PLATFORMS"], slot.waited_s))

        thread = threading.Thread(target=use)
        thread.start()
        thread.join(30)
        use()
        return found

    assert fresh_guard(look)() == [(["cpu:0"], "cpu", 0.0)] * 2


def test_inside_a_workers_block_it_is_refused(slots: Callable[[int], None]) -> None:
    """The slot of `with isolated_jax_worker()` is for its workers: gpu_slot there raises at once."""
    slots(1)
    with isolated_jax_worker() as worker:
        with pytest.raises(jaxguard.JaxguardError, match="whose slot is for its workers"), gpu_slot():
            pass
        assert worker(os.getpid) != os.getpid(), "the block goes on"
    assert free()


# ---------------------------------------------------------------------------------------- what is in force


def test_the_environment_is_in_force_and_restored() -> None:
    """Inside, variables say the slot's devices, to child processes too; outside, they are what they were."""
    shell = ["sh", "-c", "echo $JAX_PLATFORMS/$CUDA_VISIBLE_DEVICES/$JAX_NUM_CPU_DEVICES"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "7")
        patch.delenv("JAX_PLATFORMS", raising=False)
        with gpu_slot(gpus=2) as slot:
            assert slot.env.items() <= os.environ.items()
            assert subprocess.check_output(shell, text=True) == "cpu//2\n"

        assert os.environ["CUDA_VISIBLE_DEVICES"] == "7"
        assert "JAX_PLATFORMS" not in os.environ
        assert "JAXGUARD_HOLD" not in os.environ


def test_a_child_process_with_the_slots_environment(slots: Callable[[int], None]) -> None:
    """`subprocess.run(..., env=os.environ | slot.env)` runs JAX on the slot's devices and no others."""
    slots(2)
    with gpu_slot(gpus=2) as slot:
        done = subprocess.run(
            [sys.executable, "-c", "import jax; print(len(jax.devices()), jax.default_backend())"],
            env=os.environ | slot.env,
            capture_output=True,
            text=True,
            timeout=90,
        )
    assert done.stdout == "2 cpu\n", done.stderr


def test_a_guard_in_a_child_process_is_refused(slots: Callable[[int], None]) -> None:
    """A program started inside the block would wait for its own ancestor: an error at once, and fine afterwards."""
    slots(1)
    code = "from jaxguard import gpu_slot\ntry:\n    with gpu_slot(): print('held')\nexcept Exception as e: print(e)"
    with gpu_slot():
        with Script(code) as child:
            assert "was called in a child process" in child.hear()
        environment = dict(os.environ)
    with Script(code, **environment) as orphan:
        assert orphan.hear() == "held", "the hold that it names is over"


@pytest.mark.parametrize("first", ["import jax", ""], ids=["imported before", "imported inside"])
@pytest.mark.parametrize("gpus", [0, 1, 3])
def test_jax_starts_on_exactly_these_devices(run_python: Callable[..., Any], gpus: int, first: str) -> None:
    """JAX that starts in the block has so many devices, whether it was imported before or not."""
    done = run_python(
        f"""
{first}
from jaxguard import gpu_slot
with gpu_slot(gpus={gpus}) as slot:
    import jax
    print(jax.default_backend(), len(jax.devices()))
import os
assert "JAX_PLATFORMS" not in os.environ
print(len(jax.devices()))
""",
        env={"JAX_PLATFORMS": None, "JAX_NUM_CPU_DEVICES": None},
    ).check()

    assert done.stdout.split() == ["cpu", str(max(1, gpus)), str(max(1, gpus))]


def test_settings_of_an_imported_jax_are_restored(run_python: Callable[..., Any]) -> None:
    """A block in which JAX does not start leaves its settings as they were: the next one may differ."""
    run_python("""
import jax
from jaxguard import gpu_slot
before = jax.config.jax_platforms, jax.config.jax_num_cpu_devices
with gpu_slot(gpus=2):
    assert jax.config.jax_num_cpu_devices == 2 and jax.config.jax_platforms == "cpu"
assert (jax.config.jax_platforms, jax.config.jax_num_cpu_devices) == before
with gpu_slot(gpus=3):
    assert len(jax.devices()) == 3
with gpu_slot(gpus=2):
    assert len(jax.devices()) == 3, "started, and on no fewer than asked for"
""").check()


# ---------------------------------------------------------------------------------------- JAX has started already


def test_more_cpu_devices_than_jax_started_with(run_python: Callable[..., Any]) -> None:
    """JAX that has started with one device cannot be given two: the error says on what, and what to do."""
    done = run_python(
        """
import jax, jaxguard
jax.numpy.ones(2)
with jaxguard.gpu_slot():
    pass
try:
    with jaxguard.gpu_slot(gpus=2): pass
except jaxguard.JaxAlreadyStarted as error:
    print(error)
""",
        env={"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"},
    ).check()

    assert "JAX has started in this process (pid " in done.stdout
    assert "and gpus=2 asks for more. Open gpu_slot before the first JAX operation" in done.stdout


def test_jax_started_on_the_cpu_of_a_gpu_host(
    run_python: Callable[..., Any],
    driver: Driver,
    tmp_path: pathlib.Path,
) -> None:
    """On a GPU host the error names where JAX runs and which module started it; the card is free again."""
    (tmp_path / "model_zoo.py").write_text("import jax.numpy as jnp\nSCALE = jnp.ones(2)\n")
    done = run_python(
        f"""
{driver.prelude}
import jaxguard
import model_zoo
for gpus in (1, 4):
    try:
        with jaxguard.gpu_slot(gpus=gpus): print("held")
    except jaxguard.JaxAlreadyStarted as error:
        print(error)
with jaxguard.gpu_slot(gpus=0):
    print("the CPU is fine")
""",
        env={"JAX_PLATFORMS": "cpu", "JAXGUARD_DEVICES": None, "PYTHONPATH": str(tmp_path)},
    ).check()

    first, second, third = done.stdout.splitlines()
    for line in (first, second):
        assert "JAX has started in this process" in line
        assert "model_zoo.SCALE" in line
        assert "isolated_jax_worker" in line
    assert third == "the CPU is fine"
    with gpu_slot(gpus=4, slot_timeout=0) as slot:
        assert [device.id for device in slot.devices] == driver.ids


@pytest.mark.parametrize("first", ["import jax", ""], ids=["imported before", "imported inside"])
def test_a_gpu_that_does_not_come_up(run_python: Callable[..., Any], driver: Driver, first: str) -> None:
    """A block that holds a GPU on which JAX does not come up ends with an error, not as if all were well."""
    done = run_python(
        f"""
{driver.prelude}
import jaxguard
{first}
try:
    with jaxguard.gpu_slot() as slot:
        import jax
        jax.numpy.ones(2)
    print("ran on", jax.devices())
except (jaxguard.NoDevices, RuntimeError) as error:  # JAX itself raises RuntimeError, in some versions
    print("refused:", error)
""",
        env={"JAX_PLATFORMS": None, "JAXGUARD_DEVICES": None},
    ).check()

    assert done.stdout.startswith("refused:"), done.stdout


class StartedOnGpus:
    """Pretends that JAX has started here on so many cards."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch

    def __call__(self, count: int) -> None:
        device = types.SimpleNamespace(platform="gpu")
        self.patch.setattr(_jax_state, "started", lambda: True)
        self.patch.setattr(_jax_state, "local_devices", lambda: [device] * count)


@pytest.fixture
def started_on_gpus() -> Iterator[StartedOnGpus]:
    """Give what pretends that JAX has started on GPUs; let go of what is kept for it."""
    with pytest.MonkeyPatch.context() as patch:
        yield StartedOnGpus(patch)
    while _gpu_slot._kept:
        _gpu_slot._kept.pop().close()


@pytest.mark.usefixtures("driver")
def test_a_process_that_is_on_gpus_must_hold_all_it_sees(started_on_gpus: StartedOnGpus) -> None:
    """JAX that has started on four GPUs may hold four, and no fewer."""
    started_on_gpus(4)
    with pytest.raises(jaxguard.JaxAlreadyStarted, match=r"hold all that JAX sees \(gpus=4\)"), gpu_slot():
        pass
    with gpu_slot(gpus=4) as slot:
        assert len(slot.devices) == 4


def test_a_process_that_is_on_gpus_keeps_them(
    driver: Driver,
    started_on_gpus: StartedOnGpus,
) -> None:
    """JAX keeps the card's memory, so the process keeps the card: nobody else gets it, its next block at once."""
    with gpu_slot() as slot:
        started_on_gpus(1)
    other = HOLD.replace("gpu_slot()", "gpu_slot(gpus=4, slot_timeout=0)")
    with Script(driver.prelude + other) as script:
        assert script.process.wait(60) != 0, "another program does not get all four"

    with gpu_slot(slot_timeout=0) as again:
        assert again.devices == slot.devices
        assert again.waited_s == 0.0


@pytest.mark.usefixtures("driver")
def test_a_process_that_is_on_gpus_cannot_get_others(started_on_gpus: StartedOnGpus) -> None:
    """Once JAX is on one card, a block that asks for two is refused: two other cards would be held and not used."""
    with gpu_slot():
        started_on_gpus(1)
    with pytest.raises(jaxguard.JaxAlreadyStarted), gpu_slot(gpus=2, slot_timeout=0):
        pass


@pytest.mark.usefixtures("driver")
def test_a_process_that_is_on_gpus_does_not_wait_for_itself(started_on_gpus: StartedOnGpus) -> None:
    """Once JAX is on four cards, a block that asks for one uses what this process holds, as a nested one would."""
    with gpu_slot(gpus=4):
        started_on_gpus(4)
    with gpu_slot(slot_timeout=0) as slot:
        assert len(slot.devices) == 4
