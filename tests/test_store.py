"""The store of programs: entries are there whole or not at all, whoever dies, fills the disk or turns the clock."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxguard import _descriptors, _entries, _linux, _store, errors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY = "ab" * 32
OTHER = "cd" * 32
DATA = zlib.compress(b"\0\0\0\1" + bytes(range(256)) * 40)


@pytest.fixture
def store(tmp_path: pathlib.Path) -> _store.Store:
    return _store.Store(str(tmp_path / "root"), "kind")


@pytest.fixture
def private(store: _store.Store) -> str:
    return store.enter("worker")


def write(private: str, key: str = KEY, data: bytes = DATA) -> pathlib.Path:
    """Write an entry in place, as JAX does."""
    path = pathlib.Path(private, f"jit_step-{key}-cache")
    path.write_bytes(data)
    return path


def entry(store: _store.Store, key: str = KEY) -> pathlib.Path:
    return pathlib.Path(store.path, "entries", key)


def damage(store: _store.Store, how: Callable[[bytes], bytes], key: str = KEY) -> None:
    """Change the bytes of an entry behind the store's back."""
    (path,) = entry(store, key).glob("*-cache")
    data = path.read_bytes()
    path.unlink()  # not in place: the worker's own file is the same one
    path.write_bytes(how(data))


# ---------------------------------------------------------------- in and out


def test_what_is_published_is_fetched(store: _store.Store, private: str) -> None:
    """One worker's entry is another one's, byte for byte, with what is known of it; in the store it is there once."""
    write(private)
    assert store.publish(KEY, private, function="step", compile_s=1.5)
    another = store.enter("another")
    seal = store.fetch(KEY, another)
    assert seal is not None
    assert (seal["function"], seal["compile_s"], seal["bytes"]) == ("step", 1.5, len(DATA))
    assert pathlib.Path(another, f"jit_step-{KEY}-cache").read_bytes() == DATA
    assert store.fetch(OTHER, another) is None
    assert len(list(store.entries())) == 1


def test_who_publishes_second_changes_nothing(store: _store.Store, private: str) -> None:
    """Two workers that compiled the same program are both content, and the first one's stays."""
    write(private)
    assert store.publish(KEY, private)
    another = store.enter("another")
    write(another, data=zlib.compress(b"another"))
    assert store.publish(KEY, another)
    assert store.fetch(KEY, store.enter("third")) is not None
    assert next(entry(store).glob("*-cache")).read_bytes() == DATA
    assert not list(pathlib.Path(another).glob(".new-*")), "and nothing half made is left"


def test_what_jax_did_not_write_is_not_published(store: _store.Store, private: str) -> None:
    """A program without a file is none."""
    assert not store.publish(KEY, private)


