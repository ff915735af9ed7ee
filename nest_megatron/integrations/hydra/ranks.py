"""The ranks of a Hydra application: how many there are, and the same plan on all of them.

Every rank composes and plans for itself. The search is deterministic, so equal configurations give
equal plans, but for two things that a host may have of its own: the time that ended a search, and
what lies on its disks and in its sockets. The first is refused. For the second, ranks under
``torchrun`` compare their configuration and their plan with those of the rank that came first
(``agreement.require_like_first``).
"""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.config.cluster_detection import number_said
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra.view import AppView
from nest_megatron.integrations.megatron_lm.agreement import RankContext, require_like_first
from nest_megatron.integrations.megatron_lm.same_job import fields, versions
from nest_megatron.integrations.recipe_plan import planned_items
from nest_megatron.layout.plan import ParallelPlan

#: Longest wait for the agent's store.
_TIMEOUT_S = 60.0


def is_launched(environment: Mapping[str, str]) -> bool:
    """Whether a launcher started this process for training; otherwise somebody is looking."""
    return "WORLD_SIZE" in environment or "LOCAL_RANK" in environment


def is_first(environment: Mapping[str, str]) -> bool:
    """Whether this is the process that speaks for all."""
    rank = environment.get("RANK", environment.get("LOCAL_RANK", "0"))
    return rank == "0" and environment.get("NODE_RANK", "0") == "0"


def num_gpus(view: AppView, environment: Mapping[str, str]) -> int:
    """Ranks of the job, as the user, the trainer and the launcher agree; one must say it."""
    said = {
        "nest.num_gpus": view.settings.num_gpus,
        "trainer.devices * trainer.num_nodes": _of_trainer(view),
        "WORLD_SIZE": number_said(environment, "WORLD_SIZE"),
    }
    found = {where: count for where, count in said.items() if count is not None}
    if not found:
        raise UserInputError(
            "nest.num_gpus",
            None,
            "neither the application nor a launcher says how many GPUs there are",
            "Give nest.num_gpus=64.",
        )
    if len(set(found.values())) > 1:
        raise UserInputError(
            " / ".join(found),
            list(found.values()),
            "they are the same number of ranks",
            "Correct the one that is wrong; nest.num_gpus is not needed.",
        )
    return next(iter(found.values()))


def _of_trainer(view: AppView) -> int | None:
    """Lightning's words; ``-1`` and ``auto`` leave the number to the host."""
    devices, nodes = view.at("trainer.devices"), view.at("trainer.num_nodes")
    count = len(devices) if isinstance(devices, list) else devices
    if not isinstance(count, int) or count < 1:
        return None
    return count * (nodes if isinstance(nodes, int) else 1)


def require_decided(plan: ParallelPlan, max_seconds: float) -> None:
    """Refuse a plan that depends on how fast its rank searched, since each searches by itself."""
    if plan.search.certificate == "gap":
        raise UserInputError(
            "search.max_seconds",
            max_seconds,
            limit="it ended the search, and every rank searches for itself: they could arrive at "
            "different plans",
            fix="Raise it with +nest.overrides.search.max_seconds=600, or plan once with "
            "`nest-megatron plan`, pin the plan and launch with +nest=pinned.",
        )


def require_same_plan(plan: ParallelPlan, job: str, environment: Mapping[str, str]) -> bool:
    """Compare this rank's plan with the others', where ``torchrun`` has a store, and say if so.

    Args:
        job: a digest of the configuration, so that each of several jobs is compared with itself.

    Raises:
        NoAgreementError: if another rank has arrived at another plan, with what differs.
    """
    items = {"num_gpus": plan.layout.num_gpus, **planned_items(plan)}
    return _compared(
        environment,
        f"plan of {job}",
        {name: repr(value) for name, value in items.items()},
        head="the ranks have found different plans",
        advice="The hosts differ in GPUs, profiles or versions. Plan once with `nest-megatron "
        "plan`, pin the plan and launch with +nest=pinned",
    )


def require_same_job(view: AppView, number: object, environment: Mapping[str, str]) -> bool:
    """As ``require_same_plan``, for the configuration and the versions of one job of several."""
    may_differ = (*view.settings.may_differ, "nest.out")
    mine = {**versions(), **fields(view.raw, "", may_differ)}
    return _compared(environment, f"configuration of job {number}", mine)


def _compared(
    environment: Mapping[str, str], name: str, mine: Mapping[str, str], **words: str
) -> bool:
    """Compare values where ``torchrun`` has a store, and say if so."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    context = RankContext(
        rank=int(environment["RANK"]),
        world_size=int(environment["WORLD_SIZE"]),
        environment=environment,
        rendezvous_timeout_s=_TIMEOUT_S,
    )
    require_like_first(context, name, mine, **words)
    return True
