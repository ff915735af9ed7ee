"""The command that launches a plan, kept in the plan itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from nest_megatron.config.job import ReadCommand
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import VERSIONS
from nest_megatron.integrations.megatron_lm.rewrite import Rewrite, rewrite
from nest_megatron.integrations.megatron_lm.rules import require_launchable
from nest_megatron.integrations.megatron_lm.unchanged import require_kept
from nest_megatron.integrations.megatron_lm.write import (
    environment,
    has_activation_flag,
    model_argv,
    parallel_argv,
    script_name,
)
from nest_megatron.parallel.cuda_graphs import cuda_graphs
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.plan import LaunchCommand, ParallelPlan, sharding
from nest_megatron.parallel.plan_file import sealed
from nest_megatron.parallel.rules import LaunchRequest

#: Key of ``ParallelPlan.launch``.
LAUNCHER = "megatron_lm"
_BLACKWELL = 10
_HOPPER = 9
_COMPLETE_IT = (
    "Add your own flags for data, tokenizer, optimizer, checkpoints and logging, the launcher's "
    "rendezvous (--master-addr, --node-rank), and what changes no shape: rotary scaling, router "
    "scaling and groups, dropout other than 0."
)


def launch_request(
    plan: ParallelPlan, command: ReadCommand | None = None, *, version: str = "0.16.1"
) -> LaunchRequest:
    """What Megatron's rules look at, for a plan.

    Args:
        command: the user's command, whose release and engine are then used.
        version: the release, where there is no command.
    """
    grid = plan.grid()
    values = {} if command is None else command.values
    engine = values.get("transformer_impl") or "transformer_engine"
    traits = restored_settings(plan.provenance.settings).traits
    return LaunchRequest(
        spec=plan.model,
        dims=grid.dims,
        micro_batch_size=grid.micro_batch_size,
        global_batch_size=grid.global_batch_size,
        partition=plan.partition(),
        recompute=grid.recompute,
        zero=grid.zero,
        precision=plan.train.precision,
        sequence_parallel=grid.sequence_parallel,
        moe_grouped_gemm=plan.model.is_moe and engine != "local",
        sharding=sharding(plan.parallel),
        cuda_graphs=cuda_graphs(values),
        optimizer=str(values.get("optimizer") or "adam"),
        fp8_recipe=values.get("fp8_recipe") or "delayed",
        transformer_impl=engine,
        fused_attention=traits.flash_attention,
        gradient_bytes=traits.gradient_bytes,
        execution=allowed_execution(plan.execution, grid),
        version=version if command is None else command.version,
    )


def require_placed(plan: ParallelPlan) -> None:
    """Refuse a plan whose degrees are not those of the GPUs that it was placed on.

    Raises:
        UserInputError: naming both.
    """
    placed, needed = plan.placement.num_gpus, plan.grid().dims.world_size
    if placed != needed:
        raise UserInputError(
            "tp * pp * cp * dp",
            value=needed,
            limit=f"the plan is for {placed} GPUs",
            fix="Use the plan as it was written, or plan again.",
        )


def with_launch(
    plan: ParallelPlan,
    command: ReadCommand | None = None,
    *,
    kept: Collection[str] = (),
    notes: tuple[str, ...] = (),
) -> ParallelPlan:
    """The plan with its Megatron-LM command, sealed again; a plan for another framework has none.

    Args:
        command: the user's own command, whose flags are then rewritten; otherwise the flags of the
            model and of the layout are written.
        kept: destinations that the user set and did not free.
        notes: what was assumed, kept beside the command.

    Raises:
        UserInputError: if Megatron would refuse the command.
    """
    require_placed(plan)
    version = _release(plan)
    if command is None and version is None:
        return plan
    request = launch_request(plan, command, version=version or VERSIONS[0])
    require_launchable(request, but=() if command is not None else ("activation_flag",))
    if command is None:
        argv, remarks = _own_argv(request)
        script = script_name(plan.model)
    else:
        argv, remarks = list(rewritten(plan, command, kept).argv), ()
        script = command.script or script_name(plan.model)
    launch = LaunchCommand(
        script=script,
        argv=tuple(argv),
        environment=environment(request, device_architecture=device_architecture(plan)),
        notes=(*notes, *remarks),
    )
    return sealed(dataclasses.replace(plan, launch={**plan.launch, LAUNCHER: launch}))


def launch_words(plan: ParallelPlan, script: str, argv: Sequence[str]) -> list[str]:
    """A ``torchrun`` command of the plan's size."""
    gpus = plan.placement.num_gpus
    per_node = min(plan.cluster.launch_gpus_per_host, gpus)
    sizes = ["--nproc-per-node", str(per_node), "--nnodes", str(gpus // per_node)]
    return ["torchrun", *sizes, script, *argv]


def _release(plan: ParallelPlan) -> str | None:
    """The release of Megatron-LM that a plan assumes; ``None`` for another framework."""
    target = restored_settings(plan.provenance.settings).target
    if target is None:
        return VERSIONS[0]
    name, _, release = target.rpartition("_")
    return release if name == "megatron_lm" else None


def rewritten(plan: ParallelPlan, command: ReadCommand, kept: Collection[str] = ()) -> Rewrite:
    """The user's command under a plan, and what changed.

    Args:
        kept: destinations that the user set and did not free.

    Raises:
        NestError: if one of them came out changed without a word, or means another layout.
    """
    layout = parallel_argv(launch_request(plan, command))
    found = rewrite(command, [*layout, *_vocab_argv(plan, command)], plan, kept)
    require_kept(found, command, plan, kept)
    return found


def _vocab_argv(plan: ParallelPlan, command: ReadCommand) -> list[str]:
    """Keep the embedding's rows where another tensor-parallel size would pad them otherwise."""
    values, tp = command.values, plan.parallel.tensor_model_parallel_size
    settled = values.get("padded_vocab_size") is not None or not plan.model.vocab_is_padded
    if settled or values.get("tensor_model_parallel_size") == tp:
        return []
    return ["--padded-vocab-size", str(plan.model.vocab_size)]


def _own_argv(request: LaunchRequest) -> tuple[list[str], tuple[str, ...]]:
    layout = parallel_argv(request)
    if has_activation_flag(request.spec):
        return [*model_argv(request.spec), *layout], (_COMPLETE_IT,)
    return layout, (
        f"Megatron-LM's command line has no flag for the activation of {request.spec.name} "
        f"({request.spec.activation}); only the layout's flags are written. Launch it through NeMo "
        "or Megatron-Bridge, whose configurations can state it.",
    )


def device_architecture(plan: ParallelPlan) -> int:
    """Major compute capability of the planned device."""
    return _BLACKWELL if is_blackwell(plan.cluster.accelerator.name) else _HOPPER


def is_blackwell(accelerator: str) -> bool:
    """Whether a device, by its name, is of the generation after Hopper."""
    return any(chip in accelerator for chip in ("B200", "B300"))
