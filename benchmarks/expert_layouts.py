"""Are layouts that NVIDIA's engineers published near the best that our own cost model knows?

Run from the project's root with a file of measured runs (``nest-megatron validate --help``)::

    python benchmarks/expert_layouts.py throughput.csv --out docs/expert_layouts.md

Each job (model, GPU, GPUs, sequence, batch, number format, framework) counts once, with the layout
that was measured fastest. The published layout is predicted and a search is run for the same job
under the same assumptions. A best plan that is predicted to be much faster than what the experts
chose says that the model of time or of memory is too kind to it, or that they left time on the
table; the table says which term the difference comes from, so that a person can judge.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.expert_search import (  # noqa: E402
    NEAR,
    SOURCES,
    Compared,
    Published,
    compared,
    fastest,
    in_other_layouts,
    published_runs,
)
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.layout.layout import PartialLayout  # noqa: E402
from nest_megatron.validation.rows import Row  # noqa: E402

#: A plan above this share of the memory that it may fill would not fit under a slightly larger
#: prediction.
EDGE = 0.97
#: Terms of an estimate by what a difference in them means.
KINDS = {
    "ep_communication": "exchange of tokens with experts",
    "compute": "arithmetic",
    "recompute": "recomputation",
    "pipeline_bubble": "pipeline bubble",
}
MEANING = {
    "exchange of tokens with experts": (
        "groups of experts are kept within a node, or get smaller; the time of an exchange between"
        " nodes depends on the dispatcher, which tables do not name: the cost model is the suspect"
    ),
    "arithmetic": (
        "more tokens at a time (a larger micro batch, no context parallelism): reading weights and"
        " adding up their gradients is charged to every micro batch, most of it beside the"
        " arithmetic; where that is charged too high, large micro batches look too good"
    ),
    "recomputation": (
        "ours fits without what the experts recompute: the memory model is the suspect, or"
        " what a row leaves out was taken for more recomputation than it did"
    ),
    "pipeline bubble": (
        "fewer stages or more virtual ones; the published recipes divide layers evenly, and some"
        " do not interleave at all: time that the experts left, or memory that they wanted to spare"
    ),
    "other": "communication inside replicas and between them",
}


_NAMES = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
}


def words(grid: PartialLayout) -> dict[str, str]:
    """A layout by short names, what is 1 left out."""
    found = {short: str(getattr(grid.dims, name)) for name, short in _NAMES.items()}
    if grid.dims.expert_model_parallel_size == 1:
        del found["ETP"]
    found = {name: value for name, value in found.items() if value != "1"}
    found["micro batch"] = str(grid.micro_batch_size)
    found["recompute"] = grid.recompute.label()
    return found


def layout(grid: PartialLayout) -> str:
    """A layout in one cell."""
    return ", ".join(f"{name} {value}" for name, value in words(grid).items())


def differences(theirs: PartialLayout, ours: PartialLayout) -> str:
    """What our plan does differently."""
    left, right = words(theirs), words(ours)
    names = [*_NAMES.values(), "micro batch", "recompute"]
    pairs = ((name, left.get(name, "1"), right.get(name, "1")) for name in names)
    return "; ".join(f"{name} {a} → {b}" for name, a, b in pairs if a != b) or "stages only"


def savings(each: Compared) -> str:
    """The largest terms of the difference, in per cent of the published layout's time."""
    whole = each.published.prediction.iteration_time_s
    shares = {name: 100 * seconds / whole for name, seconds in each.saved.items()}
    largest = sorted(shares.items(), key=lambda item: -abs(item[1]))[:3]
    return ", ".join(f"{name} {-share:+.1f}" for name, share in largest if abs(share) >= 1)


def cause(each: Compared) -> str:
    """The kind of term that our plan saves most of."""
    saved = {KINDS.get(name, "other"): 0.0 for name in each.saved}
    for name, seconds in each.saved.items():
        saved[KINDS.get(name, "other")] += seconds
    return max(saved, key=lambda name: saved[name])


def job_name(row: Row) -> str:
    """A job in one cell."""
    return (
        f"{row['model']}, {row['n_gpus']} {row['gpu']}, sequence {row['seq']}, batch {row['gbs']},"
        f" {row['precision']}, {row['framework']}"
    )


