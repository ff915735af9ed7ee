"""Hybrid models of Mamba, attention, MLP and expert layers in Megatron-LM's arguments."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.api.jobs import estimate_job
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.write import model_argv, parallel_argv, script_name
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import FULL_RECOMPUTE
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.rulebook.schedule import mtp_chunk
from nest_megatron.layout.stage_layout import (
    StagePartition,
    is_uniform,
    layout_string,
    parse_layout,
)
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, plan
from nest_megatron.solver.space import SearchSpace
from tests import catalogue

SHAPE = "--hidden-size 1024 --num-attention-heads 16 --seq-length 64 --max-position-embeddings 64 "
SHAPE += "--vocab-size 1000 --micro-batch-size 1 --bf16 "
OLD = "pretrain_mamba.py --spec megatron.core.models.mamba.mamba_layer_specs mamba_stack_spec "
NEW = "pretrain_hybrid.py --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec "
HYBRID = TransformerSpec(
    name="hybrid",
    num_layers=8,
    hybrid_layer_pattern="M-M*M-ME/*E",
    mtp_num_layers=1,
    num_experts=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=16,
    seq_length=64,
    vocab_size=1024,
)
UNEVEN = StagePartition(boundaries=(0, 2, 5, 8, 11), pipeline_model_parallel_size=4)


@pytest.mark.parametrize(
    ("command", "version", "pattern", "layers"),
    [
        (OLD + "--num-layers 4 --hybrid-override-pattern M-M*", "0.16", "M-M*", 4),
        (OLD + "--num-layers 8 --hybrid-attention-ratio 0.25", "0.16", "MM*MM*MM", 8),
        (OLD + "--num-layers 3", "0.16", "MMM", 3),
        (NEW + "--hybrid-layer-pattern M-|M*/*-/*- --num-layers 99", "0.20", "M-M*/*-/*-", 4),
        (NEW + "--hybrid-override-pattern MM*-", "0.20", "MM*-", 4),
        (
            NEW + "--hybrid-layer-pattern MM --mtp-hybrid-override-pattern *- --mtp-num-layers 2",
            "0.20",
            "MM/*-/*-",
            2,
        ),
    ],
)
def test_layers(command: str, version: str, pattern: str, layers: int) -> None:
    spec = read_job(read_command(f"{command} {SHAPE}", version)).spec
    assert (spec.hybrid_layer_pattern, spec.num_layers) == (pattern, layers)
    assert spec.num_mtp_layers == pattern.count("/")
    assert spec.layer_kinds()[1] is LayerKind.MAMBA


@pytest.mark.parametrize(
    ("command", "version", "named"),
    [
        (OLD + "--num-layers 5 --hybrid-override-pattern M-M*", "0.16", "num-layers"),
        (OLD + "--num-layers 4 --hybrid-override-pattern M-MG", "0.16", "symbols"),
        (OLD + "--num-layers 4 --hybrid-override-pattern M-MD", "0.16", "D since 0.18"),
        (OLD + "--num-layers 4 --mtp-num-layers 1", "0.16", "no MTP"),
        (
            OLD + "--num-layers 4 --hybrid-mlp-ratio 0.9 --hybrid-attention-ratio 0.5",
            "0.16",
            "sum",
        ),
        ("pretrain_mamba.py --num-layers 4", "0.16", "--spec"),
        (
            "pretrain_gpt.py --num-layers 4 --hybrid-override-pattern M-M*",
            "0.16",
            "not known to build hybrid",
        ),
        (NEW, "0.20", "hybrid-layer-pattern"),
        (NEW + "--hybrid-layer-pattern MX", "0.20", "not X"),
        (NEW + "--hybrid-layer-pattern MM --mtp-num-layers 1", "0.20", "behind /"),
        (
            NEW + "--hybrid-layer-pattern MM --hybrid-override-pattern MM",
            "0.20",
            "Drop one of the two",
        ),
    ],
)
def test_what_megatron_cannot_build_is_named(command: str, version: str, named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        read_job(read_command(f"{command} {SHAPE}", version))


def test_a_pattern_without_bars_states_no_stages() -> None:
    free = read_job(read_command(f"{NEW} --hybrid-layer-pattern M-M* {SHAPE}", "0.20"))
    cut = read_job(read_command(f"{NEW} --hybrid-layer-pattern M-|M* {SHAPE}", "0.20"))
    assert "hybrid_layer_pattern" not in free.fixed
    assert cut.fixed["hybrid_layer_pattern"] == "M-|M*"


def _request(version: str, **fields: object) -> LaunchRequest:
    dims = ParallelDims(pipeline_model_parallel_size=4)
    return LaunchRequest(
        spec=HYBRID,
        dims=dims,
        micro_batch_size=1,
        global_batch_size=8,
        moe_grouped_gemm=True,
        version=version,
        **{"partition": UNEVEN, **fields},  # type: ignore[arg-type]
    )


def test_stages_are_written_into_the_pattern_and_read_back() -> None:
    request = _request("0.20")
    assert layout_string(HYBRID, UNEVEN) == "M|-M*|M-M|E/*E"
    assert parse_layout("M|-M*|M-M|E/*E", HYBRID, 4) == UNEVEN
    argv = [script_name(HYBRID, "0.20"), *model_argv(HYBRID, version="0.20")]
    assert "--pipeline-model-parallel-layout" not in parallel_argv(request)
    job = read_job(read_command([*argv, *parallel_argv(request)], "0.20"))
    assert job.fixed["hybrid_layer_pattern"] == "M|-M*|M-M|E/*E"
    for name in ("hybrid_layer_pattern", "num_layers", "mtp_num_layers", "mamba_num_groups"):
        assert getattr(job.spec, name) == getattr(HYBRID, name)


@pytest.mark.parametrize(
    ("fields", "broken"),
    [
        ({}, set()),  # as many layers on each rank between the first and the last
        (
            {"partition": dataclasses.replace(UNEVEN, boundaries=(0, 2, 4, 8, 11))},
            {"hybrid_stages"},
        ),
        ({"recompute": FULL_RECOMPUTE}, {"hybrid_recompute"}),
    ],
)
def test_0_16_cuts_evenly_and_recomputes_no_whole_layers(
    fields: dict[str, object], broken: set[str]
) -> None:
    found = {rule.id for rule, _ in check(_request("0.16", **fields))}
    assert found & {"hybrid_stages", "hybrid_recompute"} == broken
    assert not {rule.id for rule, _ in check(_request("0.20", **fields))} - {"activation_flag"}


@pytest.mark.parametrize(("version", "known"), [("0.17", False), ("0.18", False), ("0.19", True)])
def test_latent_attention_is_a_symbol_since_0_19(version: str, known: bool) -> None:
    pattern = HYBRID.hybrid_layer_pattern.replace("*", "+")
    latent = dataclasses.replace(HYBRID, hybrid_layer_pattern=pattern)
    found = {rule.id for rule, _ in check(dataclasses.replace(_request(version), spec=latent))}
    assert ("hybrid_latent_attention" not in found) is known


def test_mtp_layers_of_a_hybrid_model_lie_beside_the_head() -> None:
    apart = dataclasses.replace(UNEVEN, boundaries=(0, 2, 5, 10, 11))
    assert "mtp_stage" in {rule.id for rule, _ in check(_request("0.20", partition=apart))}


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_plans_have_stages_that_the_release_builds(version: str) -> None:
    """MTP layers would stand alone as soon as that is faster; 0.16.1 has no MTP."""
    pattern = HYBRID.hybrid_layer_pattern.partition("/")[0] if version == "0.16" else None
    spec = HYBRID
    if pattern:
        spec = dataclasses.replace(HYBRID, hybrid_layer_pattern=pattern, mtp_num_layers=None)
    found = plan(
        Request(
            spec=spec,
            cluster=catalogue.cluster("dgx_h100", 8),
            global_batch_size=32,
            space=SearchSpace(fixed={"pipeline_model_parallel_size": 4}, version=version),
        )
    )
    assert isinstance(found, ParallelPlan)
    if pattern:
        assert is_uniform(spec, found.layout.partition)
    else:
        assert found.arguments["pipeline_model_parallel_layout"].endswith("/*E")
        assert mtp_chunk(spec, found.layout.partition) == found.layout.partition.num_chunks - 1


@pytest.mark.parametrize(
    ("tp", "cp", "legal"), [(8, 1, True), (8, 4, True), (16, 1, False), (1, 64, False)]
)
def test_heads_and_groups_of_mamba_layers(tp: int, cp: int, legal: bool) -> None:
    dims = ParallelDims(tensor_model_parallel_size=tp, context_parallel_size=cp)
    request = _request("0.20", partition=None, sequence_parallel=tp > 1)
    found = {rule.id for rule, _ in check(dataclasses.replace(request, dims=dims))}
    assert ("mamba_over_tp_and_cp" not in found) is legal


def test_an_estimate_is_judged_by_the_rules_of_its_own_release() -> None:
    words = ["model=nemotron_h_8b", "cluster=dgx_h100", "cluster.num_gpus=8"]
    words += [f"parallel.{name}_model_parallel_size=2" for name in ("pipeline", "virtual_pipeline")]
    new = compose(parse([*words, "target=megatron_lm_0.20"]))
    assert estimate_job(new).arguments["virtual_pipeline_model_parallel_size"] == 2
    old = compose(parse([*words, "target=megatron_lm_0.16"]))
    with pytest.raises(UserInputError, match="no virtual stages for hybrid models"):
        estimate_job(old)


def test_experts_beside_a_layer_specification_need_0_16() -> None:
    """0.15 ``arguments.py``: "Model Spec must be None when using MoEs"."""
    spec = catalogue.model("nemotron3_nano")
    assert "--num-experts" in model_argv(spec, version="0.16")
    with pytest.raises(UnplannableModelError, match="takes no experts beside --spec"):
        model_argv(spec, version="0.15")
    assert "--spec" in model_argv(catalogue.model("nemotron_h_8b"), version="0.15")
