"""The job that is about to run, held against the one that a plan was pinned for."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.cluster.discovery import LocalGpus, is_same_device
from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.memory_flags import not_modelled
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE, out_of_memory
from nest_megatron.cost_model.peak_posterior import predicted_peak
from nest_megatron.cost_model.pipeline import memory_of_ranks
from nest_megatron.cost_model.settings import CostSettings, restored_settings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError, typed_setting
from nest_megatron.layout import plan_file
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.model.spec import LATENT_SIZES, TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.planner.pins import PinnedPlan
from nest_megatron.units import Bytes, format_chance
from nest_megatron.version import __version__

#: Fields of a model that name it and change nothing.
_NAMES = ("name", "source")
#: Compared by the padded size.
_VOCAB = ("vocab_size", "vocab_is_padded", "make_vocab_size_divisible_by")


@frozen
class ActualJob:
    """The job that is about to run.

    Args:
        cluster: as the user names it; otherwise what is known of this host is compared.
        gpus: what the driver says of this host.
        gpus_per_host: processes that the launcher starts on each host, where it says so.
        tensor_model_parallel_size: the user's, by which the job pads its vocabulary.
        megatron_lm: the recorded release that stands for the installed one.
        global_batch_size: at the end of the run.
        memory_flags: what the job says of its memory, by Megatron's names; ``None`` compares none.
    """

    spec: TransformerSpec
    num_gpus: int
    cluster: Cluster | None
    gpus: LocalGpus | None
    gpus_per_host: int | None
    global_batch_size: int | None
    precision: Precision
    tensor_model_parallel_size: int
    megatron_lm: str | None
    memory_flags: Mapping[str, Any] | None = None
    batch_schedule: BatchSchedule | None = None


#: What is compared, as it is pinned and as it is in the job.
Row = tuple[str, object, object]


@frozen
class Difference:
    """What a pinned plan and the job that is about to run do not share.

    Args:
        is_of_moment: the machines or the software, which another plan of the same job may suit; not
            the job itself.
    """

    what: str
    pinned: object
    found: object
    is_of_moment: bool

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, pinned {self.pinned}"


def differences(pinned: PinnedPlan, job: ActualJob) -> tuple[Difference, ...]:
    """What the pinned plan was made for and the job is not."""
    train, release = pinned.plan.train, pinned.pin.megatron_lm
    planned, batches = train.batch_schedule, job.batch_schedule
    of_job = (
        *_model_rows(pinned.plan.model, job.spec, job.tensor_model_parallel_size),
        ("global_batch_size", pinned.plan.final_batch_size, job.global_batch_size),
        ("batch sizes", planned and planned.sizes, batches and batches.sizes),
        ("precision", train.precision.value, job.precision.value),
    )
    of_moment = (
        ("Megatron-LM release", release, job.megatron_lm if release else release),
        ("nest-megatron version", pinned.pin.nest_megatron_version, __version__),
        *_memory_rows(pinned.plan, job.memory_flags, job.precision),
        *_cluster_rows(pinned, job),
    )
    return tuple(
        Difference(what=what, pinned=wanted, found=found, is_of_moment=is_of_moment)
        for rows, is_of_moment in ((of_job, False), (of_moment, True))
        for what, wanted, found in rows
        if wanted != found
    )


class MismatchError(UserInputError):
    """A job, machines or software that a pinned plan was not made for."""

    rule = "nest.on_mismatch"


def refusal(
    found: Sequence[Difference], fix: str = "Launch the pinned job, or plan and pin this one."
) -> MismatchError:
    """The error that names every difference."""
    return MismatchError(
        typed_setting("plan"),
        ", ".join(each.what for each in found),
        "the job is not the one that this plan was pinned for: " + "; ".join(map(str, found)),
        fix,
    )


def require_same_job(pinned: PinnedPlan, job: ActualJob) -> None:
    """Refuse a job that the pinned plan was not made for.

    Raises:
        UserInputError: naming every difference.
    """
    if found := differences(pinned, job):
        raise refusal(found)


def _model_rows(pinned: TransformerSpec, spec: TransformerSpec, tp: int) -> Iterator[Row]:
    if spec.vision is not None:  # no framework's field says how many images there are
        spec = dataclasses.replace(spec, vision=spec.vision.with_images_of(pinned.vision))
    for field in dataclasses.fields(TransformerSpec):
        if field.name not in (*_NAMES, *_VOCAB):
            yield field.name, resolved(pinned, field.name), resolved(spec, field.name)
    yield "padded_vocab_size", pinned.padded_vocab_size(tp), spec.padded_vocab_size(tp)


def resolved(spec: TransformerSpec, name: str) -> Any:
    """A field with Megatron's default in the place of ``None``; ``None`` where it means nothing."""
    defaults = {
        "num_query_groups": spec.query_groups,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings or spec.seq_length,
        "moe_ffn_hidden_size": spec.expert_ffn_hidden_size,
        "mtp_num_layers": spec.num_mtp_layers,
    }
    if name in LATENT_SIZES:
        return getattr(spec, name) if spec.multi_latent_attention else None
    if name in ("num_query_groups", "kv_channels") and spec.multi_latent_attention:
        return None  # latent attention has other sizes
    if name.startswith("moe_") and spec.num_experts is None:
        return None
    return defaults.get(name, getattr(spec, name))


