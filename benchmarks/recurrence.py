"""How long the paper's recurrence takes on jobs of the catalogue, and the paper's ablation of ZeRO.

Run from the project's root::

    python benchmarks/recurrence.py
    python benchmarks/recurrence.py --out docs/recurrence.md

One process a row. Times are of the search alone; peak memory is that of the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.authors_layers import authors_row  # noqa: E402
from benchmarks.paper.ablation import (  # noqa: E402
    GLOBAL_BATCH_SIZE,
    NUM_GPUS,
    TABLE_7,
    AblationRow,
    table7_row,
    zero_stages,
)
from nest_megatron.config.compose import compose  # noqa: E402
from nest_megatron.config.overrides import parse  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.research.nest_artifact.files import read_instance  # noqa: E402
from nest_megatron.research.nest_artifact.search import NoSolution  # noqa: E402
from nest_megatron.research.nest_dp.job import (  # noqa: E402
    PaperOptimizer,
    ResearchJob,
    research_job,
    split_research,
)
from nest_megatron.research.nest_dp.run import described  # noqa: E402
from nest_megatron.research.nest_dp.search import has_kernel, solve  # noqa: E402
from tools.markdown import table  # noqa: E402

MIB = 2**20
BATCH = "train.global_batch_size=4096"
GPT3 = ("model=gpt3_175b", "cluster=h100_spine_leaf", "cluster.num_gpus=1024", BATCH)
TORUS = ("model=gpt3_175b", "cluster=torus_3d", "cluster.num_gpus=1024", BATCH)
LLAMA = ("model=llama3_8b", "cluster=h100_spine_leaf", "cluster.num_gpus=64", BATCH)
#: Settings of each row, as typed after ``nest-megatron nest plan``.
ROWS = (
    LLAMA,
    ("model=llama3_70b", "cluster=h100_spine_leaf", "cluster.num_gpus=256", BATCH),
    ("model=llama3_70b", "cluster=h100_spine_leaf", "cluster.num_gpus=1024", BATCH),
    GPT3,
    (*GPT3, "research.schedule=gpipe"),
    (*GPT3, "research.divide=loosely"),
    ("model=mixtral_8x7b", "cluster=h100_spine_leaf", "cluster.num_gpus=256", BATCH),
    (*TORUS, "research.topology=torus"),
    (*LLAMA, "research.strategy_per_stage=true"),
)
#: A job that plain Python can do.
SMALL = ("model=llama3_70b", "cluster=h100_spine_leaf", "cluster.num_gpus=64")
SMALL += ("train.global_batch_size=256", "parallel.tensor_model_parallel_size=8")
SMALL += ("parallel.context_parallel_size=1", "train.micro_batch_size=1")
HEAD = ("job", "wall s", "CPU s", "peak MiB", "cases", "solved", "p, d", "strategy", "step s")
#: Instances of the artifact, their models, and the replicas that Table 7 gives them.
AUTHORS = (("llama3_128", "llama3_70b", 1), ("bertlarge_128", "bert_large", 10))
AUTHORS_HEAD = ("instance", "memory", "without ZeRO", "with ZeRO: p, d", "devices", "stages")
ZERO_HEAD = ("model", "memory", "optimizer", "without ZeRO", "with ZeRO: p, d", "devices", "stages")


def job_of(settings: Sequence[str]) -> ResearchJob:
    """The job that the settings describe."""
    own, given = split_research(settings)
    return research_job(compose(parse(own)), given)[0]


def one(settings: Sequence[str]) -> dict[str, Any]:
    """One row, to be run in a process of its own so that the peak memory is its own."""
    has_kernel()
    job = job_of(settings)
    wall, cpu = time.perf_counter(), time.process_time()
    found = solve(job)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    row = {"settings": settings, "wall_s": wall, "cpu_s": cpu}
    row["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if isinstance(found, NoSolution):
        return {**row, "reason": found.reason}
    plan = described(job, found)
    strategies = dict.fromkeys(stage.strategy for stage in plan.stages)
    return {
        **row,
        "cases": plan.num_cases,
        "solved": plan.num_solved,
        "degrees": (plan.pipeline_model_parallel_size, plan.data_parallel_size),
        "strategy": "; ".join(strategies),
        "step_s": plan.step_s,
    }


def measured() -> Iterator[dict[str, Any]]:
    """All rows, each in its own process."""
    for settings in ROWS:
        command = [sys.executable, __file__, "--one", *settings]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        yield json.loads(done.stdout)


def short(setting: str) -> str:
    """A setting for the table: a choice of the recurrence by its key, others by their value."""
    key, _, value = setting.partition("=")
    research = key.removeprefix("research.")
    return f"{research} {value}" if research != key else value if setting != BATCH else ""


def cells(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    shown = " ".join(filter(None, map(short, row["settings"])))
    first = [shown, f"{row['wall_s']:.2f}", f"{row['cpu_s']:.2f}", f"{row['peak_mib']:.0f}"]
    if "reason" in row:
        return [*first, "", "", "", row["reason"], ""]
    degrees = ", ".join(map(str, row["degrees"]))
    counts = [f"{row['cases']:,}", f"{row['solved']:,}", degrees]
    return [*first, *counts, row["strategy"], f"{row['step_s']:.3f}"]


def ablation() -> Iterator[AblationRow]:
    """The paper's Table 7 on our sizes."""
    for model in TABLE_7:
        for optimizer in PaperOptimizer:
            cluster = ("cluster=tpuv4_fat_tree", f"cluster.num_gpus={NUM_GPUS}")
            job = job_of(
                (f"model={model}", *cluster, f"train.global_batch_size={GLOBAL_BATCH_SIZE}")
            )
            yield table7_row(job.spec, job.cluster, job.settings, optimizer)


