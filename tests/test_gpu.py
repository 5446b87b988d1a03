"""On a real GPU: `pytest -m gpu`. docs/gpu.md says where it has last passed; elsewhere these tests are skipped."""

from __future__ import annotations

import itertools
import os
import pathlib
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import optuna
import pytest
from conftest import EXEC_ENV, PLACE
from joblib import Parallel, delayed

import jaxguard
from jaxguard import _devices, _driver, _nvml, _tenants, gpu_slot, isolated_jax_worker, slot_count

if TYPE_CHECKING:
    from collections.abc import Callable


def _why_not() -> str:
    if not _driver.cards():
        return "the driver lists no GPU here"
    if not _devices._cuda_plugin():
        return "JAX has no CUDA plugin here"
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "there is a GPU")]


@pytest.fixture(autouse=True)
def on_the_gpus(monkeypatch: pytest.MonkeyPatch, slots: Any) -> None:
    """Use what this machine has, and keep this process off it."""
    monkeypatch.setenv("JAXGUARD_DEVICES", "auto")


needs_nvml = pytest.mark.skipif(not _nvml.is_there(), reason="nvidia-ml-py is not installed")


def what_is_here() -> dict[str, Any]:
    """In a worker: what JAX sees, after a matrix product on it."""
    import jax
    import jax.numpy as jnp

    x = jnp.ones((512, 512))
    (x @ x).block_until_ready()
    return {
        "platforms": [device.platform for device in jax.local_devices()],
        "mask": os.environ["CUDA_VISIBLE_DEVICES"],
        "limit": jax.local_devices()[0].memory_stats()["bytes_limit"],
    }


@pytest.mark.parametrize("env", [{}, EXEC_ENV], ids=["fork", "exec"])
@pytest.mark.parametrize("reuse", [False, True], ids=["fresh", "warm"])
def test_cuda_comes_up(env: dict[str, str], reuse: bool) -> None:  # noqa: FBT001
    """Workers of both ways start JAX on exactly one GPU, that of their slot; again and again."""
    ids = {device.id for device in _devices.usable()}
    call = isolated_jax_worker(env=env, reuse=reuse)(what_is_here)
    for _ in range(3):
        seen = call()
        assert seen["platforms"] == ["gpu"]
        assert seen["mask"] in ids
        assert seen["mask"].startswith(("GPU-", "MIG-"))


@needs_nvml
def test_the_worker_is_on_the_card_of_its_uuid(tmp_path: pathlib.Path, wait_until: Callable[..., None]) -> None:
    """The driver names the worker on the card that the slot says, and nobody is there after the call."""

    def stay(folder: pathlib.Path) -> str:
        seen = what_is_here()
        (folder / "pid").write_text(str(os.getpid()))
        while not (folder / "go").exists():
            time.sleep(0.01)
        return str(seen["mask"])

    import threading

    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(isolated_jax_worker(stay)(tmp_path)))
    thread.start()
    wait_until((tmp_path / "pid").exists, "the worker computes")
    running = {device.id: _nvml.processes(device.id) or [] for device in _devices.usable()}
    (tmp_path / "go").touch()
    thread.join(60)
    if _tenants._counts_as_the_driver():
        pid = int((tmp_path / "pid").read_text())
        assert [name for name, found in running.items() if pid in {process.pid for process in found}] == got
    assert sum(map(len, running.values())) >= 1
    with gpu_slot(slot_timeout=60):
        pass


def fill(part: float, folder: str, number: int, sharers: int) -> tuple[int, int]:
    """In a worker: fill a part of the memory that JAX may have, while all sharers do."""
    import jax
    import jax.numpy as jnp

    limit = jax.local_devices()[0].memory_stats()["bytes_limit"]
    x = jnp.ones(int(part * limit / 4), jnp.float32)
    x.block_until_ready()
    (pathlib.Path(folder) / str(number)).touch()
    until = time.monotonic() + 60
    while len(os.listdir(folder)) < sharers:
        assert time.monotonic() < until, "the others do not come"
        time.sleep(0.01)
    step = jax.jit(lambda a: a[:1024].reshape(32, 32) @ jnp.ones((32, 32)))
    for _ in range(20):
        step(x).block_until_ready()
    return limit, jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]


@pytest.mark.parametrize("sharers", [2, 4])
def test_sharers_keep_to_their_memory(tmp_path: pathlib.Path, sharers: int) -> None:
    """Two and four train side by side on one card, each with nearly all that it was promised."""
    device = _devices.usable()[0]
    guarded = isolated_jax_worker(gpus=1 / sharers, devices=[device.id])(fill)
    assert slot_count(gpus=1 / sharers, devices=[device.id]) == sharers
    found = Parallel(n_jobs=sharers, backend="threading")(
        delayed(guarded)(0.8, str(tmp_path), number, sharers) for number in range(sharers)
    )
    if device.memory_bytes is not None:
        assert sum(limit for limit, _ in found) <= device.memory_bytes
        assert all(limit <= device.memory_bytes / sharers for limit, _ in found)
    assert all(peak >= 0.8 * limit * 0.99 for limit, peak in found)


