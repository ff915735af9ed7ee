"""What a launched job prints and writes of its plan; which reviewed plans a policy lets launch."""

from __future__ import annotations

import os
import pwd
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from nest_megatron.cluster.discovery import LocalGpus, known_gpus
from nest_megatron.cluster.hosts import Host
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster
from nest_megatron.config.cluster_detection import like_gpus, names_cluster
from nest_megatron.config.compose import compose
from nest_megatron.config.job import Job
from nest_megatron.config.launch import MixedGpus, Mode
from nest_megatron.config.overrides import Setting
from nest_megatron.config.policy import identities, may_tune, read_policy
from nest_megatron.cost_model.settings import restored_settings
from nest_megatron.cost_model.target_defaults import MEGATRON_LM as MEGATRON_LM_TARGETS
from nest_megatron.cost_model.target_defaults import target_named
from nest_megatron.errors import PlanFileError, UserInputError, typed_setting
from nest_megatron.files import check_output, expanded, now, read_bytes, read_opened
from nest_megatron.integrations.fields import short_text
from nest_megatron.integrations.megatron_lm.attach import launchable_request
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan, launch_words
from nest_megatron.layout.policy import OnMismatch, PolicyError, PolicyFile, require_allowed
from nest_megatron.planner.pinned_job import ActualJob, require_same_job
from nest_megatron.planner.pins import (
    TUNE,
    Pin,
    PinnedPlan,
    PinnedTable,
    is_pinned,
    parse_pinned,
    pinned_for,
    plan_text,
    read_signers,
    verify_pinned,
)
from nest_megatron.planner.plan_table import TableText, is_table
from nest_megatron.printing import one_line
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.report.console import command_lines
from nest_megatron.report.layout_tables import before_after_report
from nest_megatron.report.terminal import answer_report, changes_table, explain_report, notes_report
from nest_megatron.report.words import early_words
from nest_megatron.units import Seconds, format_seconds
from nest_megatron.version import __version__


