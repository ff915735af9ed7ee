"""A plan takes for granted what the published runs of its framework are scored by."""

from __future__ import annotations

import importlib.metadata

import pytest

import nest_megatron
from nest_megatron.api.jobs import estimate_job
from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import compose
from nest_megatron.config.job import CostInputs, Job, read_target
from nest_megatron.config.overrides import expand, parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.settings import restored_settings, stored_settings
from nest_megatron.cost_model.target_defaults import (
    DEFAULT_TARGET,
    MEGATRON_LM,
    NEMO,
    TARGETS,
    newest_stable,
    target_named,
)
from nest_megatron.cost_model.targets import Target, fitted_values
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import parser
from nest_megatron.integrations.megatron_lm.attach import launch_request, with_launch
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, RELEASES
from nest_megatron.model.execution import PLAIN, Execution, FlexBackend, TokenDispatcher
from nest_megatron.validation.frameworks import RULES
from nest_megatron.validation.job import job_of
from nest_megatron.validation.models import ModelBook
from tests import catalogue

EVERY = {target.name: target for target in (*TARGETS.values(), *(rule.target for rule in RULES))}
#: A framework as a row names it -> the target of a plan for it.
FRAMEWORKS = {
    "Megatron-LM 23e00ed0, TE 2.11": TARGETS["megatron_lm_0.16"],
    "NeMo 25.11": NEMO,
    "Megatron-Bridge/MCore 26.02 NeMo Container": TARGETS["megatron_bridge_0.3"],
    "Megatron-Bridge/MCore 26.08 NeMo Container": TARGETS["megatron_bridge_0.6"],
}


def row(framework: str, model: str, precision: str) -> dict[str, str]:
    return {
        "framework": framework,
        "model": model,
        "gpu": "H100-80GB",
        "gpus_per_node": "8",
        "n_gpus": "64",
        "precision": precision,
        "seq": "4096",
        "tp": "2",
        "pp": "1",
        "gbs": "128",
        "mbs": "1",
    }


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(("model", "name"), [("llama3_8b", "Llama3-8B"), ("mixtral_8x7b", "")])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_plan_assumes_what_runs_of_its_framework_are_scored_by(
    framework: str, model: str, name: str, precision: str
) -> None:
    target = FRAMEWORKS[framework]
    words = [f"model={model}", "cluster=dgx_h100", "cluster.num_gpus=64"]
    words += [f"train.precision={precision}", f"target={target.name}"]
    planned = request_of(compose(parse(words))).settings
    job = job_of(
        row(framework, name or "Mixtral-8x7B", precision), ModelBook.load(()), as_planned=True
    )
    assert job.target is target
    assert job.settings == planned


@pytest.mark.parametrize("target", EVERY.values(), ids=EVERY)
def test_every_default_names_its_source(target: Target) -> None:
    assert target.defaults
    for default in target.defaults:
        assert default.source, default.argument


def test_a_plan_has_the_constants_that_were_fitted_to_its_framework() -> None:
    words = ["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8"]
    inputs = request_of(compose(parse(words)))
    for name, value in fitted_values(DEFAULT_TARGET.fitted).items():
        assert getattr(inputs.settings, name) == value
    assert inputs.settings.target == DEFAULT_TARGET.name
    assert any(DEFAULT_TARGET.framework in note for note in inputs.notes)


