"""The Python API: what notebooks and scripts use, and the command line with them.

Its names are those of ``nest_megatron``, which loads them when they are first used. Settings,
results and errors are those of the command line; ``docs/api.md`` is made of the docstrings.
"""

from __future__ import annotations

import dataclasses
import html
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.buildable import buildable_space, require_buildable
from nest_megatron.config.compose import Composed
from nest_megatron.config.keywords import Source, cluster_entry, compose_keywords, model_entry
from nest_megatron.config.layout import estimate_layout
from nest_megatron.config.request import request_of
from nest_megatron.config.target import read_target
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, write_text
from nest_megatron.integrations.fields import ABSENT, find
from nest_megatron.integrations.megatron_lm import planning
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, launch_request, with_launch
from nest_megatron.integrations.megatron_lm.node_counts import TableJob, plan_for_nodes, sized
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.batch_schedule import TrainChoice
from nest_megatron.parallel.diff import Change
from nest_megatron.parallel.plan import (
    Alternative,
    ParallelChoice,
    ParallelPlan,
    Placement,
    Prediction,
    SearchRecord,
)
from nest_megatron.plain import to_plain
from nest_megatron.planner import Progress
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner import plan_table as planner_table
from nest_megatron.planner.pins import Pin, read_plan
from nest_megatron.report.catalogue import Catalogue
from nest_megatron.report.console import Shown
from nest_megatron.report.failure import require_plan
from nest_megatron.units import Seconds, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nest_megatron.profile.lookup import LayerTimes


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Plan(Shown):
    """A layout of a training job with its prediction.

    A notebook shows it as the tables that ``nest-megatron plan`` prints, and so does ``print``.

    Attributes:
        record: the whole plan, field by field as in its file.
        notes: what was assumed, one sentence each.
        pin: who froze it, where it was read from a pinned file.
    """

    record: ParallelPlan
    notes: tuple[str, ...] = ()
    pin: Pin | None = None

    @property
    def model(self) -> TransformerSpec:
        """The model that was planned."""
        return self.record.model

    @property
    def cluster(self) -> Cluster:
        """The cluster at the job's size."""
        return self.record.cluster

    @property
    def train(self) -> TrainChoice:
        """The batch and the number format."""
        return self.record.train

    @property
    def parallel(self) -> ParallelChoice:
        """Degrees, stage layout, recomputation and sharding, by Megatron's names."""
        return self.record.parallel

    @property
    def placement(self) -> Placement:
        """The rank order, and where groups of ranks lie."""
        return self.record.placement

    @property
    def predicted(self) -> Prediction:
        """The predicted step by term, and the memory of each pipeline rank."""
        return self.record.predicted

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """The runners-up."""
        return self.record.alternatives

    @property
    def search(self) -> SearchRecord:
        """What the search looked at, and what it proved."""
        return self.record.search

    def explain(self) -> Explanation:
        """Why the plan is what it is: what ``nest-megatron explain`` prints.

        >>> explained = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").explain()
        >>> print(str(explained).splitlines()[0])
        mixtral_8x7b on 64 x H100-SXM-80GB (79.1 GiB), dgx_h100
        """
        from nest_megatron.profile.choose import times_of

        return Explanation(plan=self, times=times_of(self.record.provenance.profile, self.model))

    def to_megatron_args(self, *, layout_only: bool = False) -> list[str]:
        """The plan as flags of Megatron-LM's ``pretrain_gpt.py``.

        Args:
            layout_only: leave out the flags that describe the model.

        Returns:
            Words for a command line. Variables of the environment that go with them are in
            ``plan.record.launch["megatron_lm"].environment``.

        Raises:
            UserInputError: for a plan of another framework, whose recipe takes it by ``apply``.

        >>> args = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").to_megatron_args()
        >>> args[args.index("--num-experts") + 1]
        '8'
        """
        launch = self.record.launch.get(LAUNCHER)
        if launch is None:
            framework = self.record.provenance.framework
            limit = "the plan holds no command of Megatron-LM"
            fix = "Plan for target=megatron_lm_0.16.1, or give the recipe to Plan.apply."
            raise UserInputError("plan", value=framework, limit=limit, fix=fix)
        return parallel_argv(launch_request(self.record)) if layout_only else list(launch.argv)

    def apply(self, recipe: Any) -> tuple[Change, ...]:
        """Write the plan into a recipe of NeMo or a configuration of Megatron-Bridge, in place.

        Args:
            recipe: what ``llm.recipes.NAME.pretrain_recipe()`` of NeMo or a recipe of
                Megatron-Bridge returns.

        Returns:
            Every field that has another value now, with the reason.

        Raises:
            UserInputError: for anything else, or a recipe that is not the planned job: another
                model, batch or number of GPUs. Nothing is changed then.
        """
        if find(recipe, "trainer.strategy") not in (ABSENT, None):
            from nest_megatron.integrations import nemo

            return nemo.apply_plan(recipe, self.record)
        if all(find(recipe, part) not in (ABSENT, None) for part in ("model", "ddp", "dist")):
            from nest_megatron.integrations import megatron_bridge

            return megatron_bridge.apply_plan(recipe, self.record)
        limit = "it is neither a recipe of NeMo nor a ConfigContainer of Megatron-Bridge"
        fix = "Give what pretrain_recipe() returns; Plan.to_megatron_args is for Megatron-LM."
        raise UserInputError("recipe", value=type(recipe).__name__, limit=limit, fix=fix)

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the plan file that ``load_plan`` and ``nest-megatron pin`` read.

        Args:
            path: the file; ``-`` is standard output.
            force: replace a file that nest-megatron has not written, which is refused otherwise.
        """
        check_output("path", Path(path), force=force)
        plan_file.write(self.record, Path(path))

    def to_dict(self) -> dict[str, Any]:
        """The plan as numbers, text, lists and dicts: what ``--json`` prints."""
        fields: dict[str, Any] = to_plain(self.record)
        return fields

    def report(self, *more: RenderableType) -> Iterator[RenderableType]:
        """The tables that ``nest-megatron plan`` prints, and more before its notes."""
        from nest_megatron.report.runners_up import shortlist_report
        from nest_megatron.report.terminal import notes_report, plan_report

        yield from (plan_report(self.record), "")
        if self.record.shortlist is not None:
            yield from (shortlist_report(self.record), "")
        yield from (*more, notes_report(self.notes))

    def __repr__(self) -> str:
        from nest_megatron.report.words import degrees

        sizes, step_s = degrees(self.parallel), self.predicted.iteration_time_s
        names = [name for name in ("TP", "PP", "VPP", "CP", "EP", "DP") if sizes[name] > 1]
        words = [f"{name} {sizes[name]}" for name in names] or ["one rank"]
        job = f"{self.model.name} on {self.cluster.describe()}"
        batch = f"batch {self.train.global_batch_size}"
        return f"<Plan of {job}: {' '.join(words)}, {batch}, {format_seconds(step_s)} a step>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanTable(Shown):
    """Plans of one job, one for each number of nodes that has any.

    Attributes:
        record: the whole table, as in its file.
        notes: what was assumed, one sentence each.
    """

    record: planner_table.PlanTable
    notes: tuple[str, ...] = ()

    def plans(self) -> dict[int, Plan]:
        """The plans by number of nodes."""
        found = self.record.planned()
        return {entry.num_nodes: Plan(record=each, notes=self.notes) for entry, each in found}

    def save(self, path: str | os.PathLike[str], *, force: bool = False) -> None:
        """Write the file that ``nest-megatron pin`` freezes; arguments as of ``Plan.save``."""
        check_output("path", Path(path), force=force)
        write_text(Path(path), planner_table.dump(self.record))

    def to_dict(self) -> dict[str, Any]:
        """The table as numbers, text, lists and dicts: what ``--json`` prints."""
        entries = [
            {**to_plain(entry), "plan": to_plain(self.record.plan_of(entry))}
            for entry in self.record.entries
        ]
        return {"plan_table": entries}

    def report(self) -> Iterator[RenderableType]:
        """The table that ``nest-megatron plan --for-nodes`` prints."""
        from nest_megatron.report.plan_table import plan_table_report
        from nest_megatron.report.terminal import notes_report

        yield from plan_table_report(self.record)
        yield notes_report(self.notes)

    def __repr__(self) -> str:
        numbers = ", ".join(map(str, self.plans()))
        return f"<PlanTable for {numbers} nodes>"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation(Shown):
    """A plan with its reasons; a notebook shows the page of ``explain --html``.

    Attributes:
        times: the measured layer times that it was made with, where they are on this machine.
    """

    plan: Plan
    times: LayerTimes | None = None

    def to_dict(self) -> dict[str, Any]:
        """What ``explain --json`` prints."""
        from nest_megatron.report.words import proof

        lost = [each and dict(each) for each in self.differences()]
        reasons = {"certificate": proof(self.plan.record), "alternative_term_differences_s": lost}
        pinned = {} if self.plan.pin is None else {"pin": to_plain(self.plan.pin)}
        return {**pinned, **self.plan.to_dict(), "explained": reasons}

    def differences(self) -> tuple[Mapping[str, Seconds] | None, ...]:
        """For each runner-up, by how much each term is longer than in the plan."""
        from nest_megatron.report.runners_up import term_differences

        return term_differences(self.plan.record, self.times)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from nest_megatron.report.html import html_report

        plan = self.plan.record
        return html_report(plan, self.times, flags=parallel_argv(launch_request(plan)))

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write the page of ``to_html``."""
        write_text(Path(path), self.to_html())

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write the schedule: a ``.json`` trace for Perfetto, or a ``.png`` or ``.svg`` picture."""
        from nest_megatron.report.timeline import chrome_trace, draw_timeline

        if Path(path).suffix == ".json":
            write_text(Path(path), chrome_trace(self.plan.record, self.times))
        else:
            draw_timeline(self.plan.record, Path(path), self.times)

    def report(self) -> Iterator[RenderableType]:
        """The parts of what ``explain`` prints; a text is to be shown as it stands."""
        from nest_megatron.integrations.launched import explanation

        yield from explanation(self.plan.record, self.times, self.differences(), self.plan.pin)

    def __repr__(self) -> str:
        return f"<Explanation of {self.plan!r}>"

    def _repr_html_(self) -> str:
        """The page in a frame, which keeps its styles and its policy to itself."""
        page, title = html.escape(self.to_html()), html.escape(repr(self.plan))
        style = "width:100%;height:900px;border:0"
        return f'<iframe title="{title}" srcdoc="{page}" sandbox="" style="{style}"></iframe>'


def models() -> Catalogue[TransformerSpec]:
    """The models of the catalogue by name.

    >>> models()["llama3_8b"].hidden_size
    4096
    """
    from nest_megatron.report.catalogue_tables import models_table

    return Catalogue("model", model_entry, lambda found: models_table(list(found.values())))


def clusters() -> Catalogue[Cluster]:
    """The clusters of the catalogue by name, at the sizes that their files give.

    >>> "dgx_h100" in clusters()
    True
    """
    from nest_megatron.report.catalogue_tables import clusters_table

    return Catalogue("cluster", cluster_entry, lambda found: clusters_table(list(found.items())))


def plan(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    shortlist: bool = False,
    config_dir: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Plan:
    """Find the plan that is expected to be the fastest and to fit in memory.

    Args:
        model: a name of ``models()``, the path of a YAML file or of a Hugging Face
            ``config.json``, a record, or the fields of such a file.
        cluster: a name of ``clusters()``, the path of a YAML file, a record, or its fields.
        num_gpus: size of the job; the cluster's own if not given.
        global_batch_size: sequences of one optimizer step; 512 if not given.
        shortlist: also say which plans could be the fastest.
        config_dir: a folder with ``model/``, ``cluster/`` or ``accelerator/`` files of yours.
        settings: as ``nest-megatron plan`` takes them: by name where only one section has it
            (``tensor_model_parallel_size=8``), or by section (``search={"max_seconds": 5}``).

    Raises:
        NothingFitsError: if no plan is predicted to fit in memory; ``error.refusal`` says what
            lacks, and the nearest change that fits.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a wrong setting, with the error that the command line prints.

    >>> found = plan(model="llama3_8b", cluster="dgx_h100", num_gpus=16, global_batch_size=128)
    >>> found.predicted.fits, found.train.global_batch_size
    (True, 128)
    """
    given = {**_sizes(num_gpus, global_batch_size), **settings}
    return plan_composed(compose_keywords(model, cluster, given, config_dir), shortlist=shortlist)


def plan_command(
    command: str | os.PathLike[str] | Sequence[str],
    *,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    free: Collection[str] = (),
    megatron_version: str = "0.16.1",
    strict: bool = False,
    shortlist: bool = False,
    config_dir: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Plan:
    """Plan a Megatron-LM command of your own: what ``nest-megatron plan --from`` does.

    Args:
        command: the command as a text or as words, or the script that launches it (``train.sh``),
            which is read and not run.
        cluster: as for ``plan``.
        num_gpus: size of the job; the launcher's own if not given.
        global_batch_size: the command's own if not given.
        free: flags of the command that may change (``tensor_model_parallel_size``), or ``["all"]``.
        megatron_version: the release whose flags the command uses, ``0.16.1`` or ``0.20``.
        strict: refuse flags that Megatron-LM does not have, instead of passing them on.
        shortlist: also say which plans could be the fastest.
        config_dir: as for ``plan``.
        settings: as for ``plan``; they win over the command.

    Returns:
        A plan whose ``to_megatron_args`` are the command's flags, rewritten.

    Raises:
        UserInputError: for a command that cannot be read; and the errors of ``plan``.

    >>> words = "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 "
    >>> words += "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    >>> words += "--vocab-size 32000 --tokenizer-type NullTokenizer --global-batch-size 128"
    >>> found = plan_command(words, cluster="dgx_h100", num_gpus=16, free=["all"])
    >>> found.parallel.data_parallel_size * found.parallel.tensor_model_parallel_size
    16
    """
    given = {**_sizes(num_gpus, global_batch_size), **settings}
    composed = compose_keywords(None, cluster, given, config_dir)
    found = planning.plan_command(
        [os.fspath(command)] if isinstance(command, os.PathLike) else command,
        composed,
        free=free,
        version=megatron_version,
        strict=strict,
        begun_s=time.monotonic(),
        shortlist=shortlist,
    )
    return Plan(record=found.plan, notes=found.notes)


def estimate(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    config_dir: str | os.PathLike[str] | None = None,
    **settings: object,
) -> Plan:
    """Price one layout: as ``plan``, but nothing is searched, and defaults are Megatron's.

    Returns:
        The layout as a plan; ``predicted.fits`` says whether it is predicted to fit in memory.

    Raises:
        UserInputError: for a layout that Megatron refuses, or a wrong setting.

    >>> priced = estimate(
    ...     model="llama3_8b", cluster="dgx_h100", num_gpus=16, tensor_model_parallel_size=2
    ... )
    >>> priced.parallel.data_parallel_size
    8
    """
    given = {**_sizes(num_gpus, global_batch_size), **settings}
    return estimate_composed(compose_keywords(model, cluster, given, config_dir))


def _sizes(num_gpus: int | None, global_batch_size: int | None) -> dict[str, object]:
    sizes = {"cluster.num_gpus": num_gpus, "train.global_batch_size": global_batch_size}
    return {key: value for key, value in sizes.items() if value is not None}


def plan_table(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    nodes: Iterable[int],
    global_batch_size: int | None = None,
    config_dir: str | os.PathLike[str] | None = None,
    **settings: object,
) -> PlanTable:
    """Find a plan for each of several numbers of nodes, which load each other's checkpoints.

    Args:
        nodes: numbers of nodes.

    Raises:
        UserInputError: if there is no plan for any of them, or a setting is wrong.

    >>> table = plan_table(
    ...     model="llama3_8b", cluster="dgx_h100", nodes=[2, 3], global_batch_size=96
    ... )
    >>> {number: found.placement.num_gpus for number, found in table.plans().items()}
    {2: 16, 3: 24}
    """
    counts = tuple(nodes)
    if not counts or min(counts) < 1:
        limit, fix = "it holds numbers of at least 1", "Give for example range(15, 17)."
        raise UserInputError("nodes", value=counts, limit=limit, fix=fix)
    given = {**_sizes(None, global_batch_size), **settings}
    job = table_job(sized(compose_keywords(model, cluster, given, config_dir), counts))
    return PlanTable(record=plan_for_nodes(job, counts), notes=job.request.notes)


def table_job(composed: Composed) -> TableJob:
    """A composed job, to be planned for several numbers of nodes."""
    request = request_of(composed, choose_execution=True)
    require_buildable(request.spec, read_target(composed.config))
    return TableJob(
        request=request,
        version=request.space.version,
        finished=lambda found: with_launch(found, notes=request.notes),
    )


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan file, pinned or not.

    Raises:
        PlanFileError: if it cannot be read, or was changed by hand.

    >>> load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").placement.num_gpus
    64
    """
    record, pin = read_plan(Path(path))
    return Plan(record=record, pin=pin)


def plan_composed(
    composed: Composed,
    *,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
    on_progress: Progress | None = None,
) -> Plan:
    """Plan a composed job: what ``plan`` does, here and on the command line.

    Args:
        begun_s: when its ``search.max_seconds`` began (``time.monotonic``); ``None`` is now.
        on_progress: called while the search runs.
    """
    begun_s = time.monotonic() if begun_s is None else begun_s
    request = request_of(composed, choose_execution=True)
    target = read_target(composed.config)
    require_buildable(request.spec, target)
    space = buildable_space(request.spec, target, request.space)
    request = dataclasses.replace(request, space=space, begun_s=begun_s, shortlist=shortlist)
    found = require_plan(find_plan(request, on_progress), request.notes)
    return Plan(record=with_launch(found, notes=request.notes), notes=request.notes)


def estimate_composed(composed: Composed) -> Plan:
    """Price a composed layout: what ``estimate`` does, here and on the command line."""
    found, notes = estimate_layout(composed)
    return Plan(record=with_launch(found, notes=notes), notes=notes)
