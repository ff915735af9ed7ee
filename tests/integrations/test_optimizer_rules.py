"""Flags of the optimizer and of the run that Megatron refuses beside others."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.integrations.megatron_lm.parser import known_flags, read_command
from nest_megatron.integrations.megatron_lm.read import read_job, require_options
from nest_megatron.integrations.megatron_lm.search_space import for_optimizer
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import CommandPlan, plan_command, read_request
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.rulebook.facts import RELEASES, Facts, Rule, violations
from nest_megatron.layout.rulebook.options import COMMAND_RULES
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from tests import catalogue
from tests.integrations.refused_options import flags_of, has_row
from tests.integrations.test_sharding import job
from tests.launch.jobs import job_argv, namespace, running

AWARE = "--use-distributed-optimizer --use-precision-aware-optimizer"


@pytest.mark.parametrize("version", ["0.16", "0.20"])
@pytest.mark.parametrize(
    "flag",
    [
        "--optimizer-cpu-offload",
        "--main-grads-dtype bf16",
        "--main-params-dtype fp16",
        "--exp-avg-dtype bf16",
        "--exp-avg-sq-dtype fp8",
    ],
)
def test_a_flag_of_the_precision_aware_optimizer_is_refused_without_it(
    flag: str, version: str
) -> None:
    name = flag.split(maxsplit=1)[0]
    with pytest.raises(UserInputError, match=f"{name} = .*--use-precision-aware-optimizer"):
        read_job(read_command(job(f"--use-distributed-optimizer {flag}"), version))
    read_job(read_command(job(f"{AWARE} {flag}"), version))


def test_what_is_single_precision_needs_no_other_flag() -> None:
    read_job(read_command(job("--main-grads-dtype fp32 --exp-avg-dtype fp32")))


def test_a_launch_is_refused_before_its_tokenizer_is_built() -> None:
    argv = job_argv(catalogue.model("llama3_8b"), "--optimizer-cpu-offload")
    with pytest.raises(UserInputError, match="--optimizer-cpu-offload = True"):
        running(namespace(argv), argv)


@pytest.mark.parametrize(
    "flags",
    ["--bf16 --fp8-format hybrid --fp8-param-gather", "--use-precision-aware-optimizer"],
)
def test_a_flag_that_divides_states_keeps_them_divided(flags: str) -> None:
    read = read_job(read_command(job(f"--use-distributed-optimizer {flags}")))
    every = (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    assert for_optimizer(every, read) == (ZeroStage.OPTIMIZER,)
    with pytest.raises(UserInputError, match="refuses it without --use-distributed-optimizer"):
        for_optimizer((ZeroStage.NONE,), read)


@pytest.mark.parametrize("needs", ["--fp8-format hybrid --fp8-param-gather", AWARE])
def test_megatron_fsdp_that_divides_nothing_has_that_optimizer(needs: str) -> None:
    """``--use-megatron-fsdp`` by itself divides nothing before 0.17."""
    fsdp = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor --bf16"
    argv = planned(f"{fsdp} {needs}", "0.16").plan.launch[LAUNCHER].argv
    assert argv[argv.index("--data-parallel-sharding-strategy") + 1] == "no_shard"


def test_other_jobs_may_keep_states_whole() -> None:
    read = read_job(read_command(job("--use-distributed-optimizer")))
    assert for_optimizer((ZeroStage.NONE,), read) == (ZeroStage.NONE,)


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_fp8_weights_are_offloaded_with_delayed_scaling_alone(version: str) -> None:
    flags = f"{AWARE} --optimizer-cpu-offload --bf16 --fp8-format hybrid --fp8-param-gather"
    with pytest.raises(UserInputError, match="--fp8-recipe = 'tensorwise'"):
        read_job(read_command(job(f"{flags} --fp8-recipe tensorwise"), version))
    read_job(read_command(job(f"{flags} --fp8-recipe delayed"), version))


@pytest.mark.parametrize(
    "flags",
    [
        "--train-iters 1000 --train-samples 1000000",
        "--train-iters 1000 --lr-decay-samples 500000",
        "--train-iters 1000 --lr-warmup-samples 500",
        "--train-samples 1000000 --lr-decay-iters 1000",
        "--train-samples 1000000 --lr-warmup-iters 10",
        "--train-iters 1000 --lr-warmup-fraction 0.1 --lr-warmup-iters 10",
    ],
)
def test_the_options_of_a_run_are_of_its_length(flags: str) -> None:
    for version in ("0.16", "0.20"):
        with pytest.raises(UserInputError, match=f"Megatron-LM {version} refuses it beside --"):
            read_job(read_command(job(flags), version))


def test_a_run_that_trains_nothing_has_no_length_since_0_17() -> None:
    flags = "--skip-train --train-iters 1000 --train-samples 1000000"
    read_job(read_command(job(flags), "0.17"))
    with pytest.raises(UserInputError, match=r"--train-samples = 1000000: .*beside --train-iters"):
        read_job(read_command(job(flags), "0.16"))


@pytest.mark.parametrize(
    "flags",
    [
        "--train-iters 1000 --lr-decay-iters 900 --lr-warmup-iters 10",
        "--train-samples 1000000 --lr-decay-samples 900000 --lr-warmup-fraction 0.1",
    ],
)
def test_a_run_has_one_length(flags: str) -> None:
    assert read_job(read_command(job(flags), "0.16")).command is not None


def facts(options: dict[str, Any], version: str) -> Facts:
    return Facts(options=options, version=version, framework=MEGATRON_LM)


@pytest.mark.parametrize(
    "rule",
    [rule for rule in COMMAND_RULES if MEGATRON_LM in (rule.framework or MEGATRON_LM)],
    ids=lambda rule: rule.id,
)
def test_flags_that_megatron_refuses_together_are_refused(rule: Rule) -> None:
    """tests/megatron_lm/test_real_arguments.py asks Megatron itself."""
    flags = flags_of(rule.id)
    starts = [n for n, word in enumerate(flags) if word.startswith("--")]
    end = [*starts[1:], len(flags)][0]
    for version in (each for each in RELEASES if has_row(rule.id, each)):
        if {flags[n] for n in starts} <= known_flags(version):
            values = read_command(["pretrain_gpt.py", *flags], version).values
            ((_, broken),) = violations(facts(values, version), [rule])
            assert broken.limit.startswith(f"Megatron-LM {version} refuses it")
            rest = read_command(["pretrain_gpt.py", *flags[end:]], version).values
            assert rule.keeps(facts(rest, version))


def test_a_capacity_of_expert_ranks_needs_fused_operations_with_hybridep_alone() -> None:
    """Since 0.19 NCCL EP, and since 0.20 grouped tensors, do without."""
    options = {"moe_expert_rank_capacity_factor": 1.5, "moe_token_dispatcher_type": "flex"}
    options["moe_flex_dispatcher_backend"] = "hybridep"
    with pytest.raises(UserInputError, match="Add --use-transformer-engine-op-fuser"):
        require_options(options, "0.19")
    own = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "ncclep"}
    require_options({**options, **own}, "0.19")
    tensors = dict.fromkeys(("moe_use_grouped_tensor", "moe_grouped_gemm", "num_experts"), 8)
    require_options({**options, **tensors}, "0.20")


def test_a_capacity_of_expert_ranks_keeps_its_backend() -> None:
    flags = "--moe-expert-rank-capacity-factor 1.5 --use-transformer-engine-op-fuser"
    backend = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
    read = read_job(read_command(job(f"{flags} {backend}"), "0.19"))
    assert {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"} <= read.closed
    assert "moe_token_dispatcher_type" not in read_job(read_command(job(backend), "0.19")).closed


def test_options_of_a_running_job_are_members_of_enumerations() -> None:
    """As Megatron's own parser makes them of the names of modules."""
    module = enum.Enum("CudaGraphModule", ("attn", "moe", "moe_router"))
    options = {"cuda_graph_impl": "local", "cuda_graph_modules": [module.moe, module.moe_router]}
    refused = r"= \['moe', 'moe_router'\]: .* refuses it beside --cuda-graph-modules moe_router"
    with pytest.raises(UserInputError, match=refused):
        require_options({**options, "num_experts": 8}, "0.19")
    scope = enum.Enum("InferenceCudaGraphScope", ("layer", "block"))
    options = {"cuda_graph_impl": "none"}
    with pytest.raises(UserInputError, match="--inference-cuda-graph-scope = 'block'"):
        require_options(
            {"inference_cuda_graph_scope": scope.block, "cuda_graph_impl": "none"}, "0.19"
        )


