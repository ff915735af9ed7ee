"""What a plan says, in sentences; without any terminal."""

from __future__ import annotations

from collections.abc import Mapping

from nest_megatron.parallel.plan import ParallelPlan, SearchRecord
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.units import format_seconds

#: The cost model's terms for people.
TERM_WORDS = {
    "compute": "compute",
    "recompute": "recomputation",
    "tp_communication": "tensor parallel",
    "cp_communication": "context parallel",
    "ep_communication": "expert parallel",
    "pp_communication": "pipeline transfers",
    "pipeline_bubble": "waiting (bubble)",
    "dp_communication": "gradient sync",
    "optimizer": "optimizer step",
    "embedding_sync": "embedding sync",
    "host": "host work",
}


#: Said of every prediction that no measured profile stands behind.
UNMEASURED = "published measurements of other clusters (docs/accuracy.md), no profile of this one"


def certificate(record: SearchRecord) -> str:
    """What the search proved, and how it got there."""
    if record.certificate == "fixed":
        return "Nothing was searched: the layout was given, and priced."
    return f"{_verdict(record)} {_counts(record)}"


def _verdict(record: SearchRecord) -> str:
    if record.certificate == "optimal":
        return "Optimal: no other plan in the searched space is faster under this cost model."
    if record.certificate == "runner-up":
        return f"A runner-up, as asked for: {record.gap_percent:.2f} % slower than the best plan."
    if record.certificate == "gap":
        return (
            f"Time ran out: this plan is proven to be at most {record.gap_percent:.2f} % slower "
            "than the best in the searched space. Raise search.max_seconds to close the gap."
        )
    return "Proven: nothing in the searched space fits."


def _counts(record: SearchRecord) -> str:
    misfits = sum(record.infeasible.values())
    return (
        f"Of {record.candidates:,} candidates {record.bounded:,} were ruled out by a lower bound, "
        f"{misfits:,} do not fit in memory and {record.solved:,} were solved exactly "
        f"({record.stage_nodes:,} partial partitions, {record.simulations:,} simulated schedules), "
        f"in {record.seconds:.2f} s with the {record.backend}."
    )


def basis(plan: ParallelPlan) -> str:
    """What stands behind a plan's times."""
    profile = plan.provenance.profile
    if profile == ANALYTIC_NAME:
        return UNMEASURED
    return f"layer times of {profile}; the rest from published measurements of other clusters"


def term_words(differences: Mapping[str, float], *, most: int = 4) -> str:
    """Where a runner-up spends more and where less, largest first.

    >>> term_words({"compute": 0.0, "pipeline_bubble": 0.25, "tp_communication": -0.1})
    '+250.0 ms waiting (bubble), -100.0 ms tensor parallel'
    """
    largest = sorted(differences.items(), key=lambda item: -abs(item[1]))[:most]
    told = [(name, seconds) for name, seconds in largest if abs(seconds) >= 5e-5]
    words = (
        f"{'+' if seconds > 0 else '-'}{format_seconds(abs(seconds))} {TERM_WORDS.get(name, name)}"
        for name, seconds in told
    )
    return ", ".join(words) or "the same in every term"
