"""Ranks that do not block: each compares itself with whichever came first."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping

from nest_megatron.errors import OneRankError
from nest_megatron.integrations.megatron_lm.rendezvous import (
    NoAgreementError,
    RankContext,
    TimedStore,
    key_of,
)
from nest_megatron.integrations.megatron_lm.same_job import differences
from nest_megatron.parallel.plan_file import digest

#: Longest wait for the values of the rank that came first, which says them before anything else.
_LONGEST_S = 5.0


class DifferentRankError(NoAgreementError, OneRankError):
    """This rank differs from the first, and the others have not been told."""


def require_like_first(
    store: TimedStore, context: RankContext, name: str, mine: Mapping[str, str], **words: str
) -> None:
    """Compare this rank's values with those of whichever rank came first; ranks do not block.

    Args:
        mine: this rank's values, by the name that a user knows.
        words: ``head`` and ``advice`` of the message.

    Raises:
        DifferentRankError: if they differ, with both values of each name.
        NoAgreementError: if they differ and the first rank has ended meanwhile.
    """
    own, key = digest(dict(mine)), key_of(context, name)
    if store.add(f"{key}/{own}/count", 1) == 1:
        note = {"rank": context.rank, "host": socket.gethostname(), "values": dict(mine)}
        store.set(f"{key}/{own}", json.dumps(note))
    first = store.compare_set(key, "", own)
    if first == own:
        return
    said = store.wait_for(f"{key}/{first}", _LONGEST_S)
    if said is None:
        raise NoAgreementError(
            f"rank {context.rank} differs from the rank that came first, and that one ended before "
            "it said its values; look at its own output"
        )
    other = json.loads(said)
    of_ranks = {other["rank"]: other["values"], context.rank: mine}
    hosts = {other["rank"]: other["host"], context.rank: socket.gethostname()}
    raise DifferentRankError(differences(of_ranks, hosts, **words))
