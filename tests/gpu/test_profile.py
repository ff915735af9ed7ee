"""Layers timed on a GPU, where there is one; ``benchmarks/gpu/run.sh`` measures more."""

from __future__ import annotations

import pytest

from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.profile.layer_timer import Measuring, time_block
from nest_megatron.profile.session import this_machine
from tests import catalogue

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

MEASURING = Measuring(where=Where.GPU, implementation=Implementation.LOCAL)
SHARD = LayerShard(tensor_model_parallel_size=8, sequence_parallel=True, flash_attention=False)


@pytest.mark.parametrize(
    "block", [LayerBlock.ATTENTION, LayerBlock.DENSE, LayerBlock.EMBEDDING, LayerBlock.HEAD]
)
def test_two_runs_agree(block: LayerBlock) -> None:
    spec = catalogue.model("llama3_8b")
    first, second = (time_block(spec, block, SHARD, MEASURING) for _ in range(2))
    assert first.forward_s == pytest.approx(second.forward_s, rel=0.03)
    assert first.backward_s == pytest.approx(second.backward_s, rel=0.03)
    assert first.peak_memory_bytes > 0


def test_the_machine_is_known() -> None:
    machine = this_machine(Where.GPU, Implementation.LOCAL)
    assert not machine.is_cpu
    assert machine.memory_bytes > 1 << 30
