"""What the Python API returns: plans, tables of plans, explanations, the catalogue."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.keywords import StrPath, path_of
from nest_megatron.errors import UserInputError
from nest_megatron.files import check_output, write_text
from nest_megatron.integrations.fields import ABSENT, find
from nest_megatron.integrations.megatron_lm.attach import (
    LAUNCHER,
    launch_request,
    planned_release,
)
from nest_megatron.integrations.megatron_lm.write import parallel_argv
from nest_megatron.layout import plan_file
from nest_megatron.layout.batch_schedule import TrainChoice
from nest_megatron.layout.diff import Change
from nest_megatron.layout.estimate import Alternative, BeforeAfter, Estimate, Placement
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import ParallelPlan, SearchRecord
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen, to_plain
from nest_megatron.planner import plan_table
from nest_megatron.planner.pins import Pin
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.report.console import Shown
from nest_megatron.report.plan_rows import PlanRow, scaling_document, scaling_table
from nest_megatron.units import Seconds, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

    from nest_megatron.integrations.megatron_lm.other_layout import Versus, WhyNot


def output_file(path: StrPath, *, force: bool) -> Path:
    """A file that a call writes; ``UserInputError`` for somebody else's, if not forced."""
    file = path_of("path", path)
    check_output("path", file, force=force)
    return file