def test_the_memory_is_back_before_the_next_trial(tmp_path: pathlib.Path) -> None:
    """Five trials in a row fill the card: none dies of the memory of the one before."""
    guarded = isolated_jax_worker(fill)
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        guarded(0.9, str(folder), 0, 1)


def test_the_peak_is_in_the_attribute() -> None:
    """Each trial tells the peak memory of its device."""
    study = optuna.create_study()

    @isolated_jax_worker
    def objective(trial: optuna.Trial) -> float:
        import jax.numpy as jnp

        jnp.ones(64 << 20, jnp.float32).block_until_ready()
        return trial.suggest_float("x", 0, 1)

    study.optimize(objective, n_trials=2)
    for trial in study.trials:
        assert trial.user_attrs["jaxguard"]["peak_memory_bytes"] >= 256 << 20


FOREIGN = "import jax; jax.numpy.ones(9).block_until_ready(); print(jax.default_backend(), flush=True); input()"


@needs_nvml
def test_a_foreign_program_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without a slot makes its card FOREIGN, and is named; a container cannot tell, and says UNKNOWN."""
    device = _devices.usable()[0]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": device.id, "XLA_CLIENT_MEM_FRACTION": "0.05"}
    env.pop("JAX_PLATFORMS", None)
    with subprocess.Popen(
        [sys.executable, "-c", FOREIGN], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"gpu\n"
        try:
            if not _tenants._counts_as_the_driver():
                assert _tenants.of(device).state in {_tenants.State.UNKNOWN, _tenants.State.ALONE}
                return
            with pytest.raises(jaxguard.SlotTimeout, match=f"pid {other.pid} "):
                gpu_slot(devices=[device.id], slot_timeout=0).__enter__()
            monkeypatch.setenv("JAXGUARD_ALLOW_FOREIGN", "1")
            with gpu_slot(devices=[device.id], slot_timeout=0):
                pass
        finally:
            other.kill()
    monkeypatch.delenv("JAXGUARD_ALLOW_FOREIGN", raising=False)
    with gpu_slot(devices=[device.id], slot_timeout=60):
        pass


PARENT = """
import os, sys, time
import jax
import optuna
from jaxguard import isolated_jax_worker
jax.numpy.ones(3).block_until_ready()  # on the CPU: JAX_PLATFORMS=cpu
optuna.logging.set_verbosity(optuna.logging.ERROR)

@isolated_jax_worker(devices=[sys.argv[1]])
def objective(trial):
    import jax
    x = jax.numpy.ones((256, 256)) * trial.suggest_float("x", 0, 1)
    began = time.monotonic()
    while time.monotonic() - began < 0.2:
        (x @ x).block_until_ready()
    print("SPAN", began, time.monotonic(), jax.default_backend(), flush=True)
    return float(x.sum())

optuna.create_study().optimize(objective, n_trials=4)
"""


def test_two_parents_on_the_cpu_share_a_card_in_turns() -> None:
    """Two programs whose own JAX is kept off the GPU run their trials on one card, never two at once."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": PLACE}
    command = [sys.executable, "-c", PARENT, _devices.usable()[0].id]
    programs = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    outputs = [program.communicate(timeout=150) for program in programs]
    assert [program.returncode for program in programs] == [0, 0], outputs
    spans = sorted(
        (float(words[1]), float(words[2]), words[3])
        for output, _ in outputs
        for line in output.splitlines()
        if (words := line.split())[:1] == ["SPAN"]
    )
    assert len(spans) == 8
    assert {backend for *_, backend in spans} == {"gpu"}
    assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans))


def test_a_slot_for_this_process(run_python: Callable[..., Any]) -> None:
    """`gpu_slot` starts JAX on the device that it holds, and keeps it as an idle holder."""
    done = run_python(
        """
from jaxguard import gpu_slot
with gpu_slot() as slot:
    import jax
    print(jax.default_backend(), len(jax.local_devices()))
with gpu_slot(slot_timeout=0) as again:
    print(again.waited_s == 0.0, again.devices == slot.devices)
""",
        env={"JAX_PLATFORMS": None, "JAXGUARD_DEVICES": "auto"},
    ).check()
    assert done.stdout.split() == ["gpu", "1", "True", "True"]
