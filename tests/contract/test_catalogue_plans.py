"""Catalogue models, planned on real clusters: megatron-core must take the plan as it is.

For each plan: Megatron's rules hold, ``TransformerConfig`` accepts it, the process groups are those
that ``rank_order`` says, and every virtual stage of every pipeline rank, built on the meta device,
has the plan's layers and exactly the parameters that the memory model charges to that rank.
"""

from __future__ import annotations

from functools import cache

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.layout import rulebook
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.planner import Request, plan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.contract import megatron_model

#: Model, cluster, GPUs, global batch, degrees held fixed so that pipelines and experts are
#: exercised.
JOBS: tuple[tuple[str, str, int, int, dict[str, int]], ...] = (
    ("bert_large", "dgx_a100", 16, 256, {}),
    ("bert_large", "v100_spine_leaf", 16, 256, {"pipeline_model_parallel_size": 4}),
    ("t5_220m", "v100_spine_leaf", 16, 256, {}),
    ("t5_11b", "dgx_h100", 64, 512, {}),
    ("t5_11b", "dgx_a100", 16, 128, {"tensor_model_parallel_size": 4}),
    ("gpt3_175b", "dgx_a100", 1024, 1536, {}),
    ("gpt3_175b", "h100_spine_leaf", 512, 2048, {}),
    ("gpt3_35b", "h100_spine_leaf", 128, 1024, {}),
    ("gpt3_35b", "v100_spine_leaf", 128, 1024, {}),
    ("mixtral_scaled", "v100_spine_leaf", 16, 256, {"expert_model_parallel_size": 4}),
    ("mixtral_scaled", "dgx_h100", 8, 128, {"pipeline_model_parallel_size": 2}),
    ("llama2_7b", "tpuv4_fat_tree", 64, 512, {}),
    ("llama2_7b", "dgx_a100", 32, 256, {"pipeline_model_parallel_size": 4}),
    ("llama3_8b", "dgx_h100", 64, 512, {}),
    ("llama3_8b", "torus_3d", 64, 512, {}),
    ("llama3_70b", "h100_spine_leaf", 1024, 4096, {}),
    ("llama3_70b", "dgx_h100", 64, 128, {"context_parallel_size": 2}),
    ("llama3_1_405b", "dgx_h100", 1024, 1024, {}),
    ("llama3_1_405b", "gb200_nvl72", 576, 1152, {}),
    ("mixtral_8x7b", "dgx_h100", 64, 256, {}),
    ("mixtral_8x7b", "h200", 64, 256, {"pipeline_model_parallel_size": 4}),
    ("mixtral_8x22b", "dgx_h100", 256, 1024, {}),
    ("mixtral_8x22b", "b200", 128, 512, {"expert_tensor_parallel_size": 2}),
    ("deepseek_v3", "dgx_h100", 1024, 8192, {}),
    ("deepseek_v3", "gb200_nvl72", 576, 4608, {"virtual_pipeline_model_parallel_size": 2}),
    ("qwen3_30b_a3b", "dgx_h100", 16, 512, {}),
    ("qwen3_30b_a3b", "dgx_a100", 64, 512, {"pipeline_model_parallel_size": 4}),
    ("qwen3_235b_a22b", "dgx_h100", 256, 2048, {}),
    ("qwen3_235b_a22b", "b200", 128, 1024, {}),
    ("gpt_oss_120b", "dgx_h100", 64, 512, {}),
    ("gpt_oss_120b", "b200", 64, 512, {"pipeline_model_parallel_size": 4}),
    ("nemotron4_340b", "dgx_h100", 1024, 2048, {}),
    ("nemotron4_340b", "b200", 256, 1024, {}),
    ("mpt_7b", "dgx_a100", 32, 256, {}),
    ("mpt_7b", "dgx_h100", 16, 256, {"pipeline_model_parallel_size": 4}),
    ("qwen2_5_7b", "dgx_h100", 32, 256, {}),
    ("qwen2_5_7b", "dgx_a100", 32, 256, {"tensor_model_parallel_size": 4}),
    ("llama33_nemotron_super_49b", "dgx_h100", 64, 256, {"pipeline_model_parallel_size": 4}),
    ("llama31_nemotron_ultra_253b", "dgx_h100", 256, 256, {}),
    ("deepseek_v2_lite", "dgx_h100", 16, 256, {}),
    ("deepseek_v2_lite", "dgx_a100", 32, 256, {"context_parallel_size": 1}),
)