def test_a_file_system_without_hard_links(store: _store.Store, private: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """There entries are copied."""

    def no_links(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    write(private)
    assert store.publish(KEY, private)
    another = store.enter("another")
    assert store.fetch(KEY, another) is not None
    assert pathlib.Path(another, f"jit_step-{KEY}-cache").read_bytes() == DATA


def test_nothing_is_removed_under_a_reader(store: _store.Store, private: str) -> None:
    """Who has fetched a program has it, though it is pruned."""
    write(private)
    store.publish(KEY, private)
    another = store.enter("another")
    store.fetch(KEY, another)
    assert [gone.key for gone in _store.prune([store], lambda _: True)] == [KEY]
    assert pathlib.Path(another, f"jit_step-{KEY}-cache").read_bytes() == DATA
    assert store.fetch(KEY, another) is None


# ---------------------------------------------------------------- damage


@given(length=st.integers(0, len(DATA) - 1))
def test_a_truncated_entry_is_not_whole(length: int) -> None:
    """Wherever a write was cut off, it shows."""
    assert not _entries.is_whole(io.BytesIO(DATA[:length]))
    assert _entries.is_whole(io.BytesIO(DATA))


def test_zstd_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the other form that JAX writes, where its library is; else they count as whole."""
    magic = b"\x28\xb5\x2f\xfd"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    if sys.version_info < (3, 14):
        assert _entries.is_whole(io.BytesIO(magic + b"anything"))
    monkeypatch.undo()
    zstandard = pytest.importorskip("zstandard")
    data = zstandard.ZstdCompressor().compress(DATA)
    assert _entries.is_whole(io.BytesIO(data))
    assert not any(_entries.is_whole(io.BytesIO(data[:length])) for length in range(4, len(data)))


def test_a_torn_file_is_not_published(store: _store.Store, private: str) -> None:
    """What a full disk left of an entry goes, from the worker's directory too: JAX would warn of it for ever."""
    path = write(private, data=DATA[:-7])
    with pytest.raises(_entries.Torn, match="jit_step"):
        store.publish(KEY, private)
    assert not path.exists()
    assert not list(store.entries())


@pytest.mark.parametrize(
    "how",
    [lambda d: d[:100], lambda _: b"", lambda d: d[:50] + bytes([d[50] ^ 1]) + d[51:]],
    ids=["truncated", "emptied", "flipped"],
)
def test_a_damaged_entry_is_taken_out(store: _store.Store, private: str, how: Callable[[bytes], bytes]) -> None:
    """Truncated, emptied or with one bit flipped: it reaches no JAX, and makes room for a good one."""
    write(private)
    store.publish(KEY, private)
    damage(store, how)
    another = store.enter("another")
    assert store.fetch(KEY, another) is None
    assert not list(pathlib.Path(another).glob("*-cache"))
    assert store.publish(KEY, private)
    assert store.fetch(KEY, another) is not None


@pytest.mark.parametrize("seal", ["", "{", "[]", "{}", '{"sha256": 3}'])
def test_a_damaged_seal(store: _store.Store, private: str, seal: str) -> None:
    """An entry whose seal is damaged is none either."""
    write(private)
    store.publish(KEY, private)
    (entry(store) / "seal.json").write_text(seal)
    assert store.fetch(KEY, store.enter("another")) is None
    assert not entry(store).exists()


def test_a_full_disk(store: _store.Store, private: str) -> None:
    """Where the seal cannot be written, nothing is published, and nothing half made is left."""
    write(private)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            store.publish(KEY, private)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(store.entries())
    assert sorted(os.listdir(private)) == [".alive", f"jit_step-{KEY}-cache"]


WRITES_FOR_EVER = """
import itertools, os, pathlib, random, sys, zlib
from jaxguard import _store
store = _store.Store(sys.argv[1], "kind")
private = store.enter(sys.argv[2])
print("ready", flush=True)
for number in itertools.count(int(sys.argv[3])):
    key = f"{number:064x}"
    data = zlib.compress(random.randbytes(200_000))
    with open(f"{private}/jit_step-{key}-cache", "wb") as file:  # in place, as JAX does
        for start in range(0, len(data), 50_000):
            file.write(data[start:start + 50_000]); file.flush()
    store.publish(key, private, function="step")
    store.fetch(f"{number - random.randrange(20):064x}", private)
    if number % 7 == 0:
        store.discard(f"{number - 3:064x}")
"""


def test_fifty_kills_in_the_middle(store: _store.Store, tmp_path: pathlib.Path) -> None:
    """Whenever a worker is killed, each entry in the store is whole, and the next worker sweeps what it left."""
    rng = random.Random(4)
    root = str(tmp_path / "root")
    for start in range(0, 50, 5):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WRITES_FOR_EVER, root, f"worker{number}", str(1000 * number)],
                stdout=subprocess.PIPE,
            )
            for number in range(start, start + 5)
        ]
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        for process in processes:
            time.sleep(rng.uniform(0, 0.01))  # the moment of the kill, not a wait
            process.kill()
            process.wait(30)
            process.stdout.close()  # type: ignore[union-attr]
    entries = list(store.entries())
    assert len(entries) > 50
    assert all(store.is_sound(found) for found in entries)
    store.enter("next")
    assert os.listdir(os.path.join(store.root, "private")) == ["next"]


