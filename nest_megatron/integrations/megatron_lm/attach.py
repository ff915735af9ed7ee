"""The command that launches a plan, kept in the plan itself; a user's own with the plan's flags.

Of a user's arguments only the destinations in ``WRITABLE`` are touched; everything else keeps its
words and its place, and every change has a reason.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Option, ReadCommand
from nest_megatron.config.space import require_buildable
from nest_megatron.cost_model.settings import CostSettings, restored_settings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM as MEGATRON_LM_TARGETS
from nest_megatron.cost_model.target_defaults import TARGETS, target_named
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import FaultError, UserInputError
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    PARALLEL_ARGUMENTS,
    REASONS,
    RECOMPUTE,
    STAGE_OPTIONS,
    VIRTUAL_STAGES,
    Values,
    flag_of,
    layers_in_bf16,
    partition_of_values,
    read_recompute,
    read_sharding,
)
from nest_megatron.integrations.megatron_lm.parser import namespace_values, newest_flags, words_for
from nest_megatron.integrations.megatron_lm.write import (
    CONNECTIONS,
    environment,
    model_argv,
    parallel_argv,
    planned_arguments,
    script_name,
)
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.cuda_graphs import cuda_graphs
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import (
    EXECUTION_ARGUMENTS,
    EXECUTION_FIELDS,
    allowed_execution,
)
from nest_megatron.layout.knobs import execution_reason
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import MEGATRON_LM, LaunchCommand, ParallelPlan, launch_size
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook import RULES, check, require_launchable
from nest_megatron.layout.rulebook.devices import AWARE, has_multicast, overlaps_gradients
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, LaunchRequest
from nest_megatron.layout.rulebook.options import (
    JOB_RULES,
    OPTION_RULES,
    contradicted,
    has_activation_flag,
)
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.units import format_gib

#: Key of ``ParallelPlan.launch``, and how the names of its targets begin.
LAUNCHER = "megatron_lm"
#: Rules of what only a framework's own configuration can state.
STATED_ELSEWHERE = ("activation_flag", "variant", "position_type")
_COMPLETE_IT = (
    "Add your own flags for data, tokenizer, optimizer, checkpoints and logging, the launcher's "
    "rendezvous (--master-addr, --node-rank), and what changes no shape: rotary scaling, router "
    "scaling and groups, dropout other than 0."
)


def launch_request(
    plan: ParallelPlan, command: ReadCommand | None = None, *, version: str = DEFAULT_VERSION
) -> LaunchRequest:
    """What Megatron's rules look at, for a plan.

    Args:
        command: the user's command, whose engine and release (not ``version``) are then used.

    Raises:
        UserInputError: if the layout needs more GPUs than the plan's cluster has.
    """
    needed, placed = plan.layout.num_gpus, plan.cluster.num_gpus
    if needed > placed:
        raise UserInputError(
            "tp * pp * cp * dp",
            needed,
            f"the plan is for {placed} GPUs",
            "Use the plan as it was written, or plan again.",
        )
    return layout_request(
        plan.model,
        plan.layout,
        restored_settings(plan.provenance.settings),
        execution=allowed_execution(plan.layout.execution, plan.layout),
        schedule=plan.train.batch_schedule,
        values=command.values if command else {},
        version=command.version if command else version,
    )


def layout_request(
    spec: TransformerSpec,
    layout: Layout,
    settings: CostSettings,
    *,
    execution: Execution,
    schedule: BatchSchedule | None,
    values: Values,
    version: str,
) -> LaunchRequest:
    """What Megatron's rules look at, for a layout.

    Args:
        execution: what is asked for, which the layout's own may leave out.
        values: the job's arguments by destination; Megatron's defaults where it states none.
    """
    optimizer = str(values.get("optimizer") or "adam")
    overlaps = overlaps_gradients(optimizer, version)
    return LaunchRequest.of(
        spec,
        layout,
        batch_schedule=schedule,
        partition=layout.partition,
        sharding=layout.sharding,
        overlap_grad_reduce=overlaps and layout.overlap_grad_reduce,
        overlap_param_gather=overlaps and layout.overlap_param_gather,
        cuda_graphs=cuda_graphs(values),
        optimizer=optimizer,
        transformer_impl=values.get("transformer_impl") or "transformer_engine",
        execution=execution,
        version=version,
        framework=target_named(settings.target).framework if settings.target else MEGATRON_LM,
        layers_in_bf16=layers_in_bf16(values),
        options={AWARE: values.get(AWARE)},
        **settings.of_launch(),
    )


def planned_release(plan: ParallelPlan) -> str:
    """The release of megatron-core that a plan was made for."""
    target = restored_settings(plan.provenance.settings).target
    return DEFAULT_VERSION if target is None else target_named(target).megatron_core


def launchable_request(
    plan: ParallelPlan, version: str | None = None
) -> tuple[LaunchRequest, bool]:
    """What the rules of a plan's framework look at, and whether a command launches it.

    Args:
        version: of Megatron-LM; the release that the plan was made for if not given.

    Raises:
        UserInputError: for the first rule broken.
    """
    request = launch_request(plan, version=version or planned_release(plan))
    require_launchable(request, but=STATED_ELSEWHERE)
    return request, request.facts["has_command"]


def with_launch(plan: ParallelPlan) -> ParallelPlan:
    """The plan with flags of its model and layout; a plan for another framework has none.

    A note says what of the model no command states.

    Raises:
        UserInputError: if Megatron would refuse the command, or another framework's megatron-core
            the layout.
    """
    request, has_command = launchable_request(plan)
    if not has_command:
        return plan
    argv = tuple(parallel_argv(request))
    lacks = unstated_parts(plan.model)
    if not lacks:
        argv = (*model_argv(plan.model, version=request.version), *argv)
    notes = (*([] if lacks else [_COMPLETE_IT]), *filter(None, [newest_flags(argv)]))
    return replace(
        plan,
        launch={**plan.launch, LAUNCHER: _launch_command(plan, request, "", argv, notes)},
        notes=(*plan.notes, *filter(None, [lacks])),
    )


def with_command(
    plan: ParallelPlan,
    command: ReadCommand,
    *,
    made_by: str | None = None,
    kept: Collection[str] = (),
) -> tuple[ParallelPlan, Rewrite]:
    """The plan with the user's own command, rewritten, and what of it changed.

    Args:
        made_by: the words that asked for the plan; ``None`` for one that was made before.
        kept: destinations that the user set and did not free.

    Raises:
        UserInputError: if Megatron would refuse the command.
    """
    from nest_megatron.integrations.launchers import (
        with_num_nodes,
        with_variables,
        without_secret_values,
        without_secrets,
    )

    request = launch_request(plan, command)
    require_launchable(request)
    found = rewrite_command(plan, command, kept)
    layout = replace(  # the optimizer may overlap nothing
        plan.layout,
        overlap_grad_reduce=request.overlap_grad_reduce,
        overlap_param_gather=request.overlap_param_gather,
    )
    launch = _launch_command(plan, request, command.script, found.argv)
    ranks, words = command.ranks, without_secret_values(command.launcher)
    num_nodes, per_node = launch_size(plan)
    if ranks.num_nodes and ranks.num_ranks == per_node * ranks.num_nodes:
        words = with_num_nodes(words, num_nodes)
    variables = launch.environment
    chosen = {name: text for name, text in variables.items() if text is not None}
    launcher, before = with_variables(words, without_secrets(command.environment), chosen)
    unset = {name: None for name in variables if name not in chosen}
    launch = replace(launch, launcher=tuple(launcher), environment={**before, **unset})
    others = tuple(
        Change(field=name, before=old, after=wanted, reason="what Megatron-LM starts with")
        for name, wanted in variables.items()
        if (old := command.environment.get(name)) not in (None, wanted)
    )
    found = replace(found, changes=(*found.changes, *others))
    origin = plan.provenance
    launches = {**plan.launch, LAUNCHER: launch}
    if made_by is not None:
        origin = origin.made_for(MEGATRON_LM, command.version, made_by)
    return replace(plan, layout=layout, launch=launches, provenance=origin), found


def require_connections(plan: ParallelPlan, command: ReadCommand) -> None:
    """Raise where a command sets a number of connections with which Megatron-LM does not start."""
    launch = _launch_command(plan, launch_request(plan, command), command.script, command.argv)
    stated, wanted = command.environment.get(CONNECTIONS), launch.environment.get(CONNECTIONS, "")
    if wanted is None and stated == "1":
        limit, fix = "FSDP starts with more than one", "Leave it out, or set 32."
    elif wanted == "1" and stated not in (None, "1"):
        limit, fix = f"TP and CP start with 1 on {plan.cluster.accelerator.name}", "Set it to 1."
    else:
        return
    raise UserInputError(CONNECTIONS, stated, limit, fix)


def _launch_command(
    plan: ParallelPlan,
    request: LaunchRequest,
    script: str,
    argv: tuple[str, ...],
    notes: tuple[str, ...] = (),
) -> LaunchCommand:
    return LaunchCommand(
        script=script or script_name(plan.model, request.version),
        argv=argv,
        environment=environment(
            request,
            device_architecture=device_architecture(plan),
            multicast=has_multicast(plan.cluster),
        ),
        notes=notes,
    )


#: Set together with the layout; those in the second row only where the user says nothing.
_WITH_LAYOUT = (
    "global_batch_size",
    "ckpt_format",
    "padded_vocab_size",
    "init_model_with_meta_device",
    "megatron_fsdp_main_grads_dtype",
    "grad_reduce_in_bf16",
)
_IF_ABSENT = "moe_grouped_gemm"
#: Set where a job comes to Megatron-FSDP; one that has it already knows its Transformer Engine.
_WITH_NEW_FSDP = "gradient_accumulation_fusion"

#: Several spellings of one choice: where the user's own stays, none is added.
_STATEMENTS = (RECOMPUTE, (*STAGE_OPTIONS, *VIRTUAL_STAGES), *EXECUTION_ARGUMENTS.values())

#: What a plan sets, and with the options that it contradicts every destination that it may write.
#: Nothing else of a job is ever changed.
_SET = frozenset((*PARALLEL_ARGUMENTS, *_WITH_LAYOUT, _IF_ABSENT, _WITH_NEW_FSDP))
WRITABLE = _SET | {
    rule.what for rule in OPTION_RULES if not rule.framework or MEGATRON_LM in rule.framework
}


@frozen
class Rewrite:
    """A rewritten command's arguments, and what changed.

    Args:
        changes: flags before and after; ``None`` is an absent flag, empty text a bare switch.
        values: what the plan decided, by destination; of what it leaves out Megatron's default.
    """

    argv: tuple[str, ...]
    changes: tuple[Change, ...]
    values: Values


def rewrite_command(
    plan: ParallelPlan, command: ReadCommand, kept: Collection[str] = ()
) -> Rewrite:
    """Put a plan's flags into a user's arguments.

    Args:
        kept: destinations whose flags stay as the user wrote them; the plan was searched under
            them, so it says nothing else.

    Raises:
        FaultError: if one of ``kept`` came out changed without a word, or means another layout.
    """
    values, version = command.values, command.version
    request = launch_request(plan, command)
    planned = planned_arguments(request)
    # gradients that are 16 bits wide for the FSDP of today alone, which a plan leaves
    stays = DataParallelSharding.DDP, request.sharding or request.zero.sharding
    leaves = request.gradient_bytes == 2 and read_sharding(values) not in stays
    if leaves and request.precision is not Precision.FP16:
        planned["grad_reduce_in_bf16"] = True
    tp = plan.layout.dims.tensor_model_parallel_size
    is_sized = values.get("padded_vocab_size") is not None or not plan.model.vocab_is_padded
    if not is_sized and values.get("tensor_model_parallel_size") != tp:
        # another tensor-parallel size would pad the embedding otherwise
        planned["padded_vocab_size"] = plan.model.vocab_size
    stated = {dest for flags in _STATEMENTS if set(flags) & set(kept) for dest in flags}
    refused = contradicted(plan, values, version)
    settled = stated.union(kept).difference(refused.keys() & EXECUTION_FIELDS.keys())
    settled |= command.explicit & {_IF_ABSENT}
    if values.get("use_megatron_fsdp"):
        settled |= {_WITH_NEW_FSDP}
    wanted = {
        dest: Option(dest, words)
        for dest, words in words_for(planned, version).items()
        if dest in _SET - settled
    }
    free = {*PARALLEL_ARGUMENTS} - settled
    owned = free | wanted.keys() | refused.keys()
    assert owned <= WRITABLE
    tokens: list[str] = []
    left: dict[str | None, Option] = dict(wanted.items())
    for option in command.options:
        if option.dest not in owned:
            tokens += option.tokens
        elif (new := left.pop(option.dest, None)) is not None:
            # the user's own spelling where the value is the same
            tokens += option.tokens if option.value == new.value else new.tokens
    for option in left.values():
        tokens += option.tokens
    found = Rewrite(
        argv=tuple(tokens),
        changes=tuple(_changes(command.options, owned, wanted, plan, refused)),
        values=namespace_values({dest: planned[dest] for dest in wanted}, owned, version),
    )
    require_kept(found, command, plan, kept)
    return found


def _changes(
    given: Sequence[Option],
    owned: Collection[str],
    wanted: Mapping[str, Option],
    plan: ParallelPlan,
    refused: Mapping[str, str],
) -> Iterator[Change]:
    mine = {option.dest: option for option in given if option.dest and option.dest in owned}
    tp = plan.layout.dims.tensor_model_parallel_size
    for dest in dict.fromkeys((*mine, *wanted)):
        before = mine[dest].value if dest in mine else None
        after = wanted[dest].value if dest in wanted else None
        # what Megatron takes anyway
        default = str(tp if dest == "expert_tensor_parallel_size" else 1)
        is_default = after == default and dest.endswith("_parallel_size")
        if before == after or (before is None and is_default):
            continue
        if after is None:
            reason = refused.get(dest) or REASONS["removed"].get(dest, "the plan does not need it")
        else:
            reason = _reason(dest, plan)
        flag = (wanted if dest in wanted else mine)[dest].flag
        yield Change(field=flag, before=before, after=after, reason=reason)


def _reason(dest: str, plan: ParallelPlan) -> str:
    if dest in EXECUTION_FIELDS:
        return execution_reason(EXECUTION_FIELDS[dest])
    if dest == "expert_tensor_parallel_size" and not plan.model.is_moe:
        return reason(plan, dest)
    count = plan.layout.num_microbatches
    predicted = plan.predicted
    return (
        REASONS["set"]
        .get(dest, "belongs to the plan")
        .format(
            level=plan.placement.group_levels,
            microbatches=f"{count} micro batch{'es' * (count > 1)}",
            peak=format_gib(predicted.peak_memory_bytes),
            capacity=format_gib(predicted.capacity_bytes),
        )
    )


def unstated_parts(spec: TransformerSpec) -> str:
    """Of a model that Megatron-LM's command line cannot state: what of it, and what to do."""
    lacking = dict(spec.variant.differences())
    if not has_activation_flag(spec):
        lacking["activation"] = spec.activation
    if spec.position_embedding_type == "alibi":
        lacking["position_embedding_type"] = "alibi"
    if spec.vision is not None:
        lacking["vision"] = f"of {spec.vision.num_layers} layers"
    if not lacking:
        return ""
    parts = ", ".join(f"{name} {value}" for name, value in lacking.items())
    return (
        f"Megatron-LM's command line has no flag for a part of {spec.name} ({parts}); only the "
        "layout's flags are written. Launch it through NeMo or Megatron-Bridge where their "
        "configurations can state it."
    )


