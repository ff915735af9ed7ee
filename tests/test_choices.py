"""Choices about speed are searched and written; ``search.keep`` forbids single ones."""

from __future__ import annotations

import dataclasses
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import compose
from nest_megatron.config.job import fixed_choices, installed_packages
from nest_megatron.config.launch import read_words
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.execution_flags import execution_of, execution_traits, time_notes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import NUMERIC_FIELDS
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, with_launch
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.execution_rules import EXECUTION_ARGUMENTS
from nest_megatron.layout.knobs import (
    KNOBS,
    KnobConditions,
    Package,
    always_on,
    choices_of_execution,
    open_values,
    unknown_packages,
)
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.numeric_knobs import MEMORY_KNOBS, NUMERIC_KNOBS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.layout.stage_layout import uniform_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution, FlexBackend, GraphImpl, TokenDispatcher
from nest_megatron.planner import plan
from tests import catalogue
from tests.estimates import estimate_plan
from tests.integrations.requests import CARRIED
from tests.knob_tables import (
    LEFT_KNOBS,
    framework_table,
    knob_table,
    left_table,
    newer_table,
    numeric_table,
)

EXPERTS = (
    "model=mixtral_8x7b",
    "cluster=dgx_h100",
    "cluster.num_gpus=32",
    "train.global_batch_size=64",
    "parallel.expert_model_parallel_size=8",
    "parallel.expert_tensor_parallel_size=1",
    "parallel.tensor_model_parallel_size=2",
    "parallel.pipeline_model_parallel_size=1",
    "parallel.zero_stage=1",
    "search.num_alternatives=1",
)
LLAMA_WORDS = (
    "--num-layers 16 --hidden-size 2048 --num-attention-heads 32 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 64 --bf16"
)
LLAMA = LLAMA_WORDS.split()


def planned(*words: str) -> ParallelPlan:
    composed = compose(parse([*EXPERTS, *words]))
    request = request_of(composed, choose_execution=True)
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    return with_launch(found)


def flags_of(found: ParallelPlan) -> dict[str, Any]:
    command = read_argv("pretrain_gpt.py", found.launch[LAUNCHER].argv, "0.16")
    return dict(command.values)


def test_a_plan_writes_how_its_layers_were_priced() -> None:
    found = planned()
    flags = flags_of(found)
    assert found.layout.execution.moe_permute_fusion
    assert found.layout.execution.tp_comm_overlap
    assert execution_of(flags) == found.layout.execution
    assert found.search.certificate in ("optimal", "chosen")


def test_keep_forbids_single_choices() -> None:
    free, kept = planned(), planned("search.keep=[tp_comm_overlap,moe_permute_fusion]")
    assert not kept.layout.execution.tp_comm_overlap
    assert not kept.layout.execution.moe_permute_fusion
    assert "--tp-comm-overlap" not in kept.launch[LAUNCHER].argv
    assert kept.predicted.iteration_time_s > free.predicted.iteration_time_s
    none = planned("search.keep=[all]")
    assert none.layout.execution == Execution()


def test_nest_keep_is_search_keep() -> None:
    (setting,) = read_words(["+nest=auto", "nest.keep=[cp_comm_type]"]).job
    assert (setting.key, setting.value) == ("search.keep", "[cp_comm_type]")
    (setting,) = read_words(["+nest=auto", "nest.keep=all"]).job
    assert (setting.key, setting.value) == ("search.keep", "[all]")


def test_a_launch_has_the_short_names_of_settings() -> None:
    found = read_words(["+nest=auto", "nest.gpus=64", "nest.max_seconds=5"]).job
    assert [str(each) for each in found] == ["cluster.num_gpus=64", "search.max_seconds=5"]


def test_a_dispatcher_is_chosen_only_where_its_package_is_known() -> None:
    assert planned().layout.execution.moe_token_dispatcher_type is TokenDispatcher.ALLTOALL
    found = planned("search.packages=[hybrid_ep]").layout.execution
    assert found.moe_flex_dispatcher_backend in (None, FlexBackend.HYBRIDEP)
    assert installed_packages() == ()  # none of them is in the tests' environment


@pytest.mark.parametrize("word", ["search.keep=[cp_com_type]", "search.packages=[deepep]"])
def test_names_that_are_none_are_refused(word: str) -> None:
    with pytest.raises(UserInputError, match=r"there is no such choice|no choice needs"):
        planned(word)


