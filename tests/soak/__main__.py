"""The soak: several parents on few slots, and a hand from outside that kills, stops and deletes what it can.

    python tests/soak [--parents 4] [--slots 4] [--trials 300] [--seed 0] [--limit 900]

When all trials of all parents are finished it counts what is wrong, prints a table, and ends with the number of faults
as its exit status. It is bounded: after `--limit` seconds what still runs is a fault.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from typing import Any

import study

HERE = pathlib.Path(__file__).resolve().parent
JOBS = 3
STOPPED_S = 13
"""For how long a process stays stopped at most: a call wakes its keeper after 10 s."""
BLOWS = {
    "kill a worker": 6,
    "stop a worker": 2,
    "kill a keeper": 2,
    "stop a keeper for a while": 2,
    "stop a keeper for good": 1,
    "kill a parent": 1,
    "stop a parent for a while": 2,
    "end a parent by SIGTERM": 1,
    "end a parent by Ctrl-C": 1,
    "delete the store": 2,
}


def status(pid: int) -> tuple[str, int]:
    """State and parent of a process."""
    try:
        words = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return words[0], int(words[1])


def with_mark(mark: str) -> list[int]:
    """All processes that were started, by whomever, with a variable of the soak in their environment."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes() and status(int(path.name))[0] not in "ZX":
                found.append(int(path.name))
        except OSError:  # ended, or another user's
            continue
    return sorted(set(found) - {os.getpid()})


