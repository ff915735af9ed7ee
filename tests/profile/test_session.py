"""Which blocks of a model are timed, and what is said of the others."""

from __future__ import annotations

import math
import time

import pytest

from nest_megatron.megatron_core.stage import Where
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock
from nest_megatron.model.shard import LayerShard
from nest_megatron.profile import session
from nest_megatron.profile.layer_timer import Measuring
from nest_megatron.profile.records import Timing
from tests import catalogue
from tests.profile.profiles import timing


def test_a_block_that_is_not_built_here_is_left_out_with_a_word() -> None:
    spec = catalogue.model("nemotron_h_8b")
    tasks = [t for t in session.tasks_of(spec, [LayerShard()]) if t.block is LayerBlock.MAMBA]
    measuring = Measuring(where=Where.CPU, implementation=Implementation.LOCAL)
    (found,) = session.run(spec, tasks, measuring, until=time.monotonic() + 60)
    assert isinstance(found, session.Skipped)
    assert "analytic" in found.reason
    assert str(found.task) == "mamba at tp 1, micro batch 1"
    assert not found.is_too_large


def test_a_shape_that_megatron_refuses_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(spec: object, block: LayerBlock, *_: object) -> Timing:
        if block is LayerBlock.DENSE:
            raise AssertionError("no such kernel\nand why")
        return timing(block)

    monkeypatch.setattr(session, "time_block", refuses)
    tasks = session.tasks_of(catalogue.model("llama3_8b"), [LayerShard()])
    measuring = Measuring(where=Where.CPU, implementation=Implementation.LOCAL)
    found = list(session.run(catalogue.model("llama3_8b"), tasks, measuring, until=math.inf))
    assert len(found) == len(tasks)
    (refused,) = (one for one in found if isinstance(one, session.Skipped))
    assert (refused.task.block, refused.reason) == (
        LayerBlock.DENSE,
        "AssertionError: no such kernel",
    )


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
