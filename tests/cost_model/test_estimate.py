"""The prediction adds up, and reacts to each choice in the direction that physics says."""

from __future__ import annotations

import dataclasses
import random

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.estimate import (
    TERMS,
    Estimate,
    _waits,
    estimate,
    model_flops_per_sequence,
)
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.pipeline import PipelineProblem, UnitCost, evaluate, timeline
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.stage_problems import stage_problem
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.stage_layout import StagePartition, uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.parameters import active_parameters
from tests import catalogue

FULL = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=1
)
MLP = Recompute(granularity=RecomputeGranularity.SELECTIVE, modules=(RecomputeModule.MLP,))


def predicted(settings: CostSettings | None = None, **changes: object) -> Estimate:
    dims = ParallelDims(
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=int(str(changes.pop("vpp", 1))),
        data_parallel_size=4,
    )
    spec = catalogue.model("llama3_70b")
    grid = PartialLayout(
        dims=dims, global_batch_size=128, micro_batch_size=1, sequence_parallel=True, **changes
    )
    model = CostModel(spec, catalogue.cluster("dgx_h100", 128), settings or CostSettings())
    vpp = dims.virtual_pipeline_model_parallel_size
    return estimate(model, grid.with_stages(uniform_partition(spec, 4, vpp)))


def test_terms_add_up_to_the_iteration() -> None:
    for changes in ({}, {"recompute": FULL}, {"zero": ZeroStage.NONE}, {"vpp": 5}):
        found = predicted(**changes)
        assert tuple(found.terms) == TERMS
        assert sum(found.terms.values()) == pytest.approx(found.iteration_time_s, rel=1e-12)
        assert min(found.terms.values()) >= -1e-9


def test_virtual_stages_may_send_in_the_time_of_their_work() -> None:
    """Without ``overlap_p2p_comm`` each chunk waits for what it sent, as stages without chunks."""
    settings = CostSettings(traits=ExecutionTraits(overlap_p2p_comm=False))
    beside, exposed = predicted(vpp=5), predicted(settings, vpp=5)
    name = "pp_communication"
    assert exposed.iteration_time_s > 1.01 * beside.iteration_time_s
    assert exposed.terms[name] > 5 * beside.terms[name]
    assert sum(exposed.terms.values()) == pytest.approx(exposed.iteration_time_s, rel=1e-12)
    assert predicted(settings) == predicted()


def test_nothing_waits_where_a_rank_is_busy_throughout() -> None:
    """Rank 0 holds a layer less than the others and waits; what limits the step does not."""
    spec = catalogue.model("llama3_1_405b")
    dims = ParallelDims(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=32,
        virtual_pipeline_model_parallel_size=4,
        context_parallel_size=4,
        data_parallel_size=2,
    )
    grid = PartialLayout(
        dims=dims, global_batch_size=4096, micro_batch_size=1, sequence_parallel=True
    )
    cluster = catalogue.cluster("h100_spine_leaf", 1024)
    model = CostModel(spec, cluster, CostSettings(straggler_delay_s=0.0))
    cut = StagePartition(boundaries=(0, 1, *range(2, 128), 128), pipeline_model_parallel_size=32)
    found = estimate(model, grid.with_stages(cut))
    assert found.stages[0].busy_share < 0.8 < 0.99 < found.stages[1].busy_share
    assert found.terms["pipeline_bubble"] < 0.01 * found.iteration_time_s
    assert sum(found.terms.values()) == pytest.approx(found.iteration_time_s, rel=1e-12)


#: Terms of what follows the schedule.
AFTER_SCHEDULE = ("optimizer", "embedding_sync", "stragglers", "host")