def zero_cells(row: AblationRow) -> list[str]:
    """A row of the ablation's table."""
    memory = f"{row.memory_bytes / MIB:,.0f} MiB"
    without = row.without.reason if isinstance(row.without, NoSolution) else "a plan"
    first = [row.model, memory, str(row.optimizer), without]
    if isinstance(row.with_zero, NoSolution):
        return [*first, "", "", row.with_zero.reason]
    plan = row.with_zero
    degrees = f"{plan.pipeline_model_parallel_size}, {plan.data_parallel_size}"
    settings = ((stage.zero_stage, stage.zero_degree) for stage in plan.stages)
    return [*first, degrees, str(plan.num_devices), zero_stages(settings)]


def authors() -> Iterator[list[str]]:
    """The same with the layers of the authors' artifact, and as many replicas as in the table."""
    for name, model, replicas in AUTHORS:
        instance = read_instance(
            ROOT / "tests" / "research" / "nest_artifact" / "data" / f"{name}.json"
        )
        row = authors_row(instance, TABLE_7[model], replicas)
        without = "a plan" if row.fits_without else "no plan"
        memory = f"{TABLE_7[model] / MIB:,.0f} MiB"
        degrees = f"{len(row.settings)}, {replicas}"
        yield [name, memory, without, degrees, str(row.num_devices), zero_stages(row.settings)]


def kernel_and_reference() -> str:
    """CPU seconds of both on the same small job, and whether their plans are the same."""
    job, seconds, found = job_of(SMALL), [], []
    for compiled in (True, False):
        started = time.process_time()
        found.append(solve(job, compiled=compiled))
        seconds.append(time.process_time() - started)
    kernel, reference = (dataclasses.replace(f, problem=None) for f in found)
    return (
        f"kernel {seconds[0]:.2f} s CPU, reference {seconds[1]:.2f} s "
        f"({seconds[1] / seconds[0]:,.0f} times), packing and pricing in Python included in both; "
        f"same plan: {kernel == reference}"
    )


def machine() -> str:
    """Processor and Python, as far as the system says."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line.partition(":")[2] for line in text.splitlines() if line.startswith("model name")]
    name = names[0].strip() if names else platform.machine()
    return f"{name}, {len(names)} cores, Python {platform.python_version()}"


def document(rows: str, zero: str, own: str, twins: str) -> str:
    """The page."""
    return PAGE.format(
        machine=machine(),
        today=date.today(),
        rows=rows,
        zero=zero,
        own=own,
        twins=twins,
        small=" ".join(SMALL),
    )


def main() -> None:
    """Print the tables, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the page here (docs/recurrence.md)")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return
    rows = table(HEAD, map(cells, measured()), numeric=0)
    print(rows, flush=True)
    zero = table(ZERO_HEAD, map(zero_cells, ablation()), numeric=0)
    print(zero, flush=True)
    own = table(AUTHORS_HEAD, authors(), numeric=0)
    print(own, flush=True)
    twins = kernel_and_reference()
    print(twins)
    if options.out is not None:
        write_text(options.out, document(rows, zero, own, twins))


