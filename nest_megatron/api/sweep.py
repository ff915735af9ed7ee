"""Jobs of a sweep, planned and gathered in a table; and a job on changed clusters (``whatif``)."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from nest_megatron.api.jobs import (
    LAUNCHER,
    ON_JOB,
    TABLES,
    Result,
    SweepJob,
    code_of,
    command_content,
    estimate_typed,
    is_done,
    launch,
    launcher_of,
    opened,
    read_result,
    sweep_job,
    typed_command,
    write_list,
)
from nest_megatron.api.results import Plan, output_file
from nest_megatron.config.compose import compose
from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.keywords import (
    StrPath,
    path_of,
    require_function,
    setting_texts,
    typed_path,
)
from nest_megatron.config.overrides import Setting, expand, parse, swept, value_text
from nest_megatron.errors import ENDED_EARLY, NestError, UserInputError
from nest_megatron.files import check_output, expanded, write_bytes, write_text
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.packages import install_command
from nest_megatron.plain import frozen
from nest_megatron.planner.layouts import keep_layout
from nest_megatron.planner.pins import read_plan
from nest_megatron.printing import print_to_stderr
from nest_megatron.report.console import print_notes
from nest_megatron.report.plan_rows import PlanRow, sweep_chart, to_csv, to_parquet
from nest_megatron.report.whatif import Variant, Variants
from nest_megatron.units import format_seconds

if TYPE_CHECKING:
    from nest_megatron.integrations.plan_job import RecipeJob


@frozen
class SweepOptions:
    """Where the jobs of a sweep run, and what is kept of them.

    Args:
        launcher: settings of Hydra's launcher; none runs them here, one after another.
        out: the folder, as typed; ``None`` keeps nothing.
        force: whether files there that this program has not written are replaced; ``None`` where
            nobody could say so.
        tell: whether to say on standard error how far they are, on a terminal at each job.
        on_job: called with which job begins, where they run here.
    """

    launcher: Sequence[Setting] = ()
    out: str | None = None
    force: bool | None = None
    tell: bool = True
    on_job: Callable[[str], None] | None = None


@frozen
class Swept:
    """What came of the jobs of a sweep.

    Args:
        done: jobs that have a result, in their order; ``rows`` are theirs.
        files: what was written, the plans apart.
        num_missing: jobs that left no result.
    """

    done: Sequence[tuple[SweepJob, Result]]
    rows: Sequence[PlanRow]
    files: Sequence[str]
    num_missing: int

    def exit_code(self) -> int:
        """The highest of all jobs, as of ``plan``; jobs without a result are an error."""
        if self.num_missing:
            raise NestError(
                f"{self.num_missing} of {self.num_missing + len(self.done)} jobs left no result; "
                "the launcher's own logs say why, and the same command runs them again"
            )
        far_off = any(row.plan.search.may_be_far_off for row in self.rows if row.plan)
        return max(ENDED_EARLY * far_off, *(code_of(result) for _, result in self.done))


def run_jobs(jobs: Sequence[SweepJob], options: SweepOptions) -> Swept:
    """Plan each job that a folder does not hold yet.

    Raises:
        KeyboardInterrupt: if the user interrupts; it says how far the jobs are.
    """
    name = launcher_of(options.launcher)
    if name.startswith(("submitit", "ray")) and not options.out:
        raise UserInputError(
            LAUNCHER,
            name,
            "its jobs may run on other machines, and leave their results in a folder",
            "Add out=FOLDER on a file system that all of them share.",
        )
    with ExitStack() as stack:
        if not options.out:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="nest-megatron-sweep-")))
        else:
            folder = expanded(Path(options.out.strip("'\"")), "out")
        stack.enter_context(opened(folder))
        names = _names(jobs)
        for name in (*names.values(), *TABLES) if options.out else ():
            check_output("out", folder / name, force=options.force or name in TABLES)
        try:
            write_list(folder, jobs, tell=options.tell)
            _run_left(folder, jobs, options)
            results = [(job, read_result(folder, job)) for job in jobs]
            done = [(job, result) for job, result in results if result is not None]
            rows = [sweep_row(at, job.varied, result) for at, (job, result) in enumerate(done)]
            own = [names[job.key] for job, _ in done]
            files = _write(folder, rows, own) if options.out else []
        except KeyboardInterrupt as error:
            number = sum(is_done(folder, job) for job in jobs)
            kept = "the same command goes on from there"
            kept = kept if options.out else "a folder (out) keeps them"
            raise KeyboardInterrupt(f"{number} of {len(jobs)} jobs are done; {kept}") from error
    return Swept(done=done, rows=rows, files=files, num_missing=len(jobs) - len(done))


def _run_left(folder: Path, jobs: Sequence[SweepJob], options: SweepOptions) -> None:
    """Run the jobs of which the folder holds no result."""
    left = [number for number, job in enumerate(jobs) if not is_done(folder, job)]
    if len(left) < len(jobs) and options.tell:
        print_to_stderr(f"{len(jobs) - len(left)} of {len(jobs)} jobs are done.")
    if not left:
        return

    def begun(number: int) -> str:
        words = ", ".join(map(str, jobs[number].varied)) or "unchanged"
        return f"{number + 1} of {len(jobs)}: {words}"

    shows = options.tell and sys.stderr.isatty()
    on_job = options.on_job or (print_to_stderr if shows else None)
    token = ON_JOB.set(on_job and (lambda number: on_job(begun(number))))
    try:
        launch(folder, left, options.launcher)
    finally:
        ON_JOB.reset(token)


def sweep_row(number: int, varied: Sequence[Setting], result: Result) -> PlanRow:
    """The row of a job, by how it ended."""
    row = partial(PlanRow, number=number, settings={s.key: s.value or "" for s in varied})
    ((ending, fields),) = result.items()
    if ending == "plan":
        return row(status="ok", plan=plan_file.from_fields(fields, f"job {number}"))
    if ending == "no_plan":
        most = "" if fields.get("complete", True) else "at most"
        return row(status="does not fit", reason=most, missing_bytes=fields["missing_bytes"])
    if ending == "ended_early":
        bound = format_seconds(fields["lower_bound_s"])
        reason = f"no plan yet, none below {bound}: raise search.max_seconds"
        return row(status="ended early", reason=reason)
    reason = f"{fields['what']} = {fields['value']}: {fields['limit']}"
    return row(status="bad input", reason=reason)


def _write(folder: Path, rows: Sequence[PlanRow], names: Sequence[str]) -> list[str]:
    """Write the table, its chart and each plan; what is missing for one of them is said.

    Args:
        names: the file of each row's plan.
    """
    for name, row in zip(names, rows, strict=True):
        if row.plan:
            plan_file.write(row.plan, folder / name)
    write_text(folder / "sweep.csv", to_csv(rows))
    files = ["sweep.csv"]
    for name, package, made in (
        ("sweep.parquet", "pyarrow", to_parquet),
        ("sweep.svg", "matplotlib", sweep_chart),
    ):
        try:
            importlib.import_module(package)
        except ImportError as error:
            print_to_stderr(f"{name} needs {package}: {install_command('sweep')} ({error}).")
            continue
        write_bytes(folder / name, made(rows))
        files.append(name)
    return [str(folder / name) for name in files]


def _names(jobs: Sequence[SweepJob]) -> dict[str, str]:
    """A file for each job's key, named by what varies: the same one if the sweep grows."""
    slugs = []
    for job in jobs:
        text = ",".join(f"{s.key.rpartition('.')[2]}={s.value}" for s in job.varied) or "plan"
        slugs.append(re.sub(r"[^A-Za-z0-9._=,+-]+", "-", text)[:100])
    return {
        job.key: f"{slug}.yaml" if slugs.count(slug) == 1 else f"{slug}_{job.key}.yaml"
        for job, slug in zip(jobs, slugs, strict=True)
    }


