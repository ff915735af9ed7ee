"""Every script of ``recipes/megatron_lm`` with its pinned plans, before Megatron's own checks.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout (core_v0.16.1 or newer).
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from nest_megatron.integrations.megatron_lm.attach import (
    LAUNCHER,
    device_architecture,
    rewrite_command,
)
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.pins import read_pinned
from recipes import make
from tests.megatron_lm.ask import TRAINING, ask_megatron, checkout_version, planned_stages
from tests.megatron_lm.training import HOME, environment

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]
ALL = [(job, cluster) for job in make.jobs() if not job.reason for cluster in make.CLUSTERS]
every_script = pytest.mark.parametrize(
    "index", range(len(ALL)), ids=[f"{job.model}-{cluster}" for job, cluster in ALL]
)


def pinned(index: int) -> ParallelPlan:
    """The plan of a script for a cluster."""
    job, cluster = ALL[index]
    return read_pinned(next(job.recipes()).path(cluster)).plan


def case(index: int) -> dict[str, Any]:
    """The arguments of a script as its plan rewrites them, for Megatron's own checks."""
    (job, _), plan = ALL[index], pinned(index)
    launch = plan.launch[LAUNCHER]
    data = ["--tokenizer-type", "NullTokenizer", *TRAINING]
    command = read_argv(launch.script, [*make.job_argv(job, plan), *data], job.release)
    variables = dict(launch.environment)
    return {
        "argv": list(rewrite_command(plan, command).argv),
        "world_size": plan.layout.num_gpus,
        "max_connections": variables.pop("CUDA_DEVICE_MAX_CONNECTIONS", None),
        "architecture": device_architecture(plan),
        "environment": {name: text for name, text in variables.items() if text is not None},
        "script": launch.script,
    }


@pytest.fixture(scope="module")
def answers() -> dict[int, dict[str, Any]]:
    """What Megatron says of each script that is for its release."""
    release = checkout_version()
    asked = [index for index, (job, _) in enumerate(ALL) if job.release == release]
    said = ask_megatron([case(index) for index in asked])
    return dict(zip(asked, said["answers"], strict=True))


@every_script
def test_megatron_accepts_the_script_with_its_plan(
    index: int, answers: dict[int, dict[str, Any]]
) -> None:
    job, _ = ALL[index]
    if index not in answers:
        pytest.skip(f"the script is for Megatron-LM {job.release}")
    assert "accepted" in answers[index], answers[index]
    answer, plan = answers[index]["accepted"], pinned(index)
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "data_parallel_size",
        "expert_model_parallel_size",
        "sequence_parallel",
    ):
        assert answer[name] == plan.arguments[name], name
    if answer["pipeline_model_parallel_size"] > 1 and not plan.model.hybrid_layer_pattern:
        assert answer["stages"] == planned_stages(plan.model, plan.layout.partition)


@pytest.mark.slow
@pytest.mark.parametrize("cluster", make.CLUSTERS)
def test_a_script_shows_its_job_and_starts_nothing(cluster: str) -> None:
    release = checkout_version()
    scripts = [job for job in make.jobs() if job.release == release and not job.reason]
    if not scripts:
        pytest.skip(f"no script is for Megatron-LM {release}")
    job = scripts[0]
    size = job.num_gpus[cluster]
    words = ["--tokenizer-type", "NullTokenizer", *TRAINING, "nest.dry_run=true"]
    words += [f"nest.cluster={cluster}", f"nest.cluster.num_gpus={size}"]
    done = subprocess.run(
        ["bash", str(job.script), cluster, *words],
        env={
            **environment(LAUNCH=sys.executable),
            "MEGATRON_LM_HOME": os.environ["MEGATRON_LM_HOME"],
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "this job runs as" in done.stdout + done.stderr
