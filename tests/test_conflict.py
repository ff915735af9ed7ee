"""Where no layout is legal, the rule that binds is named, with the choice that would free it."""

from __future__ import annotations

import dataclasses

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import ExecutionTraits
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.planner import Request, check_launchable, plan
from nest_megatron.planner.request import Deadline
from nest_megatron.planner.shortage import (
    binding_rules,
    refuse_if_nothing_is_legal,
    single_relaxations,
)
from nest_megatron.solver.backend import backend_to_run, solver_of
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests.catalogue import model

COMMAND = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512 "
    "--num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --bf16 "
    "--vocab-size 50257 --tokenizer-type NullTokenizer "
)
#: Megatron's gpt3_mcore_te_tp1_pp4_vp1_resume_torch_dist_tunable_overlap.
FIVE = COMMAND + (
    "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --micro-batch-size 4 "
    "--global-batch-size 40 --num-layers-per-virtual-pipeline-stage 1"
)
#: A batch of one micro batch, as Megatron takes it where none is given.
ONE = COMMAND + (
    "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --micro-batch-size 4 "
    "--num-virtual-stages-per-pipeline-rank 2"
)


def asked(command: str) -> Request:
    composed = compose(parse(["cluster=dgx_h100"]))
    return read_request(TypedCommand(text=command, version="0.16"), composed)[1]


@pytest.mark.parametrize(("command", "count"), [(FIVE, 5), (ONE, 1)])
def test_micro_batches_are_named_not_the_pipeline(command: str, count: int) -> None:
    with pytest.raises(UserInputError, match="virtual_pipeline_model_parallel_size = ") as raised:
        plan(asked(command))
    said = str(raised.value)
    assert f"there are {count} (global batch" in said
    assert "divides what is left of the GPUs" not in said
    assert "Change or free" in said
    assert "micro_batch_size" in said


def test_each_choice_that_is_named_makes_it_legal_alone() -> None:
    request = asked(FIVE)
    names = single_relaxations(request)
    assert "virtual_pipeline_model_parallel_size" in names
    assert "tensor_model_parallel_size" not in names
    for name in names:
        fixed = {key: value for key, value in request.space.fixed.items() if key != name}
        space = dataclasses.replace(request.space, fixed=fixed, partition=None)
        plan(dataclasses.replace(request, space=space, num_alternatives=0))


def test_more_than_one_choice_is_named_where_none_is_enough_alone() -> None:
    sizes = ("cluster.num_gpus=504", "train.global_batch_size=8192", "train.micro_batch_size=1")
    degrees = ("tensor=1", "pipeline=8", "expert=64")
    fixed = [f"parallel.{'_model_parallel_size='.join(each.split('='))}" for each in degrees]
    experts = compose(parse(["model=deepseek_v3", "cluster=dgx_h100", *sizes, *fixed]))
    with pytest.raises(UserInputError, match="Change or free more than one of these"):
        plan(request_of(experts, choose_execution=True))


def test_a_zero_stage_is_named_with_the_degrees_that_contradict_it() -> None:
    fixed = ("parallel.zero_stage=3", "parallel.pipeline_model_parallel_size=2")
    job = compose(parse(["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=16", *fixed]))
    said = r"zero_stage=3.*Change or free pipeline_model_parallel_size or zero_stage: any"
    with pytest.raises(UserInputError, match=said):
        plan(request_of(job, choose_execution=True))


@pytest.mark.parametrize(
    ("pipeline", "said"), [(1, r"Change one of them or more"), (None, r"_size = 3: .*Change it, ")]
)
def test_sizes_that_do_not_divide_the_gpus(pipeline: int | None, said: str) -> None:
    more = () if pipeline is None else (f"parallel.pipeline_model_parallel_size={pipeline}",)
    composed = compose(parse([*SEARCHED, "parallel.tensor_model_parallel_size=3", *more]))
    with pytest.raises(UserInputError, match=said):
        request_of(composed, choose_execution=True)


def test_a_batch_that_no_number_of_replicas_divides_is_to_change() -> None:
    composed = compose(parse(["model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=1000"]))
    with pytest.raises(UserInputError, match="Use a batch and a number of GPUs with more common"):
        plan(request_of(composed, choose_execution=True))


@pytest.mark.parametrize(
    ("fixed", "said"),
    [
        ("context_parallel_size=2", "sliding windows have no kernel"),
        ("expert_model_parallel_size=3", "it must divide the 8 ranks of one pipeline stage"),
    ],
)
def test_degrees_that_nobody_typed_and_do_not_multiply_out_are_no_reason(
    fixed: str, said: str
) -> None:
    """All combinations with the first break two rules, and some of them have no such grid."""
    job = parse(["model=gpt_oss_20b", *SEARCHED[1:], f"parallel.{fixed}"])
    with pytest.raises(UserInputError, match=said) as raised:
        plan(request_of(compose(job), choose_execution=True))
    assert ("expert_tensor_parallel_size" in str(raised.value)) == fixed.startswith("expert")


