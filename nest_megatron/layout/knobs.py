"""Choices of Megatron that decide speed and leave numbers alone: which a plan makes, and why.

``docs/knobs.md`` shows the table; a test keeps it true.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.layout.rulebook.devices import closed_on
from nest_megatron.model.execution import (
    PLAIN,
    ContextTraffic,
    Execution,
    FlexBackend,
    GraphImpl,
    TokenDispatcher,
)
from nest_megatron.model.spec import ModelFamily, TransformerSpec
from nest_megatron.plain import Name, frozen

#: Fields of ``Execution`` that packed sequences leave no room for. The schedule of two micro
#: batches does not know where sequences begin (``forward_step`` of ``pretrain_gpt.py`` and of
#: Megatron-Bridge's ``gpt_step.py``); of attention only the ring takes them in every release of
#: Transformer Engine (``context_parallel.py``, ``thd``).
_CLOSED_BY_PACKS = frozenset(
    {
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
    }
)
#: User buffers have one size, and sum in no fixed order: Megatron-LM 0.20 refuses them with
#: ``--deterministic-mode`` (``training/determinism.py``), and 0.16.1 loses what it promises.
_USER_BUFFERS = frozenset({"tp_comm_overlap"})


def closed_fields(
    deterministic: object, *, packs: bool = False, lengths: bool = False
) -> frozenset[str]:
    """Fields of ``Execution`` that a job does not allow.

    Args:
        deterministic: its ``deterministic_mode``.
        packs: sequences are packed.
        lengths: samples are of other lengths, packed or not.
    """
    closed = _CLOSED_BY_PACKS if packs or lengths else frozenset()
    return closed | (_USER_BUFFERS if deterministic or lengths else frozenset())


class Package(Name):
    """What a choice needs that a machine may lack."""

    DEEP_EP = "deep_ep"
    HYBRID_EP = "hybrid_ep"
    #: Transformer Engine from 2.9 on.
    ENGINE_2_9 = "transformer_engine_2_9"

    @property
    def words(self) -> str:
        """What has to be installed."""
        return {
            Package.DEEP_EP: "the package deep_ep",
            Package.HYBRID_EP: "the package deep_ep with the kernels of HybridEP",
            Package.ENGINE_2_9: "Transformer Engine 2.9 or later",
        }[self]


@dataclass(frozen=True, slots=True)
class Knob:
    """A choice that leaves numbers alone.

    Args:
        name: field of ``Execution``.
        reason: shown next to the change.
        costs: what it takes.
        group: the name by which it is fixed or freed (``nest.keep``, ``nest.free``), where that is
            not the field's.
        spelled: Megatron-LM's flag, where it is not the field's name.
        always: on wherever it can be: it never costs time.
        values: what a plan may choose apart from what the job has; none where it is left to the
            job, or on always.
        needs: packages, by value, without which Megatron stops.
    """

    name: str
    reason: str
    costs: str
    _: KW_ONLY
    group: str = ""
    spelled: str = ""
    always: bool = False
    values: tuple[Any, ...] = ()
    needs: Mapping[Any, Package] = field(default_factory=dict)

    @property
    def choice(self) -> str:
        """The name by which it is fixed or freed."""
        return self.group or self.name

    @property
    def flag(self) -> str:
        """Megatron-LM's."""
        return self.spelled or f"--{self.name.replace('_', '-')}"

    @property
    def of_experts(self) -> bool:
        """Whether it says nothing to a model without experts."""
        return "moe" in self.name or self.name == "delay_wgrad_compute"


#: Modules whose inputs are large for the time of the module (Megatron-Core's guide to
#: fine-grained activation offloading); without experts the input of a layer goes as well.
_OFFLOADED = ("core_attn", "attn_proj", "expert_fc1")
_OFFLOADED_DENSE = ("qkv_linear", "core_attn", "attn_proj")

#: Kernels of the flex dispatcher that a plan may choose, and what they need.
_PACKAGES = {FlexBackend.DEEPEP: Package.DEEP_EP, FlexBackend.HYBRIDEP: Package.HYBRID_EP}

