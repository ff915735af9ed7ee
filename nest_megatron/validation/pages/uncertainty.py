"""Whether predicted intervals hold, and what choosing by them comes to, source by source unseen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
            _goals(found),
        )
    )


#: Goals for the intervals of all runs as stated, in per cent, and how far a regime may be off.
_GOALS = {"within_50_pct": (45.0, 55.0), "within_90_pct": (85.0, 95.0)}
_REGIME_MARGIN = 10.0


def _goals(found: Mapping[str, Mapping[Basis, Certainty]]) -> str:
    """Which goals hold: all runs within 5 points of the level, regimes within 10."""
    missed = []
    for name, each in found.items():
        covered = each[Basis.AS_STATED].coverage
        for key, (low, high) in _GOALS.items() if covered else ():
            level = (low + high) / 2
            margin = level - low if name == "all" else _REGIME_MARGIN
            share = float(getattr(covered, key))
            if abs(share - level) > margin:
                missed.append(f"{name} ({share:.1f} % in the interval of {level:.0f} %)")
    outcome = f"Missed: {'; '.join(missed)}." if missed else "All are met."
    return (
        "Goals, as stated: all runs within 5 points of the level, each regime within "
        f"{_REGIME_MARGIN:.0f}. {outcome}"
    )


def _cells(found: Mapping[Basis, Certainty]) -> tuple[str, ...]:
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
