"""`jaxguard cache`: what is kept, torn entries, age and size."""

from __future__ import annotations

import json
import os
import pathlib
import time
import zlib
from typing import Any

import pytest

from jaxguard import _cache, _descriptors, _store
from jaxguard.__main__ import main

WHOLE = zlib.compress(b"a program")


@pytest.fixture
def store(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> _store.Store:
    """Give a store with three programs, the first used longest ago."""
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(tmp_path / "store"))
    store = _store.Store(str(tmp_path / "store"), "jaxlib-9,cpu")
    private = store.enter("worker")
    for number in range(3):
        key = f"{number:064x}"
        pathlib.Path(private, f"jit_f-{key}-cache").write_bytes(WHOLE)
        store.publish(key, private)
        used = time.time() - 3600 * (10 - number)
        os.utime(os.path.join(store.path, "entries", key), (used, used))
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").endswith("worker/.alive"):
                _descriptors.close(int(name))
        except OSError:
            continue
    return store


def say(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["cache", *words]) == 0
    return capsys.readouterr().out


def test_what_is_there(store: _store.Store, capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path) -> None:
    """Where, how many, how big, when last used; as JSON too."""
    text = say(capsys)
    assert str(tmp_path / "store") in text
    assert "jaxlib-9,cpu" in text
    view = json.loads(say(capsys, "--json"))
    (kind,) = view["kinds"]
    assert (kind["programs"], kind["kind"], view["version"]) == (3, "jaxlib-9,cpu", 1)
    assert kind["bytes"] > 3 * len(WHOLE)
    assert view["limit_bytes"] == _store.MOST_BYTES


def test_nothing_yet(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An empty store is none, and looking makes none."""
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(tmp_path / "none"))
    assert "no program yet" in say(capsys)
    assert "no program to check here" in say(capsys, "verify")
    assert "nothing to remove" in say(capsys, "prune", "--older-than", "1d")
    assert not (tmp_path / "none").exists()


def test_verify_the_store(store: _store.Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Torn entries are found and removed, the others stay."""
    assert "3 programs checked, all whole" in say(capsys, "verify")
    path = next(pathlib.Path(store.path, "entries", f"{1:064x}").glob("*-cache"))
    path.write_bytes(WHOLE[:-1])
    assert "3 programs checked, 1 torn and removed:" in say(capsys, "verify")
    assert json.loads(say(capsys, "verify", "--json"))["checked"] == 2


def test_verify_a_directory_of_jax(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also a plain cache directory: what is torn goes, what was written just now may still be on its way."""
    old = time.time() - 100
    for name, data in {"whole": WHOLE, "torn": WHOLE[:-3], "empty": b"", "young": WHOLE[:5]}.items():
        path = tmp_path / f"jit_{name}-{'ab' * 32}-cache"
        path.write_bytes(data)
        if name != "young":
            os.utime(path, (old, old))
    (tmp_path / "another file").write_bytes(b"no entry")
    notes = tmp_path / "my-notes-cache"
    notes.write_bytes(b"no entry either")
    os.utime(notes, (old, old))
    (tmp_path / f"folder-{'cd' * 32}-cache").mkdir()
    told: dict[str, Any] = json.loads(say(capsys, "verify", str(tmp_path), "--json"))
    assert (told["checked"], told["too_young"]) == (3, 1)
    assert sorted(name.split("-")[0] for name in told["removed"]) == ["jit_empty", "jit_torn"]
    left = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert left == ["another file", "folder", "jit_whole", "jit_young", "my"]
    assert "1 not judged, written in the last minute; 1 program checked, all whole" in say(
        capsys, "verify", str(tmp_path)
    )


def test_prune(store: _store.Store, capsys: pytest.CaptureFixture[str]) -> None:
    """By age and by size; both can be said."""
    assert "removed 1 program (" in say(capsys, "prune", "--older-than", "9.5h")
    one = next(store.entries()).bytes
    told = json.loads(say(capsys, "prune", "--max-size", f"{1.5 * one / 1000}kB", "--older-than", "1d", "--json"))
    assert (told["removed"], told["bytes"]) == ([f"{1:064x}"], one)
    assert [entry.key for entry in store.entries()] == [f"{2:064x}"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["prune"], "say what shall go"),
        (["prune", "--max-size", "big"], "'big' is not a size; sizes are such as 500MB and 10GB"),
        (["prune", "--older-than", "7"], "'7' is not an age; ages are such as 12h, 30d and 4w"),
        (["prune", "--max-size", "1.2.3MB"], "is not a size"),
        (["prune", "--max-size", "9" * 400 + "MB"], "is not a size"),
        (["prune", "--max-size", "5"], "'5' is not a size"),
        (["prune", "--older-than", "30m"], "'30m' is not an age"),
    ],
    ids=lambda value: " ".join(value)[:30] if isinstance(value, list) else "",
)
def test_words_that_are_not_understood(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Say so, with what is."""
    with pytest.raises(SystemExit) as caught:
        main(["cache", *words])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_a_store_that_cannot_be_used(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and exit status 1."""
    root = tmp_path / "store"
    (root / "v1" / "kind" / "entries").mkdir(parents=True)
    root.chmod(0o777)
    monkeypatch.setenv("JAXGUARD_CACHE_DIR", str(root))
    assert main(["cache"]) == 1
    assert "others can write in" in capsys.readouterr().err
    assert main(["cache", "verify", str(tmp_path / "none")]) == 1
    assert "is no directory" in capsys.readouterr().err


@pytest.mark.parametrize(("text", "count"), [("500MB", 500_000_000), ("10G", 10**10), ("1.5 kB", 1500)])
def test_sizes(text: str, count: int) -> None:
    """As people write them."""
    assert _cache.as_bytes(text) == count


def test_sizes_in_words() -> None:
    """And as they read them."""
    assert [_cache.size(n) for n in (5, 1500, 20_000, 3_400_000, 10**10, 5 * 10**12)] == [
        "5 B",
        "1.5 kB",
        "20 kB",
        "3.4 MB",
        "10 GB",
        "5.0 TB",
    ]