@pytest.mark.parametrize("cut", [(0, 20, 40, 60, 82), (0, 27, 45, 63, 82), (0, 4, 30, 56, 82)])
@pytest.mark.parametrize("batch", [4, 32, 128])
def test_the_critical_rank_waits_least(cut: tuple[int, ...], batch: int) -> None:
    """What it waits and its own work are the step, so the bubble is nobody's overestimate."""
    dims = ParallelDims(
        tensor_model_parallel_size=8, pipeline_model_parallel_size=4, data_parallel_size=4
    )
    grid = PartialLayout(
        dims=dims, global_batch_size=batch, micro_batch_size=1, sequence_parallel=True
    )
    model = CostModel(
        catalogue.model("llama3_70b"), catalogue.cluster("dgx_h100", 128), CostSettings()
    )
    found = estimate(
        model, grid.with_stages(StagePartition(boundaries=cut, pipeline_model_parallel_size=4))
    )
    shares = [stage.busy_share for stage in found.stages]
    outside = sum(found.terms[name] for name in AFTER_SCHEDULE)
    waits = [1 - share - outside / found.iteration_time_s for share in shares]
    bubble = found.terms["pipeline_bubble"] / found.iteration_time_s
    assert -1e-9 < bubble <= waits[found.critical_rank] + 1e-9
    own = shares[found.critical_rank] * found.iteration_time_s
    assert sum(
        found.terms[name] for name in ("compute", "tp_communication", "pp_communication")
    ) == pytest.approx(own)


@pytest.mark.parametrize(("p", "m"), [(1, 3), (4, 1), (4, 4), (8, 64)])
def test_equal_stages_have_the_textbook_bubble(p: int, m: int) -> None:
    """``(p - 1)`` forward and backward passes (Narayanan et al. 2021, section 2.2)."""
    problem = PipelineProblem(
        num_stages=p,
        num_virtual=1,
        num_microbatches=m,
        unit_kinds=bytes(p),
        costs=(UnitCost(10, 20, 20, 0, 0, 0, 0, 5, 1, 1, 1, 1, 1),),
        num_layers=p - 1,
        block_num_layers=0,
        send_forward=(0,) * p,
        send_backward=(0,) * p,
        overlap_p2p=False,
        capacity_bytes=99,
        constant=0,
    )
    evaluation = evaluate(problem, tuple(range(p + 1)))
    assert [sum(_waits(evaluation, rank).values()) for rank in range(p)] == [30 * (p - 1)] * p
    assert _waits(evaluation, evaluation.critical_rank)["pipeline_bubble"] == 30 * (p - 1)


def random_problem(seed: int) -> PipelineProblem:
    """Every chunk a unit with costs of its own."""
    rng = random.Random(seed)
    p, v = rng.randint(2, 5), rng.randint(1, 3)
    chunks = p * v
    gathers, reductions = ([rng.randint(-5, 30) for _ in range(chunks)] for _ in range(2))
    return PipelineProblem(
        num_stages=p,
        num_virtual=v,
        num_microbatches=p * rng.randint(1, 4),
        unit_kinds=bytes(range(chunks)),
        costs=tuple(
            UnitCost(
                rng.randint(0, 9), rng.randint(0, 18), 0, 0, gather, 0, reduction, 5, 1, 1, 1, 1, 1
            )
            for gather, reduction in zip(gathers, reductions, strict=True)
        ),
        num_layers=chunks - 1,
        block_num_layers=0,
        send_forward=tuple(rng.randint(0, 5) for _ in range(chunks)),
        send_backward=tuple(rng.randint(0, 5) for _ in range(chunks)),
        overlap_p2p=v > 1,
        capacity_bytes=99,
        constant=0,
    )


