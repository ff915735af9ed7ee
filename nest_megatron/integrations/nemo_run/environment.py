"""Variables of a task's processes that depend on its layout, as the planned one wants them.

NeMo's and Megatron-Bridge's ``PerfEnvPlugin`` set the same from the layout that they find. What it
has set from the recipe's own layout is brought to the planned one, so that both orders of the
plugins end alike. Source: ``PerfEnvPlugin.setup`` of NeMo 2.7.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

from nest_megatron.integrations.fields import find
from nest_megatron.integrations.megatron_lm.attach import device_architecture
from nest_megatron.parallel.plan import ParallelPlan

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CHUNK = "NCCL_P2P_NET_CHUNKSIZE"
#: What ``PerfEnvPlugin`` sets for any layout, so that its having run is seen.
_OF_PERF_ENV = "TORCH_NCCL_HIGH_PRIORITY"
_BLACKWELL = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """As much of a layout as variables hang on.

    Args:
        splits: ranks share a layer or a sequence.
        pipelined: there are several pipeline ranks.
    """

    splits: bool
    pipelined: bool


def stated_layout(recipe: Any) -> Layout:
    """The layout that a recipe states now."""
    return _layout(lambda name: find(recipe, f"trainer.strategy.{name}"))


def _layout(size_of: Callable[[str], Any]) -> Layout:
    def is_divided(*names: str) -> bool:
        return any(isinstance(size := size_of(name), int) and size > 1 for name in names)

    return Layout(
        splits=is_divided("tensor_model_parallel_size", "context_parallel_size"),
        pipelined=is_divided("pipeline_model_parallel_size"),
    )


def adapt(variables: MutableMapping[str, str], before: Layout, plan: ParallelPlan) -> list[str]:
    """Bring an executor's variables to a plan.

    Args:
        variables: changed in place.
        before: the layout that the recipe stated before it was planned.

    Returns:
        What was changed and why, and what another plugin may still undo, one sentence each.
    """
    now = _layout(lambda name: getattr(plan.parallel, name))
    return [*_connections(variables, before, now, plan), *_chunks(variables, before, now)]


def _connections(
    variables: MutableMapping[str, str], before: Layout, now: Layout, plan: ParallelPlan
) -> Iterator[str]:
    """Kernels of a layer in program order, where communication hides under them."""
    old, fsdp = variables.get(_CONNECTIONS), plan.parallel.use_megatron_fsdp
    if now.splits and not fsdp:
        wanted = "32" if device_architecture(plan) >= _BLACKWELL else "1"
        if old != wanted:
            variables[_CONNECTIONS] = wanted
            was = f" instead of {old}" if old is not None else ""
            yield f"{_CONNECTIONS}={wanted}{was}: tensor or context parallel work overlaps."
        return
    if old is not None and (fsdp or before.splits):
        del variables[_CONNECTIONS]
        why = "Megatron-FSDP needs several" if fsdp else "no layer or sequence is divided any more"
        yield f"{_CONNECTIONS}={old} is taken out: {why}."
    if fsdp and now.splits:
        yield (
            f"PerfEnvPlugin sets {_CONNECTIONS} again, which Megatron-FSDP must not have: put it "
            "before NestPlugin."
        )


def _chunks(variables: MutableMapping[str, str], before: Layout, now: Layout) -> Iterator[str]:
    """Chunks of what pipeline ranks exchange."""
    if before.pipelined and not now.pipelined and _CHUNK in variables:
        yield f"{_CHUNK}={variables.pop(_CHUNK)} is taken out: there is one pipeline rank."
    unseen = _OF_PERF_ENV in variables and _CHUNK not in variables
    if now.pipelined and not before.pipelined and unseen:
        yield (
            "PerfEnvPlugin saw the recipe's one pipeline rank: put it behind NestPlugin if it has "
            "an nccl_pp_comm_chunksize."
        )
