"""Plan a recipe; what a plan sets in its configuration of megatron-core, and what it clears.

An *item* is Megatron's name of a choice; each framework's ``Recipe`` says in which field it lies.
Both frameworks keep settings that hide communication in one object (NeMo's
``MegatronCommOverlapCallback``, Megatron-Bridge's ``CommOverlapConfig``) that works out by itself
what is ``None`` there, and both let a job set the same names on the model.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cluster.hosts import Host
from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.config.cluster_detection import (
    JobCluster,
    find_cluster,
    names_cluster,
    node_notes,
)
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.job import Job
from nest_megatron.config.launch import MixedGpus
from nest_megatron.config.overrides import Setting, parse
from nest_megatron.config.space import builds_mtp_beside_layer
from nest_megatron.config.train import LENGTH_SETTINGS
from nest_megatron.cost_model.memory import replicas
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, FIELDS, FieldValue, changes, set_fields
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    OVERLAPS,
    naming_fields,
    partition_of_values,
)
from nest_megatron.integrations.megatron_lm.planning import job_request, plan_to_launch
from nest_megatron.integrations.megatron_lm.search_space import for_optimizer, free_parameters
from nest_megatron.integrations.megatron_lm.write import planned_values
from nest_megatron.integrations.plan_job import with_origin
from nest_megatron.integrations.recipe import TAKEN_BACK, Recipe
from nest_megatron.integrations.restore import differs_by_rank, finetuning_fields
from nest_megatron.layout.diff import Change, plan_values, reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.devices import initializes_on_meta_device
from nest_megatron.layout.rulebook.options import BESIDE_PLANS, contradicted
from nest_megatron.model.execution import FlexBackend
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.pinned_job import other_numbers, resolved
from nest_megatron.solver.one_partition import check_partition

#: Fields that state the stage boundaries, and their values where the plan says it.
_STAGE_FIELDS = {
    "num_layers_in_first_pipeline_stage": None,
    "num_layers_in_last_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
#: Values of numbers that are taken back, where they are not unset.
_RESETS = {
    "num_distributed_optimizer_instances": 1,
}
_PP = "pipeline_model_parallel_size"
_DEFERRED = (
    "the last stage would keep the gradients of logits of many micro batches, which the plan's "
    "memory does not count"
)
_NOT_PRICED = {"overlap_param_gather_with_optimizer_step": "it goes with legacy checkpoints alone"}
_LINKS = "virtual stages overlap their exchanges, others batch them"


def planned_items(plan: ParallelPlan) -> dict[str, Any]:
    """Of ``planned_values`` what a recipe states; the number of replicas follows from the ranks."""
    planned = planned_values(launch_request(plan))
    planned |= {name: plan.arguments[name] for name in OVERLAPS}
    planned["use_tp_pp_dp_mapping"] &= planned[_PP] > 1
    return {item: planned[item] for item in plan_values(plan) if item != "data_parallel_size"}


def layout_fields(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The plan's items in the fields of a framework, and the other ways to state stages cleared.

    What states the plan's stages already stays.
    """
    pp = plan.layout.dims.pipeline_model_parallel_size
    even = "pipeline_model_parallel_layout"
    arguments = recipe.arguments()
    stays = False
    with contextlib.suppress(UserInputError):
        partition = partition_of_values(plan.model, arguments, pp)
        stays = (arguments.get(_PP), partition) == (pp, plan.layout.partition)
    for item, value in planned_items(plan).items():
        if item not in recipe.items or (stays and item == even):
            continue
        why, path = reason(plan, item), recipe.items[item]
        if item == even and plan.model.hybrid_layer_pattern:
            path = f"{recipe.model}.hybrid_layer_pattern"
            if value is not None or "|" in str(recipe.find(path)):
                yield path, value or plan.model.hybrid_layer_pattern, why
            continue
        if item == even and pp > 1 and value is None:
            why = "the stages are even, as the degrees alone make them"
        yield path, value, why
    yield recipe.items["moe_layer_recompute"], False, "the plan states what is recomputed by itself"
    for item, cleared in _STAGE_FIELDS.items():
        if not stays:
            yield recipe.items[item], cleared, "the plan states every stage itself"


