"""Plans written by hand, handed to megatron-core: it must accept them and build our stages."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest

from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
)
from nest_megatron.layout.rulebook import is_legal_grid
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, uniform_partition
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.spec import TransformerSpec
from tests.contract import megatron_model
from tests.contract.hand_models import BERT, DEEPSEEK, GPT_OSS, LLAMA, MIXTRAL, NEMOTRON, T5


@dataclass(frozen=True, slots=True, kw_only=True)
class HandPlan:
    """One plan; a layout of ``None`` means Megatron's own even split."""

    name: str
    spec: TransformerSpec
    dims: ParallelDims
    layout: str | None = None
    recompute: Recompute = NO_RECOMPUTE

    def partition(self) -> StagePartition:
        pp = self.dims.pipeline_model_parallel_size
        if self.layout is None:
            return uniform_partition(self.spec, pp, self.dims.virtual_pipeline_model_parallel_size)
        return parse_layout(self.layout, self.spec, pp)

    @property
    def sequence_parallel(self) -> bool:
        return self.dims.tensor_model_parallel_size > 1


def _dims(
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    *,
    vpp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    order: RankOrder = RankOrder.TP_CP_EP_DP_PP,
) -> ParallelDims:
    return ParallelDims(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
        data_parallel_size=dp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        rank_order=order,
    )


PLANS = [
    HandPlan(name="llama even", spec=LLAMA, dims=_dims(8, 8, 16)),
    HandPlan(
        name="llama uneven, recomputed",
        spec=LLAMA,
        dims=_dims(8, 4, 8, cp=4),
        layout="Et*19|(t*21|)*2t*19L",
        recompute=Recompute(
            granularity=RecomputeGranularity.FULL, method=RecomputeMethod.BLOCK, num_layers=2
        ),
    ),
    HandPlan(name="llama virtual", spec=LLAMA, dims=_dims(4, 4, 2, vpp=5)),
    HandPlan(
        name="llama second rank order",
        spec=LLAMA,
        dims=_dims(4, 4, 4, cp=2, order=RankOrder.TP_CP_EP_PP_DP),
    ),
    HandPlan(name="llama more ranks than groups", spec=LLAMA, dims=_dims(16, 2, 1)),
    HandPlan(name="mixtral", spec=MIXTRAL, dims=_dims(2, 4, 8, ep=8)),
    HandPlan(name="mixtral expert tensor", spec=MIXTRAL, dims=_dims(4, 2, 4, ep=4, etp=2)),
    HandPlan(
        name="mixtral second rank order",
        spec=MIXTRAL,
        dims=_dims(4, 2, 4, ep=4, order=RankOrder.TP_CP_EP_PP_DP),
    ),
    HandPlan(
        name="deepseek",
        spec=DEEPSEEK,
        dims=_dims(1, 16, 64, ep=64),
        layout="Et*4|(t*4|)*14tmL",
    ),
    HandPlan(
        name="deepseek virtual, MTP alone",
        spec=DEEPSEEK,
        dims=_dims(2, 8, 16, vpp=2, ep=32),
        layout="Ettt|(t*4|)*12t*5|t*5|mL",
    ),
    HandPlan(name="gpt-oss", spec=GPT_OSS, dims=_dims(2, 4, 8, ep=8)),
    HandPlan(name="nemotron", spec=NEMOTRON, dims=_dims(8, 4, 2)),
    HandPlan(name="t5", spec=T5, dims=_dims(4, 1, 2)),
    HandPlan(name="bert", spec=BERT, dims=_dims(2, 4, 4), layout="Et*6|(t*6|)*2t*6L"),
    HandPlan(
        name="bert virtual, uneven",
        spec=BERT,
        dims=_dims(1, 2, 4, vpp=2),
        layout="Et*5|t*7|t*7|t*5L",
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_megatron_accepts_the_configuration(plan: HandPlan) -> None:
    assert is_legal_grid(plan.spec, plan.dims, sequence_parallel=plan.sequence_parallel)
    config = megatron_model.config_of(
        plan.spec,
        plan.dims,
        plan.partition(),
        sequence_parallel=plan.sequence_parallel,
        recompute=plan.recompute,
    )
    assert config.num_layers == plan.spec.num_layers


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_rank_groups_are_megatrons(plan: HandPlan) -> None:
    world = plan.dims.world_size
    ranks = sorted({0, world // 3, world // 2 + 1, world - 1})
    megatron_model.check_groups(plan.spec, plan.dims, ranks)


@pytest.mark.parametrize(
    ("spec", "dims"),
    [
        (LLAMA, _dims(3, 3, 2, cp=2)),
        (LLAMA, _dims(3, 5, 2, cp=2, order=RankOrder.TP_CP_EP_PP_DP)),
        (MIXTRAL, _dims(6, 2, 4, cp=2, ep=12, etp=2)),
        (MIXTRAL, _dims(2, 3, 5, cp=3, ep=6, etp=1, order=RankOrder.TP_CP_EP_PP_DP)),
        (MIXTRAL, _dims(1, 1, 6, ep=3, order=RankOrder.TP_CP_EP_PP_DP)),
    ],
)
def test_odd_grids_make_megatrons_groups(spec: TransformerSpec, dims: ParallelDims) -> None:
    megatron_model.check_groups(spec, dims, range(0, dims.world_size, 7))


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_every_stage_is_built_as_planned(plan: HandPlan) -> None:
    partition, kinds = plan.partition(), plan.spec.layer_kinds()
    stages = megatron_model.build_stages(
        plan.spec, plan.dims, partition, sequence_parallel=plan.sequence_parallel
    )
    for rank, chunks in enumerate(stages):
        for units, built in zip(partition.chunks_of_rank(rank), chunks, strict=True):
            inside = range(1, 1 + plan.spec.num_stacked_layers)
            assert built.layer_numbers == tuple(unit for unit in units if unit in inside)
            held = [kinds[unit] for unit in units]
            assert built.has_embedding == (LayerKind.EMBEDDING in held)
            assert built.has_head == (LayerKind.HEAD in held)
            mtp = plan.spec.num_mtp_layers if LayerKind.MTP in held else 0
            assert built.num_mtp_layers == mtp
            assert (built.expert_parameters > 0) == (LayerKind.MOE in held or mtp > 0)


def test_parameters_of_a_known_model() -> None:
    """The 70-billion Llama over 8 x 8: figures of facts/megatron.md, section 2.3."""
    spec = dataclasses.replace(LLAMA, make_vocab_size_divisible_by=1)
    stages = megatron_model.build_stages(
        spec, _dims(8, 8, 16), uniform_partition(spec, 8), sequence_parallel=True, stages=(0, 1, 7)
    )
    counts = [chunk.dense_parameters for stage in stages for chunk in stage]
    assert counts == [1_201_045_504, 1_069_711_360, 1_201_053_696]
