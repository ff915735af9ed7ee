"""``nest plan``: the recurrence on a job of the catalogue."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse, refuse_sweeps
from nest_megatron.config.space import read_backend
from nest_megatron.errors import NOTHING_FITS, OK
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.pipeline import has_kernel
from nest_megatron.research.nest_dp.plan import described
from nest_megatron.research.nest_dp.search import solve
from nest_megatron.research.nest_dp.settings import research_job, split_research
from nest_megatron.solver.backend import Backend


def run_nest_plan(*, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> int:
    """Find the recurrence's best plan and print it."""
    own, given = split_research(overrides)
    settings = parse(own, config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    job, notes = research_job(composed, given)
    backend = read_backend(composed.config.search.backend)
    compiled = has_kernel() if backend is None else backend is Backend.KERNEL
    started = time.perf_counter()
    found = solve(job, compiled=compiled)
    seconds = time.perf_counter() - started
    if isinstance(found, NoSolution):
        return _tell_none(found, as_json=as_json)
    plan = described(job, found)
    if as_json:
        used = Backend.KERNEL if compiled else Backend.REFERENCE
        show_json(
            {
                **to_plain(plan),
                "search": {"seconds": seconds, "backend": used.value},
                "choices": to_plain(job.choices),
                "notes": notes,
            }
        )
        return OK
    from nest_megatron.report.terminal import notes_report
    from nest_megatron.research.report.recurrence_tables import recurrence_report

    show(recurrence_report(plan))
    say(
        f"\nSearched in {seconds:.2f} s: {plan.num_solved} of {plan.num_cases} pairs of strategy "
        "and replicas solved, the rest ruled out by bounds."
    )
    if notes:
        show(notes_report(notes))
    return OK


def _tell_none(found: NoSolution, *, as_json: bool) -> int:
    if as_json:
        show_json({"no_plan": to_plain(found)})
    else:
        say(f"No plan: {found.reason}.")
    return NOTHING_FITS
