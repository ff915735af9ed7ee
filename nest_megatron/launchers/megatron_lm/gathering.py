"""What every rank works out by itself, brought to rank 0: the way back beside ``agreement.share``.

All ranks enter and all leave together. Each shows signs of life while it works; one that fails,
dies or falls silent ends all of them with its reason, at once where it can still say it.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable

from nest_megatron.launchers.megatron_lm import agreement
from nest_megatron.launchers.megatron_lm.agreement import (
    Board,
    NoAgreementError,
    connection_lost,
    pulse,
)
from nest_megatron.units import Seconds

#: Pause between two looks at the store; work takes seconds, and a thousand ranks may look.
_PAUSE_S = 0.25
#: Pause where all ranks wait for the last one to have read why they end.
_LAST_PAUSE_S = 0.05

#: Raises as soon as another rank has failed; a rank calls it now and then while it works.
Check = Callable[[], None]


def gather(
    board: Board, work: Callable[[Check], str], *, what: str, limit_s: Seconds
) -> tuple[str, ...]:
    """Every rank's part, in the order of ranks, on rank 0; nothing elsewhere.

    Args:
        work: makes this rank's part.
        what: the parts' name; a job gathers each name once.
        limit_s: longest that any rank may take from rank 0's arrival.

    Raises:
        NoAgreementError: on all other ranks, with the reason of the one that failed.
    """
    with connection_lost():
        try:
            with board.alive():
                return _gather(board, work, what, limit_s)
        except BaseException as error:
            _part(board, error, what)
            raise


def _gather(
    board: Board, work: Callable[[Check], str], what: str, limit_s: Seconds
) -> tuple[str, ...]:
    rank, started = board.place.rank, time.monotonic()
    board.put(_name(what, rank), work(lambda: _heed(board)))
    if rank:
        _wait(board, [0], lambda: [] if board.read(f"all {what}") else [0])
        return ()
    others = range(1, board.place.world_size)
    missing = list(others)

    def still_missing() -> list[int]:
        missing[:] = [rank for rank in missing if not board.has(_name(what, rank))]
        if missing and time.monotonic() - started > limit_s:
            raise NoAgreementError(
                f"no {what} of rank {missing[0]}{_at(board, missing[0])} after {limit_s:.0f} s"
            )
        return missing

    _wait(board, others, still_missing)
    parts = board.read_all([_name(what, rank) for rank in range(board.place.world_size)])
    board.put(f"all {what}", "yes")
    return tuple(parts)


def _wait(board: Board, ranks: Iterable[int], missing: Callable[[], list[int]]) -> None:
    """Until no rank is missing; those that are must show signs of life, once they have begun."""
    heard: dict[int, tuple[str | None, float]] = dict.fromkeys(ranks, (None, 0.0))
    while True:
        _heed(board)
        awaited = missing()
        if not awaited:
            return
        for rank in awaited:
            beat, now = board.read(pulse(rank)), time.monotonic()
            if beat != heard[rank][0]:
                heard[rank] = (beat, now)
            elif beat is not None and now - heard[rank][1] > agreement.SILENCE_S:
                raise NoAgreementError(
                    f"rank {rank}{_at(board, rank)} has been silent for {agreement.SILENCE_S:.0f} s"
                )
        time.sleep(_PAUSE_S)


def _heed(board: Board) -> None:
    error = board.read("error")
    if error is not None:
        raise NoAgreementError(error)


def _part(board: Board, error: BaseException, what: str) -> None:
    """Leave the reason for the others, and stay until all have read it.

    A launcher ends all processes of a host as soon as one has ended, and whoever is to print the
    reason may not have read it yet; and rank 0's end may be the end of the store.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
        if not board.has("error"):
            own = isinstance(error, NoAgreementError)
            board.put("error", str(error) if own else _reason(board, error, what))
        ended = time.monotonic() + agreement.FAREWELL_S
        heard = board.count("heard the error")
        while heard < board.place.world_size and time.monotonic() < ended:
            time.sleep(_LAST_PAUSE_S)
            heard = board.count("heard the error", 0)


def _reason(board: Board, error: BaseException, what: str) -> str:
    rank, text = board.place.rank, str(error) or type(error).__name__
    return f"rank {rank} on {socket.gethostname()} has no {what}: {text}"


def _at(board: Board, rank: int) -> str:
    host = board.read(f"host/{rank}")
    return "" if host is None else f" on {host}"


def _name(what: str, rank: int) -> str:
    return f"{what}/{rank}"
