"""The same settings of memory, read from every framework's own configuration."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.cost_model.execution_flags import execution_of, execution_traits
from nest_megatron.cost_model.memory_flags import not_modelled
from nest_megatron.cost_model.traits import ExecutionTraits, Fp8Recipe
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import megatron_bridge
from nest_megatron.integrations.megatron_bridge import read_recipe as read_bridge
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.nemo import read_recipe as read_nemo
from nest_megatron.integrations.recipe import memory_fields
from nest_megatron.planner.pinned_job import _memory_rows
from tests import catalogue
from tests.integrations.frameworks import MegatronCommOverlapCallback, bridge_config, nemo_recipe

SPEC = catalogue.model("llama3_8b")
BF16 = SimpleNamespace(bf16=True, grad_reduce_in_fp32=True)
NVFP4 = SimpleNamespace(bf16=True, fp4="e2m1", fp4_param=True)
NARROW = ExecutionTraits(
    fp8_weights=True,
    fp8_gather=True,
    gradient_bytes=2,
    loss_bytes=2,
    loss_traffic_bytes=10,
    optimizer_bytes=4 + 2 + 2,
    optimizer_instances=2,
)
_STATES = {
    "use_precision_aware_optimizer": True,
    "exp_avg_dtype": "torch.bfloat16",
    "exp_avg_sq_dtype": "torch.bfloat16",
}


def traits(job: Job) -> ExecutionTraits:
    return execution_traits(job.memory_flags, job.precision)


def command(*flags: str, version: str = "0.16") -> Job:
    text = (
        "pretrain_gpt.py --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
        " --max-position-embeddings 64 --tokenizer-type NullTokenizer --vocab-size 100"
    )
    return read_job(read_command(" ".join([text, *flags]), version))


def changed(holder: Any, **values: object) -> None:
    for name, value in values.items():
        setattr(holder, name, value)


def nemo(**plugin: object) -> Any:
    recipe = nemo_recipe(SPEC)
    changed(recipe.trainer.plugins, **plugin)
    return recipe


def bridge(mixed: object) -> Any:
    cfg = bridge_config(SPEC)
    cfg.mixed_precision = mixed
    return cfg


def test_megatron_lm() -> None:
    job = command(
        "--bf16 --fp8-format hybrid --fp8-param-gather --grad-reduce-in-bf16",
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl te",
        "--use-distributed-optimizer --use-precision-aware-optimizer",
        "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16 --num-distributed-optimizer-instances 2",
    )
    assert job.precision is Precision.FP8
    assert traits(job) == NARROW


def test_nemo() -> None:
    recipe = nemo(fp8="hybrid", fp8_param_gather=True, grad_reduce_in_fp32=False)
    changed(recipe.optim.config, **_STATES)
    changed(recipe.model.config, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    recipe.trainer.strategy.num_distributed_optimizer_instances = 2
    assert traits(read_nemo(recipe, vocab_size=128256)) == NARROW


def test_megatron_bridge() -> None:
    mixed = SimpleNamespace(
        bf16=True, fp8="hybrid", fp8_recipe="delayed", fp8_param=True, grad_reduce_in_fp32=False
    )
    cfg = bridge(mixed)
    changed(cfg.optimizer, **_STATES)
    changed(cfg.model, cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te")
    cfg.ddp.num_distributed_optimizer_instances = 2
    assert traits(read_bridge(cfg, vocab_size=128256, environment={})) == NARROW


@pytest.mark.parametrize(
    "job",
    [
        command("--bf16"),
        command("--bf16", version="0.20"),
        read_nemo(nemo(grad_reduce_in_fp32=True), vocab_size=128256),
        read_bridge(bridge(BF16), vocab_size=128256, environment={}),
    ],
    ids=["megatron_lm", "megatron_lm 0.20", "nemo", "megatron_bridge"],
)
def test_jobs_that_say_nothing_are_the_default(job: Job) -> None:
    assert traits(job) == ExecutionTraits()
    assert not_modelled(job.memory_flags) == ()


@pytest.mark.parametrize(
    "job",
    [
        command(),
        read_nemo(nemo(precision="32"), vocab_size=128256),
        read_bridge(bridge(None), vocab_size=128256, environment={}),
    ],
    ids=["megatron_lm", "nemo", "megatron_bridge"],
)
def test_single_precision(job: Job) -> None:
    assert job.precision is Precision.FP32
    found = traits(job)
    assert (found.params_bytes, found.gradient_bytes, found.optimizer_bytes) == (4, 4, 8)
    assert not found.flash_attention


def test_mixed_precision_by_name_is_what_the_framework_makes_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fp8 = SimpleNamespace(bf16=True, fp8="hybrid", fp8_recipe="blockwise", fp8_param=True)
    recipes = {"nanov2_bf16_with_fp8_current_scaling_mixed": fp8}
    with pytest.raises(UserInputError, match="and is not loaded"):
        read_bridge(bridge(next(iter(recipes))), vocab_size=128256, environment={})

    def made(name: str) -> object:
        if name not in recipes:
            raise ValueError(name)
        return recipes[name]

    module = SimpleNamespace(get_mixed_precision_config=made, MIXED_PRECISION_RECIPES=recipes)
    monkeypatch.setitem(sys.modules, "megatron.bridge.training.mixed_precision", module)
    job = read_bridge(bridge(next(iter(recipes))), vocab_size=128256, environment={})
    assert job == read_bridge(bridge(fp8), vocab_size=128256, environment={})
    assert traits(job).fp8_recipe is Fp8Recipe.BLOCKWISE
    with pytest.raises(UserInputError, match="no recipe of this name"):
        read_bridge(bridge("bf16_with_fp8_mixed"), vocab_size=128256, environment={})


@pytest.mark.parametrize(
    ("job", "gathered"),
    [
        (command("--bf16 --fp4-format e2m1 --fp4-recipe nvfp4"), False),
        (command("--bf16 --fp4-format e2m1 --fp4-param-gather"), True),
        (command("--bf16 --fp4-format e2m1 --fp4-param-gather", version="0.20"), True),
        (read_nemo(nemo(fp4="e2m1"), vocab_size=128256), False),
        (
            read_bridge(bridge(NVFP4), vocab_size=128256, environment={}),
            True,
        ),
    ],
    ids=["0.16", "gathered", "0.20", "nemo", "megatron_bridge"],
)
def test_nvfp4(job: Job, gathered: bool) -> None:
    assert job.precision is Precision.NVFP4
    assert traits(job).fp8_weights == gathered
    assert not_modelled(job.memory_flags) == ()


def test_two_formats_at_once_are_refused() -> None:
    with pytest.raises(UserInputError, match="refuses it beside --fp8-format"):
        command("--bf16 --fp8-format hybrid --fp4-format e2m1")


@pytest.mark.parametrize(
    ("own", "of_overlap", "priced"),
    [(0, None, 128 << 20), (7, None, 128 << 20), (0, 9, 9), (7, 9, 9)],
)
def test_overlap_settings_bring_their_own_buckets(own: int, of_overlap: Any, priced: int) -> None:
    cfg, recipe = bridge(BF16), nemo(grad_reduce_in_fp32=True)
    cfg.ddp.bucket_size = recipe.trainer.strategy.ddp.bucket_size = own or None

    def read() -> list[int]:
        jobs = (
            read_bridge(cfg, vocab_size=128256, environment={}),
            read_nemo(recipe, vocab_size=128256),
        )
        return [
            job.target.flags("H100", job.precision, job.memory_flags)["ddp_bucket_size"]
            for job in jobs
        ]

    assert read() == [own, own]
    cfg.comm_overlap = SimpleNamespace(bucket_size=of_overlap)
    recipe.trainer.callbacks = [MegatronCommOverlapCallback(bucket_size=of_overlap)]
    assert read() == [priced, priced]


def test_what_is_not_modelled_is_found_wherever_it_lies() -> None:
    recipe = nemo()
    recipe.model.config.cuda_graph_impl = "local"
    recipe.trainer.strategy.ddp.nccl_ub = True
    job = read_nemo(recipe, vocab_size=128256)
    assert set(not_modelled(job.memory_flags)) == {"--cuda-graph-impl", "--use-nccl-ub"}
    assert set(job.not_modelled) == {"cuda_graph_impl", "nccl_ub"}, "fields of the recipe"
    job = command("--cuda-graph-impl local --use-nccl-ub", version="0.20")
    assert set(job.not_modelled) == {"--cuda-graph-impl", "--use-nccl-ub"}


def test_a_plan_names_the_fields_that_are_not_modelled() -> None:
    """Those that it leaves out apart; the planned recipe is the job of its plan."""
    cfg = bridge_config(SPEC)
    changed(cfg.model, fine_grained_activation_offloading=True, offload_modules=["moe_act"])
    cfg.ddp.nccl_ub = True
    plan, _ = megatron_bridge.auto_recipe(
        cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=16"], environment={}
    )
    assert not plan.layout.execution.offload_modules
    assert plan.search.not_modelled == ("nccl_ub",)
    job = read_bridge(cfg, environment={})
    assert not list(_memory_rows(plan, job.memory_flags, job.precision))
    cfg.model.fp32_residual_connection = True
    job = read_bridge(cfg, environment={})
    (row,) = _memory_rows(plan, job.memory_flags, job.precision)
    assert row == ("memory not modelled", "nccl_ub", "fp32_residual_connection")


def test_the_first_holder_counts() -> None:
    first = SimpleNamespace(exp_avg_dtype="bf16", num_distributed_optimizer_instances=1)
    second = SimpleNamespace(exp_avg_dtype="fp32", num_distributed_optimizer_instances=4)
    found = memory_fields(None, first, second)
    assert found["exp_avg_dtype"] == "bf16"
    assert found["num_distributed_optimizer_instances"] == 4


def test_overlaps_of_communication_are_read_where_each_framework_keeps_them() -> None:
    recipe, cfg = nemo_recipe(SPEC), bridge_config(SPEC)
    overlap = MegatronCommOverlapCallback(tp_comm_overlap=True)
    recipe.trainer.callbacks.append(overlap)
    cfg.comm_overlap = overlap
    recipe.trainer.strategy.sequence_parallel = cfg.model.sequence_parallel = True
    for job in (read_nemo(recipe), read_bridge(cfg), command("--tp-comm-overlap")):
        assert execution_of(job.memory_flags).tp_comm_overlap
