"""What FSDP has whole is what its own buffers hold, on a CPU, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.cost_model.fsdp_memory import RankParameters, unsharded_bytes
from nest_megatron.cost_model.memory import static_bytes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.layout.zero import ZERO_STAGES, ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from tests.megatron_core.fsdp_buffers import BUCKET, LAYER, LAYERS, OUTSIDE, RANKS, UNIT

pytestmark = pytest.mark.megatron_lm
Held = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def held() -> Held:
    """What the frameworks held, by strategy."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.megatron_core.fsdp_buffers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: Held = json.loads(done.stdout.splitlines()[-1])
    return found


def settings(**traits: object) -> CostSettings:
    flags = {"communication_unit_size": UNIT, "ddp_bucket_size": BUCKET, **traits}
    return CostSettings(traits=ExecutionTraits(**flags))  # type: ignore[arg-type]


def whole(
    zero: ZeroStage, *, in_layer: bool = True, outside: int = OUTSIDE, **traits: object
) -> int:
    """What is whole when a layer is at work, or the head."""
    layer = ParameterCount(LAYER)
    held = ParameterCount(LAYERS * LAYER + 2 * OUTSIDE)
    rank = RankParameters((RANKS, 1), held, layer, settings(**traits))
    count = layer if in_layer else ParameterCount(outside)
    return unsharded_bytes(count, rank, zero, in_layer=in_layer)


@pytest.mark.parametrize("strategy", ZERO_STAGES)
def test_what_is_kept_is_divided_as_the_strategy_says(held: Held, strategy: str) -> None:
    """The moments of Adam are the optimizer's; without sharding weights are the model's own."""
    zero, seen = ZERO_STAGES[strategy], held[strategy]
    each = static_bytes(zero, RANKS, settings(), in_layer=True)
    number = LAYERS * LAYER + 2 * OUTSIDE
    assert seen["main_grad_buffer"] == number * each.gradients
    assert seen["main_weight_buffer"] == number * each.optimizer / 3
    own = number * each.weights if zero else 0
    assert seen["model_weight_buffer"] == own


def test_layers_gathered_and_gradients_that_wait(held: Held) -> None:
    seen, zero = held["optim_grads_params"], ZeroStage.WEIGHTS
    assert seen["weights"] + seen["gradients"] == whole(zero)
    # one bucket of embedding and head
    assert seen["ahead"] + seen["outside"] == whole(zero, in_layer=False, outside=2 * OUTSIDE)
    outside = static_bytes(zero, RANKS, settings(), in_layer=False).weights
    assert outside == 2 / RANKS + 2


def test_double_buffers_take_the_same_at_all_times(held: Held) -> None:
    seen = held["optim_grads_params, double"]
    assert seen["weights"] == seen["gradients"] == 0
    assert seen["pool"] == whole(ZeroStage.WEIGHTS, fsdp_double_buffer=True)
    at_head = whole(ZeroStage.WEIGHTS, in_layer=False, fsdp_double_buffer=True)
    assert at_head - OUTSIDE * 4 == seen["pool"]


@pytest.mark.parametrize("name", ["optim_grads", "optim_grads, double"])
def test_gradients_that_wait_in_buckets(held: Held, name: str) -> None:
    assert held[name]["outside"] == whole(ZeroStage.GRADIENTS, fsdp_double_buffer="double" in name)
    assert held[name]["weights"] == held[name]["pool"] == 0


@pytest.mark.parametrize("name", ["no_shard", "optim"])
def test_what_is_not_divided_has_no_buffers(held: Held, name: str) -> None:
    seen = held[name]
    assert seen["weights"] == seen["gradients"] == seen["outside"] == 0
    assert whole(ZERO_STAGES[name]) == 0


def test_torch_fsdp2(held: Held) -> None:
    own = {"torch_fsdp2": True, "gradient_bytes": 2}
    assert max(held["fsdp2"].values()) == whole(ZeroStage.WEIGHTS, **own)
    kept = {**own, "reshard_after_forward": False}
    gathered = LAYERS * LAYER * 2
    assert max(held["fsdp2, kept"].values()) == gathered + whole(ZeroStage.WEIGHTS, **kept)
