"""Tables 2 (plans), 4 (time of the search) and 7 (ZeRO where memory is short)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nest_megatron.research.paper import published
from nest_megatron.research.paper.figures import FAT_TREE, MODELS, SPINE_LEAF, Keep
from nest_megatron.research.paper.outcome import Report, Runner
from nest_megatron.research.paper.published import PaperJob
from nest_megatron.units import Bytes, format_seconds

_TABLE2_GPUS = 512
_TABLE4_GPUS = 1024


def table2(run: Runner, keep: Keep = lambda job: True) -> Report:
    """The plans of each planner for 512 devices of the fat tree."""
    planners = ("manual", "mcmc", "alpa_e", "phaze", "nest")
    printed = {row["model"]: row for row in published.rows("table2")}
    cells = []
    for model in MODELS:
        job = PaperJob(model=model, cluster=FAT_TREE, num_gpus=_TABLE2_GPUS)
        if not keep(job):
            continue
        planned = run(job, planners)
        for planner in planners:
            paper = printed[model][planner]
            ours = planned[planner].layout
            cells.append((model, planner, ours, _artifact_degrees(job, planner), f"{{{paper}}}"))
    return Report(
        name="table2",
        title="Table 2: plans on 512 devices of the fat tree",
        head=("model", "planner", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )


def table4(run: Runner, keep: Keep = lambda job: True) -> Report:
    """How long Mist's and our search take, on the H100 cluster."""
    cells = []
    for row in published.rows("minutes"):
        job = PaperJob(model=row["model"], cluster=SPINE_LEAF, num_gpus=_TABLE4_GPUS)
        if not keep(job):
            continue
        planned = run(job, ("mist", "nest"))
        for planner in ("mist", "nest"):
            ours = format_seconds(planned[planner].seconds)
            proof = "proven" if planned[planner].optimal else ""
            cells.append((row["model"], planner, proof, ours, "", f"{row[planner]} min"))
    return Report(
        name="table4",
        title="Table 4: time of the search",
        head=("model", "planner", "proof", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroOutcome:
    """What the recurrence finds for a model under short memory.

    Args:
        optimizer: ``sgd`` or ``adam``; the paper does not say which.
        without, with_zero: the plan in words, or why there is none.
    """

    optimizer: str
    without: str
    with_zero: str


#: Plans a model in so much memory, once for each optimizer.
ZeroRunner = Callable[[str], Sequence[ZeroOutcome]]


def table7(run: ZeroRunner, keep: Keep = lambda job: True) -> Report:
    """Models in memory too small for them without ZeRO (appendix C.3)."""
    cells = []
    for row in published.rows("zero"):
        model, memory = row["model"], _memory(int(row["memory_bytes"]))
        if not keep(PaperJob(model=model, cluster=FAT_TREE, num_gpus=_TABLE4_GPUS)):
            continue
        printed = f"{row['num_devices']} devices, {{{row['degrees']}}}; {row['zero']}"
        for found in run(model):
            job = f"{model}\n{memory}, {found.optimizer}"
            cells.append((f"{job}\nno ZeRO", found.without, "", "no plan"))
            cells.append((f"{job}\nZeRO", found.with_zero, "", printed))
    return Report(
        name="table7",
        title="Table 7: ZeRO where memory is short",
        head=("job", "ours", "artifact", "paper"),
        cells=tuple(cells),
    )


def _artifact_degrees(job: PaperJob, planner: str) -> str:
    if planner != "nest":
        return ""
    for cell in published.artifact().values():
        if (cell.job.model, cell.job.cluster, cell.job.num_gpus) == (
            job.model,
            job.cluster,
            job.num_gpus,
        ):
            return f"{{{', '.join(map(str, cell.degrees))}}}"
    return ""


def _memory(size: Bytes) -> str:
    return f"{size / 1e9:g} GB" if size >= 1e9 else f"{size / 1e6:g} MB"