PAGE = """\
# NEST's recurrence as a research mode

`nest-megatron nest plan` solves the recurrence of the NEST paper (arXiv 2603.06798, section 4,
appendices B.2 and C.3) for any job of the catalogue, priced by this project's cost model. Its
plans are not launched: Megatron has no stages of different widths, idle devices or ZeRO over
devices of their own. `nest-megatron plan` finds plans that launch; `nest-megatron nest solve` is
the authors' own formula on their own instances ([nest_artifact.md](nest_artifact.md)).

## The space

* **Stages** are differences of nested downsets (sets closed under readers) of the layer graph. A
  chain of n layers has n + 1 downsets; a graph may have branches. A tensor that skips stages is
  handed on by each of them. More than 2,048 downsets are refused with their number and the branches
  to contract. Models of the catalogue are chains; graphs are taken by the Python interface
  (`nest_megatron.research.nest_dp.search.best_pipeline`).
* **Strategies**: tensor, context and expert parallel degrees (powers of two, or what is fixed),
  sequence parallelism on or off, micro batch; one for the whole pipeline, or with
  `research.strategy_per_stage=true` one for each stage among those with as many sequences in a
  micro batch. Expert ranks work on tokens of their own, so a micro batch of the pipeline counts
  them.
* **Placement**: stages stand one after another, the last stage first, and any devices may stay idle
  between them. Every group (tensor, context, expert, ZeRO, copies of a parameter) is priced by the
  fan-outs at the network levels where it really lies, which depend on the stage's first device. A
  link between two stages is that of the innermost level one group of which holds both stages, in
  every replica.
* **Replicas**: d pipelines, each on N / d devices. `research.divide=exactly`: d divides devices and
  micro batches. `loosely`: any d; the last devices stay idle, the busiest replica counts, and
  devices are neighbours only where all replicas agree.
* **Memory**: 1F1B keeps min(s, m) micro batches in the stage at position s from the end, GPipe all
  m. Each stage computes its forward pass again or not. A stage that does not fit takes 2, 4, 8, ...
  times its devices, over which ZeRO stage 1, 2 or 3 divides its states: the first setting that
  fits. As in the paper these devices do no other work. Stage 2 scatters gradients, stage 3 also
  gathers weights in each pass, for every micro batch, where the group lies (the artifact: one
  collective of each stage).

## The objective

    bottleneck * (ceil(M / d) + p - 1) + slowest sum of gradients

The bottleneck is the slowest stage's input transfer, forward pass, gradient transfer and backward
pass; a forward pass that is done again runs beside the gradient's transfer, as the paper has it. A
transfer takes as long as the receiving stage's devices need. The sum of gradients is that of the
stage where it takes longest, over all copies of its parameters, hidden under nothing. There is no
optimizer step and no host time in it, so steps are shorter than those of `nest-megatron plan`.

## Exactness

Whole ticks of a picosecond, so that sums are exact. A state is the least bottleneck for (stages,
level of the link to the stage before, downset, first free device); a stage's promise to be reached
through level l holds if the stage before it ends in the same stretch of level-l neighbours. Idle
devices are a running minimum inside a stretch. The second maximum, of the sums, is met by caps that
come down until no plan can be better. Cases (strategy and d) are skipped only by bounds: layers
without any traffic, and states against the memory of all devices. Brute force over every plan
agrees on random chains and graphs, with ties in the totals, and the kernel fills the same tables as
plain Python, bit for bit (`tests/research/nest_dp`).

## Torus and mesh

`research.topology=torus` or `mesh` takes the cluster's levels as dimensions. Devices are numbered
dimension by dimension. Affinity classes take the place of levels for links between stages: blocks
that reach along one dimension by its prime factors, all inner dimensions being whole (x 2, x 4,
y 2, ...), with the hops of the longest way inside (around, in a whole dimension of a torus). Kept:
contiguity along the numbering, hops, the dimension's bandwidth. Left out: sharing of a link by
several transfers, routes, blocks of other shapes, numberings that turn at the end of a line.
Collectives are priced by fan-outs along the dimensions, as elsewhere.

## Measured

Machine: {machine}, two cores shared with other jobs, one used.
Measured on {today} by `python benchmarks/recurrence.py --out docs/recurrence.md`.

{rows}

A case is a strategy, or a set of them where stages may differ, with a number of replicas; p and d
are stages and replicas. `{small}`: {twins}.

## ZeRO under small memory

The paper's ablation (appendix C.3, Table 7) with the paper's account of memory,
2 W + O + A + (s - 1) S, on 1,024 devices of 24 GiB and of 120 MiB. (Binary units: the artifact
takes its option so, and with them its sizes come to the table's degrees.) The table has

* Llama-3: 81 stages, 1 replica, 641 devices; embedding without ZeRO, the rest ZeRO-3 over 8;
* BERT-Large: 25 stages, 10 replicas, 980 devices; embedding ZeRO-2 over 2, the rest ZeRO-3 over 4.

With the layers of the authors' artifact, as many replicas as the table has, and SGD as in all of
its runs (`benchmarks/authors_layers.py`):

{own}

No plan fits without ZeRO, and where memory is scarcest the settings are the table's. The artifact
gives all layers a setting that fits at every place of a pipeline; here each stage takes the first
that fits where it stands, so that degrees fall towards the end and fewer devices do. Llama's first
layer joins the embedding's stage, whose input is not kept.

With the layers of the catalogue (`nest-megatron nest plan` with `research.memory=paper`,
`research.flash_attention=false`, `research.divide=loosely`, tp 1, cp 1, micro batch 1, batch 4,096,
`cluster=tpuv4_fat_tree`):

{zero}

* The artifact traces one layer with the language-model head inside, so its Llama-3 layer has 1.906
  billion parameters where the catalogue's has 0.856. With SGD the catalogue's fits without ZeRO;
  with Adam, 16 bytes a parameter instead of 4, it does not.
* The artifact adds up the outputs of all operators, views and masks included; here what a backward
  pass needs is counted, on sequences of 8,192 tokens instead of 4,096.
* The number of replicas is chosen, and the head is a layer of its own.
"""


if __name__ == "__main__":
    main()
