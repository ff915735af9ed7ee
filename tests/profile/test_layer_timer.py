"""Layer blocks, timed for real on this CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile import layer_timer
from nest_megatron.profile.layer_timer import Measuring, time_block
from nest_megatron.profile.records import Timing
from nest_megatron.profile.session import Skipped, run, share_of, tasks_of
from tests import catalogue
from tests.megatron_core.local_layers import local_layer

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = pytest.mark.megatron_lm

QUICK = Measuring(
    where=Where.CPU,
    implementation=Implementation.LOCAL,
    warm_up=1,
    repetitions=3,
    least=2,
    max_seconds=1.0,
)


def small(name: str, **changes: Any) -> TransformerSpec:
    """A model of the catalogue, made small."""
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "seq_length": 64,
        "vocab_size": 512,
    }
    return dataclasses.replace(catalogue.model(name), **(sizes | changes))


DENSE = small("llama3_8b", num_query_groups=2, kv_channels=None)
EXPERTS = small(
    "deepseek_v3",
    num_experts=8,
    moe_layer_pattern=(0, 1),
    moe_router_topk=2,
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    num_query_groups=None,
    kv_channels=None,
)


def shard(tp: int = 1, ep: int = 1, micro_batch_size: int = 1) -> LayerShard:
    return LayerShard(
        tensor_model_parallel_size=tp,
        expert_model_parallel_size=ep,
        micro_batch_size=micro_batch_size,
        sequence_parallel=tp > 1,
        flash_attention=False,
    )


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 4)])
@pytest.mark.parametrize("spec", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_every_block_is_timed_and_holds_its_weights(
    spec: TransformerSpec, tp: int, ep: int
) -> None:
    ep = ep if spec.is_moe else 1
    timings = {block: time_block(spec, block, shard(tp, ep), QUICK) for block in spec.blocks}
    assert all(t.forward_s > 0 and t.backward_s > 0 for t in timings.values())
    assert all(t.recompute_s > t.forward_s for t in timings.values())
    held = {block: timing.parameters for block, timing in timings.items()}
    kinds = {LayerKind.DENSE: LayerBlock.DENSE, LayerKind.MOE: LayerBlock.EXPERTS}
    for kind, block in kinds.items():
        if kind in spec.layer_kinds():
            whole = local_layer(spec, kind, shard(tp, ep)).parameters
            assert held[LayerBlock.ATTENTION] + held[block] == whole.total, kind
    counts = dict(
        zip(spec.layer_kinds(), unit_parameters(spec, tp, ep, 1, single_stage=True), strict=True)
    )
    assert held[LayerBlock.EMBEDDING] == counts[LayerKind.EMBEDDING].total


def test_experts_are_as_many_as_their_ranks_hold() -> None:
    spec = EXPERTS
    few = time_block(spec, LayerBlock.EXPERTS, shard(1, 4), QUICK).parameters
    many = time_block(spec, LayerBlock.EXPERTS, shard(1, 1), QUICK).parameters
    assert many - few == 6 * 3 * spec.hidden_size * 32


def test_nothing_waits_for_the_device_inside_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Marks are only put down while passes run, and are read together afterwards."""
    order: list[str] = []

    class Watch(layer_timer._CpuWatch):
        def mark(self) -> float:
            order.append("mark")
            return super().mark()

        def read(self, marks: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
            order.append(f"read {len(marks)}")
            return super().read(marks)

    monkeypatch.setattr(layer_timer, "_CpuWatch", Watch)
    never_steady = dataclasses.replace(
        QUICK, steady=-1.0, repetitions=5, least=5, warm_up=0, max_seconds=600.0
    )
    time_block(DENSE, LayerBlock.DENSE, shard(), never_steady)
    passes = order[: order.index("read 5")]
    assert passes == ["mark"] * (5 * 4)


def test_tasks_are_shared_out_and_each_shape_is_timed_once() -> None:
    shards = [shard(2), shard(1), shard(2)]
    tasks = tasks_of(DENSE, shards)
    assert len(tasks) == 2 * len(DENSE.blocks)
    assert {task.shard for task in tasks[: len(DENSE.blocks)]} == {shard(2)}
    shares = [share_of(tasks, rank, 3) for rank in range(3)]
    assert sorted(map(repr, sum(shares, ()))) == sorted(map(repr, tasks))


def test_attention_is_not_timed_under_context_parallelism() -> None:
    apart = dataclasses.replace(shard(), context_parallel_size=2)
    assert LayerBlock.ATTENTION not in {task.block for task in tasks_of(DENSE, [apart])}


def test_what_does_not_fit_is_told_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real = layer_timer.time_block

    def full(spec: Any, block: LayerBlock, *rest: Any) -> Any:
        if block is LayerBlock.DENSE:
            raise MemoryError("the device is full")
        return real(spec, block, *rest)

    monkeypatch.setattr("nest_megatron.profile.session.time_block", full)
    found = list(run(DENSE, tasks_of(DENSE, [shard()]), QUICK, until=float("inf")))
    (told,) = (each for each in found if isinstance(each, Skipped))
    timings = [each for each in found if isinstance(each, Timing)]
    assert (told.task.block, told.is_too_large) == (LayerBlock.DENSE, True)
    assert LayerBlock.DENSE not in {timing.block for timing in timings}
    assert len(timings) == len(DENSE.blocks) - 1


def test_the_process_is_left_as_it_was() -> None:
    before = (torch.cuda.current_device, torch.nn.functional.dropout)
    time_block(DENSE, LayerBlock.ATTENTION, shard(2), QUICK)
    assert (torch.cuda.current_device, torch.nn.functional.dropout) == before
    assert not torch.distributed.is_initialized()