def pin_plan(
    path: Path, *, by: str | None, note: str, release: str | None
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
    table = TableText(text, str(path)).table() if is_table(text) else None
    plans = [plan_file.load(text, str(path))] if table is None else [p for _, p in table.planned()]
    if release is None and (made_for := plans[0].provenance).framework == MEGATRON_LM:
        release = made_for.framework_version
    for plan in plans:
        if not plan.predicted.fits:
            raise UserInputError(
                "plan",
                plan.predicted.binding_constraint,
                "it is not predicted to fit in memory",
                "Pin a plan that fits.",
            )
        if not launchable_request(plan, release)[1] and release is not None:
            raise UserInputError(
                "--release", release, "the plan is not for Megatron-LM", "Leave it out."
            )
    pin = Pin(
        created=now(),
        by=(by or "").strip() or user_name(),
        note=note,
        nest_megatron_version=__version__,
        megatron_lm=release,
    )
    return (
        PinnedPlan(pin=pin, plan=plans[0]) if table is None else PinnedTable(pin=pin, table=table)
    )


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


def plan_file_note(path: Path) -> str:
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


def pin_note(pin: Pin) -> str:
    """What is said of who pinned a plan."""
    return f"Pinned {one_line(pin.created)} by {one_line(pin.by)}."


def require_launch(mode: Mode, free: Collection[str] = (), release: str | None = None) -> None:
    """Refuse a launch that a policy forbids, before anything is planned.

    Args:
        free: names that the user frees.
        release: of Megatron-LM, where the job runs on it.

    Raises:
        PolicyError: naming the rule.
    """
    for file in read_policy():
        rules = file.launch
        if rules.may_free is not None:
            allowed = {name for who in identities() for name in rules.may_free.get(who, ())}
            words = f"you may free {', '.join(sorted(allowed)) or 'nothing'}"
            for name in sorted(free):
                if allowed.isdisjoint((name, "all")):
                    raise file.broken("launch.may_free", "nest.free", name, words)
        if mode is Mode.AUTO and rules.pinned_only:
            raise file.broken(
                "launch.pinned_only", "+nest", mode.value, "only pinned plans are launched here"
            )
        if release is not None and rules.megatron_lm and release not in rules.megatron_lm:
            raise file.broken(
                "launch.megatron_lm",
                "Megatron-LM",
                release,
                f"it is {' or '.join(rules.megatron_lm)}",
            )


def allowed_on_mismatch(asked: str | None) -> tuple[OnMismatch, ...]:
    """Values of ``nest.on_mismatch`` that a policy allows, the one that holds for the job first.

    Args:
        asked: the job's own value, if it has one.

    Raises:
        PolicyError: naming the rule that does not allow it, or leaves none.
    """
    left = tuple(OnMismatch)
    for file in read_policy():
        rules = file.launch
        for rule, allowed in (
            ("launch.pinned_only", (OnMismatch.REFUSE,) if rules.pinned_only else ()),
            ("launch.on_mismatch", rules.on_mismatch),
        ):
            words, before = " or ".join(allowed), left
            left = tuple(each for each in allowed or left if each in left)
            if not left:
                raise file.broken(
                    rule,
                    "nest.on_mismatch",
                    words,
                    f"other rules allow {' or '.join(before)} alone",
                )
            if asked is not None and asked not in left:
                raise file.broken(rule, "nest.on_mismatch", asked, f"it is {words}")
    return tuple(sorted(left, key=lambda each: each != asked))


def require_tune(folder: Path) -> None:
    """Refuse to tune where the plans of its runs, which nobody reviews, are not launched.

    Args:
        folder: of the runs.

    Raises:
        PolicyError: naming the rule, and what the operators may write to allow it.
    """
    for file in read_policy():
        if may_tune(file):
            continue
        rules = file.launch
        rule = "pinned_only" if rules.pinned_only else "signers" if rules.signers else None
        if rule is None and not _is_outside(folder.resolve(), file):
            continue
        fix = (
            "--dry-run shows the runs and starts none; the operators of the cluster may allow them "
            f"with launch.may_tune: [{user_name()}] in {file.path}."
        )
        where = file.where(f"launch.{rule or 'plan_folders'}")
        limit = f"its runs launch plans that nobody has reviewed ({where})"
        raise PolicyError("tune", None, limit, fix)


def read_launched(path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """A pinned file that is about to be launched.

    Args:
        num_gpus: as of ``read_pinned``.

    Raises:
        UserInputError: if it is not as it was pinned, or a policy does not let it be launched: a
            ``PolicyError``, or a ``SignatureError`` where a signature is asked for.
    """
    what = typed_setting("plan")
    path = expanded(path, what)
    content, place = read_opened(path, what)  # once: what is judged is what is launched
    found = parse_pinned(content, path, num_gpus)
    policy = read_policy()
    for file in policy:
        if found.pin.by == TUNE and may_tune(file):  # it asks for no signers and folders
            continue
        if _is_outside(place, file):
            raise file.broken(
                "launch.plan_folders",
                what,
                str(path),
                f"plans are launched from {' or '.join(file.launch.plan_folders)}",
            )
        if file.launch.signers:
            signed = verify_pinned(
                path,
                read_signers(file.launch.signers, file.owners),
                num_gpus=num_gpus,
                content=content,
            )
            found = replace(signed.pinned, signer=signed.signer.key_name)
    require_allowed(found.plan, policy)
    return found


def pinned_recipe(
    job: Job,
    path: Path,
    overrides: Sequence[Setting],
    *,
    hosts: Sequence[Host] = (),
    mixed: MixedGpus = MixedGpus.REFUSE,
) -> PinnedPlan:
    """A pinned file, for the job that it was made for and no other.

    What is not known where it is launched from (a login node has no GPUs) is not compared.

    Args:
        overrides: settings, of which those of the cluster count.
        hosts, mixed: as for ``plan_recipe``.
    """
    pinned = read_launched(path, job.num_gpus)
    num_gpus = job.num_gpus or pinned.plan.layout.num_gpus
    of_cluster = [each for each in overrides if each.key.partition(".")[0] == "cluster"]
    found = actual_job(
        pinned,
        job,
        num_gpus=num_gpus,
        cluster=read_cluster(compose(of_cluster), num_gpus) if names_cluster(of_cluster) else None,
        gpus=like_gpus(hosts, known_gpus(), mixed)[0],
        gpus_per_host=job.gpus_per_node,
    )
    require_same_job(pinned, found)
    return pinned


def actual_job(
    pinned: PinnedPlan,
    job: Job,
    *,
    num_gpus: int,
    cluster: Cluster | None,
    gpus: LocalGpus | None,
    gpus_per_host: int | None,
) -> ActualJob:
    """The job that is about to run; a framework with recipes has a megatron-core of its own."""
    tp = pinned.plan.layout.dims.tensor_model_parallel_size
    command = job.command
    return ActualJob(
        spec=job.spec,
        num_gpus=num_gpus,
        cluster=cluster,
        gpus=gpus,
        gpus_per_host=gpus_per_host,
        global_batch_size=job.final_batch_size,
        batch_schedule=job.batch_schedule,
        precision=job.precision,
        tensor_model_parallel_size=command.values["tensor_model_parallel_size"] if command else tp,
        megatron_lm=job.version if command else pinned.pin.megatron_lm,
        memory_flags=job.memory_flags,
    )


def _is_outside(place: Path, file: PolicyFile) -> bool:
    """Whether a place, links followed, is in none of the folders that plans are launched from."""
    folders = [Path(each).resolve() for each in file.launch.plan_folders]
    return bool(folders) and not any(place.is_relative_to(each) for each in folders)


def explanation(
    plan: ParallelPlan,
    times: LayerTimes | None,
    differences: Sequence[Mapping[str, Seconds] | None],
    pin: Pin | None,
) -> Iterator[RenderableType]:
    """The parts of the report; a text is to be shown as it stands.

    Args:
        times: the measured layer times that the plan was made with.
        differences: as for ``explain_report``.
        pin: who froze the plan.
    """
    if said := early_words(plan.search):
        yield f"{said}.\n"
    if plan.today:
        yield before_after_report(plan.today, plan)
        yield f"Today is {plan.provenance.created[:10]}, when the plan was made.\n"
    yield explain_report(plan, differences)
    for name, launch in plan.launch.items():
        yield f"\nLaunch with {name}\n"
        yield command_lines(launch_words(plan, launch), launch.environment.items())
        yield ""
        yield notes_report([*launch.notes, *launch.unset_notes()])
    yield notes_report(plan.notes)
    profile = plan.provenance.profile
    if times is None and profile != ANALYTIC_NAME:
        yield (
            f"\nIts layer times ({profile}) are not in the profile store of this machine; what is "
            "priced again here is priced from data sheets. Import the profile to see its own."
        )
    if not plan.launch:
        named = restored_settings(plan.provenance.settings).target
        target = None if named is None else target_named(named)
        if target is None or target in MEGATRON_LM_TARGETS:
            yield "\nThis plan holds no launch command; plan again with this version to get one."
        elif (
            said := f"The plan is for {target.framework}; docs/nemo.md says how recipes take it."
        ) not in plan.notes:
            yield f"\n{said}"
    if pin:
        said = f" ({one_line(pin.note)})" if pin.note else ""
        yield f"\n{pin_note(pin)[:-1]}{said}, for {pinned_for(plan, pin.megatron_lm)}."


def launched_report(
    plan: ParallelPlan, changes: Iterable[Change], notes: Sequence[str] = (), what: str = "flags"
) -> RenderableType:
    """The plan in a few lines, what it changes in a job's flags or fields, and what was assumed."""
    rows = change_rows(changes)
    if not rows:
        return _report(plan, notes, Text(f"nest: its {what} are already the plan"))
    return _report(
        plan, notes, Text(f"nest: changes to its {what}"), changes_table(rows, plan.model)
    )


def values_report(
    plan: ParallelPlan, rows: Iterable[tuple[str, str, str]], notes: Sequence[str]
) -> Iterator[RenderableType]:
    """The same for an application whose fields ask for the plan, by field, value and reason.

    Fields are lines of text, which no width cuts: a path may be longer than a terminal is wide.
    """
    yield _report(plan, ())
    yield "nest: values of its fields"
    for path, value, why in rows:
        yield f"  {path} = {value}"
        yield Padding(Text(why, "dim"), (0, 0, 0, 6))
    if notes:
        yield notes_report(notes)


def _report(plan: ParallelPlan, notes: Sequence[str], *changes: RenderableType) -> RenderableType:
    noted = [notes_report(notes)] if notes else []
    early = [Text(f"nest: {said}")] if (said := early_words(plan.search)) else []
    answer = Padding(answer_report(plan), (0, 0, 0, 2))
    return Group(*early, Text("nest: this job runs as"), answer, *changes, *noted)


def change_rows(changes: Iterable[Change]) -> list[tuple[str, str | None, str | None, str]]:
    """Changes as ``changes_table`` takes them."""
    rows = []
    for change in changes:
        before, after = (v if v is None else short_text(v) for v in (change.before, change.after))
        rows.append((change.field, before, after, change.reason))
    return rows


def flag_cost_report(planned_s: Seconds, costs: Iterable[tuple[str, Seconds]]) -> RenderableType:
    """What the user's choices cost: the shortest step with all, and with each (last, all) freed."""
    table = Table(box=None, padding=(0, 2))
    for head in ("Freed", "Step", "Kept, it costs"):
        table.add_column(head, justify="left" if head == "Freed" else "right")
    for choice, freed_s in costs:
        cost = 100.0 * (planned_s - freed_s) / freed_s
        table.add_row(
            f"nest.free=[{choice}]",
            format_seconds(freed_s),
            f"{cost:.1f} %" if cost >= 0.05 else "nothing",
        )
    step = format_seconds(planned_s)
    return Group(Text(f"nest: what your flags cost, by predicted steps ({step} with all)"), table)
