"""What the hosts of a job have, told to rank 0 by one rank of each."""

from __future__ import annotations

import json
import socket

from nest_megatron.cluster.hosts import Host, this_host
from nest_megatron.integrations.megatron_lm import agreement
from nest_megatron.integrations.megatron_lm.rendezvous_store import RendezvousStore
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.report.failure import is_first_of_host
from nest_megatron.units import Seconds

#: Longest that a host may take to say what it has once rank 0 has: NVML and one short program.
_LIMIT_S: Seconds = 120.0


def tell_hosts(store: RendezvousStore | None) -> tuple[Host, ...]:
    """The hosts of the job in the order of their first ranks, on rank 0; nothing elsewhere.

    Nothing either for a process that has no other ranks to meet.

    Raises:
        NoAgreementError: if a rank does not come.
    """
    if store is None:
        return ()
    parts = agreement.gather(store, lambda _: _told(), what="hosts", limit_s=_LIMIT_S)
    found = [from_plain(Host, json.loads(part), "host:") for part in parts if part]
    return tuple({host.name: host for host in reversed(found)}.values())[::-1]


def _told() -> str:
    if not is_first_of_host():
        return ""
    return json.dumps(to_plain(this_host(socket.gethostname())))  # as ranks name their hosts
