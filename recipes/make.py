"""Write the scripts and pinned plans of recipes/megatron_lm: python recipes/make.py [MODEL...].

Each job is planned for Megatron-LM 0.16.1 on both clusters. A plan that is still what the planner
finds keeps its file, so that only what changed is written.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import nest_megatron
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner.pins import Pin, PinnedPlan, read_pinned, write_pinned

FOLDER = Path(__file__).resolve().parent / "megatron_lm"
CLUSTERS = ("dgx_h100", "b200")
RELEASE = "0.16.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model, at one batch and number of GPUs on each cluster."""

    model: str
    num_gpus: int
    global_batch_size: int

    @property
    def script(self) -> Path:
        """The script that launches it."""
        return FOLDER / f"{self.model}.sh"

    def plan_path(self, cluster: str) -> Path:
        """Its pinned plan for a cluster."""
        return FOLDER / "plans" / f"{self.model}_{cluster}.yaml"

    def planned(self, cluster: str) -> ParallelPlan:
        """The plan of today."""
        return nest_megatron.plan(
            model=self.model,
            cluster=cluster,
            num_gpus=self.num_gpus,
            global_batch_size=self.global_batch_size,
            num_alternatives=0,
            target=f"megatron_lm_{RELEASE}",
        ).record


JOBS = (
    Job(model="gpt3_175b", num_gpus=512, global_batch_size=2048),
    Job(model="llama3_70b", num_gpus=64, global_batch_size=1024),
    Job(model="mistral_nemo_12b", num_gpus=64, global_batch_size=1024),
    Job(model="mixtral_8x7b", num_gpus=64, global_batch_size=1024),
    Job(model="qwen3_30b_a3b", num_gpus=64, global_batch_size=1024),
)
SCRIPT = """\
#!/usr/bin/env bash
# {model} on {num_gpus} GPUs with its pinned plan. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash {model}.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# CLUSTER is {clusters}. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus={num_gpus}
# behind your flags. Flags that change no shape (rotary or router scaling) are yours to add.
set -euo pipefail
plan=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)/plans/{model}_${{1:?CLUSTER}}.yaml
shift
cd "${{MEGATRON_LM_HOME:?a checkout of Megatron-LM}}"
exec ${{LAUNCH:-torchrun --nproc-per-node 8 --nnodes {num_nodes} ${{TORCHRUN_ARGS:-}}}} {script} \\
{flags} \\
  +nest=pinned nest.plan="$plan" "$@"
"""


def script_text(job: Job, plan: ParallelPlan) -> str:
    """The script: flags of the model and the batch; the layout comes from the pinned plan."""
    launch = plan.launch["megatron_lm"]
    layout = parallel_argv(launch_request(plan))
    words = [shlex.quote(word) for word in launch.argv[: -len(layout)]]
    words += ["--padded-vocab-size", str(plan.model.padded_vocab_size(1)), "--bf16"]
    words += ["--global-batch-size", str(job.global_batch_size)]
    return SCRIPT.format(
        model=job.model,
        num_gpus=job.num_gpus,
        num_nodes=job.num_gpus // 8,
        clusters=" or ".join(CLUSTERS),
        script=launch.script,
        flags="  " + " ".join(words).replace(" --", " \\\n  --"),
    )


def is_current(path: Path, plan: ParallelPlan) -> bool:
    """Whether a pinned file holds this plan."""
    if not path.is_file():
        return False
    old = read_pinned(path).plan
    return all(
        getattr(old, part) == getattr(plan, part)
        for part in ("model", "cluster", "train", "parallel", "placement", "predicted", "launch")
    )


def write(job: Job) -> None:
    """Write what of a job is not current."""
    for cluster in CLUSTERS:
        plan = job.planned(cluster)
        path = job.plan_path(cluster)
        if not is_current(path, plan):
            pin = Pin(
                created=plan.provenance.created,
                by="recipes/make.py",
                note="",
                nest_megatron_version=plan.provenance.nest_megatron_version,
                megatron_lm=RELEASE,
            )
            write_pinned(PinnedPlan(pin=pin, plan=plan), path)
            print(f"{path.name} written", flush=True)
    job.script.write_text(script_text(job, plan), encoding="utf-8")


def main(names: list[str]) -> None:
    """Write all of them, or those that are named."""
    for job in JOBS:
        if not names or job.model in names:
            write(job)


if __name__ == "__main__":
    main(sys.argv[1:])
