"""One job and one plan on all ranks: what they were started with, and what they made of it.

The ranks meet at a key-value store (``rendezvous``). Nobody waits for ever: every rank shows a sign
of life, every wait has an end, and who ends tells the others why.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from nest_megatron.errors import NestError, exit_code_of
from nest_megatron.integrations.megatron_lm.rendezvous import (
    LostStoreError,
    NoAgreementError,
    Place,
    TimedStore,
    connect_store,
    key_of,
)
from nest_megatron.integrations.megatron_lm.same_job import differences, named
from nest_megatron.parallel.plan_file import digest
from nest_megatron.units import Seconds

Found = TypeVar("Found")

#: Seconds between signs of life, and how many in one second the store has from all ranks at most.
_BEAT_S, _MOST_BEATS_PER_S = 1.0, 2_000.0
#: Pauses between two looks at the store, and how many looks in one second all ranks take at most.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _MOST_LOOKS_PER_S = 0.02, 0.5, 10_000.0
#: How long rank 0 listens for more ranks that differ once one does.
_OTHERS_S = 2.0


class Board:
    """Notes that ranks leave for each other; this rank shows signs of life until it ``rests``.

    Rank 0 keeps its board for as long as others may read it: its end is the end of the store.
    """

    def __init__(self, store: TimedStore, place: Place) -> None:
        self.store = store
        self.place = place
        self._rests = threading.Event()
        self._speaks: bool | None = None
        self._heard: dict[int, tuple[str, float]] = {}
        self._next_look = time.monotonic() + place.silence_s / 4
        self.put(_beat(place.rank), "0")
        self.put(_host(place.rank), socket.gethostname())
        self.count("arrived")
        self._life = threading.Thread(target=self._show_life, daemon=True)
        self._life.start()

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        self.store.set(self._key(name), text)

    def has(self, *names: str) -> bool:
        """Whether all of some notes are there."""
        return self.store.check([self._key(name) for name in names])

    def read(self, name: str) -> str | None:
        """A note, or ``None`` while it is not there."""
        return self.store.get(self._key(name)) if self.has(name) else None

    def read_all(self, names: Sequence[str]) -> list[str]:
        """Notes that are known to be there."""
        return self.store.multi_get([self._key(name) for name in names])

    def count(self, name: str, step: int = 1) -> int:
        """Raise a counter, and say where it stands."""
        return self.store.add(self._key(name), step)

    def absent(self, names: Sequence[str]) -> list[str]:
        """Those of some notes that are not there."""
        if not names or self.has(*names):
            return []
        if len(names) == 1:
            return list(names)
        half = len(names) // 2
        return [*self.absent(names[:half]), *self.absent(names[half:])]

    def wait(self, name: str, what: str, *, limit_s: Seconds | None = None) -> str:
        """Wait for a note of rank 0.

        Args:
            what: what is awaited, for the error.
            limit_s: longest wait; the place's patience if not given.

        Raises:
            NoAgreementError: if a rank failed, rank 0 fell silent, or the time is over.
        """

        def too_late() -> str:
            return f"no {what} from {self._who(0)} after {limit_s:g} s. {self._roll_call()}"

        limit_s = self.place.patience_s if limit_s is None else limit_s
        return self.until(lambda: self.read(name), lambda: [0], too_late, limit_s)

    def collect(
        self,
        name: str,
        what: str,
        *,
        limit_s: Seconds | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> dict[int, str]:
        """Wait, on rank 0, for what every rank brings; in the order of ranks.

        Args:
            name: under which the ranks bring it.
            what: what is awaited, for the error.
            limit_s: longest wait; the place's patience if not given.
            enough: whether what is there will do.

        Raises:
            NoAgreementError: if a rank failed, fell silent or did not leave its note in time.
        """
        ranks = range(self.place.world_size)
        limit_s = self.place.patience_s if limit_s is None else limit_s

        def awaited() -> list[int]:
            missing = set(self.absent([_of_rank(name, rank) for rank in ranks]))
            return [rank for rank in ranks if _of_rank(name, rank) in missing]

        def all_there() -> bool | None:
            return self.count(name, 0) >= self.place.world_size or enough() or None

        def too_late() -> str:
            late = awaited()
            arrived = [rank for rank in late if self.has(_host(rank))]
            if not arrived:
                return f"after {limit_s:g} s {self._roll_call()}"
            return f"no {what} from {self._who(*arrived)} after {limit_s:g} s"

        self.until(all_there, awaited, too_late, limit_s)
        late = set(awaited())
        there = [rank for rank in ranks if rank not in late]
        texts = self.read_all([_of_rank(name, rank) for rank in there])
        return dict(zip(there, texts, strict=True))

    def bring(self, name: str, text: str) -> None:
        """Leave this rank's part of what rank 0 collects."""
        self.put(_of_rank(name, self.place.rank), text)
        self.count(name)

    def until(
        self,
        look: Callable[[], Found | None],
        awaited: Callable[[], Sequence[int]],
        too_late: Callable[[], str],
        limit_s: Seconds,
    ) -> Found:
        """Look again and again until something is found.

        Args:
            awaited: the ranks that are waited for, which must show signs of life.
            too_late: the error's text where the time is over.
        """
        ended = time.monotonic() + limit_s
        longest = max(_LONGEST_PAUSE_S, self.place.world_size / _MOST_LOOKS_PER_S)
        pause = _FIRST_PAUSE_S
        while True:
            found = look()
            self.heed()
            if found is not None:
                return found
            if time.monotonic() > ended:
                raise NoAgreementError(too_late())
            self._require_life(awaited)
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def heed(self) -> None:
        """Raise what another rank has failed with, to end with the exit code that it ends with."""
        note = self.read("error")
        if note is not None:
            code, _, message = note.partition(" ")
            error = NoAgreementError(message)
            error.exit_code = int(code)
            raise error

    def _require_life(self, awaited: Callable[[], Sequence[int]]) -> None:
        now = time.monotonic()
        if now < self._next_look:
            return
        self._next_look = now + self.place.silence_s / 4
        ranks = awaited()
        late = set(self.absent([_beat(rank) for rank in ranks]))
        arrived = [rank for rank in ranks if _beat(rank) not in late]
        for rank, beat in zip(arrived, self.read_all([_beat(r) for r in arrived]), strict=True):
            if self._heard.get(rank, ("", 0.0))[0] != beat:
                self._heard[rank] = (beat, time.monotonic())
        silent = [r for r in arrived if now - self._heard[r][1] > self.place.silence_s]
        if silent:
            raise NoAgreementError(
                f"no sign of life from {self._who(*silent)} for {self.place.silence_s:g} s: the "
                "process was killed or is stopped, or its host is down"
            )

    def _show_life(self) -> None:
        pause = max(_BEAT_S, self.place.world_size / _MOST_BEATS_PER_S)
        count, name = 0, _beat(self.place.rank)
        with contextlib.suppress(LostStoreError):
            while not self._rests.wait(min(pause, self.place.silence_s / 4)):
                count += 1
                self.put(name, str(count))

    def rest(self) -> None:
        """Show no more signs of life: nobody waits for this rank any longer."""
        self._rests.set()
        self._life.join(_BEAT_S)  # an interpreter that ends must not meet it inside torch

    def fail(self, message: str, exit_code: int = NestError.exit_code) -> None:
        """Tell the other ranks why this one ends and how, unless another was first."""
        with contextlib.suppress(LostStoreError):
            self.store.compare_set(self._key("error"), "", f"{exit_code} {message}")

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what ends this one in here."""
        try:
            yield
        except NoAgreementError as error:
            self.fail(str(error), error.exit_code)
            raise
        except SystemExit as end:
            if end.code:
                who = self._who(self.place.rank)
                self.fail(f"{who} ended with code {end.code}", exit_code_of(end))
            raise
        except BaseException as error:
            text = str(error) or type(error).__name__
            self.speaks()
            self.fail(f"{self._who(self.place.rank)} stopped: {text}", exit_code_of(error))
            raise

    def speaks(self) -> bool:
        """Whether this rank is the first of its host that ends, so that it says why.

        Its first process may be the one that is stopped; and without the store all say it.
        """
        if self._speaks is None:
            try:
                self._speaks = self.count(f"said on {socket.gethostname()}") == 1
            except LostStoreError:
                self._speaks = True
        return self._speaks

    def leave(self) -> None:
        """Stay until all have said why they end: a launcher ends all once the first has gone.

        And rank 0's end may be the end of the store.
        """
        self.rest()
        ended = time.monotonic() + self.place.farewell_s
        with contextlib.suppress(LostStoreError):
            gone = self.count("left")
            while gone < self.count("arrived", 0) and time.monotonic() < ended:
                time.sleep(_FIRST_PAUSE_S)
                gone = self.count("left", 0)

    def hosts(self, ranks: Sequence[int]) -> dict[int, str]:
        """The hosts of ranks that have arrived."""
        names = self.read_all([_host(rank) for rank in ranks])
        return dict(zip(ranks, names, strict=True))

    def _who(self, *ranks: int) -> str:
        """Ranks with their hosts, as far as these are known."""
        return named(ranks, self.hosts([rank for rank in ranks if self.has(_host(rank))]))

    def _roll_call(self) -> str:
        """Which ranks have come, and which have not."""
        ranks = range(self.place.world_size)
        late = set(self.absent([_host(rank) for rank in ranks]))
        missing = [rank for rank in ranks if _host(rank) in late]
        if not missing:
            return f"All {len(ranks)} ranks have arrived."
        arrived = [rank for rank in ranks if _host(rank) not in late]
        return (
            f"{len(missing)} of {len(ranks)} ranks have not arrived: {named(missing, {})}. "
            f"Arrived: {self._who(*arrived)}. Look at the missing ranks' own output: one that "
            "ended, hangs or was started without +nest never arrives"
        )

    def _key(self, name: str) -> str:
        return key_of(self.place, name)


def connect(place: Place) -> Board:
    """Join the other ranks of the job.

    Raises:
        NoAgreementError: if rank 0's store cannot be found in time.
        UserInputError: if no port is left for it, or nobody says where rank 0 is.
    """
    return Board(connect_store(place), place)


def _of_rank(name: str, rank: int) -> str:
    return f"{name}/{rank}"


def _beat(rank: int) -> str:
    return _of_rank("beat", rank)


def _host(rank: int) -> str:
    return _of_rank("host", rank)


#: Waits for all ranks and gives the name of the host of each.
Hosts = Callable[[], Sequence[str]]


def share(board: Board, solve: Callable[[Hosts], str], *, what: str = "plan") -> str:
    """Rank 0's answer, on every rank.

    Args:
        solve: called on rank 0 alone.
        what: the answer's name; a job shares each name once.

    Raises:
        NoAgreementError: on the other ranks, with rank 0's reason.
    """
    with board.telling():
        present = f"present for the {what}"
        board.bring(present, socket.gethostname())
        if board.place.rank:
            limit_s = board.place.planning_s + board.place.patience_s
            return board.wait(f"the {what}", what, limit_s=limit_s)
        answer = solve(lambda: list(board.collect(present, "sign of life").values()))
        board.put(f"the {what}", answer)
        return answer


def confirm(board: Board, mine: Mapping[str, str], *, what: str = "settings") -> None:
    """Return once every rank has arrived with the same values as rank 0.

    Digests are compared; the values of a rank that differs travel, so that they can be named.

    Args:
        mine: this rank's values, by the name that a user knows.
        what: their name; a job confirms each name once.

    Raises:
        NoAgreementError: on all ranks if any differs, with both values of each name, or if one does
            not arrive.
    """
    with board.telling():
        own = digest(dict(mine))
        if board.place.rank == 0:
            board.put(f"digest of the {what}", own)
        differs = board.wait(f"digest of the {what}", what) != own
        board.bring(f"{what} of", json.dumps(dict(mine)) if differs else "")
        if differs:
            board.count(f"different {what}")
        if board.place.rank:
            board.wait(f"same {what}", f"agreement on the {what}")
            return
        _require_same(board, mine, what)
        board.put(f"same {what}", "yes")


def _require_same(board: Board, mine: Mapping[str, str], what: str) -> None:
    """On rank 0: all parts are there and none says something else."""
    first: list[float] = []

    def enough() -> bool:
        """One differs, and others had time to say the same."""
        if not first and board.count(f"different {what}", 0):
            first.append(time.monotonic())
        return bool(first) and time.monotonic() - first[0] > _OTHERS_S

    parts = board.collect(f"{what} of", what, enough=enough)
    if any(parts.values()):
        of_ranks = {rank: json.loads(text) if text else mine for rank, text in parts.items()}
        raise NoAgreementError(differences(of_ranks, board.hosts(list(parts))))
