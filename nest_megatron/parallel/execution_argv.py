"""How layers are carried out, in the flags and variables of each release of Megatron-LM."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from nest_megatron.model.execution import ContextTraffic, Execution, GraphImpl
from nest_megatron.parallel.knobs import KNOBS

#: Field of ``Execution`` -> Megatron's arguments that state it, of both releases.
_ARGUMENTS = {knob.name: [knob.name] for knob in KNOBS} | {
    "moe_flex_dispatcher_backend": ["moe_flex_dispatcher_backend", "moe_enable_deepep"],
    "cuda_graph_impl": ["cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"],
    "cuda_graph_scope": ["cuda_graph_scope", "cuda_graph_scope_deprecated", "cuda_graph_modules"],
    "offload_modules": ["fine_grained_activation_offloading", "offload_modules"],
}
#: Argument -> field of ``Execution``.
EXECUTION_FIELDS = {name: field for field, names in _ARGUMENTS.items() for name in names}
#: Choice -> Megatron's arguments that state it.
EXECUTION_ARGUMENTS: dict[str, tuple[str, ...]] = {
    choice: tuple(name for knob in knobs for name in _ARGUMENTS[knob.name])
    for choice, knobs in groupby(KNOBS, key=attrgetter("choice"))
}
_SWITCHES = (
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_shared_expert_overlap",
    "moe_permute_fusion",
    "moe_router_fusion",
)
_SWITCHES_OF_0_20 = ("use_transformer_engine_op_fuser",)


def execution_argv(execution: Execution, version: str, *, experts: bool) -> list[str]:
    """Flags that have layers carried out so; what Megatron does anyway is left out.

    Args:
        version: the release.
        experts: the model has experts, whose dispatcher is then always named.
    """
    return [
        *(_expert_argv(execution, version) if experts else ()),
        *_switch("tp_comm_overlap", execution.tp_comm_overlap),
        *_context_argv(execution),
        *_graph_argv(execution, version),
        *_offload_argv(execution),
    ]


def execution_environment(execution: Execution) -> dict[str, str | None]:
    """Variables that Megatron asks for beside those flags.

    Transformer Engine from 2.10 on would move weights with the activations (0.16.1 args:1225); a
    release before it does not read the variable. NCCL may not register the buffers of graphs where
    the allocator grows its segments (args:1247).
    """
    found: dict[str, str | None] = {}
    if execution.offload_modules:
        found["NVTE_CPU_OFFLOAD_V1"] = "1"
    if execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE:
        found["NCCL_GRAPH_REGISTER"] = "0"
    return found


def _expert_argv(execution: Execution, version: str) -> Iterable[str]:
    yield from ("--moe-token-dispatcher-type", execution.moe_token_dispatcher_type.value)
    if execution.moe_flex_dispatcher_backend is not None:
        yield from ("--moe-flex-dispatcher-backend", execution.moe_flex_dispatcher_backend.value)
    of_0_16 = version.startswith("0.16")
    for name in _SWITCHES if of_0_16 else (*_SWITCHES, *_SWITCHES_OF_0_20):
        yield from _switch(name, getattr(execution, name))


def _context_argv(execution: Execution) -> Iterable[str]:
    if execution.cp_comm_type is not ContextTraffic.P2P:
        yield from ("--cp-comm-type", execution.cp_comm_type.value)
    if execution.hierarchical_context_parallel_sizes:
        yield "--hierarchical-context-parallel-sizes"
        yield from map(str, execution.hierarchical_context_parallel_sizes)


def _graph_argv(execution: Execution, version: str) -> Iterable[str]:
    """0.16.1 spells a graph of the whole step as a scope of its own graphs (args:1432)."""
    impl, scope = execution.cuda_graph_impl, execution.cuda_graph_scope
    if impl is GraphImpl.NONE:
        return
    of_0_16 = version.startswith("0.16")
    if of_0_16 and impl is GraphImpl.FULL_ITERATION:
        impl, scope = GraphImpl.LOCAL, (impl.value,)
    yield from ("--cuda-graph-impl", impl.value)
    if scope:
        yield from ("--cuda-graph-scope" if of_0_16 else "--cuda-graph-modules", *scope)


def _offload_argv(execution: Execution) -> Iterable[str]:
    if execution.cpu_offloading_num_layers:
        yield from ("--cpu-offloading-num-layers", str(execution.cpu_offloading_num_layers))
    if execution.offload_modules:
        yield "--fine-grained-activation-offloading"
        yield from ("--offload-modules", *execution.offload_modules)


def _switch(name: str, on: bool) -> list[str]:
    return [f"--{name.replace('_', '-')}"] if on else []