#: What a plan's job is; other settings say how it is planned.
_OF_JOB = ("cluster", "model", "train", "parallel")
#: How long its run is, in either of two ways.
_RUN_LENGTH = ("train.tokens", "train.train_samples")


@frozen
class WhatIf(Variants):
    """A job on changed clusters: the best plan of each, and the present layout there.

    Attributes:
        present: the plan of the file; ``None`` of a command, whose layout is priced as it is typed.
        variants: the job unchanged, then one for each change: its ``row.plan``, its
            ``row.settings``, and ``kept``, the present layout there.
        swept: how the jobs ended, and which files were written.
    """

    swept: Swept

    def write_html(self, path: StrPath, *, force: bool = False) -> None:
        """Write the page of ``to_html``; ``force`` as of ``Plan.save``."""
        write_text(output_file(path, force=force), self.to_html())

    def __repr__(self) -> str:
        return f"<WhatIf of {self._title()}: {len(self.variants) - 1} changes>"


def whatif(
    plan: Plan | StrPath,
    changes: Mapping[str, object],
    *,
    out: StrPath | None = None,
    on_job: Callable[[str], None] | None = None,
) -> WhatIf:
    """Plan the job of a plan file on changed clusters: what ``nest-megatron whatif`` does.

    Args:
        plan: a plan, or the path of its file.
        changes: values by setting, several in a list: every combination is planned. ``gpus`` and
            ``memory`` are short for ``cluster.num_gpus`` and ``cluster.accelerator.memory_bytes``.
        out: a folder that keeps the plans, then with runners-up, and their table; the same call
            goes on from there.
        on_job: called as each row is begun, with which one it is.

    Raises:
        UserInputError: for a wrong setting, or a job that the file does not state.
    """
    if isinstance(plan, Plan):
        with TemporaryDirectory() as folder:
            path = Path(folder) / "plan.yaml"
            plan.save(path)
            return whatif(path, changes, out=out, on_job=on_job)
    changed = parse_changes(_texts(changes))
    return plan_variants(path_of("plan", plan), changed, _quiet(out, on_job))