@pytest.mark.parametrize("seed", range(60))
def test_what_a_rank_waits_is_its_idle_time_in_the_timeline(seed: int) -> None:
    problem = random_problem(seed)
    evaluation = evaluate(problem, tuple(range(problem.num_chunks + 1)))
    idle = []
    for rank, passes in enumerate(timeline(problem, evaluation)):
        waits, ends = _waits(evaluation, rank), passes[-1].end + evaluation.reductions[rank]
        busy = evaluation.gathers[rank] + sum(timed.end - timed.start for timed in passes)
        idle.append(evaluation.finish - busy - evaluation.reductions[rank])
        assert sum(waits.values()) == idle[rank]
        assert min(waits.values()) >= 0
        gathers = evaluation.gathers[evaluation.path.first_rank]
        reduces_from = evaluation.finish - evaluation.reductions[evaluation.path.last_rank]
        before = max(0, min(gathers, passes[0].start) - evaluation.gathers[rank])
        assert waits["dp_communication"] == before + evaluation.finish - max(ends, reduces_from)
    assert idle[evaluation.critical_rank] == min(idle)


def test_who_waits_for_another_rank_names_what_it_does() -> None:
    """Two ranks, one micro batch: fill, a slow transfer, and the gradients of the first rank."""
    layer = UnitCost(10, 20, 20, 0, 0, 0, 0, 5, 1, 1, 1, 1, 1)
    first = layer._replace(forward=4, backward=6, gather_unhidden=50, reduce_unhidden=70)
    problem = PipelineProblem(
        num_stages=2,
        num_virtual=1,
        num_microbatches=1,
        unit_kinds=bytes([0, 1]),
        costs=(first, layer),
        num_layers=1,
        block_num_layers=0,
        send_forward=(100, 0),
        send_backward=(0, 200),
        overlap_p2p=True,
        capacity_bytes=99,
        constant=3,
    )
    evaluation = evaluate(problem, (0, 1, 2))
    assert evaluation.iteration == 3 + 50 + 4 + 100 + 10 + 20 + 200 + 6 + 70 + 5
    assert evaluation.critical_rank == 0
    assert _waits(evaluation, 0) == {
        "dp_communication": 0,
        "pp_communication": 300,
        "pipeline_bubble": 30,
    }
    assert _waits(evaluation, 1) == {
        "dp_communication": 50 + 70,
        "pp_communication": 300,
        "pipeline_bubble": 4 + 6,
    }


def test_recomputation_trades_time_for_memory() -> None:
    none, some, full = (predicted(recompute=r) for r in (Recompute(), MLP, FULL))
    assert none.iteration_time_s < some.iteration_time_s < full.iteration_time_s
    kept = [found.stages[0].memory_bytes["activations"] for found in (none, some, full)]
    assert kept == sorted(kept, reverse=True)
    assert none.terms["recompute"] == 0 < some.terms["recompute"] < full.terms["recompute"]


def test_full_recomputation_keeps_the_layer_input_alone() -> None:
    found = predicted(recompute=FULL)
    tokens, hidden, live = 8192 // 8, 8192, 4
    per_layer = tokens * hidden * 2
    assert found.stages[0].memory_bytes["activations"] == live * (20 * per_layer + 8192 * 8)


def test_zero_divides_the_optimizer_states() -> None:
    whole, divided = predicted(zero=ZeroStage.NONE), predicted(zero=ZeroStage.OPTIMIZER)
    assert (
        whole.stages[1].memory_bytes["optimizer"] == 4 * divided.stages[1].memory_bytes["optimizer"]
    )
    assert whole.stages[1].memory_bytes["weights"] == divided.stages[1].memory_bytes["weights"]


def test_virtual_stages_shrink_the_bubble() -> None:
    """Not to a fifth: what the last rank's larger gather makes the others wait stays."""
    assert predicted(vpp=5).terms["pipeline_bubble"] < predicted().terms["pipeline_bubble"] / 2


def test_first_stage_keeps_most_micro_batches() -> None:
    kept = [stage.memory_bytes["activations"] for stage in predicted().stages[:-1]]
    assert kept == sorted(kept, reverse=True)


def test_fp8_is_faster_and_keeps_copies() -> None:
    wide, narrow = predicted(), predicted(CostSettings(precision=Precision.FP8))
    assert narrow.terms["compute"] < 0.75 * wide.terms["compute"]
    assert narrow.stages[1].memory_bytes["weights"] > wide.stages[1].memory_bytes["weights"]


