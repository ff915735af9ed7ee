"""One job and one plan on all ranks: what they tell each other through the store of ``rendezvous``.

All ranks call the same of these functions in the same order. A rank that fails, is killed or stops
ends all of them with its reason, at once where it can still say it.

Rank 0's answers, its heartbeats and the failure of any rank are the entries of one log, each under
a key of its own. An entry is written where none stands yet, so all ranks read the same sequence,
and the first failure ends it. A rank that waits blocks on the next entry: it calls the store once
for each, and not at all in between. Only rank 0 polls, which is a single process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.errors import exit_code_of
from nest_megatron.integrations.megatron_lm.rendezvous import (
    LostStoreError,
    NoAgreementError,
    RankContext,
    TimedStore,
    differences,
    rank_words,
)
from nest_megatron.layout.plan_file import digest
from nest_megatron.plain import to_plain
from nest_megatron.units import Seconds

#: Heartbeats that all ranks together send or read in one second, and the shortest interval of one.
_HEARTBEATS_PER_S, _SHORTEST_INTERVAL_S = 250.0, 1.0
#: How often rank 0 looks for what it collects, and how long it waits for more ranks that differ
#: once one does.
_POLL_S, _OTHERS_S = 0.05, 2.0
#: How long a rank that ends stays for the others to say why, too.
_GRACE_PERIOD_S = 10.0
#: How an entry of the log begins.
_ANSWER, _HEARTBEAT, _FAILURE = "+", ".", "!"
#: The list that every rank leaves its host in as it arrives.
_ROLL = "roll"
#: Waits for all ranks and gives the name of the host of each.
Hosts = Callable[[], Sequence[str]]


class RendezvousStore(TimedStore):
    """This rank's side of the log, and its heartbeat until it is stopped.

    Rank 0 keeps it for as long as others may read: its end is the end of the store.
    """

    def __init__(self, context: RankContext) -> None:
        super().__init__(context)
        self._entry = 0
        self._waits = False
        self._writing = threading.Lock()
        self._stopped = threading.Event()
        self.count(f"heartbeat/{context.rank}")
        self.leave(_ROLL, socket.gethostname())
        self._heartbeat = threading.Thread(target=self._send_heartbeats, daemon=True)
        self._heartbeat.start()
        atexit.register(self.stop_heartbeat)

    @property
    def interval_s(self) -> Seconds:
        """Time between two heartbeats: longer for many ranks, a quarter of the timeout at most."""
        return min(
            max(_SHORTEST_INTERVAL_S, self.context.world_size / _HEARTBEATS_PER_S),
            self.context.heartbeat_timeout_s / 4,
        )

    def count(self, name: str, step: int = 1) -> int:
        """Raise a counter, and say where it stands."""
        return int(self.call("add", name, step))

    def leave(self, name: str, part: object) -> None:
        """Leave this rank's part of a list, to which every rank adds one at most."""
        self.call("append", name, f"{json.dumps([self.context.rank, to_plain(part)])}\n")
        self.count(f"{name}/count")

    def num_parts(self, name: str) -> int:
        """How many parts of a list are there."""
        return self.count(f"{name}/count", 0)

    def parts(self, name: str) -> dict[int, Any]:
        """The parts of a list as plain data, in the order of the ranks of launched processes."""
        lines = self.call("get", name).splitlines() if self.num_parts(name) else ()
        return dict(sorted(map(json.loads, lines)))

    def named(self, ranks: Iterable[int]) -> str:
        """Ranks in words, with their hosts."""
        return rank_words(ranks, self.parts(_ROLL))

    def publish(self, answer: object = None) -> None:
        """Write rank 0's next answer into the log, unless another rank has failed meanwhile."""
        self._write(_ANSWER + json.dumps(to_plain(answer)))

    def receive(self, what: str, limit_s: Seconds | None = None) -> Any:
        """Wait for rank 0's next answer, as plain data.

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
            timeout_s = self.context.heartbeat_timeout_s
            self._waits = True
            entry = self.wait_for(f"log/{self._entry}", min(left_s, timeout_s))
            self._waits = False
            if entry is not None:
                _raise_failure(entry)
                self._entry += 1
                if entry.startswith(_ANSWER):
                    return json.loads(entry.removeprefix(_ANSWER))
            elif left_s >= timeout_s and 0 in self.parts(_ROLL):
                raise self._silent([0])
        raise NoAgreementError(
            f"no {what} from {self.named([0])} after {limit_s:g} s. {self._roll_call()}"
        )

    def collect(
        self,
        what: str,
        limit_s: Seconds | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> dict[int, Any]:
        """Wait, on rank 0, for the parts of a list that every rank adds to.

        Args:
            what: name of the list.
            limit_s: longest wait; the rendezvous timeout if not given.
            enough: whether what is there will do.

        Raises:
            NoAgreementError: if a rank failed, sends no heartbeat or brought nothing in time.
        """
        limit_s = limit_s or self.context.rendezvous_timeout_s
        started = time.monotonic()
        seen = dict[int, tuple[str, float]]()
        next_check = started + self.interval_s
        while True:
            is_there = self.num_parts(what) >= self.context.world_size or enough()
            self.raise_failure()
            if is_there:
                return self.parts(what)
            now = time.monotonic()
            if now > min(started + limit_s, next_check):
                # ranks that have arrived, and whose part is missing
                late = sorted(self.parts(_ROLL).keys() - self.parts(what).keys())
                if now > started + limit_s:
                    said = f"after {limit_s:g} s"
                    if late:
                        raise NoAgreementError(f"no {what} from {self.named(late)} {said}")
                    raise NoAgreementError(f"{said} {self._roll_call()}")
                next_check = now + self.interval_s
                # ranks that are awaited are alive: the last heartbeat of each, and when it came
                keys = [f"heartbeat/{rank}" for rank in late]
                heartbeats = self.call("multi_get", keys) if keys else ()
                for rank, heartbeat in zip(late, heartbeats, strict=True):
                    if rank not in seen or seen[rank][0] != heartbeat:
                        seen[rank] = heartbeat, time.monotonic()
                timeout_s = self.context.heartbeat_timeout_s
                if silent := [rank for rank in late if now - seen[rank][1] > timeout_s]:
                    raise self._silent(silent)
            time.sleep(_POLL_S)

    def raise_failure(self) -> None:
        """Raise what another rank has failed with, to end with the exit code that it ends with."""
        with self._writing:
            while self.call("check", [f"log/{self._entry}"]):
                _raise_failure(self.call("get", f"log/{self._entry}"))
                self._entry += 1

    def tell(self, error: BaseException) -> None:
        """Tell the other ranks what ends this one, unless another was first."""
        own = rank_words([self.context.rank], {self.context.rank: socket.gethostname()})
        if isinstance(error, NoAgreementError):
            message = str(error)
        elif isinstance(error, SystemExit):
            message = f"{own} ended with code {error.code}"
        else:
            message = f"{own} stopped: {str(error) or type(error).__name__}"
            _ = self.prints_errors  # this one says it on its host
        with contextlib.suppress(NoAgreementError):
            self._write(f"{_FAILURE}{exit_code_of(error)} {message}")

    @functools.cached_property
    def prints_errors(self) -> bool:
        """Whether this rank is the first of its host that ends, so that it says why.

        Its first process may be the one that is stopped; and without the store all say it.
        """
        try:
            return self.count(f"printed on {socket.gethostname()}") == 1
        except LostStoreError:
            return True

    def stop_heartbeat(self) -> None:
        """Send no more heartbeats: no rank waits for this one any longer."""
        self._stopped.set()
        # an interpreter that ends must not meet it inside torch
        self._heartbeat.join(_SHORTEST_INTERVAL_S)

    def exit_together(self) -> None:
        """Stay until all have said why they end: a launcher ends all once the first has gone."""
        self.stop_heartbeat()
        ended = time.monotonic() + _GRACE_PERIOD_S
        with contextlib.suppress(LostStoreError):
            gone = self.count("gone")
            while gone < self.num_parts(_ROLL) and time.monotonic() < ended:
                time.sleep(self.interval_s / 2)  # all of them poll
                gone = self.count("gone", 0)

    def _write(self, entry: str) -> None:
        """Put an entry behind the last one; raises the failure that stands there."""
        with self._writing:
            found = None
            while found != entry:
                found = self.call("compare_set", f"log/{self._entry}", "", entry)
                _raise_failure(found)
                self._entry += 1

    def _send_heartbeats(self) -> None:
        """Rank 0's are entries of the log; those of others are read where they are awaited.

        A rank that waits sends none: it has brought all that rank 0 may wait for.
        """
        with contextlib.suppress(NoAgreementError):
            while not self._stopped.wait(self.interval_s):
                if self.context.rank == 0:
                    self._write(_HEARTBEAT)
                elif not self._waits:
                    self.count(f"heartbeat/{self.context.rank}")

    def _silent(self, ranks: Iterable[int]) -> NoAgreementError:
        return NoAgreementError(
            f"no heartbeat from {self.named(ranks)} for "
            f"{self.context.heartbeat_timeout_s:g} s: the process was killed or is stopped, or its "
            "host is down"
        )

    def _roll_call(self) -> str:
        world_size = self.context.world_size
        hosts = self.parts(_ROLL)
        missing = [rank for rank in range(world_size) if rank not in hosts]
        if not missing:
            return f"All {world_size} ranks have arrived."
        return (
            f"{len(missing)} of {world_size} ranks have not arrived: {rank_words(missing, {})}. "
            f"Arrived: {rank_words(hosts, hosts)}. Look at the missing ranks' own output: one that "
            "ended, hangs or was started without +nest never arrives"
        )


def _raise_failure(entry: str) -> None:
    if entry.startswith(_FAILURE):
        code, _, message = entry.removeprefix(_FAILURE).partition(" ")
        error = NoAgreementError(message)
        error.exit_code = int(code)
        raise error


@contextlib.contextmanager
def propagating_errors(store: RendezvousStore | None) -> Iterator[None]:
    """Tell the other ranks, if there are any, what ends this one in here."""
    try:
        yield
    except BaseException as error:
        if store is not None and exit_code_of(error):
            store.tell(error)
        raise


def broadcast(
    store: RendezvousStore | None, solve: Callable[[Hosts], object], *, what: str = "plan"
) -> Any:
    """Rank 0's answer, on every rank as plain data; rank 0 alone calls ``solve``.

    Raises:
        NoAgreementError: on the other ranks, with rank 0's reason.
    """
    if store is None:
        return to_plain(solve(lambda: [socket.gethostname()]))
    with propagating_errors(store):
        if store.context.rank:
            return store.receive(
                what, store.context.planning_s + store.context.rendezvous_timeout_s
            )
        answer = to_plain(solve(lambda: list(store.collect(_ROLL).values())))
        store.publish(answer)
        return answer


def require_equal(
    store: RendezvousStore | None, mine: Mapping[str, str], *, what: str = "settings"
) -> None:
    """Return once every rank has arrived with the same values as rank 0.

    Digests are compared; the values of a rank that differs travel, so that they can be named.

    Args:
        mine: this rank's values, by the name that a user knows.
        what: their name, which no other call of the job has.

    Raises:
        NoAgreementError: on all ranks if any differs, with both values of each name, or if one does
            not arrive.
    """
    if store is None:
        return
    with propagating_errors(store):
        own = digest(dict(mine))
        different = f"different {what}"
        if store.context.rank:
            if store.receive(f"digest of the {what}") != own:
                store.leave(different, mine)
            store.leave(what, None)
            store.receive(f"agreement on the {what}")
            return
        store.publish(own)
        store.leave(what, None)
        ended = math.inf

        def enough() -> bool:
            """One differs, and others had time to say the same."""
            nonlocal ended
            if ended == math.inf and store.num_parts(different):
                ended = time.monotonic() + _OTHERS_S
            return time.monotonic() > ended

        parts = store.collect(what, enough=enough)
        if others := store.parts(different):
            of_ranks = {**dict.fromkeys(parts, mine), **others}
            raise NoAgreementError(differences(of_ranks, store.parts(_ROLL)))
        store.publish()


def gather(
    store: RendezvousStore | None, work: Callable[[], object], *, what: str, limit_s: Seconds
) -> tuple[Any, ...]:
    """Every rank's part as plain data, in the order of ranks, on rank 0; nothing elsewhere.

    Args:
        work: makes this rank's part.
        what: the name of the parts, which no other call of the job has.
        limit_s: longest that any rank may take once rank 0 is done.

    Raises:
        NoAgreementError: on all other ranks, with the reason of the one that failed.
    """
    if store is None:
        return (to_plain(work()),)
    with propagating_errors(store):
        store.leave(what, work())
        if store.context.rank:
            store.receive(f"word that all {what} are there", 2 * limit_s)
            return ()
        parts = store.collect(what, limit_s)
        store.publish()
        return tuple(parts.values())