def other_numbers(plan: ParallelPlan, flags: Mapping[str, Any], precision: Precision) -> str:
    """What a job's settings change of a plan's prediction; empty where it holds.

    Args:
        flags: the job's, by Megatron's destinations.

    Returns:
        Another number format, or what makes a job that would start probably run out of memory.
    """
    if precision is not plan.train.precision:
        return f"the plan counts {plan.train.precision.value}, and the job is {precision.value}"
    model = CostModel(plan.model, plan.cluster, _settings_of(plan, flags)[1])
    chance = out_of_memory(model, plan.layout, predicted_peak(model, plan.layout).peak_bytes)
    allowed = MOST_OOM_CHANCE if plan.choice is None else plan.choice.max_oom_chance
    rows = _memory_rows(plan, flags, precision)
    more = ", ".join(f"{name} is {found}, planned {planned}" for name, planned, found in rows)
    if not more or chance <= max(allowed, plan.uncertainty.out_of_memory):
        return ""
    return f"{format_chance(chance)} risk to run out of memory with the job's own settings ({more})"


def _memory_rows(
    plan: ParallelPlan, flags: Mapping[str, Any] | None, precision: Precision
) -> Iterator[Row]:
    """What makes the job need more memory than the plan was made for, or may."""
    if flags is None or precision is not plan.train.precision:
        return
    known = plan.search.not_modelled
    is_recipe = plan.provenance.framework not in (None, MEGATRON_LM)
    unknown = not_modelled(flags, as_fields=is_recipe)
    if more := [name for name in unknown if name not in known]:
        yield "memory not modelled", ", ".join(known), ", ".join(more)
    settings, own = _settings_of(plan, flags)
    planned, has = settings.traits, own.traits

    def peaks(traits: ExecutionTraits) -> list[Bytes]:
        model = CostModel(plan.model, plan.cluster, dataclasses.replace(settings, traits=traits))
        problem = stage_problem(model, plan.layout)
        return [rank.total for rank in memory_of_ranks(problem, plan.layout.partition.boundaries)]

    before = peaks(planned)

    def needs_more(traits: ExecutionTraits) -> bool:
        return any(map(operator.gt, peaks(traits), before))

    if not needs_more(has):
        return
    values = {
        each.name: value
        for each in dataclasses.fields(ExecutionTraits)
        if (value := getattr(has, each.name)) != getattr(planned, each.name)
    }
    alone = [
        n for n, value in values.items() if needs_more(dataclasses.replace(planned, **{n: value}))
    ]
    yield from ((name, getattr(planned, name), values[name]) for name in alone or values)


def _settings_of(plan: ParallelPlan, flags: Mapping[str, Any]) -> tuple[CostSettings, CostSettings]:
    """A plan's settings, and those with a job's traits, by the defaults that it was made with."""
    planned = restored_settings(plan.provenance.settings)
    precision = plan.train.precision
    if planned.target is None:  # a plan of a version that knew no targets
        traits = execution_traits(flags, precision)
    else:
        name = plan.cluster.accelerator.name
        traits = target_named(planned.target).settings(name, precision, flags, plan.model).traits
    return planned, dataclasses.replace(planned, traits=traits)


def _cluster_rows(pinned: PinnedPlan, job: ActualJob) -> Iterator[Row]:
    wanted = pinned.plan.cluster
    if job.num_gpus != wanted.num_gpus:
        sizes = ", ".join(map(str, pinned.sizes or (wanted.num_gpus,)))
        yield "number of GPUs", f"{sizes} ({pinned.told})" if pinned.told else sizes, job.num_gpus
    mine, named = wanted.accelerator, job.cluster
    if named is None:
        if job.gpus is not None and not is_same_device(mine, job.gpus):
            yield "GPU", mine.name, job.gpus.describe()
        if job.gpus_per_host is not None:
            yield "GPUs of a host", wanted.launch_gpus_per_host, job.gpus_per_host
        return
    rows = (
        ("GPU", mine.name, named.accelerator.name),
        ("GPUs per node", wanted.gpus_per_node, named.gpus_per_node),
        ("GPU memory", mine.memory_bytes, named.accelerator.memory_bytes),
    )
    yield from rows
    if all(pinned == found for _, pinned, found in rows):
        mine_levels, levels = plan_file.digest(wanted.levels), plan_file.digest(named.levels)
        if mine_levels != levels:
            yield "network", f"{wanted.name} ({mine_levels})", f"{named.name} ({levels})"
