"""A job stays with its own data-parallel sharding; another is priced and never taken unasked."""

from __future__ import annotations

import dataclasses
import io
from argparse import Namespace
from collections.abc import Mapping

import pytest
from rich.console import Console

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, rewrite_command, with_launch
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.planning import require_planned
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.search_space import free_parameters
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import plan_command, read_request
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner import plan
from nest_megatron.report.html import html_report
from nest_megatron.report.terminal import explain_report, plan_report
from nest_megatron.solver.space import DEFAULT_LIMITS

TORCH_FSDP2 = "--use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dist"


COMMAND = """
torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --hidden-size 4096
 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
 --seq-length 8192 --max-position-embeddings 8192 --swiglu --disable-bias-linear
 --normalization RMSNorm --position-embedding-type rope --untie-embeddings-and-output-weights
 --vocab-size 128256 --tokenizer-type HuggingFaceTokenizer --global-batch-size 128 --bf16
"""


def job(flags: str) -> str:
    """Llama-3 8B on two nodes."""
    return f"{COMMAND.strip()} {flags}".replace("\n", "")


def planned(
    command: str, free: str = "", version: str = "0.16", *settings: str
) -> tuple[ParallelPlan, Mapping[str, object]]:
    composed = compose(parse(["cluster=dgx_h100", "search.num_alternatives=1", *settings]))
    names = free.split(",") if free else []
    read, request = read_request(
        TypedCommand(text=command, free=tuple(names), version=version), composed
    )
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    assert read.command is not None
    argv = rewrite_command(found, read.command).argv
    return found, read_command(["pretrain_gpt.py", *argv], version).values


WIDE = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1"


def tight(flags: str = "") -> str:
    """A job whose replicas are short of memory, so that dividing more of it is faster."""
    return job(f"{WIDE} {flags}").replace("--num-layers 32", "--num-layers 38")


def test_a_job_is_not_moved_to_megatron_fsdp() -> None:
    found, values = planned(job(WIDE))
    assert not found.arguments["use_megatron_fsdp"]
    assert values["ckpt_format"] != "fsdp_dtensor"


def test_what_it_would_gain_is_said_with_what_it_needs() -> None:
    found, _ = planned(tight("--ckpt-format torch_dist"))
    offer = found.offers[0]
    assert "through Megatron-FSDP" in offer
    assert "% faster" in offer
    assert "it needs ckpt_format fsdp_dtensor" in offer
    assert offer.endswith("--free use_megatron_fsdp,ckpt_format")


def test_it_is_searched_within_the_limits_of_the_plan() -> None:
    short = job(WIDE).replace("--seq-length 8192", "--seq-length 512")
    typed = TypedCommand(text=short, free=())
    _, request = read_request(typed, compose(parse(["cluster=dgx_h100"])))
    assert request.offer is not None
    assert request.space.limits["micro_batch_size"] > DEFAULT_LIMITS["micro_batch_size"]
    assert request.offer.space.limits == request.space.limits


def test_it_is_taken_where_it_is_freed() -> None:
    found, values = planned(job(WIDE), "use_megatron_fsdp")
    assert (found.arguments["use_megatron_fsdp"], values["ckpt_format"]) == (True, "fsdp_dtensor")
    assert not any("Megatron-FSDP" in offer for offer in found.offers)


TO_FSDP = "use_megatron_fsdp"
OWN_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
)


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_a_job_that_comes_to_megatron_fsdp_gets_every_flag(version: str) -> None:
    """Measured on gloo: without the last one 0.20 trains with 16-bit gradients."""
    found, values = planned(job(WIDE), TO_FSDP, version)
    assert found.arguments["use_megatron_fsdp"]
    assert values["init_model_with_meta_device"] is True
    assert values["gradient_accumulation_fusion"] is False
    assert values["use_distributed_optimizer"] is True
    assert values.get("megatron_fsdp_main_grads_dtype") == (None if version == "0.16" else "fp32")


