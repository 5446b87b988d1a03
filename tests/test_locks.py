"""Where the locks are: on an inode that no user can unlink, or an error that names the setting."""

from __future__ import annotations

import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import uuid
from typing import TYPE_CHECKING

import pytest
from conftest import NOBODY
from test_devices import Script
from test_leases import CARDS, take

import jaxguard
from jaxguard import _beacons, _descriptors, _leases, _linux, _locks, gpu_slot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory that is owned by root")


@pytest.fixture
def shared() -> Iterator[pathlib.Path]:
    """Give a directory below one that all users reach, owned by root where this is root."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="jaxguard-test-") as name:
        pathlib.Path(name).chmod(0o755)
        yield pathlib.Path(name)


@pytest.fixture
def card() -> str:
    """Give the name of a card that no other test has."""
    return f"GPU-{uuid.uuid4()}"


# ---------------------------------------------------------------------------------------- /dev/null


def test_the_locks_are_on_the_null_device() -> None:
    """By default all users of the host meet at an inode that nobody can unlink."""
    locks = _locks.open_locks()
    assert os.readlink(f"/proc/self/fd/{locks}") == "/dev/null"
    assert not os.get_inheritable(locks)
    _descriptors.close(locks)


def test_another_user_is_excluded(card: str, as_nobody: Callable[..., list[str]]) -> None:
    """A holder of one user keeps all others off, root or not; what they are told is what `ps` shows."""
    lease = take(card)
    assert lease is not None
    lease.tell(study="secret", trial=3, phase="running")
    code = CARDS.replace("def take", "import jaxguard\nfrom jaxguard import _parties, _beacons\ndef take") + (
        "print(take(sys.argv[1]) is None)\n"
        "beacon = next(b for b in _beacons.seen() if b.place == _beacons.place(sys.argv[1]))\n"
        "print(_parties.in_words(_parties.behind(beacon)))\n"
        "lease = take(sys.argv[1] + 'b'); print(lease is not None)\n"
    )
    try:
        refused, words, other = as_nobody(code, card)
        assert (refused, other) == ("True", "True")
        assert f"pid {os.getpid()} (" in words
        assert "secret" not in words
        assert "trial 3 of study 'secret'" in _parties_words(card), "its own user is told"
    finally:
        lease.close()


def _parties_words(card: str) -> str:
    from jaxguard import _parties

    (beacon,) = (b for b in _beacons.seen() if b.place == _beacons.place(card))
    return _parties.job(_parties.behind(beacon))


def test_a_holder_of_another_user_is_waited_for(card: str, wait_until: Callable[..., None]) -> None:
    """Between users too: the next one is woken at the end of the holder."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    from conftest import BECOME

    code = BECOME + CARDS + "lease = take(sys.argv[1]); print('held' if lease else 'refused'); input()\n"
    with Script(code, card) as holder:
        assert holder.hear() == "held"
        assert pathlib.Path(f"/proc/{holder.pid}").stat().st_uid == NOBODY
        assert take(card) is None
        holder.kill()
        wait_until(lambda: (lease := take(card)) is not None and lease.close() is None, "free at its end")


# ---------------------------------------------------------------------------------------- another protocol


@pytest.mark.parametrize("protocol", [0, 2, 63])
def test_another_protocol_is_refused(card: str, protocol: int) -> None:
    """A holder whose locks may be elsewhere is refused, never ignored; afterwards all is well."""
    other = _locks.open_locks()
    assert _linux.lock_range(other, _locks.start_of("protocol") + protocol, 1, shared=True)
    try:
        with pytest.raises(jaxguard.JaxguardError, match=rf"by jaxguard's protocol {protocol}, and this one .* 1:"):
            take(card)
        with pytest.raises(jaxguard.JaxguardError, match="Use the same version of jaxguard in both"):
            gpu_slot().__enter__()
    finally:
        _descriptors.close(other)
    lease = take(card)
    assert lease is not None, "and nothing was left locked"
    lease.close()


# ---------------------------------------------------------------------------------------- JAXGUARD_DIR


