"""The parent's side of one worker: the calling thread talks to it, and to nobody else.

One loop polls the pipe (the trial's accesses, the answer), the keeper's line (how it ended), stdout and stderr, and
the time. Whatever breaks the dialogue ends the worker; its slot is free, and nothing of it is left, before the call
returns or raises.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from . import (
    _answers,
    _calls,
    _deadlines,
    _deaths,
    _descriptors,
    _frames,
    _inherited,
    _keeper,
    _linux,
    _oom,
    _orphans,
    _output,
    _phases,
    _records,
    _settings,
    _starting,
    _store,
    _trials,
    _whereabouts,
    _worker,
    errors,
)
from ._deadlines import Due
from ._leases import Lease

logger = logging.getLogger("jaxguard")


@dataclass
class Talk:
    """One call of one worker, and all that is known of it."""

    name: str
    roots: _trials.Roots
    timeout: float
    interrupted: Callable[[], BaseException | None]
    """Gives what the call shall raise instead, once a signal has ended it."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the worker told about the run: seconds, compilations, memory."""


class Worker:
    """A worker that this process started, idle or at work for one thread."""

    def __init__(
        self, lease: Lease, key: object, at_import: dict[str, str], setup: _worker.Setup, lease_env: dict[str, str]
    ) -> None:
        self.lease = lease
        self.key = key
        self.pid: int | None = None
        self.ended = False
        self.trusted = True
        self.idle_since = 0.0
        self._status: int | None = None
        self._keeper_gone = False
        self._private = setup.cache.private
        self._known: deque[bytes] = deque(maxlen=_worker.FUNCTIONS_KEPT)
        self._env = setup.env
        self._picture = setup.picture
        self._first_memory_bytes = 0
        self._oom_before = _oom.counts()
        self._condemned = False
        self._owner = os.getpid()
        self._started = _starting.Started(lease, at_import)
        self._pipe = _frames.PollingPipe(self._started.pipe)
        self._lease_env = {**lease_env, _settings.RUN: self._started.mark}
        setup.env.update(self._lease_env)
        self._outputs = _output.Outputs(self._started.outputs)
        self._pipe_open = True
        self._answer: _frames.Frame | None = None
        self._closed = False
        self._pipe.put(_worker.SETUP, pickle.dumps(setup))

    # ------------------------------------------------------------ what the guard asks for

    def run(self, talk: Talk, function: _calls.Packed, arguments: _calls.Packed, *, last: bool) -> Any:
        """Run a function; return its result or raise what it raised.

        Raises:
            WorkerDied: If the worker ended without an answer.
            WorkerTimeout: If it took longer than `talk.timeout`.
        """
        self.trusted, self._answer = False, None  # until it has answered, whatever comes between
        try:
            key = hashlib.blake2b(function.data, digest_size=16).digest()
            if key in self._known:
                _descriptors.close(*function.descriptors)
            else:
                self._pipe.put(_worker.FUNCTION, key + function.data, function.descriptors)
                self._known.append(key)
            job = _worker.Job(talk.roots.call, talk.name, key, _calls.Packed(arguments.data, []), last)
            self._pipe.put(_worker.JOB, pickle.dumps(job), arguments.descriptors)
            return self._judge(talk, self._converse(talk, to_the_end=last))
        except BaseException:
            if not self.ended and (last or self._condemned or not self._answered):
                self.end_now()
            raise

    def change(self, env: dict[str, str], picture: bytes) -> None:
        """Tell a warm worker what the parent has changed since its last call."""
        env = env | self._lease_env
        news = env if env != self._env else None, picture if picture != self._picture else None
        if news != (None, None):
            self._pipe.put(_worker.CHANGED, pickle.dumps(news))
            self._env, self._picture = env, picture

    def kill(self) -> None:
        """Have the keeper end the worker at once; the thread that talks to it sees it end. Callable from anywhere."""
        self._started.order(_keeper.KILL)

    def is_dead(self) -> bool:
        """Say whether the worker was killed, told or not."""
        status = None if self.pid is None else _linux.status(self.pid)
        return not self.ended and self.pid is not None and (status is None or status.state in "ZX")

    def end_now(self) -> None:
        """End the worker at once and wait until nothing of it is left."""
        self._started.order(_keeper.KILL)
        self._started.wake_keeper()
        until = time.monotonic() + 2 * _deadlines.GRACE_S
        while not self.ended and time.monotonic() < until:
            self._wait(100)
            self._hear()
        self._outputs.drain()

    def end(self) -> None:
        """End an idle worker the normal way; return when nothing of it is left."""
        self._answer = None
        if self.is_dead():
            self.end_now()
        self._pipe.put(_worker.QUIT, b"")
        quiet, until = (
            Talk("its last call", _trials.Roots(""), math.inf, lambda: None),
            time.monotonic() + _deadlines.END_S,
        )
        try:
            while not self.ended and time.monotonic() < until:
                self._step(quiet, 200)
        finally:
            if not self.ended:
                self.end_now()
            self.close()

    def retire(self) -> None:
        """End an idle worker the normal way, and let its slot go."""
        try:
            self.end()
        finally:
            self.lease.close()

    def close(self) -> None:
        """Let go of the worker."""
        if os.getpid() == self._owner and not self._closed:
            self._closed = True
            self._pipe.close()
            self._started.close()
            if self._private is not None:
                _store.remove_private(self._private)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A worker that nobody has any more (an exception came between two steps) is ended, and its slot is free."""
        if not self.__dict__.get("_closed", True) and not is_finalizing():
            self.close()
            self.lease.close()

    def drain(self) -> None:
        """Pass on what an idle worker prints, so that it is not blocked."""
        self._outputs.pass_on(self._outputs.descriptors)
        self._hear()

    @property
    def descriptors(self) -> list[int]:
        """What to poll while the worker is idle."""
        return [self._started.line.fileno(), *self._outputs.descriptors]

    # ------------------------------------------------------------ the loop

    def _converse(self, talk: Talk, *, to_the_end: bool) -> errors.WorkerTimeout | None:
        """Serve until there is an answer (and, if it was the last job, until the worker is gone).

        Returns:
            The error to be raised, if the time was up.
        """
        deadlines = _deadlines.Deadlines(talk.timeout)
        late: errors.WorkerTimeout | None = None
        while not self.ended and not (self._answered and not to_the_end):
            due, wait_s = deadlines.due(begun=self.pid is not None, answered=self._answered)
            if due is None:
                self._step(talk, 1000 * min(wait_s, 3600) + 1, deaf=late is not None)
            elif due is Due.SAY_SO:
                waited = time.monotonic() - deadlines.ordered
                logger.warning("jaxguard: %s has no worker after %.0f s: its keeper does not answer", talk.name, waited)
                self._started.wake_keeper()
            elif due is Due.GIVE_UP:
                _starting.kill_keeper(self._started.keeper_pid)
            elif due is Due.TIME_UP:
                subject = self._subject(talk)
                # Whatever it answers from now on is too late: to be asked may have ended a wait of its C code.
                late = _deaths.too_late(subject, talk.timeout, self._take_stacks(talk))
                self._condemned = True
                self._started.order(_keeper.TERMINATE)
                deadlines.terminated()
            else:
                self._started.order(_keeper.KILL)
                self._started.wake_keeper()
        return late

    def _step(self, talk: Talk, limit_ms: float, *, deaf: bool = False) -> None:
        ready = self._wait(limit_ms)
        self._outputs.pass_on(ready)
        event = ready.get(self._pipe_number, 0)
        try:
            if event & select.POLLOUT:
                self._pipe.write()
            if event & ~select.POLLOUT:
                self._read_pipe(talk, deaf=deaf)
        except _frames.Closed:  # the keeper's line tells how
            self._pipe_open = False
        if self._started.line.fileno() in ready:
            self._hear()
            if self.ended:
                self._last_words(talk)

    @property
    def _answered(self) -> bool:
        return self._answer is not None

    @property
    def _pipe_number(self) -> int:
        return self._started.pipe.fileno()

    def _wait(self, limit_ms: float) -> dict[int, int]:
        poll = select.poll()
        if self._pipe_open:
            poll.register(self._pipe_number, select.POLLIN | (select.POLLOUT if self._pipe.unwritten else 0))
        if not self.ended:
            poll.register(self._started.line, select.POLLIN)
        for descriptor in self._outputs.descriptors:
            poll.register(descriptor, select.POLLIN)
        return dict(poll.poll(limit_ms))

    def _read_pipe(self, talk: Talk, *, deaf: bool) -> None:
        for frame in self._pipe.read():
            if frame.kind == _worker.REMOTE:
                if deaf or talk.interrupted() is not None:
                    _descriptors.close(*frame.descriptors)
                    continue  # the worker is being ended: the trial is not touched any more
                answer = talk.roots.serve(frame)
                self._pipe.put(b"A", answer.data, answer.descriptors)
                self._pipe.write()
            elif frame.kind == _worker.RECORD:
                _inherited.handle(frame.data)
            else:
                self._answer = frame

    def _hear(self) -> None:
        """Take in what the keeper says of the worker."""
        kind, number, text = self._started.hear()
        if kind == _keeper.STARTED:
            self.pid = number
            self._started.know_worker(number)
            self.lease.tell(worker=number)
            return
        if not kind:
            return
        self.ended = True
        if kind == _keeper.ENDED:
            self._status = os.waitstatus_to_exitcode(number)
        elif kind == _keeper.FAILED:
            self._outputs.tail.append(b"fork failed: " + text)
        else:
            self._keeper_gone = True
            _orphans.sweep(self._started.mark)
            self._started.wait_for_worker()

    def _last_words(self, talk: Talk) -> None:
        """The worker is gone: take what is still in the pipes."""
        self._outputs.drain()
        if self._pipe_open and not self._answered:
            try:
                self._read_pipe(talk, deaf=True)
            except _frames.Closed:
                pass

    # ------------------------------------------------------------ what came of it

    def _judge(self, talk: Talk, late: errors.WorkerTimeout | None) -> Any:
        if (instead := talk.interrupted()) is not None and not self._answered:
            raise instead
        if late is not None:
            raise late
        if self._answer is None:
            how = None if self._keeper_gone else self._status
            raise _deaths.died(
                self._subject(talk), how, self._outputs.tail.text(), self._oom_before, keeper_gone=self._keeper_gone
            )
        talk.facts = _answers.facts_of(self._answer)
        self._note_trust(talk.facts)
        return _answers.take(self._answer, talk.name)

    def _note_trust(self, facts: dict[str, Any]) -> None:
        """A worker that ran out of memory, or that keeps growing, gets no further job."""
        memory = facts["memory_bytes"]
        self._first_memory_bytes = self._first_memory_bytes or memory
        self.trusted = facts["trusted"] and memory < 2 * self._first_memory_bytes + (1 << 30)

    def _subject(self, talk: Talk) -> _deaths.Subject:
        trial = next(iter(talk.roots.trials), None)
        return _deaths.Subject(
            function=talk.name,
            pid=self.pid,
            trial=None if trial is None else trial.number,
            devices=tuple(device.id for device in self.lease.devices),
            doing=_phases.in_words(_records.read_file(self._started.phases)),
        )

    def _take_stacks(self, talk: Talk) -> str:
        """Ask the worker where it is. Works while C code holds the GIL; not while it is stopped."""
        return _whereabouts.read(
            self._started.stacks, self.pid, lambda seconds: self._step(talk, 1000 * seconds, deaf=True)
        )
