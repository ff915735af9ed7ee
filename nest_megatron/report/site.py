"""What a site's calibration says, and what it changes of a plan."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cost_model.site import Site, UnseenErrors
from nest_megatron.layout.estimate import SiteChange, Uncertainty
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.tables import EdgelessTable, Pair, figure_columns, indented
from nest_megatron.units import (
    GIB,
    counted,
    format_chance,
    format_gib,
    format_range,
    format_seconds,
)


def site_report(site: Site, unseen: UnseenErrors | None) -> RenderableType:
    """What runs say of each mechanism, and how well they predict jobs that they are not of.

    Args:
        unseen: ``None`` where all runs are of one job.
    """
    known, dates = site.calibration, [run.last[:10] for run in site.calibration.by_date]
    title = Text.assemble(
        (known.cluster, "bold"), f", {known.accelerator}, {known.gpus_per_node} GPUs in a node"
    )
    rested = f"Rests on {counted(known.num_runs, 'run')} of {counted(known.num_jobs, 'job')}, from "
    rested += f"{dates[0]} to {dates[-1]}."
    if known.peaks:
        ran_out = sum(peak.ran_out for peak in known.peaks)
        rested += f" Of memory {_peaks(len(known.peaks) - ran_out, ran_out)} say something."
    for left_out, why in (
        (known.unusual, "off by more than 99 in 100 such plans are"),
        (known.other_links, "predicted with other figures of links"),
    ):
        if left_out:
            rested += f" {counted(left_out, 'plan')} left out: {why}."
    table = EdgelessTable("mechanism", *figure_columns("longer by %", "give or take", "before"))
    for each in site.mechanisms():
        table.add_row(
            each.mechanism.replace("_", " "),
            f"{each.price_percent:+.1f}",
            f"{each.deviation_percent:.1f}",
            f"{each.prior_percent:.1f}",
        )
    others = "All runs are of one job: how well they predict others cannot be told."
    if unseen:
        others = (
            f"Each job left out in turn, its plans are predicted {unseen.after_percent:.1f} % off "
            f"in the mean by the runs of the others, {unseen.before_percent:.1f} % without them."
        )
    return Group(title, indented(rested), Text(), indented(others), Text(), table)


def site_words(site: SiteChange, known: Uncertainty) -> str:
    """What a site's calibration makes of a plan's step, and what it rests on."""
    if not site.runs:
        return f"no step was measured; {site.name} has what runs say of memory"
    runs, jobs = counted(site.runs, "run"), counted(site.jobs, "job")
    said = (
        f"{format_seconds(known.median_s or known.mean_s)} by {site.name}: {runs} of {jobs}, the "
        f"last of {site.last}"
    )
    if site.own_runs:
        said = f"{said}; {counted(site.own_runs, 'plan')} of this very job"
    if site.changed_versions:
        said = f"{said}; less sure since {', '.join(site.changed_versions)} changed"
    return said


def memory_rows(plan: ParallelPlan) -> list[Pair]:
    """What a site's runs make of a plan's peak memory, where they say something of it."""
    site, known = plan.provenance.site, plan.uncertainty
    if not site or not site.memory:
        return []
    found, predicted = site.memory, plan.predicted.peak_memory_bytes
    said = (
        f"{format_gib(found.peak_bytes)} ({100 * (found.peak_bytes / predicted - 1):+.1f} %), "
        f"{found.low_bytes / GIB:.1f} to {format_gib(found.high_bytes)} in 9 of 10 runs, by "
        f"{_peaks(found.peaks, found.ran_out)}"
    )
    if found.own:
        said = f"{said}, {found.own:,} of them of this very job"
    before, now = map(format_chance, (found.without_out_of_memory, known.out_of_memory))
    said += f"; chance to run out {now}" + (f", {before} without them" * (before != now))
    return [("Memory here", said)]


def _peaks(peaks: int, ran_out: int) -> str:
    """Runs that say something of memory.

    >>> _peaks(3, 1)
    '3 measured peaks and 1 run out of memory'
    """
    counts = ((peaks, "measured peak", ""), (ran_out, "run", " out of memory"))
    return " and ".join(counted(count, what) + more for count, what, more in counts if count)


#: Parts of the error of a peak (``cost_model.peak_posterior.PARTS``), as they are shown.
_PARTS = {
    "site": "memory of all jobs",
    "static": "weights and states",
    "activations": "activations",
    "working": "working memory",
    "job": "memory of this job",
    "layout": "memory of layouts near it",
}
#: Changes of a step, or of a peak, below this, in per cent, are not told.
_LEAST_TOLD = 0.05


def site_rows(site: SiteChange) -> list[Pair]:
    """What a site's calibration says, mechanism by mechanism, and the prediction without it."""
    before = format_range(site.without_low_s, site.without_high_s)
    rows: list[Pair] = [
        ("Calibration", f"{site.name} ({site.digest}), runs from {site.first} to {site.last}"),
        ("Without it", f"{format_seconds(site.without_s)}, {before} in 9 of 10 runs"),
    ]
    if site.changed_versions:
        names = ", ".join(site.changed_versions)
        rows.append(("Changed since", f"{names}: what its runs say counts for less"))
    for each in site.mechanisms:
        if abs(each.step_percent) < _LEAST_TOLD:
            break
        more = "longer" if each.price_percent > 0 else "less"
        said = (
            f"{abs(each.price_percent):.0f} % {more} than predicted, give or take "
            f"{each.deviation_percent:.0f} %: {each.step_percent:+.1f} % of the step"
        )
        rows.append((each.mechanism.replace("_", " "), said))
    for part in site.memory.parts if site.memory else ():
        if abs(part.peak_percent) < _LEAST_TOLD:
            break
        rows.append((_PARTS[part.part], f"{part.peak_percent:+.1f} % of peak memory by itself"))
    return rows