def test_a_single_choice_is_named_alone() -> None:
    said = refusal("parallel.context_parallel_size=2", "train.precision=fp32")
    assert "Change or free context_parallel_size: that alone makes it legal." in said


def test_a_recomputation_that_nothing_allows_is_named() -> None:
    """``--free recompute_granularity`` makes it legal, and Megatron passes over absent experts."""
    modules = "--recompute-granularity selective --recompute-modules"
    with pytest.raises(UserInputError, match="recompute_granularity=selective") as raised:
        plan(asked(f"{COMMAND} --global-batch-size 64 {modules} mla_up_proj"))
    said = str(raised.value)
    assert "mla_up_proj']: it needs multi_latent_attention" in said
    assert "Change or free recompute_granularity: that alone makes it legal." in said
    found = plan(asked(f"{COMMAND} --global-batch-size 64 {modules} core_attn moe shared_experts"))
    assert isinstance(found, ParallelPlan)


def test_a_bias_of_shared_experts_is_named_by_its_field() -> None:
    request = asked(COMMAND + "--global-batch-size 64")
    biased = dataclasses.replace(model("deepseek_v2_lite"), add_bias_linear=True)
    with pytest.raises(UserInputError, match="add_bias_linear = True: shared experts have no bias"):
        plan(dataclasses.replace(request, spec=biased, space=SearchSpace()))


def test_a_mistyped_module_is_refused_with_the_nearest() -> None:
    flags = (
        "--global-batch-size 64 --recompute-granularity selective --recompute-modules layer_norm"
    )
    with pytest.raises(UserInputError, match=r"recompute_modules = 'layer_norm'.*layernorm"):
        read_job(read_command(COMMAND + flags))


def test_a_batch_that_follows_a_schedule_has_no_other_size() -> None:
    flags = '--global-batch-size 64 --step-batch-size-schedule "0:384 200B:768"'
    with pytest.raises(UserInputError, match="refuses it beside --step-batch-size-schedule"):
        read_job(read_command(COMMAND + flags, "0.20"))


SEARCHED = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8")


def refusal(*settings: str) -> str:
    composed = compose(parse([*SEARCHED, *settings]))
    wanted = request_of(composed, choose_execution=True)
    with pytest.raises(UserInputError) as raised:
        plan(wanted)
    return str(raised.value)


def test_single_precision_is_named_where_it_excludes_context_parallelism() -> None:
    said = refusal("train.precision=fp32", "parallel.context_parallel_size=2")
    assert "context_parallel_size = 2: the ring exchange of keys and values needs fused" in said
    assert "Megatron-FSDP" not in said
    assert "Change or free context_parallel_size" in said


def test_an_unfused_backend_is_named_where_it_excludes_context_parallelism() -> None:
    flags = "--global-batch-size 64 --attention-backend unfused --context-parallel-size 2"
    with pytest.raises(UserInputError, match="needs fused attention; ") as raised:
        plan(asked(COMMAND + flags))
    assert "model's attention allows" not in str(raised.value)


@pytest.mark.parametrize("traits", [ExecutionTraits(), ExecutionTraits(flash_attention=False)])
def test_a_given_layout_is_held_to_the_same_attention_rule(traits: ExecutionTraits) -> None:
    spec, settings = model("llama3_8b"), CostSettings(traits=traits)
    dims = ParallelDims(context_parallel_size=2)
    grid = PartialLayout(
        dims=dims, global_batch_size=8, micro_batch_size=1, sequence_parallel=False
    )
    partition = StagePartition(
        boundaries=(0, len(spec.layer_kinds())), pipeline_model_parallel_size=1
    )
    if traits.flash_attention:
        check_launchable(spec, settings, grid.with_stages(partition))
        return
    with pytest.raises(UserInputError, match="needs fused attention"):
        check_launchable(spec, settings, grid.with_stages(partition))


def test_no_rule_is_named_where_a_combination_breaks_none() -> None:
    wanted = asked(COMMAND + "--global-batch-size 64")
    assert binding_rules(dataclasses.replace(wanted, space=SearchSpace())) == ()


def test_no_rule_is_named_and_nothing_freed_where_time_is_over() -> None:
    wanted = asked(FIVE)
    assert binding_rules(wanted)
    assert binding_rules(wanted, lambda: True) == ()
    assert single_relaxations(wanted, lambda: True) == []


def test_the_words_of_a_refusal_end_with_the_time_of_its_search() -> None:
    wanted = asked(FIVE)
    cost_model = CostModel(wanted.spec, wanted.cluster, wanted.settings, wanted.times)
    solver = solver_of(backend_to_run(wanted.backend), lambda: False)
    searched = Search(cost_model, wanted.global_batch_size, wanted.space, solver).run()
    over = Deadline(begun_s=0.0, seconds=0.0)
    with pytest.raises(UserInputError) as raised:
        refuse_if_nothing_is_legal(wanted, searched, over)
    assert "Change or free" not in str(raised.value)
