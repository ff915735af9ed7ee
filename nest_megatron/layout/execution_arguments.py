"""How layers are carried out, in the arguments and variables of each release of Megatron-LM."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import Any

from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.model.execution import Execution, GraphImpl
from nest_megatron.plain import to_plain

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
#: Fields of ``Execution`` that a command states where the model has experts.
WITH_EXPERTS = (
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute",
    "moe_shared_expert_overlap",
    "moe_permute_fusion",
    "moe_router_fusion",
    "use_transformer_engine_op_fuser",
)
#: Arguments of earlier releases, for what is stated beside them.
_OLDER = ("moe_enable_deepep", "enable_cuda_graph", "external_cuda_graph")


def execution_arguments(execution: Execution, version: str) -> dict[str, Any]:
    """Megatron's arguments of both releases, and their values that have layers carried out so.

    Before 0.18 a graph of the whole step is a scope of its own graphs (0.16.1 args:1432).
    """
    impl, scope = execution.cuda_graph_impl, to_plain(execution.cuda_graph_scope)
    if impl is GraphImpl.FULL_ITERATION and release_number(version) < (0, 18):
        impl, scope = GraphImpl.LOCAL, [impl.value]
    levels = list(execution.hierarchical_context_parallel_sizes)
    return {
        **{name: to_plain(getattr(execution, name)) for name in WITH_EXPERTS},
        "tp_comm_overlap": execution.tp_comm_overlap,
        "cp_comm_type": execution.cp_comm_type.value,
        "hierarchical_context_parallel_sizes": levels or None,
        "cuda_graph_impl": impl.value,
        "cuda_graph_scope": scope,
        "cuda_graph_modules": scope,
        "cpu_offloading_num_layers": execution.cpu_offloading_num_layers,
        "fine_grained_activation_offloading": bool(execution.offload_modules),
        "offload_modules": to_plain(execution.offload_modules) or None,
        **dict.fromkeys(_OLDER, False),
    }


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
