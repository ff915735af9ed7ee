"""Write the recipes: scripts and pinned plans of the jobs in jobs.csv, and the table of README.md.

usage: python recipes/make.py [--framework megatron_lm|nemo|megatron_bridge] [MODEL...]

``megatron_lm/MODEL.sh`` has the flags of a model; a recipe of NeMo or of Megatron-Bridge is planned
as the framework itself makes it, which has to be installed, and gets its plan by ``pretrain.py`` of
its folder. Each plan is for one of ``CLUSTERS``. A plan that is still what the planner finds keeps
its file, so that only what changed is written. Columns of jobs.csv: GPUs of each cluster, the
release of Megatron-LM, the recipe's name in the other frameworks, how names of models begin that
are of the family, and flags of the published model that a plan has no field for.
"""

from __future__ import annotations

import argparse
import csv
import functools
import importlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import nest_megatron
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.errors import require_known
from nest_megatron.files import write_text
from nest_megatron.integrations.megatron_lm.attach import launch_request, target_refusal
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.planner.pins import Pin, PinnedPlan, read_pinned, write_pinned

ROOT = Path(__file__).resolve().parent
CLUSTERS = ("dgx_h100", "gb200_nvl72")
LM, NEMO, BRIDGE = "megatron_lm", "nemo", "megatron_bridge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model at one batch: a row of jobs.csv.

    Args:
        num_gpus: on each of ``CLUSTERS``.
        release: of Megatron-LM.
        covers: how the names of other models of its family begin.
        flags: of Megatron-LM, for what of the published model no field of a plan states.
    """

    family: str
    model: str
    num_gpus: Mapping[str, int]
    global_batch_size: int
    release: str
    nemo: str
    bridge: str
    covers: tuple[str, ...]
    flags: tuple[str, ...]

    @property
    def script(self) -> Path:
        """The script of Megatron-LM."""
        return ROOT / LM / f"{self.model}.sh"

    @property
    def reason(self) -> str:
        """Why there is no script of Megatron-LM; empty where there is one."""
        return _reason(self.model, self.release)

    def recipes(self) -> Iterator[Recipe]:
        """The recipes that there are of it."""
        if not self.reason:
            target = f"{LM}_{self.release}"
            yield Recipe(job=self, framework=LM, name=self.model, target=target)
        if self.nemo:
            yield Recipe(job=self, framework=NEMO, name=self.nemo, target="nemo_2.7")
        if self.bridge:
            target = "megatron_bridge_0.6"
            yield Recipe(job=self, framework=BRIDGE, name=self.bridge, target=target)


@functools.cache
def _reason(model: str, release: str) -> str:
    return target_refusal(nest_megatron.models()[model], target_named(f"{LM}_{release}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A job as one framework runs it."""

    job: Job
    framework: str
    name: str
    target: str

    def path(self, cluster: str) -> Path:
        """Its pinned plan for a cluster."""
        return ROOT / self.framework / "plans" / f"{self.name}_{cluster}.yaml"

    def planned(self, cluster: str) -> ParallelPlan:
        """The plan of today for the model of the catalogue, with the target's usual settings."""
        return nest_megatron.plan(
            model=self.job.model,
            cluster=cluster,
            num_gpus=self.job.num_gpus[cluster],
            global_batch_size=self.job.global_batch_size,
            search=_SEARCH,
            target=self.target,
        ).record

    def planned_as_made(self, cluster: str) -> ParallelPlan:
        """The plan of today for the configuration that the framework makes."""
        if self.framework == LM:
            return self.planned(cluster)
        configured = importlib.import_module(f"recipes.{self.framework}.pretrain").configured
        integration = importlib.import_module(f"nest_megatron.integrations.{self.framework}")
        model, num_gpus = nest_megatron.models()[self.job.model], self.job.num_gpus[cluster]
        place = nest_megatron.clusters()[cluster].resized(num_gpus)
        plan, _ = integration.auto_recipe(
            configured(self.name, model, place, self.job.global_batch_size),
            cluster=cluster,
            overrides=[
                f"cluster.num_gpus={num_gpus}",
                *(f"search.{name}={value}" for name, value in _SEARCH.items()),
            ],
            vocab_size=model.vocab_size,
        )
        return plan


