"""What a job runs today: a point of the space, the first plan of its search, kept where it wins."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import nest_megatron
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import parse
from nest_megatron.config.policy import VARIABLE
from nest_megatron.integrations import nemo, recipe_command
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.megatron_lm.present_layout import typed_plan
from nest_megatron.integrations.megatron_lm.search_space import free_parameters
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import read_request
from nest_megatron.layout.recompute import NO_RECOMPUTE, RecomputeGranularity
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request
from nest_megatron.report.words import present_words
from nest_megatron.solver.grids import GridSpace
from tests import catalogue
from tests.integrations import frameworks

WORDS = (
    "torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 1024 "
    "--num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 --bf16 "
    "--micro-batch-size 24 --global-batch-size 192 --vocab-size 50257 --lr 1e-5 "
    "--tokenizer-type NullTokenizer --attention-dropout 0 --hidden-dropout 0 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)
SLOW = f"{WORDS} --tensor-model-parallel-size 8".replace("size 24", "size 1")


def of_recipe(recipe: Any, *settings: str, keep: Sequence[str] = ()) -> Request:
    job = nemo.read_recipe(recipe, vocab_size=128_256)
    freed = dataclasses.replace(job, free=free_parameters(None, keep), free_option="free")
    return of_job(freed, *settings)


def of_job(job: Job, *settings: str) -> Request:
    words = ("cluster=dgx_h100", f"cluster.num_gpus={job.num_gpus}", *settings)
    composed = compose(parse([*words]))
    return job_request(job, read_cluster(composed), composed)


def of_command(text: str, *settings: str) -> Request:
    composed = compose(parse(["cluster=dgx_h100", *settings]))
    return read_request(TypedCommand(text=text, free=("all",), version="0.16"), composed)[1]


def micro_batches(request: Request) -> set[int]:
    grids = GridSpace(request.cost_model(), request.global_batch_size, request.space)
    return {shard.micro_batch_size for shard in grids.shards()}


def test_a_layout_outside_the_limits_is_a_point_of_the_space() -> None:
    words = WORDS.replace("-size 24 --global-batch-size 192", "-size 48 --global-batch-size 384")
    request = of_command(words)
    assert request.present is not None
    assert request.present.micro_batch_size == 48
    assert {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64} == micro_batches(request)
    limited = of_command(words, "search.max_micro_batch_size=4")
    assert limited.present == request.present
    assert {1, 2, 3, 4} == micro_batches(limited)  # the user's limit holds for all others


def test_recomputation_that_is_not_tried_by_itself_is_added() -> None:
    request = of_command(f"{WORDS} --recompute-granularity selective")
    assert request.present is not None
    own = request.present.recompute
    assert own.granularity is RecomputeGranularity.SELECTIVE
    grids = GridSpace(request.cost_model(), request.global_batch_size, request.space)
    assert own in grids.recompute_settings(next(iter(grids.shards())))


def test_what_is_fixed_otherwise_is_no_present_layout() -> None:
    assert of_command(WORDS, "parallel.tensor_model_parallel_size=2").present is None
    assert of_command(WORDS.replace("--micro-batch-size 24 ", "")).present is None
    one_replica = (
        SLOW.partition(" --use-distributed-optimizer")[0] + " --tensor-model-parallel-size 8"
    )
    assert of_command(one_replica).present is not None
    # as a checkpoint may need it, whose states have other keys with one replica, too
    assert of_command(one_replica, "parallel.zero_stage=1").present is None


def test_a_setting_that_overrides_a_flag_is_what_runs_today() -> None:
    present = of_command(WORDS, "train.micro_batch_size=2").present
    assert present is not None
    assert present.micro_batch_size == 2


def test_a_policy_holds_for_what_runs_today(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text("plan:\n  ranges:\n    micro_batch_size: [1, 8]\n")
    monkeypatch.setenv(VARIABLE, str(path))
    assert of_command(WORDS).present is None
    assert of_command(SLOW).present is not None


def test_a_present_layout_that_megatron_refuses_is_told() -> None:
    recipe = frameworks.nemo_recipe(catalogue.model("mixtral_8x7b"), num_nodes=2)
    recipe.trainer.strategy.tensor_model_parallel_size = 2  # without sequence parallelism
    request = of_recipe(recipe)
    assert request.present is None
    assert any("The present layout is no point of the search" in n for n in request.notes)


@pytest.mark.parametrize("seconds", ["60", "0.000001"])
def test_a_command_is_kept_where_it_wins_and_time_does_not_matter(seconds: str) -> None:
    found = nest_megatron.plan_command(
        WORDS, cluster="dgx_h100", free=["all"], search={"max_seconds": seconds}
    )
    own, today = found.record.present, found.before
    assert own is not None
    assert today is not None
    assert today.before is not None
    assert own.is_kept
    assert found.layout.micro_batch_size == 24
    step_s = found.predicted.iteration_time_s
    assert step_s == own.iteration_time_s == today.before.predicted.iteration_time_s
    assert "keep what you have" in present_words(found.record)
    if own.next_percent is not None:
        assert f"{own.next_percent:.1f} % slower" in present_words(found.record)
    assert "keep what you have: the plan is the present layout" in " ".join(str(found).split())


def test_a_command_without_overlaps_is_not_kept_by_a_plan_that_sets_them() -> None:
    words = WORDS.replace("--overlap-grad-reduce --overlap-param-gather", "")
    found = nest_megatron.plan_command(words, cluster="dgx_h100", free=["all"])
    own, today = found.record.present, found.before
    assert own is not None
    assert today is not None
    assert today.before is not None
    assert not own.is_kept
    assert own.iteration_time_s == today.before.predicted.iteration_time_s
    assert own.iteration_time_s > found.predicted.iteration_time_s
    assert "keep what you have" not in " ".join(str(found).split())


def small_recipe(*_: object) -> Any:
    spec = dataclasses.replace(catalogue.model("llama3_8b"), **_SMALL_SHAPE)
    recipe = frameworks.nemo_recipe(spec, num_nodes=1, batch=192)
    recipe.data.micro_batch_size = 24
    recipe.optim.config.use_distributed_optimizer = True
    recipe.trainer.strategy.ddp.use_distributed_optimizer = True
    return recipe


_SMALL_SHAPE: dict[str, Any] = {
    "num_layers": 12,
    "hidden_size": 512,
    "ffn_hidden_size": 2048,
    "num_attention_heads": 8,
    "num_query_groups": 8,
    "kv_channels": 64,
    "seq_length": 512,
}


def test_a_recipe_is_never_planned_slower_than_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo's t5_3b, with a micro batch of 24, was planned at 0.305 s instead of its own 0.193 s."""
    monkeypatch.setattr(recipe_command, "_nemo_recipe", small_recipe)
    found = nest_megatron.plan_command("nemo llm pretrain --factory mine", cluster="dgx_h100")
    assert found.before is not None
    assert found.before.before is not None
    before_s = found.before.before.predicted.iteration_time_s
    assert found.predicted.iteration_time_s <= before_s
    assert found.record.present is not None


