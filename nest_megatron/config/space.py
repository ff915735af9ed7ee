"""What settings fix of a layout, what is left to search, and the layout that ``estimate`` prices.

What that leaves open Megatron's own defaults fill.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Requirement
from nest_megatron.config.overrides import Choice, choice
from nest_megatron.config.policy import policy_notes
from nest_megatron.config.schema import ParallelConfig, stated_values
from nest_megatron.config.train import assumed_batch
from nest_megatron.cost_model.target_defaults import (
    BRIDGE,
    MEGATRON_LM,
    NEMO,
    newest_stable,
    target_named,
)
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import (
    UnplannableModelError,
    UserInputError,
    require_at_least,
    typed_setting,
)
from nest_megatron.layout.dims import LAYER_DEGREES, REPLICA_DEGREES, ParallelDims, RankOrder
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import (
    DEFAULT_MODULES,
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.rulebook import require_legal
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.stage_layout import (
    expand_layout,
    parse_layout,
    spread_partition,
    uniform_partition,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.model.variant import NormPlacement
from nest_megatron.planner import Request, plan
from nest_megatron.planner.layouts import estimate_for
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.space import DEFAULT_LIMITS, DEGREES, SearchSpace


def read_space(settings: Settings) -> SearchSpace:
    """What the search may choose; ``UserInputError`` for what only ``estimate`` takes."""
    parallel = settings.parallel
    if parallel.pipeline_model_parallel_layout is not None:
        raise UserInputError(
            "parallel.pipeline_model_parallel_layout",
            parallel.pipeline_model_parallel_layout,
            "plan finds the fastest layout itself",
            "Leave it out, or use `nest-megatron estimate` to price this one.",
        )
    if parallel.sequence_parallel is False and parallel.tensor_model_parallel_size != 1:
        raise UserInputError(
            "parallel.sequence_parallel",
            False,
            "plan uses it wherever tensor parallelism is on: same time, less memory",
            "Leave it out, or use `nest-megatron estimate` to price a layout without it.",
        )
    order, zero = read_rank_order(parallel), read_zero(parallel)
    bounds = stated_values(settings.search)
    return SearchSpace(
        fixed=fixed_degrees(settings),
        limits={name: bounds[f"max_{name}"] for name in DEGREES if f"max_{name}" in bounds},
        rank_orders=tuple(RankOrder) if order is None else (order,),
        zero_stages=tuple(ZeroStage) if zero is None else (zero,),
        recompute=read_recompute(parallel),
        use_all_gpus=settings.search.use_all_gpus,
    )


def fixed_degrees(settings: Settings) -> dict[str, int]:
    """Degrees that the configuration fixes, the micro batch among them."""
    stated = {**stated_values(settings.parallel), **stated_values(settings.train)}
    fix = "Give the sequences of one micro batch, or leave it out to search it."
    require_at_least("train.micro_batch_size", stated.get("micro_batch_size", 1), 1, fix)
    return {name: stated[name] for name in DEGREES if name in stated}


def read_rank_order(parallel: ParallelConfig) -> RankOrder | None:
    """The rank order, if fixed."""
    return _named("parallel.rank_order", parallel.rank_order, RankOrder)


def _named(name: str, value: str | None, kind: type[Choice]) -> Choice | None:
    return None if value is None else choice(name, value, kind)


def read_zero(parallel: ParallelConfig) -> ZeroStage | None:
    """The ZeRO stage, if fixed."""
    stage = parallel.zero_stage
    if stage not in (None, *ZeroStage):
        raise UserInputError(
            "parallel.zero_stage", stage, "it must be 0, 1, 2 or 3", "Give one of them."
        )
    return None if stage is None else ZeroStage(stage)


def read_recompute(parallel: ParallelConfig) -> Recompute | None:
    """The recomputation, if fixed; parts that do not belong together are an error."""
    rest = (parallel.recompute_method, parallel.recompute_num_layers, parallel.recompute_modules)
    if parallel.recompute_granularity is None:
        if rest != (None, None, None):
            raise UserInputError(
                "parallel.recompute_granularity",
                None,
                "the other recompute settings need it",
                "Add parallel.recompute_granularity=full or selective.",
            )
        return None
    granularity = choice(
        "parallel.recompute_granularity", parallel.recompute_granularity, RecomputeGranularity
    )
    names = parallel.recompute_modules
    if names is None and granularity is RecomputeGranularity.SELECTIVE:
        names = DEFAULT_MODULES
    wanted = {choice("parallel.recompute_modules", name, RecomputeModule) for name in names or ()}
    return Recompute(
        granularity=granularity,
        method=_named("parallel.recompute_method", parallel.recompute_method, RecomputeMethod),
        num_layers=parallel.recompute_num_layers,
        modules=tuple(module for module in RecomputeModule if module in wanted),
    )


def read_backend(name: str | None) -> Backend | None:
    """The solver's backend, if asked for by name."""
    return _named("search.backend", name, Backend)


