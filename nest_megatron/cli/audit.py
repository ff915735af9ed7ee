"""``nest-megatron audit``: what was launched on a cluster, by whom, and what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from nest_megatron.cli.command_kinds import command, json_option
from nest_megatron.cli.history import document, moment_of
from nest_megatron.errors import UserInputError
from nest_megatron.history import store


@command(
    "nest-megatron audit audit.jsonl",
    "nest-megatron audit audit.jsonl --user ada --since 7d",
    "nest-megatron audit audit.jsonl --plan 0123abcd --json",
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--user", metavar="NAME", help="Launches of this user alone.")
@click.option("--since", metavar="TIME", help="Those since a day (2026-11-23), or 7d or 12h ago.")
@click.option("--plan", metavar="HASH", help="Those of a plan: its checksum, or the start of it.")
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
    """Who launched what, with which plan, and what it took beside its prediction.

    FILEs are audits that a policy names (docs/audit.md), rotated and compressed ones (.gz) too, in
    any order; without one, those that the policies here name.
    """
    from nest_megatron.report.console import say, show, show_json
    from nest_megatron.report.runs import audit_table, run_details

    moment = None if since is None else moment_of(since)
    named = files or _named_by_policies()
    for path in named:
        if not path.exists():
            limit, fix = "there is no such file", "A launch writes the first line of an audit."
            raise UserInputError("audit", value=str(path), limit=limit, fix=fix)
    kept = store.read(*named)
    runs = store.selected(kept, user=user, since=moment, plan=plan)
    if run is not None:
        runs = (store.find(runs, run),)
    if as_json:
        show_json({"files": [*map(str, named)], "runs": [document(each) for each in runs]})
    elif run is not None:
        show(run_details(runs[0]))
    elif runs:
        show(audit_table(runs))
    else:
        say(f"None of the {len(kept)} launches in {', '.join(map(str, named))} is such.")


def _named_by_policies() -> Sequence[Path]:
    from nest_megatron.integrations.audit import audits

    named = [Path(rules.file) for _, rules in audits()]
    if not named:
        limit, fix = "no policy here names an audit", "Name its file."
        raise UserInputError("FILE", value=None, limit=limit, fix=fix)
    return named
