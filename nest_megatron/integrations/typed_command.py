"""A command that a user types, of Megatron-LM or of a recipe, as a planning request; its plan."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nest_megatron.cluster.placement import torchrun_words
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import read_cluster, read_spec
from nest_megatron.config.cluster_detection import node_notes
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job, ReadCommand, megatron_version
from nest_megatron.config.request import request_for
from nest_megatron.config.schema import stated_values
from nest_megatron.cost_model.target_defaults import newer_release_notes
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.integrations.dry_run import (
    RecordedLaunch,
    is_script_call,
    names_script,
    script_launch,
    unread_model,
)
from nest_megatron.integrations.launchers import (
    SLURM_VARIABLES,
    LaunchPlace,
    slurm_options,
    without_secret_values,
    without_secrets,
)
from nest_megatron.integrations.megatron_lm.attach import (
    LAUNCHER,
    require_connections,
    with_command,
)
from nest_megatron.integrations.megatron_lm.changed_command import require_model, with_flags
from nest_megatron.integrations.megatron_lm.checkpoint import check_loadable, checkpoint_of_plan
from nest_megatron.integrations.megatron_lm.layout_arguments import Values
from nest_megatron.integrations.megatron_lm.parser import (
    CommandText,
    newest_flags,
    read_command,
    tokens,
)
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.megatron_lm.present_layout import (
    refusal,
    typed_plan,
    with_device_settings,
)
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.search_space import free_parameters, kept_flags
from nest_megatron.integrations.plan_job import TypedCommand, with_origin
from nest_megatron.integrations.restore import restored_by_command
from nest_megatron.integrations.vocabulary import is_assumed
from nest_megatron.layout.diff import Change
from nest_megatron.layout.estimate import BeforeAfter, LayoutChange
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.plan import LaunchCommand, ParallelPlan, launch_size
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.planner import Progress, Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.changes import changes
from nest_megatron.planner.layouts import Variant
from nest_megatron.report.failure import require_plan
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds


def read_request(typed: TypedCommand, composed: Settings) -> tuple[Job, Request]:
    """Read a command; settings on our own command line win over it.

    Raises:
        UserInputError: for a command that cannot be read, or a setting that cannot be kept.
    """
    job, cluster = read_typed(typed, composed)
    job = replace(job, free=typed.free if job.command else free_parameters(typed.free or None))
    if job.command and (restored := restored_by_command(job.values)):
        job = replace(
            job,
            required={**restored.required(), **job.required},
            restored=restored,
            notes=(*job.notes, restored.note()),
        )
    return job, job_request(job, cluster, composed)


def read_typed(typed: TypedCommand, composed: Settings) -> tuple[Job, Cluster]:
    """The job of a command, and where it runs; errors as of ``read_request``."""
    job = _read(typed, composed)
    command = job.command
    flags = [word for word in job.passthrough if word.startswith("--")]  # a recipe has none
    if typed.strict and flags:
        said = [note for note in job.notes if note.endswith("?")]  # Did you mean ...
        raise UserInputError(
            "--from",
            " ".join(flags),
            f"Megatron-LM {job.version} has no such flag",
            " ".join([*said, "Correct it, or leave --strict out."]),
        )
    if "cluster.num_gpus" in composed.given:
        return job, read_cluster(composed)
    assumed = list(job.notes)
    if job.num_gpus is None:
        cluster = read_cluster(composed)
        if not composed.describes_cluster:  # the size of one of the catalogue is an example
            unsaid = command.ranks.unsaid if command else "the recipe does not say it"
            raise UserInputError(
                "cluster.num_gpus",
                None,
                f"how many GPUs the job runs on is not known: {unsaid}",
                "Say cluster.num_gpus=16, or give the launcher's words (torchrun "
                "--nproc-per-node 8 ...).",
            )
        assumed.append(
            f"Nothing says how many ranks there are; cluster {cluster.name} has "
            f"{cluster.num_gpus} GPUs, and all are taken."
        )
        job = replace(job, num_gpus=cluster.num_gpus)
    cluster = read_cluster(composed, job.num_gpus)
    size = (job.num_gpus, job.num_nodes)
    if command:
        size = (command.ranks.num_ranks, command.ranks.num_nodes)
    return replace(job, notes=(*assumed, *node_notes(cluster, *size))), cluster


def read_model(
    text: str | tuple[str, ...] | None, version: str | None, composed: Settings
) -> tuple[TransformerSpec, Values]:
    """The model, and the values of the command's flags.

    Args:
        text: a command that stands for the model; ``None`` where the configuration names it.

    Raises:
        UserInputError: for both or neither, or a command that cannot be read.
    """
    if text is None:
        return read_spec(composed), {}
    job = _read(TypedCommand(text=text, version=version), composed)
    return job.spec, job.values


def _read(typed: TypedCommand, composed: Settings) -> Job:
    """The job of a command, its embedding padded by its own tensor-parallel size; a recipe's."""
    model = composed.model
    if model is not None:
        raise UserInputError(
            "model",
            model.get("name"),
            "with --from the model comes from the command",
            "Leave model out, or change the command.",
        )
    text = typed.text
    what = "--from" if isinstance(text, str) else "command"
    launch = _launch(text, composed)
    place = LaunchPlace(
        environment=launch.environment,
        header=launch.header,
        gpus_per_node=None if composed.cluster is None else read_cluster(composed).host_size,
    )
    if not launch.notes and (recipe := _read_recipe(composed, text, place)) is not None:
        if typed.version not in (None, recipe.version):
            note = (
                f"--megatron-version {typed.version} is not taken: the recipe has {recipe.version}."
            )
            return replace(recipe, notes=(*recipe.notes, note))
        return recipe
    try:
        version, notes = _release_of_tree(launch, composed, typed.version)
        release, flags = megatron_version(composed, version), composed.flags or ""
        command = read_command(launch.words, release, place, flags)
        if not command.argv:
            fix = "Give the whole command in quotes, or - to read it from standard input."
            raise UserInputError(
                what,
                command.script or text,
                "it has no flags, so it says nothing about the model",
                fix if isinstance(text, str) else "Put the flags of the training script behind it.",
            )
        newer = newer_release_notes(f"megatron_lm_{version or ''}")
        notes = (*launch.notes, *notes, *newer, *command.notes)
        command = with_flags(replace(command, notes=notes), composed)
        unread = unread_model([command.script])  # unless the command describes the model
        if unread and not {"num_layers", "hidden_size"} & command.explicit:
            raise UserInputError(
                what,
                command.script,
                unread,
                "Give the flags of Megatron-LM that it comes to, or name a model and its settings.",
            )
        job = read_job(command)
        require_model(job.spec, composed, command)
    except UserInputError as error:
        if not launch.notes:
            raise
        # what its script left out, and what nothing sets
        fix = " ".join((error.fix, *launch.notes))
        raise UserInputError(error.what, error.value, error.limit, fix) from error
    assert job.command
    values = job.command.values
    if is_assumed(values, job.spec.family, job.version):  # Megatron pads what there is
        return job
    return replace(job, spec=job.spec.with_padded_vocab(values["tensor_model_parallel_size"]))


