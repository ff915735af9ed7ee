"""The layers that are measured are those that the job's arguments make, in any shape."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.megatron_lm.training import DENSE, EXPERTS, HOME, ON_CPU, TRAINING, environment

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

#: What the job says of stages, replicas and memory, none of which is one layer's.
LAYOUT = shlex.split(
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2 "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--tensor-model-parallel-size 4 --sequence-parallel"
)
LATENT = shlex.split(
    "--multi-latent-attention --kv-lora-rank 16 --q-lora-rank 24 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 --position-embedding-type rope"
)
MODELS = {
    "dense": DENSE,
    "grouped queries": [
        *DENSE,
        *shlex.split("--group-query-attention --num-query-groups 4 --swiglu --disable-bias-linear"),
    ],
    "experts": [
        *EXPERTS,
        *shlex.split("--moe-layer-freq ([0]*2+[1]*6) --moe-shared-expert-intermediate-size 32"),
    ],
    "latent": [*DENSE, *LATENT, "--disable-bias-linear"],
}
SHARDS: dict[str, dict[str, Any]] = {
    "whole": {},
    "divided": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 2},
    "half the sequence": {"context_parallel_size": 2},
}


def version() -> str:
    """The recorded release that stands for the checkout."""
    is_old = (Path(HOME) / "pretrain_bert.py").exists()
    return "0.16" if is_old else "0.20"


def built(argv: list[str], shard: dict[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Layer blocks by name, and ways of making them."""
    asked = {
        "script": str(Path(HOME) / "pretrain_gpt.py"),
        "argv": argv,
        "version": version(),
        "shard": shard,
    }
    # by its path, because the checkout has a `tests` of its own
    builder = str(Path(__file__).with_name("own_layers.py"))
    done = subprocess.run(
        [sys.executable, "-c", f"{NEWER}runpy.run_path({builder!r}, run_name='__main__')"],
        input=json.dumps(asked),
        env=environment(shim=False),
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("BUILT ")]
    found: dict[str, dict[str, dict[str, Any]]] = json.loads(line.removeprefix("BUILT "))
    return found


#: Megatron 0.20 wants Python 3.12.
NEWER = """
import runpy, typing, typing_extensions
typing.override = typing_extensions.override
"""


@pytest.mark.parametrize("model", MODELS)
def test_they_are_the_model_s_whatever_the_job_s_layout(model: str) -> None:
    argv = [*MODELS[model], *TRAINING, *ON_CPU, *LAYOUT]
    shard = dict(SHARDS["divided"])
    if model == "experts":
        shard |= {"expert_model_parallel_size": 2}
    for block, ways in built(argv, shard).items():
        numbers = {way: fields["parameters"] for way, fields in ways.items()}
        assert len(set(numbers.values())) == 1, (block, numbers)
        assert ways["own"]["num_layers"] == 1
        assert ways["own"]["recompute_granularity"] is None


@pytest.mark.parametrize("shard", SHARDS)
def test_shapes_of_a_job_that_says_nothing_of_them(shard: str) -> None:
    for block, ways in built([*DENSE, *TRAINING, *ON_CPU], SHARDS[shard]).items():
        numbers = {way: fields["parameters"] for way, fields in ways.items()}
        assert len(set(numbers.values())) == 1, (block, numbers)


def test_the_job_s_own_flags_reach_the_layers() -> None:
    plain = [*MODELS["grouped queries"], *TRAINING]
    fused = built([*plain, *(word for word in ON_CPU if "swiglu" not in word)], {})
    apart = built([*plain, *ON_CPU], {})
    assert fused["dense"]["own"]["bias_activation_fusion"] is True
    assert apart["dense"]["own"]["bias_activation_fusion"] is False
    assert apart["dense"]["framework"]["bias_activation_fusion"] is True  # it knows of no flags
    eight = built([*plain, *ON_CPU, "--fp8-format", "hybrid"], {})
    assert eight["attention"]["own"]["fp8"] == "hybrid"
    assert eight["attention"]["framework"]["fp8"] is None
