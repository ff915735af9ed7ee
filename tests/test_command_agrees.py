"""What a plan promises of a command is what the command that it writes is priced at."""

from __future__ import annotations

import shlex

import pytest

import nest_megatron
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER

_SIZES = (
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 4096 "
    "--num-layers 16"
)
_BATCH = "--bf16 --global-batch-size 128 --micro-batch-size 1 --vocab-size 128256"
_BLOCKS = "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope"
DENSE = f"{_SIZES} {_BATCH} {_BLOCKS} --ffn-hidden-size 8192 --untie-embeddings-and-output-weights"
EXPERTS = (
    f"{DENSE} --num-experts 32 --moe-ffn-hidden-size 1024 --moe-router-topk 4 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall --expert-model-parallel-size 8 "
    "--use-distributed-optimizer"
)
SHARED = (
    f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
    "--moe-shared-expert-intermediate-size 2048 --moe-shared-expert-overlap"
)
OFFLOADED = f"{EXPERTS} --fine-grained-activation-offloading --offload-modules expert_fc1 moe_act"
GRAPHS = (
    f"{EXPERTS} --cuda-graph-impl transformer_engine --te-rng-tracker "
    "--cuda-graph-scope attn moe_router moe_preprocess"
)
FSDP = (
    f"{DENSE} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--no-gradient-accumulation-fusion --use-distributed-optimizer --ckpt-format fsdp_dtensor"
)
FSDP2 = f"{DENSE} --use-torch-fsdp2 --no-gradient-accumulation-fusion"
INSTANCES = f"{EXPERTS} --num-distributed-optimizer-instances 2"
OVERLAPPED = f"{EXPERTS} --overlap-moe-expert-parallel-comm"
#: Megatron refuses this overlap in graphs of whole layers.
OVERLAPPED_IN_GRAPHS = f"{OVERLAPPED} --cuda-graph-impl transformer_engine --te-rng-tracker"


def planned(command: str, *free: str, **settings: object) -> nest_megatron.Plan:
    return nest_megatron.plan_command(
        launched(shlex.split(command)),
        cluster="dgx_h100",
        free=free,
        search={"num_alternatives": 0, "max_virtual_pipeline_model_parallel_size": 4},
        **settings,
    )


def launched(argv: list[str]) -> list[str]:
    return [*["torchrun", "--nproc-per-node", "8", "--nnodes", "2", "pretrain_gpt.py"], *argv]


@pytest.mark.parametrize(
    ("flags", "free"),
    [
        (SHARED, ()),
        (SHARED, ("micro_batch_size",)),
        (SHARED, ("moe_shared_expert_overlap",)),
        (SHARED, ("all",)),
        (OFFLOADED, ("recompute", "micro_batch_size")),
        (OFFLOADED, ("all",)),
        (GRAPHS, ("all",)),
        (FSDP, ()),
        (FSDP, ("all",)),
        (FSDP2, ("all",)),
        (INSTANCES, ("all",)),
        (OVERLAPPED, ("all",)),
        (OVERLAPPED_IN_GRAPHS, ()),
    ],
)
def test_the_written_command_is_priced_as_its_plan(flags: str, free: tuple[str, ...]) -> None:
    plan = planned(flags, *free)
    written = list(plan.record.launch[LAUNCHER].argv)
    priced = nest_megatron.estimate_command(launched(written), cluster="dgx_h100")
    assert priced.predicted.iteration_time_s == plan.predicted.iteration_time_s
    assert priced.predicted.peak_memory_bytes == plan.predicted.peak_memory_bytes
    assert priced.record.search.not_modelled == plan.record.search.not_modelled
    again = planned(shlex.join(written), *free)
    gain = plan.predicted.iteration_time_s / again.predicted.iteration_time_s
    assert gain < 1 + plan.record.choice.tie_percent / 100, "what is planned again is no faster"


def test_a_stated_overlap_of_shared_experts_stays() -> None:
    """Megatron refuses the overlap of the all-to-all beside it (0.19 transformer_config)."""
    execution = planned(SHARED).layout.execution
    assert execution.moe_shared_expert_overlap
    assert not execution.overlap_moe_expert_parallel_comm
    freed = planned(SHARED, "moe_shared_expert_overlap").layout.execution
    assert not (freed.moe_shared_expert_overlap and freed.overlap_moe_expert_parallel_comm)


def test_stated_offloading_stays_until_it_is_freed() -> None:
    kept = planned(OFFLOADED, "recompute")
    assert kept.layout.execution.offload_modules == ("expert_fc1", "moe_act")
    assert kept.record.search.not_modelled == ("--fine-grained-activation-offloading",)
    freed = planned(OFFLOADED, "recompute", "activation_offloading")
    assert not freed.layout.execution.offload_modules
    assert not freed.record.search.not_modelled, "of a flag that the plan leaves out"
    assert freed.predicted.iteration_time_s < kept.predicted.iteration_time_s


def test_graphs_that_a_job_has_can_go() -> None:
    """They take memory: a layout that fits without them alone is looked at."""
    has = planned(GRAPHS, "all").predicted.iteration_time_s
    has_none = planned(GRAPHS, "all", flags=["--cuda-graph-impl=none"])
    assert has <= has_none.predicted.iteration_time_s * 1.01


def test_gradients_stay_as_wide_as_under_the_fsdp_that_a_plan_leaves() -> None:
    plan = planned(FSDP, "all")
    flags = plan.record.launch[LAUNCHER].argv
    assert ("--use-megatron-fsdp" in flags) != ("--grad-reduce-in-bf16" in flags)
    assert "--grad-reduce-in-bf16" not in planned(FSDP).record.launch[LAUNCHER].argv


def test_every_divisor_of_a_batch_is_a_micro_batch() -> None:
    """576 sequences over 64 GPUs are 9 for each: no power of two divides them."""
    job = {"model": "qwen3_30b_a3b", "cluster": "b300", "num_gpus": 64, "global_batch_size": 576}
    plan = nest_megatron.plan(**job, search={"num_alternatives": 0})
    ours = plan.predicted.iteration_time_s
    for size in (1, 3, 9):
        fixed = nest_megatron.plan(**job, micro_batch_size=size, search={"num_alternatives": 0})
        assert ours <= fixed.predicted.iteration_time_s * (1 + plan.record.choice.tie_percent / 100)
    assert plan.layout.micro_batch_size % 2, "or another batch makes this test sharp again"