def _read_recipe(composed: Settings, text: CommandText, place: LaunchPlace) -> Job | None:
    """The job of a recipe's command, of which ``--set`` may state the vocabulary alone."""
    from nest_megatron.integrations.recipe_command import read_recipe

    words = " ".join(shlex.split(composed.flags or ""))
    said = re.fullmatch(r"--vocab-size[= ]([1-9]\d{0,8})", words)
    rows = None if said is None else int(said[1])
    job = read_recipe(text, place, assume_harmless=composed.assume_harmless, vocab_size=rows)
    if job is not None and composed.flags is not None and job.spec.vocab_size != rows:
        raise UserInputError(
            "--set",
            composed.flags,
            "of a recipe it sets --vocab-size alone, where the recipe does not say the size",
            "Write the recipe's own fields behind its name.",
        )
    return job


def _release_of_tree(
    launch: RecordedLaunch, composed: Settings, version: str | None
) -> tuple[str | None, tuple[str, ...]]:
    """The release of Megatron-LM whose tree a command's program lies in, and what to say of it.

    Args:
        version: the release that the user names; a target says it, too.
    """
    if version is not None or composed.target is not None:
        return version, ()
    program = next((word for word in launch.words if word.endswith(".py")), "")
    path = Path(launch.folder, program).resolve()
    trees = (parent for parent in path.parents if (parent / _PACKAGE_INFO).is_file())
    if not path.is_file() or (tree := next(trees, None)) is None:
        return None, ()
    lines = read_text(tree / _PACKAGE_INFO, "the release of Megatron-LM")
    numbers = dict(re.findall(r"^(MAJOR|MINOR) = (\d+)$", lines, re.MULTILINE))
    release = ".".join(numbers.get(name, "") for name in ("MAJOR", "MINOR"))
    said = "target= says another"
    try:
        known_release(release)
    except UserInputError:
        return None, (f"{tree} holds Megatron-LM {release}, whose rules are not known; {said}.",)
    return release, (f"Planned for Megatron-LM {release}, which {tree} holds; {said}.",)