#: For each search: what time ends depends on the machine, and is no plan to keep.
_MAX_SECONDS = 900
_SEARCH = {"num_alternatives": 0, "max_seconds": _MAX_SECONDS}
#: ``search.certificate`` of a plan whose search has come to its end.
FINISHED = ("optimal", "chosen")


@functools.cache
def jobs() -> tuple[Job, ...]:
    """The rows of jobs.csv."""
    with (ROOT / "jobs.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Job(
                family=row["family"],
                model=row["model"],
                num_gpus={cluster: int(row[cluster]) for cluster in CLUSTERS},
                global_batch_size=int(row["global_batch_size"]),
                release=row[LM],
                nemo=row[NEMO],
                bridge=row[BRIDGE],
                covers=tuple(row["covers"].split()),
                flags=tuple(row["flags"].split()),
            )
            for row in csv.DictReader(file)
        )


#: Models of the catalogue without a recipe, by why there is none.
OTHERS: dict[str, tuple[str, ...]] = {
    "dense models, whose whole command `plan` prints": (
        *("aquila2_", "baichuan2_", "chatglm2_", "chatglm3_", "internlm2_", "internlm_", "yi_"),
    ),
    "closed models, known from papers": (
        *("anthropic_52b", "chinchilla", "gopher_280b", "lamda_137b", "palm_540b"),
    ),
    "benchmarks of MosaicML with learned positions, whose command `plan` prints; the published MPT "
    "has ALiBi, which Megatron-LM does not build": ("mpt_",),
    "shapes of benchmarks and of a simulator": (
        *("deepseek_1", "deepseek_32b", "deepseek_v2_lite_28l", "llama_like_", "moe_8t"),
    ),
}

SCRIPT = """\
#!/usr/bin/env bash
# {model} with its pinned plan: {sizes}. Written by `python recipes/make.py`.
#   MEGATRON_LM_HOME=CHECKOUT bash {model}.sh CLUSTER <data, tokenizer, optimizer, checkpoints>
# for Megatron-LM {release}. LAUNCH replaces the launcher. To see the job and start nothing:
# LAUNCH=python, and nest.dry_run=true nest.cluster=CLUSTER nest.cluster.num_gpus=GPUS behind your
# flags. Losses that balance experts and the extension of a context (YaRN) are yours to add.
set -euo pipefail
case ${{1:-}} in
{cases}
  *) echo "usage: bash {model}.sh {choices} <flags>" >&2 && exit 2 ;;
esac
plan=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)/plans/{model}_$1.yaml
shift
cd "${{MEGATRON_LM_HOME:?a checkout of Megatron-LM}}"
exec ${{LAUNCH:-torchrun $hosts ${{TORCHRUN_ARGS:-}}}} {script} \\
{flags} \\
  +nest=pinned nest.plan="$plan" "$@"
"""


def job_argv(job: Job, plan: ParallelPlan) -> list[str]:
    """The flags of the model and the batch; the layout comes from the pinned plan."""
    launch, spec = plan.launch[LM], plan.model
    layout = parallel_argv(launch_request(plan, version=job.release))
    words = [*launch.argv[: -len(layout)]]
    if spec.hybrid_layer_pattern and "--hybrid-override-pattern" not in words:
        words += ["--hybrid-layer-pattern", spec.hybrid_layer_pattern.replace("|", "")]
    words += ["--padded-vocab-size", str(spec.padded_vocab_size(1)), "--bf16"]
    return [*words, *job.flags, "--global-batch-size", str(job.global_batch_size)]


def script_text(job: Job, plans: Mapping[str, ParallelPlan]) -> str:
    """The script of a job with plans for every cluster, which state the same model."""
    plan = plans[CLUSTERS[0]]
    words = " ".join(map(shlex.quote, job_argv(job, plan)))
    hosts = {name: each.cluster.launch_gpus_per_host for name, each in plans.items()}
    return SCRIPT.format(
        model=job.model,
        sizes=", ".join(f"{job.num_gpus[name]} GPUs of {name}" for name in plans),
        release=job.release,
        cases="\n".join(
            f'  {name}) hosts="--nproc-per-node {each} --nnodes {job.num_gpus[name] // each}" ;;'
            for name, each in hosts.items()
        ),
        choices="|".join(plans),
        script=plan.launch[LM].script,
        flags="  " + words.replace(" --", " \\\n  --"),
    )


