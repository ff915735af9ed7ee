"""How the work of a layer is executed: choices that change time and memory, but no number.

Fields have Megatron's names and words (``TransformerConfig``, ``ModelParallelConfig``; both
releases). What changes numbers (formats, the optimizer, capacity factors) belongs to the job and
is in ``cost_model.traits``.
"""

from __future__ import annotations

import dataclasses

from nest_megatron.caching import Key
from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name, frozen


class Implementation(Name):
    """Megatron's ``--transformer-impl``."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"


class TokenDispatcher(Name):
    """What brings tokens to their experts (``--moe-token-dispatcher-type``)."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"
    FLEX = "flex"


class FlexBackend(Name):
    """The kernels of the ``flex`` dispatcher (``--moe-flex-dispatcher-backend``).

    All send a token to each node once, however many of its experts are there. NCCL EP, of 0.20,
    runs HybridEP's kernels below its own groups (``hybridep_adapter.cu``, named by
    ``moe/token_dispatcher.py``).
    """

    DEEPEP = "deepep"
    HYBRIDEP = "hybridep"
    NCCLEP = "ncclep"


class ContextTraffic(Name):
    """How attention reaches the whole sequence under context parallelism (``--cp-comm-type``)."""

    P2P = "p2p"
    ALL_GATHER = "all_gather"
    A2A = "a2a"
    A2A_P2P = "a2a+p2p"


class GraphImpl(Name):
    """Who captures CUDA graphs (``--cuda-graph-impl``); 0.16.1 spells the last a scope."""

    NONE = "none"
    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
    FULL_ITERATION = "full_iteration"


#: Who captures layers, or modules of them.
OF_LAYERS = (GraphImpl.LOCAL, GraphImpl.TRANSFORMER_ENGINE)


@frozen
class Execution:
    """How the work of every layer is executed (``layout/knobs.py`` says why).

    Args:
        moe_flex_dispatcher_backend: of the ``flex`` dispatcher, ``None`` with any other.
        tp_comm_overlap: in user buffers.
        hierarchical_context_parallel_sizes: ranks that exchange heads, and rings of such groups,
            with ``a2a+p2p``; empty with any other.
        cuda_graph_scope: modules that graphs of layers hold; empty is the whole layer.
        cpu_offloading_num_layers: layers whose saved activations go to the host.
        offload_modules: modules whose saved activations go to the host
            (``--fine-grained-activation-offloading``).

    Raises:
        UserInputError: for fields that contradict each other.
    """

    moe_token_dispatcher_type: TokenDispatcher = TokenDispatcher.ALLTOALL
    moe_flex_dispatcher_backend: FlexBackend | None = None
    moe_permute_fusion: bool = False
    moe_router_fusion: bool = False
    moe_shared_expert_overlap: bool = False
    overlap_moe_expert_parallel_comm: bool = False
    delay_wgrad_compute: bool = False
    use_transformer_engine_op_fuser: bool = False
    tp_comm_overlap: bool = False
    cp_comm_type: ContextTraffic = ContextTraffic.P2P
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    cuda_graph_impl: GraphImpl = GraphImpl.NONE
    cuda_graph_scope: tuple[str, ...] = ()
    cpu_offloading_num_layers: int = 0
    offload_modules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        is_flex = self.moe_token_dispatcher_type is TokenDispatcher.FLEX
        if is_flex != (self.moe_flex_dispatcher_backend is not None):
            raise self._contradiction(
                "moe_flex_dispatcher_backend",
                f"the dispatcher is {self.moe_token_dispatcher_type}",
                "Give it with the flex dispatcher, and with no other.",
            )
        has_levels = self.cp_comm_type is ContextTraffic.A2A_P2P
        if self.hierarchical_context_parallel_sizes and not has_levels:
            raise self._contradiction(
                "hierarchical_context_parallel_sizes",
                f"context parallelism exchanges by {self.cp_comm_type}",
                "Give them with a2a+p2p, and with no other.",
            )
        if self.cuda_graph_scope and self.cuda_graph_impl not in OF_LAYERS:
            raise self._contradiction(
                "cuda_graph_scope",
                f"cuda_graph_impl is {self.cuda_graph_impl}",
                f"Give it with {' or '.join(OF_LAYERS)}, and with no other.",
            )
        if self.delay_wgrad_compute and not self.overlap_moe_expert_parallel_comm:
            raise self._contradiction(
                "delay_wgrad_compute",
                "weight gradients wait only under overlap_moe_expert_parallel_comm",
                "Give both, or neither.",
            )

    def _contradiction(self, name: str, limit: str, fix: str) -> UserInputError:
        return UserInputError(name, getattr(self, name), limit, fix)

    def words(self, *, experts: bool = True) -> str:
        """What is not Megatron's default, by Megatron's names; empty where all is.

        Args:
            experts: the model has some; without, choices about them act on nothing.

        >>> Execution(tp_comm_overlap=True, cp_comm_type=ContextTraffic.A2A).words()
        'tp_comm_overlap, cp_comm_type a2a'
        >>> Execution(moe_permute_fusion=True, tp_comm_overlap=True).words(experts=False)
        'tp_comm_overlap'
        """
        said = []
        for each in filter(lambda field: field.init, dataclasses.fields(self)):
            value = getattr(self, each.name)
            if value != each.default and (experts or "moe_" not in each.name):
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
                said.append(each.name if value is True else f"{each.name} {shown}")
        return ", ".join(said)

    @property
    def offloads(self) -> bool:
        """Whether activations wait on the host."""
        return bool(self.cpu_offloading_num_layers or self.offload_modules)

    @property
    def scope_of_layer_graphs(self) -> tuple[str, ...] | None:
        """Modules that graphs of layers hold, all where it is empty; ``None`` without such graphs.

        >>> Execution(cuda_graph_impl=GraphImpl.FULL_ITERATION).scope_of_layer_graphs is None
        True
        """
        return self.cuda_graph_scope if self.cuda_graph_impl in OF_LAYERS else None

    @property
    def is_node_limited(self) -> bool:
        """Whether a token goes to each node once, however many of its experts are there."""
        return self.moe_token_dispatcher_type is TokenDispatcher.FLEX