#: Where Megatron-LM says its release.
_PACKAGE_INFO = Path("megatron", "core", "package_info.py")


def _launch(text: CommandText, composed: Settings) -> RecordedLaunch:
    """What the script launches that words start, which bash runs; other words, without notes.

    Raises:
        UserInputError: for a text that names a script, and the errors of ``script_launch``.
    """
    words = tokens(text)
    if isinstance(text, str) and names_script(words):
        call = shlex.join(["bash", *words] if "." in words[0] else words)
        raise UserInputError(
            "--from",
            text,
            "it takes one command line, and this names a script",
            f"Put `-- {call}` behind all other words; in Python give a list of its words.",
        )
    if isinstance(text, str) or not is_script_call(words):
        return RecordedLaunch(words=tuple(words), environment=os.environ, header=(), line="")
    return script_launch(words, None if composed.cluster is None else read_cluster(composed))


def kept_command(typed: TypedCommand, composed: Settings) -> TypedCommand:
    """What words come to, which bash runs where they start a script, so that it runs once."""
    launch = _launch(typed.text, composed)
    version, notes = _release_of_tree(launch, composed, typed.version)
    sizes = slurm_options(launch.header).items()
    said = (f"{SLURM_VARIABLES[option][0]}={value}" for option, value in sizes)
    return replace(
        typed,
        text=typed.text if isinstance(typed.text, str) else (*said, *launch.words),
        version=version,
        folder=launch.folder,
        notes=(*launch.notes, *notes),
    )


@frozen
class CommandPlan:
    """The plan of a user's command.

    Args:
        job, request: what was planned.
        changes: of its flags, or of the recipe's fields.
    """

    job: Job
    request: Request
    plan: ParallelPlan
    changes: tuple[Change, ...]


def plan_command(
    typed: TypedCommand,
    composed: Settings,
    *,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
    on_progress: Progress | None = None,
) -> CommandPlan:
    """Plan a command, or the script that launches it; settings win over its flags.

    Args:
        begun_s: when ``search.max_seconds`` began (``time.monotonic``).

    Raises:
        NothingFitsError: if no plan fits in memory.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a command that cannot be read, or a setting that cannot be kept.
    """
    job, request = read_request(typed, composed)
    request = replace(request, begun_s=begun_s, shortlist=shortlist)
    return command_of_plan(
        job, request, composed, require_plan(find_plan(request, on_progress), request.notes)
    )


def command_of_plan(
    job: Job, request: Request, composed: Settings, found: ParallelPlan
) -> CommandPlan:
    """A plan of a command with the command that it becomes, or with the fields of its recipe.

    Raises:
        UserInputError: if Megatron, or the checkpoint that the job restores, would refuse it.
    """
    if job.restored:
        job.restored.check(found, job.version)
    if (command := job.command) is None:
        assert job.changes is not None
        changes = job.changes(found)
        found = with_origin(found, job, "plan --from")
    else:
        found, rewrite = with_command(
            found,
            command,
            made_by="plan --from",
            kept=kept_flags(job, request, composed),
        )
        found = _with_size_note(found, command)
        changes = rewrite.changes
    return CommandPlan(job=job, request=request, plan=found, changes=changes)


