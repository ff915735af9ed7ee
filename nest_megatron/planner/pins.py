"""Reviewed plans, frozen: a file that only launches the job that it was made for.

The first line of a pinned file is a checksum of every byte below it, so that any later change is
noticed; below lie who pinned it, what it demands of the software, and the plan.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.cluster.discovery import LocalGpus, is_same_device
from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.cost_model.execution_flags import execution_traits
from nest_megatron.cost_model.memory import parameter_bytes
from nest_megatron.cost_model.settings import CostSettings, restored_settings
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.cost_model.unit_cost import replicas
from nest_megatron.errors import PlanFileError, UserInputError
from nest_megatron.files import read_text, write_text
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.batch_schedule import BatchSchedule
from nest_megatron.parallel.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.version import __version__

_HEAD = "# nest-megatron pinned plan, sha256 of all below: "
#: Fields of a model that name it and change nothing.
_NAMES = ("name", "source")
#: Compared by the padded size.
_VOCAB = ("vocab_size", "vocab_is_padded", "make_vocab_size_divisible_by")


class UnpinnedError(PlanFileError):
    """A plan file that nobody has pinned."""

    exit_code = 10


class ChangedPinError(PlanFileError):
    """A pinned file of which a byte was changed since."""

    exit_code = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class Pin:
    """Who froze a plan, and for which software.

    Args:
        megatron_lm: the release that it may launch, ``0.16.1`` or ``0.20``; ``None`` where the
            plan was made for none: whichever launches it holds it to its own rules.
    """

    created: str
    by: str
    note: str
    nest_megatron_version: str
    megatron_lm: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedPlan:
    """A pinned file's contents."""

    pin: Pin
    plan: ParallelPlan


def pinned_for(plan: ParallelPlan, release: str | None) -> str:
    """The framework that a plan is pinned for, in words."""
    if release is not None:
        return f"{MEGATRON_LM} {release}"
    none = "no release of Megatron-LM (the plan was made for none; pin --release names one)"
    return plan.provenance.framework or none


def pinned_text(pinned: PinnedPlan) -> str:
    """The text of a pinned file."""
    body = yaml.safe_dump(
        {"pin": to_plain(pinned.pin), **to_plain(pinned.plan)},
        sort_keys=False,
        width=100,
        allow_unicode=True,
    )
    return f"{_HEAD}{_sum(body)}\n{body}"


def _sum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write_pinned(pinned: PinnedPlan, path: Path) -> None:
    """Write a pinned file, whole or not at all."""
    write_text(path, pinned_text(pinned))


def is_pinned(text: str) -> bool:
    """Whether a plan file's text is pinned."""
    return text.startswith(_HEAD)


def read_pinned(path: Path) -> PinnedPlan:
    """Read a pinned file.

    Raises:
        UnpinnedError: if it is not pinned.
        ChangedPinError: if a byte of it changed since.
    """
    return parse_pinned(read_text(path, "nest.plan"), path)


def parse_pinned(text: str, path: Path) -> PinnedPlan:
    """The contents of a pinned file from its text, as ``read_pinned``."""
    if not is_pinned(text):
        raise UnpinnedError(
            "nest.plan",
            value=str(path),
            limit="it is not pinned",
            fix=f"Review it, then: nest-megatron pin {path}",
        )
    head, _, body = text.partition("\n")
    if head != _HEAD + _sum(body):
        raise ChangedPinError(
            "nest.plan",
            value=str(path),
            limit="its contents do not match its first line: it was changed after it was pinned",
            fix="Take the reviewed file again, or plan and pin anew.",
        )
    fields = plan_file.parse(body, str(path))
    pin = from_plain(Pin, fields.pop("pin", None), "pin")
    return PinnedPlan(pin=pin, plan=plan_file.from_fields(fields, str(path)))


def read_plan(path: Path) -> tuple[ParallelPlan, Pin | None]:
    """Read a plan file, pinned or not.

    Raises:
        UserInputError: if it cannot be read, or was changed.
    """
    text = read_text(path, "plan")
    if not is_pinned(text):
        return plan_file.load(text, str(path)), None
    pinned = read_pinned(path)
    return pinned.plan, pinned.pin