def other_fields(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """What must change besides the layout's fields, and what the layout makes stale."""
    yield from _fsdp(recipe, plan)
    yield from finetuning_fields(recipe, plan)
    yield from _pipeline_type(recipe, plan)
    fields = recipe.option_fields()
    stated = recipe.options()
    for name, why in contradicted(plan, stated).items():
        if name in FIELDS["model"]["of_layouts"].split():
            yield fields[name][0][0], False if stated[name] is True else _RESETS.get(name), why
    planned = plan_values(plan)
    overlaps = recipe.places.overlap
    sizes = ("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size")
    lengths = {recipe.find(path) for path in (recipe.seq_length, f"{recipe.model}.seq_length")}
    same_shapes = lengths <= {plan.train.seq_length, ABSENT} and all(
        recipe.find(recipe.items[name]) == planned[name] for name in sizes
    )
    virtual = plan.layout.dims.virtual_pipeline_model_parallel_size > 1
    links = {"overlap_p2p_comm": virtual, "batch_p2p_comm": not virtual}  # ``schedules.py``
    for path in (*overlaps, recipe.model):
        yield from _stale(recipe, plan, path, same_shapes=same_shapes)
        if path in overlaps:
            yield from _overlap(recipe, plan, path, links)
    if not overlaps and plan.layout.dims.pipeline_model_parallel_size > 1:
        for name, value in links.items():
            yield f"{recipe.model}.{name}", value, _LINKS
    hybrid = plan.layout.execution.moe_flex_dispatcher_backend is FlexBackend.HYBRIDEP
    if hybrid and differs_by_rank(recipe.find(recipe.data)):
        yield recipe.hybridep_padding, True, "replicas have micro batches of different lengths"
    if plan.model.is_moe:
        why = "one kernel for all local experts, as was priced"
        yield f"{recipe.model}.moe_grouped_gemm", True, why


def _fsdp(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """What goes with Megatron-FSDP, and its checkpoint format taken back where it is not used.

    Source: ``ConfigContainer.validate`` of Megatron-Bridge, ``MegatronParallel.init_ddp`` of NeMo.
    """
    if not plan.layout.uses_megatron_fsdp:
        if recipe.find(recipe.ckpt_format) == "fsdp_dtensor":
            yield recipe.ckpt_format, "torch_dist", "only Megatron-FSDP saves that way"
        return
    planned = planned_values(launch_request(plan))
    form = "the one format that Megatron-FSDP saves, without a second process"
    yield recipe.ckpt_format, planned["ckpt_format"], form
    yield recipe.async_save, False, form
    yield f"{recipe.ddp}.average_in_collective", False, "Megatron-FSDP averages by itself"
    fusion = "gradient_accumulation_fusion"
    yield f"{recipe.model}.{fusion}", planned[fusion], "Megatron-FSDP keeps its gradients apart"
    if initializes_on_meta_device(plan.model):
        built = "weights are made shard by shard; without it every GPU holds the whole model"
        yield f"{recipe.model}.init_model_with_meta_device", True, built
    name = "megatron_fsdp_main_grads_dtype"  # by default 0.20 takes the weights'
    if planned[name] and recipe.find(f"{recipe.ddp}.{name}") is not ABSENT:
        import torch

        yield f"{recipe.ddp}.{name}", torch.float32, "gradients stay in float32, as they are now"


def _pipeline_type(recipe: Recipe, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The number format between stages, where neither the job nor a recipe that it names has it."""
    is_stated = any(
        isinstance(recipe.find(path.rpartition(".")[0]), str) or recipe.value(path) is not None
        for path in recipe.pipeline_types
    )
    if plan.layout.dims.pipeline_model_parallel_size > 1 and not is_stated:
        import torch

        formats = {Precision.FP16: torch.float16, Precision.FP32: torch.float32}
        why = "stages exchange activations in the format of training"
        yield recipe.pipeline_types[0], formats.get(plan.train.precision, torch.bfloat16), why


def _overlap(
    recipe: Recipe, plan: ParallelPlan, prefix: str, links: Mapping[str, bool]
) -> Iterator[FieldValue]:
    """What an object of overlap settings loses or changes, besides ``_stale``."""
    names = (*links, "wgrad_deferral_limit", *OVERLAPS)
    stated = {
        name: value for name in names if (value := recipe.value(f"{prefix}.{name}")) is not None
    }
    if "wgrad_deferral_limit" in stated:
        yield f"{prefix}.wgrad_deferral_limit", None, _DEFERRED
    for name, value in links.items():
        if stated.get(name, value) != value:
            yield f"{prefix}.{name}", None, f"{_LINKS}, by themselves"
    # ``_get_optimizer_overlap_cfgs``: off with one replica, whose context ranks reduce all the same
    dims = plan.layout.dims
    reduces = max(replicas(dims)[: 1 + plan.model.is_moe]) > 1 and plan.layout.shards_optimizer
    for name in OVERLAPS:
        planned = plan.arguments[name]
        if stated.get(name, dims.data_parallel_size > 1 if reduces else planned) != planned:
            why = "the plan's time counts on it" if planned else reason(plan, name)
            yield f"{prefix}.{name}", planned, why


def _stale(
    recipe: Recipe, plan: ParallelPlan, prefix: str, *, same_shapes: bool
) -> Iterator[FieldValue]:
    """What a plan makes stale both in an object of overlap settings and on the model itself."""
    buffers = f"{prefix}.tp_comm_overlap_cfg"
    keeps = same_shapes and plan.layout.sequence_parallel
    if not keeps and recipe.value(buffers) is not None:
        yield buffers, None, "these user buffers were tuned for another layout or micro batch"
    for name, why in {TAKEN_BACK: _DEFERRED, **_NOT_PRICED}.items():
        if recipe.value(f"{prefix}.{name}") not in (None, False):
            yield f"{prefix}.{name}", False, why


def plan_changes(
    recipe: Recipe, plan: ParallelPlan | Recorded, free: Collection[str]
) -> tuple[Change, ...]:
    """What a plan changes in a recipe, which stays as it is.

    Args:
        plan: as ``auto_recipe`` returns it, or within what ``nest_megatron.load_plan`` returns.
        free: what of the job may change where it differs from the plan.

    Raises:
        UserInputError: if it is for another model or job, breaks a rule of megatron-core, or needs
            a field that the framework does not have.
    """
    found = getattr(plan, "record", plan)
    if not isinstance(found, ParallelPlan):
        raise UserInputError(
            "plan",
            plan,
            "it is no plan",
            "Give what auto_recipe, nest_megatron.plan or nest_megatron.load_plan(FILE) returned.",
        )
    own = recipe.job(found.model.vocab_size)
    spec = own.spec
    require_same_model(found, spec)
    request = replace(
        launch_request(found, version=own.version), framework=recipe.target.framework, spec=spec
    )
    require_launchable(request)
    for_optimizer([found.layout.zero], own)
    values = {**planned_items(found), **found.layout.sizes}
    needs = recipe.requirements(spec)
    if restored := own.restored:
        restored.check(found, own.version)
        needs |= {
            name: need for name, need in restored.required().items() if name == "use_megatron_fsdp"
        }
    for name, need in needs.items():
        if need.value is not None and values[name] != need.value:
            raise UserInputError(
                recipe.items.get(name, name),
                values[name],
                need.limit,
                f"Plan this job, or {need.fix}.",
            )
    check_partition(
        spec, found.layout.partition, mtp_beside_layer=builds_mtp_beside_layer(spec, recipe.target)
    )
    _require_same(found, own, (free,) if isinstance(free, str) else free, recipe.states_size)
    if differs := other_numbers(found, own.memory_flags, own.precision):
        warnings.warn(f"{differs}; auto_recipe plans this job.", stacklevel=3)
    planned = found.train.batch_schedule
    schedule = own.batch_schedule
    if schedule is not None and (planned is None or planned.sizes != schedule.sizes):
        limit = f"the plan was made for {planned.words() if planned else found.final_batch_size}"
        raise UserInputError("rampup_batch_size", schedule.words(), limit, "Plan again.")
    changed = changes(recipe.root, recipe.wanted(found))
    options = recipe.options({each.field: each.after for each in changed})
    options["use_megatron_fsdp"] = found.layout.uses_megatron_fsdp
    with naming_fields(own.fields):
        require_launchable(replace(request, options=options), but=BESIDE_PLANS)
    return tuple(replace(each, field=recipe.declared(each.field)) for each in changed)


def require_same_model(plan: ParallelPlan, spec: TransformerSpec) -> None:
    """Refuse a plan of another model."""
    names = FIELDS["model"]["planned"].split()
    rows = [(name, resolved(spec, name), resolved(plan.model, name)) for name in names]
    tp = plan.layout.dims.tensor_model_parallel_size
    own = spec.padded_vocab_size(tp)
    if own % tp or spec.vocab_size != plan.model.vocab_size:  # else padding alone differs
        rows.append(("padded_vocab_size", own, plan.model.padded_vocab_size(tp)))
    differing = [
        f"{name} {found} (plan: {planned})"
        for name, found, planned in rows
        if (found or None) != (planned or None)
    ]
    if differing:
        raise UserInputError(
            "model",
            spec.name,
            f"the plan is for {plan.model.name}, and these differ: {', '.join(differing)}",
            "Plan this model.",
        )


def _require_same(plan: ParallelPlan, job: Job, free: Collection[str], states_size: bool) -> None:
    """Refuse a plan for another batch, sequence or number of GPUs, unless that may change.

    Args:
        free: which of these may change; any other name is refused.
        states_size: the recipe says the number of GPUs, and not its launcher.
    """
    sizes = {
        "global_batch_size": (job.global_batch_size, plan.final_batch_size),
        "seq_length": (job.spec.seq_length, plan.train.seq_length),
        "num_gpus": (job.num_gpus, plan.layout.num_gpus),
    }
    may_change = [*sizes][: 2 + states_size]
    for name in free:
        if name not in may_change:
            raise UserInputError(
                "free",
                name,
                f"what else a plan may change is {', '.join(may_change)}",
                "Leave it out: the layout itself is always written.",
            )
    for name, (value, planned) in sizes.items():
        if value not in (None, planned) and name not in free:
            raise UserInputError(
                name,
                value,
                f"the plan was made for {planned}",
                f"Plan again, or give free=[{name!r}] to have it changed."
                if name in may_change
                else "Plan again, or launch as many.",
            )


def fields_assumed_harmless(settings: Sequence[Setting]) -> tuple[str, ...]:
    """The fields of ``assume_harmless`` among settings, which are needed as a recipe is read."""
    named = [setting for setting in settings if setting.key == "assume_harmless"]
    return compose(named).assume_harmless if named else ()


def plan_recipe(
    job: Job,
    *,
    cluster: str | os.PathLike[str] | Cluster | None,
    overrides: Sequence[Setting],
    choose: int = 0,
    hosts: Sequence[Host] = (),
    mixed: MixedGpus = MixedGpus.REFUSE,
) -> tuple[ParallelPlan, tuple[str, ...]]:
    """Find the fastest plan for a job that was read, and what was assumed for it.

    Raises as ``nemo.auto_recipe`` does.

    Args:
        cluster: a name of the catalogue or a file, taken with the job's number of GPUs; a record;
            or ``None`` for the GPUs of this host.
        overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
        choose: take this runner-up instead of the best (0).
        hosts: of a job whose ranks have started, as they report them.
        mixed: what to do where their GPUs are unlike.
    """
    settings = tuple(overrides)
    for setting in settings:
        section, _, key = setting.key.partition(".")
        if section in ("model", "train", "flags", "out") and key not in LENGTH_SETTINGS:
            raise UserInputError(
                setting.key,
                setting.value,
                "the model and the batch are the recipe's own, and no file is written",
                "Leave it out, or change the recipe.",
            )
    if isinstance(cluster, os.PathLike):
        cluster = os.fspath(cluster)
    if not isinstance(cluster, str | Cluster | None):
        raise UserInputError(
            "cluster",
            cluster,
            "it is a name of the catalogue, a file or a record of a cluster",
            "Give for example cluster='dgx_h100' (`nest-megatron clusters` lists them).",
        )
    if isinstance(cluster, str):
        settings = (Setting(key="cluster", value=cluster), *settings)
    settings = with_defaults(settings, names_cluster=isinstance(cluster, Cluster))
    size = "cluster.num_gpus"
    if isinstance(cluster, Cluster):
        place = JobCluster(
            cluster=cluster.resized(job.num_gpus or cluster.num_gpus),
            settings=compose(settings),
            notes=(),
        )
    else:
        if not any(setting.key == size for setting in settings):
            if job.num_gpus is None:
                raise UserInputError(
                    size,
                    None,
                    "the number of ranks is the launcher's, and this process has none",
                    "Give overrides=['cluster.num_gpus=64'].",
                )
            settings = (*settings, Setting(key=size, value=str(job.num_gpus)))
        if not names_cluster(settings) and local_gpus() is None:
            raise UserInputError(
                "cluster",
                None,
                "none is given, and this host shows no NVIDIA GPU",
                "Give for example cluster='dgx_h100' (`nest-megatron clusters` lists them).",
            )
        place = find_cluster(
            settings,
            job.num_gpus or 0,
            os.environ if hosts else {},
            dry_run=not hosts,
            hosts=hosts,
            mixed=mixed,
        )
    nodes = () if hosts else node_notes(place.cluster, job.num_gpus, job.num_nodes)
    job = replace(job, notes=(*job.notes, *place.notes, *nodes))
    request = job_request(job, place.cluster, place.settings)
    found = plan_to_launch(request, choose)
    if job.restored:
        job.restored.check(found, job.version)
    by_words = job.free_option == "nest.free"  # only Megatron-Bridge's scripts take them
    return with_origin(found, job, "+nest=auto" if by_words else "auto_recipe"), request.notes


class Recorded(Protocol):
    """What holds a plan, as ``nest_megatron.Plan`` does."""

    @property
    def record(self) -> ParallelPlan:
        """The plan."""


class PlannedRecipe(Recipe):
    """A framework's configuration that is planned; ``known`` is what else its class takes."""

    @classmethod
    def read_recipe(cls, root: Any, *, vocab_size: int | None = None, **known: Any) -> Job:
        """Read model, batch, sequence, devices and layout; nothing is changed.

        Args:
            root: the configuration, or an object with the same attributes.
            vocab_size: of the tokenizer, where one is named whose files are not here.

        Raises:
            UnplannableModelError: if this planner does not support the model, naming what it lacks.
            UserInputError: if a field is missing or wrong.
        """
        return cls(root, **known).job(vocab_size)

    @classmethod
    def auto_recipe(
        cls,
        root: Any,
        *,
        cluster: str | os.PathLike[str] | Cluster | None = None,
        overrides: Sequence[str] = (),
        free: Sequence[str] | None = None,
        keep: Sequence[str] = (),
        vocab_size: int | None = None,
        **known: Any,
    ) -> tuple[ParallelPlan, tuple[Change, ...]]:
        """Plan a configuration and write the plan into it.

        A recipe's factory sets every degree, and its defaults look like its user's settings,
        so all of them are free unless they are kept (decision 006 of ``docs/decisions.md``).

        Args:
            root: as for ``read_recipe``; changed in place.
            cluster: a name of the catalogue or a file, of the job's number of GPUs, which
                ``overrides`` may say; a record; or ``None`` for the GPUs of this host.
            overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
            free: the only choices that may change; ``None`` is all of them.
            keep: choices that stay as stated, such as ``tensor_model_parallel_size``,
                ``micro_batch_size``, ``recompute``, ``zero_stage``, ``stage_layout``.
            vocab_size: as for ``read_recipe``.

        Returns:
            The plan, and every field that has another value now, with the reason.

        Raises:
            NothingFitsError: if no plan fits in memory, naming the missing bytes.
            SearchEndedError: if time ended the search before it had a plan.
            UserInputError: for a job that cannot be planned, or a choice that cannot be kept.
        """
        settings = parse(overrides)
        recipe = cls(root, assume_harmless=fields_assumed_harmless(settings), **known)
        job = replace(recipe.job(vocab_size), free=free_parameters(free, keep), free_option="free")
        plan, _ = plan_recipe(job, cluster=cluster, overrides=settings)
        may_change = ("num_gpus",) if cls.states_size else ()
        return plan, set_fields(root, plan_changes(recipe, plan, may_change))

    @classmethod
    def apply_plan(
        cls, root: Any, plan: ParallelPlan | Recorded, *, free: Sequence[str] = (), **known: Any
    ) -> tuple[Change, ...]:
        """Write a plan into a configuration, in place; nothing is changed if any of it cannot be.

        Args:
            root: as for ``read_recipe``.
            free: what else may change where it differs from the plan: ``global_batch_size``,
                ``seq_length``, of NeMo also ``num_gpus``.

        Returns:
            Every field that has another value now, in the order of the plan, with the reason.

        Raises:
            UserInputError: if the plan is for another model or job, breaks a rule of megatron-core,
                or needs a field that this framework does not have.
        """
        return set_fields(root, cls.plan_changes(root, plan, free=free, **known))

    @classmethod
    def plan_changes(
        cls, root: Any, plan: ParallelPlan | Recorded, *, free: Sequence[str] = (), **known: Any
    ) -> tuple[Change, ...]:
        """As ``apply_plan``, but the configuration stays as it is."""
        return plan_changes(cls(root, **known), plan, free)
