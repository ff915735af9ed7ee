"""``+nest=auto`` on Megatron-LM's own script: it trains, and what was planned is what is built.

Set ``MEGATRON_LM_HOME`` to a Megatron-LM checkout, of 0.15 to 0.20.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.cluster.records import Precision
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import release_number
from tests.megatron_lm.ask import checkout_version
from tests.megatron_lm.training import (
    DENSE,
    EXPERTS,
    HOME,
    ON_CPU,
    TRAINING,
    Trained,
    alone,
    environment,
    free_port,
    run,
    torchrun,
)

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

CLUSTER = ["nest.cluster=dgx_h100"]
JOBS = {
    "1 rank": (0, DENSE, ["+nest=auto"]),
    "2 ranks, all free": (2, DENSE, ["+nest=auto", "nest.free=all"]),
    "2 ranks, tensor": (2, [*DENSE, "--tensor-model-parallel-size", "2"], ["+nest=auto"]),
    "2 ranks, pipeline": (2, [*DENSE, "--pipeline-model-parallel-size", "2"], ["+nest=auto"]),
    "4 ranks, tensor and pipeline": (
        4,
        [*DENSE, "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"],
        ["+nest=auto"],
    ),
    "4 ranks, virtual stages": (
        4,
        [
            *DENSE,
            *("--pipeline-model-parallel-size", "2"),
            *("--num-virtual-stages-per-pipeline-rank", "2"),
        ],
        ["+nest=auto"],
    ),
    "2 ranks, experts": (2, [*EXPERTS, "--expert-model-parallel-size", "2"], ["+nest=auto"]),
    "4 ranks, experts and pipeline": (
        4,
        [*EXPERTS, "--pipeline-model-parallel-size", "2"],
        ["+nest=auto", "nest.parallel.expert_model_parallel_size=2"],
    ),
}


def launch(name: str, plan: Path) -> Trained:
    ranks, model, words = JOBS[name]
    arguments = [*model, *TRAINING, *ON_CPU, *words, *CLUSTER, "nest.watch=2", f"nest.out={plan}"]
    return run(torchrun(ranks), arguments) if ranks else run([], arguments, **alone())


@pytest.mark.parametrize("name", JOBS)
def test_it_trains_as_planned(name: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    trained = launch(name, path)
    assert trained.code == 0, trained.out[-3000:]
    assert len(trained.losses) == 3
    assert trained.losses[-1] < trained.losses[0]
    assert trained.out.count("nest: this job runs as") == 1
    assert trained.out.count("nest: measured over watched steps") == 1
    plan = plan_file.read(path)
    assert plan.layout.num_gpus == max(1, JOBS[name][0])
    assert trained.parameters == predicted_parameters(plan)


@pytest.mark.parametrize("name", ["2 ranks, all free", "4 ranks, experts and pipeline"])
def test_the_losses_are_those_of_the_same_flags_by_hand(name: str, tmp_path: Path) -> None:
    """Every digit that Megatron prints, without a word of nest in the second job."""
    path = tmp_path / "plan.yaml"
    planned, ranks = launch(name, path), JOBS[name][0]
    assert planned.code == 0, planned.out[-3000:]
    command = plan_file.read(path).launch[LAUNCHER]
    variables = {name: text for name, text in command.environment.items() if text is not None}
    by_hand = run(torchrun(ranks), [*command.argv], **variables)
    assert by_hand.code == 0, by_hand.out[-3000:]
    assert "nest: " not in by_hand.out
    assert len(by_hand.losses) == 3
    assert planned.losses == by_hand.losses


def test_single_precision_trains_as_planned(tmp_path: Path) -> None:
    """Megatron's own default: neither ``--bf16`` nor ``--fp16``."""
    path = tmp_path / "plan.yaml"
    training = [word for word in TRAINING if word != "--bf16"]
    arguments = [*DENSE, *training, *ON_CPU, "+nest=auto", *CLUSTER, f"nest.out={path}"]
    trained = run([], arguments, **alone())
    assert trained.code == 0, trained.out[-3000:]
    assert trained.losses[-1] < trained.losses[0]
    plan = plan_file.read(path)
    assert plan.train.precision is Precision.FP32
    assert plan.search.not_modelled == ("--transformer-impl local",)


