"""Plans with choices about speed through Megatron-LM's own parser and validation.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or newer).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.execution import PLAIN, GraphImpl
from nest_megatron.planner import plan
from tests.megatron_lm.ask import ask_megatron, checkout_version, megatron_case

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(
        not os.environ.get("MEGATRON_LM_HOME"),
        reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout",
    ),
]

JOBS = {
    "dense": "model=llama3_8b parallel.tensor_model_parallel_size=2",
    "long": "model=llama3_8b train.seq_length=65536 parallel.context_parallel_size=4",
    "experts": "model=mixtral_8x7b parallel.expert_model_parallel_size=8",
    "experts in a pipeline": "model=qwen3_30b_a3b parallel.pipeline_model_parallel_size=2",
    "flex": "model=qwen3_30b_a3b parallel.expert_model_parallel_size=32 "
    "search.packages=[deep_ep,hybrid_ep]",
    "graphs of layers": "model=llama3_2_1b train.micro_batch_size=1 train.seq_length=2048 "
    "parallel.tensor_model_parallel_size=2",
    "graphs around experts": "model=deepseek_v2_lite parallel.expert_model_parallel_size=8 "
    "train.seq_length=1024 train.micro_batch_size=1 parallel.tensor_model_parallel_size=2",
    "offloaded modules": "model=llama3_70b cluster=gb200_nvl72 cluster.num_gpus=16 "
    "parallel.tensor_model_parallel_size=4 parallel.pipeline_model_parallel_size=4 "
    "train.seq_length=24576 train.micro_batch_size=1 search.packages=[transformer_engine_2_9]",
}
#: Megatron asks for Transformer Engine itself before it takes these.
NEED_ENGINE = "search.keep=[moe_permute_fusion,delay_wgrad_compute]"
EVERYWHERE = (
    "cluster=dgx_h100 cluster.num_gpus=32 train.global_batch_size=128 search.num_alternatives=0"
)


def planned(job: str) -> ParallelPlan:
    words = f"target=megatron_lm_{checkout_version()} {EVERYWHERE} {NEED_ENGINE} {job}"
    composed = compose(parse(words.split()))
    request = request_of(composed, choose_execution=True)
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    return found


def test_megatron_accepts_every_choice() -> None:
    plans = {name: planned(job) for name, job in JOBS.items()}
    assert all(found.layout.execution != PLAIN for found in plans.values())
    for name in ("graphs of layers", "graphs around experts"):
        assert plans[name].layout.execution.cuda_graph_impl is GraphImpl.TRANSFORMER_ENGINE
    assert plans["offloaded modules"].layout.execution.offload_modules
    version = checkout_version()
    requests = [launch_request(found, version=version) for found in plans.values()]
    said: Any = ask_megatron([megatron_case(request) for request in requests])["answers"]
    answers = dict(zip(plans, said, strict=True))
    refused = {name: answer for name, answer in answers.items() if "accepted" not in answer}
    assert not refused