def test_a_setting_of_the_user_wins() -> None:
    words = ["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "target=nemo_2.7"]
    inputs = request_of(compose(parse([*words, "cost.compute_slowdown=1.5"])))
    assert inputs.settings.compute_slowdown == 1.5
    assert not any("is assumed (target=" in note for note in inputs.notes)


def test_flags_of_the_job_win_over_the_defaults() -> None:
    usual = NEMO.settings("H100", Precision.BF16)
    wide = NEMO.settings("H100", Precision.BF16, {"grad_reduce_in_bf16": False})
    assert (usual.traits.gradient_bytes, wide.traits.gradient_bytes) == (2, 4)


def test_a_default_goes_with_its_device_and_format() -> None:
    flags = TARGETS["megatron_bridge_0.6"].flags(
        "GB200-NVL72-186GB", Precision.FP8, spec=catalogue.model("mixtral_8x7b")
    )
    assert flags["fp8_recipe"] == "mxfp8"
    assert flags["cuda_graph_impl"] == "full_iteration"
    flags = TARGETS["megatron_bridge_0.6"].flags(
        "GB200-NVL72-186GB", Precision.FP8, spec=catalogue.model("nemotron3_nano")
    )
    assert flags["cuda_graph_impl"] == "transformer_engine"
    assert not flags["overlap_moe_expert_parallel_comm"]
    flags = TARGETS["megatron_bridge_0.6"].flags("H100-SXM-80GB", Precision.FP8)
    assert flags["fp8_recipe"] == "tensorwise"
    assert flags["cuda_graph_impl"] == "none"


def test_graphs_of_layers_hold_the_modules_that_the_recipes_of_a_model_name() -> None:
    routed = ("attn", "moe_preprocess", "moe_router")

    def graphs(model: str, **said: object) -> tuple[str, tuple[str, ...]]:
        spec = catalogue.model(model)
        found = TARGETS["megatron_bridge_0.3"].execution(
            "GB200-NVL72-186GB", Precision.BF16, said, spec
        )
        return found.cuda_graph_impl, found.cuda_graph_scope

    assert graphs("qwen3_30b_a3b") == ("transformer_engine", routed)
    assert graphs("nemotron3_nano") == ("transformer_engine", ("attn", "mamba", *routed[1:]))
    assert graphs("qwen3_30b_a3b", cuda_graph_impl="local") == ("local", ())
    assert graphs("qwen3_30b_a3b", cuda_graph_scope=["attn"]) == ("transformer_engine", ("attn",))
    assert graphs("llama3_8b") == ("none", ())


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize(
    "target",
    [NEMO, TARGETS["megatron_bridge_0.3"], TARGETS["megatron_bridge_0.6"]],
    ids=lambda t: t.name,
)
def test_what_a_framework_sets_goes_with_the_layout_that_is_found(
    target: Target, precision: str
) -> None:
    cluster = {"cluster": "gb200_nvl72", "num_gpus": 16, "train": {"precision": precision}}
    search = {"num_alternatives": 0, "max_pipeline_model_parallel_size": 2}
    found = nest_megatron.plan(
        model="qwen3_30b_a3b", **cluster, global_batch_size=64, target=target.name, search=search
    ).record
    require_launchable(launch_request(found, version=target.megatron_core))


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_a_plan_file_keeps_the_target_and_its_settings(target: Target) -> None:
    settings = target.settings("H100-SXM-80GB", Precision.FP8, spec=catalogue.model("mixtral_8x7b"))
    assert restored_settings(stored_settings(settings)) == settings


def test_an_unknown_target_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserInputError, match=r"Did you mean nemo_2\.7"):
        target_named("nemo27")
    with pytest.raises(UserInputError, match=r"0\.15 is the oldest release of megatron_lm"):
        target_named("megatron_lm_0.14.2")
    with pytest.raises(UserInputError, match=r"0\.3 is the oldest release of megatron_bridge"):
        target_named("megatron_bridge_0")
    with pytest.raises(UserInputError, match=r"megatron_lm_9x.*targets are megatron_lm"):
        target_named("megatron_lm_9x")
    with pytest.raises(UserInputError, match=r"megatron_bridge_2026.*targets are megatron_lm"):
        target_named("megatron_bridge_2026")  # a year is no release


@pytest.mark.parametrize("release", ["0.77.1", "9"])
def test_a_newer_release_is_the_newest_known_and_a_plan_says_so(release: str) -> None:
    words = ["model=llama3_8b", "cluster=dgx_h100", f"target=megatron_lm_{release}"]
    inputs = request_of(compose(parse(words)))
    assert inputs.settings.target == "megatron_lm_0.20"
    (said,) = [note for note in inputs.notes if "newer" in note]
    assert f"megatron_lm_{release} is newer" in said
    assert "megatron_lm_0.20" in said
    assert target_named("megatron_lm_0.19.2") is TARGETS["megatron_lm_0.19"]
    job, _ = read_request(
        TypedCommand(text=FLAGS, version=release), compose(parse(["cluster=dgx_h100"]))
    )
    assert [note for note in job.notes if f"megatron_lm_{release} is newer" in note]


