"""``nest-megatron audit``: what was launched on a cluster, by whom, and what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from nest_megatron.cli.command_kinds import command, json_option
from nest_megatron.cli.history import document, moment_of
from nest_megatron.errors import UserInputError
from nest_megatron.history import store
from nest_megatron.history.records import Outcome, RefusedLaunch, RunRecord
from nest_megatron.plain import to_plain
from nest_megatron.report.console import say, show, show_json
from nest_megatron.report.runs import (
    audit_table,
    refusal_details,
    refusals_table,
    run_details,
    since_start_s,
)
from nest_megatron.report.tables import heading

if TYPE_CHECKING:
    from rich.console import RenderableType


@command(
    "nest-megatron audit audit.jsonl",
    "nest-megatron audit audit.jsonl --user ada --since 7d",
    "nest-megatron audit audit.jsonl --plan 0123abcd --json",
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--user", metavar="NAME", help="Only launches of this user.")
@click.option(
    "--since",
    metavar="TIME",
    help="Only launches since a day (2026-11-23) or a time ago (7d, 12h).",
)
@click.option(
    "--plan", metavar="HASH", help="Only launches of this plan: its checksum or the start of it."
)
@click.option("--run", metavar="ID", help="One launch, with the flags that its plan rewrote.")
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
    moment = None if since is None else moment_of(since)
    named = files or _named_by_policies()
    for path in named:
        if not path.exists():
            limit, fix = "there is no such file", "A launch writes the first line of an audit."
            raise UserInputError("audit", str(path), limit, fix)
    kept, kept_refused = store.read_audit(*named)
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
                "runs": [_document(each) for each in runs],
                "refused": [to_plain(each) for each in refused],
            }
        )
    elif run is not None:
        show(*map(run_details, runs), *map(refusal_details, refused))
    elif runs or refused:
        show(*_tables(runs, refused))
    else:
        known = len(kept) + len(kept_refused)
        say(f"None of the {known} launches in {', '.join(map(str, named))} is such.")


def _document(run: RunRecord) -> dict[str, Any]:
    """A run for programs; of one without an end, for how long none has been recorded."""
    without_end_s = max(0.0, since_start_s(run)) if run.outcome is Outcome.STARTED else None
    return {**document(run), "without_end_s": without_end_s}


def _tables(
    runs: Sequence[RunRecord], refused: Sequence[RefusedLaunch]
) -> Iterator[RenderableType]:
    if runs:
        yield audit_table(runs)
    if refused:
        yield heading("Refused before they began")
        yield refusals_table(refused)


def _named_by_policies() -> Sequence[Path]:
    from nest_megatron.integrations.run_record import audits

    named = [Path(rules.file) for _, rules in audits()]
    if not named:
        limit, fix = "no policy here names an audit", "Name its file."
        raise UserInputError("FILE", None, limit, fix)
    return named
