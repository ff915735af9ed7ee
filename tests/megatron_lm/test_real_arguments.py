"""Our flags through Megatron-LM's own parser and validation, and our rules against its own.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.15.0 or newer).
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from typing import Any

import pytest

from nest_megatron.errors import NestError
from nest_megatron.integrations.megatron_lm.parser import known_flags
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.rulebook import check
from tests.integrations.refused_options import ROWS, flags_of, has_row
from tests.integrations.requests import BROKEN, SOUND
from tests.megatron_lm.ask import (
    TRAINING,
    ask_megatron,
    checkout_version,
    megatron_case,
    planned_stages,
)

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(
        not os.environ.get("MEGATRON_LM_HOME"),
        reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout",
    ),
]

#: Rules that Megatron only reveals while building or training, or that its flags cannot break.
LATER = {
    "ffn_over_tp",
    "vocab_over_tp",
    "expert_gradients",
    "sequence_pieces",
    "attention_under_cp",
    "windows_under_cp",
    "sequence_parallel",
    "interleaving",
    "fsdp_no_pipeline",
    "fsdp_experts",
    "fsdp_gradients_in_bf16",
    "fsdp_meta_device",
    "no_empty_stage",
    "known_version",
    "activation_flag",
    "variant",
    "bert_layers",
    "grouped_gemm",
    "partition_shape",
    "mtp_stage",
    "recompute_uniform",
    "recompute_local",
    "fp8_engine",
    "fp8_shapes",
    "fp8_tokens",
    "permute_fusion",
    "router_fusion",
    "flex_group",
    "deepep_ranks",
    "context_heads",
    "graphs_experts",
    "graphs_packs",
    "offloaded_recomputed",
    "tensor_overlap",
    "delayed_wgrad",
    "expert_overlap_fsdp",
    "linear_replacements",
    "heterogeneous_virtual_stages",
    "adapters_over_tp",
    "encoder",
    "encoder_stages",
    "encoder_zero",
    "hybrid_latent_attention",
    "hybrid_recompute",
    "norm_under_sequence_parallel",
    "sparse_attention",
    "hybrid_stages",
    "hybrid_virtual_stages",
    "mamba_over_tp_and_cp",
    "even_stages",
    "two_stacks",
    "layers_in_bf16",
    "graphs_modules",
    "adapters_over_etp",
    "block_recompute",
    "device_recipe",
    "even_groups",
    "head_sizes_under_cp",
    "local_attention_under_cp",
    "mamba_groups",
    "no_experts",
    "shared_expert_bias",
    "unfused_attention_under_cp",
    "virtual_stages",
    # releases without the choice have no flag for it
    "flex_release",
    "offloaded_layers",
    "offloaded_modules",
}


@pytest.fixture(scope="module")
def answers() -> dict[str, dict[str, Any]]:
    """Megatron's answer to each request at the checkout's release, or why it was not asked."""
    version = checkout_version()
    requests = {**SOUND, **{k: v for k, v in BROKEN.items() if k not in LATER}}
    found: dict[str, dict[str, Any]] = {}
    cases = {}
    for name, request in requests.items():
        there = dataclasses.replace(request, version=version)
        broken = {rule.id for rule, _ in check(there)}
        if (name in SOUND and broken) or (name in BROKEN and name not in broken):
            found[name] = {"not asked": f"{version} is another release than the request's"}
            continue
        try:
            cases[name] = megatron_case(there)
        except (NestError, AssertionError) as error:  # of a pipeline whose stages are not said
            found[name] = {"not asked": f"no command says it: {error}"}
    said = ask_megatron(list(cases.values()))
    return found | dict(zip(cases, said["answers"], strict=True))


def answered(answers: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    if reason := answers[name].get("not asked"):
        pytest.skip(reason)
    return answers[name]


@pytest.mark.parametrize("name", SOUND)
def test_megatron_accepts_what_we_write(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert "accepted" in answered(answers, name), answers[name]
    answer, request = answers[name]["accepted"], SOUND[name]
    spec, dims = request.spec, request.dims
    assert answer["num_layers"] == spec.num_layers
    assert answer["hidden_size"] == spec.hidden_size
    assert answer["ffn_hidden_size"] == spec.ffn_hidden_size
    if not spec.multi_latent_attention:
        assert answer["num_query_groups"] == spec.query_groups
        assert answer["kv_channels"] == spec.head_dim
    assert answer["gated_linear_unit"] == spec.gated_linear_unit
    assert answer["activation"] == spec.activation
    assert answer["add_bias_linear"] == spec.add_bias_linear
    assert answer["normalization"] == spec.normalization
    assert answer["num_moe_experts"] == spec.num_experts
    assert answer["mtp_num_layers"] == spec.mtp_num_layers
    assert answer["softmax_type"] == spec.softmax_type
    for field in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
    ):
        assert answer[field] == getattr(dims, field)
    assert (answer["virtual_pipeline_model_parallel_size"] or 1) == (
        dims.virtual_pipeline_model_parallel_size
    )
    assert answer["data_parallel_size"] == dims.data_parallel_size
    assert answer["sequence_parallel"] == request.sequence_parallel
    if spec.is_moe:
        assert answer["expert_tensor_parallel_size"] == dims.expert_tensor_parallel_size
    if request.partition is not None:
        assert answer["stages"] == planned_stages(spec, request.partition)


@pytest.mark.parametrize("name", sorted(set(BROKEN) - LATER))
def test_megatron_refuses_what_we_refuse(name: str, answers: dict[str, dict[str, Any]]) -> None:
    assert "refused" in answered(answers, name), answers[name]


def test_megatron_refuses_options_together() -> None:
    """Each row of ``refused_options.json`` that the checkout's release has and validates."""
    version = checkout_version()
    rules = [rule for rule in ROWS if has_row(rule, version)]
    rules = [rule for rule in rules if MEGATRON_LM in ROWS[rule].get("framework", MEGATRON_LM)]
    rules = [rule for rule in rules if "(at build)" not in ROWS[rule]["source"]]
    rules = [rule for rule in rules if {*filter(_is_flag, flags_of(rule))} <= known_flags(version)]
    argvs = [_PLAIN, *([*_PLAIN, *flags_of(rule)] for rule in rules)]
    cases = [{"argv": argv, "world_size": 1, "max_connections": None} for argv in argvs]
    accepted, *answers = ask_megatron(cases)["answers"]
    assert "accepted" in accepted, accepted
    found = [rule for rule, each in zip(rules, answers, strict=True) if "refused" not in each]
    assert found == [], f"accepted: {', '.join(found)}"


#: A model with biases, and without gates and query groups.
_PLAIN = [
    *shlex.split(
        "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
        "--max-position-embeddings 1024 --position-embedding-type rope --micro-batch-size 1 "
        "--vocab-size 32000 --tokenizer-type NullTokenizer --bf16"
    ),
    *(word for word in TRAINING if word != "--no-rope-fusion"),
]


def _is_flag(word: str) -> bool:
    return word.startswith("--")
