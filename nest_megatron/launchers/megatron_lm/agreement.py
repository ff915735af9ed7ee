"""One plan on all ranks: rank 0 finds it, the others wait for it, all compare what they made of it.

The ranks meet at a key-value store. Under torchrun that is the agent's, which is there already;
elsewhere rank 0 hosts one on a port of its own, because Megatron will want ``MASTER_PORT`` later.
Nobody waits for ever: rank 0 shows a sign of life while it plans, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nest_megatron.errors import NestError, UserInputError

#: Seconds between signs of life of rank 0, and how many may be missed.
_BEAT_S = 1.0
SILENCE_S = 20.0
#: Pauses between two looks at the store.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
#: How long rank 0 stays for the others to read why it failed.
FAREWELL_S = 10.0
#: Ports tried for a store of our own, below Linux's ephemeral range.
_FIRST_PORT, _NUM_PORTS, _NUM_TRIES, _STRIDE = 25_000, 7_000, 16, 97


#: Variables that tell one attempt of one job from all others.
_OF_ATTEMPT = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


class NoAgreementError(NestError):
    """Rank 0 failed or fell silent, or a rank arrived at something else than rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands in its job.

    Args:
        patience_s: longest wait for all other ranks.
        port: of the store, where torchrun hosts none; several are tried if not given.
    """

    rank: int
    world_size: int
    environment: Mapping[str, str]
    patience_s: float = 600.0
    port: int | None = None

    @property
    def agent_hosts_store(self) -> bool:
        """Whether torchrun's agent hosts the store at ``MASTER_ADDR:MASTER_PORT``."""
        return self.environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def key(self) -> str:
        """A name for this attempt of this job, the same on all its ranks."""
        words = [self.environment.get(name, "") for name in _OF_ATTEMPT]
        return hashlib.sha256("|".join([*words, str(self.world_size)]).encode()).hexdigest()[:16]