KNOBS = (
    Knob(
        "moe_token_dispatcher_type",
        "the token dispatcher that was priced",
        "flex runs its kernels on 16 to 20 SMs and keeps buffers on each rank",
        group="token_dispatcher",
        values=(TokenDispatcher.FLEX, TokenDispatcher.ALLTOALL),
    ),
    Knob(
        "moe_flex_dispatcher_backend",
        "a token goes to each node once, however many of its experts are there",
        "as above",
        group="token_dispatcher",
        values=(*_PACKAGES, None),
        needs=_PACKAGES,
    ),
    Knob(
        "moe_permute_fusion",
        "tokens are sorted by expert in one kernel",
        "nothing",
        always=True,
    ),
    Knob(
        "moe_router_fusion",
        "scores and top-k of the router are one kernel",
        "nothing",
        always=True,
    ),
    Knob(
        "moe_shared_expert_overlap",
        "the shared experts run while tokens travel",
        "shared experts cannot be recomputed",
        values=(True, False),
    ),
    Knob(
        "overlap_moe_expert_parallel_comm",
        "tokens of one micro batch travel while another computes",
        "one more micro batch in memory; a pipeline needs virtual stages",
        values=(True, False),
    ),
    Knob(
        "delay_wgrad_compute",
        "weight gradients fill what the overlapped all-to-all leaves idle",
        "inputs of GEMMs are kept longer; not priced by itself: the public runs that "
        "overlap the all-to-all have it too, so what that hides is of both",
    ),
    Knob(
        "use_transformer_engine_op_fuser",
        "the experts' GEMMs and activation are fused kernels",
        "experimental, since 0.18: left to the job",
    ),
    Knob(
        "tp_comm_overlap",
        "tensor-parallel traffic runs beside the GEMMs that need it",
        "user buffers on each rank, and some SMs",
        always=True,
    ),
    Knob(
        "cp_comm_type",
        "how attention reaches the whole sequence fastest on these links",
        "all_gather holds all keys and values; a2a needs whole heads on each rank",
        values=tuple(ContextTraffic),
    ),
    Knob(
        "hierarchical_context_parallel_sizes",
        "heads are exchanged inside, keys and values go round outside",
        "as above",
        group="cp_comm_type",
        values=((2, 2), (2, 4), (4, 2), (4, 4), (8, 2), ()),
    ),
    Knob(
        "cuda_graph_impl",
        "the host launches a layer's kernels more slowly than the device runs them",
        "two or three tensors of a layer's input for each layer and micro batch in flight "
        "(an estimate), and copies to them",
        group="cuda_graphs",
        values=(GraphImpl.TRANSFORMER_ENGINE, GraphImpl.NONE),
    ),
    Knob(
        "cuda_graph_scope",
        "what of a layer has fixed shapes: all but the experts",
        "as above",
        group="cuda_graphs",
        spelled="--cuda-graph-scope (since 0.18: --cuda-graph-modules)",
        values=(("attn", "moe_router", "moe_preprocess"), ()),
    ),
    Knob(
        "cpu_offloading_num_layers",
        "activations of these layers wait on the host, which frees memory",
        "traffic to the host, and pinned memory there",
        group="activation_offloading",
    ),
    Knob(
        "offload_modules",
        "inputs of these modules wait on the host, so that less is recomputed",
        "copies over the host's link, beside the passes where they are shorter, and pinned "
        "memory there",
        group="activation_offloading",
        spelled="--fine-grained-activation-offloading --offload-modules",
        values=(_OFFLOADED, ()),
        needs={_OFFLOADED: Package.ENGINE_2_9},
    ),
)

_BY_NAME = {knob.name: knob for knob in KNOBS}


@frozen
class KnobConditions:
    """What decides which choices there are, apart from the layout.

    Args:
        fp8_recipe: ``None`` outside fp8 and NVFP4.
        precision: of the GEMMs.
        packages: those that are known to be installed where the job runs.
        fixed: choices, by name, that stay as the job has them.
        has_engine: the layers are Transformer Engine's.
        capturable: CUDA graphs can hold the layers: they are Megatron's own, and every step runs as
            many micro batches of the same shapes.
        has_fast_link: the link to the host is no PCIe, over which copies outlast recomputing.
        counts_on_host: the host waits for numbers of tokens before their all-to-all
            (``--moe-router-padding-for-fp8``, a capacity factor).
        can_state: fields of ``Execution`` that the launched job can have set; ``None`` is all.
        closed: those of them that the job leaves no room for.
    """

    spec: TransformerSpec
    accelerator: str
    fp8_recipe: str | None = None
    precision: Precision = Precision.BF16
    packages: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    has_engine: bool = True
    capturable: bool = True
    counts_on_host: bool = False
    has_fast_link: bool = False
    can_state: frozenset[str] | None = None
    closed: frozenset[str] = frozenset()


def always_on(current: Execution, conditions: KnobConditions) -> Execution:
    """The job's own, with everything on that never costs time.

    Kernels that the device lacks give way where the user has not fixed them.
    """
    backend = current.moe_flex_dispatcher_backend
    if not _runs_on(backend, conditions) and "token_dispatcher" not in conditions.fixed:
        current = replace(
            current,
            moe_token_dispatcher_type=TokenDispatcher.ALLTOALL,
            moe_flex_dispatcher_backend=None,
        )
    names = [knob.name for knob in KNOBS if knob.always and _is_open(knob, conditions)]
    fields: dict[str, Any] = dict.fromkeys(names, True)
    return replace(current, **fields)


