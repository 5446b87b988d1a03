"""`jaxguard doctor`: a healthy host is called so; one that was made ill is told what is wrong, why, what to type."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import pytest

import jaxguard
from jaxguard import _checks, _devices, _doctor, _driver, _linux, _rehearsal, _store, gpu_slot, isolated_jax_worker
from jaxguard.__main__ import main
from jaxguard._findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PLACE = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))
FIGHTING = ("XLA_FLAGS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of the machine that runs the tests is a finding."""
    for name in (*FIGHTING, *(name for name in os.environ if name.startswith(("JAX_", "XLA_")))):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def examine(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Give what `jaxguard doctor --json` says: its exit status, and the findings by check."""

    def run(*words: str) -> dict[str, Any]:
        capsys.readouterr()
        code = main(["doctor", "--json", *words])
        view = json.loads(capsys.readouterr().out)
        assert view["version"] == 1
        assert view["bad"] == sum(finding["verdict"] == "bad" for finding in view["findings"])
        assert code == (1 if view["bad"] else 0)
        return view

    return run


def found(view: dict[str, Any], check: str, verdict: str) -> dict[str, str]:
    """The one finding of this kind; whatever is not right says why it matters and what to do."""
    (finding,) = [one for one in view["findings"] if (one["check"], one["verdict"]) == (check, verdict)]
    if verdict == "bad":
        assert finding["why"]
    return finding


# ---------------------------------------------------------------- a healthy host


def test_a_healthy_host(capsys: pytest.CaptureFixture[str], slots: Callable[[int], None]) -> None:
    """A verdict per line, all of them good; three steps with real workers; status 0."""
    slots(3)
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("Nothing bad in ")
    assert all(line.startswith(("ok ", "note", " ", "Nothing")) for line in lines if line)
    text = "\n".join(lines)
    for words in (
        f"Python {sys.version.split()[0]}, jax ",
        "no GPU: 3 CPU slots",
        "3 of 3 free, 0 waiting",
        "/dev/null, inode ",
        "3 trials, one after the other, each in a process of its own",
        "2 trials side by side on 2 slots",
        "3 trials side by side on 3 slots, as JAX sees them: one CPU device each",
        "one program for 3 trials: pid ",
    ):
        assert words in text


def test_it_starts_no_jax_here_and_leaves_no_slot_taken(run_python: Callable[..., Any]) -> None:
    """The command's own process stays clean, and all slots are free afterwards."""
    code = textwrap.dedent("""
        from jaxguard import _jax_state, gpu_slot
        from jaxguard.__main__ import main
        assert main(["doctor", "--json"]) == 0
        assert not _jax_state.started()
        with gpu_slot(gpus=2, slot_timeout=0):
            print("free")
    """)
    assert run_python(code).check().stdout.splitlines()[-1] == "free"


def test_quick_starts_no_worker(examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks only."""
    monkeypatch.setattr(_rehearsal, "steps", lambda **_: pytest.fail("a worker would be started"))
    view = examine("--quick")
    assert not view["bad"]


def test_jaxs_own_log_of_compilations(run_python: Callable[..., Any], slots: Callable[[int], None]) -> None:
    """On request, as JAX words it."""
    slots(1)
    code = "import sys\nfrom jaxguard.__main__ import main\nsys.exit(main(['doctor', *sys.argv[1:]]))"
    done = run_python(code, args=["--log-compiles"]).check()
    assert "rehearsal_step" in done.stderr
    assert "XLA compilation" in done.stderr
    assert "rehearsal_step" not in run_python(code).check().stderr


# ---------------------------------------------------------------- versions, devices


def test_versions_that_do_not_fit(examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """jaxlib of another version than JAX, a plugin of another version than jaxlib, an Optuna that is too old."""
    real = _checks._version
    fake = {"jaxlib": "0.5.3", "optuna": "2.10.1"}
    monkeypatch.setattr(_checks, "_version", lambda name: fake.get(name) or real(name))
    monkeypatch.setattr(_checks, "_required", lambda: {"optuna": "4.0", "jax": "0.6.1"})
    monkeypatch.setattr(_devices, "versions_that_do_not_fit", lambda: " Here the plugin is of another version.")
    facts = [one for one in examine("--quick")["findings"] if (one["check"], one["verdict"]) == ("versions", "bad")]
    assert [one["fact"].split(",")[0] for one in facts] == [
        "optuna 2.10.1 is here",
        f"jax {real('jax')} and jaxlib 0.5.3 are not of one version",
        "Here the plugin is of another version.",
    ]
    assert all(one["do"].startswith("pip install") for one in facts)
    assert "jaxguard needs optuna 4.0 or newer" in facts[0]["why"]


def test_what_is_required_is_what_is_declared() -> None:
    """The lowest versions are read from the package's own metadata, where it is installed."""
    required = _checks._required()
    assert not required or {"jax", "jaxlib", "optuna", "joblib", "loky", "filelock"} <= set(required)


def test_a_driver_without_devices(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A plugin for GPUs, and no GPU that may be used: each guarded call would say so, and so does the doctor."""
    monkeypatch.delenv("JAXGUARD_DEVICES")
    monkeypatch.setattr(_driver, "GPUS", tmp_path / "none")
    monkeypatch.setattr(_devices, "_cuda_plugin", lambda: "jax_cuda13_plugin")
    _driver.look_again()
    try:
        view = examine("--quick")
    finally:
        _driver.look_again()
    assert "the NVIDIA driver lists no GPU" in found(view, "devices", "bad")["fact"]


# ---------------------------------------------------------------- slots

HOLDER = """
import sys
from jaxguard import gpu_slot
with gpu_slot():
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(slots: Callable[[int], None]) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds one of two slots."""
    slots(2)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_held_slot(
    holder: subprocess.Popen[str], examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is noted with its holder; trials that wait for it in vain are noted."""
    monkeypatch.setattr(_rehearsal, "_SLOT_TIMEOUT_S", 0.5)
    began = time.monotonic()
    view = examine()
    assert time.monotonic() - began < _rehearsal._MEETING_S / 2, "nobody waits for one who could not come"
    assert found(view, "slots", "note")["fact"].startswith(f"cpu:0 is held by pid {holder.pid} (`python")
    assert " held" in found(view, "trials", "note")["fact"]
    assert not view["bad"], "a host that is busy is not ill"


def test_a_stopped_holder(
    holder: subprocess.Popen[str], examine: Callable[..., dict[str, Any]], wait_until: Callable[..., None]
) -> None:
    """It is named, with what to type."""
    os.kill(holder.pid, signal.SIGSTOP)
    wait_until(lambda: getattr(_linux.status(holder.pid), "state", "") == "T", "it is stopped")
    finding = found(examine("--quick"), "slots", "bad")
    assert f"held by pid {holder.pid}" in finding["fact"]
    assert "which is stopped" in finding["fact"]
    assert f"kill -CONT {holder.pid}" in finding["do"]


# ---------------------------------------------------------------- files, memory


def test_a_place_for_locks_that_is_none(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """A directory that anybody can change is refused with the reason."""
    folder = tmp_path / "locks"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    monkeypatch.setenv("JAXGUARD_DIR", str(folder))
    assert str(folder) in found(examine("--quick"), "locks", "bad")["fact"]


def test_a_directory_that_cannot_be_written(as_nobody: Callable[..., list[str]], tmp_path: pathlib.Path) -> None:
    """For programs: said, with the variable that names another one."""
    del tmp_path
    lines = as_nobody("from jaxguard import _checks\nfor finding in _checks.store(): print(finding)")
    assert lines[0].startswith("BAD   store ")
    assert any(words in lines[0] for words in ("cannot be written", "belongs to", "Permission denied"))
    assert "export JAXGUARD_CACHE_DIR=" in lines[2]


def test_a_read_only_file_system(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """Really one, in a mount namespace of its own; root cannot write there either."""
    code = textwrap.dedent(f"""
        import subprocess, sys
        folder = {str(tmp_path)!r} + "/read-only"
        script = f'''
        set -e
        mkdir -p {{folder}}
        mount -t tmpfs -o ro tmpfs {{folder}}
        mount -t tmpfs -o size=64k tmpfs /dev/shm
        head -c 60000 /dev/zero > /dev/shm/full
        JAXGUARD_CACHE_DIR={{folder}}/programs exec {{sys.executable}} -m jaxguard doctor --quick
        '''
        done = subprocess.run(["unshare", "-m", "sh", "-c", script])
        sys.exit(done.returncode)
    """)
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"], check=False).returncode:
        pytest.skip("no mount namespace can be made here")
    done = run_python(code)
    assert done.returncode == 1, done.stderr
    assert "/read-only cannot be written" in done.stdout
    assert "/dev/shm has 0 MB free of 0 MB" in done.stdout
    assert "docker run --shm-size=2g" in done.stdout


def test_a_torn_store(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """Torn programs are counted, and the command that removes them is named, and does."""
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(tmp_path / "programs"))
    isolated_jax_worker(lambda: float(__import__("jax").jit(lambda x: x + 3)(1.0)))()
    entries = [path for path in (tmp_path / "programs").rglob("*-cache") if "private" not in path.parts]
    assert entries
    entries[0].write_bytes(entries[0].read_bytes()[:-7])
    finding = found(examine("--quick"), "store", "bad")
    assert finding["fact"] == "1 programs of it are torn"
    assert finding["do"] == "jaxguard cache verify"
    assert main(["cache", "verify"]) == 0
    assert not examine("--quick")["bad"]
    assert _store.root() == str(tmp_path / "programs")


# ---------------------------------------------------------------- the environment


@pytest.mark.parametrize(
    ("name", "value", "verdict", "words"),
    [
        ("JAXGUARD_DEVICE", "cpu:2", "bad", "JAXGUARD_DEVICE is no setting of jaxguard"),
        ("JAXGUARD_INLINE", "1", "note", "guarded functions run in the calling process"),
        ("JAXGUARD_INLINE", "yes", "bad", "JAXGUARD_INLINE='yes' is not valid"),
        ("JAX_COMPILATION_CACHE_DIRECTORY", "/x", "note", "JAX_COMPILATION_CACHE_DIRECTORY is unknown to JAX"),
        ("JAX_COMPILATION_CACHE_DIR", "/x", "note", "JAX_COMPILATION_CACHE_DIR is set"),
        ("XLA_FLAGS", "--xla_dump_to=/tmp/x", "note", "XLA_FLAGS=--xla_dump_to=/tmp/x"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5", "note", "the part of a GPU's memory is set by hand"),
        ("XLA_PYTHON_CLIENT_MEM_FRACTION", "2", "bad", "XLA_PYTHON_CLIENT_MEM_FRACTION='2' is not valid"),
        ("OMP_NUM_THREADS", "64", "note", "OMP_NUM_THREADS=64, and a slot's share of the cores is"),
    ],
)
def test_variables(
    name: str,
    value: str,
    verdict: str,
    words: str,
    examine: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Misspelt, unknown, removed, or with another effect than they seem to have."""
    monkeypatch.setenv(name, value)
    assert words in found(examine("--quick"), "environment", verdict)["fact"]


def test_both_names_of_the_memory_fraction(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAX refuses to start with both."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    assert "are both set, and JAX refuses that" in found(examine("--quick"), "environment", "bad")["fact"]


def test_a_flag_that_ends_each_worker(examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What looking does not find, trying does: XLA's own words are in the finding."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_no_such_flag=1")
    finding = found(examine(), "trials", "bad")
    assert finding["fact"].startswith("WorkerDied: the worker of doctors_trial (pid ")
    assert "Unknown flag" in finding["fact"]


def test_inline_is_no_isolation(run_python: Callable[..., Any]) -> None:
    """The rehearsal notices that nothing ran in a process of its own, and goes no further."""
    code = "import sys\nfrom jaxguard.__main__ import main\nsys.exit(main(['doctor']))"
    done = run_python(code, env={"JAXGUARD_INLINE": "1"})
    assert done.returncode == 1
    assert "BAD   trials        3 trials ran in 1 processes" in done.stdout
    assert "1 of " in done.stdout.splitlines()[-1]


# ---------------------------------------------------------------- modules of users


@pytest.mark.parametrize(
    ("text", "verdict", "words"),
    [
        ("import jax\nf = jax.jit(lambda x: x)\n", "ok", "can be imported and leaves JAX unstarted"),
        ("print('hello')\n", "ok", "can be imported and leaves JAX unstarted"),
        ("import sys\nsys.exit(0)\n", "bad", "cannot be imported: it ends the program (exit code 0)"),
        ("import jax.numpy as jnp\nKEY = jnp.ones(3)\n", "note", "starts JAX: user_module"),
        ("import user_helper\n", "note", "starts JAX: user_helper"),
        ("raise LookupError('no data here')\n", "bad", "cannot be imported: LookupError: no data here"),
    ],
)
def test_a_module_of_the_user(
    text: str,
    verdict: str,
    words: str,
    examine: Callable[..., dict[str, Any]],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether its import starts JAX, and which import did it."""
    (tmp_path / "user_module.py").write_text(text)
    (tmp_path / "user_helper.py").write_text("import jax.numpy as jnp\nTABLE = jnp.arange(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")]))
    finding = found(examine("--quick", "user_module.py" if verdict == "ok" else "user_module"), "import", verdict)
    assert words in finding["fact"]


def test_on_a_gpu_a_module_that_starts_jax_is_bad(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Unless the parent is kept off the GPUs."""
    (tmp_path / "user_module.py").write_text("import jax.numpy as jnp\nKEY = jnp.ones(3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")]))
    card = dataclasses.replace(_devices.cpu_slots()[0], kind="NVIDIA A100")
    monkeypatch.setattr(_devices, "usable_or_cpu", lambda: (card,))
    assert _doctor._imported("user_module").verdict is Verdict.BAD
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert _doctor._imported("user_module").verdict is Verdict.NOTE


def test_a_setting_that_is_not_valid_is_a_finding(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the full run too: all is printed, and no worker is started."""
    monkeypatch.setenv("JAXGUARD_DEVICES", "cpu")
    view = examine()
    assert "JAXGUARD_DEVICES='cpu' is not valid" in found(view, "devices", "bad")["fact"]


def test_inline_starts_no_jax_in_the_doctor(run_python: Callable[..., Any], tmp_path: pathlib.Path) -> None:
    """A module is imported in a worker also where guarded functions are to run here."""
    (tmp_path / "user_module.py").write_text("import jax.numpy as jnp\nKEY = jnp.ones(3)\n")
    code = """
from jaxguard import _jax_state
from jaxguard.__main__ import main
main(["doctor", "--quick", "user_module"])
print("started:", _jax_state.started())
"""
    done = run_python(code, env={"JAXGUARD_INLINE": "1"}, cwd=tmp_path).check()
    assert "importing user_module starts JAX: user_module" in done.stdout
    assert done.stdout.splitlines()[-1] == "started: False"


def test_a_module_that_is_not_imported_in_time(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    """It says where the import is, and what the module has started does not hold it up."""
    text = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ndef here():\n    time.sleep(600)\nhere()\n"
    (tmp_path / "user_module.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_doctor, "_IMPORT_S", 1.0)
    fact = found(examine("--quick", "user_module"), "import", "bad")["fact"]
    assert "ran longer than timeout=1 s" in fact
    assert "in here" in fact


def test_a_doctor_that_is_killed_leaves_no_import_behind(
    tmp_path: pathlib.Path, wait_until: Callable[..., None]
) -> None:
    """The process that imports goes with it."""
    note = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    text = f"import os, pathlib, time\n{note}\ntime.sleep(600)\n"
    (tmp_path / "user_module.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([PLACE, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, "-m", "jaxguard", "doctor", "--quick", "user_module"]
    with subprocess.Popen(words, cwd=tmp_path, env=env) as process:
        wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "it imports")
        process.kill()
    pid = int((tmp_path / "pid").read_text())
    wait_until(lambda: getattr(_linux.status(pid), "state", "X") in "ZX", "its end")


def test_a_finding_for_people() -> None:
    """The verdict first; why it matters and what to type below."""
    finding = Finding("slots", Verdict.BAD, "held", "others wait", "kill 7")
    assert str(finding).splitlines() == [
        "BAD   slots         held",
        " " * 20 + "others wait",
        " " * 20 + "-> kill 7",
    ]


def test_a_check_that_fails_is_a_finding(
    examine: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not end the others."""

    def cores() -> Iterator[Finding]:
        raise OSError("no such file")
        yield

    monkeypatch.setattr(_checks, "ALL", (cores, _checks.devices))
    view = examine("--quick")
    assert [one["check"] for one in view["findings"]] == ["cores", "devices"]
    assert "could not be checked: no such file" in found(view, "cores", "note")["fact"]


def test_a_slot_of_this_thread(examine: Callable[..., dict[str, Any]]) -> None:
    """Inside of a hold nothing breaks either."""
    with gpu_slot():
        view = examine("--quick")
    assert found(view, "slots", "note")["fact"].startswith("cpu:0 is held by pid")