def is_current(path: Path, plan: ParallelPlan) -> bool:
    """Whether a pinned file holds this plan."""
    if not path.is_file():
        return False
    old = read_pinned(path).plan
    parts = ("model", "cluster", "train", "layout", "placement", "predicted")
    return all(getattr(old, part) == getattr(plan, part) for part in (*parts, "launch"))


def write_plan(recipe: Recipe, cluster: str) -> ParallelPlan:
    """Write a plan unless its file is current; one whose search time has ended is not kept."""
    plan, path = recipe.planned_as_made(cluster), recipe.path(cluster)
    if plan.search.certificate not in FINISHED:
        sys.exit(f"{path.name}: {_MAX_SECONDS} s ended the search ({plan.search.certificate})")
    if is_current(path, plan):
        return plan
    pin = Pin(
        created=plan.provenance.created,
        by="recipes/make.py",
        note="",
        nest_megatron_version=plan.provenance.nest_megatron_version,
        megatron_lm=recipe.job.release if recipe.framework == LM else None,
    )
    path.parent.mkdir(exist_ok=True)
    write_pinned(PinnedPlan(pin=pin, plan=plan), path)
    print(f"{path.relative_to(ROOT)} written", flush=True)
    return plan


def write(job: Job, framework: str) -> None:
    """Write what of a job in a framework is not current."""
    for recipe in job.recipes():
        if recipe.framework == framework:
            plans = {cluster: write_plan(recipe, cluster) for cluster in CLUSTERS}
            if framework == LM:
                write_text(job.script, script_text(job, plans))


_MADE = "<!-- What follows is written by python recipes/make.py. -->\n"


def readme_text() -> str:
    """README.md with the table of today."""
    own, _, _ = (ROOT / "README.md").read_text(encoding="utf-8").partition(_MADE)
    lines = [
        "| Family | Model | " + " | ".join(f"GPUs of {each}" for each in CLUSTERS) + " | Batch"
        " | Megatron-LM | NeMo | Megatron-Bridge |",
        "|---|---|" + "--:|" * len(CLUSTERS) + "--:|---|---|---|",
        *map(_row, jobs()),
        "",
        "-: no pinned plan is here; `auto_recipe` plans a recipe that the framework has "
        "([docs/nemo.md](../docs/nemo.md)). Why Megatron-LM has no script:",
        "",
        *(f"* {job.model}: {reason}." for job in jobs() if (reason := job.reason)),
        "",
        "Other sizes of these families have no recipe of their own, nor have these models: "
        "`nest-megatron plan model=MODEL cluster=CLUSTER` prints the plan of one.",
        "",
        *(f"* {', '.join(_named(names))}: {why}." for why, names in OTHERS.items()),
    ]
    return own + _MADE + "\n".join(lines) + "\n"


def _row(job: Job) -> str:
    sizes = [*map(str, job.num_gpus.values()), f"{job.global_batch_size:,}"]
    if not any(job.recipes()):
        sizes = ["-"] * len(sizes)
    script = "see below" if job.reason else f"[{job.release}]({LM}/{job.script.name})"
    others = [f"`{name}`" if name else "-" for name in (job.nemo, job.bridge)]
    return f"| {' | '.join((job.family, f'`{job.model}`', *sizes, script, *others))} |"


def _named(prefixes: tuple[str, ...]) -> list[str]:
    return [f"`{name}`" for name in nest_megatron.models() if name.startswith(prefixes)]


def main(words: list[str]) -> None:
    """Write all of a framework, or those that are named."""
    parser = argparse.ArgumentParser(description="Write recipes of one framework.")
    parser.add_argument("--framework", choices=(LM, NEMO, BRIDGE), default=LM)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    given = parser.parse_args(words)
    for name in given.models:
        require_known("MODEL", name, [job.model for job in jobs()])
    if given.framework == BRIDGE:  # which asks for CUDA's packages, and for a device
        from tests.nemo import substitutes

        substitutes.install()
        from tests.nemo import bridge

        bridge.built(_write_all, names=given.models, framework=BRIDGE)
    else:
        _write_all(given.models, given.framework)
    write_text(ROOT / "README.md", readme_text())


def _write_all(names: list[str], framework: str) -> None:
    for job in jobs():
        if not names or job.model in names:
            write(job, framework)


if __name__ == "__main__":
    main(sys.argv[1:])