def open_values(
    conditions: KnobConditions, current: Execution = PLAIN
) -> dict[str, tuple[Any, ...]]:
    """Fields of ``Execution`` that a plan may choose, with their values.

    Args:
        current: of the job; offloading that it has may be left out where no plan would choose it.
    """
    found = {}
    there = {*conditions.packages, None}
    for knob in KNOBS:
        values = [
            value
            for value in knob.values
            if knob.needs.get(value) in there and _runs_on(value, conditions)
        ]
        off = getattr(PLAIN, knob.name)
        is_freed = knob.choice not in conditions.fixed and getattr(current, knob.name) != off
        if values and _is_open(knob, conditions):
            found[knob.name] = tuple(values)
        elif knob.group == "activation_offloading" and is_freed:
            found[knob.name] = (off,)
    spec = conditions.spec
    if "cuda_graph_scope" in found:  # modules whose shapes are fixed (0.16.1 tc:1747-1778)
        dense = ("mlp",) if spec.ffn_hidden_sizes else ()
        prepared = () if conditions.counts_on_host else ("moe_preprocess",)
        found["cuda_graph_scope"] = (("attn", *dense, "moe_router", *prepared), ())
    if _OFFLOADED in found.get("offload_modules", ()) and not spec.is_moe:
        found["offload_modules"] = (_OFFLOADED_DENSE, ())
    known = any(found.get("moe_flex_dispatcher_backend", ()))  # the package of some backend
    if "moe_token_dispatcher_type" in found and not known:
        found["moe_token_dispatcher_type"] = (TokenDispatcher.ALLTOALL,)
    return found


def unknown_packages(conditions: KnobConditions) -> dict[FlexBackend, Package]:
    """Backends of the dispatcher that a plan would try if their package were known to be there."""
    if not _is_open(_BY_NAME["moe_flex_dispatcher_backend"], conditions):
        return {}
    return {
        backend: package
        for backend, package in _PACKAGES.items()
        if package not in conditions.packages and _runs_on(backend, conditions)
    }


#: Devices on which the kernels of both backends run: Hopper and later.
_FLEX_DEVICE = re.compile(r"(GH|GB|[HB])\d", re.IGNORECASE)
#: Devices whose NVLink spans hosts, for which DeepEP has no kernels.
#: Source: ``TransformerConfig.moe_flex_dispatcher_backend``; Megatron-Bridge refuses it there.
_SPANNING_DEVICE = re.compile(r"GB\d", re.IGNORECASE)
#: Scalings of fp8 whose GEMMs Transformer Engine does not overlap with traffic in user buffers.
WITHOUT_USER_BUFFERS = ("blockwise", "mxfp8")


def _runs_on(backend: object, conditions: KnobConditions) -> bool:
    if isinstance(backend, FlexBackend) and (
        "moe_flex_dispatcher_backend" in closed_on(conditions.accelerator)
    ):
        return False
    return not (backend is FlexBackend.DEEPEP and _SPANNING_DEVICE.match(conditions.accelerator))


def _is_open(knob: Knob, conditions: KnobConditions) -> bool:
    """Whether the choice exists for a job on a device, and is not the user's own."""
    spec = conditions.spec
    images, stacks = spec.vision is not None, spec.family is ModelFamily.T5
    alone = spec.family is ModelFamily.GPT and not images
    no_buffers = conditions.fp8_recipe in WITHOUT_USER_BUFFERS
    # GEMMs of other formats fail on user buffers, which are made in bfloat16 (Megatron-LM issue
    # 711): training/initialize.py calls ``initialize_ub`` without a type
    no_buffers |= conditions.precision in (Precision.FP16, Precision.FP32)
    capturable = conditions.capturable and not spec.heterogeneous_layers
    missing = {
        "moe_flex_dispatcher_backend": _FLEX_DEVICE.match(conditions.accelerator) is None,
        "moe_shared_expert_overlap": not spec.moe_shared_expert_intermediate_size,
        # latent attention has GEMMs, and an encoder has lengths, for which no buffers are made
        "tp_comm_overlap": spec.multi_latent_attention or images or stacks or no_buffers,
        "cp_comm_type": spec.multi_latent_attention or images,
        "hierarchical_context_parallel_sizes": spec.multi_latent_attention,
        "offload_modules": not conditions.has_fast_link or not alone,
        "cuda_graph_impl": not capturable or not alone,
        # the whole layer, where nothing in it has shapes of its own
        "cuda_graph_scope": not capturable or not spec.is_moe,
    }
    return (
        conditions.has_engine
        and (conditions.can_state is None or knob.name in conditions.can_state)
        and knob.name not in conditions.closed
        and knob.name not in closed_on(conditions.accelerator)
        and knob.choice not in conditions.fixed
        and not missing.get(knob.name)
        and (spec.is_moe or not knob.of_experts)
    )


def execution_reason(name: str) -> str:
    """Why a plan sets a field of ``Execution``."""
    return _BY_NAME[name].reason


def choices_of_execution() -> tuple[str, ...]:
    """Names by which such choices are fixed and freed."""
    return tuple(dict.fromkeys(knob.choice for knob in KNOBS))