def _with_size_note(plan: ParallelPlan, command: ReadCommand) -> ParallelPlan:
    """The plan, with a note where the command's launcher starts another number of ranks."""
    started = command.ranks.num_ranks
    gpus = plan.layout.num_gpus
    if started in (None, gpus):
        return plan
    size = " ".join(torchrun_words(*launch_size(plan)))
    note = f"The launcher as typed starts {started} ranks, and the plan is for {gpus} ({size})."
    return replace(plan, notes=(*plan.notes, note))


def estimate_command(typed: TypedCommand, composed: Settings) -> ParallelPlan:
    """Price a command, or the script that launches it, as it is typed.

    Raises:
        UserInputError: for a command that cannot be read, that Megatron refuses, with its rule, or
            a setting of the layout, which is the command's.
    """
    job, cluster = read_typed(typed, composed)
    for name in sorted(composed.given):
        if name.startswith("parallel."):
            raise UserInputError(
                name,
                stated_values(composed.parallel).get(name.partition(".")[2]),
                "the layout is that of the command",
                "Give its flag with --set.",
            )
    job = replace(job, num_gpus=job.num_gpus or cluster.num_gpus)
    request = request_for(
        with_device_settings(job, cluster), cluster, composed, SearchSpace(), choose_execution=False
    )
    found = with_origin(typed_plan(job, request, composed)[0], job, "estimate --from")
    if command := job.command:
        require_connections(found, command)
        launch = LaunchCommand(
            script=command.script,
            argv=command.argv,
            environment=without_secrets(command.environment),
            launcher=tuple(without_secret_values(command.launcher)),
        )
        found = replace(_with_size_note(found, command), launch={LAUNCHER: launch})
    return found


def before_and_after(found: CommandPlan, composed: Settings) -> BeforeAfter:
    """A command as it is typed next to its plan, both of the same batch and cluster."""
    job, request, plan = found.job, found.request, found.plan
    try:
        before, own = typed_plan(job, request, composed)
    except UserInputError as error:
        return BeforeAfter(before=None, refused=str(error))

    def by_fields(change: LayoutChange) -> LayoutChange:
        """A change of a recipe by its own fields, as far as a choice is one of them."""
        choices = (
            replace(each, name=job.fields.get(each.name, each.name)) for each in change.choices
        )
        return replace(change, choices=tuple(choices))

    after = Variant(settings=request.settings, layout=plan.layout)
    changed = changes(request, own, after, refusal(request, job))
    alone, in_order = (tuple(map(by_fields, each)) for each in (changed.alone, changed.in_order))
    return BeforeAfter(
        before=before.priced(),
        changes=replace(changed, alone=alone, in_order=in_order),
        needs=tuple(_needs(found, before)),
    )


def _needs(found: CommandPlan, before: ParallelPlan) -> Iterator[str]:
    """What the plan needs where the job runs: packages, a release, a checkpoint that it loads."""
    for knob in KNOBS:
        value = getattr(found.plan.layout.execution, knob.name)
        if value != getattr(before.layout.execution, knob.name) and value in knob.needs:
            words = " ".join(value) if isinstance(value, tuple) else value
            yield f"{knob.flag} {words} needs {knob.needs[value].words} where the job runs."
    if command := found.job.command:
        yield from filter(None, [newest_flags(found.plan.launch[LAUNCHER].argv, command.argv)])
    values, version = found.job.values, found.job.version
    name = "a checkpoint of the present layout"
    if not (values.get("save") or values.get("load")):
        return

    def obstacle(values: Values) -> str:
        """Why the plan does not load what a job of the present layout saves."""
        saved = checkpoint_of_plan(before, values, version, name)
        try:
            check_loadable(saved, found.plan.arguments, values, version)
        except UserInputError as error:
            return str(error)
        return ""

    if not (limit := obstacle(values)):
        kind = checkpoint_of_plan(before, values, version, name).format
        limit = f"the plan loads {name} ({kind}) as it is."
    elif not obstacle({**values, "dist_ckpt_optim_fully_reshardable": True}):
        limit += (
            " With --dist-ckpt-optim-fully-reshardable in the present command, the next checkpoint "
            "that it saves is one that the plan loads with its optimizer state."
        )
    yield f"Checkpoint: {limit}"
