"""The plan: everything a launch needs, and why it was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from nest_megatron.cluster.placement import torchrun_words
from nest_megatron.cluster.records import Cluster
from nest_megatron.layout.batch_schedule import PredictedBatch, TrainChoice
from nest_megatron.layout.estimate import (
    Alternative,
    BeforeAfter,
    Choice,
    Estimate,
    Placement,
    Price,
    PricedLayout,
    Shortlist,
    SiteChange,
    Uncertainty,
)
from nest_megatron.layout.layout import Layout, layout_arguments
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import added, frozen
from nest_megatron.units import Bytes, Seconds

#: Version of the file format; a reader refuses others.
SCHEMA = 2

#: Distance to the best beyond which a plan that time left is no success (exit code 3).
FAR_OFF_PERCENT = 10.0
#: Name of a framework in ``Provenance``.
MEGATRON_LM = "Megatron-LM"


@frozen
class SearchRecord:
    """What the search looked at and proved.

    Args:
        certificate: ``optimal``; ``chosen`` (the simplest of those that tie with the fastest) or
            ``runner-up`` (chosen by the user), ``gap_percent`` slower than the fastest;
            ``gap`` (time ran out) or ``node-limit`` (a stage problem too large to finish), within
            ``gap_percent`` of the fastest; ``fixed`` (nothing was searched); without a plan
            ``infeasible`` (proven) or ``ended-early`` (time ran out: nothing is known).
        not_modelled: flags of the job whose effect on memory is not known.
    """

    certificate: str
    gap_percent: float
    candidates: int
    bounded: int
    infeasible: Mapping[str, int]
    solved: int
    illegal: tuple[str, ...]
    stage_nodes: int
    simulations: int
    seconds: float
    backend: str
    space: Mapping[str, str]
    not_modelled: tuple[str, ...] = added(())

    @property
    def ended_early(self) -> bool:
        """Whether time ended the search before the plan was proven to be the best."""
        return self.certificate == "gap"

    @property
    def may_be_far_off(self) -> bool:
        """Whether so much is left open that a command tells it by its exit code."""
        return self.ended_early and self.gap_percent > FAR_OFF_PERCENT


@frozen
class Provenance:
    """Where the plan comes from.

    Args:
        framework: what the planned job runs on; ``None`` for a plan that was made for none.
        framework_version: its release; Megatron-LM's without its patch level (``0.19``).
        made_by: the command or the call that planned it.
        site: the calibration of the site, where one was used.
        defaults: settings that are the site's, each with its file and line.
        given: settings that no other part of the file says, as typed (``search.tie_percent=2``).
        recipe: what else the recipe of the job says (``integrations/plan_job.py``).
    """

    nest_megatron_version: str
    created: str
    profile: str
    cluster_hash: str
    model_hash: str
    settings: Mapping[str, float | str]
    framework: str | None = added(None)
    framework_version: str | None = added(None)
    made_by: str | None = added(None)
    site: SiteChange | None = added(None)
    defaults: tuple[str, ...] = added(())
    given: tuple[str, ...] = added(())
    recipe: Mapping[str, Any] | None = added(None)

    def made_for(
        self,
        framework: str,
        version: str | None,
        made_by: str,
        recipe: Mapping[str, Any] | None = None,
    ) -> Provenance:
        """With what the plan was made for, unless that is said already."""
        if self.framework is not None:
            return self
        return replace(
            self,
            framework=framework,
            framework_version=version,
            made_by=made_by,
            recipe=recipe,
        )

    @property
    def own_runs(self) -> int:
        """Plans of this very job whose runs the prediction rests on."""
        return 0 if self.site is None else self.site.own_runs


@frozen
class Goodput:
    """What failures and checkpoints leave of a job's time.

    Args:
        share: of the time, spent on steps that are kept.
        mtbf_s: mean time between failures of the whole job.
        save_interval: steps from one checkpoint to the next.
        checkpoint_s: time for which a checkpoint stops training.
        restart_s: time from a failure to the first new step.
    """

    share: float
    mtbf_s: Seconds
    save_interval: int
    checkpoint_s: Seconds
    restart_s: Seconds


@frozen
class PresentLayout:
    """The layout that ran when a plan was made: the first that its search looked at.

    Args:
        iteration_time_s: predicted, with the traffic that the job overlaps.
        out_of_memory: chance that it runs out of memory.
        is_kept: the plan is that layout, and overlaps no other traffic.
        next_percent: by how much the step of the best other layout is longer where it is kept; one
            that ties may be shorter. ``None`` where no other is known.
    """

    iteration_time_s: Seconds
    peak_memory_bytes: Bytes
    capacity_bytes: Bytes
    out_of_memory: float
    is_kept: bool
    next_percent: float | None = None

    @property
    def fits(self) -> bool:
        """Whether it is predicted to fit in memory."""
        return self.peak_memory_bytes <= self.capacity_bytes


@frozen
class LaunchCommand:
    """How to start it: the script, its flags, and the environment (``None``: must be unset).

    Args:
        launcher: all before the script, as the user has it; ``torchrun`` where that is not known.
    """

    script: str
    argv: tuple[str, ...]
    environment: Mapping[str, str | None]
    notes: tuple[str, ...] = ()
    launcher: tuple[str, ...] = added(())

    def unset_notes(self) -> tuple[str, ...]:
        """A sentence for each variable that must be unset."""
        unset = (name for name, value in self.environment.items() if value is None)
        return tuple(f"{name} must not be set." for name in unset)


@frozen
class ParallelPlan:
    """A complete plan; ``plan_file`` writes and reads it exactly.

    Args:
        offers: what a job would gain by choices that it rules out, one sentence each; none where no
            runner-up is requested.
        goodput: where a mean time between failures is given.
        choice: how the plan was chosen, where it was searched for, and not requested by its number.
        shortlist: which of the plan and its runners-up could be the fastest, if requested.
        batches: what is expected at each size of a batch that grows.
        price: where the price or the power of a GPU, or the length of the run, is given.
        today: what the command that was planned ran when it was planned, compared with the plan.
        present: the layout of the job when it was planned, where it could be kept.
        notes: what was assumed of the job, one sentence each.
    """

    schema: int = SCHEMA
    model: TransformerSpec
    cluster: Cluster
    train: TrainChoice
    layout: Layout
    placement: Placement
    predicted: Estimate
    alternatives: tuple[Alternative, ...]
    search: SearchRecord
    provenance: Provenance
    launch: Mapping[str, LaunchCommand] = field(default_factory=dict)
    offers: tuple[str, ...] = added(())
    goodput: Goodput | None = added(None)
    uncertainty: Uncertainty
    choice: Choice | None = added(None)
    shortlist: Shortlist | None = added(None)
    batches: tuple[PredictedBatch, ...] = added(())
    price: Price | None = added(None)
    today: BeforeAfter | None = added(None)
    present: PresentLayout | None = added(None)
    notes: tuple[str, ...] = added(())

    @property
    def arguments(self) -> dict[str, Any]:
        """The layout by Megatron's names."""
        return layout_arguments(self.model, self.layout)

    @property
    def final_batch_size(self) -> int:
        """Sequences of one step at the end of the run."""
        growing = self.train.batch_schedule
        return growing.last if growing else self.layout.global_batch_size

    def priced(self) -> PricedLayout:
        """What of the plan was priced."""
        return PricedLayout(
            layout=self.layout,
            predicted=self.predicted,
            uncertainty=self.uncertainty,
            price=self.price,
            not_modelled=self.search.not_modelled,
        )


def script_words(script: str) -> tuple[str, ...]:
    """A script as launchers take it: a file, a module behind ``-m``, or nothing for none.

    >>> script_words("pretrain_gpt.py"), script_words("site.train"), script_words("./train")
    (('pretrain_gpt.py',), ('-m', 'site.train'), ('./train',))
    """
    if not script:
        return ()
    is_file = script.endswith(".py") or not script.replace(".", "_").isidentifier()
    return (script,) if is_file or script.startswith(".") else ("-m", script)


def launch_size(plan: ParallelPlan) -> tuple[int, int]:
    """Hosts that a plan is launched on, and processes that a launcher starts on each."""
    gpus = plan.layout.num_gpus
    per_host = min(plan.cluster.launch_gpus_per_host, gpus)
    return gpus // per_host, per_host


def launch_words(plan: ParallelPlan, launch: LaunchCommand, script: str = "") -> list[str]:
    """The user's own launcher, or a ``torchrun`` of the plan's size, with script and flags.

    Args:
        script: in the place of the command's own.
    """
    launcher = launch.launcher or torchrun_words(*launch_size(plan))
    return [*launcher, *script_words(script or launch.script), *launch.argv]
