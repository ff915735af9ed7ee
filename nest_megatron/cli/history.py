"""``nest-megatron history``: runs of planned jobs, beside what was predicted of them."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any

import click

from nest_megatron.cli.command_kinds import Group, json_option
from nest_megatron.errors import UserInputError
from nest_megatron.history import store
from nest_megatron.history.records import Outcome, RunRecord
from nest_megatron.plain import to_plain

#: What fills a history.
_FILL = (
    "A job that is launched with +nest=auto or +nest=pinned adds itself (docs/history.md); "
    f"{store.VARIABLE} names another file."
)
_AGO = re.compile(r"(\d+)([dh])")


@click.group(
    cls=Group,
    invoke_without_command=True,
    examples=(
        "nest-megatron history",
        "nest-megatron history --model llama3_8b --since 7d",
        "nest-megatron history --json",
        "nest-megatron history show 0123abcd",
    ),
)
@click.option("--model", metavar="NAME", help="Only runs of this model.")
@click.option(
    "--since", metavar="TIME", help="Only runs since a day (2026-11-23) or a time ago (7d, 12h)."
)
@click.option(
    "--outcome",
    type=click.Choice([each.value for each in Outcome]),
    help="Only runs that ended so.",
)
@json_option
@click.pass_context
def history(
    context: click.Context,
    *,
    model: str | None,
    since: str | None,
    outcome: str | None,
    as_json: bool,
) -> None:
    """List runs of planned jobs: predicted and measured step time, and how each run ended.

    They are kept in your data folder, or in the file that NEST_MEGATRON_HISTORY names.
    """
    if context.invoked_subcommand is not None:
        return
    from nest_megatron.report.console import say, show, show_json
    from nest_megatron.report.runs import runs_table

    kept = store.read()
    moment = None if since is None else moment_of(since)
    wanted = None if outcome is None else Outcome(outcome)
    runs = store.selected(kept, model=model, since=moment, outcome=wanted)
    if as_json:
        show_json({"file": str(store.history_file()), "runs": [document(run) for run in runs]})
    elif runs:
        show(runs_table(runs))
    elif kept:
        say(f"None of the {len(kept)} runs in {store.history_file()} is such.")
    else:
        say(f"There is no run in {store.history_file()}. {_FILL}")


@history.subcommand("show", "nest-megatron history show 0123abcd --json")
@click.argument("run", metavar="RUN")
@json_option
def show_run(run: str, *, as_json: bool) -> None:
    """Show one run (its id or the start of it): prediction, ranks, warnings, how it ended."""
    from nest_megatron.report.console import show, show_json
    from nest_megatron.report.runs import run_details

    found = store.find(store.read(), run)
    if as_json:
        show_json(document(found))
    else:
        show(run_details(found))


def document(run: RunRecord) -> dict[str, Any]:
    """A run for programs, with what follows from its figures."""
    measured = run.measured
    derived = {} if measured is None else {"step_s": measured.step_s, "spread": measured.spread}
    return {**to_plain(run), **derived, "error_percent": run.error_percent}


def moment_of(text: str, now: datetime | None = None) -> datetime:
    """A moment that a user names; without a zone it is local time.

    >>> moment_of("2d", datetime(2026, 11, 23, tzinfo=UTC)).isoformat()
    '2026-11-21T00:00:00+00:00'
    """
    if found := _AGO.fullmatch(text):
        unit = {"d": "days", "h": "hours"}[found[2]]
        try:
            return (now or datetime.now(UTC)) - timedelta(**{unit: int(found[1])})
        except OverflowError:
            return datetime.min.replace(tzinfo=UTC)
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError) as error:
        limit = "it is no day, no moment and no time ago"
        fix = "Give 2026-11-23, 2026-11-23T14:00, 7d or 12h."
        raise UserInputError("--since", text, limit, fix) from error
