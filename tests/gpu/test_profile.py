"""Layers timed on a GPU, where there is one.

First of all a profile of its layers, as a file: in the folder that ``NEST_MEGATRON_GPU_PROFILES``
names, to be kept (``recipes/``), or in pytest's own.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.profile import profile_file
from nest_megatron.profile.layer_timer import Measuring, time_block
from nest_megatron.profile.session import this_machine
from tests import catalogue
from tests.cli.runs import run, spawn

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]

MEASURING = Measuring(where=Where.GPU, implementation=Implementation.LOCAL)
SHARD = LayerShard(tensor_model_parallel_size=8, sequence_parallel=True, flash_attention=False)


def test_a_profile_of_the_device_is_written_and_planned_with(tmp_path: Path) -> None:
    folder = Path(os.environ.get("NEST_MEGATRON_GPU_PROFILES", tmp_path))
    done = spawn("profile", "model=llama3_8b", "--max-seconds", "240", "--json", timeout_s=1800)
    assert done.code == 0, done.err
    name = done.json()["profile"]
    out = folder / f"{name}.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    assert run("profiles", "export", name, "--out", str(out)).code == 0
    found = profile_file.read(out)
    assert found.machine.device_name == torch.cuda.get_device_name()
    assert found.blocks() >= {LayerBlock.ATTENTION, LayerBlock.DENSE}
    for timing in found.timings:
        # a layer of 8 billion parameters: over a microsecond, under ten seconds
        assert 1e-6 < timing.forward_s < timing.backward_s < 10, timing


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