def require_buildable(spec: TransformerSpec, target: Target) -> None:
    """Refuse to plan a job that its framework cannot start.

    Raises:
        UnplannableModelError: naming the first part of the model that the framework does not build.
    """
    for name, value in _unbuilt(spec, target).items():
        newest = map(newest_stable, ("nemo", "megatron_bridge", "megatron_lm"))
        others = [each.name for each in newest if not _unbuilt(spec, each)]
        raise UnplannableModelError(
            f"model {spec.name}: {name}",
            value,
            f"{target.framework} cannot build such a model",
            f"Choose target={' or target='.join(others)}." if others else "No framework can.",
        )


def _unbuilt(spec: TransformerSpec, target: Target) -> dict[str, object]:
    """Parts of a model that a framework does not build."""
    differences = spec.variant.differences().items()
    parts = {f"variant.{name}": value for name, value in differences if name not in target.builds}
    if spec.position_embedding_type == "alibi":
        parts["position_embedding_type"] = "alibi"
    if spec.vision is not None and not spec.has_split_encoder and "vision" not in target.builds:
        parts["vision"] = f"of {spec.vision.num_layers} layers"
    return parts


def require_experts(spec: TransformerSpec, parallel: ParallelConfig) -> None:
    """Refuse tensor parallelism of experts for a dense model, of which it would say nothing.

    Raises:
        UserInputError: naming the setting.
    """
    name, size = "expert_tensor_parallel_size", parallel.expert_tensor_parallel_size
    if spec.num_experts is None and size not in (None, 1):
        raise UserInputError(
            f"parallel.{name}", size, f"{spec.name} has no experts", "Leave it out."
        )


def attention_of(spec: TransformerSpec, target: Target) -> tuple[TransformerSpec, list[str]]:
    """A model with the attention that its framework has: only NeMo's cuts sequences into chunks.

    Returns:
        The model, and a note where that is other work than the model's own.
    """
    size = spec.attention_chunk_size
    if size is None or target is NEMO:
        return spec, []
    note = (
        f"{target.framework} has no attention in chunks: layers of {spec.name} that attend within "
        f"{size} tokens attend to whole sequences, and are priced so."
    )
    return replace(spec, attention_chunk_size=None), [note] if size < spec.seq_length else []


def class_limits(spec: TransformerSpec, target: Target) -> dict[str, Requirement]:
    """Degrees that the model's class in its framework takes only as 1.

    Source: ``bert.BertConfig``, ``gemma2.Gemma2Model``, ``gemma3.Gemma3Config.configure_model``,
    ``llama4_utils.Llama4SelfAttention``, ``ssm.SSMConfig`` of ``nemo.collections.llm``;
    Megatron-Bridge's ``Gemma2DotProductAttention``, ``exaone4_layer_spec``, ``OLMoESelfAttention``,
    ``HybridModelProvider.provide``, ``Qwen25VLModel`` and ``Qwen3VLModel``.
    """
    variant, is_nemo = spec.variant, target is NEMO
    norms, encoder = variant.norm_placement, None if spec.has_split_encoder else spec.vision
    is_gemma = is_nemo and norms is NormPlacement.SANDWICH
    found = (
        (
            "virtual_pipeline_model",
            "it takes no virtual stages",
            is_gemma
            or (is_nemo and spec.family is ModelFamily.BERT)
            or (spec.hybrid_layer_pattern and target not in MEGATRON_LM)
            or (encoder and encoder.deepstack_layers),
        ),
        (
            "context",
            "it attends to whole sequences alone",
            is_gemma
            or (is_nemo and spec.attention_chunk_size)
            or (target in BRIDGE and norms is NormPlacement.POST)  # of EXAONE 4, and of Gemma 2
            or (target in BRIDGE and norms is NormPlacement.SANDWICH and not spec.qk_layernorm)
            or encoder,
        ),
        (
            "tensor_model",
            "it norms all heads of queries and keys on every rank",
            variant.qk_norm_full_width and not is_nemo,
        ),
    )
    who, fix = f"{spec.name} in {target.framework}", "plan another model"
    return {
        f"{name}_parallel_size": Requirement(value=1, reason=why, fix=fix, who=who)
        for name, why, holds in found
        if holds
    }


