"""From flags to bytes, and a place for every argument of Megatron that looks like memory."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model import memory_flags as memory_flags_module
from nest_megatron.cost_model.execution_flags import execution_traits, time_notes
from nest_megatron.cost_model.memory_flags import memory_flags, not_modelled
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.layout.rulebook.facts import RELEASES

_LOOKS_LIKE_MEMORY = re.compile(
    "dtype|fp8|fp4|fp16|bf16|fp32|offload|precision|memory|recompute|checkpoint_activ|optimizer"
    "|grad|buffer|fsdp|shard|param|cache|quant|ddp|bucket|fusion|nccl_ub|symmetric|master"
    "|remainder|muon|cuda_graph|transpose|stash|capacity|attention_backend|transformer_impl"
)
_TABLE = tomllib.loads(Path(memory_flags_module.__file__).with_suffix(".toml").read_text())
_PLACES = ("priced", "layout", "not_modelled", "no_effect")


@pytest.mark.parametrize("version", RELEASES)
def test_every_argument_that_looks_like_memory_has_one_place(version: str) -> None:
    names = {each.dest for each in load_arguments(version)}
    names = {name for name in names if _LOOKS_LIKE_MEMORY.search(name)}
    assert len(names) > 120
    places = {name: sum(name in _TABLE[place] for place in _PLACES) for name in names}
    assert {name: count for name, count in places.items() if count != 1} == {}


def traits(precision: str = "bf16", **flags: object) -> ExecutionTraits:
    return execution_traits(memory_flags(flags), Precision(precision))


def test_a_job_without_such_flags_is_the_default() -> None:
    assert traits() == traits(bf16=True, optimizer="adam") == ExecutionTraits()


@pytest.mark.parametrize(
    ("precision", "flags", "width"),
    [
        ("bf16", {}, 4),
        ("bf16", {"grad_reduce_in_bf16": True}, 2),
        ("bf16", {"main_grads_dtype": "bf16", "use_precision_aware_optimizer": True}, 2),
        ("bf16", {"main_grads_dtype": "fp32", "use_precision_aware_optimizer": True}, 4),
        ("fp16", {}, 2),
        ("fp16", {"accumulate_allreduce_grads_in_fp32": True}, 4),
        ("fp8", {"grad_reduce_in_bf16": True}, 2),
        ("fp8", {"params_dtype": "fp32"}, 4),
        ("fp32", {"grad_reduce_in_bf16": True}, 4),
    ],
)
def test_width_of_gradients(precision: str, flags: dict[str, object], width: int) -> None:
    """As ``validate_args`` decides ``accumulate_allreduce_grads_in_fp32``."""
    assert traits(precision, **flags).gradient_bytes == width


_AWARE = {"use_precision_aware_optimizer": True}


@pytest.mark.parametrize(
    ("precision", "flags", "states"),
    [
        ("bf16", {}, 12),
        ("fp32", {}, 8),
        ("bf16", {"optimizer": "sgd"}, 8),
        ("bf16", {"optimizer": "sgd", "sgd_momentum": 0.0}, 4),
        ("fp32", {"optimizer": "sgd"}, 4),
        ("bf16", {"optimizer": "lion"}, 8),
        ("bf16", _AWARE, 2 + 4 + 4),
        ("bf16", {**_AWARE, "store_param_remainders": False}, 4 + 4 + 4),
        ("bf16", {**_AWARE, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 2 + 2 + 2),
        ("bf16", {**_AWARE, "main_params_dtype": "fp16", "exp_avg_dtype": "fp8"}, 2 + 1 + 4),
        ("fp16", _AWARE, 4 + 4 + 4),
        ("fp8", {**_AWARE, "fp8_recipe": "mxfp8"}, 4 + 4 + 4),
        ("fp8", {**_AWARE, "fp8_param_gather": True}, 4 + 4 + 4),
        ("bf16", {**_AWARE, "optimizer_cpu_offload": True}, 0),
        (
            "bf16",
            {**_AWARE, "optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.25},
            9,
        ),
        # dtypes without the precision-aware optimizer are refused by Megatron, and change nothing
        ("bf16", {"exp_avg_dtype": "bf16"}, 12),
    ],
)
def test_states_of_a_parameter(precision: str, flags: dict[str, object], states: float) -> None:
    assert traits(precision, **flags).optimizer_bytes == states


def test_muon_has_one_momentum_for_matrices() -> None:
    alone, shared = traits(optimizer="muon"), traits(optimizer="dist_muon")
    assert (alone.matrix_optimizer_bytes, alone.optimizer_bytes) == (8, 12)
    assert not alone.layer_wise_optimizer
    assert shared.layer_wise_optimizer
    assert traits(optimizer="muon", use_distributed_optimizer=True).layer_wise_optimizer
    assert traits(optimizer="muon", muon_scalar_optimizer="lion").optimizer_bytes == 8


def test_fp8_weights_and_what_is_gathered() -> None:
    flags = {"fp8_param_gather": True}
    assert traits("fp8", **flags).fp8_gather
    mxfp8 = traits("fp8", fp8_recipe="mxfp8", **flags)
    assert mxfp8.fp8_weights
    assert not mxfp8.fp8_gather
    assert not traits("bf16", **flags).fp8_weights


@pytest.mark.parametrize(
    ("precision", "flags", "num", "moved"),
    [
        ("bf16", {}, 6, 52),
        ("bf16", {"cross_entropy_loss_fusion": True}, 10, 28),
        ("bf16", {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, 2, 10),
        ("bf16", {"cross_entropy_fusion_impl": "te"}, 6, 52),
        ("fp32", {}, 8, 52),
    ],
)
def test_memory_and_traffic_of_a_logit(
    precision: str, flags: dict[str, object], num: int, moved: int
) -> None:
    found = traits(precision, **flags)
    assert (found.loss_bytes, found.loss_traffic_bytes) == (num, moved)


@pytest.mark.parametrize(
    ("precision", "flags"),
    [
        ("bf16", {"attention_backend": "unfused"}),
        ("bf16", {"transformer_impl": "local"}),
        ("fp32", {}),
    ],
)
def test_attention_that_keeps_its_scores(precision: str, flags: dict[str, object]) -> None:
    assert not traits(precision, **flags).flash_attention
    assert traits("bf16", attention_backend="flash").flash_attention


def test_types_and_enums_read_like_words() -> None:
    class Word:
        name = "unfused"

        def __str__(self) -> str:
            return "torch.bfloat16"

    assert not traits(attention_backend=Word()).flash_attention
    assert memory_flags_module.text("torch.bfloat16") == "bf16"


@pytest.mark.parametrize(
    "flags",
    [
        {"exp_avg_dtype": "fp12", **_AWARE},
        {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.5},
    ],
)
def test_impossible_values_are_refused(flags: dict[str, object]) -> None:
    with pytest.raises(UserInputError, match=r"fp12|1\.5"):
        traits(**flags)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({}, ()),
        ({"cuda_graph_impl": "none", "fp4": None, "outer_dp_sharding_strategy": "no_shard"}, ()),
        ({"torch_fsdp2_reshard_after_forward": False}, ()),
        ({"megatron_fsdp_grad_comm_dtype": "bf16"}, ()),
        ({"nccl_ub": True}, ("--use-nccl-ub",)),
        ({"fp4": "e2m1", "fp4_param_gather": True}, ()),
        ({"fp4_quantizer_factory": "a.b"}, ("--fp4-quantizer-factory",)),
        ({"cpu_offloading_num_layers": 4}, ("--cpu-offloading-num-layers",)),
        ({"transformer_impl": "local"}, ("--transformer-impl local",)),
        ({"optimizer": "soap"}, ("--optimizer soap",)),
    ],
)
def test_what_is_not_modelled_is_named(flags: dict[str, object], named: tuple[str, ...]) -> None:
    assert not_modelled(memory_flags(flags)) == named


@pytest.mark.parametrize(
    "flags",
    [
        {"optimizer_cpu_offload": True},
        {"optimizer": "muon"},
        {"first_last_layers_bf16": True},
        {"microbatch_group_size_per_vp_stage": 8},
        {"ddp_num_buckets": 4},
        {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"},
        {"moe_dispatch_fwd_dtype": "mxfp8"},
    ],
)
def test_time_that_is_not_priced_is_said(flags: dict[str, object]) -> None:
    (note,) = time_notes(flags)
    assert "--" not in note  # a recipe has fields, by the same names
    assert time_notes({"optimizer": "adam"}) == ()