def test_narrow_gradients_stay_narrow() -> None:
    _, values = planned(job(WIDE + " --grad-reduce-in-bf16"), TO_FSDP, "0.20")
    assert values["megatron_fsdp_main_grads_dtype"] == "auto"


def test_what_goes_only_without_it_is_taken_back() -> None:
    typed = "--use-cpu-initialization --check-weight-hash-across-dp-replicas-interval 10"
    found, values = planned(job(f"{WIDE} {typed}"), TO_FSDP, "0.20", "parallel.zero_stage=3")
    assert found.arguments["use_megatron_fsdp"]
    assert not values["use_cpu_initialization"]
    assert values["check_weight_hash_across_dp_replicas_interval"] is None


EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 1024 --expert-tensor-parallel-size 1"
    " --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall"
)


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_what_one_release_cannot_is_taken_back_there(version: str) -> None:
    """0.16.1 makes no groups of experts within an instance, and overlaps layers without forward."""
    typed = "--num-distributed-optimizer-instances 2 --overlap-moe-expert-parallel-comm"
    command = job(f"{WIDE} {EXPERTS} {typed}")
    found, values = planned(command, TO_FSDP, version, "parallel.zero_stage=3")
    assert found.arguments["use_megatron_fsdp"]
    kept = version == "0.20"
    assert values["num_distributed_optimizer_instances"] == (2 if kept else 1)
    assert kept or not values["overlap_moe_expert_parallel_comm"]


def test_what_goes_only_with_it_is_taken_back() -> None:
    """On the meta device alone, 0.16.1 and 0.20 start from whatever memory holds."""
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --init-model-with-meta-device"
    found, values = planned(
        job(flags), "use_megatron_fsdp,ckpt_format", "0.20", "parallel.zero_stage=1"
    )
    assert not found.arguments["use_megatron_fsdp"]
    assert not values["init_model_with_meta_device"]


def test_its_own_fusion_is_its_own() -> None:
    _, values = planned(job(OWN_FSDP))
    assert values["gradient_accumulation_fusion"] is True
    assert values["init_model_with_meta_device"] is True


def test_learned_positions_are_not_moved_to_it() -> None:
    learned = job(WIDE).replace("--position-embedding-type rope", "")
    assert not planned(learned, TO_FSDP)[0].arguments["use_megatron_fsdp"]
    found, values = planned(f"{learned} {OWN_FSDP}")
    assert found.arguments["use_megatron_fsdp"]
    assert not values["init_model_with_meta_device"]


def test_its_second_version_is_refused() -> None:
    flags = "--use-megatron-fsdp --ckpt-format fsdp_dtensor --megatron-fsdp-version 2"
    with pytest.raises(UserInputError, match="--megatron-fsdp-version"):
        planned(job(flags), "", "0.20")


def test_a_typed_checkpoint_format_is_freed_by_its_own_name() -> None:
    typed = job(WIDE + " --ckpt-format torch_dist")
    found, values = planned(typed, "use_megatron_fsdp")
    assert (found.arguments["use_megatron_fsdp"], values["ckpt_format"]) == (False, "torch_dist")
    assert planned(typed, "use_megatron_fsdp,ckpt_format")[0].arguments["use_megatron_fsdp"]
    assert planned(typed, "all")[1]["ckpt_format"] in ("torch_dist", "fsdp_dtensor")


@pytest.mark.parametrize(
    ("flags", "owner"),
    [
        ("--ckpt-format fsdp_dtensor", "--use-megatron-fsdp"),
        (f"{TORCH_FSDP2} --ckpt-format fsdp_dtensor", "--use-megatron-fsdp"),
        ("--ckpt-format torch_dist --use-megatron-fsdp", "--use-megatron-fsdp"),
        ("--ckpt-format torch_dcp", "--use-torch-fsdp2"),
    ],
)
@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_a_format_that_the_sharding_cannot_save_is_refused(
    flags: str, owner: str, version: str
) -> None:
    with pytest.raises(UserInputError, match=f"--ckpt-format.*{owner}.*refuses") as refusal:
        planned(job(flags), "", version)
    assert "--free ckpt_format" in str(refusal.value)
    _, values = planned(job(flags), "ckpt_format", version)
    assert (values["ckpt_format"] == "fsdp_dtensor") is values["use_megatron_fsdp"]
    assert values["ckpt_format"] != "torch_dcp"