@frozen
class Plan(Shown):
    """A layout of a training job with its prediction.

    A notebook shows it as the tables that ``nest-megatron plan`` prints, and so does ``print``.

    Attributes:
        record: the whole plan, field by field as in its file.
        pin: who froze it, where it was read from a pinned file.
    """

    record: ParallelPlan
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
        """The sequences and the number format."""
        return self.record.train

    @property
    def layout(self) -> Layout:
        """Degrees, batch split, stages, recomputation and sharding."""
        return self.record.layout

    @property
    def arguments(self) -> dict[str, Any]:
        """The layout by Megatron's names."""
        return self.record.arguments

    @property
    def placement(self) -> Placement:
        """Where groups of ranks lie."""
        return self.record.placement

    @property
    def predicted(self) -> Estimate:
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

    @property
    def ended_early(self) -> bool:
        """Whether time ended the search: ``search.gap_percent`` is how far the best may be."""
        return self.search.ended_early

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, and variables that must not be set, one sentence each."""
        launch = self.record.launch.get(LAUNCHER)
        return self.record.notes + (() if launch is None else launch.unset_notes())

    @property
    def before(self) -> BeforeAfter | None:
        """What the planned command ran beside the plan, where a command was planned."""
        return self.record.today

    def explain(self) -> Explanation:
        """Why the plan is what it is: what ``nest-megatron explain`` prints.

        >>> from nest_megatron import load_plan
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

        >>> from nest_megatron import load_plan
        >>> args = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").to_megatron_args()
        >>> args[args.index("--num-experts") + 1]
        '8'
        """
        launch = self.record.launch.get(LAUNCHER)
        if launch is None:
            framework = self.record.provenance.framework
            raise UserInputError(
                "plan",
                framework,
                "the plan holds no command of Megatron-LM",
                "Plan for target=megatron_lm, or give the recipe to Plan.apply.",
            )
        if not layout_only:
            return list(launch.argv)
        return parallel_argv(launch_request(self.record, version=planned_release(self.record)))

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
        raise UserInputError(
            "recipe",
            type(recipe).__name__,
            "it is neither a recipe of NeMo nor a ConfigContainer of Megatron-Bridge",
            "Give what pretrain_recipe() returns; Plan.to_megatron_args is for Megatron-LM.",
        )

    def save(self, path: StrPath, *, force: bool = False) -> None:
        """Write the plan file that ``load_plan`` and ``nest-megatron pin`` read.

        Args:
            path: the file; ``-`` is standard output.
            force: replace a file that nest-megatron has not written, which is refused otherwise.
        """
        plan_file.write(self.record, output_file(path, force=force))

    def to_dict(self) -> dict[str, Any]:
        """The plan as numbers, text, lists and dicts: what ``--json`` prints."""
        return plan_file.fields_of(self.record)

    def report(self, *more: RenderableType, full: bool = False) -> Iterator[RenderableType]:
        """What ``nest-megatron plan`` prints: one screen, or every figure.

        Args:
            more: parts before the notes, in the place of the flags to paste.
        """
        from nest_megatron.report.layout_tables import before_after_report, shortlist_report
        from nest_megatron.report.terminal import answer_report, notes_report, plan_report
        from nest_megatron.report.words import early_words

        if said := early_words(self.search):
            yield f"{said}.\n"
        if full and self.before is not None:
            yield before_after_report(self.before, self.record)
        launch = self.record.launch.get(LAUNCHER)
        if full:
            yield from (plan_report(self.record), "")
        elif more or launch is None:
            yield answer_report(self.record)
            yield from [""] if more else ()
        else:
            flags = self.to_megatron_args(layout_only=True)
            yield answer_report(self.record, flags, launch.environment)
        if self.record.shortlist is not None:
            yield from (shortlist_report(self.record), "")
        yield from (*more, notes_report(self.notes))

    def __repr__(self) -> str:
        from nest_megatron.report.words import degree_words

        words = degree_words(self.layout, ("TP", "PP", "VPP", "CP", "EP", "DP")) or ["one rank"]
        job = f"{self.model.name} on {self.cluster.describe()}"
        batch = f"batch {self.layout.global_batch_size}"
        step = format_seconds(self.predicted.iteration_time_s)
        return f"<Plan of {job}: {' '.join(words)}, {batch}, {step} a step>"


@frozen
class PlanTable(Shown):
    """Plans of one job, one for each number of nodes that has any.

    Attributes:
        record: the whole table, as in its file.
        notes: what was assumed, one sentence each.
    """

    record: plan_table.PlanTable
    notes: tuple[str, ...] = ()

    def plans(self) -> dict[int, Plan]:
        """The plans by number of nodes."""
        return {entry.num_nodes: Plan(record=each) for entry, each in self.record.planned()}

    def save(self, path: StrPath, *, force: bool = False) -> None:
        """Write the file that ``nest-megatron pin`` freezes; arguments as of ``Plan.save``."""
        write_text(output_file(path, force=force), plan_table.dump(self.record))

    def to_dict(self) -> dict[str, Any]:
        """The table as numbers, text, lists and dicts: what ``--json`` prints."""
        entries = []
        for entry in self.record.entries:
            found = self.record.plan_of(entry)
            entries.append({**to_plain(entry), "plan": found and plan_file.fields_of(found)})
        return {"plan_table": entries}

    def report(self) -> Iterator[RenderableType]:
        """The table that ``nest-megatron plan --for-nodes`` prints."""
        from nest_megatron.report.plan_rows import nodes_table
        from nest_megatron.report.terminal import notes_report

        yield from nodes_table(self.record).report()
        yield notes_report(self.notes)

    def __repr__(self) -> str:
        numbers = ", ".join(map(str, self.plans()))
        return f"<PlanTable for {numbers} nodes>"


@frozen
class Scaling(Shown):
    """One job on several numbers of GPUs: how it scales, and which of them are worth it.

    Attributes:
        rows: what planning came to, a row for each number of GPUs.
    """

    rows: tuple[PlanRow, ...]

    def plans(self) -> dict[int, Plan]:
        """The plans by number of GPUs, of those that have one."""
        found = filter(None, (row.plan for row in self.rows))
        return {each.cluster.num_gpus: Plan(record=each) for each in found}

    def to_dict(self) -> dict[str, Any]:
        """The rows as numbers, text, lists and dicts: what ``--json`` prints."""
        return scaling_document(self.rows)

    def report(self) -> Iterator[RenderableType]:
        """The table that ``nest-megatron plan --for-gpus`` prints."""
        yield from scaling_table(self.rows).report()

    def __repr__(self) -> str:
        return f"<Scaling over {len(self.rows)} numbers of GPUs, {len(self.plans())} with a plan>"


@frozen
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
        from nest_megatron.report.layout_tables import term_differences

        return term_differences(self.plan.record, self.times)

    def versus(self, layout: str) -> Versus:
        """The plan beside another layout, term by term: what ``explain --versus`` prints.

        Args:
            layout: what it has instead, ``tp=8,pp=4`` or Megatron's own flags.

        Raises:
            UserInputError: for a layout that cannot be read, or that Megatron refuses.

        >>> from nest_megatron import load_plan
        >>> explained = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").explain()
        >>> explained.versus("micro_batch_size=2").to_dict()["other"]["layout"]["micro_batch_size"]
        2
        """
        from nest_megatron.integrations.megatron_lm import other_layout

        return other_layout.versus(self.plan.record, layout, self.times)

    def why_not(self, layout: str) -> WhyNot:
        """Why the plan is no layout with these sizes: what ``explain --why-not`` prints.

        Args:
            layout: sizes, as for ``versus``; what is not named is searched.

        Raises:
            UserInputError: for a layout that cannot be read.

        >>> from nest_megatron import load_plan
        >>> explained = load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").explain()
        >>> explained.why_not("tp=3").verdict
        'illegal'
        """
        from nest_megatron.integrations.megatron_lm import other_layout

        return other_layout.why_not(self.plan.record, layout, self.times)

    def to_html(self) -> str:
        """The report as one self-contained page."""
        from nest_megatron.report.html import html_report

        plan = self.plan.record
        flags = () if plan.launch else parallel_argv(launch_request(plan))
        return html_report(plan, self.times, flags=flags)

    def write_html(self, path: StrPath, *, force: bool = False) -> None:
        """Write the page of ``to_html``; ``force`` as of ``Plan.save``."""
        write_text(output_file(path, force=force), self.to_html())

    def write_timeline(self, path: StrPath, *, force: bool = False) -> None:
        """Write the schedule: a ``.json`` trace for Perfetto, or a ``.png`` or ``.svg`` picture.

        Args:
            force: as of ``Plan.save``.
        """
        from nest_megatron.report.schedule_view import chrome_trace
        from nest_megatron.report.timeline import draw_timeline

        file = output_file(path, force=force)
        if file.suffix == ".json":
            write_text(file, chrome_trace(self.plan.record, self.times))
        else:
            draw_timeline(self.plan.record, file, self.times)

    def report(self) -> Iterator[RenderableType]:
        """The parts of what ``explain`` prints; a text is to be shown as it stands."""
        from nest_megatron.integrations.plan_output import explanation

        yield from explanation(self.plan.record, self.times, self.differences(), self.plan.pin)

    def __repr__(self) -> str:
        return f"<Explanation of {self.plan!r}>"

    def _repr_html_(self) -> str:
        """The page in a frame, which keeps its styles and its policy to itself."""
        import html

        page, title = html.escape(self.to_html()), html.escape(repr(self.plan))
        style = "width:100%;height:900px;border:0"
        return f'<iframe title="{title}" srcdoc="{page}" sandbox="" style="{style}"></iframe>'


Record = TypeVar("Record", TransformerSpec, Cluster)


class Catalogue(Shown, Mapping[str, Record]):
    """Models or clusters by name, each read when it is asked for; a notebook shows a table."""

    def __init__(
        self,
        group: str,
        read: Callable[[str], Record],
        table: Callable[[Catalogue[Record]], RenderableType],
    ) -> None:
        self._group, self._names = group, catalogue_names(group)
        self._read: Callable[[str], Record] = read
        self._table: Callable[[Catalogue[Record]], RenderableType] = table

    def __getitem__(self, name: str) -> Record:
        if not isinstance(name, str):
            raise KeyError(name)
        try:
            return self._read(name)
        except UserInputError as error:
            raise KeyError(str(error)) from error

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"<Catalogue of {len(self)} {self._group}s>"

    def report(self) -> tuple[RenderableType]:
        """The table."""
        return (self._table(self),)
