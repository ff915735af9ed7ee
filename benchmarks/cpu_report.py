"""What ``cpu_end_to_end.py`` says of its figures: text, Markdown and JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.cpu_job import WIDTH, Figures, Trial
from benchmarks.cpu_ranks import DISTURBED
from nest_megatron.cost_model.estimate import TERMS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.parameters import unit_parameters
from nest_megatron.planner import describe_grid
from nest_megatron.profile.network import NetworkProfile
from nest_megatron.profile.records import Machine
from nest_megatron.report.tables import figure
from nest_megatron.units import GIB
from nest_megatron.validation.scores import ErrorScores, error_scores, rank_scores
from nest_megatron.version import __version__
from tools.markdown import table

COMMAND = "python benchmarks/cpu_end_to_end.py --out docs/accuracy/cpu_end_to_end.md"

#: Found with timers inside a step, on two cores of an AMD EPYC (Zen 5); for a reader of the page.
LEFT_OUT = """\
## What the prediction leaves out

* The machine's own drift: the speed of a virtual core changes by up to a sixth from minute to
  minute. Timed before all layouts instead of in turns with them, blocks were 11 % too fast.
* Waiting inside tensor-parallel layers: gloo's threads have no core of their own. By itself a call
  of half a megabyte takes 0.2 to 0.5 ms as a rule, but up to one in four takes 4 ms. The profile
  keeps the median; a step with hundreds of calls pays the mean, about 1.3 ms each as timers inside
  the layers found. So tensor parallelism with small micro batches is predicted too low.
* Passes over the gradients: Megatron scales them before an all-reduce, looks for NaN, sums
  their norm and clips them: 20 to 35 ms of a step here, and next to nothing on a GPU's memory.
* Setting gradients to zero and Python's own time in the schedule: about 5 ms of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layout, predicted and run.

    Args:
        spread: how much slower its slowest turn was than the one that counts.
        others_share: of the cores, taken by other processes meanwhile.
    """

    plan: ParallelPlan
    measured_s: float
    spread: float
    others_share: float
    memory_bytes: int
    loss: float

    @property
    def predicted_s(self) -> float:
        """Seconds of a step as predicted."""
        return self.plan.predicted.iteration_time_s

    @property
    def error_pct(self) -> float:
        """Above 0 where the prediction is too large."""
        return 100.0 * (self.predicted_s / self.measured_s - 1.0)

    @property
    def predicted_bytes(self) -> int:
        """Peak memory of the fullest rank as predicted, in this machine's bytes."""
        return WIDTH * self.plan.predicted.peak_memory_bytes


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that was found.

    Args:
        figures, figures_after: of the machine before and after everything else.
        rows: by name of layout.
        choice: name of the planner's.
    """

    trial: Trial
    machine: Machine
    network: NetworkProfile
    figures: Figures
    figures_after: Figures
    optimizer_step_s: float
    rows: Mapping[str, Row]
    choice: str
    started: str
    seconds: float

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """Predicted and measured seconds of each layout."""
        return [(row.predicted_s, row.measured_s) for row in self.rows.values()]

    @property
    def errors(self) -> ErrorScores:
        """Errors over all layouts."""
        return error_scores(self.pairs)

    @property
    def spearman(self) -> float | None:
        """Rank correlation over all layouts."""
        return rank_scores(self.pairs).spearman

    @property
    def regret_pct(self) -> float:
        """How much slower the planner's choice ran than the fastest layout that was run."""
        fastest = min(measured for _, measured in self.pairs)
        return 100.0 * (self.rows[self.choice].measured_s / fastest - 1.0)

    @property
    def drift_pct(self) -> float:
        """Change of the rate of a core's products from before all to after."""
        return 100.0 * (self.figures_after.flops_per_s / self.figures.flops_per_s - 1.0)


def headline(outcome: Outcome) -> str:
    """The one sentence that other pages quote."""
    fastest, slowest = (f(m for _, m in outcome.pairs) for f in (min, max))
    return (
        f"{len(outcome.rows)} layouts of a small GPT on two processor cores, from {fastest:.2f} to "
        f"{slowest:.2f} s a step: error {outcome.errors.mape_pct:.1f} %, rank correlation "
        f"{figure(outcome.spearman, 2)}, regret of the planner's choice {outcome.regret_pct:.1f} %."
    )


_HEAD = (
    "layout",
    "predicted ms",
    "measured ms",
    "error %",
    "turns differ by %",
    "others %",
    "peak MiB",
)


def _cells(outcome: Outcome) -> Iterator[tuple[str, ...]]:
    for name, row in outcome.rows.items():
        what = f"{name} (the planner's choice)" if name == outcome.choice else name
        yield (
            what,
            figure(1e3 * row.predicted_s),
            figure(1e3 * row.measured_s),
            figure(row.error_pct, signed=True),
            figure(100 * row.spread),
            figure(100 * row.others_share),
            figure(row.memory_bytes / (1 << 20), 0),
        )


