"""What every rank works out by itself, brought to rank 0: the way back beside ``agreement.share``.

All ranks enter and all leave together. Each shows signs of life while it works; one that fails,
dies or falls silent ends all of them with its reason, at once where it can still say it.
"""

from __future__ import annotations

from collections.abc import Callable

from nest_megatron.integrations.megatron_lm.agreement import Board
from nest_megatron.units import Seconds

#: Raises as soon as another rank has failed; a rank calls it now and then while it works.
Check = Callable[[], None]


def gather(
    board: Board, work: Callable[[Check], str], *, what: str, limit_s: Seconds
) -> tuple[str, ...]:
    """Every rank's part, in the order of ranks, on rank 0; nothing elsewhere.

    Args:
        work: makes this rank's part.
        what: the parts' name; a job gathers each name once.
        limit_s: longest that any rank may take once rank 0 is done.

    Raises:
        NoAgreementError: on all other ranks, with the reason of the one that failed.
    """
    with board.telling():
        board.bring(what, work(board.heed))
        if board.place.rank:
            board.wait(f"all {what}", f"word that all {what} are there", limit_s=2 * limit_s)
            return ()
        parts = board.collect(what, what, limit_s=limit_s)
        board.put(f"all {what}", "yes")
        return tuple(parts.values())