def buildable_degrees(
    spec: TransformerSpec, target: Target, fixed: Mapping[str, int]
) -> Mapping[str, int]:
    """Fixed degrees with those that the model's class has in its framework alone.

    Raises:
        UserInputError: if others are requested.
    """
    for name, need in class_limits(spec, target).items():
        if (value := fixed.get(name, 1)) != 1:
            raise UserInputError(f"parallel.{name}", value, need.limit, "Use 1.")
        fixed = {**fixed, name: 1}
    return fixed


#: Tokens of the largest micro batch of short sequences that is tried by default.
_MICRO_BATCH_TOKENS = 1 << 16


def limits_for_length(limits: Mapping[str, int], seq_length: int) -> Mapping[str, int]:
    """Limits with a larger micro batch where sequences are short, unless they state one.

    Megatron-LM's own examples of BERT and T5 train up to 64 sequences of 512 tokens.

    >>> limits_for_length({}, 512), limits_for_length({}, 4096)
    ({'micro_batch_size': 128}, {})
    """
    name = "micro_batch_size"
    most = _MICRO_BATCH_TOKENS // seq_length
    return {name: most, **limits} if most > DEFAULT_LIMITS[name] else limits


def require_all_gpus(settings: Settings, who: str) -> None:
    """Refuse a search that may leave GPUs idle where every one of them runs a rank.

    Args:
        who: what takes them all.
    """
    if not settings.search.use_all_gpus:
        raise UserInputError(
            typed_setting("search.use_all_gpus"),
            False,
            f"{who} runs a rank on each of its GPUs",
            "Leave it out, or plan with --from or a model.",
        )


def builds_mtp_beside_layer(spec: TransformerSpec, target: Target) -> bool:
    """Whether its framework builds MTP layers of the last stage's layers, as NeMo does."""
    return target is NEMO and spec.num_mtp_layers > 0


def space_of_framework(
    spec: TransformerSpec,
    target: Target,
    zero_stages: Iterable[ZeroStage],
    recompute: Recompute | None,
) -> dict[str, Any]:
    """What a search may choose in a framework beside degrees, by fields of ``SearchSpace``.

    NeMo lets the recomputation of whole layers lose the gradients of adapters: a frozen embedding's
    output needs no gradient, so that nothing calls the backward pass of the layers behind it.
    Megatron-Bridge mends that (``maybe_enable_recompute_inputs_grad``), and cannot recompute the
    layers of its Gemma 3, whose two rotary embeddings ``CheckpointFunction`` does not save.
    Sharding of frozen weights by Megatron-FSDP is not chosen: neither framework's recipes have it.

    Args:
        recompute: that is fixed.

    Raises:
        UserInputError: if adapters or the fixed recomputation do not go with the framework.
    """
    found, why = dict[str, Any](), ""
    if spec.adapters is not None:
        if target in MEGATRON_LM:
            raise UserInputError(
                "peft.scheme",
                str(spec.adapters.scheme),
                f"{target.framework} trains all weights",
                "Add target=megatron_bridge or target=nemo.",
            )
        stages = tuple(stage for stage in zero_stages if not stage.is_fsdp)
        if stages:
            found["zero_stages"] = stages
        if target is NEMO:
            why = "NeMo loses the gradients of adapters with it, as the embedding is frozen"
    is_sandwich = spec.variant.norm_placement is NormPlacement.SANDWICH
    if is_sandwich and spec.qk_layernorm and target is not NEMO:
        why = "Megatron-Bridge's Gemma 3 has two rotary embeddings, which it does not save"
    if not why:
        return found
    if recompute is not None and recompute.granularity is RecomputeGranularity.FULL:
        raise UserInputError(
            "recompute_granularity",
            "full",
            why,
            "Recompute modules (selective), or use another framework.",
        )
    return {**found, "full_recompute": False}