def test_another_plan_is_taken_where_what_runs_today_is_slower() -> None:
    found = nest_megatron.plan_command(SLOW, cluster="dgx_h100", free=["all"])
    own = found.record.present
    assert own is not None
    assert not own.is_kept
    assert found.predicted.iteration_time_s < own.iteration_time_s
    assert "the present layout takes" in present_words(found.record)


def test_what_does_not_fit_is_told_and_the_search_goes_on() -> None:
    recipe = frameworks.nemo_recipe(catalogue.model("llama3_8b"), num_nodes=1, batch=64)
    recipe.data.micro_batch_size = 8
    plan, _ = nemo.auto_recipe(recipe, cluster="dgx_h100", vocab_size=128_256)
    assert plan.present is not None
    assert not plan.present.fits
    assert not plan.present.is_kept
    assert "is not predicted to fit" in present_words(plan)
    assert plan.predicted.fits


def llama(spec: TransformerSpec | None = None) -> Any:
    """A recipe that fits: TP 2, PP 2, no recomputation, no virtual stages, even stages."""
    recipe = frameworks.nemo_recipe(spec or catalogue.model("llama3_8b"), num_nodes=2, batch=64)
    strategy = recipe.trainer.strategy
    strategy.tensor_model_parallel_size = strategy.pipeline_model_parallel_size = 2
    strategy.sequence_parallel = True
    recipe.data.micro_batch_size = 1
    recipe.optim.config.use_distributed_optimizer = True
    strategy.ddp.use_distributed_optimizer = True
    return recipe


def test_a_recipe_says_every_field_and_a_command_those_that_are_typed() -> None:
    kept = of_recipe(llama(), keep=["all"]).space
    assert kept.recompute == NO_RECOMPUTE
    assert kept.fixed["virtual_pipeline_model_parallel_size"] == 1
    assert kept.even_stages
    assert len(kept.rank_orders) == 1
    free = of_recipe(llama()).space
    assert (free.recompute, free.even_stages, free.fixed) == (None, False, {})
    typed = read_request(
        TypedCommand(text=WORDS, version="0.16"), compose(parse(["cluster=dgx_h100"]))
    )[1]
    assert (typed.space.recompute, typed.space.even_stages) == (None, False)
    assert "virtual_pipeline_model_parallel_size" not in typed.space.fixed


