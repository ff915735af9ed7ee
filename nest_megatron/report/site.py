"""What a site's calibration says, and what it changes of a plan."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from nest_megatron.cost_model.site import Site, UnseenErrors
from nest_megatron.parallel.objective import SiteChange, Uncertainty
from nest_megatron.report.tables import EdgelessTable, figure_columns, indented, name_columns
from nest_megatron.units import format_range, format_seconds


def site_report(site: Site, unseen: UnseenErrors | None) -> RenderableType:
    """What runs say of each mechanism, and how well they predict jobs that they are not of.

    Args:
        unseen: ``None`` where all runs are of one job.
    """
    known = site.calibration
    title = Text.assemble(
        (known.cluster, "bold"), f", {known.accelerator}, {known.gpus_per_node} GPUs in a node"
    )
    rested = f"Rests on {_number(known.num_runs, 'run')} of {_number(known.num_jobs, 'job')}, from "
    rested += f"{known.runs[0].last[:10]} to {known.runs[-1].last[:10]}."
    if known.unusual:
        left_out = _number(known.unusual, "plan")
        rested += f" {left_out} left out: off by more than 99 in 100 such plans are."
    if known.other_links:
        left_out = _number(known.other_links, "plan")
        rested += f" {left_out} left out: predicted with other figures of links."
    table = EdgelessTable(
        *name_columns("mechanism"), *figure_columns("longer by %", "give or take", "before")
    )
    for each in site.mechanisms():
        table.add_row(
            each.mechanism.replace("_", " "),
            f"{each.price_percent:+.1f}",
            f"{each.deviation_percent:.1f}",
            f"{each.prior_percent:.1f}",
        )
    return Group(title, indented(rested), Text(), indented(_unseen(unseen)), Text(), table)


def _unseen(errors: UnseenErrors | None) -> str:
    if errors is None:
        return "All runs are of one job: how well they predict others cannot be told."
    return (
        f"Each job left out in turn, its plans are predicted {errors.after_percent:.1f} % off in "
        f"the mean by the runs of the others, {errors.before_percent:.1f} % without them."
    )


def site_words(site: SiteChange, known: Uncertainty) -> str:
    """What a site's calibration makes of a plan's step, and what it rests on."""
    runs, jobs = _number(site.runs, "run"), _number(site.jobs, "job")
    said = (
        f"{format_seconds(known.median_s or known.mean_s)} by {site.name}: {runs} of {jobs}, the "
        f"last of {site.last}"
    )
    if site.own_runs:
        said = f"{said}; {_number(site.own_runs, 'plan')} of this very job"
    if site.changed_versions:
        said = f"{said}; less sure since {', '.join(site.changed_versions)} changed"
    return said


#: Changes of a step below this, in per cent, are not told.
_LEAST_TOLD = 0.05


def site_rows(site: SiteChange) -> list[tuple[str, str]]:
    """What a site's calibration says, mechanism by mechanism, and the prediction without it."""
    before = format_range(site.without_low_s, site.without_high_s)
    rows = [
        ("Calibration", f"{site.name} ({site.digest}), runs from {site.first} to {site.last}"),
        ("Without it", f"{format_seconds(site.without_s)}, {before} in 9 of 10 runs"),
    ]
    for each in site.mechanisms:
        if abs(each.step_percent) < _LEAST_TOLD:
            break
        more = "longer" if each.price_percent > 0 else "less"
        said = (
            f"{abs(each.price_percent):.0f} % {more} than predicted, give or take "
            f"{each.deviation_percent:.0f} %: {each.step_percent:+.1f} % of the step"
        )
        rows.append((each.mechanism.replace("_", " "), said))
    return rows


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
