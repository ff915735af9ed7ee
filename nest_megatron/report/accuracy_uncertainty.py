"""Whether predicted intervals hold, and what choosing by them comes to, source by source unseen."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.report.markdown import figure, table
from nest_megatron.validation.judging import Certainty
from nest_megatron.validation.outcome import Basis, Judged
from nest_megatron.validation.report import certainty_by_regime

_HEAD = (
    "runs",
    "with a time",
    "in 50 %",
    "in 90 %",
    "as planned: in 50 %",
    "in 90 %",
    "jobs",
    "regret, nominal %",
    "regret, default %",
    "default, all start %",
    "shortlist",
    "holds the fastest %",
    "sure pairs",
    "in order %",
)


def uncertainty_section(unseen: Sequence[Judged]) -> str:
    """Intervals and choices of runs that were predicted without their source; "" without them."""
    found = certainty_by_regime(unseen)
    rows = [(name, *_cells(each)) for name, each in found.items() if each[Basis.AS_STATED].coverage]
    if not rows:
        return ""
    return "\n\n".join(
        (
            "## Intervals and choices",
            "Each run is predicted with constants that were fitted without its source "
            "(`nest-megatron validate FILES --left-out`). **in 50 %, in 90 %**: the share of runs "
            "inside the intervals that are predicted to hold so many. **regret**: of jobs with "
            "several measured layouts, how much slower than the fastest ran the layout with the "
            "shortest predicted step (nominal), the one that the planner takes where nothing is "
            "said (default: the expected step over the chance to start, ties to the simpler), and "
            "the default if it knew that all of them start. All measured layouts did start, so "
            "here the risk of running out of memory can only cost. **shortlist**: mean number of "
            "layouts that hold the fastest with 95 %, and in how many jobs they did. **sure "
            "pairs**: those of which one is predicted to be faster with a chance of 9 in 10, and "
            "how many of them were measured in that order or as fast as each other.",
            table(_HEAD, rows, numeric=len(_HEAD) - 1),
        )
    )


def _cells(found: dict[Basis, Certainty]) -> tuple[str, ...]:
    stated, planned = found[Basis.AS_STATED], found[Basis.AS_PLANNED]
    choice = planned.choice
    return (
        str(stated.coverage.runs) if stated.coverage else "",
        *_inside(stated),
        *_inside(planned),
        str(choice.jobs) if choice else "",
        figure(choice.nominal_regret_pct if choice else None),
        figure(choice.default_regret_pct if choice else None),
        figure(choice.started_regret_pct if choice else None),
        figure(choice.shortlist_size if choice else None),
        figure(choice.shortlist_holds_pct if choice else None, 0),
        str(choice.sure_pairs) if choice else "",
        figure(choice.sure_right_pct if choice else None, 0),
    )


def _inside(each: Certainty) -> tuple[str, str]:
    covered = each.coverage
    return (
        figure(covered.within_50_pct if covered else None, 0),
        figure(covered.within_90_pct if covered else None, 0),
    )
