"""``nest-megatron explain`` and ``pin``: what is done with a plan file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from nest_megatron.cli.command_kinds import OUTPUT, PATH, command, json_option
from nest_megatron.errors import UserInputError

if TYPE_CHECKING:
    from nest_megatron.api import PlanTable


@command(
    "nest-megatron explain plan.yaml",
    "nest-megatron explain plan.yaml --json",
    "nest-megatron explain plan.yaml --versus parallel.tensor_model_parallel_size=2",
    "nest-megatron explain plan.yaml --why-not tp=8,pp=4",
)
@click.argument("path", type=PATH, metavar="PLAN.YAML")
@click.option("--html", type=OUTPUT, help="Write the report as an HTML page.")
@click.option(
    "--timeline",
    type=OUTPUT,
    help="Write the schedule: a .json trace for Perfetto, or a .png or .svg picture.",
)
@click.option(
    "--versus",
    metavar="LAYOUT",
    help="Compare the plan with a layout of other sizes (tp=8,pp=4 or Megatron's own flags): time "
    "term by term, memory part by part.",
)
@click.option(
    "--why-not",
    metavar="LAYOUT",
    help="Say why the plan does not have these sizes: a rule, memory, or how much slower they are.",
)
@json_option
def explain(
    path: Path,
    *,
    html: Path | None,
    timeline: Path | None,
    versus: str | None,
    why_not: str | None,
    as_json: bool,
) -> None:
    """Explain a plan file: where time and memory go, and why other layouts lose."""
    from nest_megatron.api import load_plan
    from nest_megatron.report.console import show, show_json

    options = {"--html": html, "--timeline": timeline, "--versus": versus, "--why-not": why_not}
    given = {name: value for name, value in options.items() if value is not None}
    if (table := _table(path, given)) is not None:
        show_json(table.to_dict()) if as_json else show(*table.report())
        return
    explained = load_plan(path).explain()
    if versus is not None or why_not is not None:
        if len(given) > 1:
            raise click.UsageError(f"{' and '.join(given)}: give one of them.")
        other = explained.versus(versus) if versus is not None else explained.why_not(str(why_not))
        show_json(other.to_dict()) if as_json else show(*other.report())
        return
    if timeline is not None:
        explained.write_timeline(timeline)
    if html is not None:
        explained.write_html(html)
    if as_json:
        show_json(explained.to_dict())
    else:
        show(*explained.report())


def _table(path: Path, given: Mapping[str, object]) -> PlanTable | None:
    """The table of plans that a file holds, if it is one; no option is about all of them."""
    from nest_megatron.api import PlanTable
    from nest_megatron.integrations.plan_output import pin_note
    from nest_megatron.planner.pins import read_table

    if (found := read_table(path)) is None:
        return None
    for option, value in given.items():
        limit, fix = f"{path} is a table of plans", "Plan for one number of nodes."
        raise UserInputError(option, str(value), limit, fix)
    table, pin = found
    said = () if pin is None else (pin_note(pin),)
    return PlanTable(record=table, notes=said)


@command(
    "nest-megatron pin plan.yaml",
    "nest-megatron pin plan.yaml --out pinned.yaml --by ada --note 'reviewed for run 7'",
    "nest-megatron pin plan.yaml --sign reviewer.key",
)
@click.argument("path", type=PATH, metavar="PLAN.YAML")
@click.option(
    "--out", type=OUTPUT, help="Write the pinned plan here; by default it replaces PLAN.YAML."
)
@click.option("--by", metavar="NAME", help="The reviewer; by default your user name.")
@click.option("--note", metavar="TEXT", default="", help="A remark to keep in the file.")
@click.option(
    "--release",
    "--megatron-version",
    "release",
    metavar="RELEASE",
    help="The Megatron-LM release that the plan may launch on (0.19); by default its own.",
)
@click.option(
    "--sign",
    "key",
    type=PATH,
    metavar="KEY",
    help="Sign with this secret key. A plan that is already pinned is only signed.",
)
@json_option
def pin(
    path: Path,
    *,
    out: Path | None,
    by: str | None,
    note: str,
    release: str | None,
    key: Path | None,
    as_json: bool,
) -> None:
    """Pin a reviewed plan: it launches the job that it was made for, and no other.

    Launch with +nest=pinned nest.plan=FILE. If a byte of the file changes, the launch is refused.
    """
    from nest_megatron.cli.signing import ask_password
    from nest_megatron.errors import UserInputError
    from nest_megatron.files import read_bytes
    from nest_megatron.integrations.plan_output import pin_plan
    from nest_megatron.plain import to_plain
    from nest_megatron.planner.pins import (
        PinnedPlan,
        PinnedTable,
        is_pinned,
        pinned_for,
        plan_text,
        read_pinned,
        write_pinned,
    )
    from nest_megatron.planner.signed import sign_pinned
    from nest_megatron.report.console import say, show_json

    target = out or path
    text = plan_text(read_bytes(path, "plan"), path)
    made_now = key is None or out is not None or not is_pinned(text)
    if not made_now:
        pinned: PinnedPlan | PinnedTable = read_pinned(path)
        for option, given in (("--by", by), ("--note", note), ("--release", release)):
            if given:
                limit = f"{path} is pinned already, by {pinned.pin.by}, and is only signed"
                raise UserInputError(option, given, limit, fix=f"Leave {option} out.")
    else:
        pinned = pin_plan(path, by=by, note=note, release=release)
        write_pinned(pinned, target)
    made = pinned.pin
    signature = None if key is None else sign_pinned(target, key, ask_password)
    if as_json:
        show_json(
            {"pinned": str(target), "signature": signature and str(signature), **to_plain(made)}
        )
        return
    plans = [pinned.plan] if isinstance(pinned, PinnedPlan) else [*pinned.table.plans.values()]
    sizes = " or ".join(plan.cluster.describe() for plan in plans)
    plan = plans[0]
    word = "Pinned to" if made_now else "Signed as it is:"
    say(
        f"{word} {target}: {plan.model.name} on {sizes}, global batch "
        f"{plan.layout.global_batch_size}, {plan.train.precision}, "
        f"{pinned_for(plan, made.megatron_lm)}, nest-megatron {made.nest_megatron_version}."
    )
    if signature is not None:
        say(f"Signed: {signature}. `nest-megatron verify {target} --key PUBLIC.KEY` says by whom.")
    say(f"Launch that job with +nest=pinned nest.plan={target}; any other is refused.")