@cache
def planned(index: int) -> ParallelPlan:
    model, cluster, num_gpus, batch, fixed = JOBS[index]
    found = plan(
        Request(
            spec=catalogue.model(model),
            cluster=catalogue.cluster(cluster, num_gpus),
            global_batch_size=batch,
            settings=CostSettings(precision=precision_of(cluster)),
            space=SearchSpace(fixed=fixed),
        )
    )
    assert isinstance(found, ParallelPlan), found
    return found


def precision_of(cluster: str) -> Precision:
    return Precision.FP16 if cluster.startswith("v100") else Precision.BF16


def _name(index: int) -> str:
    model, cluster, num_gpus, _, fixed = JOBS[index]
    return "-".join([model, cluster, str(num_gpus), *(f"{k}={v}" for k, v in fixed.items())])


def _marked(index: int) -> object:
    """Searches of many GPUs take seconds each."""
    is_large = JOBS[index][2] > 64
    return pytest.param(index, id=_name(index), marks=pytest.mark.slow if is_large else ())


every_job = pytest.mark.parametrize("index", [_marked(index) for index in range(len(JOBS))])


def test_every_core_model_is_here_twice() -> None:
    for name in catalogue.CORE:
        assert len({job[1] for job in JOBS if job[0] == name}) >= 2, name


@every_job
def test_the_plan_is_proven_best_and_fits(index: int) -> None:
    found = planned(index)
    assert found.search.certificate in ("optimal", "chosen")
    assert found.predicted.fits
    assert found.predicted.peak_memory_bytes <= found.predicted.capacity_bytes
    assert sum(found.predicted.terms.values()) == pytest.approx(found.predicted.iteration_time_s)


@every_job
def test_every_rule_of_megatron_holds(index: int) -> None:
    assert not tuple(rulebook.check(launch_request(planned(index))))


@every_job
def test_megatron_core_accepts_configuration_and_groups(index: int) -> None:
    found = planned(index)
    grid = found.layout
    config = megatron_model.config_of(
        found.model,
        grid.dims,
        found.layout.partition,
        sequence_parallel=grid.sequence_parallel,
        recompute=grid.recompute,
        moe_grouped_gemm=found.model.is_moe,
    )
    assert config.num_layers == found.model.num_layers
    world = grid.dims.world_size
    megatron_model.check_groups(found.model, grid.dims, sorted({0, world // 3, world - 1}))


@every_job
def test_megatron_core_builds_the_planned_stages(index: int) -> None:
    found = planned(index)
    grid, partition = found.layout, found.layout.partition
    settings = CostSettings(precision=found.train.precision)
    cost_model = CostModel(found.model, found.cluster, settings)
    sequence, kinds = cost_model.unit_kinds(grid)
    stages = megatron_model.build_stages(
        found.model, grid.dims, partition, sequence_parallel=grid.sequence_parallel
    )
    layer_kinds = found.model.layer_kinds()
    for rank, chunks in enumerate(stages):
        charged = ParameterCount()
        for units, built in zip(partition.chunks_of_rank(rank), chunks, strict=True):
            layers = [u for u in units if layer_kinds[u].is_layer]
            assert list(built.layer_numbers) == layers
            expected = sum((kinds[sequence[u]].parameters for u in units), ParameterCount())
            assert (built.dense_parameters, built.expert_parameters) == (
                expected.dense,
                expected.expert,
            ), f"rank {rank}"
            charged += expected
        assert charged.total == found.predicted.stages[rank].parameters