def test_our_own_setting_asks_for_it() -> None:
    found, _ = planned(job(WIDE), "", "0.16", "parallel.zero_stage=3")
    assert found.arguments["data_parallel_sharding_strategy"] == "optim_grads_params"


@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_a_job_is_not_moved_away_from_megatron_fsdp(strategy: str) -> None:
    flags = (
        f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} "
        "--ckpt-format fsdp_dtensor --use-distributed-optimizer"
    )
    found, values = planned(job(flags))
    assert found.arguments["use_megatron_fsdp"]
    assert values["use_megatron_fsdp"]
    assert values["data_parallel_sharding_strategy"] == strategy
    assert found.layout.dims.pipeline_model_parallel_size == 1
    assert found.layout.zero.name in {"optim": "OPTIMIZER", "optim_grads": "GRADIENTS"}.get(
        strategy, "WEIGHTS"
    )


def test_torch_fsdp2_stays() -> None:
    found, values = planned(job(TORCH_FSDP2))
    assert values["use_torch_fsdp2"]
    assert not values["use_distributed_optimizer"]
    assert not values["use_megatron_fsdp"]
    assert values["ckpt_format"] == "torch_dist"
    assert int(found.layout.zero) == 3
    launch = with_launch(found).launch[LAUNCHER]
    assert launch.environment["CUDA_DEVICE_MAX_CONNECTIONS"] is None


SMALL = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512"
    " --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 50304"
    " --micro-batch-size 4 --global-batch-size 64 --bf16 --untie-embeddings-and-output-weights"
)


def test_what_is_offered_to_torch_fsdp2_is_what_changes() -> None:
    found, _ = planned(f"{SMALL} {TORCH_FSDP2}")
    offer = found.offers[0]
    assert "without PyTorch FSDP2" in offer
    assert "Megatron-FSDP" not in offer
    assert "--ckpt-format" not in offer
    assert offer.endswith("To have it: --free use_torch_fsdp2")


def test_torch_fsdp2_is_freed_by_its_own_name() -> None:
    _, values = planned(f"{SMALL} {TORCH_FSDP2}", "use_torch_fsdp2")
    assert not values["use_torch_fsdp2"]
    assert not values["use_megatron_fsdp"]
    assert values["ckpt_format"] == "torch_dist"


def test_torch_dcp_is_no_format_of_what_is_offered() -> None:
    flags = TORCH_FSDP2.replace("torch_dist", "torch_dcp")
    (offer,) = planned(f"{SMALL} {flags}")[0].offers
    assert "it needs ckpt_format torch_dist" in offer
    assert offer.endswith("--free use_torch_fsdp2,ckpt_format")
    _, values = planned(f"{SMALL} {flags}", "use_torch_fsdp2,ckpt_format")
    assert (values["use_torch_fsdp2"], values["ckpt_format"]) == (False, "torch_dist")


def test_a_report_of_torch_fsdp2_says_that_it_is_zero_3() -> None:
    found, _ = planned(job(TORCH_FSDP2))
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(plan_report(found), explain_report(found, ()))
    text = console.export_text()
    assert "every replica keeps all" not in text
    assert text.count("ZeRO-3 (PyTorch FSDP2)") == 2
    assert "every replica keeps all" not in html_report(found)


def test_no_note_moves_torch_fsdp2_to_megatron_fsdp() -> None:
    read = read_job(read_command(job(TORCH_FSDP2)))
    assert not [note for note in read.notes if "Megatron-FSDP" in note]


def test_torch_fsdp2_with_a_pipeline_is_refused() -> None:
    with pytest.raises(UserInputError, match="FSDP has no pipeline dimension"):
        planned(job(TORCH_FSDP2 + " --pipeline-model-parallel-size 2"))


