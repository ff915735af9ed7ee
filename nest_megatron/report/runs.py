"""Runs of planned jobs for people: one beside its prediction, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.errors import error_line, exit_code_of
from nest_megatron.history.records import Outcome, RefusedLaunch, RunRecord
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.report.tables import (
    FittingTable,
    figure_columns,
    heading,
    pairs,
    word_columns,
)
from nest_megatron.report.words import degree_words, narrow_words
from nest_megatron.units import (
    Bytes,
    Seconds,
    counted,
    format_duration,
    format_gib,
    format_range,
    format_seconds,
)

_LONGEST_ERROR = 300
_SHOWN_DEGREES = ("TP", "PP", "VPP", "CP", "DP", "EP")
#: Of a run on a host whose driver names none, whatever it was planned for.
_NO_GPU = "no NVIDIA GPU"


def comparison(run: RunRecord) -> str:
    """One line on what a run measured and what was predicted."""
    measured, predicted = run.measured, run.predicted
    assert measured
    step, where = measured.step_s, ""
    if predicted.low_s is not None and predicted.high_s is not None:
        inside = "inside" if predicted.low_s <= step <= predicted.high_s else "outside"
        known = format_range(predicted.low_s, predicted.high_s)
        narrow = narrow_words(predicted.own_runs)
        where = f", {inside} {known}, where 9 of 10 runs lie{narrow and f', {narrow}'}"
    line = (
        f"measured over watched steps {measured.warm_up + 1} to {len(measured.step_times_s)}: "
        f"{format_seconds(step)} a step (predicted {format_seconds(predicted.step_s)}, "
        f"{_more(step, predicted.step_s)}{where})"
    )
    if not (highest := _highest_memory(run)):
        return line
    rank, peak, expected = highest
    which = f"of rank {rank}" if len(run.hosts) == 1 else f"on rank {rank}, the highest,"
    return (
        f"{line}, peak memory {which} {format_gib(peak)} "
        f"(predicted {format_gib(expected)}, {_more(peak, expected)})"
    )


def _highest_memory(run: RunRecord) -> tuple[int, Bytes, Bytes] | None:
    """The rank with the highest peak, that peak, and the highest that was predicted."""
    measured = run.measured
    known = {r: b for r, b in enumerate(measured.peak_memory_bytes if measured else ()) if b}
    if not known:
        return None
    rank = max(known, key=lambda each: known[each])
    return rank, known[rank], max(run.predicted.peak_memory_bytes)


def _more(measured: float, predicted: float) -> str:
    return f"{100 * (measured - predicted) / predicted:+.1f} %"


def first_line(error: BaseException) -> str:
    """An error in one line, with its kind."""
    if isinstance(error, SystemExit):
        return f"the process ended itself with code {exit_code_of(error)}"
    return error_line(error, _LONGEST_ERROR)


def runs_table(runs: Sequence[RunRecord]) -> RenderableType:
    """Runs, one a row."""
    return FittingTable(
        "Run",
        "Start (UTC)",
        *word_columns("Job", "Layout"),
        *figure_columns("Predicted", "Measured", "Error", "Memory"),
        "Outcome",
        rows=(_row(run) for run in runs),
    )


def _row(run: RunRecord) -> tuple[str, ...]:
    measured, error, memory = run.measured, run.error_percent, _highest_memory(run)
    ranks = run.grid.dims.world_size
    gpus = f"{counted(ranks, 'rank')}, {_NO_GPU}"
    if run.device:
        gpus = f"{ranks} x {run.cluster.accelerator}"
    return (
        run.id,
        _minute(run.start),
        f"{run.job.model}, {gpus}",
        grid_words(run.grid),
        format_seconds(run.predicted.step_s),
        format_seconds(measured.step_s) if measured else "",
        "" if error is None else f"{error:+.1f} %",
        format_gib(memory[1]) if memory else "",
        run.outcome.value.replace("_", " ") + (" (trial)" if run.trial else ""),
    )


def _minute(start: str) -> str:
    return start[:16].replace("T", " ")


def audit_table(runs: Sequence[RunRecord]) -> RenderableType:
    """Launches for operators, one a row: who, which plan, signed with which key, what it took."""
    narrow = narrow_words(1) if any(run.predicted.own_runs == 1 for run in runs) else ""
    table = FittingTable(
        "Run",
        "Start (UTC)",
        "User",
        "Batch job",
        "Plan",
        "Signer",
        *word_columns("Job"),
        *figure_columns("Predicted", "9 of 10 runs", "Measured", "Error", "Memory"),
        "Outcome",
        rows=(_audit_row(run) for run in runs),
    )
    return Group(table, f"* {narrow}.") if narrow else table


def refusals_table(refused: Sequence[RefusedLaunch]) -> RenderableType:
    """Launches that a rule did not allow, one a row."""
    return FittingTable(
        "Launch",
        "Refused (UTC)",
        "User",
        "Batch job",
        "Rule",
        *word_columns("Reason"),
        rows=(
            (each.id, _minute(each.start), each.user, each.batch_job or "", each.rule, each.reason)
            for each in refused
        ),
    )


def refusal_details(refused: RefusedLaunch) -> RenderableType:
    """Everything that is known of a launch that a rule did not allow."""
    return Group(
        Text(f"{refused.id}: {refused.outcome}", style="bold"),
        pairs(
            [
                ("refused", _who(refused)),
                ("launch", f"+nest={refused.mode}, {refused.num_ranks} ranks, {refused.host}"),
                ("plan", refused.plan_file or "none was named"),
                ("rule", refused.rule),
                ("reason", refused.reason),
                ("exit code", str(refused.exit_code)),
            ]
        ),
    )


def outcome_words(run: RunRecord, now: datetime | None = None) -> str:
    """How a run ended; what left no word of it may run, or may have been killed."""
    if run.outcome is not Outcome.STARTED:
        return run.outcome.value.replace("_", " ")
    age_s = since_start_s(run, now)
    if age_s < 0:
        return "no end recorded"
    age = "less than 2 min" if age_s < 120 else format_duration(age_s)
    return f"no end recorded, started {age} ago"


def since_start_s(run: RunRecord, now: datetime | None = None) -> Seconds:
    """Time since a run started; below 0 where the clocks of hosts differ."""
    return ((now or datetime.now(UTC)) - datetime.fromisoformat(run.start)).total_seconds()


def _audit_row(run: RunRecord) -> tuple[str, ...]:
    name, start, job, _, predicted, *others, _ = _row(run)
    low, high = run.predicted.low_s, run.predicted.high_s
    known = "" if low is None or high is None else format_range(low, high)
    known += "*" if known and run.predicted.own_runs == 1 else ""
    signer = (run.launch.signer or "none") if run.launch else ""
    who = (run.user, run.batch_job or "", run.plan, signer)
    return (name, start, *who, job, predicted, known, *others, outcome_words(run))


def grid_words(grid: PartialLayout) -> str:
    """A layout in one line: degrees above one, the micro batch, recomputation, sharding.

    >>> from nest_megatron.layout.dims import ParallelDims
    >>> dims = ParallelDims(tensor_model_parallel_size=2, data_parallel_size=4)
    >>> grid_words(PartialLayout(dims=dims, global_batch_size=8, micro_batch_size=1,
    ...                   sequence_parallel=True))
    'TP2 DP4, micro batch 1'
    """
    sizes = (word.replace(" ", "") for word in degree_words(grid, _SHOWN_DEGREES))
    words = [" ".join(sizes) or "one rank"]
    words.append(f"micro batch {grid.micro_batch_size}")
    if (label := grid.recompute.label()) != "none":
        words.append(f"recompute {label}")
    if grid.zero.is_fsdp:
        words.append("FSDP")
    return ", ".join(words)


def run_details(run: RunRecord) -> RenderableType:
    """Everything that is known of a run."""
    job, cluster, signed = run.job, run.cluster, ""
    if run.launch:
        key = "" if run.launch.signer is None else f", signed with key {run.launch.signer}"
        signed = f" ({run.launch.mode}{key})"
    parts: list[RenderableType] = [
        Text(f"{run.id}: {outcome_words(run)}", style="bold"),
        pairs(
            [
                ("job", f"{job.model}, {job.global_batch_size} sequences of {job.seq_length}"),
                ("precision", job.precision.value),
                ("planned for", f"{cluster.num_gpus} x {cluster.accelerator} ({cluster.name})"),
                ("ran on", run.device or _NO_GPU),
                ("GPUs", run.device or "none: the driver names no GPU on the first host"),
                ("layout", grid_words(run.grid)),
                ("plan", f"{run.plan}{signed}"),
                ("started", _who(run)),
                ("ended", run.end or "not known"),
                ("hosts", ", ".join(dict.fromkeys(run.hosts))),
                ("versions", ", ".join(f"{k} {v}" for k, v in sorted(run.versions.items()))),
            ]
        ),
    ]
    if run.launch and run.launch.changes:
        rows = [
            (each.name, f"{each.before or 'not set'} -> {each.after or 'left out'}")
            for each in run.launch.changes
        ]
        parts += [heading("What the plan rewrote"), pairs(rows)]
    if run.error is not None:
        parts += [heading("What ended it"), Text(run.error)]
    if run.measured:
        parts += [heading("Measured"), Text(comparison(run)), _ranks_table(run)]
        if (uneven := run.measured.expert_imbalance) is not None:
            parts.append(
                Text(f"The busiest expert-parallel rank has {uneven:.2f}x the mean of tokens.")
            )
    if run.warnings:
        parts += [heading("Warnings"), *(Text(f"* {each}") for each in run.warnings)]
    if run.predicted.shares:
        ordered = sorted(run.predicted.shares.items(), key=lambda each: -each[1])
        shares = ((name.replace("_", " "), f"{100 * share:.1f} %") for name, share in ordered)
        parts += [heading("Predicted shares of the step"), pairs(shares)]
    return Group(*parts)


def _who(run: RunRecord | RefusedLaunch) -> str:
    batch = f", job {run.batch_job}" if run.batch_job else ""
    return f"{run.start} by {run.user}{batch}"


def _ranks_table(run: RunRecord) -> RenderableType:
    measured = run.measured
    assert measured
    ranks = zip(run.hosts, measured.busy_s, measured.peak_memory_bytes, strict=False)
    return FittingTable(
        *figure_columns("Rank"),
        "Host",
        *figure_columns("Own passes", "Peak memory"),
        rows=(
            (
                str(rank),
                host,
                "" if busy is None else format_seconds(busy),
                "" if peak is None else format_gib(peak),
            )
            for rank, (host, busy, peak) in enumerate(ranks)
        ),
    )
