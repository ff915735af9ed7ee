"""The work of ``tune``."""

from __future__ import annotations

import math
import os
import shlex
import time
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from nest_megatron.cli.planning import CommandOptions, composed_settings
from nest_megatron.config.overrides import parse
from nest_megatron.errors import NOTHING_FITS, OK, UserInputError
from nest_megatron.integrations.plan_output import require_tune
from nest_megatron.integrations.typed_command import kept_command
from nest_megatron.layout import plan_file
from nest_megatron.plain import frozen
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.console import print_notes, progress, say, show, show_json
from nest_megatron.tuning.job import TunedJob, read_tuned
from nest_megatron.tuning.launchers import launcher_named, read_options
from nest_megatron.tuning.report import (
    dry_run_document,
    plan_words,
    runs_table,
    tuned_document,
    tuned_report,
)
from nest_megatron.tuning.selection import Known, NextRun, chosen, expected_runs
from nest_megatron.tuning.session import Session, TuneRequest, new_session, resumed_session
from nest_megatron.tuning.tuner import Tuner, trials_of
from nest_megatron.units import Seconds, format_duration


@frozen
class TuneOptions(CommandOptions):
    """Options of ``tune``.

    Args:
        begun_s: when the command began (``time.monotonic``), for ``search.max_seconds``.
    """

    budget: int
    iterations: int
    run_timeout_minutes: float
    launcher: str
    launcher_options: tuple[str, ...]
    out: Path | None
    resume: Path | None
    dry_run: bool
    begun_s: Seconds | None

    def request(self) -> TuneRequest:
        """What a new tuning is to do.

        Raises:
            UserInputError: without a command.
        """
        if not self.from_command or self.from_command == "-":
            raise UserInputError(
                "--from",
                self.from_command,
                "the command is kept in the folder, so that a tuning can go on",
                "Give it in quotes, or `-- bash train.sh`; --resume FOLDER goes on.",
            )
        read_options(self.launcher, self.launcher_options)
        composed = composed_settings(parse(self.overrides), self.config_dir)
        typed = self.command()
        assert typed is not None
        kept = kept_command(typed, composed)
        if kept.folder and Path(kept.folder) != Path.cwd():
            raise UserInputError(
                "--from",
                None,
                f"its script starts it in {kept.folder}, and a tuning runs it where it begins",
                f"cd {kept.folder}",
            )
        print_notes(kept.notes)
        return TuneRequest(
            command=kept.text if isinstance(kept.text, str) else shlex.join(kept.text),
            overrides=tuple(self.overrides),
            config_dir=None if self.config_dir is None else str(self.config_dir),
            free="" if self.free == "none" else self.free,
            megatron_version=kept.version,
            budget=self.budget,
            iterations=self.iterations,
            run_timeout_s=60.0 * self.run_timeout_minutes,
            launcher=self.launcher,
            launcher_options=self.launcher_options,
            folder=str(Path.cwd()),
        )


def run_tune(options: TuneOptions) -> int:
    """Tune a job, or say what that would take."""
    if options.dry_run:
        return _dry_run(options)
    with _session(options) as session:
        return _tuned(session, options)


def _tuned(session: Session, options: TuneOptions) -> int:
    request = session.request
    job = _read(request, options.begun_s, trials_of(session))
    say_all = print_to_stderr if options.as_json else say  # beside a document
    tuner = Tuner(
        session=session,
        job=job,
        launcher_of=lambda command: launcher_named(
            request.launcher, request.launcher_options, command
        ),
        tell=say_all,
    )
    tuner.settle()
    known = tuner.known()
    left = request.budget - sum(trial.counts for trial in session.trials)
    runs, _ = expected_runs(known, left)
    _require_time(runs, request)
    say_all(plan_words(known, runs, left, request.run_timeout_s))
    folder = session.folder
    say_all(f"Runs are kept in {folder}; --resume {shlex.quote(str(folder))} goes on after a stop.")
    tuned = tuner.run()
    taken = chosen(tuned.known) if tuned.known.steps_s else None
    path = None if taken is None else folder / "plan.yaml"
    if options.as_json:
        show_json(tuned_document(tuned, session.trials, path, folder))
    else:
        show(*tuned_report(tuned, session.trials, path))
    if taken is None or path is None:
        return NOTHING_FITS
    plan_file.write(job.plan(taken), path)
    return OK


def _read(
    request: TuneRequest, begun_s: Seconds | None, trials: Collection[str] = frozenset()
) -> TunedJob:
    if request.folder != str(Path.cwd()):
        raise UserInputError(
            "--resume",
            None,
            f"it was begun in {request.folder}, and names in its command are relative to that",
            f"cd {request.folder}",
        )
    folder = None if request.config_dir is None else Path(request.config_dir)
    composed = composed_settings(parse(request.overrides), folder)
    with progress() as report:
        return read_tuned(request, composed, begun_s, report, trials)


def _require_time(runs: Sequence[NextRun], request: TuneRequest) -> None:
    """Refuse runs that are expected to be ended before they have measured anything."""
    longest = max((run.seconds for run in runs), default=0.0)
    if longest > request.run_timeout_s:
        minutes = math.ceil(1.5 * longest / 60)
        raise UserInputError(
            "--run-timeout",
            f"{request.run_timeout_s / 60:g}min",
            f"a run is expected to take {format_duration(longest)}",
            f"Begin a tuning with --run-timeout {minutes}min, or fewer steps than --iterations "
            f"{request.iterations}.",
        )


def _dry_run(options: TuneOptions) -> int:
    request = options.request()
    job = _read(request, options.begun_s)
    known = Known(ranked=job.ranked, iterations=request.iterations, num_steps=job.num_steps)
    runs, stop = expected_runs(known, request.budget)
    _require_time(runs, request)
    said = plan_words(known, runs, request.budget, request.run_timeout_s)
    if options.as_json:
        show_json(dry_run_document(known, runs, stop))
        return OK
    head = "The runs, if each measures what is predicted of it"
    show(head, runs_table(runs), f"They end because {stop}.", "", said)
    return OK


def _session(options: TuneOptions) -> AbstractContextManager[Session]:
    """The folder of the runs: a new one, or one that is gone on with."""
    if options.resume is not None:
        require_tune(options.resume.absolute())
        return resumed_session(options.resume.absolute())
    folder = options.out or Path(f"nest-tune-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    request = options.request()
    require_tune(folder.absolute())
    return new_session(folder.absolute(), request)
