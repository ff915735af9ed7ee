"""``plan`` and ``estimate``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nest_megatron.api import Plan, estimate_composed, plan_composed
from nest_megatron.cli.command_kinds import forced
from nest_megatron.cli.progress import progress
from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import Setting, parse, refuse_sweeps, split_launcher
from nest_megatron.cost_model.memory import within_error
from nest_megatron.errors import NOTHING_FITS, OK, UserInputError
from nest_megatron.files import check_output, is_standard_output
from nest_megatron.integrations.megatron_lm.attach import with_launch
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.plain import to_plain
from nest_megatron.planner import PlanRequest
from nest_megatron.planner import plan as find_plan
from nest_megatron.report.console import command_lines, say, show, show_json
from nest_megatron.report.failure import NothingFitsError, SearchEndedError, require_plan
from nest_megatron.report.words import no_plan_verdict
from nest_megatron.units import Seconds


def run_plan(
    *,
    overrides: Sequence[str],
    config_dir: Path | None,
    from_command: str | None,
    free: str,
    megatron_version: str,
    strict: bool,
    run_sweep: Callable[..., int] | None,
    shortlist: bool,
    as_json: bool,
    begun_s: Seconds | None = None,
) -> int:
    """Plan one job, or every job of a sweep, and print the result.

    Args:
        run_sweep: plans the jobs of a sweep; ``None`` where one job is asked for.
        begun_s: when the command began (``time.monotonic``), for ``search.max_seconds``.
    """
    overrides, launcher = split_launcher(overrides)
    settings = parse(overrides, config_dir)
    of_commands, multirun = {"--free": free, "--strict": strict}, run_sweep is not None
    _refuse_options(of_commands, from_command, multirun=multirun, shortlist=shortlist)
    if run_sweep is not None:
        return run_sweep(settings, launcher, config_dir, as_json=as_json)
    _refuse_launcher(launcher)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    check_out(composed)
    if from_command is not None:
        from nest_megatron.integrations.megatron_lm.command_request import read_request

        text = sys.stdin.read() if from_command == "-" else from_command
        names = [name for name in free.split(",") if name.strip()]
        job, request = read_request(text, composed, free=names, version=megatron_version)
        if strict:
            _refuse_unknown(job)
        request = dataclasses.replace(request, begun_s=begun_s, shortlist=shortlist)
        return _plan_command(composed, job, request, as_json=as_json)
    try:
        found = plan_with_progress(composed, begun_s, shortlist=shortlist)
    except (NothingFitsError, SearchEndedError) as error:
        return _refuse(error, as_json=as_json)
    _tell(found, composed, as_json=as_json)
    return OK


def _refuse_options(
    of_commands: Mapping[str, object], from_command: str | None, *, multirun: bool, shortlist: bool
) -> None:
    """Refuse options that do not go together."""
    for option, given in of_commands.items():
        if given and from_command is None:
            raise UserInputError(
                option,
                value=given,
                limit="it goes with --from",
                fix="Add --from with your command.",
            )
    apart = "Leave one of the two out."
    if multirun and shortlist:
        limit = "it tells the plans of one job apart"
        raise UserInputError("--shortlist", value="--multirun", limit=limit, fix=apart)
    if multirun and from_command is not None:
        limit = "a command is planned by itself"
        raise UserInputError("--multirun", value="--from", limit=limit, fix=apart)


def _refuse_launcher(launcher: Sequence[Setting]) -> None:
    for setting in launcher:
        raise UserInputError(
            setting.key,
            value=setting.value,
            limit="a launcher runs the jobs of a sweep, and one job is planned",
            fix="Add --multirun.",
        )


def plan_with_progress(
    composed: Composed, begun_s: Seconds | None = None, *, shortlist: bool = False
) -> Plan:
    """Plan a composed job, and say on a terminal how far the search is.

    Args:
        begun_s: when its ``search.max_seconds`` began; ``None`` is now.
        shortlist: whether to say which plans could be the fastest.

    Raises:
        NestError: as ``api.plan`` does.
    """
    with progress() as report:
        return plan_composed(composed, begun_s=begun_s, shortlist=shortlist, on_progress=report)


def run_estimate(*, overrides: Sequence[str], config_dir: Path | None, as_json: bool) -> int:
    """Price one layout and print the prediction."""
    settings = parse(overrides, config_dir)
    refuse_sweeps(settings)
    composed = compose(settings, config_dir)
    check_out(composed)
    found = estimate_composed(composed)
    _tell(found, composed, as_json=as_json)
    return OK if _may_fit(found.record) else NOTHING_FITS


def _may_fit(plan: ParallelPlan) -> bool:
    """Whether the peak exceeds the limit at most by what such predictions are wrong."""
    predicted = plan.predicted
    return predicted.fits or within_error(predicted.peak_memory_bytes, predicted.capacity_bytes)


def check_out(composed: Composed) -> None:
    """Refuse an ``out`` that must not be written, before the search.

    The command has checked the text that was typed; other settings may complete it.

    Raises:
        UserInputError: as ``check_output`` does.
    """
    out = composed.config.out
    if out is not None:
        check_output("out", Path(out), force=forced())


def _refuse_unknown(job: Job) -> None:
    """Refuse a command with flags that Megatron-LM does not have."""
    assert job.command is not None
    flags = [word for word in job.passthrough if word.startswith("--")]
    if flags:
        raise UserInputError(
            "--from",
            value=" ".join(flags),
            limit=f"Megatron-LM {job.version} has no such flag",
            fix=" ".join(job.command.notes) or "Correct it, or leave --strict out.",
        )


def _plan_command(composed: Composed, job: Job, request: PlanRequest, *, as_json: bool) -> int:
    from nest_megatron.integrations.megatron_lm.typed import kept_flags

    try:
        with progress() as report:
            found = require_plan(find_plan(request, report), request.notes)
    except (NothingFitsError, SearchEndedError) as error:
        return _refuse(error, as_json=as_json)
    if job.restored is not None:
        job.restored.check(found, job.version)
    found = plan_file.made_for(found, MEGATRON_LM, job.version, "plan --from")
    kept = kept_flags(job, request, composed.config)
    found = with_launch(found, job.command, kept=kept, notes=request.notes)
    _write(found, composed)
    if as_json:
        show_json(to_plain(found))
    else:
        _show_command(found, composed, job, request)
    return OK


def without_plan(error: NothingFitsError | SearchEndedError) -> dict[str, Any]:
    """Why there is no plan, for programs."""
    if isinstance(error, SearchEndedError):
        return {"ended_early": to_plain(error.ended)}
    refusal = error.refusal
    said = no_plan_verdict(
        refusal.missing_bytes, refusal.capacity_bytes, refusal.search.not_modelled
    )
    return {"no_plan": {"verdict": said, **to_plain(refusal)}}


def _refuse(error: NothingFitsError | SearchEndedError, *, as_json: bool) -> int:
    from nest_megatron.report.no_plan import ended_report, no_plan_report
    from nest_megatron.report.terminal import notes_report

    if as_json:
        show_json(without_plan(error))
    elif isinstance(error, NothingFitsError):
        show(no_plan_report(error.refusal), notes_report(error.notes))
    else:
        show(ended_report(error.ended), notes_report(error.notes))
    return error.exit_code


def _write(plan: ParallelPlan, composed: Composed) -> None:
    if composed.config.out is not None:
        plan_file.write(plan, Path(composed.config.out))


def _tell(found: Plan, composed: Composed, *, as_json: bool) -> None:
    """Write a plan where the user wants it, and print it."""
    _write(found.record, composed)
    if as_json:
        show_json(found.to_dict())
        return
    for part in found.report():
        show(part)
    if found.notes:
        from nest_megatron.report.terminal import notes_report

        show(notes_report(found.notes))
    _say_where(found.record, composed)


def _say_where(plan: ParallelPlan, composed: Composed) -> None:
    out = composed.config.out
    if out is not None and not is_standard_output(Path(out)):
        shown = "prints the launch command" if plan.launch else "shows it again"
        say(f"Written to {out}; `nest-megatron explain {out}` {shown}.")
    predicted = plan.predicted
    if not predicted.fits:
        from nest_megatron.report.words import memory_verdict

        verdict = memory_verdict(
            predicted.peak_memory_bytes, predicted.capacity_bytes, plan.search.not_modelled
        )
        print(f"{verdict[0].upper()}{verdict[1:]}: peak memory per GPU.", file=sys.stderr)


def _show_command(plan: ParallelPlan, composed: Composed, job: Job, request: PlanRequest) -> None:
    from nest_megatron.integrations.launched import change_rows
    from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, rewritten
    from nest_megatron.integrations.megatron_lm.typed import kept_flags
    from nest_megatron.report.runners_up import shortlist_report
    from nest_megatron.report.terminal import changes_table, notes_report, plan_report

    command = job.command
    assert command is not None
    changes = rewritten(plan, command, kept_flags(job, request, composed.config)).changes
    show(plan_report(plan), "")
    if plan.shortlist is not None:
        show(shortlist_report(plan), "")
    if changes:
        show(
            "Changes to your command\n",
            changes_table(change_rows(changes)),
        )
    else:
        show("Your command is already the plan.")
    say("\nThe command\n")
    launch = plan.launch[LAUNCHER]
    own = {**command.environment}
    unset = [name for name, value in launch.environment.items() if value is None]
    own |= {name: value for name, value in launch.environment.items() if value is not None}
    kept = [(name, value) for name, value in own.items() if name not in unset]
    words = [*command.launcher, *filter(None, [command.script]), *launch.argv]
    say(command_lines(words, kept))
    say()
    notes = [*request.notes, *(f"{name} must not be set." for name in unset)]
    if notes:
        show(notes_report(notes))
    _say_where(plan, composed)