def whatif_command(
    command: StrPath | Sequence[str],
    changes: Mapping[str, object],
    *,
    cluster: StrPath,
    free: Collection[str] = (),
    megatron_version: str | None = None,
    strict: bool = False,
    out: StrPath | None = None,
    on_job: Callable[[str], None] | None = None,
    **settings: object,
) -> WhatIf:
    """Plan a Megatron-LM command on changed clusters: what ``whatif --from`` does.

    Args:
        command, free, megatron_version, strict: as for ``plan_command``; a script runs once.
        changes, out, on_job: as for ``whatif``; settings with several values are the changes.
        cluster: a name of ``clusters()``, or the path of a YAML file.
        settings: as for ``plan``; they hold for every row.

    Raises:
        UserInputError: for a command that cannot be read, or a wrong setting.
    """
    typed = typed_command(command, free, megatron_version, strict=strict)
    path_of("cluster", cluster)
    texts = _texts(changes, cluster=typed_path(cluster), **settings)
    return command_variants(typed, parse_changes(texts), _quiet(out, on_job))


def _texts(changes: Mapping[str, object], **settings: object) -> list[str]:
    """Settings and changes as typed: lists are several values."""
    if not isinstance(changes, Mapping) or not all(isinstance(key, str) for key in changes):
        limit, fix = "it is no mapping of settings", "Give for example {'gpus': [256, 512]}."
        raise UserInputError("changes", changes, limit, fix)
    several = (list, tuple, range)
    return setting_texts(
        {
            key: ",".join(map(value_text, value)) if isinstance(value, several) else value
            for key, value in {**settings, **changes}.items()
        }
    )


def _quiet(out: StrPath | None, on_job: Callable[[str], None] | None) -> SweepOptions:
    path = None if out is None else str(path_of("out", out))
    require_function("on_job", on_job)
    return SweepOptions(out=path, force=False, tell=False, on_job=on_job)


def parse_changes(texts: Sequence[str]) -> tuple[Setting, ...]:
    """Changes as typed, with their keys in full.

    Raises:
        UserInputError: for one that cannot be read, or that is given twice.
    """
    settings = parse(texts)
    keys = [setting.key for setting in settings]
    for setting in settings:
        if setting.key == "out":
            limit, fix = "whatif writes a folder", "Give it as --out FOLDER."
        elif keys.count(setting.key) > 1:
            limit, fix = "it is given twice", "Give its values in one, with commas between them."
        else:
            continue
        raise UserInputError(setting.key, setting.value, limit, fix)
    return settings


def plan_variants(path: Path, changes: Sequence[Setting], options: SweepOptions) -> WhatIf:
    """Plan each change of the job of a plan file.

    A setting of the job is a change, although it has one value; others hold for every row.
    """
    present, _ = read_plan(path)
    varied = swept(changes)
    keys = [s.key for s in changes if s.key in varied or _is_of_job(s.key)]
    if not any(map(_is_of_job, keys)):
        raise _no_change(
            changes,
            "it names no change of the job",
            "For example cluster.levels.node.bandwidth=900GB/s, memory=141GiB or gpus=256,512.",
        )
    from nest_megatron.integrations.plan_job import recipe_job, settings_of

    base = settings_of(present, path if path.is_absolute() else Path.cwd() / path)
    source_job = recipe_job(present, base)
    jobs = _jobs(base, changes, keys, options, source_job=source_job)
    unchanged, *changed = jobs
    source_job.request(unchanged.composed())
    wrong: list[UserInputError] = []
    for job in changed:
        try:
            source_job.request(job.composed())
        except UserInputError as error:
            wrong.append(error)
        else:
            break
    else:  # none of them can be planned
        raise wrong[0]

    def kept(job: SweepJob) -> ParallelPlan:
        return keep_layout(present, source_job.request(job.composed()))

    return _compared(present, jobs, kept, options)