class Board:
    """Notes that ranks leave for each other.

    Rank 0 keeps its board for as long as others may read it: its end is the end of the store.

    Args:
        store: a ``torch.distributed.Store``.
    """

    def __init__(self, store: Any, place: Place) -> None:
        self.store = store
        self.place = place

    def put(self, name: str, text: str) -> None:
        """Leave a note."""
        self.store.set(self._key(name), text)

    def has(self, name: str) -> bool:
        """Whether a note is there."""
        return bool(self.store.check([self._key(name)]))

    def read(self, name: str) -> str | None:
        """A note, or ``None`` while it is not there."""
        return bytes(self.store.get(self._key(name))).decode() if self.has(name) else None

    def read_all(self, names: Sequence[str]) -> list[str]:
        """Notes that are known to be there."""
        values = self.store.multi_get([self._key(name) for name in names])
        return [bytes(value).decode() for value in values]

    def count(self, name: str, step: int = 1) -> int:
        """Raise a counter, and say where it stands."""
        return int(self.store.add(self._key(name), step))

    def wait(self, name: str, what: str, *, needs_life: bool = False) -> str:
        """Wait for a note.

        Args:
            what: what is awaited, for the error.
            needs_life: give up when rank 0 shows no sign of life.

        Raises:
            NoAgreementError: if rank 0 failed, fell silent, or the time is over.
        """
        started = heard = time.monotonic()
        beat, pause = None, _FIRST_PAUSE_S
        while True:
            note, error, now = self.read(name), self.read("error"), time.monotonic()
            if error is not None:
                self.count("heard the error")
                raise NoAgreementError(error)
            if note is not None:
                return note
            latest = self.read(pulse(0))
            beat, heard = (latest, now) if latest != beat else (beat, heard)
            if needs_life and now - heard > SILENCE_S:
                raise NoAgreementError(f"rank 0 has been silent for {SILENCE_S:.0f} s")
            if now - started > self.place.patience_s:
                raise NoAgreementError(f"no {what} after {self.place.patience_s:.0f} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _key(self, name: str) -> str:
        return f"nest/{self.place.key}/{name}"

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """Show signs of life from a thread of its own while this rank works."""
        done, name = threading.Event(), pulse(self.place.rank)

        def beat() -> None:
            count = 0
            while not done.wait(_BEAT_S):
                count += 1
                with contextlib.suppress(RuntimeError):
                    self.put(name, str(count))

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Rank 0 does what the others wait for: it shows signs of life, or tells why it fails."""
        try:
            with self.alive():
                yield
        except BaseException as error:
            self.fail(_reason(error))
            raise

    def fail(self, message: str) -> None:
        """Tell the other ranks why this one ends, and stay a while for them to read it."""
        with contextlib.suppress(RuntimeError):
            self.put("error", message)
            self.count("heard the error")
            self.linger()

    def linger(self) -> None:
        """Stay, where this rank hosts the store, until all have heard the error."""
        if self.place.agent_hosts_store or self.place.rank:
            return
        ended = time.monotonic() + FAREWELL_S
        world_size = self.place.world_size
        while self.count("heard the error", 0) < world_size and time.monotonic() < ended:
            time.sleep(_FIRST_PAUSE_S)


def pulse(rank: int) -> str:
    """The note in which a rank shows signs of life."""
    return "beat" if rank == 0 else f"beat/{rank}"


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
    with connection_lost():
        return _share(board, solve, what)


def _share(board: Board, solve: Callable[[Hosts], str], what: str) -> str:
    rank, world_size = board.place.rank, board.place.world_size
    board.put(f"host/{rank}", socket.gethostname())
    if board.count(f"present for the {what}") == world_size:
        board.put("all present", "yes")
    if rank:
        return board.wait(f"the {what}", f"{what} from rank 0", needs_life=True)
    with board.leading():
        answer = solve(lambda: _hosts(board))
    board.put(f"the {what}", answer)
    return answer


def _hosts(board: Board) -> list[str]:
    world_size = board.place.world_size
    board.wait("all present", f"sign of all {world_size} ranks")
    return board.read_all([f"host/{rank}" for rank in range(world_size)])


def confirm(board: Board, digest: str) -> None:
    """Return once every rank has arrived at the same digest.

    Raises:
        NoAgreementError: if any rank differs from rank 0 or does not arrive.
    """
    with connection_lost():
        try:
            _confirm(board, digest)
        except NoAgreementError:
            board.linger()
            raise


def _confirm(board: Board, digest: str) -> None:
    rank, world_size = board.place.rank, board.place.world_size
    if rank == 0:
        board.put("digest", digest)
    wanted = board.wait("digest", "digest of rank 0")
    if wanted != digest:
        message = (
            f"rank {rank} has settings of digest {digest}, rank 0 has {wanted}; were all ranks "
            "started with the same command?"
        )
        board.fail(message)
        raise NoAgreementError(message)
    if board.count("confirmed") == world_size:
        board.put("go", "yes")
    board.wait("go", "agreement of all ranks")


def _reason(error: BaseException) -> str:
    text = str(error) or type(error).__name__
    return f"rank 0 could not plan: {text}"


@contextlib.contextmanager
def connection_lost() -> Iterator[None]:
    """A store that goes away while it is used went with rank 0."""
    import torch

    try:
        yield
    except torch.distributed.DistError as error:
        raise NoAgreementError("the connection to rank 0 was lost; it has ended") from error


def connect(place: Place) -> Board:
    """Join the other ranks of the job.

    Raises:
        NoAgreementError: if rank 0's store cannot be found in time.
        UserInputError: if no port is left for it, or nobody says where rank 0 is.
    """
    if place.agent_hosts_store:
        return Board(_client(place, int(place.environment["MASTER_PORT"]), place.patience_s), place)
    if "MASTER_ADDR" not in place.environment:
        raise UserInputError(
            "MASTER_ADDR",
            value=None,
            limit=f"{place.world_size} ranks meet there",
            fix="Export it with rank 0's host, as for any launch without torchrun.",
        )
    return _host(place) if place.rank == 0 else _find(place)


def ports(place: Place) -> tuple[int, ...]:
    """Ports to try for a store of our own, in order, the same on all ranks."""
    if place.port is not None:
        return (place.port,)
    start = int(place.key, 16)
    tried = [_FIRST_PORT + (start + _STRIDE * i) % _NUM_PORTS for i in range(_NUM_TRIES)]
    master = place.environment.get("MASTER_PORT")
    return tuple(port for port in tried if str(port) != master)


def _host(place: Place) -> Board:
    import torch

    for port in ports(place):
        try:
            board = Board(_store(place, port, place.patience_s, is_master=True), place)
        except torch.distributed.DistError:
            continue
        board.put("hello", "yes")
        return board
    raise UserInputError(
        "nest.port",
        value=place.port,
        limit=f"none of the ports {', '.join(map(str, ports(place)))} is free on rank 0's host",
        fix="Give a free one with nest.port, or launch with torchrun.",
    )


def _find(place: Place) -> Board:
    """The store of this job among those that may answer: another job may hold a port of ours."""
    ended = time.monotonic() + place.patience_s
    while time.monotonic() < ended:
        for port in ports(place):
            board = _greeted(place, port)
            if board is not None:
                return board
        time.sleep(_LONGEST_PAUSE_S)
    raise NoAgreementError(
        f"rank 0 did not appear at {place.environment['MASTER_ADDR']} within "
        f"{place.patience_s:.0f} s"
    )


def _greeted(place: Place, port: int) -> Board | None:
    import torch

    address = place.environment["MASTER_ADDR"]
    try:
        socket.create_connection((address, port), timeout=2.0).close()
        board = Board(_client(place, port, 5.0), place)
        if board.read("hello") is None:
            return None
    except (OSError, torch.distributed.DistError):
        return None
    return Board(_client(place, port, place.patience_s), place)


def _client(place: Place, port: int, timeout_s: float) -> Any:
    return _store(place, port, timeout_s, is_master=False)


def _store(place: Place, port: int, timeout_s: float, *, is_master: bool) -> Any:
    from datetime import timedelta

    import torch

    return torch.distributed.TCPStore(
        place.environment["MASTER_ADDR"],
        port,
        world_size=place.world_size,
        is_master=is_master,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