def test_a_batch_that_grows_is_trained_at_each_size(tmp_path: Path) -> None:
    """Ramp (until 0.17) or schedule of steps: eight sequences in fours, then eights."""
    path, steps = tmp_path / "plan.yaml", ["--step-batch-size-schedule", "0:4 512:8"]
    ramp = ["--global-batch-size", "8", "--rampup-batch-size", "4", "4", "7"]
    growing = ramp if release_number(checkout_version()) < (0, 18) else steps
    model = without(DENSE, "--global-batch-size")
    samples = ["--train-samples", "24", "--lr-decay-samples", "24"]
    training = [*without(TRAINING, "--train-iters", "--lr-decay-iters"), *samples]
    words = ["+nest=auto", "nest.free=all", *CLUSTER, f"nest.out={path}"]
    trained = run(torchrun(2), [*model, *training, *growing, *ON_CPU, *words])
    assert trained.code == 0, trained.out[-3000:]
    sizes = re.findall(r"global batch size:\s+(\d+)", trained.out)
    assert sizes == ["4", "4", "8", "8"]
    plan = plan_file.read(path)
    assert plan.layout.global_batch_size == 8
    assert [batch.global_batch_size for batch in plan.batches] == [4, 8]


def without(words: list[str], *flags: str) -> list[str]:
    """Arguments without some flags, each of one value."""
    pairs = zip(words, [None, *words], strict=False)
    return [word for word, before in pairs if word not in flags and before not in flags]


def predicted_parameters(plan: ParallelPlan) -> dict[tuple[int, int], int]:
    """Parameters of each (tensor, pipeline) rank, as the plan counts them."""
    ranks = range(plan.layout.dims.tensor_model_parallel_size)
    stages = enumerate(plan.predicted.stages)
    return {(t, p): stage.parameters for p, stage in stages for t in ranks}


@pytest.mark.parametrize("launcher", ["runner", "torchrun -m"])
def test_the_runner_trains_too(launcher: str) -> None:
    arguments = [*DENSE, *TRAINING, *ON_CPU, "+nest=auto", *CLUSTER]
    if launcher == "runner":
        trained = run(["-m", "nest_megatron"], arguments, **alone())
    else:
        trained = run([*torchrun(2), "-m", "nest_megatron"], arguments)
    assert trained.code == 0, trained.out[-3000:]
    assert trained.out.count("nest: this job runs as") == 1
    assert len(trained.losses) == 3


def test_srun_without_exported_ranks() -> None:
    """Tasks of one step; nothing but Slurm's own variables tells them apart."""
    arguments = [*DENSE, *TRAINING, *ON_CPU, "+nest=auto", "nest.free=all", *CLUSTER]
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "MASTER_PORT": free_port(),
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *arguments],
            cwd=HOME,
            env=environment(**step, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [task.communicate(timeout=300)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], outputs[0][-2000:] + outputs[1][-2000:]
    assert "nest: this job runs as" in outputs[0]
    assert "nest: this job runs as" not in outputs[1]


def test_ranks_are_numbered_anew_as_asked(tmp_path: Path) -> None:
    """The plan file keeps what was asked for, so that it asks again when it is pinned."""
    arguments = [*DENSE, *TRAINING, *ON_CPU, "+nest=auto", *CLUSTER]
    path = tmp_path / "plan.yaml"
    arguments += ["--tensor-model-parallel-size", "2", "nest.ranks=[2,0,3,1]", f"nest.out={path}"]
    trained = run(torchrun(4), arguments)
    assert trained.code == 0, trained.out[-3000:]
    assert "Ranks are numbered anew" in trained.out
    assert plan_file.read(path).placement.rank_permutation == (2, 0, 3, 1)
    assert len(trained.losses) == 3


#: A job that no catalogued GPU holds alone.
HUGE = shlex.split(
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 8"
)


def test_a_job_that_fits_nowhere_ends_all_ranks_with_the_reason() -> None:
    arguments = [*HUGE, *TRAINING, *ON_CPU, "+nest=auto", *CLUSTER]
    trained = run(torchrun(2), arguments)
    assert trained.code == 1
    # the local modules of a CPU's job keep activations that are not modelled
    assert "No plan fits in what is modelled of memory" in trained.out
    assert "rank 0 could not plan" not in trained.out  # one message a host is enough
    assert "initializing torch distributed" not in trained.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nest.cluster=dgx_h101"], "Did you mean dgx_h100"),
        (["nest.cluster=/no/such/file.yaml"], "cannot be read"),
        (["nest.cluster=dgx_h100", "nest.cluster.num_gpus=64"], "the launcher started 1 ranks"),
        ([], "shows no NVIDIA GPU"),
        (["nest.cluster=dgx_h100", "nest.out=/no/such/folder/plan.yaml"], "nest.out"),
        (["nest.cluster=dgx_h100", "nest.free=[tensor]"], "nest.free"),
        (["nest.cluster=dgx_h100", "nest.alternative=99"], "nest.alternative"),
        (["nest.cluster=dgx_h100", "nest.profile.mode=require"], "nest.profile.mode"),
    ],
)
def test_faults_are_named_before_anything_starts(words: list[str], said: str) -> None:
    trained = run([], [*DENSE, *TRAINING, *ON_CPU, "+nest=auto", *words], **alone())
    assert trained.code == 2, trained.out[-2000:]
    assert said in trained.out
    assert "initializing torch distributed" not in trained.out