def test_a_release_of_megatron_lm_is_known_in_every_table() -> None:
    assert [target.megatron_core for target in MEGATRON_LM] == [*RELEASES]
    assert newest_stable("megatron_lm").megatron_core == DEFAULT_VERSION
    assert [*packaged(parser.__package__, "arguments_data/arguments.json")["releases"]] == [
        *RELEASES
    ]


def test_a_framework_alone_is_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"megatron-core": "0.17.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert target_named("megatron_lm") is TARGETS["megatron_lm_0.17"]
    assert target_named("megatron_bridge") is TARGETS["megatron_bridge_0.6"]  # the newest stable
    assert target_named("nemo") is NEMO


FLAGS = (
    "torchrun --nproc-per-node 8 --nnodes 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 "
    "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 --vocab-size 32000 "
    "--num-experts 8 --bf16 --micro-batch-size 1 --global-batch-size 512"
)


def read_flags(flags: str, version: str = "0.16") -> Job:
    composed = compose(parse(["cluster=dgx_h100"]))
    return read_request(TypedCommand(text=f"{FLAGS} {flags}", version=version), composed)[0]


def execution_of_job(flags: str) -> Execution:
    composed = compose(parse(["cluster=dgx_h100"]))
    return CostInputs(composed, read_flags(flags), "H100-SXM-80GB").execution()


def test_the_flags_of_a_command_are_priced() -> None:
    flags = "--moe-permute-fusion --tp-comm-overlap --moe-token-dispatcher-type flex"
    execution = execution_of_job(f"{flags} --moe-flex-dispatcher-backend hybridep")
    assert execution.moe_permute_fusion
    assert execution.tp_comm_overlap
    assert execution.moe_flex_dispatcher_backend is FlexBackend.HYBRIDEP


def test_a_command_that_names_no_dispatcher_gets_the_one_that_a_plan_writes() -> None:
    assert execution_of_job("") == PLAIN
    stated = execution_of_job("--moe-token-dispatcher-type allgather")
    assert stated.moe_token_dispatcher_type is TokenDispatcher.ALLGATHER


def test_a_command_runs_on_its_own_release() -> None:
    composed = compose(parse(["cluster=dgx_h100"]))
    _, request = read_request(TypedCommand(text=FLAGS, version="0.20"), composed)
    assert request.settings.target == "megatron_lm_0.20"
    composed = compose(parse(["cluster=dgx_h100", "target=nemo_2.7"]))
    with pytest.raises(UserInputError, match="the job runs on Megatron-LM"):
        read_request(TypedCommand(text=FLAGS, version="0.16"), composed)


@pytest.mark.parametrize(
    ("words", "overlaps"),
    [
        (["parallel.expert_model_parallel_size=8"], True),
        ([], False),  # a rank holds every expert: there is no exchange
        (
            [
                "parallel.expert_model_parallel_size=8",
                "parallel.recompute_granularity=full",
                "parallel.recompute_method=uniform",
                "parallel.recompute_num_layers=1",
            ],
            False,
        ),
    ],
)
def test_what_megatron_refuses_on_a_layout_is_not_priced(words: list[str], overlaps: bool) -> None:
    composed = compose(
        parse(
            [
                "model=mixtral_8x7b",
                "cluster=gb200_nvl72",
                "cluster.num_gpus=64",
                "parallel.pipeline_model_parallel_size=1",
                "target=megatron_bridge_0.6",
                "train.precision=fp8",
                *words,
            ]
        )
    )
    plan = estimate_job(composed).record
    assert plan.layout.execution.overlap_moe_expert_parallel_comm is overlaps


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)
def test_a_command_of_megatron_is_written_for_megatron_alone(target: Target) -> None:
    words = ["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", f"target={target.name}"]
    composed = compose(parse([*words, "train.global_batch_size=8"]))
    inputs = request_of(composed)
    plan = estimate_job(composed).record
    assert bool(with_launch(plan).launch) is (target in MEGATRON_LM)
    assert any("docs/nemo.md" in note for note in inputs.notes) is (target not in MEGATRON_LM)


def test_targets_are_swept() -> None:
    names = [*TARGETS]
    jobs = expand(parse([f"target={','.join(names)}"]))
    assert [read_target(compose(job)).name for job in jobs] == names
