"""Which blocks of a model are timed, and what is said of the others."""

from __future__ import annotations

import time

from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.implementation import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.profile import session
from nest_megatron.profile.layer_timer import Measuring
from tests import catalogue


def test_a_block_that_is_not_built_here_is_left_out_with_a_word() -> None:
    spec, said = catalogue.model("nemotron_h_8b"), {}
    tasks = [t for t in session.tasks_of(spec, [LayerShard()]) if t.block is LayerBlock.MAMBA]
    measuring = Measuring(where=Where.CPU, implementation=Implementation.LOCAL)
    timings = session.run(
        spec,
        tasks,
        measuring,
        until=time.monotonic() + 60,
        on_skip=lambda task, why: said.update({task.block: why}),
    )
    assert tasks
    assert not list(timings)
    assert "analytic" in said[LayerBlock.MAMBA]


def test_shapes_that_all_layouts_have_tell_none_apart() -> None:
    spec = catalogue.model("llama3_8b")
    two, four = (LayerShard(tensor_model_parallel_size=tp, sequence_parallel=True) for tp in (2, 4))
    assert session.telling_apart(spec, [two, two]) == ()
    assert session.telling_apart(spec, []) == ()
    found = session.telling_apart(spec, [four, two])
    assert found == session.tasks_of(spec, [four, two])
    moe = catalogue.model("mixtral_8x7b")
    near, far = (LayerShard(expert_model_parallel_size=ep) for ep in (2, 8))
    apart = session.telling_apart(moe, [near, far])
    assert {task.block for task in apart} == {LayerBlock.EXPERTS}
    assert len(apart) == 2
