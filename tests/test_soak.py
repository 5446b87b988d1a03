"""The soak, in its short form: parents, keepers and workers are killed, stopped and robbed; nothing is lost or left."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import jaxguard

HERE = pathlib.Path(__file__).resolve().parent


def test_a_short_soak() -> None:
    """Every trial is finished, no answer is wrong or lost, no slot is held twice or kept, nothing is left."""
    place = os.path.dirname(os.path.dirname(os.path.abspath(jaxguard.__file__)))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])}
    words = [sys.executable, str(HERE / "soak"), "--json", "--limit", "150", "--every", "0.3"]
    words += ["--parents", "2", "--slots", "2", "--trials", "15", "--seed", "3"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert not any(report["faults"].values()), report
    assert sum(report["states"].values()) == 30, report
    assert report["blows"], "somebody was struck"
    assert done.returncode == 0