def test_what_a_user_typed_is_held_until_it_is_freed() -> None:
    config = compose([])
    assert fixed_choices(config, {"cuda_graph_scope", "seq_length"}) == {"cuda_graphs"}
    assert fixed_choices(config, {"cp_comm_type"}, {"cp_comm_type"}) == frozenset()


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("name", CARRIED)
def test_flags_of_each_release_say_the_same_again(name: str, version: str) -> None:
    request = dataclasses.replace(CARRIED[name], version=version)
    if any(check(request)):
        pytest.skip(f"{version} has no such choice")
    argv = parallel_argv(request)
    command = read_argv("pretrain_gpt.py", argv, version)
    assert not command.unknown
    assert execution_of(command.values) == request.execution or not request.spec.is_moe
    if not request.spec.is_moe:  # whose command names no dispatcher
        said = {**command.values, "moe_token_dispatcher_type": None}
        assert execution_of(said) == request.execution


def test_every_field_has_a_knob_an_argument_and_a_reason() -> None:
    fields = {field.name for field in dataclasses.fields(Execution) if field.init}
    assert {knob.name for knob in KNOBS} == fields
    assert set(choices_of_execution()) == set(EXECUTION_ARGUMENTS)
    assert all(knob.reason and knob.costs and knob.flag.startswith("--") for knob in KNOBS)
    assert all(knob.changes for knob in NUMERIC_KNOBS)


def test_the_page_shows_the_tables() -> None:
    page = Path(__file__).parents[1].joinpath("docs", "knobs.md").read_text(encoding="utf-8")
    assert knob_table() in page
    assert newer_table() in page
    assert numeric_table() in page
    assert left_table() in page
    assert framework_table() in page
    for words in NUMERIC_FIELDS.values():
        assert set(words) == {knob.flags for knob in chain(NUMERIC_KNOBS, *MEMORY_KNOBS)}


def test_an_unknown_package_is_an_offer_at_the_price_of_this_layout() -> None:
    found = planned("cluster=dgx_a100")
    assert not any("flex" in offer for offer in found.offers)  # its kernels need Hopper
    many = (
        "model=qwen3_30b_a3b",
        "cluster.num_gpus=64",
        "train.global_batch_size=64",
        "parallel.tensor_model_parallel_size=1",
        "parallel.expert_model_parallel_size=32",
    )
    found = planned(*many)
    (offer,) = (offer for offer in found.offers if "--moe-token-dispatcher-type flex" in offer)
    assert "search.packages=[deep_ep]" in offer
    kept = planned(*many, "search.keep=[token_dispatcher]")
    assert not any("flex" in offer for offer in kept.offers)


#: A step in which the host launches kernels more slowly than the device runs them.
SMALL_STEP = (
    "model=llama3_2_1b",
    "cluster.num_gpus=8",
    "parallel.expert_model_parallel_size=null",
    "parallel.expert_tensor_parallel_size=null",
    "train.seq_length=2048",
    "train.micro_batch_size=1",
)


def test_graphs_are_captured_where_the_host_is_slower_than_the_device() -> None:
    found = planned(*SMALL_STEP)
    assert found.layout.execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
    assert found.launch[LAUNCHER].environment["NCCL_GRAPH_REGISTER"] == "0"
    kept = planned(*SMALL_STEP, "search.keep=[cuda_graphs]")
    assert kept.layout.execution.cuda_graph_impl is GraphImpl.NONE
    assert kept.predicted.iteration_time_s > found.predicted.iteration_time_s
    large = planned(*SMALL_STEP, "train.micro_batch_size=8", "train.seq_length=8192")
    assert large.layout.execution.cuda_graph_impl is GraphImpl.NONE
    graphs = planned(*SMALL_STEP, "cost.host_kernel_s=0").layout.execution.cuda_graph_impl
    assert graphs is GraphImpl.NONE


@pytest.mark.parametrize(("release", "graphs"), [("0.15", False), ("0.16", True)])
def test_graphs_are_chosen_since_they_go_with_expandable_segments(
    release: str, graphs: bool
) -> None:
    words = [*EXPERTS, *SMALL_STEP, f"target=megatron_lm_{release}"]
    asked = request_of(compose(parse(words)), choose_execution=True)
    assert ("cuda_graph_impl" in asked.space.executions) is graphs


@pytest.mark.parametrize(
    ("words", "version", "closed"),
    [
        ("--moe-router-load-balancing-type quantile_balancing", "0.19", {"moe_router_fusion"}),
        ("--moe-enable-routing-replay", "0.16", {"moe_router_fusion"}),
        (
            "--batch-invariant-mode --attention-backend flash --flash-attention-version 3",
            "0.20",
            {"moe_permute_fusion"},
        ),
        ("--moe-router-load-balancing-type aux_loss", "0.20", set()),
        (
            "--overlap-dispatch-backward-with-experts-wgrad",
            "0.19",
            {"overlap_moe_expert_parallel_comm"},
        ),
    ],
)
def test_kernels_that_an_option_excludes_are_no_choice(
    words: str, version: str, closed: set[str]
) -> None:
    """Quantile balancing passes validation, and ends in the first forward pass."""
    job = read_job(read_argv("pretrain_gpt.py", [*LLAMA, *words.split()], version))
    assert job.closed == closed