def hold(env: dict[str, str], card: str) -> subprocess.CompletedProcess[str]:
    """Try to hold a card under some environment."""
    code = CARDS + "lease = take(sys.argv[1]); print('held' if lease else 'refused')"
    return subprocess.run(
        [sys.executable, "-c", code, card], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )


@root_only
def test_root_makes_the_directory(shared: pathlib.Path, card: str, as_nobody: Callable[..., list[str]]) -> None:
    """The first call of root makes directory and file; then all users exclude each other there."""
    folder = shared / "a" / "locks.d"
    env = {"JAXGUARD_DIR": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGUARD_DIR", str(folder))
        lease = take(card)
        assert lease is not None
        assert os.readlink(f"/proc/self/fd/{lease.descriptors[0]}") == str(folder / "jaxguard.locks")
        assert (folder / "jaxguard.locks").stat().st_mode & 0o777 == 0o666
        assert hold(env, card).stdout == "refused\n"
        assert as_nobody(CARDS + "print(take(sys.argv[1]) is None)", card, **env) == ["True"]
        assert hold({"JAXGUARD_DIR": ""}, card).stdout == "held\n", "who has no JAXGUARD_DIR meets others elsewhere"
        lease.close()
        with gpu_slot(slot_timeout=0) as slot:
            assert slot.devices
        assert jaxguard.isolated_jax_worker(os.getpid)() != os.getpid()
    assert as_nobody(CARDS + "print(take(sys.argv[1]) is not None)", card, **env) == ["True"]


def refusal(folder: object) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXGUARD_DIR", str(folder))
        with pytest.raises((jaxguard.JaxguardError, ValueError)) as caught:
            gpu_slot(slot_timeout=0).__enter__()
    text = str(caught.value)
    assert "JAXGUARD_DIR" in text
    return text


@root_only
def test_a_directory_of_another_user_is_refused(shared: pathlib.Path) -> None:
    """Whoever owns it, or one above it, could exchange the file and hold what is held."""
    for folder, owned in ((shared / "own", shared / "own"), (shared / "a" / "b", shared / "a")):
        folder.mkdir(parents=True)
        os.chown(owned, NOBODY, NOBODY)
        (folder / "jaxguard.locks").touch()
        assert f"{owned} is owned by uid {NOBODY}, not by root" in refusal(folder)


@root_only
def test_a_directory_that_others_may_write_is_refused(shared: pathlib.Path, card: str) -> None:
    """Unless only the owner of a file may rename it there."""
    folder = shared / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert f"others than root can exchange files in {folder}" in refusal(folder)
    folder.chmod(0o1777)
    assert hold({"JAXGUARD_DIR": str(folder)}, card).stdout == "held\n"


@root_only
def test_a_link_is_refused(shared: pathlib.Path) -> None:
    """Neither the path nor the file may be one: who made it could turn it elsewhere."""
    (shared / "real").mkdir()
    (shared / "link").symlink_to(shared / "real")
    assert f"it leads through a link to {shared / 'real'}: give that path" in refusal(shared / "link")
    (shared / "file").mkdir()
    (shared / "file" / "jaxguard.locks").symlink_to("/dev/null")
    assert "JAXGUARD_DIR" in refusal(shared / "file")


@root_only
def test_a_file_of_another_user_is_refused(shared: pathlib.Path) -> None:
    """In a directory that is open to all, somebody may have made it before root did."""
    shared.chmod(0o1777)
    (shared / "jaxguard.locks").touch()
    os.chown(shared / "jaxguard.locks", NOBODY, NOBODY)
    assert "it is not a file owned by root" in refusal(shared)


def test_a_path_that_is_none(shared: pathlib.Path) -> None:
    """A relative path, a file, a path below a file."""
    assert "'locks' is not valid. Valid is: the absolute path" in refusal("locks")
    (shared / "file").touch()
    for path in (shared / "file", shared / "file" / "below"):
        assert str(shared / "file") in refusal(path)


def test_a_user_cannot_make_it(shared: pathlib.Path, as_nobody: Callable[..., list[str]]) -> None:
    """What is missing, unwritable or unreadable is an error that says what an administrator does."""
    code = (
        "try:\n    gpu_slot(slot_timeout=0).__enter__()\n"
        "except JaxguardError as error:\n    print(error)\nelse:\n    print('held')\n"
    )
    env = {"JAXGUARD_DIR": str(shared / "none")}
    assert "none is not there" in as_nobody(code, **env)[0]
    (shared / "none").mkdir()
    (line,) = as_nobody(code, **env)
    assert "JAXGUARD_DIR" in line
    (shared / "none" / "jaxguard.locks").touch(0o600)
    (line,) = as_nobody(code, **env)
    assert "Permission denied" in line
    assert "writable for all" in line


@root_only
@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "9p", "ceph"])
def test_a_network_file_system_is_refused(shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its locks may span hosts, or exclude nobody."""
    monkeypatch.setattr(_linux, "file_system", lambda _: kind)
    assert f"it is on a network or user file system ({kind})" in refusal(shared)


def test_the_file_system_of_a_path() -> None:
    """The mount table names it."""
    assert _linux.file_system("/proc/self") == "proc"
    assert _linux.file_system("/dev/shm/x") in {"tmpfs", "overlay", "ext4", "xfs", "btrfs"}


@root_only
def test_a_file_system_without_locks(shared: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried, not believed."""
    monkeypatch.setattr(_locks, "_excludes", lambda _: False)
    assert "its file system has no open-file-description locks" in refusal(shared)


# ---------------------------------------------------------------------------------------- without a null device


@pytest.mark.parametrize("how", ["missing", "a file", "no locks"])
def test_the_second_best(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, card: str, how: str
) -> None:
    """Where /dev/null is not what it is elsewhere, a file of this user, and one warning that says so."""
    monkeypatch.setattr(_locks, "_warned", False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if how == "no locks":
        monkeypatch.setattr(_locks, "_null_works", lambda: False)
    else:
        monkeypatch.setattr(_locks, "NULL", str(tmp_path / "null"))
    if how == "a file":
        (tmp_path / "null").touch()
    with caplog.at_level(logging.WARNING, "jaxguard"):
        first = take(card)
        assert first is not None
        assert take(card) is None, "this user's programs exclude each other"
        first.close()
    (record,) = caplog.records
    assert "programs of other users, and of other containers, are not excluded. Set JAXGUARD_DIR" in record.getMessage()
    assert (tmp_path / "jaxguard" / "jaxguard.locks").stat().st_mode & 0o777 == 0o600


def test_no_place_at_all(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, card: str) -> None:
    """Where even that cannot be had, the error names the setting."""
    monkeypatch.setattr(_locks, "NULL", str(tmp_path / "null"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(jaxguard.JaxguardError, match=r"no device can be held: .* Set JAXGUARD_DIR to a directory"):
        take(card)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(_locks, "_excludes", lambda _: False)
    with pytest.raises(jaxguard.JaxguardError, match="has no open-file-description locks"):
        take(card)


def test_the_null_device_is_tried() -> None:
    """Two descriptions that lock the same place are told apart from one that lets both have it."""
    assert _locks._excludes("/dev/null")
    with pytest.raises(FileNotFoundError):
        _locks._excludes("/nonexistent/file")
    assert _locks._null_works()


def test_odd_pieces(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units of a card are found between those of others, and given back all or none."""
    one, two, three = (_locks.open_locks() for _ in range(3))
    start = _locks.start_of(card)
    for first, length in ((700, 40), (100, 50), (300, 10)):
        assert _linux.lock_range(one, start + first, length)
    assert _locks.units_held(two, card) == 100
    assert _locks.lock_units(two, card, 741) == []
    assert _locks.units_held(three, card) == 100, "nothing of it stays locked"
    pieces = _locks.lock_units(two, card, 740)
    assert pieces == [(0, 100), (150, 150), (310, 390), (740, 100)]
    assert _locks.units_held(three, card) == 840
    assert _locks.lock_units(three, card, 1) == []
    _locks.unlock_units(two, card, pieces)
    assert _locks.units_held(three, card) == 100
    tries: list[object] = []
    monkeypatch.setattr(_linux, "lock_range", lambda *about, **_: tries.append(about))
    assert _locks.lock_units(three, card, _leases.UNITS) == []
    assert not tries, "a whole card is not taken in pieces, not even for a moment"
    for descriptor in (one, two, three):
        _descriptors.close(descriptor)