HEAD = """\
# Layouts that experts published, beside our best plans

Written on {today} by `python benchmarks/expert_layouts.py {file} --out docs/expert_layouts.md`.

NVIDIA publishes how it lays out its own pretraining runs. For {jobs} such jobs (sources {sources};
whole models; each model, GPU, GPU count, sequence, batch, number format and framework once) the
published layout was predicted and our search was run under the same assumptions: the same cost
settings, tensor parallelism within a node, the framework's ZeRO stage, any recomputation, the same
memory limit, at most {seconds:g} s.

**{near} of {jobs} published layouts ({share:.0f} %) are within {bar:.0f} % of our best plan.**
Ratio: predicted time of the published layout over that of our best plan; median {median:.3f},
largest {largest:.2f}. {unproven} Our plans may give stages different numbers of layers, which takes
Megatron's `--pipeline-model-parallel-layout` of 2025 and which most of these recipes could not say;
against our best plan that divides layers as they do, **{even} of {jobs} ({even_share:.0f} %) are
within {bar:.0f} %**, median {even_median:.3f}.
"""


def document(
    found: Sequence[Compared], runs: Sequence[Published], file: str, seconds: float
) -> str:
    """The page.

    Args:
        runs: all published runs.
    """
    solved = [each for each in found if each.best is not None]
    ratios = sorted(each.ratio for each in solved)
    near = sum(each.is_near for each in solved)
    short = sum(not each.proven for each in solved)
    lines = [
        HEAD.format(
            today=date.today(),
            file=file,
            jobs=len(found),
            sources=", ".join(SOURCES),
            seconds=seconds,
            near=near,
            share=100 * near / max(1, len(found)),
            bar=100 * NEAR,
            median=statistics.median(ratios),
            largest=ratios[-1],
            even=sum(each.even_ratio <= 1 + NEAR for each in solved),
            even_share=100 * sum(each.even_ratio <= 1 + NEAR for each in solved) / len(found),
            even_median=statistics.median(each.even_ratio for each in solved),
            unproven=f"{short} searches ran out of time, so their best plan may be better still."
            if short
            else "Every search proved its plan to be the best.",
        ),
        *_does_not_fit(found),
        *_by_model(solved),
        *_by_cause([each for each in solved if not each.is_near]),
        *_differing([each for each in solved if not each.is_near]),
        *_changed(runs),
        *_agreeing([each for each in solved if each.is_near]),
    ]
    return "\n".join(lines) + "\n"


def _does_not_fit(found: Sequence[Compared]) -> Iterator[str]:
    tight = [each for each in found if not each.published.prediction.fits]
    nothing = [each for each in found if each.best is None]
    if not tight and not nothing:
        return
    yield "## Published layouts that our model refuses\n"
    yield "They ran, so the memory model is too strict there (or the table leaves something out)."
    yield "Without a plan: a rule of today's Megatron refuses how their layers are carried out.\n"
    yield "| row | job | layout | predicted of allowed |"
    yield "|---|---|---|--:|"
    for each in tight:
        told, row = each.published.prediction, each.published.row
        share = 100 * max(told.stage_memory) / told.capacity_bytes
        yield f"| {row['row_id']} | {job_name(row)} | {layout(told.layout)} | {share:.0f} % |"
    for each in nothing:
        yield f"| {each.published.row['row_id']} | {job_name(each.published.row)} | | no plan |"
    yield ""


def _by_model(solved: Sequence[Compared]) -> Iterator[str]:
    yield "## By model\n"
    yield "| model | jobs | within 5 % | mean ratio | largest |"
    yield "|---|--:|--:|--:|--:|"
    models = dict.fromkeys(each.published.row["model"] for each in solved)
    for model in sorted(models):
        mine = [each for each in solved if each.published.row["model"] == model]
        ratios = [each.ratio for each in mine]
        near = sum(each.is_near for each in mine)
        mean = sum(ratios) / len(ratios)
        yield f"| {model} | {len(mine)} | {near} | {mean:.3f} | {max(ratios):.3f} |"
    yield ""


