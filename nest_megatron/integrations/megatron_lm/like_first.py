"""Ranks that do not wait for one another: each compares itself with whichever came first."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping

from nest_megatron.errors import OneRankError
from nest_megatron.integrations.megatron_lm.rendezvous import (
    NoAgreementError,
    Place,
    TimedStore,
    key_of,
)
from nest_megatron.integrations.megatron_lm.same_job import differences
from nest_megatron.parallel.plan_file import digest

#: Longest wait for the values of the rank that came first, and the pause between two looks.
_LONGEST_S, _PAUSE_S = 5.0, 0.05


class DifferentRankError(NoAgreementError, OneRankError):
    """This rank differs from the first, and the others have not been told."""


def require_like_first(
    store: TimedStore, place: Place, name: str, mine: Mapping[str, str], **words: str
) -> None:
    """Compare this rank's values with those of whichever rank came first; nobody waits.

    Args:
        mine: this rank's values, by the name that a user knows.
        words: ``head`` and ``advice`` of the message.

    Raises:
        DifferentRankError: if they differ, with both values of each name.
    """
    own, key = digest(dict(mine)), key_of(place, name)
    if store.add(f"{key}/{own}/count", 1) == 1:
        note = {"rank": place.rank, "host": socket.gethostname(), "values": dict(mine)}
        store.set(f"{key}/{own}", json.dumps(note))
    first = store.compare_set(key, "", own)
    if first == own:
        return
    ended = time.monotonic() + _LONGEST_S
    while not store.check([f"{key}/{first}"]) and time.monotonic() < ended:
        time.sleep(_PAUSE_S)
    other = json.loads(store.get(f"{key}/{first}"))
    of_ranks = {other["rank"]: other["values"], place.rank: mine}
    hosts = {other["rank"]: other["host"], place.rank: socket.gethostname()}
    raise DifferentRankError(differences(of_ranks, hosts, **words))