@pytest.mark.parametrize(
    ("flag", "without", "fix"),
    [
        ("--use-distributed-optimizer", "", "Drop one of the two"),
        ("", "--no-gradient-accumulation-fusion", "Add --no-gradient-accumulation-fusion"),
        ("--ckpt-format torch", "", "Drop one of the two"),
        ("", "--untie-embeddings-and-output-weights", "Add --untie-embeddings-and-output-weights"),
        ("--fp16", "", "Drop one of the two"),
    ],
)
def test_what_fsdp2_of_pytorch_does_not_go_with(flag: str, without: str, fix: str) -> None:
    fitting = job(
        "--use-torch-fsdp2 --no-gradient-accumulation-fusion --untie-embeddings-and-output-weights"
    )
    unfit = f"{fitting} {flag}".replace(without, "")
    for version in ("0.15", "0.20"):
        read_job(read_command(fitting, version))
        with pytest.raises(UserInputError, match=fix):
            read_job(read_command(unfit, version))


def test_a_batch_grows_by_samples_before_0_18() -> None:
    flags = "--train-iters 1000 --rampup-batch-size 4 4 1000"
    with pytest.raises(UserInputError, match=r"0\.17 refuses it beside --train-iters"):
        read_job(read_command(job(flags), "0.17"))
    read_job(read_command(job(flags), "0.18"))


NODE = "torchrun --nproc-per-node 8 "