@pytest.mark.parametrize("version", ["0.16", "0.20"])
@pytest.mark.parametrize("optimizer", ["muon", "dist_muon"])
def test_muon_gets_no_flag_that_megatron_refuses(optimizer: str, version: str) -> None:
    _, values = planned(job(f"--optimizer {optimizer}"), "use_megatron_fsdp", version)
    assert not values["use_megatron_fsdp"]
    if version == "0.16":
        names = ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
        assert not any(values[name] for name in names)


@pytest.mark.parametrize(
    ("optimizer", "version", "overlaps"),
    [
        ("muon", "0.16", False),
        ("dist_muon", "0.16", False),
        ("muon", "0.17", False),
        ("dist_muon", "0.17", True),
        ("muon", "0.18", True),
        ("adam", "0.16", True),
    ],
)
def test_gradients_are_priced_and_written_as_the_optimizer_reduces_them(
    optimizer: str, version: str, overlaps: bool
) -> None:
    command = job(f"--optimizer {optimizer}")
    composed = compose(parse(["cluster=dgx_h100", "search.num_alternatives=1"]))
    found = plan_command(
        TypedCommand(text=command, free=("zero_stage",), version=version), composed
    )
    settings = restored_settings(found.plan.provenance.settings)
    argv = found.plan.launch["megatron_lm"].argv
    told = (found.plan.arguments["overlap_grad_reduce"], "--overlap-grad-reduce" in argv)
    assert (settings.dp_overlap > 0.0, *told) == (overlaps,) * 3


@pytest.mark.parametrize(
    ("optimizer", "version"), [("muon", "0.16"), ("dist_muon", "0.16"), ("muon", "0.17")]
)
def test_an_overlap_that_muon_lacks_is_refused(optimizer: str, version: str) -> None:
    command = job(f"--optimizer {optimizer} --overlap-grad-reduce")
    with pytest.raises(UserInputError, match=f"gradients of {optimizer} after the backward pass"):
        read_job(read_command(command, version))
    read_job(read_command(command, "0.18"))


def test_muon_with_the_distributed_optimizer_is_named() -> None:
    with pytest.raises(UserInputError, match="--optimizer = 'muon'"):
        planned(job("--optimizer muon --use-distributed-optimizer"))


def test_a_recipe_frees_its_sharding_only_where_it_says_so() -> None:
    assert "use_megatron_fsdp" not in free_parameters()
    assert "use_megatron_fsdp" in free_parameters(("all",))


def test_a_text_is_one_choice() -> None:
    assert free_parameters("all") == free_parameters(("all",))
    assert free_parameters(keep="zero_stage") == free_parameters(keep=["zero_stage"])
    with pytest.raises(UserInputError, match="free = 'zero': it is no choice"):
        free_parameters("zero")


def test_a_plan_without_new_choices_is_written_as_before() -> None:
    found, _ = planned(job(WIDE), "use_megatron_fsdp")
    assert "use_torch_fsdp2" not in plan_file.dump(found)
    assert "offers" not in plan_file.dump(dataclasses.replace(found, offers=()))
    offered, _ = planned(tight())
    assert plan_file.load(plan_file.dump(offered)) == offered
    assert dataclasses.replace(offered, offers=()) != offered


@pytest.mark.parametrize("version", ["0.16", "0.20"])
def test_what_a_release_makes_of_muon_is_the_plan(version: str) -> None:
    """0.20 clears ``use_distributed_optimizer`` and divides Muon's state by layers."""
    found, _ = planned(job("--optimizer muon"), "", version)
    args = Namespace(
        **found.arguments | {"use_distributed_optimizer": False},
        micro_batch_size=found.layout.micro_batch_size,
        global_batch_size=found.layout.global_batch_size,
        seq_length=found.train.seq_length,
        num_layers=found.model.num_layers,
        optimizer="muon",
    )
    require_planned(args, found)