def check_quotients(space: SearchSpace, gpus: int, batch: int) -> None:
    """Say it at once where fixed degrees and the GPUs, or the batch, have no whole quotient."""
    for is_whole, whole, names, words in (
        (
            space.use_all_gpus,
            gpus,
            (*REPLICA_DEGREES, "data_parallel_size"),
            f"the {gpus} GPUs, which all take part",
        ),
        (
            batch > 0,
            batch,
            ("data_parallel_size", "micro_batch_size"),
            f"the global batch of {batch} sequences",
        ),
    ):
        fixed = {name: space.fixed[name] for name in names if name in space.fixed}
        product = math.prod(fixed.values())
        if is_whole and whole % product:
            fix = "Change it, or leave it out to have it searched."
            if len(fixed) > 1:
                fix = "Change one of them or more, or leave out what may be searched."
            raise UserInputError(" * ".join(fixed), product, f"it must divide {words}", fix)


def estimate_layout(settings: Settings, request: Request) -> ParallelPlan:
    """Price the layout of a configuration, if Megatron launches it.

    Args:
        request: of a space that the settings say nothing of.
    """
    grid, batch_notes = _grid(settings, request)
    searched = (*policy_notes(request.policy), assumed_batch(request.global_batch_size))
    others = (note for note in request.notes if note not in searched)
    request = replace(request, notes=(*batch_notes, *others))
    text = settings.parallel.pipeline_model_parallel_layout
    pp = grid.dims.pipeline_model_parallel_size
    if text is not None:
        partition = parse_layout(text, request.spec, pp)
        return estimate_for(request, grid.with_stages(partition))
    try:
        partition = uniform_partition(
            request.spec, pp, grid.dims.virtual_pipeline_model_parallel_size
        )
    except UserInputError as error:
        found, note = _uneven(request, grid)
        uneven = f"{error.what} = {error.value} does not split evenly; {note}"
        return replace(found, notes=(*request.notes, uneven))
    return estimate_for(request, grid.with_stages(partition))


def _uneven(request: Request, grid: PartialLayout) -> tuple[ParallelPlan, str]:
    """The fastest partition of a grid that does not split evenly, or the evenest if none fits."""
    if grid.sequence_parallel == (grid.dims.tensor_model_parallel_size > 1):
        space = replace(
            request.space,
            fixed=grid.sizes,
            rank_orders=(grid.dims.rank_order,),
            zero_stages=(grid.zero,),
            recompute=grid.recompute,
        )
        check_quotients(space, request.cluster.num_gpus, request.global_batch_size)
        request = replace(request, space=space, num_alternatives=0)
        found = plan(request)
        if isinstance(found, ParallelPlan):
            which = "" if found.search.certificate == "optimal" else " found in the time"
            return found, f"the fastest uneven layout{which} that fits is used."
    partition = spread_partition(request.spec, grid.dims)
    return estimate_for(
        request, grid.with_stages(partition)
    ), "the layers are spread as evenly as they go."