def device_architecture(plan: ParallelPlan) -> int:
    """Major compute capability of the planned device: that of Blackwell, or of Hopper."""
    return 10 if is_blackwell(plan.cluster.accelerator.name) else 9


def is_blackwell(accelerator: str) -> bool:
    """Whether a device, by its name, is of the generation after Hopper."""
    return any(chip in accelerator for chip in ("B200", "B300"))


def require_kept(
    rewrite: Rewrite, command: ReadCommand, plan: ParallelPlan, kept: Collection[str]
) -> None:
    """Compare a rewritten command with what the user typed, and with the plan.

    Options that contradict the plan (``rulebook.options``) are taken back with their reason;
    that any other is written is a fault of this package.

    Raises:
        FaultError: naming every difference.
    """
    if not kept:
        return
    refused = contradicted(plan, command.values, command.version).keys()
    changed = [
        f"{flag_of(name)} {command.values[name]} -> {rewrite.values[name]}"
        for name in sorted({*kept} & rewrite.values.keys() - refused)
    ]
    # kept flags that Megatron would read as another layout than the plan's
    values = {**command.values, **rewrite.values}
    layout = plan.layout
    if set(kept) & {*STAGE_OPTIONS, *VIRTUAL_STAGES}:
        pp = layout.dims.pipeline_model_parallel_size
        if partition_of_values(plan.model, values, pp) not in (None, layout.partition):
            changed.append(f"the stages are not {plan.arguments['pipeline_model_parallel_layout']}")
    recompute = read_recompute(values) or NO_RECOMPUTE
    if set(kept) & set(RECOMPUTE) and recompute != layout.recompute:
        changed.append(f"the recomputation is not {layout.recompute.label()}")
    if changed:
        raise FaultError(
            f"the plan would change what you set and did not free: {'; '.join(changed)}. That is a "
            "bug of nest-megatron; launch without it and report it."
        )


