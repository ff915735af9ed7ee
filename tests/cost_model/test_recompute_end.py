"""PyTorch's recomputation ends with the last tensor that a layer's backward pass needs."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.cost_model.model import CostModel
from nest_megatron.layout.recompute import FULL_RECOMPUTE, selective_recompute
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.validation.assess import Predictor
from nest_megatron.validation.job import RowJob, job_of
from nest_megatron.validation.models import ModelBook

ROW = {
    "model": "Llama 3 8B",
    "gpu": "H100-80GB",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "seq": "4096",
    "gbs": "64",
    "mbs": "1",
    "tp": "1",
    "pp": "1",
    "cp": "1",
    "precision": "BF16",
    "framework": "torchtitan",
    "recompute": "full",
}


def _with(job: RowJob, *, early: bool) -> CostModel:
    traits = dataclasses.replace(job.settings.traits, recompute_stops_early=early)
    settings = dataclasses.replace(job.settings, traits=traits)
    return Predictor().model(dataclasses.replace(job, settings=settings))


def _recomputed(job: RowJob, kind: LayerKind, *, early: bool) -> tuple[float, ...]:
    model, grid = _with(job, early=early), job.grids[0]
    shard, places = model.shard(grid), model.places(grid.dims)
    return model.run(kind, places, shard, FULL_RECOMPUTE).recompute


@pytest.mark.parametrize(
    ("framework", "early"),
    [("torchtitan", True), ("Composer FSDP", True), ("NeMo 25.07", False), ("TRL", False)],
)
def test_it_is_pytorchs_checkpoint_that_ends_early(framework: str, early: bool) -> None:
    job = job_of({**ROW, "framework": framework}, ModelBook.load())
    assert job.settings.traits.recompute_stops_early is early


def test_the_last_product_of_a_dense_layer_is_not_repeated() -> None:
    job = job_of(ROW, ModelBook.load())
    whole, early = (_recomputed(job, LayerKind.DENSE, early=each) for each in (False, True))
    # A third of the MLP's three products, which are most of a layer of 4,096 tokens.
    assert 0.7 < sum(early) / sum(whole) < 0.8


def test_the_sum_over_tensor_ranks_is_not_repeated() -> None:
    job = job_of({**ROW, "tp": "8"}, ModelBook.load())
    whole, early = (_recomputed(job, LayerKind.DENSE, early=each) for each in (False, True))
    assert early[1] == pytest.approx(whole[1] * 3 / 4, rel=0.01)


def test_tokens_do_not_come_back_from_experts_a_second_time() -> None:
    row = {**ROW, "model": "Qwen3-30B-A3B", "ep": "8", "framework": "NeMo AutoModel (FSDP2)"}
    job = job_of(row, ModelBook.load())
    whole, early = (_recomputed(job, LayerKind.MOE, early=each) for each in (False, True))
    assert early[3] == pytest.approx(whole[3] / 2)
    assert 0.98 < early[0] / whole[0] < 1  # nor is the residual added


@pytest.mark.parametrize(("modules", "share"), [({"mlp"}, 2 / 3), ({"core_attn"}, 1)])
def test_an_mlp_at_the_end_of_a_layer_ends_early_too(modules: set[str], share: float) -> None:
    job = job_of(ROW, ModelBook.load())
    selective, grid = selective_recompute(modules), job.grids[0]
    runs = []
    for early in (False, True):
        model = _with(job, early=early)
        places, shard = model.places(grid.dims), model.shard(grid)
        runs.append(model.run(LayerKind.DENSE, places, shard, selective))
    assert sum(runs[1].recompute) == pytest.approx(share * sum(runs[0].recompute), rel=0.03)
    assert dataclasses.replace(runs[0], recompute=runs[1].recompute) == runs[1]