def test_a_format_that_the_gpu_lacks_is_refused() -> None:
    model = CostModel(
        catalogue.model("llama2_7b"),
        catalogue.cluster("v100_spine_leaf", 8),
        CostSettings(precision=Precision.BF16),
    )
    grid = PartialLayout(
        dims=ParallelDims(data_parallel_size=8),
        global_batch_size=8,
        micro_batch_size=1,
        sequence_parallel=False,
    )
    with pytest.raises(UserInputError, match="fp16"):
        stage_problem(model, grid)


@pytest.mark.parametrize("name", ["llama3_70b", "gpt3_175b", "mixtral_8x7b", "deepseek_v3"])
def test_model_flops_are_six_a_parameter_and_token(name: str) -> None:
    """And attention on top, which the rule of thumb leaves out (embedding rows do no work)."""
    spec = dataclasses.replace(catalogue.model(name), seq_length=1024)
    model = CostModel(spec, catalogue.cluster("dgx_h100", 8), CostSettings())
    rule = 6 * (active_parameters(spec) - spec.vocab_size * spec.hidden_size)
    assert 1.0 < model_flops_per_sequence(model) / spec.seq_length / rule < 1.12


def moe(**changes: float) -> Estimate:
    spec = catalogue.model("mixtral_8x7b")
    dims = ParallelDims(
        pipeline_model_parallel_size=2, data_parallel_size=32, expert_model_parallel_size=8
    )
    grid = PartialLayout(
        dims=dims, global_batch_size=256, micro_batch_size=1, sequence_parallel=False
    )
    model = CostModel(spec, catalogue.cluster("dgx_h100", 64), CostSettings(**changes))
    return estimate(model, grid.with_stages(uniform_partition(spec, 2)))


def test_imbalance_costs_compute_exchange_and_memory() -> None:
    even, uneven = moe(), moe(expert_imbalance=2.0)
    for term in ("compute", "ep_communication"):
        assert uneven.terms[term] > 1.2 * even.terms[term]
    assert (
        uneven.stages[0].memory_bytes["activations"]
        > 1.2 * even.stages[0].memory_bytes["activations"]
    )


def test_dropout_keeps_its_masks() -> None:
    spec = dataclasses.replace(catalogue.model("llama3_8b"), hidden_dropout=0.1)
    cluster = catalogue.cluster("dgx_h100", 8)
    grid = PartialLayout(
        dims=ParallelDims(data_parallel_size=8),
        global_batch_size=8,
        micro_batch_size=1,
        sequence_parallel=False,
    )
    with_masks, without = (
        estimate(CostModel(s, cluster, CostSettings()), grid.with_stages(uniform_partition(s, 1)))
        for s in (spec, catalogue.model("llama3_8b"))
    )
    extra = (
        with_masks.stages[0].memory_bytes["activations"]
        - without.stages[0].memory_bytes["activations"]
    )
    assert extra == 32 * 2 * 8192 * 4096


def test_without_flash_attention_the_probabilities_are_kept() -> None:
    spec, cluster = catalogue.model("llama2_7b"), catalogue.cluster("v100_spine_leaf", 8)
    assert not cluster.accelerator.flash_attention
    fused = dataclasses.replace(
        cluster, accelerator=dataclasses.replace(cluster.accelerator, flash_attention=True)
    )
    grid = PartialLayout(
        dims=ParallelDims(tensor_model_parallel_size=8),
        global_batch_size=1,
        micro_batch_size=1,
        sequence_parallel=True,
    )
    settings = CostSettings(precision=Precision.FP16)
    kept, spared = (
        estimate(CostModel(spec, c, settings), grid.with_stages(uniform_partition(spec, 1)))
        for c in (cluster, fused)
    )
    more = kept.stages[0].memory_bytes["activations"] - spared.stages[0].memory_bytes["activations"]
    assert more == pytest.approx(32 * 4096 * 4096 * 4 * 2, rel=0.01)
