"""The same plan on all ranks of a Hydra application.

Every rank composes and plans for itself. The search is deterministic, so equal configurations give
equal plans, but for two things that a host may have of its own: the time that ended a search, and
what lies on its disks and in its sockets. The first is refused. For the second, ranks under
``torchrun`` leave the digest of their plan in the agent's store: whoever finds another there stops.
Nobody waits for anybody, since an application may read its configuration on some ranks only.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from nest_megatron.errors import NestError, UserInputError
from nest_megatron.launchers.planned import planned_items
from nest_megatron.parallel.plan import ParallelPlan

_TIMEOUT_S = 60.0


class DifferentPlansError(NestError):
    """Two ranks of one job have found different plans."""


def digest_of(plan: ParallelPlan) -> str:
    """A digest of all that a plan sets, without what differs from search to search."""
    text = json.dumps({"num_gpus": plan.placement.num_gpus, **planned_items(plan)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def require_decided(plan: ParallelPlan, max_seconds: float) -> None:
    """Refuse a plan that depends on how fast its rank searched.

    Raises:
        UserInputError: if the time limit ended the search of a job with several ranks.
    """
    search = plan.search
    if search.certificate == "gap" and search.seconds >= max_seconds:
        raise UserInputError(
            "search.max_seconds",
            value=max_seconds,
            limit="it ended the search, and every rank searches for itself: they could arrive at "
            "different plans",
            fix="Raise it with +nest.overrides.search.max_seconds=600, or plan once with "
            "`nest-megatron plan`, pin the plan and launch with +nest=pinned.",
        )


def require_same(plan: ParallelPlan, job: str, environment: Mapping[str, str]) -> bool:
    """Compare this rank's plan with the others', where there is a place to meet.

    Args:
        job: a digest of the configuration, so that each of several jobs is compared with itself.

    Returns:
        Whether there was such a place: the store of ``torchrun``.

    Raises:
        DifferentPlansError: if another rank has arrived at another plan.
    """
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    from nest_megatron.launchers.megatron_lm.agreement import Place, connect

    place = Place(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        environment=environment,
        patience_s=_TIMEOUT_S,
    )
    mine = digest_of(plan)
    key = f"nest/{place.key}/plan of {job}"
    first = bytes(connect(place).store.compare_set(key, "", mine)).decode()
    if first != mine:
        raise DifferentPlansError(
            f"rank {place.rank} has a plan of digest {mine}, another rank one of {first}: the "
            "hosts differ in GPUs, profiles or versions. Plan once with `nest-megatron plan`, pin "
            "the plan and launch with +nest=pinned."
        )
    return True