def command_variants(
    command: TypedCommand, changes: Sequence[Setting], options: SweepOptions
) -> WhatIf:
    """Plan each change of a command's job: settings with several values are the changes.

    Those with one value say where the command runs, and hold for every row.
    """
    keys = swept(changes)
    if "cluster" in keys:
        raise _no_change(
            changes, "a command runs on one cluster today", "Name it, and change its settings."
        )
    if not any(map(_is_of_job, keys)):
        raise _no_change(
            changes,
            "no setting has several values, and those of a command's job that have are changes",
            "For example cluster.levels.node.bandwidth=450GB/s,900GB/s or gpus=256,512.",
        )
    held = [setting for setting in changes if setting.key not in keys]
    from nest_megatron.integrations.typed_command import kept_command

    command = kept_command(command, compose(with_defaults(held)))
    print_notes(command.notes if options.tell else ())
    jobs = _jobs((), changes, keys, options, command)
    command_content(command, jobs[0].composed())  # what cannot be read is so in all

    def typed(job: SweepJob) -> ParallelPlan:
        of_layout = ("parallel.", "train.micro_batch_size")  # which the command says itself
        kept = tuple(each for each in job.settings if not each.key.startswith(of_layout))
        return estimate_typed(command, replace(job, settings=kept).composed()).record

    return _compared(None, jobs, typed, options)


def _no_change(changes: Sequence[Setting], limit: str, fix: str) -> UserInputError:
    return UserInputError("whatif", " ".join(map(str, changes)) or None, limit, fix)


def _is_of_job(key: str) -> bool:
    return key.partition(".")[0] in _OF_JOB and key not in _RUN_LENGTH


def _jobs(
    base: Sequence[Setting],
    changes: Sequence[Setting],
    keys: Collection[str],
    options: SweepOptions,
    command: TypedCommand | None = None,
    source_job: RecipeJob | None = None,
) -> list[SweepJob]:
    """The job unchanged, and one for each combination of the changes.

    The table needs no runners-up: they are for plans that are kept.
    """
    if options.out is None:
        base = _merged([Setting(key="search.num_alternatives", value="0")], base)
    held = [setting for setting in changes if setting.key not in keys]
    each = [_merged(base, held), *(_merged(base, job) for job in expand(changes))]
    compose(with_defaults(each[-1]))  # what is wrong with the keys is wrong in all
    return [
        sweep_job(settings, keys if at else (), command=command, source_job=source_job)
        for at, settings in enumerate(each)
    ]


def _merged(base: Sequence[Setting], given: Sequence[Setting]) -> tuple[Setting, ...]:
    """The settings of a plan's job, with others in the place of its own."""
    keys = {setting.key for setting in given}
    keys |= {*_RUN_LENGTH} if keys.intersection(_RUN_LENGTH) else set()
    return (*(setting for setting in base if setting.key not in keys), *given)


def _compared(
    present: ParallelPlan | None,
    jobs: Sequence[SweepJob],
    kept: Callable[[SweepJob], ParallelPlan],
    options: SweepOptions,
) -> WhatIf:
    """Plan the jobs, and price the present layout in each; what writes a folder comes last."""
    priced: dict[tuple[Setting, ...], tuple[ParallelPlan | None, str]] = {}
    for job in jobs:
        try:
            priced[job.settings] = kept(job), ""
        except UserInputError as error:
            priced[job.settings] = None, f"{error.what} = {error.value}: {error.limit}"
    found = run_jobs(jobs, options)
    variants = []
    for (job, _), row in zip(found.done, found.rows, strict=True):
        plan, refusal = priced[job.settings]
        variants.append(Variant(row=row, kept=plan, refusal=refusal))
    return WhatIf(present=present, variants=tuple(variants), swept=found)