def test_an_error_of_the_system_is_no_damage(
    store: _store.Store, private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, for one: the entry stays."""
    write(private)
    store.publish(KEY, private)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    another = store.enter("another")
    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        store.fetch(KEY, another)
    monkeypatch.undo()
    assert store.fetch(KEY, another) is not None


def test_things_that_are_not_ours(store: _store.Store, private: str) -> None:
    """A stray file or directory does no harm, and makes room where it is in the way."""
    pathlib.Path(store.root, ".DS_Store").touch()
    pathlib.Path(store.root, "mine").mkdir()
    pathlib.Path(store.path, "marks", OTHER).mkdir()
    os.utime(pathlib.Path(store.path, "marks", OTHER), (0, 0))
    entry(store).write_text("a file")
    assert _store.kinds(os.path.dirname(store.root)) == ["kind"]
    store.tidy()
    assert store.fetch(KEY, private) is None
    write(private)
    assert store.publish(KEY, private)
    assert store.fetch(KEY, private) is not None


def test_whatever_the_umask_says(tmp_path: pathlib.Path) -> None:
    """The store is this user's alone, with all that is above it and made for it."""
    before = os.umask(0o002)
    try:
        store = _store.Store(str(tmp_path / "above" / "root"), "kind")
        private = store.enter("worker")
    finally:
        os.umask(before)
    for path in (tmp_path / "above", tmp_path / "above" / "root", pathlib.Path(store.path, "entries"), private):
        assert os.stat(path).st_mode & 0o777 == 0o700
    _store.Store(str(tmp_path / "above" / "root"), "kind")


# ---------------------------------------------------------------- directories of workers


def test_a_living_worker_keeps_its_directory(store: _store.Store, tmp_path: pathlib.Path) -> None:
    """Only what nobody holds is swept."""
    mine = store.enter("mine")
    enters = "import sys; from jaxguard import _store; _store.Store(*sys.argv[1:]).enter('other')"
    subprocess.run([sys.executable, "-c", enters, str(tmp_path / "root"), "kind"], check=True)
    assert os.path.isdir(mine)
    assert sorted(os.listdir(os.path.dirname(mine))) == ["mine", "other"]
    store.enter("third")
    assert sorted(os.listdir(os.path.dirname(mine))) == ["mine", "third"]


def test_a_directory_that_is_swept_while_it_is_made(store: _store.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker makes it again."""
    lock_range, swept = _linux.lock_range, []

    def sweep_first(descriptor: int, start: int, length: int, **options: Any) -> bool:
        if not swept:
            swept.append(True)
            shutil.rmtree(_store.private_path(os.path.dirname(store.root), "worker"))
        return lock_range(descriptor, start, length, **options)

    monkeypatch.setattr(_linux, "lock_range", sweep_first)
    path = store.enter("worker")
    assert swept
    assert os.listdir(path) == [".alive"]


# ---------------------------------------------------------------- whose it is


def test_a_store_that_others_can_write_is_refused(tmp_path: pathlib.Path) -> None:
    """A compiled program is code: nobody else may put one there."""
    root = tmp_path / "root"
    root.mkdir()
    root.chmod(0o777)
    with pytest.raises(errors.JaxguardError, match=r"others can write in .*root \(mode 777\)"):
        _store.Store(str(root), "kind")
    root.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(errors.JaxguardError, match="others can write in"):
        _store.Store(str(root), "kind")
    tmp_path.chmod(0o1777)
    _store.Store(str(root), "kind")


def test_the_store_of_another_user_is_refused(tmp_path: pathlib.Path) -> None:
    """Also for root, who could read it."""
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    root = tmp_path / "root"
    root.mkdir(0o700)
    os.chown(root, 65534, 65534)
    with pytest.raises(errors.JaxguardError, match="belongs to nobody"):
        _store.Store(str(root), "kind")


def test_a_store_that_cannot_be_written(
    tmp_path: pathlib.Path,
    as_nobody: Callable[..., list[str]],
    open_to_all: Callable[[pathlib.Path], None],
) -> None:
    """One that is read-only, and one of root: each says what is wrong, to a worker that then goes on without."""
    open_to_all(tmp_path)
    mine, roots = tmp_path / "mine", tmp_path / "roots"
    mine.mkdir(0o500)
    roots.mkdir(0o755)
    os.chown(mine, 65534, 65534)
    code = """
from jaxguard import _store
for root in sys.argv[1:]:
    try:
        _store.Store(root, "kind")
    except Exception as error:
        print(type(error).__name__, error)
"""
    first, second = as_nobody(code, str(mine), str(roots))
    assert first.startswith("PermissionError")
    assert re.match(r"JaxguardError .*roots belongs to root, and programs are code", second)


def test_a_network_file_system_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the default is another place, and a place that was named is an error."""
    monkeypatch.delenv("JAXGUARD_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _store.root() == str(tmp_path / "jaxguard")
    monkeypatch.setattr(_linux, "file_system", lambda _: "nfs4")
    assert _store.root() == f"/var/tmp/jaxguard-{os.geteuid()}"
    with pytest.raises(errors.JaxguardError, match="network file system"):
        _store.Store(str(tmp_path / "root"), "kind")


def test_the_default_is_the_users_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the XDG rules say: an empty or relative value is none."""
    monkeypatch.delenv("JAXGUARD_CACHE_DIR")
    monkeypatch.setenv("HOME", "/home/somebody")
    for value in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert _store.root() == "/home/somebody/.cache/jaxguard"
    monkeypatch.setenv("HOME", "nowhere")
    assert _store.root() == f"/var/tmp/jaxguard-{os.geteuid()}"
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", "relative")
    with pytest.raises(ValueError, match="JAXGUARD_CACHE_DIR='relative' is not valid"):
        _store.root()


# ---------------------------------------------------------------- age and size


def fill(store: _store.Store, private: str, count: int) -> list[str]:
    """Publish some programs, the first one used longest ago, an hour apart."""
    keys = [hashlib.sha256(bytes([number])).hexdigest() for number in range(count)]
    for number, key in enumerate(keys):
        write(private, key)
        store.publish(key, private)
        used = time.time() - 3600 * (count - number)
        os.utime(entry(store, key), (used, used))
    return keys


def test_prune(store: _store.Store, private: str) -> None:
    """By age, by size, or both; a program that was fetched counts as used."""
    keys = fill(store, private, 6)
    one = next(store.entries()).bytes
    store.fetch(keys[0], store.enter("another"))
    old = time.time() - 3.5 * 3600
    assert {gone.key for gone in _store.prune([store], lambda found: found.used < old)} == {keys[1], keys[2]}
    assert {gone.key for gone in _store.prune([store], most_bytes=2.5 * one)} == {keys[3], keys[4]}
    assert {found.key for found in store.entries()} == {keys[0], keys[5]}


def test_the_oldest_goes_though_it_is_small(store: _store.Store, private: str) -> None:
    """With the first that does not fit go all that were not used since."""
    small, large, new = fill(store, private, 3)
    for key in (large, new):
        damage(store, lambda _: bytes(5000), key)
        used = time.time() - (100 if key == large else 10)
        os.utime(entry(store, key), (used, used))
    assert {gone.key for gone in _store.prune([store], most_bytes=8000)} == {small, large}


def test_the_store_is_kept_within_its_bounds(
    store: _store.Store, private: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once an hour, and at once when the clock was turned back; expired marks go too."""
    keys = fill(store, private, 3)
    store.mark(KEY, "why")
    monkeypatch.setattr(_store, "MOST_BYTES", 0)
    prune, calls = _store.prune, []
    monkeypatch.setattr(_store, "prune", lambda stores: calls.append(1) or prune(stores, most_bytes=0))
    store.tidy()
    assert calls == [1]
    assert not list(store.entries())
    store.tidy()
    assert calls == [1]
    tomorrow = time.time() + 86400
    os.utime(os.path.join(store.path, "tidied"), (tomorrow, tomorrow))
    os.utime(os.path.join(store.path, "marks", KEY), (0, 0))
    store.tidy()
    assert calls == [1, 1]
    assert os.listdir(os.path.join(store.path, "marks")) == []
    assert len(keys) == 3


def test_marks_expire(store: _store.Store) -> None:
    """After a day; one from the future, by a clock that was turned back, counts as expired."""
    assert not store.is_marked(KEY)
    store.mark(KEY, "why")
    assert store.is_marked(KEY)
    for when in (time.time() - _store.MARKS_LAST_S - 1, time.time() + 3600):
        os.utime(os.path.join(store.path, "marks", KEY), (when, when))
        assert not store.is_marked(KEY)


def test_one_flight_for_each_program(store: _store.Store) -> None:
    """One at a time for a program, side by side for two; free again when it is closed."""
    first, second, third = (store.open_flights() for _ in range(3))
    assert store.take_flight(first, KEY)
    assert not store.take_flight(second, KEY)
    assert store.take_flight(third, OTHER)
    _descriptors.close(first)
    assert store.take_flight(second, KEY)
    _descriptors.close(second, third)


@pytest.fixture(autouse=True)
def let_go(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let go of the directories that a test has entered: a worker holds its own until it ends."""
    before = set(os.listdir("/proc/self/fd"))
    yield
    for number in set(os.listdir("/proc/self/fd")) - before:
        try:
            if os.readlink(f"/proc/self/fd/{number}").removesuffix(" (deleted)").endswith("/.alive"):
                _descriptors.close(int(number))
        except OSError:
            continue


def test_who_looks_too_early_takes_nothing_away(store: _store.Store, private: str) -> None:
    """A reader that looks for a program in the moment in which it is published finds it, or does not; it stays."""
    keys = [f"{number:064x}" for number in range(400)]
    another = store.enter("another")
    looking = [
        (key, threading.Thread(target=lambda key=key: [store.fetch(key, another) for _ in range(15)])) for key in keys
    ]
    for key, thread in looking:
        write(private, key)
        thread.start()
        assert store.publish(key, private)
        thread.join(30)
    assert len(list(store.entries())) == len(keys)
