"""``nest-megatron audit`` and ``history``: what was launched, by whom, and what became of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.command_kinds import PATH, Group, command, json_option, option
from nest_megatron.errors import UserInputError
from nest_megatron.history import store
from nest_megatron.history.records import Outcome, RefusedLaunch, RunRecord
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json, show_or_json
from nest_megatron.report.runs import (
    audit_table,
    refusal_details,
    refusals_table,
    run_details,
    runs_table,
    since_start_s,
)
from nest_megatron.report.tables import heading

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
@option("--model", "Only runs of this model.", metavar="NAME")
@option("--since", "Only runs since a day (2026-11-23) or a time ago (7d, 12h).", metavar="TIME")
@option("--outcome", "Only runs that ended so.", click.Choice([each.value for each in Outcome]))
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
    if (behind := context.invoked_subcommand) is not None:
        for each in context.command.params:
            if (value := context.params[str(each.name)]) not in (None, False):
                fix = f"Leave it out, or put it behind {behind}."
                raise UserInputError(each.opts[0], value, "it is of the list of runs", fix)
        return
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
    found = store.find(store.read(), run)
    show_or_json(lambda: document(found), lambda: [run_details(found)], as_json=as_json)


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
        raise UserInputError(
            "--since",
            text,
            "it is no day, no moment and no time ago",
            "Give 2026-11-23, 2026-11-23T14:00, 7d or 12h.",
        ) from error


@command(
    "nest-megatron audit audit.jsonl",
    "nest-megatron audit audit.jsonl --user ada --since 7d",
    "nest-megatron audit audit.jsonl --plan 0123abcd --json",
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=PATH)
@option("--user", "Only launches of this user.", metavar="NAME")
@option(
    "--since", "Only launches since a day (2026-11-23) or a time ago (7d, 12h).", metavar="TIME"
)
@option("--plan", "Only launches of this plan: its checksum or the start of it.", metavar="HASH")
@option("--run", "One launch, with the flags that its plan rewrote.", metavar="ID")
@json_option
def audit(
    *,
    files: tuple[Path, ...],
    user: str | None,
    since: str | None,
    plan: str | None,
    run: str | None,
    as_json: bool,
) -> None:
    """List launches: user, job, plan, and measured beside predicted step time.

    Launches that a policy refused come last. FILEs are the audit files of a policy
    (docs/policy.md), also rotated and compressed ones (.gz), in any order. The default is the
    files that the policies of this machine name.
    """
    from nest_megatron.integrations.run_record import audits

    moment = None if since is None else moment_of(since)
    named: Sequence[Path] = files or [Path(rules.file) for _, rules in audits()]
    if not named:
        raise UserInputError("FILE", None, "no policy here names an audit", "Name its file.")
    for path in named:
        if not path.exists():
            raise UserInputError(
                "audit",
                str(path),
                "there is no such file",
                "A launch writes the first line of an audit.",
            )
    try:
        kept, kept_refused = store.read_audit(*named)
    except UserInputError as error:  # which speaks of the history
        raise UserInputError("audit", error.value, error.limit, "Name another file.") from error
    runs = store.selected(kept, user=user, since=moment, plan=plan)
    refused = store.selected(kept_refused, user=user, since=moment) if plan is None else ()
    if run is not None:
        launches: list[RunRecord | RefusedLaunch] = [*runs, *refused]
        found = store.find(launches, run)
        runs = tuple(each for each in runs if each is found)
        refused = tuple(each for each in refused if each is found)
    if as_json:
        show_json(
            {
                "files": [*map(str, named)],
                "runs": [
                    document(each)
                    | {
                        "without_end_s": max(0.0, since_start_s(each))
                        if each.outcome is Outcome.STARTED
                        else None
                    }
                    for each in runs
                ],
                "refused": [to_plain(each) for each in refused],
            }
        )
    elif run is not None:
        show(*map(run_details, runs), *map(refusal_details, refused))
    elif runs or refused:
        if runs:
            show(audit_table(runs))
        if refused:
            show(heading("Refused before they began"), refusals_table(refused))
    else:
        known, where = len(kept) + len(kept_refused), ", ".join(map(str, named))
        none = f"None of the {known} launches in {where} is such."
        say(none if known else f"There is no launch in {where}.")