@dataclass(frozen=True, slots=True, kw_only=True)
class ActualJob:
    """The job that is about to run.

    Args:
        cluster: as the user names it; otherwise what is known of this host is compared.
        gpus: what the driver says of this host.
        gpus_per_host: processes that the launcher starts on each host, where it says so.
        tensor_model_parallel_size: the user's own, by which the job pads its vocabulary.
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


def require_same_job(pinned: PinnedPlan, job: ActualJob) -> None:
    """Refuse a job that the pinned plan was not made for.

    Raises:
        UserInputError: naming every difference.
    """
    rows = (
        *_model_rows(pinned.plan.model, job.spec, job.tensor_model_parallel_size),
        *_job_rows(pinned, job),
        *_memory_rows(pinned.plan, job),
        *_cluster_rows(pinned.plan.cluster, job),
    )
    unlike = [(what, wanted, found) for what, wanted, found in rows if wanted != found]
    if unlike:
        told = "; ".join(f"{what} is {found}, pinned {wanted}" for what, wanted, found in unlike)
        raise UserInputError(
            "nest.plan",
            value=", ".join(what for what, _, _ in unlike),
            limit=f"the job is not the one that this plan was pinned for: {told}",
            fix="Launch the pinned job, or plan and pin this one.",
        )


def _model_rows(pinned: TransformerSpec, spec: TransformerSpec, tp: int) -> Iterator[Row]:
    if spec.vision is not None:  # no framework's field says how many images there are
        spec = dataclasses.replace(spec, vision=spec.vision.with_images_of(pinned.vision))
    for field in dataclasses.fields(TransformerSpec):
        if field.name not in (*_NAMES, *_VOCAB):
            yield field.name, _resolved(pinned, field.name), _resolved(spec, field.name)
    yield "padded_vocab_size", pinned.padded_vocab_size(tp), spec.padded_vocab_size(tp)


def _resolved(spec: TransformerSpec, name: str) -> Any:
    """A field with Megatron's default in the place of ``None``."""
    defaults = {
        "num_query_groups": spec.query_groups,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_position_embeddings or spec.seq_length,
        "moe_ffn_hidden_size": spec.expert_ffn_hidden_size,
        "mtp_num_layers": spec.num_mtp_layers,
    }
    if name in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"):
        return getattr(spec, name) if spec.multi_latent_attention else None
    if name.startswith("moe_") and spec.num_experts is None:
        return None
    return defaults.get(name, getattr(spec, name))


def _job_rows(pinned: PinnedPlan, job: ActualJob) -> Iterator[Row]:
    pin, train = pinned.pin, pinned.plan.train
    yield "global_batch_size", train.final_batch_size, job.global_batch_size
    planned, found = train.batch_schedule, job.batch_schedule
    yield "batch sizes", planned and planned.sizes, found and found.sizes
    yield "precision", train.precision.value, job.precision.value
    if pin.megatron_lm:
        yield "Megatron-LM release", pin.megatron_lm, job.megatron_lm
    yield "nest-megatron version", pin.nest_megatron_version, __version__


#: Traits that say how much memory a parameter takes; what a logit takes is compared by itself.
_PER_PARAMETER = (
    "params_bytes",
    "gradient_bytes",
    "optimizer_bytes",
    "matrix_optimizer_bytes",
    "optimizer_instances",
    "layer_wise_optimizer",
    "fp8_weights",
    "fp8_gather",
    "fp8_weight_copies",
    "fp8_transpose_cache",
    "keep_fp8_transpose_cache",
)
#: Traits that keep an activation narrower than it is without them.
_NARROWER = ("fused_activation", "fp8_activation_input", "fp8_inputs")


def _memory_rows(plan: ParallelPlan, job: ActualJob) -> Iterator[Row]:
    """What makes the job need more memory than the plan was made for."""
    if job.memory_flags is None or job.precision is not plan.train.precision:
        return
    settings = restored_settings(plan.provenance.settings)
    planned, has = settings.traits, _traits_of(plan, settings.target, job.memory_flags)
    names = ["loss_bytes"] if has.loss_bytes > planned.loss_bytes else []
    names += [each for each in _NARROWER if getattr(planned, each) and not getattr(has, each)]
    before = _totals(plan, settings)
    now = _totals(plan, dataclasses.replace(settings, traits=has))
    if any(more > less for more, less in zip(now, before, strict=True)):
        names += _PER_PARAMETER
    yield from ((name, getattr(planned, name), getattr(has, name)) for name in names)


def _traits_of(plan: ParallelPlan, target: str | None, flags: Mapping[str, Any]) -> ExecutionTraits:
    """A job's own traits, with the defaults that the plan was made with."""
    precision, device = plan.train.precision, plan.cluster.accelerator.name
    if target is None:  # a plan of a version that knew no targets
        return execution_traits(flags, precision)
    made_for = target_named(target)
    return made_for.settings(device, precision, flags, has_experts=plan.model.is_moe).traits


def _totals(plan: ParallelPlan, settings: CostSettings) -> tuple[float, ...]:
    """Bytes of a parameter of each kind, as the plan lays it out."""
    grid = plan.grid()
    kinds = parameter_bytes(grid.zero, *replicas(grid.dims), settings)
    return tuple(kind.total for kind in kinds)


def _cluster_rows(wanted: Cluster, job: ActualJob) -> Iterator[Row]:
    yield "number of GPUs", wanted.num_gpus, job.num_gpus
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