#: What matters to layers without experts.
OUTSIDE_EXPERTS = Key(
    Execution,
    reads=(
        "tp_comm_overlap",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "cpu_offloading_num_layers",
        "offload_modules",
    ),
    without_effect=(
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_shared_expert_overlap",
        "use_transformer_engine_op_fuser",
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
    ),
)
#: What matters to those of them in which no token meets another.
OF_TOKENS = Key(
    Execution,
    reads=("tp_comm_overlap", "cuda_graph_impl", "cuda_graph_scope"),
    without_effect=(
        *OUTSIDE_EXPERTS.without_effect,
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "cpu_offloading_num_layers",
        "offload_modules",
    ),
)
#: What matters to the half of a layer that holds experts.
OF_EXPERTS = Key(
    Execution,
    reads=(
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_fusion",
        "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm",
        "use_transformer_engine_op_fuser",
        "tp_comm_overlap",
        "cuda_graph_impl",
        "cuda_graph_scope",
        "offload_modules",
    ),
    without_effect=(
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "cpu_offloading_num_layers",
        "delay_wgrad_compute",
    ),
)
#: What decides which operators and which traffic a layer has, and not what hides them.
OF_GRAPH = Key(
    Execution,
    reads=(
        "moe_token_dispatcher_type",
        "moe_flex_dispatcher_backend",
        "moe_permute_fusion",
        "moe_router_fusion",
        "use_transformer_engine_op_fuser",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "scope_of_layer_graphs",
        "offload_modules",
    ),
    without_effect=(
        "moe_shared_expert_overlap",
        "overlap_moe_expert_parallel_comm",
        "tp_comm_overlap",
        "delay_wgrad_compute",
        "cpu_offloading_num_layers",
        "cuda_graph_impl",
        "cuda_graph_scope",
    ),
)

#: Megatron's defaults, but for the dispatcher, which every launch names.
PLAIN = Execution()
