"""What the ranks of a job tell each other through the key-value store of ``rendezvous``.

Rank 0's answers, its heartbeats and the failure of any rank are the entries of one log, each under
a key of its own. An entry is written where none stands yet, so all ranks read the same sequence,
and the first failure ends it. A rank that waits blocks on the next entry: it calls the store once
for each, and not at all in between. Only rank 0 polls, which is a single process.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from nest_megatron.errors import NestError, exit_code_of
from nest_megatron.integrations.megatron_lm.rendezvous import (
    LostStoreError,
    NoAgreementError,
    RankContext,
    TimedStore,
    connect_store,
    key_of,
)
from nest_megatron.integrations.megatron_lm.same_job import named
from nest_megatron.units import Seconds

#: Heartbeats that all ranks together send or read in one second, and the shortest interval of one.
_HEARTBEATS_PER_S, _SHORTEST_INTERVAL_S = 250.0, 1.0
#: Pauses of a rank that polls: the first, and the longest, which doubling ends at.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
#: The same of a rank that ends and waits for the others; all of them poll then.
_LONGEST_EXIT_PAUSE_S = 2.0
#: How an entry of the log begins.
_ANSWER, _HEARTBEAT, _FAILURE = "+", ".", "!"
_ROLL = "roll"


class RendezvousStore:
    """This rank's side of the log, and its heartbeat until it is stopped.

    Rank 0 keeps it for as long as others may read: its end is the end of the store.

    Raises:
        NoAgreementError: from every method, if the store is lost or does not answer.
    """

    def __init__(self, store: TimedStore, context: RankContext) -> None:
        self.store = store
        self.context = context
        self._entry = 0
        self._writing = threading.Lock()
        self._part = 0
        self._failed = False
        self._prints_errors: bool | None = None
        self._waits = False
        self._seen: dict[int, tuple[str, float]] = {}
        self._next_check = 0.0
        self._stopped = threading.Event()
        self.store.set(self._key(_heartbeat(context.rank)), "0")
        self._append(_ROLL, socket.gethostname())
        self.count("arrived")
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._heartbeat.start()

    @property
    def interval_s(self) -> Seconds:
        """Time between two heartbeats: longer for many ranks, a quarter of the timeout at most."""
        shared = self.context.world_size / _HEARTBEATS_PER_S
        return min(max(_SHORTEST_INTERVAL_S, shared), self.context.heartbeat_timeout_s / 4)

    def count(self, name: str, step: int = 1) -> int:
        """Raise a counter, and say where it stands."""
        return self.store.add(self._key(name), step)

    def publish(self, answer: str) -> None:
        """Write rank 0's next answer into the log, unless another rank has failed meanwhile."""
        self._raise_failure(self._write(_ANSWER + answer))

    def receive(self, what: str, *, limit_s: Seconds | None = None) -> str:
        """Wait for rank 0's next answer.

        Args:
            what: what is awaited, for the error.
            limit_s: longest wait; the rendezvous timeout if not given.

        Raises:
            NoAgreementError: if a rank failed, rank 0 sends no heartbeat, or the time is over.
        """
        limit_s = limit_s or self.context.rendezvous_timeout_s
        # rank 0 names those that are missing after the same time, and goes first
        ended = time.monotonic() + limit_s + self.interval_s
        while (left_s := ended - time.monotonic()) > 0:
            entry = self._next_entry(left_s)
            if entry is not None:
                self._raise_failure(entry)
                if entry.startswith(_ANSWER):
                    return entry.removeprefix(_ANSWER)
        who = self._who([0])
        raise NoAgreementError(f"no {what} from {who} after {limit_s:g} s. {self._roll_call()}")

    def bring(self, text: str, *, differs: bool = False) -> None:
        """Leave this rank's part of what rank 0 collects next; every rank brings one.

        Args:
            differs: it ends the job, so that rank 0 does not wait for all.
        """
        self._part += 1
        self._append(self._part_key, text)
        self.count(f"{self._part_key}/count")
        if differs:
            self.count(f"{self._part_key}/different")

    def has_different(self) -> bool:
        """Whether a part brought so far ends the job."""
        return self.count(f"{self._part_key}/different", 0) > 0

    def collect(
        self,
        what: str,
        *,
        limit_s: Seconds | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> dict[int, str]:
        """Wait, on rank 0, for what every rank brings; in the order of ranks.

        Args:
            limit_s: longest wait; the rendezvous timeout if not given.
            enough: whether what is there will do.

        Raises:
            NoAgreementError: if a rank failed, sends no heartbeat or brought nothing in time.
        """
        limit_s = limit_s or self.context.rendezvous_timeout_s
        ended, key = time.monotonic() + limit_s, self._part_key
        self._seen, self._next_check = {}, time.monotonic() + self.interval_s
        for pause in _pauses(_LONGEST_PAUSE_S):
            there = self.count(f"{key}/count", 0) >= self.context.world_size or enough()
            self.raise_failure()
            if there:
                return self._by_rank(key)
            if time.monotonic() > ended:
                late = sorted(self.hosts().keys() - self._by_rank(key).keys())
                said = f"no {what} from {self._who(late)} after {limit_s:g} s"
                raise NoAgreementError(said if late else f"after {limit_s:g} s {self._roll_call()}")
            self._require_heartbeats(key)
            time.sleep(pause)
        raise AssertionError

    def leave(self, name: str, text: str) -> None:
        """Leave this rank's part of something that no rank has to wait for."""
        self._append(f"left/{name}", text)
        self.count(f"left/{name}/count")

    def num_left(self, name: str) -> int:
        """How many parts of it are there."""
        return self.count(f"left/{name}/count", 0)

    def left(self, name: str) -> dict[int, str]:
        """Those parts, by the ranks that launched processes had."""
        return self._by_rank(f"left/{name}") if self.num_left(name) else {}

    def raise_failure(self) -> None:
        """Raise what another rank has failed with, to end with the exit code that it ends with."""
        with self._writing:
            while self.store.check([self._entry_key(self._entry)]):
                entry = self.store.get(self._entry_key(self._entry))
                self._raise_failure(entry)
                if entry.startswith(_ANSWER):
                    return
                self._entry += 1

    def fail(self, message: str, exit_code: int = NestError.exit_code) -> None:
        """Tell the other ranks why this one ends and how, unless another was first."""
        if not self._failed:
            with contextlib.suppress(LostStoreError):
                self._write(f"{_FAILURE}{exit_code} {message}")
                self._failed = True

    @contextlib.contextmanager
    def propagating_errors(self) -> Iterator[None]:
        """Tell the other ranks what ends this one in here."""
        try:
            yield
        except NoAgreementError as error:
            self.fail(str(error), error.exit_code)
            raise
        except SystemExit as end:
            if end.code:
                self.fail(f"{self._self()} ended with code {end.code}", exit_code_of(end))
            raise
        except BaseException as error:
            text = str(error) or type(error).__name__
            self.prints_errors()
            self.fail(f"{self._self()} stopped: {text}", exit_code_of(error))
            raise

    def prints_errors(self) -> bool:
        """Whether this rank is the first of its host that ends, so that it says why.

        Its first process may be the one that is stopped; and without the store all say it.
        """
        if self._prints_errors is None:
            try:
                self._prints_errors = self.count(f"printed on {socket.gethostname()}") == 1
            except LostStoreError:
                self._prints_errors = True
        return self._prints_errors

    def stop_heartbeat(self) -> None:
        """Send no more heartbeats: no rank waits for this one any longer."""
        self._stopped.set()
        # an interpreter that ends must not meet it inside torch
        self._heartbeat.join(_SHORTEST_INTERVAL_S)

    def exit_together(self) -> None:
        """Stay until all have said why they end: a launcher ends all once the first has gone."""
        self.stop_heartbeat()
        ended = time.monotonic() + self.context.grace_period_s
        with contextlib.suppress(LostStoreError):
            gone = self.count("left")
            for pause in _pauses(_LONGEST_EXIT_PAUSE_S):
                if gone >= self.count("arrived", 0) or time.monotonic() > ended:
                    return
                time.sleep(pause)
                gone = self.count("left", 0)

    def hosts(self) -> dict[int, str]:
        """The hosts of the ranks that have arrived."""
        return self._by_rank(_ROLL)

    def _next_entry(self, limit_s: Seconds) -> str | None:
        """The next entry of the log, once it is there; ``None`` after the time, or too early."""
        timeout_s = self.context.heartbeat_timeout_s
        self._waits = True
        try:
            entry = self.store.wait_for(self._entry_key(self._entry), min(limit_s, timeout_s))
        finally:
            self._waits = False
        if entry is None and limit_s >= timeout_s and 0 in self.hosts():
            raise NoAgreementError(self._silent([0]))
        if entry is not None and not entry.startswith(_FAILURE):
            self._entry += 1
        return entry

    def _write(self, entry: str) -> str:
        """Put an entry behind the last one; what stands there then, this one or a failure."""
        with self._writing:
            while True:
                found = self.store.compare_set(self._entry_key(self._entry), "", entry)
                if found.startswith(_FAILURE):
                    return found
                self._entry += 1
                if found == entry:
                    return found

    def _raise_failure(self, entry: str) -> None:
        if entry.startswith(_FAILURE):
            self._failed = True
            code, _, message = entry.removeprefix(_FAILURE).partition(" ")
            error = NoAgreementError(message)
            error.exit_code = int(code)
            raise error

    def _send_heartbeats(self) -> None:
        """Rank 0's are entries of the log; those of others are read where they are awaited.

        A rank that waits sends none: it has brought all that rank 0 may wait for.
        """
        sent = 0
        with contextlib.suppress(LostStoreError):
            while not self._stopped.wait(self.interval_s):
                if self.context.rank == 0:
                    if self._write(_HEARTBEAT).startswith(_FAILURE):
                        return
                elif not self._waits:
                    sent += 1
                    self.store.set(self._key(_heartbeat(self.context.rank)), str(sent))

    def _require_heartbeats(self, key: str) -> None:
        """Ranks that have arrived and brought nothing yet are alive."""
        now = time.monotonic()
        if now < self._next_check:
            return
        self._next_check = now + self.interval_s
        ranks = sorted(self.hosts().keys() - self._by_rank(key).keys())
        heartbeats = self.store.multi_get([self._key(_heartbeat(rank)) for rank in ranks])
        for rank, heartbeat in zip(ranks, heartbeats, strict=True):
            if self._seen.get(rank, ("", 0.0))[0] != heartbeat:
                self._seen[rank] = (heartbeat, time.monotonic())
        timeout_s = self.context.heartbeat_timeout_s
        silent = [rank for rank in ranks if now - self._seen[rank][1] > timeout_s]
        if silent:
            raise NoAgreementError(self._silent(silent))

    def _silent(self, ranks: Collection[int]) -> str:
        return (
            f"no heartbeat from {self._who(ranks)} for {self.context.heartbeat_timeout_s:g} s: the "
            "process was killed or is stopped, or its host is down"
        )

    def _self(self) -> str:
        return named([self.context.rank], {self.context.rank: socket.gethostname()})

    def _who(self, ranks: Collection[int]) -> str:
        return named(ranks, self.hosts())

    def _roll_call(self) -> str:
        world_size, hosts = self.context.world_size, self.hosts()
        missing = [rank for rank in range(world_size) if rank not in hosts]
        if not missing:
            return f"All {world_size} ranks have arrived."
        return (
            f"{len(missing)} of {world_size} ranks have not arrived: {named(missing, {})}. "
            f"Arrived: {named(hosts, hosts)}. Look at the missing ranks' own output: one that "
            "ended, hangs or was started without +nest never arrives"
        )

    def _append(self, name: str, text: str) -> None:
        self.store.append(self._key(name), json.dumps([self.context.rank, text]) + "\n")

    def _by_rank(self, name: str) -> dict[int, str]:
        """The lines of such a list, in the order of ranks; this rank's own is one of them."""
        lines: Sequence[str] = self.store.get(self._key(name)).splitlines()
        return dict(sorted((rank, text) for rank, text in map(json.loads, lines)))

    @property
    def _part_key(self) -> str:
        return f"part/{self._part}"

    def _entry_key(self, number: int) -> str:
        return self._key(f"log/{number}")

    def _key(self, name: str) -> str:
        return key_of(self.context, name)


def connect(context: RankContext) -> RendezvousStore:
    """Join the other ranks of the job; see ``rendezvous.connect_store`` for errors."""
    return RendezvousStore(connect_store(context), context)


def _heartbeat(rank: int) -> str:
    return f"heartbeat/{rank}"


def _pauses(longest_s: Seconds) -> Iterator[Seconds]:
    pause = _FIRST_PAUSE_S
    while True:
        yield pause
        pause = min(2 * pause, longest_s)