def planned(flags: str, version: str = "0.19") -> CommandPlan:
    typed = TypedCommand(text=NODE + job(flags), free=(), version=version)
    return plan_command(typed, compose(parse(["cluster=dgx_h100"])))


def test_parameters_are_saved_without_gathers_beside_forward_passes() -> None:
    saves = "--save here --save-interval 10"
    assert planned(saves).plan.arguments["overlap_param_gather"]
    found = planned(f"{saves} --save-params-interval 10").plan
    assert found.arguments["use_distributed_optimizer"]
    assert not found.arguments["overlap_param_gather"]
    assert "--overlap-param-gather" not in found.launch[LAUNCHER].argv


def test_choices_are_priced_with_the_gathers_that_the_job_may_have() -> None:
    saves = f"{job('--save here --save-interval 10')} --save-params-interval 10"
    typed = TypedCommand(text=NODE + saves, free=(), version="0.19")
    _, request = read_request(typed, compose(parse(["cluster=dgx_h100"])))
    settings = [request.settings, *(each.settings for each in request.numeric_offers)]
    assert len(settings) > 1
    assert not any(each.traits.overlap_param_gather for each in settings)


@pytest.mark.parametrize(("kind", "stays"), [("torch", False), ("torch_dist", True)])
def test_divided_states_are_collected_over_gloo(kind: str, *, stays: bool) -> None:
    flag = "--disable-gloo-process-groups"
    found = planned(f"{flag} --ckpt-format {kind}")
    assert found.plan.arguments["use_distributed_optimizer"]
    assert (flag in found.plan.launch[LAUNCHER].argv) is stays
    assert any(change.field == flag for change in found.changes) is not stays


def test_a_job_that_does_not_train_is_refused_or_named() -> None:
    with pytest.raises(UnplannableModelError, match="--freeze-all-layers = True: nothing would be"):
        read_job(read_command(job("--freeze-all-layers"), "0.19"))
    (note,) = read_job(read_command(job("--skip-train"))).notes
    assert note.startswith("--skip-train: nothing is trained")


@pytest.mark.parametrize(
    "script",
    [
        "tools/run_text_generation_server.py",
        "generate_samples_gpt.py",
        "tools/merge_mp_partitions.py",
        "examples/inference/gpt/gpt_static_inference.py",
        "tools/checkpoint/convert.py",
        "tasks/main.py",
        "tasks/msdp/main.py",
        "examples/post_training/modelopt/quantize.py",
    ],
)
def test_a_program_that_does_not_train_is_refused(script: str) -> None:
    command = job("").replace("pretrain_gpt.py", script)
    with pytest.raises(UnplannableModelError, match=f"{script}.*it runs another job than"):
        read_job(read_command(command))


def test_batch_invariant_attention_is_of_whole_sequences() -> None:
    """Since 0.19; ``TransformerConfig`` refuses context parallelism beside it."""
    kernels = "--attention-backend flash --flash-attention-version 3"
    flags = f"--batch-invariant-mode {kernels} --context-parallel-size 2"
    limit = "--batch-invariant-mode needs 1"
    for version in ("0.19", "0.20"):
        with pytest.raises(UserInputError, match=f"--context-parallel-size = 2: {limit}"):
            planned(flags, version)
    assert read_job(read_command(job(flags), "0.18")).required == {}


@pytest.mark.parametrize(("optimizer", "stays"), [("muon", False), ("adam", True)])
def test_matrices_of_muon_are_divided_in_one_instance(optimizer: str, *, stays: bool) -> None:
    """``LayerWiseDistributedOptimizer`` ends on several, which validation lets pass."""
    flag = "--num-distributed-optimizer-instances"
    found = planned(f"--optimizer {optimizer} {flag} 2", "0.20").plan
    assert found.arguments["use_distributed_optimizer"]
    assert (flag in found.launch[LAUNCHER].argv) is stays


@pytest.mark.parametrize("version", RELEASES)
def test_states_of_sgd_stay_whole(version: str) -> None:
    """``DistributedOptimizer`` takes Adam's alone; validation does not look."""
    read = read_job(read_command(job("--optimizer sgd"), version))
    assert for_optimizer(tuple(ZeroStage), read) == (ZeroStage.NONE,)
    torch_fsdp, weights = DataParallelSharding.TORCH_FSDP2, (ZeroStage.WEIGHTS,)
    assert for_optimizer(weights, read, torch_fsdp) == weights


def test_sequences_are_whole_in_the_norms_of_own_layers() -> None:
    """``WrappedTorchNorm`` ends on sequence parallelism, which validation lets pass."""
    own = "--transformer-impl local --no-persist-layer-norm --tensor-model-parallel-size 4"
    for norm, stays_whole in (("RMSNorm", True), ("LayerNorm", False)):
        layout = planned(f"{own} --normalization {norm}").plan.layout
        assert layout.dims.tensor_model_parallel_size == 4
        assert layout.sequence_parallel is not stays_whole
    with pytest.raises(UserInputError, match="refuses it beside --transformer-impl local"):
        planned(f"{own} --normalization RMSNorm --sequence-parallel")
