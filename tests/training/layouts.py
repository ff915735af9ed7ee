"""Tiny models, and the layouts that the planner makes of them on one, two and four GPUs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache

from nest_megatron.cluster.records import Cluster
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, plan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue

#: Sequences of one step: eight micro batches on one rank, two on each of four replicas.
GLOBAL_BATCH_SIZE = 8
#: Adam's first step depends on the signs of gradients alone; later ones on their sizes.
STEPS = 3

#: Grouped queries and tied embeddings: the head's copy lies on another stage than the embedding.
DENSE = TransformerSpec(
    name="tiny_dense",
    num_layers=8,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    seq_length=16,
    vocab_size=512,
    untie_embeddings_and_output_weights=False,
)
#: One dense layer, then experts beside a shared expert.
EXPERTS = dataclasses.replace(
    DENSE,
    name="tiny_experts",
    num_layers=4,
    untie_embeddings_and_output_weights=True,
    num_experts=4,
    moe_layer_pattern=(0, 1, 1, 1),
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
)

UNIFORM = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=1
)
BLOCK = Recompute(granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=2)


def _selective(*modules: RecomputeModule) -> Recompute:
    return Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=modules)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is asked of the planner; the cut into stages is left to it."""

    name: str
    spec: TransformerSpec
    num_gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    micro: int = 1
    zero: ZeroStage = ZeroStage.NONE
    recompute: Recompute = NO_RECOMPUTE
    rank_order: RankOrder = RankOrder.TP_CP_EP_DP_PP

    @property
    def is_reference(self) -> bool:
        """Whether this is the one-rank run that others are compared with."""
        return self.num_gpus == 1


SHARDED = ZeroStage.OPTIMIZER
SECOND_ORDER = RankOrder.TP_CP_EP_PP_DP

#: The one-rank runs come first: the others are compared with what they leave.
LAYOUTS = (
    Layout(name="dense", spec=DENSE, num_gpus=1),
    Layout(name="experts", spec=EXPERTS, num_gpus=1),
    # two ranks
    Layout(name="dense dp2", spec=DENSE, num_gpus=2),
    Layout(name="dense dp2 zero1", spec=DENSE, num_gpus=2, zero=SHARDED),
    Layout(name="dense tp2", spec=DENSE, num_gpus=2, tp=2),
    Layout(name="dense pp2", spec=DENSE, num_gpus=2, pp=2),
    Layout(name="dense pp2 vpp2", spec=DENSE, num_gpus=2, pp=2, vpp=2),
    Layout(name="dense dp2 zero1 uniform", spec=DENSE, num_gpus=2, zero=SHARDED, recompute=UNIFORM),
    Layout(name="dense pp2 block", spec=DENSE, num_gpus=2, pp=2, recompute=BLOCK),
    Layout(
        name="dense tp2 core_attn",
        spec=DENSE,
        num_gpus=2,
        tp=2,
        recompute=_selective(RecomputeModule.CORE_ATTN),
    ),
    Layout(name="experts ep2", spec=EXPERTS, num_gpus=2, ep=2),
    Layout(name="experts ep2 tp2", spec=EXPERTS, num_gpus=2, ep=2, tp=2),
    Layout(name="experts pp2 vpp2", spec=EXPERTS, num_gpus=2, pp=2, vpp=2),
    Layout(
        name="experts ep2 moe",
        spec=EXPERTS,
        num_gpus=2,
        ep=2,
        zero=SHARDED,
        recompute=_selective(RecomputeModule.MOE),
    ),
    # four ranks
    Layout(name="dense tp4 micro4", spec=DENSE, num_gpus=4, tp=4, micro=4),
    Layout(name="dense pp4", spec=DENSE, num_gpus=4, pp=4),
    Layout(name="dense tp2 pp2", spec=DENSE, num_gpus=4, tp=2, pp=2),
    Layout(name="dense tp2 dp2 zero1", spec=DENSE, num_gpus=4, tp=2, zero=SHARDED),
    Layout(name="dense pp2 dp2", spec=DENSE, num_gpus=4, pp=2),
    Layout(
        name="dense pp2 dp2 zero1 second order",
        spec=DENSE,
        num_gpus=4,
        pp=2,
        zero=SHARDED,
        rank_order=SECOND_ORDER,
    ),
    Layout(name="dense pp2 vpp2 dp2 zero1", spec=DENSE, num_gpus=4, pp=2, vpp=2, zero=SHARDED),
    Layout(name="experts pp4", spec=EXPERTS, num_gpus=4, pp=4),
    Layout(name="experts ep2 dp4 zero1", spec=EXPERTS, num_gpus=4, ep=2, zero=SHARDED),
    Layout(name="experts ep4 tp2 dp2", spec=EXPERTS, num_gpus=4, ep=4, tp=2),
    Layout(name="experts ep2 pp2 zero1", spec=EXPERTS, num_gpus=4, ep=2, pp=2, zero=SHARDED),
)


@cache
def planned(layout: Layout) -> ParallelPlan:
    """What the planner makes of a layout."""
    found = plan(
        Request(
            spec=layout.spec,
            cluster=_cluster(layout.num_gpus),
            global_batch_size=GLOBAL_BATCH_SIZE,
            max_oom_chance=0.5,
            tie_percent=0.0,
            space=SearchSpace(
                fixed={
                    "tensor_model_parallel_size": layout.tp,
                    "pipeline_model_parallel_size": layout.pp,
                    "virtual_pipeline_model_parallel_size": layout.vpp,
                    "context_parallel_size": 1,
                    "expert_model_parallel_size": layout.ep,
                    "expert_tensor_parallel_size": 1,
                    "micro_batch_size": layout.micro,
                },
                zero_stages=(layout.zero,),
                recompute=layout.recompute,
                rank_orders=(layout.rank_order,),
            ),
        )
    )
    assert isinstance(found, ParallelPlan), found
    return found


def _cluster(num_gpus: int) -> Cluster:
    """A node whose kernels take no time to start.

    Otherwise that time would hide the work at these widths, all layers would look alike, and the
    planner would cut every pipeline evenly.
    """
    node = catalogue.cluster("dgx_h100", num_gpus)
    accelerator = dataclasses.replace(node.accelerator, kernel_floor_s=0.0)
    return dataclasses.replace(node, accelerator=accelerator)
