"""One job and one plan on all ranks: what they were started with, and what they made of it.

All ranks call the same of these functions in the same order. A rank that fails, is killed or stops
ends all of them with its reason, at once where it can still say it.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from nest_megatron.integrations.megatron_lm.rendezvous import NoAgreementError
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.integrations.megatron_lm.same_job import differences
from nest_megatron.layout.plan_file import digest
from nest_megatron.units import Seconds

#: How long rank 0 waits for more ranks that differ once one does.
_OTHERS_S = 2.0
#: Waits for all ranks and gives the name of the host of each.
Hosts = Callable[[], Sequence[str]]
#: Raises once another rank has failed.
Check = Callable[[], None]


def propagating_errors(store: RendezvousStore | None) -> AbstractContextManager[None]:
    """Tell the other ranks, if there are any, what ends this one in here."""
    return nullcontext() if store is None else store.propagating_errors()


def broadcast(
    store: RendezvousStore | None, solve: Callable[[Hosts], str], *, what: str = "plan"
) -> str:
    """Rank 0's answer, on every rank.

    Args:
        solve: called on rank 0 alone.

    Raises:
        NoAgreementError: on the other ranks, with rank 0's reason.
    """
    if store is None:
        return solve(lambda: [socket.gethostname()])
    with store.propagating_errors():
        store.bring(socket.gethostname())
        if store.context.rank:
            limit_s = store.context.planning_s + store.context.rendezvous_timeout_s
            return store.receive(what, limit_s=limit_s)
        answer = solve(lambda: list(store.collect("heartbeat").values()))
        store.publish(answer)
        return answer


def require_equal(
    store: RendezvousStore | None, mine: Mapping[str, str], *, what: str = "settings"
) -> None:
    """Return once every rank has arrived with the same values as rank 0.

    Digests are compared; the values of a rank that differs travel, so that they can be named.

    Args:
        mine: this rank's values, by the name that a user knows.

    Raises:
        NoAgreementError: on all ranks if any differs, with both values of each name, or if one does
            not arrive.
    """
    if store is None:
        return
    with store.propagating_errors():
        own = digest(dict(mine))
        if store.context.rank == 0:
            store.publish(own)
            store.bring("")
            _collect_equal(store, mine, what)
            store.publish("")
            return
        differs = store.receive(f"digest of the {what}") != own
        store.bring(json.dumps(dict(mine)) if differs else "", differs=differs)
        store.receive(f"agreement on the {what}")


def _collect_equal(store: RendezvousStore, mine: Mapping[str, str], what: str) -> None:
    """On rank 0: all parts are there and none says something else."""
    ended = math.inf

    def enough() -> bool:
        """One differs, and others had time to say the same."""
        nonlocal ended
        if ended == math.inf and store.has_different():
            ended = time.monotonic() + _OTHERS_S
        return time.monotonic() > ended

    parts = store.collect(what, enough=enough)
    if any(parts.values()):
        of_ranks = {rank: json.loads(text) if text else mine for rank, text in parts.items()}
        raise NoAgreementError(differences(of_ranks, store.hosts()))


def gather(
    store: RendezvousStore | None, work: Callable[[Check], str], *, what: str, limit_s: Seconds
) -> tuple[str, ...]:
    """Every rank's part, in the order of ranks, on rank 0; nothing elsewhere.

    Args:
        work: makes this rank's part.
        limit_s: longest that any rank may take once rank 0 is done.

    Raises:
        NoAgreementError: on all other ranks, with the reason of the one that failed.
    """
    if store is None:
        return (work(lambda: None),)
    with store.propagating_errors():
        store.bring(work(_at_intervals(store.raise_failure, store.interval_s)))
        if store.context.rank:
            store.receive(f"word that all {what} are there", limit_s=2 * limit_s)
            return ()
        parts = store.collect(what, limit_s=limit_s)
        store.publish("")
        return tuple(parts.values())


def _at_intervals(check: Check, interval_s: Seconds) -> Check:
    """A check that does nothing where the last one is not that long ago."""
    last = time.monotonic()

    def now_and_then() -> None:
        nonlocal last
        if time.monotonic() - last >= interval_s:
            last = time.monotonic()
            check()

    return now_and_then
