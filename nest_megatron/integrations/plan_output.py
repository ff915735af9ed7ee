"""Plan files that a launched job names (``nest.out``, ``nest.plan``), and reviewed ones."""

from __future__ import annotations

import dataclasses
import os
import pwd
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.errors import PlanFileError, UserInputError
from nest_megatron.files import check_output, expanded, now, read_bytes
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.layout.rulebook import require_launchable
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION
from nest_megatron.planner.pins import Pin, PinnedPlan, PinnedTable, is_pinned, plan_text
from nest_megatron.planner.plan_table import TableText, is_table
from nest_megatron.printing import one_line
from nest_megatron.version import __version__


def pin_plan(
    path: Path, *, by: str | None = None, note: str = "", release: str | None = None
) -> PinnedPlan | PinnedTable:
    """The contents of a pinned file, of plans that fit and that Megatron launches.

    Args:
        path: a plan file, or a table of plans, each of which is checked.
        by: who has reviewed it; the user's name if not given.
        note: kept in the file.
        release: of Megatron-LM, which alone it may launch; the plan's own if not given.
    """
    text = plan_text(read_bytes(path, "plan"), path)
    if is_pinned(text):
        raise PlanFileError(
            "plan",
            str(path),
            "it is pinned already",
            "Plan again for a new one; `nest-megatron explain` shows who pinned it.",
        )
    if release is not None:
        load_arguments(release)  # refuses a release that is not recorded
    pin = Pin(
        created=now(),
        by=by or user_name(),
        note=note,
        nest_megatron_version=__version__,
        megatron_lm=release,
    )
    if is_table(text):
        table = TableText.of(text, str(path)).table()
        pins = [_reviewed(pin, plan) for _, plan in table.planned()]
        return PinnedTable(pin=pins[0], table=table)
    plan = plan_file.load(text, str(path))
    return PinnedPlan(pin=_reviewed(pin, plan), plan=plan)


def _reviewed(pin: Pin, plan: ParallelPlan) -> Pin:
    """The pin with the release of a plan that may be pinned."""
    release, made = pin.megatron_lm, plan.provenance
    if release is None and made.framework == MEGATRON_LM:
        release = made.framework_version
    if not plan.predicted.fits:
        raise UserInputError(
            "plan",
            plan.predicted.binding_constraint,
            "it is not predicted to fit in memory",
            "Pin a plan that fits.",
        )
    request = launch_request(plan, version=release or DEFAULT_VERSION)
    require_launchable(request, but=("activation_flag",))
    return dataclasses.replace(pin, megatron_lm=release)


def user_name() -> str:
    """Who runs this process, by its account and not by what the environment says."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container without a user database
        return f"uid {os.getuid()}"


def plan_output(named: str | None, inputs: Sequence[str | None] = ()) -> Path | None:
    """The file of ``nest.out``, checked before anything is planned: no input, and writable."""
    if named in (None, "", "null"):
        return None
    out = expanded(Path(str(named).strip("'\"")), "nest.out")
    check_output("nest.out", out, inputs=[Path(each) for each in inputs if each is not None])
    if not os.access(out.absolute().parent, os.W_OK):
        raise UserInputError(
            "nest.out",
            str(out),
            f"{out.parent} cannot be written to",
            "Name a file where you may write.",
        )
    return out


def told_where(path: Path) -> str:
    """What is said of a plan that was written."""
    return f"nest: the full plan is in {path} (`nest-megatron explain` shows it)"


def pinned_file(named: str | None) -> Path:
    """The file of the plan that ``+nest=pinned`` launches, which ``nest.plan`` must name."""
    if named is None:
        raise UserInputError(
            "nest.plan",
            None,
            "+nest=pinned launches a reviewed plan",
            "Name it: nest.plan=FILE (`nest-megatron pin` makes one).",
        )
    return expanded(Path(named), "nest.plan")


def pinned_by(pin: Pin) -> str:
    """What is said of who pinned a plan."""
    return f"Pinned {one_line(pin.created)} by {one_line(pin.by)}."
