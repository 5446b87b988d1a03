"""The command line: `jaxguard`, the same as `python -m jaxguard`."""

from __future__ import annotations

import argparse
import io
import sys
from math import inf
from typing import TYPE_CHECKING

from .errors import JaxguardError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

INTERRUPTED = 130
"""Exit status of a command that was ended by Ctrl-C, as shells give it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `jaxguard`; by default those of this process.

    Returns:
        The exit status: 0, or 1 if the command failed, or 130 if Ctrl-C ended it.

    Raises:
        SystemExit: With status 2 if the words are not understood, with 0 after `--help` and `--version`.
    """
    options = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of studies and files may be anything
    try:
        return int(options.command(options))
    except (JaxguardError, ValueError, OSError) as error:
        print(f"jaxguard: {error}", file=sys.stderr)  # noqa: T201 -- for a terminal
        return 1
    except KeyboardInterrupt:
        print("jaxguard: interrupted", file=sys.stderr)  # noqa: T201 -- for a terminal
        return INTERRUPTED


def _demo(options: argparse.Namespace) -> int:
    from . import _demo

    return _demo.run(options)


def _slots(options: argparse.Namespace) -> int:
    from . import _slots

    return _slots.run(options)


def _stacks(options: argparse.Namespace) -> int:
    from . import _stacks

    return _stacks.run(options)


def _doctor(options: argparse.Namespace) -> int:
    from . import _doctor

    return _doctor.run(options)


def _cache(options: argparse.Namespace) -> int:
    from . import _cache

    return int(getattr(_cache, options.action)(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxguard", description="Guards for parallel JAX trials on one host.")
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="tune a small network on handwritten digits, as an example",
        description=(
            "Tune a small convolutional network on handwritten digits: an Optuna study, with pruning, in which each "
            "trial runs in a process of its own. Takes about a minute on two cores."
        ),
    )
    demo.add_argument(
        "--trials", type=_whole(1), default=24, metavar="N", help="how many trials to run (default: %(default)s)"
    )
    demo.add_argument(
        "--jobs",
        type=_whole(1),
        metavar="N",
        help="how many trials to run side by side (default: as many as there are slots)",
    )
    demo.add_argument(
        "--seed",
        type=_whole(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="where the sampler starts; with one job, the same seed gives the same study (default: %(default)s)",
    )
    demo.add_argument(
        "--storage",
        metavar="URL",
        help="where to keep the study, such as sqlite:///demo.db; run again to add trials (default: in memory)",
    )
    demo.set_defaults(command=_demo, refuse=demo.error)

    slots = commands.add_parser(
        "slots",
        help="show the devices, who holds them and who waits",
        description=(
            "Show the devices that a process started here may use: FREE, HELD, FOREIGN (a program that holds no slot "
            "computes there) or UNKNOWN (free, but who computes there cannot be told). Study and trial are told of "
            "your own programs only. Neither JAX nor CUDA is started."
        ),
    )
    slots.add_argument("--json", action="store_true", help="print it as JSON, for scripts")
    slots.set_defaults(command=_slots)

    stacks = commands.add_parser(
        "stacks",
        help="show where each guarded program is at this moment: phase, study, trial, Python stacks",
        description=(
            "Show where your guarded programs on this host are: for each guarded call its study, trial, device and "
            "phase (waiting for a slot, starting, compiling what, waiting for the compilation of whom, running), and "
            "the Python stacks of all threads of parents, keepers and workers. Nothing is stopped by it."
        ),
    )
    stacks.add_argument("pid", nargs="*", type=_whole(1), help="only these: process ids of parents or workers")
    stacks.add_argument("--json", action="store_true", help="print it as JSON, for scripts")
    stacks.set_defaults(command=_stacks)
    _add_doctor(commands)
    _add_cache(commands)
    return parser


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="check this host, then prove with real workers that guarded trials work on it",
        description=(
            "Look at versions, devices, slots, locks, cores, memory, the store of programs and the environment. Then "
            "run trials on one slot, add slots one by one up to all, and have all workers compile one program at once. "
            "A verdict per line: ok, note, or BAD with why it matters and what to type. The exit status is 1 if "
            "something is BAD."
        ),
    )
    doctor.add_argument("module", nargs="*", help="also import these modules of yours, and say whether one starts JAX")
    doctor.add_argument("--quick", action="store_true", help="look only: start no trial")
    doctor.add_argument("--log-compiles", action="store_true", help="show what JAX logs of its compilations")
    doctor.add_argument("--json", action="store_true", help="print it as JSON, for scripts")
    doctor.set_defaults(command=_doctor)


def _add_cache(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = commands.add_parser(
        "cache",
        help="show, check and prune the compiled programs that are kept",
        description=(
            "Show where the compiled programs of this user are kept, how many there are and how big. What is removed, "
            "here or by hand, is taken from no worker that runs: it is compiled again when it is needed next."
        ),
    )
    json = argparse.ArgumentParser(add_help=False)
    json.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print it as JSON, for scripts")
    cache.add_argument("--json", action="store_true", help="print it as JSON, for scripts")
    cache.set_defaults(command=_cache, action="show")
    actions = cache.add_subparsers(title="actions", metavar="ACTION")

    verify = actions.add_parser(
        "verify",
        parents=[json],
        help="find entries that are torn, and remove them",
        description="Check each entry, and remove those that are torn: JAX would warn of them, and compile, for ever.",
    )
    verify.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="a directory of JAX's own compilation cache, or another store (default: the store of JAXGUARD_CACHE_DIR)",
    )
    verify.set_defaults(action="verify")

    prune = actions.add_parser(
        "prune",
        parents=[json],
        help="remove programs by age or size",
        description="Remove programs that were not used for long, or do not fit; with both, those that either names.",
    )
    prune.add_argument(
        "--older-than",
        type=_read("as_seconds"),
        metavar="AGE",
        help="remove what was not used for so long: 12h, 30d, 4w",
    )
    prune.add_argument(
        "--max-size",
        type=_read("as_bytes"),
        metavar="SIZE",
        help="remove what was not used for longest, until at most so much remains: 500MB, 10GB",
    )
    prune.set_defaults(action="prune", refuse=prune.error)


def _read(name: str) -> Callable[[str], float]:
    def read(text: str) -> float:
        from . import _cache

        return float(getattr(_cache, name)(text))

    return read


class _Version(argparse.Action):
    """Look the version up only when it is asked for: the search for it takes longer than all else here."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str) -> None:  # noqa: A002 -- argparse's name
        super().__init__(option_strings, dest, nargs=0, help=help, default=argparse.SUPPRESS)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from . import __version__

        print(f"jaxguard {__version__}")  # noqa: T201 -- this is what was asked for
        parser.exit()


def _whole(low: int, high: float = inf) -> Callable[[str], int]:
    limits = f"of at least {low}" if high == inf else f"from {low} to {high}"

    def read(text: str) -> int:
        if not text.strip().isdecimal() or not low <= int(text) <= high:
            message = f"{text!r} is not a whole number {limits}"
            raise argparse.ArgumentTypeError(message)
        return int(text)

    return read


if __name__ == "__main__":
    sys.exit(main())
