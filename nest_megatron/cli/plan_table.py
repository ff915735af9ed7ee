"""``plan --for-nodes``: a plan for each of several numbers of nodes, in one table."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.api import PlanTable, table_job
from nest_megatron.cli.planning import PlanOptions, composed_settings
from nest_megatron.config.compose import Composed
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import OK, UserInputError
from nest_megatron.integrations.megatron_lm.node_counts import TableJob, plan_for_nodes, sized
from nest_megatron.integrations.typed_command import command_of_plan, read_request
from nest_megatron.report.console import progress, say, show, show_json

_OPTION = "--for-nodes"
#: As many nodes as a job may be asked to be planned for at once.
_MOST = 1000
_RANGE = re.compile(r"(\d{1,7})(?:\.\.(\d{1,7})(?::(\d{1,7}))?)?")


def run_plan_table(options: PlanOptions) -> int:
    """Plan one job for each number of nodes and print the table."""
    settings, launcher = options.settings()
    assert options.for_nodes is not None
    counts = read_counts(options.for_nodes)
    refuse_other_jobs(options, _OPTION)
    _refuse_launcher(launcher)
    composed = sized(composed_settings(settings, options.config_dir), counts)
    with progress() as report:
        job = _job(composed, options)
        made = plan_for_nodes(dataclasses.replace(job, on_progress=report), counts)
    found = PlanTable(record=made, notes=job.request.notes)
    out = composed.config.out
    if out is not None:
        found.save(Path(out), force=True)  # checked before the search
    if options.as_json:
        show_json(found.to_dict())
        return OK
    show(*found.report())
    if out is not None:
        say(f"Written to {out}; `nest-megatron pin {out}` freezes it for +nest=pinned.")
    return OK


def _job(composed: Composed, options: PlanOptions) -> TableJob:
    if options.from_command is None:
        return table_job(composed)
    text, version = options.command(), options.megatron_version
    assert text is not None
    free, strict = options.freed, options.strict
    job, request = read_request(text, composed, free=free, version=version, strict=strict)
    return TableJob(
        request=request,
        version=job.version,
        values=job.values,
        finished=lambda found: command_of_plan(job, request, composed, found).plan,
    )


def read_counts(text: str, option: str = _OPTION, *, doubling: bool = False) -> tuple[int, ...]:
    """Numbers of nodes or GPUs: ``16``, ``120..128`` or ``96..128:8``.

    Args:
        doubling: a range without a step doubles, and does not grow by 1.

    Raises:
        UserInputError: for anything else, a range that is empty, or one of more than 1,000.

    >>> read_counts("12..16:2"), read_counts("64..300", doubling=True)
    ((12, 14, 16), (64, 128, 256))
    """
    of, example = "nodes", "120..128, or 96..128:8"
    if doubling:
        of, example = "GPUs", "64..4096, which doubles, or 64..512:64"

    def wrong(limit: str) -> UserInputError:
        fix = f"Write for example {option} {example}."
        return UserInputError(option, value=text, limit=limit, fix=fix)

    if (found := _RANGE.fullmatch(text.strip())) is None:
        raise wrong(f"it is a number of {of}, or the first and the last of a range")
    first, last, step = (int(part) if part else None for part in found.groups())
    assert first is not None
    if first < 1 or step == 0:
        raise wrong(f"{of}, and the step between two numbers of them, are at least 1")
    if last is not None and last < first:
        raise wrong(f"the range goes up, and {last} is below {first}")
    last = first if last is None else last
    counts: Sequence[int] = range(first, last + 1, step or 1)
    if doubling and step is None:
        counts = [first << power for power in range((last // first).bit_length())]
    if len(counts) > _MOST:
        raise wrong(f"it is {len(counts)} numbers, and at most {_MOST} are planned at once")
    return tuple(counts)


def refuse_other_jobs(options: PlanOptions, option: str) -> None:
    """Refuse options that mean one plan, or other jobs."""
    for name, given in (
        ("--multirun", options.multirun),
        ("--shortlist", options.shortlist),
        ("--for-gpus", options.for_gpus is not None and option != "--for-gpus"),
    ):
        if given:
            limit, fix = "the table is of one job", "Leave one of the two out."
            raise UserInputError(name, value=option, limit=limit, fix=fix)


def _refuse_launcher(launcher: Sequence[Setting]) -> None:
    for setting in launcher:
        limit = "a launcher runs the jobs of a sweep"
        raise UserInputError(setting.key, value=setting.value, limit=limit, fix="Leave it out.")