#: Rules that hold for some layouts of a model alone.
_OF_LAYOUTS = frozenset(rule.id for rule in RULES if rule not in JOB_RULES)


def target_refusals(spec: TransformerSpec) -> Mapping[str, str]:
    """Why each target does not take a model, by its name; empty where it does."""
    return {name: target_refusal(spec, target) for name, target in TARGETS.items()}


def target_refusal(spec: TransformerSpec, target: Target) -> str:
    """Why a framework at a release does not take a model; empty where it does.

    Asked are what the framework builds, what Megatron-LM's command line has flags for, and the
    rules that hold for a model whatever its layout.
    """
    try:
        require_buildable(spec, target)
        if target in MEGATRON_LM_TARGETS:
            model_argv(spec, version=target.megatron_core)
    except UserInputError as error:
        return _refusal_words(error)
    for _, broken in check(_on_one_gpu(spec, target), but=_OF_LAYOUTS):
        return _refusal_words(broken)
    return ""


def require_launchable_model(spec: TransformerSpec, target: Target) -> None:
    """Refuse a model of which ``with_launch`` takes no plan, before one is searched.

    Raises:
        UserInputError: as ``with_launch`` does.
    """
    if target not in MEGATRON_LM_TARGETS:
        return
    require_launchable(_on_one_gpu(spec, target), but=_OF_LAYOUTS.union(STATED_ELSEWHERE))
    if not unstated_parts(spec):
        model_argv(spec, version=target.megatron_core)


def _on_one_gpu(spec: TransformerSpec, target: Target) -> LaunchRequest:
    return LaunchRequest(
        spec=spec,
        dims=ParallelDims(),
        global_batch_size=1,
        micro_batch_size=1,
        version=target.megatron_core,
        framework=target.framework,
    )


def _refusal_words(error: UserInputError) -> str:
    part = error.what.rpartition(" ")[2].removeprefix("variant.")
    return f"{part} {error.value}: {error.limit}"
