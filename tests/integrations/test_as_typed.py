"""A command as it is typed, and beside its plan: the same prices, and sums that are right."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from nest_megatron.api.results import Plan
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.overrides import parse
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import (
    CommandPlan,
    before_and_after,
    estimate_command,
    plan_command,
)
from nest_megatron.layout import plan_file
from nest_megatron.layout.estimate import BeforeAfter, Changes
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.report.layout_tables import verdict
from tests.cli.runs import run

MODEL = (
    "pretrain_gpt.py --num-layers 16 --hidden-size 2048 --num-attention-heads 16 --bf16 "
    "--seq-length 4096 --max-position-embeddings 4096 --vocab-size 32255 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--tokenizer-type NullTokenizer --global-batch-size 64 --micro-batch-size 1 "
)
DENSE = f"torchrun --nproc-per-node 8 --nnodes 2 {MODEL}--tensor-model-parallel-size 4 "
DENSE += "--pipeline-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer "
STAGES = DENSE.replace("parallel-size 2", "parallel-size 4")
STAGES += "--num-virtual-stages-per-pipeline-rank 2 "
EXPERTS = DENSE + "--num-experts 8 --moe-router-topk 2 --moe-grouped-gemm "
EXPERTS += "--expert-model-parallel-size 2 "


def settings(*words: str) -> Settings:
    return compose(parse(["cluster=dgx_h100", *words]), None)


def typed(command: str, *words: str) -> ParallelPlan:
    return estimate_command(TypedCommand(text=command, version="0.16"), settings(*words))


def compared(command: str, *words: str) -> tuple[CommandPlan, BeforeAfter]:
    composed = settings("search.num_alternatives=1", *words)
    found = plan_command(TypedCommand(text=command, free=("all",), version="0.16"), composed)
    return found, before_and_after(found, composed)


def test_a_command_is_priced_as_it_is_typed() -> None:
    plan = typed(DENSE)
    chosen = plan.arguments
    assert (chosen["tensor_model_parallel_size"], chosen["pipeline_model_parallel_size"]) == (4, 2)
    assert (chosen["data_parallel_size"], plan.layout.micro_batch_size) == (2, 1)
    assert chosen["sequence_parallel"]
    assert chosen["use_distributed_optimizer"]
    assert not chosen["overlap_grad_reduce"]
    assert not chosen["overlap_param_gather"]
    assert plan.launch["megatron_lm"].argv == tuple(DENSE.split("pretrain_gpt.py ")[1].split())
    assert plan.provenance.framework_version == "0.16"


@pytest.mark.parametrize(
    "overlaps",
    [(), ("--overlap-grad-reduce",), ("--overlap-grad-reduce", "--overlap-param-gather")],
)
def test_flags_of_an_estimate_are_those_that_were_priced(overlaps: tuple[str, ...]) -> None:
    plan = Plan(record=typed(DENSE + " ".join(overlaps)))
    words = plan.to_megatron_args(layout_only=True)
    assert [word for word in words if word.startswith("--overlap-")] == [*overlaps]


def test_gradients_that_nothing_hides_are_exposed() -> None:
    hidden = typed(DENSE + "--overlap-grad-reduce --overlap-param-gather")
    exposed = typed(DENSE)
    name = "dp_communication"
    assert exposed.predicted.terms[name] > hidden.predicted.terms[name]
    assert exposed.predicted.iteration_time_s > hidden.predicted.iteration_time_s


def test_gathered_weights_are_hidden_where_that_is_asked_for() -> None:
    exposed = typed(DENSE)
    reduced = typed(DENSE + "--overlap-grad-reduce")
    both = typed(DENSE + "--overlap-grad-reduce --overlap-param-gather")
    steps = [each.predicted.iteration_time_s for each in (both, reduced, exposed)]
    assert steps == sorted(set(steps))
    assert not reduced.arguments["overlap_param_gather"]
    assert plan_file.load(plan_file.dump(reduced)) == reduced
    _, compare = compared(DENSE + "--overlap-grad-reduce")
    assert compare.changes is not None
    alone = {step.choices[0].name: step for step in compare.changes.alone}
    assert "overlap_grad_reduce" not in alone
    change = alone["overlap_param_gather"]
    assert (change.choices[0].before, change.choices[0].after) == ("off", "on")
    assert change.step_s == both.predicted.iteration_time_s


def test_what_stages_send_takes_time_where_a_command_overlaps_nothing() -> None:
    batched = f"{STAGES} --no-overlap-p2p-communication"
    beside, exposed = typed(STAGES), typed(batched)
    name = "pp_communication"
    assert exposed.predicted.terms[name] > beside.predicted.terms[name]
    assert exposed.predicted.iteration_time_s > beside.predicted.iteration_time_s
    found, compare = compared(batched, "parallel.pipeline_model_parallel_size=4")
    assert not found.request.settings.traits.overlap_p2p_comm  # the plan keeps the flag
    assert compare.changes is not None
    assert "overlap_p2p_comm" not in {step.choices[0].name for step in compare.changes.alone}
    assert typed(DENSE + "--no-overlap-p2p-communication").predicted == typed(DENSE).predicted


@pytest.mark.parametrize(
    ("strategy", "asked"),
    [
        ("optim_grads", "--overlap-grad-reduce"),
        ("optim_grads_params", "--overlap-grad-reduce --overlap-param-gather"),
    ],
)
def test_fsdp_overlaps_so_much_by_itself(strategy: str, asked: str) -> None:
    fsdp = DENSE.replace("--pipeline-model-parallel-size 2 ", "")
    fsdp += f"--use-megatron-fsdp --data-parallel-sharding-strategy {strategy} "
    fsdp += "--ckpt-format fsdp_dtensor --no-gradient-accumulation-fusion "
    assert typed(fsdp).predicted == typed(fsdp + asked).predicted


FSDP = DENSE.replace("--pipeline-model-parallel-size 2 ", "")
FSDP += "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
FSDP += "--no-gradient-accumulation-fusion "
PLAIN = DENSE.replace("--pipeline-model-parallel-size 2 ", "")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (FSDP, "ckpt_format = torch_dist"),  # Megatron's default
        (f"{FSDP} --ckpt-format torch_dist", "ckpt_format = torch_dist"),
        (f"{FSDP} --ckpt-format torch", "ckpt_format = torch"),
        (f"{DENSE} --ckpt-format fsdp_dtensor", "ckpt_format = fsdp_dtensor"),
        (f"{DENSE} --ckpt-format torch_dcp", "ckpt_format = torch_dcp"),
        (f"{PLAIN} --defer-embedding-wgrad-compute", "defer_embedding_wgrad_compute"),
        (f"{DENSE} --overlap-p2p-communication-warmup-flush", "overlap_p2p_comm_warmup_flush"),
        (f"{DENSE} --distribute-saved-activations", "distribute_saved_activations"),
        (f"{DENSE} --num-distributed-optimizer-instances 3", "num_distributed_optimizer_instances"),
        (f"{DENSE} --hierarchical-context-parallel-sizes 2 2", "hierarchical_context_parallel"),
        (f"{DENSE} --disable-gloo-process-groups --ckpt-format torch", "gloo_process_groups"),
    ],
)
def test_an_option_that_its_own_layout_does_not_have_is_refused(command: str, option: str) -> None:
    with pytest.raises(UserInputError, match=f"Megatron-LM 0.16 refuses it: .*{option}"):
        typed(command)
    note = next(n for n in compared(command)[0].request.notes if "no point of the search" in n)
    assert option in note


@pytest.mark.parametrize(
    "command",
    [
        f"{FSDP} --ckpt-format fsdp_dtensor",
        f"{FSDP} --ckpt-format fsdp_dtensor --use-cpu-initialization",
        f"{DENSE} --ckpt-format torch",
        f"{DENSE} --fsdp-double-buffer",
        f"{DENSE} --num-experts 8 --moe-router-topk 2 --moe-grouped-gemm",
        f"{DENSE} --moe-token-dispatcher-type flex --moe-permute-fusion",  # without experts
    ],
)
def test_an_option_that_megatron_takes_is_priced(command: str) -> None:
    assert typed(command).predicted.iteration_time_s > 0


def test_rules_of_megatron_fsdp_are_not_those_of_torch_fsdp2() -> None:
    """Gradients of 16 bits come out wrong with the former alone, in 0.15."""
    command = PLAIN.replace("--use-distributed-optimizer", "--use-torch-fsdp2")
    command += "--untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"
    plan = estimate_command(TypedCommand(text=command, version="0.15"), settings())
    assert plan.layout.sharding is DataParallelSharding.TORCH_FSDP2


SFT = f"{DENSE} --sft --cuda-graph-impl"


@pytest.mark.parametrize(
    "flags",
    [
        "transformer_engine",
        "transformer_engine --cuda-graph-scope attn",
        "transformer_engine --cuda-graph-scope attn mlp",
        "local",
    ],
)
def test_graphs_hold_no_attention_of_packed_sequences(flags: str) -> None:
    for plan_of in (typed, compared):
        with pytest.raises(NestError, match=r"graphs hold neither attention nor .* packed"):
            plan_of(f"{SFT} {flags}")
    assert typed(f"{SFT} {flags}".replace("--sft", "")).layout.execution.cuda_graph_impl != "none"


def test_graphs_hold_other_modules_of_packed_sequences() -> None:
    found, _ = compared(f"{SFT} transformer_engine --cuda-graph-scope mlp")
    assert found.plan.layout.execution.cuda_graph_scope == ("mlp",)


def test_without_the_distributed_optimizer_every_replica_keeps_all() -> None:
    plan = typed(DENSE.replace("--use-distributed-optimizer ", ""))
    assert not plan.layout.shards_optimizer
    assert plan.predicted.peak_memory_bytes > typed(DENSE).predicted.peak_memory_bytes


def test_experts_have_megatrons_own_dispatcher() -> None:
    assert typed(EXPERTS).layout.execution.moe_token_dispatcher_type == "allgather"
    flag = "--moe-token-dispatcher-type alltoall"
    assert typed(EXPERTS + flag).layout.execution.moe_token_dispatcher_type == "alltoall"
    assert typed(EXPERTS).layout.dims.expert_tensor_parallel_size == 4  # as tensor parallelism


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            EXPERTS.replace("--sequence-parallel ", ""),
            r"sequence_parallel = False.*arguments.py:905",
        ),
        (DENSE.replace("--micro-batch-size 1 ", ""), "--micro-batch-size"),
        (DENSE.replace("parallel-size 4", "parallel-size 3"), r"must divide the 16 GPUs"),
        (DENSE.replace("--num-layers 16", "--num-layers 17"), "17.*pipeline_model_parallel_layout"),
        (DENSE.replace("batch-size 64", "batch-size 63"), "multiple"),
    ],
)
def test_what_megatron_refuses_is_refused_with_its_rule(command: str, said: str) -> None:
    with pytest.raises(UserInputError, match=said):
        typed(command)


def test_the_layout_is_the_commands() -> None:
    with pytest.raises(UserInputError, match=r"_size = 8: the layout is that of the command"):
        typed(DENSE, "parallel.tensor_model_parallel_size=8")


def test_flags_that_are_not_understood_are_named() -> None:
    done = run("estimate", "--from", DENSE + "--own-kernel x", "cluster=dgx_h100")
    assert done.code == 0
    assert "not modelled: --own-kernel" in " ".join(done.out.split())
    assert "has no flag --own-kernel" in done.out
    done = run("estimate", "--from", DENSE + "--own-kernel x", "cluster=dgx_h100", "--strict")
    assert done.code == 2
    assert "passed on" not in done.err
    assert "leave --strict out" in done.err


def test_a_script_is_priced_without_its_programs(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/bash\ntouch {tmp_path}/ran\nTP=4\n{DENSE}\n", encoding="utf-8")
    done = run("estimate", "cluster=dgx_h100", "--json", "--", "bash", str(script))
    step = done.json()["predicted"]["iteration_time_s"]
    assert step == typed(DENSE).predicted.iteration_time_s
    assert not (tmp_path / "ran").exists()


def test_a_layout_that_does_not_fit_ends_with_1() -> None:
    alone = MODEL.replace("--num-layers 16", "--num-layers 160")
    done = run("estimate", "--from", f"torchrun --nproc-per-node 8 {alone}", "cluster=dgx_h100")
    assert done.code == 1
    assert "oes not fit, as predicted" in done.err


@pytest.mark.parametrize("command", [DENSE, STAGES, EXPERTS])
def test_differences_add_up_from_today_to_the_plan(command: str) -> None:
    found, both = compared(command)
    assert both.before is not None
    assert both.changes is not None
    today, planned = both.before.predicted, found.plan.predicted
    steps = both.changes.in_order
    total = math.fsum(step.difference.seconds for step in steps if step.difference)
    assert total == pytest.approx(planned.iteration_time_s - today.iteration_time_s, abs=1e-12)
    assert steps[-1].step_s == planned.iteration_time_s
    assert steps[-1].peak_memory_bytes == planned.peak_memory_bytes
    assert both.changes.whole.seconds == planned.iteration_time_s - today.iteration_time_s
    named = [choice.name for step in steps for choice in step.choices]
    assert sorted(named) == sorted(c.name for one in both.changes.alone for c in one.choices)
    assert today == typed(command).predicted


def test_a_change_alone_is_that_command_with_one_flag_changed() -> None:
    _, both = compared(DENSE)
    assert both.changes is not None
    alone = {step.choices[0].name: step for step in both.changes.alone}
    name = "tensor_model_parallel_size"
    size = alone[name].choices[0].after
    flags = DENSE.replace("--tensor-model-parallel-size 4", f"--tensor-model-parallel-size {size}")
    assert alone[name].step_s == typed(flags).predicted.iteration_time_s
    overlapped = typed(DENSE + "--overlap-grad-reduce --overlap-param-gather")
    assert alone["overlap_grad_reduce"].step_s == overlapped.predicted.iteration_time_s


def test_what_one_flag_alone_breaks_is_changed_together_with_its_rule() -> None:
    _, both = compared(STAGES, "parallel.pipeline_model_parallel_size=1")
    assert both.changes is not None
    alone = {step.choices[0].name: step for step in both.changes.alone}
    refused = alone["pipeline_model_parallel_size"]
    assert refused.step_s is None
    assert "needs pipeline_model_parallel_size above 1" in refused.rule
    for step in both.changes.in_order:
        assert (len(step.choices) > 1) == bool(step.rule)
        assert step.step_s is not None


def test_a_command_that_is_the_plan_has_no_changes() -> None:
    composed = settings("search.num_alternatives=1")
    found = plan_command(TypedCommand(text=DENSE, free=("all",), version="0.16"), composed)
    command = found.job.command
    assert command is not None
    words = [*command.launcher, command.script, *found.plan.launch["megatron_lm"].argv]
    again = plan_command(TypedCommand(text=words, version="0.16"), composed)
    both = before_and_after(again, composed)
    assert both.changes is not None
    assert both.before is not None
    assert both.changes.in_order == ()
    assert both.changes.whole.seconds == 0
    assert "is what runs today" in verdict(both.before, both.changes.whole)


def test_a_gain_below_the_uncertainty_keeps_the_layout() -> None:
    _, both = compared(DENSE + "--overlap-grad-reduce --overlap-param-gather")
    assert both.before is not None
    assert isinstance(both.changes, Changes)
    whole = both.changes.whole
    said = verdict(both.before, whole)
    assert whole.is_sure == ("Not distinguishable" not in said)
    close = dataclasses.replace(whole, chance_faster=0.7)
    assert "the plan is faster is 70 % sure, so the present layout may be kept" in verdict(
        both.before, close
    )


def test_what_runs_today_may_be_refused_and_is_planned() -> None:
    _, both = compared(EXPERTS.replace("--sequence-parallel ", ""))
    assert both.before is None
    assert "arguments.py:905" in both.refused


def test_a_checkpoint_of_today_is_looked_at() -> None:
    _, both = compared(DENSE + "--save /ckpt --save-interval 100")
    assert any("dp_reshardable" in each for each in both.needs)
    assert any("--dist-ckpt-optim-fully-reshardable" in each for each in both.needs)
    _, both = compared(DENSE)
    assert not any("heckpoint" in each for each in both.needs)


def test_flags_that_every_release_has_need_no_word() -> None:
    sizes = ("parallel.tensor_model_parallel_size=4", "parallel.pipeline_model_parallel_size=4")
    _, both = compared(DENSE, *sizes)
    assert not [each for each in both.needs if "release" in each]  # all that are known have them


def test_both_are_printed_first() -> None:
    words = ("plan", "--from", DENSE, "cluster=dgx_h100", "--free", "all")
    done = run(*words, "--full")
    assert done.out.startswith("Today and planned\n")
    short = re.search(r"Step +(\S+ \S+) -> (\S+ \S+), ", run(*words).out)
    figures = re.search(r"Step +(\S+ \S+) +(\S+ \S+) ", done.out)
    assert figures
    assert short
    assert figures.groups() == short.groups()
    document = run(*words, "--json").json()
    today = document["today"]
    steps = [step["difference"]["seconds"] for step in today["changes"]["in_order"]]
    assert math.fsum(steps) == pytest.approx(today["changes"]["whole"]["seconds"], abs=1e-12)