class Soak:
    """One run of it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
        self.mark = f"MARK_OF_THE_SOAK={uuid.uuid4().hex}"
        self.rng = random.Random(options.seed)
        self.blows: list[dict[str, Any]] = []
        self.to_continue: list[tuple[float, int]] = []
        self.parents: dict[int, subprocess.Popen[bytes]] = {}
        self.began = time.monotonic()
        (self.folder / "tmp").mkdir()
        place = str(HERE.parents[1])
        self.env = {
            **os.environ,
            **dict([self.mark.split("=")]),
            "JAXGUARD_DEVICES": f"cpu:{options.slots}@{uuid.uuid4().hex[:12]}",
            "JAXGUARD_CACHE_DIR": str(self.folder / "programs"),
            "TMPDIR": str(self.folder / "tmp"),
            "PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")]),
        }

    # ------------------------------------------------------------ the parents

    def start(self, index: int) -> None:
        words = [
            sys.executable,
            str(HERE / "study.py"),
            str(self.folder),
            index,
            self.options.trials,
            JOBS,
            self.options.seed,
        ]
        with (self.folder / f"output-{index}").open("ab") as output:
            self.parents[index] = subprocess.Popen(
                [str(word) for word in words], env=self.env, stdout=output, stderr=output, start_new_session=True
            )

    def finished(self, index: int) -> bool:
        """Whether a parent has come to its end; one that was ended is started again."""
        if self.parents[index].poll() is None:
            return False
        if any(line["event"] == "end" for line in self.log(index)[-1:]):
            return True
        self.start(index)
        return False

    def log(self, index: int) -> list[dict[str, Any]]:
        try:
            text = (self.folder / f"log-{index}").read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.splitlines()]

    # ------------------------------------------------------------ the hand

    def strike(self) -> None:
        parents = [process.pid for process in self.parents.values() if process.poll() is None]
        table = {int(path.name): status(int(path.name)) for path in pathlib.Path("/proc").glob("[0-9]*")}
        keepers = [pid for pid, (state, parent) in table.items() if parent in parents and self.is_keeper(pid)]
        workers = [pid for pid, (state, parent) in table.items() if parent in keepers and state not in "ZX"]
        blow = self.rng.choices(list(BLOWS), weights=list(BLOWS.values()))[0]
        whom = {"worker": workers, "keeper": keepers, "parent": parents}.get(blow.split()[2], [0])
        if not whom:
            return
        pid = self.rng.choice(whom)
        pause = self.rng.uniform(0.2, 2.0)
        parent_of = {child: parent for child, (_, parent) in table.items()}
        family = {pid, parent_of.get(pid, 0), parent_of.get(parent_of.get(pid, 0), 0)} & {*parents, *keepers, *workers}
        self.blows.append({"time": time.time(), "blow": blow, "pid": pid, "family": family})
        try:
            if blow == "delete the store":
                shutil.rmtree(self.folder / "programs", ignore_errors=True)
            elif blow.startswith("kill"):
                os.kill(pid, signal.SIGKILL)
            elif blow.startswith("end"):
                os.kill(pid, signal.SIGTERM if "SIGTERM" in blow else signal.SIGINT)
            else:
                os.kill(pid, signal.SIGSTOP)
                if "while" in blow:
                    self.to_continue.append((time.monotonic() + pause, pid))
        except ProcessLookupError:
            pass

    @staticmethod
    def is_keeper(pid: int) -> bool:
        try:
            return b"loky" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes() and b"tracker" not in (
                pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
            )
        except OSError:
            return False

    def continue_some(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for at, pid in list(self.to_continue):
            if at <= now or all_of_them:
                self.to_continue.remove((at, pid))
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    pass

    # ------------------------------------------------------------ the run

    def run(self) -> dict[str, Any]:
        for index in range(self.options.parents):
            self.start(index)
        next_blow = time.monotonic() + 2
        unfinished = set(self.parents)
        while unfinished and time.monotonic() - self.began < self.options.limit:
            unfinished -= {index for index in unfinished if self.finished(index)}
            self.continue_some()
            if time.monotonic() >= next_blow:
                self.strike()
                next_blow = time.monotonic() + self.rng.expovariate(1 / self.options.every)
            self.show_progress()
            time.sleep(0.02)
        self.continue_some(all_of_them=True)
        print(file=sys.stderr)
        time.sleep(1)  # what is promised: gone within a second of its parent
        report = self.count(len(unfinished))
        for process in self.parents.values():
            process.kill()
            process.wait()
        for pid in with_mark(self.mark):
            os.kill(pid, signal.SIGKILL)
        if not self.options.keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        return report

    def show_progress(self) -> None:
        if sys.stderr.isatty():
            told = sum(line["event"] == "told" for index in self.parents for line in self.log(index))
            total = self.options.parents * self.options.trials
            print(f"\r{told} of {total} trials, {len(self.blows)} blows", end="", file=sys.stderr, flush=True)

    # ------------------------------------------------------------ the report

    def count(self, unfinished: int) -> dict[str, Any]:
        lines = {index: self.log(index) for index in self.parents}
        trials = {index: self.stored(index) for index in self.parents}
        told = [(index, line) for index in lines for line in lines[index] if line["event"] == "told"]
        lost = [
            line
            for index, line in told
            if line["state"] == "COMPLETE"
            and trials[index].get(line["number"], ("", None))[:2] != ("COMPLETE", line["value"])
        ]
        wrong = [
            (index, number)
            for index, of_index in trials.items()
            for number, (state, value, params) in of_index.items()
            if state == "COMPLETE" and value != study.value_of(params["x"], int(params["y"]))
        ]
        states = collections.Counter(state for of_index in trials.values() for state, _, _ in of_index.values())
        notices = self.notices(lines)
        beacons = self.beacons()
        report: dict[str, Any] = {
            "parents": len(self.parents),
            "slots": self.options.slots,
            "seconds": round(time.monotonic() - self.began),
            "blows": collections.Counter(blow["blow"] for blow in self.blows),
            "asked": sum(line["event"] == "asked" for index in lines for line in lines[index]),
            "told": len(told),
            "left by a killed parent": sum(line["event"] == "left" for index in lines for line in lines[index]),
            "states": dict(states),
            "errors": collections.Counter(
                line["error"] for index in lines for line in lines[index] if line["event"] == "done" and line["error"]
            ),
            "from the kill of a worker to the error of its call, median and longest, s": notices,
            "longest unexplained wait, s": self.unexplained(lines),
        }
        left = with_mark(self.mark)
        report["faults"] = {
            "parents that did not finish": unfinished,
            "trials not finished": sum(
                state in {"RUNNING", "WAITING"} for of in trials.values() for state, _, _ in of.values()
            ),
            "trials missing": sum(self.options.trials - len(of_index) for of_index in trials.values()),
            "double holders": len(self.text("double-holders").splitlines()),
            "finished results lost": len(lost),
            "wrong answers": len(wrong),
            "processes left": len(left),
            "slots not returned": self.slots_not_returned(),
            "sockets left": len(beacons),
            "files left": len(self.files_left()),
        }
        return report

    def text(self, name: str) -> str:
        path = self.folder / name
        return path.read_text() if path.exists() else ""

    def stored(self, index: int) -> dict[int, tuple[str, float | None, dict[str, float]]]:
        """The trials of a study, as its database has them: by number, their state, value and parameters."""
        with sqlite3.connect(self.folder / f"study-{index}.db") as database:
            rows = database.execute(
                "select number, state, value, t.trial_id from trials t "
                "left join trial_values v on v.trial_id = t.trial_id and objective = 0"
            ).fetchall()
            params: dict[int, dict[str, float]] = collections.defaultdict(dict)
            for trial, name, value in database.execute("select trial_id, param_name, param_value from trial_params"):
                params[trial][name] = value
        return {number: (state, value, params[trial]) for number, state, value, trial in rows}

    def notices(self, lines: dict[int, list[dict[str, Any]]]) -> tuple[float, float] | None:
        killed = {
            blow["pid"]: blow["time"]
            for blow in self.blows
            if blow["blow"] == "kill a worker" and not self.is_stopped(blow["family"], blow["time"])
        }
        took = [
            line["time"] - killed[line["worker"]]
            for of_index in lines.values()
            for line in of_index
            if line["event"] == "done" and line["error"] == "WorkerDied" and line["worker"] in killed
        ]
        return (round(statistics.median(took), 3), round(max(took), 3)) if took else None

    def is_stopped(self, family: set[int], at: float) -> bool:
        """Whether a keeper or parent of these may have been stopped at that time: then nobody could take notice."""
        return any(
            blow["blow"].startswith(("stop a keeper", "stop a parent")) and blow["family"] & family
            for blow in self.blows
            if at - STOPPED_S < blow["time"] < at + 1
        )

    def unexplained(self, lines: dict[int, list[dict[str, Any]]]) -> float:
        """The longest time of a trial that neither its run nor its wait for a slot, nor a process stopped, explains."""
        stopped = [blow["time"] for blow in self.blows if blow["blow"].startswith("stop")]
        longest = 0.0
        for of_index in lines.values():
            asked: dict[int, float] = {}
            for line in of_index:
                if line["event"] == "asked":
                    asked[line["number"]] = line["time"]
                elif line["event"] == "told" and line["facts"]:
                    begun, facts = asked[line["number"]], line["facts"]
                    if not any(begun - 5 < at < line["time"] for at in stopped):
                        longest = max(longest, line["time"] - begun - facts["waited_s"] - facts["run_s"])
        return round(longest, 2)

    def slots_not_returned(self) -> int:
        code = "import jaxguard\nwith jaxguard.gpu_slot(gpus=N, slot_timeout=0): print('all', end='')"
        for number in range(self.options.slots, 0, -1):
            words = [sys.executable, "-c", code.replace("N", str(number))]
            if subprocess.run(words, env=self.env, capture_output=True, check=False, text=True).stdout == "all":
                return int(self.options.slots) - number
        return int(self.options.slots)

    def beacons(self) -> list[str]:
        # Names of beacons hold the pid of who lit them.
        ours = {str(line["pid"]) for index in self.parents for line in self.log(index)}
        rows = pathlib.Path("/proc/net/unix").read_text(errors="replace").splitlines()
        names = [row.split("@", 1)[1] for row in rows if "@jaxguard/" in row]
        return [name for name in names if name.split("/")[5] in ours]

    def files_left(self) -> list[str]:
        """What lies in the temporary directory; and workers' own directories after one more guarded call."""
        code = "import jaxguard\njaxguard.isolated_jax_worker(lambda: float(__import__('jax').numpy.ones(3).sum()))()"
        try:
            subprocess.run([sys.executable, "-c", code], env=self.env, check=True, timeout=60)
        except subprocess.SubprocessError:
            return ["a guarded call did not come to its end"]
        private = [str(path) for path in (self.folder / "programs").glob("*/private/*")]
        return [*map(str, (self.folder / "tmp").iterdir()), *private]


def as_table(report: dict[str, Any]) -> str:
    """The report, as docs/reliability.md shows it."""

    def cell(value: Any) -> str:
        if isinstance(value, dict):
            return (
                ", ".join(f"{count} {name}" for name, count in sorted(value.items(), key=lambda pair: -pair[1]))
                or "none"
            )
        return " and ".join(map(str, value)) if isinstance(value, tuple) else str(value)

    rows = [(name, cell(value)) for name, value in report.items() if name != "faults"]
    rows += [(f"**{name}**", str(count)) for name, count in report["faults"].items()]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parents", type=int, default=4)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--trials", type=int, default=300, help="of each parent")
    parser.add_argument("--every", type=float, default=0.5, help="seconds from one blow to the next, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1200, help="seconds")
    parser.add_argument("--keep", action="store_true", help="keep the folder with all logs, and say where it is")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    soak = Soak(options)
    if options.keep:
        print(soak.folder, file=sys.stderr)
    report = soak.run()
    print(json.dumps(report) if options.json else as_table(report))
    return min(100, sum(report["faults"].values()))


if __name__ == "__main__":
    sys.exit(main())