@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        ("recompute", "recompute"),
        ("virtual_pipeline_model_parallel_size", "fixed"),
        ("stage_layout", "even_stages"),
        ("rank_order", "rank_orders"),
    ],
)
def test_each_choice_that_a_recipe_leaves_at_none_is_kept_alone(keep: str, kept: str) -> None:
    free, held = of_recipe(llama()).space, of_recipe(llama(), keep=[keep]).space
    fields = ("recompute", "fixed", "even_stages", "rank_orders")
    assert [n for n in fields if getattr(free, n) != getattr(held, n)] == [kept]


def test_experts_are_split_as_dense_layers_where_a_recipe_does_not_say() -> None:
    recipe = llama(catalogue.model("mixtral_8x7b"))
    fixed = of_recipe(recipe, keep=["all"]).space.fixed
    assert (fixed["expert_model_parallel_size"], fixed["expert_tensor_parallel_size"]) == (1, 2)


def test_a_recipe_that_is_kept_does_not_change() -> None:
    recipe = llama()
    plan, changes = nemo.auto_recipe(recipe, cluster="dgx_h100", keep=["all"], vocab_size=128_256)
    assert plan.present is not None
    assert plan.present.is_kept
    names = ("recompute", "virtual", "layout", "parallel", "micro_batch", "mapping")
    assert not [each for each in changes if any(name in each.field for name in names)]


def test_a_layout_is_not_kept_where_its_stages_send_otherwise() -> None:
    """Plain recipes overlap nothing between virtual stages, and every plan does."""
    recipe = llama()
    recipe.trainer.strategy.pipeline_model_parallel_size = 4
    recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 2
    same = deepcopy(recipe)
    plan, changes = nemo.auto_recipe(recipe, cluster="dgx_h100", keep=["all"], vocab_size=128_256)
    assert "model.config.overlap_p2p_comm" in {each.field for each in changes}
    assert plan.present is not None
    assert not plan.present.is_kept
    assert plan.present.iteration_time_s > plan.predicted.iteration_time_s
    assert "the present layout takes" in present_words(plan)
    job = nemo.read_recipe(same, vocab_size=128_256)
    composed = compose(parse(["cluster=dgx_h100", "cluster.num_gpus=16"]))
    today, _ = typed_plan(job, of_job(job), composed)
    assert today.predicted.iteration_time_s == plan.present.iteration_time_s
    same.trainer.callbacks.append(frameworks.MegatronCommOverlapCallback())
    plan, _ = nemo.auto_recipe(same, cluster="dgx_h100", keep=["all"], vocab_size=128_256)
    assert plan.present is not None
    assert plan.present.is_kept


def test_tensor_parallelism_without_sequence_parallelism_is_kept() -> None:
    recipe = llama()
    recipe.trainer.strategy.sequence_parallel = False
    plan, _ = nemo.auto_recipe(recipe, cluster="dgx_h100", keep=["all"], vocab_size=128_256)
    assert plan.layout.sequence_parallel is False
    assert of_recipe(recipe).space.sequence_parallel


def test_user_buffers_without_sequence_parallelism_end_a_command_and_no_recipe() -> None:
    """``validate_args`` asserts it for every size; NeMo's callback turns the buffers off."""
    for size in (1, 2):
        flags = f"--tp-comm-overlap --tensor-model-parallel-size {size}"
        told = of_command(f"{WORDS.replace('size 24', 'size 1')} {flags}").notes
        assert any("tp_comm_overlap = True: it needs sequence parallelism" in n for n in told)
        recipe = llama()
        recipe.trainer.strategy.tensor_model_parallel_size = size
        recipe.trainer.strategy.sequence_parallel = False
        buffers = frameworks.MegatronCommOverlapCallback(tp_comm_overlap=True)
        recipe.trainer.callbacks.append(buffers)
        assert not any("tp_comm_overlap" in note for note in of_recipe(recipe).notes)


def test_stages_that_a_recipe_states_stay_in_its_own_words() -> None:
    """NeMo's deepseek_v3 has fewer layers in its first and last stage; no layout is added."""
    recipe = llama()
    strategy = recipe.trainer.strategy
    strategy.num_layers_in_first_pipeline_stage = 17
    strategy.num_layers_in_last_pipeline_stage = 15
    recipe.model.config.recompute_granularity = "selective"
    recipe.model.config.recompute_modules = ["mlp", "core_attn"]
    plan, changes = nemo.auto_recipe(recipe, cluster="dgx_h100", keep=["all"], vocab_size=128_256)
    assert plan.layout.partition.boundaries == (0, 18, plan.model.num_units)
    assert strategy.pipeline_model_parallel_layout is None
    assert strategy.num_layers_in_first_pipeline_stage == 17
    assert not [c for c in changes if "layout" in c.field or "recompute" in c.field]