def _grid(settings: Settings, request: Request) -> tuple[PartialLayout, tuple[str, ...]]:
    given = fixed_degrees(settings)
    micro = given.pop("micro_batch_size", 1)
    dims, notes = _dims(settings, request, given), list[str]()
    if (target := request.settings.target) is not None:
        buildable_degrees(request.spec, target_named(target), dims.degrees)
    batch = request.global_batch_size
    if settings.train.global_batch_size is None and request.batch_schedule is None:
        step = micro * dims.data_parallel_size
        batch = -(-batch // step) * step
        notes.append(assumed_batch(batch))
    sequence_parallel = settings.parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = dims.tensor_model_parallel_size > 1
    zero = read_zero(settings.parallel)
    grid = PartialLayout(
        dims=dims,
        global_batch_size=batch,
        micro_batch_size=micro,
        sequence_parallel=sequence_parallel,
        recompute=read_recompute(settings.parallel) or NO_RECOMPUTE,
        zero=ZeroStage.OPTIMIZER if zero is None else zero,
    )
    execution = allowed_execution(request.space.execution, grid)
    return replace(grid, execution=execution), tuple(notes)


def _dims(settings: Settings, request: Request, given: dict[str, int]) -> ParallelDims:
    parallel = settings.parallel
    if request.spec.num_experts is not None:
        # Megatron's default for an absent --expert-tensor-parallel-size.
        given.setdefault("expert_tensor_parallel_size", given.get("tensor_model_parallel_size", 1))
    text, pp = parallel.pipeline_model_parallel_layout, given.get("pipeline_model_parallel_size", 1)
    if text is not None and (chunks := len(expand_layout(text))) % pp == 0:
        virtual = chunks // pp
        said = given.setdefault("virtual_pipeline_model_parallel_size", virtual)
        if said != virtual:
            raise UserInputError(
                "parallel.virtual_pipeline_model_parallel_size",
                said,
                f"the layout has {virtual} virtual stages on each of the {pp} ranks",
                "Leave it out.",
            )
    if "data_parallel_size" not in given:  # all GPUs that are left replicate
        gpus = request.cluster.num_gpus
        degrees: dict[str, Any] = {name: given.get(name, 1) for name in REPLICA_DEGREES}
        one_replica = ParallelDims(**degrees).world_size
        if gpus % one_replica:
            raise UserInputError(
                "tp * cp * pp",
                one_replica,
                f"it must divide the {gpus} GPUs of the cluster",
                "Change a degree or cluster.num_gpus, or give parallel.data_parallel_size.",
            )
        given["data_parallel_size"] = gpus // one_replica
    order = read_rank_order(parallel) or RankOrder.TP_CP_EP_DP_PP
    return ParallelDims(**given, rank_order=order)


def read_shard(settings: Settings, spec: TransformerSpec, flags: Mapping[str, Any]) -> LayerShard:
    """How the configuration divides a layer; what is not given is Megatron's default.

    Args:
        flags: a command's, which count where the configuration says nothing.

    Raises:
        UserInputError: for degrees that Megatron does not build this model with.
    """
    stated = {name: value for name, value in flags.items() if value is not None}
    stated |= fixed_degrees(settings)
    degrees: dict[str, Any] = {name: stated.get(name, 1) for name in LAYER_DEGREES}
    tp, experts_tp = degrees["tensor_model_parallel_size"], "expert_tensor_parallel_size"
    if spec.num_experts is not None:
        degrees[experts_tp] = stated.get(experts_tp, tp)  # Megatron's own default
    sequence_parallel = settings.parallel.sequence_parallel
    if sequence_parallel is None:
        sequence_parallel = stated.get("sequence_parallel", True) and tp > 1
    for name, value in degrees.items():
        if value < 1:
            ParallelDims(**{name: value})  # says what is wrong with it
    micro: dict[str, Any] = {
        "micro_batch_size": stated.get("micro_batch_size", 1),
        "sequence_parallel": sequence_parallel,
    }
    shard = LayerShard(**degrees, **micro)
    experts = shard.expert_model_parallel_size * shard.expert_tensor_parallel_size
    replicas = experts // math.gcd(experts, tp * shard.context_parallel_size)
    launched = LaunchRequest(  # on the smallest grid that holds these degrees
        spec=spec,
        dims=ParallelDims(**degrees, data_parallel_size=replicas),
        global_batch_size=micro["micro_batch_size"] * replicas,
        moe_grouped_gemm=spec.is_moe,
        **micro,
    )
    require_legal(launched)
    return shard