def test_graphs_around_experts_hold_what_has_fixed_shapes() -> None:
    few = ("parallel.expert_model_parallel_size=8", "train.seq_length=1024")
    few = (*few, "train.micro_batch_size=2")
    found = planned("model=deepseek_v2_lite", *few).layout.execution
    assert found.cuda_graph_scope == ("attn", "moe_router", "moe_preprocess")
    alone = planned(
        "model=deepseek_v2_lite", *few, "search.keep=[overlap_moe_expert_parallel_comm]"
    )
    assert alone.layout.execution.cuda_graph_scope[1] == "mlp"  # of the one dense layer


_DELAYED = "--delay-wgrad-compute --overlap-moe-expert-parallel-comm"
_UNCAPTURED = ("--add-qkv-bias", "--no-gradient-accumulation-fusion")


@pytest.mark.parametrize(
    "words",
    [
        *("--sft", "--rampup-batch-size 32 32 1000", "--spec a b"),
        *(f"{_DELAYED} --disable-bias-linear {word}" for word in _UNCAPTURED),
        "--inference-batch-times-seqlen-threshold 4",
    ],
)
def test_steps_that_megatron_does_not_capture_have_no_graphs(words: str) -> None:
    argv = [*LLAMA, *words.split()]
    job = read_job(read_argv("pretrain_gpt.py", argv, "0.16"))
    assert not job.capturable
    plain = [*LLAMA, *_DELAYED.split(), "--disable-bias-linear"]
    assert read_job(read_argv("pretrain_gpt.py", plain, "0.16")).capturable
    words = "--bf16 --fp8-format hybrid --moe-router-padding-for-fp8 --num-experts 8"
    padded = read_argv("pretrain_gpt.py", [*LLAMA, *words.split()], "0.16")
    assert read_job(padded).counts_on_host


def test_a_deterministic_job_is_given_no_user_buffers() -> None:
    """0.20 refuses them: ``training/determinism.py``."""
    words = [*LLAMA, "--deterministic-mode"]
    job = read_job(read_argv("pretrain_gpt.py", words, "0.20"))
    assert job.closed == {"tp_comm_overlap"}
    free = read_job(read_argv("pretrain_gpt.py", list(LLAMA), "0.20"))
    assert not free.closed


def test_packed_sequences_leave_no_room_for_some_choices() -> None:
    """The schedule of two micro batches would lose where sequences begin."""
    packed = read_job(read_argv("pretrain_gpt.py", [*LLAMA, "--sft"], "0.16"))
    plain = read_job(read_argv("pretrain_gpt.py", LLAMA, "0.16"))
    assert plain.closed == frozenset()
    setting = KnobConditions(
        spec=catalogue.model("mixtral_8x7b"), accelerator="H100-SXM-80GB", closed=packed.closed
    )
    values = open_values(setting)
    assert "overlap_moe_expert_parallel_comm" not in values
    assert "cp_comm_type" not in values
    assert always_on(Execution(), setting).tp_comm_overlap


def test_nccl_ep_is_read_and_priced_as_hybridep_with_a_note() -> None:
    def flags(backend: str) -> dict[str, Any]:
        words = f"--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend {backend}"
        return dict(read_argv("pretrain_gpt.py", words.split(), "0.20").values)

    spec, cluster = catalogue.model("mixtral_8x7b"), catalogue.cluster("dgx_h100", 64)
    dims = ParallelDims(data_parallel_size=64, expert_model_parallel_size=8)
    steps = []
    for backend in ("hybridep", "ncclep"):
        execution = execution_of(flags(backend))
        assert execution.moe_flex_dispatcher_backend == backend
        grid = PartialLayout(
            dims=dims,
            global_batch_size=64,
            micro_batch_size=1,
            sequence_parallel=False,
            execution=execution,
        )
        found = estimate_plan(
            spec, cluster, CostSettings(), grid.with_stages(uniform_partition(spec, 1, 1))
        )
        steps.append((found.predicted.iteration_time_s, found.predicted.peak_memory_bytes))
    assert steps[0] == steps[1]
    assert not time_notes(flags("hybridep"))
    (note,) = time_notes(flags("ncclep"))
    assert "HybridEP" in note
    narrow = {**flags("ncclep"), "moe_dispatch_fwd_dtype": "mxfp8"}
    assert len(time_notes(narrow)) == 2