def describe(row: Row) -> str:
    """A layout in a few words."""
    layout = row.plan.arguments["pipeline_model_parallel_layout"]
    return describe_grid(row.plan.layout) + (f", {layout}" if layout else "")


def as_text(outcome: Outcome) -> str:
    """A table for the terminal, and the scores."""
    cells = [_HEAD, *_cells(outcome)]
    wide = [max(len(row[i]) for row in cells) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            (row[0].ljust(wide[0]), *(c.rjust(w) for c, w in zip(row[1:], wide[1:], strict=True)))
        )
        for row in cells
    ]
    return "\n".join((*lines, "", headline(outcome), *_notes(outcome)))


def _notes(outcome: Outcome) -> Iterator[str]:
    errors, figures = outcome.errors, outcome.figures
    yield (
        f"Median of signed errors {errors.median_signed_pct:+.1f} %, nine of ten below "
        f"{errors.p90_abs_pct:.1f} %."
    )
    yield (
        f"A core: {figures.flops_per_s / 1e9:.0f} GFLOP/s, copies at "
        f"{figures.copy_bytes_per_s / 1e9:.1f} GB/s, {100 * figures.hidden_share:.0f} % of an "
        f"all-reduce hidden beside products, optimizer {1e9 * outcome.optimizer_step_s:.2f} ns a "
        f"parameter. The products' rate changed by {outcome.drift_pct:+.1f} % until the end."
    )
    yield from (f"Network: {note}" for note in (*outcome.network.notes, *outcome.network.fit_notes))
    taken = max(row.others_share for row in outcome.rows.values())
    if taken > DISTURBED:
        yield (
            f"Not to be relied on: other processes took up to {100 * taken:.0f} % of the cores. "
            "Run it again on a quiet machine."
        )


def as_document(outcome: Outcome) -> dict[str, Any]:
    """Plain figures."""
    return {
        "machine": outcome.machine.device_name,
        "started": outcome.started,
        "seconds": outcome.seconds,
        "mape_pct": outcome.errors.mape_pct,
        "median_signed_pct": outcome.errors.median_signed_pct,
        "spearman": outcome.spearman,
        "regret_pct": outcome.regret_pct,
        "choice": outcome.choice,
        "layouts": [
            {
                "name": name,
                "layout": describe(row),
                "times": row.plan.provenance.profile,
                "predicted_s": row.predicted_s,
                "measured_s": row.measured_s,
                "error_pct": row.error_pct,
                "spread": row.spread,
                "others_share": row.others_share,
                "peak_bytes": row.memory_bytes,
                "predicted_bytes": row.predicted_bytes,
                "loss": row.loss,
                "terms": dict(row.plan.predicted.terms),
            }
            for name, row in outcome.rows.items()
        ],
    }


def as_markdown(outcome: Outcome) -> str:
    """The page."""
    sections = (
        _machine_section(outcome),
        table(_HEAD, _cells(outcome), numeric=6),
        "\n".join(_notes(outcome)),
        "## Where the predicted time goes\n\nMilliseconds, on the rank that ends last.",
        _terms_table(outcome),
        LEFT_OUT,
    )
    return "\n\n".join(sections) + "\n"


def _machine_section(outcome: Outcome) -> str:
    trial, machine, spec = outcome.trial, outcome.machine, outcome.trial.spec
    count = sum(each.total for each in unit_parameters(spec, 1, 1, 1, single_stage=True))
    versions = f"torch {machine.torch}, megatron-core {machine.megatron_core}"
    return f"""\
# Predicted and measured steps on two processor cores

**{headline(outcome)}**

Written by `{COMMAND}`; do not edit it.

Two processes with one thread each timed gloo's collectives, then the blocks of the model and whole
layouts in turns, as a core's speed drifts: trained with megatron-core over gloo, in each turn the
median of {trial.steps} steps after {trial.warm_up}, each step as the slower rank had it. Blocks and
layouts had {trial.rounds} turns, of which the quicker counts. From blocks and collectives alone the
cost model predicted each layout, and the planner chose among all that are legal. Nothing is fitted
to the steps.

* Machine: {machine.device_name}, {machine.memory_bytes / GIB:.0f} GiB, two cores in use.
* Versions: nest-megatron {__version__}, {versions}.
* Model: {spec.num_layers} layers, hidden {spec.hidden_size}, {spec.num_attention_heads} heads, \
vocabulary {spec.vocab_size}, {spec.seq_length} tokens, {count / 1e6:.1f} M parameters, float32; \
{trial.global_batch_size} sequences a step.
* Begun {outcome.started}, took {outcome.seconds / 60:.1f} min."""


def _terms_table(outcome: Outcome) -> str:
    rows = outcome.rows
    shown = [t for t in TERMS if any(row.plan.predicted.terms[t] for row in rows.values())]
    head = ("layout", *(term.replace("_", " ") for term in shown))
    cells = (
        (name, *(figure(1e3 * row.plan.predicted.terms[term]) for term in shown))
        for name, row in rows.items()
    )
    return table(head, cells, numeric=len(shown))