def _by_cause(far: Sequence[Compared]) -> Iterator[str]:
    yield "## Where our best plan is more than 5 % faster\n"
    yield "By the term that shrinks most:\n"
    yield "| what our plan saves | jobs | at the edge of memory | uneven | meaning |"
    yield "|---|--:|--:|--:|---|"
    counts = Counter(cause(each) for each in far)
    for name, count in counts.most_common():
        mine = [each for each in far if cause(each) == name]
        tight = sum(each.filled > EDGE for each in mine)
        uneven = sum(each.uneven for each in mine)
        yield f"| {name} | {count} | {tight} | {uneven} | {MEANING[name]} |"
    yield ""
    yield f"Edge: our plan fills more than {100 * EDGE:.0f} % of the memory that a plan may fill."
    yield "Uneven: its stages hold different numbers of layers.\n"


def _differing(far: Iterable[Compared]) -> Iterator[str]:
    yield "error: of the published layout's prediction against its measured time. terms: per cent"
    yield "of the published layout's predicted time that our plan saves (-) or adds (+). filled:"
    yield "share of the memory that a plan may fill which ours needs. even: ratio to our best plan"
    yield "that divides layers as the published one.\n"
    yield "| row | job | published | ours differs in | ratio | even | error % | filled % | terms |"
    yield "|---|---|---|---|--:|--:|--:|--:|---|"
    for each in sorted(far, key=lambda each: -each.ratio):
        run = each.published
        error = 100 * (run.prediction.iteration_time_s / run.measured_s - 1)
        assert each.best is not None
        yield (
            f"| {run.row['row_id']} | {job_name(run.row)} | {layout(run.prediction.layout)} |"
            f" {differences(run.prediction.layout, each.best)} | {each.ratio:.3f} |"
            f" {each.even_ratio:.3f} | {error:+.0f} |"
            f" {100 * each.filled:.0f} | {savings(each)} |"
        )
    yield ""


def _changed(runs: Iterable[Published]) -> Iterator[str]:
    yield "## Where the experts changed a layout themselves\n"
    yield "The same job in later releases; what changed between releases besides is in the measured"
    yield "times, and only what the defaults of its target say of it in the predicted ones.\n"
    yield "| row | job | layout | measured s | predicted s |"
    yield "|---|---|---|--:|--:|"
    for layouts in in_other_layouts(runs):
        for run in layouts:
            yield (
                f"| {run.row['row_id']} | {job_name(run.row)} | {layout(run.prediction.layout)} |"
                f" {run.measured_s:.2f} | {run.prediction.iteration_time_s:.2f} |"
            )
    yield ""


def _agreeing(near: Iterable[Compared]) -> Iterator[str]:
    yield "## Within 5 %\n"
    yield "| row | job | published | ratio |"
    yield "|---|---|---|--:|"
    for each in near:
        run = each.published
        grid = layout(run.prediction.layout)
        yield f"| {run.row['row_id']} | {job_name(run.row)} | {grid} | {each.ratio:.3f} |"


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, metavar="THROUGHPUT.CSV")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="write the table here")
    parser.add_argument("--seconds", type=float, default=5.0, help="of search for each job")
    parser.add_argument("--every", type=int, default=1, help="look at every n-th job only")
    options = parser.parse_args()
    every = published_runs(options.file)
    runs = fastest(every)[:: options.every]
    found = []
    for number, run in enumerate(runs, 1):
        each = compared(run, options.seconds)
        found.append(each)
        text = f"{each.ratio:.3f}, even {each.even_ratio:.3f}"
        text += "" if each.proven else " (time ran out)"
        print(f"{number}/{len(runs)} {run.row['row_id']} {job_name(run.row)}: {text}", flush=True)
        if each.best is not None and not each.is_near:
            words = differences(run.prediction.layout, each.best)
            print(f"    {words}: {savings(each)}; {100 * each.filled:.0f} % filled", flush=True)
    text = document(found, every, options.file.name, options.seconds)
    print(text.partition("\n## ")[0])
    if options.out:
        write_text(options.out, text)


if __name__ == "__main__":
    main()