@pytest.mark.parametrize(("device", "deepep"), [("H100-SXM-80GB", True), ("GB200-186GB", False)])
def test_deepep_is_not_for_nvlink_across_hosts(device: str, deepep: bool) -> None:
    setting = KnobConditions(
        spec=catalogue.model("mixtral_8x7b"), accelerator=device, packages=frozenset(Package)
    )
    values = open_values(setting)["moe_flex_dispatcher_backend"]
    assert FlexBackend.HYBRIDEP in values
    assert (FlexBackend.DEEPEP in values) is deepep
    unknown = unknown_packages(dataclasses.replace(setting, packages=frozenset()))
    assert (FlexBackend.DEEPEP in unknown) is deepep
    assert FlexBackend.NCCLEP not in {*values, *unknown}


@pytest.mark.parametrize("precision", [Precision.FP16, Precision.FP32])
def test_user_buffers_of_bfloat16_are_not_for_other_formats(precision: Precision) -> None:
    setting = KnobConditions(spec=catalogue.model("llama3_8b"), accelerator="H100-SXM-80GB")
    assert always_on(Execution(), setting).tp_comm_overlap
    other = dataclasses.replace(setting, precision=precision)
    assert not always_on(Execution(), other).tp_comm_overlap
    words = ["model=llama3_8b", "cluster=dgx_h100", f"train.precision={precision}"]
    request = request_of(compose(parse(words)), choose_execution=True)
    assert not request.space.execution.tp_comm_overlap


def test_a_field_that_the_job_lacks_is_not_chosen() -> None:
    setting = KnobConditions(spec=catalogue.model("mixtral_8x7b"), accelerator="H100-SXM-80GB")
    narrow = dataclasses.replace(setting, can_state=frozenset({"moe_permute_fusion"}))
    assert open_values(narrow) == {}
    assert always_on(Execution(), narrow) == Execution(moe_permute_fusion=True)


ON_GRACE = (
    "model=llama3_70b",
    "cluster=gb200_nvl72",
    "cluster.num_gpus=16",
    "parallel.expert_model_parallel_size=null",
    "parallel.expert_tensor_parallel_size=null",
    "parallel.tensor_model_parallel_size=4",
    "parallel.pipeline_model_parallel_size=4",
    "train.seq_length=24576",
    "train.micro_batch_size=1",
)


def test_activations_wait_on_a_host_that_is_near() -> None:
    engine = "search.packages=[transformer_engine_2_9]"
    found = planned(*ON_GRACE, engine)
    assert found.layout.execution.offload_modules == ("qkv_linear", "core_attn", "attn_proj")
    argv = found.launch[LAUNCHER].argv
    assert "--fine-grained-activation-offloading" in argv
    assert found.launch[LAUNCHER].environment["NVTE_CPU_OFFLOAD_V1"] == "1"
    kept = planned(*ON_GRACE, engine, "search.keep=[activation_offloading]")
    assert kept.predicted.iteration_time_s > found.predicted.iteration_time_s
    unknown = planned(*ON_GRACE)
    assert not unknown.layout.execution.offload_modules
    over_pcie = planned(*ON_GRACE, engine, "cluster=b200")
    assert not over_pcie.layout.execution.offload_modules


@pytest.mark.parametrize("version", RELEASES)
def test_what_is_left_to_the_job_is_a_flag_of_both_releases(version: str) -> None:
    for knob in LEFT_KNOBS:
        value = [] if "instances" not in knob.flag and "size" not in knob.flag else ["2"]
        assert not read_argv("pretrain_gpt.py", [knob.flag, *value], version).unknown


def test_a_stated_size_of_buckets_is_priced() -> None:
    spec, cluster = catalogue.model("llama3_8b"), catalogue.cluster("dgx_h100", 64)
    steps = []
    for size in (None, 1_000_000, 8_000_000_000):
        flags = {"ddp_bucket_size": size}
        settings = CostSettings(traits=execution_traits(flags, Precision.BF16))
        grid = PartialLayout(
            dims=ParallelDims(data_parallel_size=64),
            global_batch_size=64,
            micro_batch_size=1,
            sequence_parallel=False,
            zero=ZeroStage.OPTIMIZER,
        )
        found = estimate_plan(
            spec, cluster, settings, grid.with_stages(uniform_partition(spec, 1, 1))
        )
        steps.append(found.predicted.iteration_time_s)
    # many calls, or one that nothing runs beside
    assert steps[0] < min(steps[1:])
    assert time_notes({"ddp_num_buckets": 4})


def test_instances_of_the_optimizer_are_an_offer_where_they_gain() -> None:
    found = planned(*SMALL_STEP, "cluster.num_gpus=512", "train.global_batch_size=512")
    (said,) = (text for text in found.offers if "--num-distributed-optimizer-instances" in text)
    assert "copies of the optimizer states" in said
    one_host = planned(*SMALL_STEP, "train.global_batch_size=64")
    assert not any("instances" in text for text in one_host.offers)
