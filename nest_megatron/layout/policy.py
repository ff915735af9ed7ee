"""What the operators of a cluster allow: rules, where each is written, and what breaks them.

Each file of a policy only restricts, so that none lifts what another forbids.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.plain import Name, frozen


class PolicyError(UserInputError):
    """A plan, a setting or a launch that a policy forbids."""

    exit_code = 16


class OnMismatch(Name):
    """What ``+nest=pinned`` does where the machines or the software are not the plan's."""

    REFUSE = "refuse"
    NEAREST = "nearest"
    REPLAN = "replan"


@frozen
class PlanRules:
    """What holds for every plan.

    Args:
        ranges: least and largest value of a degree.
        tensor_parallel_inside_node: a tensor-parallel group stays inside a node.
        least_memory_free: share of each device that plans leave free, the reserve apart.
        least_mfu: predicted.
    """

    ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    tensor_parallel_inside_node: bool = False
    least_memory_free: float = 0.0
    least_mfu: float = 0.0
    forbidden_recompute: tuple[RecomputeGranularity, ...] = ()
    forbidden_sharding: tuple[DataParallelSharding, ...] = ()
    forbidden_precision: tuple[Precision, ...] = ()


@frozen
class LaunchRules:
    """What holds for every launch.

    Args:
        pinned_only: only pinned plans are launched.
        on_mismatch: values of ``nest.on_mismatch``, that of jobs which name none first.
        signers: keys of which one has signed a plan: files, folders or keys in one line.
        plan_folders: where launched plans lie.
        megatron_lm: releases that are launched.
        may_free: names that a user (``ada``), a group (``@ml``) or everybody (``*``) may free.
        may_tune: users, groups or everybody whose short runs of ``tune`` need no signature and no
            folder of ``plan_folders``.
    """

    pinned_only: bool = False
    on_mismatch: tuple[OnMismatch, ...] = ()
    signers: tuple[str, ...] = ()
    plan_folders: tuple[str, ...] = ()
    megatron_lm: tuple[str, ...] = ()
    may_free: Mapping[str, tuple[str, ...]] | None = None
    may_tune: tuple[str, ...] = ()


@frozen
class AuditRules:
    """Where launches are written down.

    Args:
        file: which lines are appended to.
        mode: rights of a new file.
        required: a launch that cannot be written down is refused.
    """

    file: str
    mode: int = 0o622
    required: bool = False


@frozen
class PolicyFile:
    """One file of rules.

    Args:
        owners: ids of the users who may change it, and so the keys that it names.
        lines: on which line each rule is written, by its name (``plan.least_mfu``).
    """

    path: str
    plan: PlanRules = field(default_factory=PlanRules)
    launch: LaunchRules = field(default_factory=LaunchRules)
    audit: AuditRules | None = None
    owners: frozenset[int] = frozenset()
    lines: Mapping[str, int] = field(default_factory=dict)

    def where(self, rule: str) -> str:
        """A rule, its file and its line."""
        line = self.lines.get(rule)
        return f"{rule}, {self.path}" + (f":{line}" if line else "")

    def broken(self, rule: str, what: str, value: object, allowed: str) -> PolicyError:
        """The error for what a rule does not allow."""
        fix = "Stay within it, or ask the operators of the cluster."
        error = PolicyError(what, value, f"{allowed} ({self.where(rule)})", fix)
        error.rule = rule
        return error


#: Files in the order in which they are read; none where there is no policy.
Policy = tuple[PolicyFile, ...]


def require_allowed(plan: ParallelPlan, policy: Policy) -> None:
    """Refuse a plan that breaks a rule.

    Raises:
        PolicyError: naming the first rule that it breaks, its file and its line.
    """
    for file in policy:
        for error in violations(plan, file):
            raise error


def violations(plan: ParallelPlan, file: PolicyFile) -> Iterator[PolicyError]:
    """Every rule of a file that a plan breaks."""
    rules, grid = file.plan, plan.layout
    for name, (least, most) in rules.ranges.items():
        value = grid.sizes[name]
        if not least <= value <= most:
            yield file.broken(f"plan.ranges.{name}", name, value, f"it is {least} to {most}")
    tp, node = grid.dims.tensor_model_parallel_size, plan.cluster.gpus_per_node
    if rules.tensor_parallel_inside_node and tp > node:
        limit = f"a node has {node} GPUs, and tensor-parallel groups stay inside one"
        rule = "plan.tensor_parallel_inside_node"
        yield file.broken(rule, "tensor_model_parallel_size", tp, limit)
    for rule, choice in (
        ("recompute", grid.recompute.granularity),
        ("sharding", grid.sharding),
        ("precision", plan.train.precision),
    ):
        if choice in getattr(rules, f"forbidden_{rule}"):
            what = "recompute_granularity" if rule == "recompute" else rule
            yield file.broken(f"plan.forbidden_{rule}", what, choice.value, "it is forbidden")
    found = plan.predicted
    reserve = float(plan.provenance.settings.get("memory_reserve_bytes", 0.0))
    free = 1 - (found.peak_memory_bytes + reserve) / plan.cluster.accelerator.memory_bytes
    for rule, what, share, words in (
        ("least_memory_free", "free memory", free, "plans leave at least {:.1%} of a GPU free"),
        ("least_mfu", "MFU", found.mfu, "the least predicted MFU is {:.1%}"),
    ):
        least = getattr(rules, rule)
        if share < least - 1e-9:
            yield file.broken(f"plan.{rule}", what, f"{share:.1%}", words.format(least))
