"""The job of a plan file: planned again, and under other layouts than the plan's."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from nest_megatron.config.catalogue import read_cluster, read_spec
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.job import Job, fields_of, read_target
from nest_megatron.config.overrides import Setting, value_text
from nest_megatron.config.request import recorded_defaults, request_of, site_calibration
from nest_megatron.config.schema import section_keys
from nest_megatron.config.space import (
    buildable_degrees,
    fixed_degrees,
    read_rank_order,
    read_recompute,
    read_zero,
)
from nest_megatron.config.train import REPLICA_DEGREES
from nest_megatron.cost_model.goodput import Reliability, goodput
from nest_megatron.cost_model.memory_flags import text
from nest_megatron.cost_model.settings import (
    is_trait,
    restored_settings,
    stored_settings,
    traits_of,
)
from nest_megatron.cost_model.target_defaults import DEFAULT_TARGET, target_named
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, STATED_ELSEWHERE
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.present_layout import refusal_text
from nest_megatron.layout.dims import DEGREES as LAYOUT_DEGREES
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.estimate import Difference, Rates
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KnobConditions, always_on
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, spread_partition
from nest_megatron.model.execution import Execution
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.planner import Request
from nest_megatron.planner.layouts import Prices, Variant, describe_space, difference, estimate_for
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ANALYTIC_NAME, ProfileMode
from nest_megatron.solver.space import DEGREES, SearchSpace

_PLAIN = (bool, int, float, str, list, dict, type(None))
#: Fields of a job that the plan's file does not say elsewhere, and that are not of the process
#: that has read the recipe.
_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(Job)
    if field.name not in ("spec", "target", "restored", "command", "changes", "fields", "notes")
)


def with_origin(plan: ParallelPlan, job: Job, made_by: str) -> ParallelPlan:
    """A plan that says what it was made for: a framework, and of a recipe the job as well."""
    origin = plan.provenance
    if job.command is not None:
        origin = origin.made_for(MEGATRON_LM, job.version, made_by)
    else:
        assert job.target is not None
        origin = origin.made_for(job.target.framework, None, made_by, recorded_fields(job))
    return replace(plan, provenance=origin)


def recorded_fields(job: Job) -> dict[str, Any]:
    """The fields of a recipe's job that are not the defaults, as plain data."""
    default = Job(spec=job.spec)
    return {
        name: _plain(value)
        for name in _FIELDS
        if (value := getattr(job, name)) != getattr(default, name)
    }


def _plain(value: object) -> Any:
    """Plain data; what else a framework's objects hold, in Megatron's words."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    plain = to_plain(value)
    counts = isinstance(value, Enum) and not isinstance(value, int | str)
    return text(value) if counts or not isinstance(plain, _PLAIN) else plain


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeJob:
    """What the fields of a recipe say and settings cannot.

    Args:
        fields: of the job, as ``recorded_fields``; ``None`` in plans of an application.
        traits: of the cost model's settings, which stand for them there.
    """

    fields: Mapping[str, Any] | None = None
    traits: Mapping[str, float | str] | None = None

    def request(self, composed: Settings) -> Request:
        """What to plan for the job under settings that are composed.

        Raises:
            UserInputError: for a setting that is wrong, or that the recipe says otherwise.
        """
        if self.fields is not None:
            from nest_megatron.integrations.megatron_lm.planning import job_request

            kinds, fields = get_type_hints(Job), {}
            for name, value in self.fields.items():
                require_known("provenance.recipe", name, _FIELDS)
                fields[name] = from_plain(kinds[name], value, f"provenance.recipe.{name}")
            job = Job(**fields, spec=read_spec(composed), target=read_target(composed))
            return job_request(job, read_cluster(composed), composed)
        request = request_of(composed, choose_execution=True)
        if self.traits is None:
            return request
        stated = stored_settings(request.settings)  # a plan's file offers no other numbers
        others = {name: value for name, value in stated.items() if not is_trait(name)}
        return replace(
            request, settings=restored_settings({**others, **self.traits}), numeric_offers=()
        )


def settings_of(plan: ParallelPlan, path: Path) -> list[Setting]:
    """Settings that state the job of a plan file: its model, cluster, batch and search space.

    With them goes all that the plan was made with: what it was chosen for, whether by a profile and
    the site's calibration, what a GPU costs, how often the job fails.

    Args:
        path: of the file, which holds the model and the cluster; by ``is_path`` it is one.

    Raises:
        UserInputError: if settings cannot state it: it was planned from a command or a recipe.
    """
    if plan.train.batch_schedule is not None:
        raise _no_settings(path, "a batch that grows")
    if plan.train.sequence_lengths is not None:
        raise _no_settings(path, "lengths of sequences")
    stated = {
        "model": str(path),
        "cluster": str(path),
        "cluster.num_gpus": plan.cluster.num_gpus,
        "target": plan.provenance.settings.get("target"),
        "train.precision": plan.train.precision,
        "train.global_batch_size": plan.layout.global_batch_size,
    }
    found = _as_settings("", stated) | recorded_defaults()
    if plan.choice is not None:
        found["memory.max_oom_chance"] = value_text(plan.choice.max_oom_chance)
        found["search.tie_percent"] = value_text(plan.choice.tie_percent)
    pairs = (text.partition("=") for text in plan.provenance.given)
    found |= {key: value for key, _, value in pairs}
    if plan.provenance.profile == ANALYTIC_NAME:  # its changes are not priced by one either
        found["profile.mode"] = ProfileMode.ANALYTIC.value
    if plan.provenance.site is None:
        found["profile.site"] = "false"
    found |= _as_settings("reliability.", reliability_of(plan)) | _as_settings(
        "cost.", rates_of(plan)
    )
    if (tokens := found.pop("cost.tokens", None)) is not None:
        found["train.tokens"] = tokens
    job = RecipeJob(fields=plan.provenance.recipe)

    def request() -> Request:
        return job.request(compose([Setting(key=k, value=value) for k, value in found.items()]))

    free = request()
    found |= _space_settings(plan, _words(free))
    found |= _assumptions(plan, stored_settings(free.settings), path)
    space, words = plan.search.space, _words(request())
    differing = [name for name in {**space, **words} if space.get(name) != words.get(name)]
    if space and differing:
        lacks = ", ".join(f"{name} {space.get(name, '(not set)')}" for name in differing)
        raise _no_settings(path, f"searched {lacks}")
    return [Setting(key=key, value=value) for key, value in found.items()]


def recipe_job(plan: ParallelPlan, settings: Sequence[Setting]) -> RecipeJob:
    """What the fields of a plan's recipe say; nothing where settings say the same.

    Args:
        settings: that state the plan's job.
    """
    found = RecipeJob(fields=plan.provenance.recipe)
    if found.fields is not None:
        return found
    stated = stored_settings(found.request(compose(settings)).settings)
    own, theirs = (traits_of(each) for each in (plan.provenance.settings, stated))
    return found if own == theirs else RecipeJob(traits=own)


def _words(request: Request) -> dict[str, str]:
    """A request's space in the words of a plan file."""
    return dict(describe_space(request.space, request.cluster, request.policy))


def _as_settings(prefix: str, record: object) -> dict[str, str]:
    """The fields of a record, or of a mapping, that are set, as settings."""
    fields = to_plain(record) or {}
    return {f"{prefix}{k}": value_text(v) for k, v in fields.items() if v not in (None, [])}


def _no_settings(path: Path, value: str) -> UserInputError:
    limit = "the plan's job has it, and the file does not say by which settings"
    fix = "Plan each change of it with nest-megatron plan, from its command or its settings."
    return UserInputError(str(path), value, limit, fix)


def _space_settings(plan: ParallelPlan, free: Mapping[str, str]) -> dict[str, str]:
    """What was fixed or limited of the layout: where the words differ from those of a free one."""
    said = {k: words for k, words in plan.search.space.items() if words != free.get(k)}
    found = {}
    for name in DEGREES:
        fixed, _, value = said.get(name, "").partition("= ")
        section = "train" if name == "micro_batch_size" else "parallel"
        if value and fixed in ("", "<"):
            found[f"search.max_{name}" if fixed else f"{section}.{name}"] = value
    for name in ("zero_stage", "rank_order"):
        if name in said and "," not in said[name]:
            found[f"parallel.{name}"] = said[name]
    if "recompute" in said:
        found |= _as_settings("parallel.recompute_", plan.layout.recompute)
    if said.get("num_gpus") == "any whole nodes":
        found["search.use_all_gpus"] = "false"
    return found


def _assumptions(
    plan: ParallelPlan, found: Mapping[str, float | str], path: Path
) -> dict[str, str]:
    """Assumptions of the cost model that are not the target's own."""
    stated, wanted = {}, plan.provenance.settings
    if not plan.launch:  # a recipe's fields say them (``RecipeJob``)
        wanted, found = (
            {name: value for name, value in each.items() if not is_trait(name)}
            for each in (wanted, found)
        )
    for name, value in wanted.items():
        if found.get(name) == value:
            continue
        key = f"memory.{name[7:]}" if name.startswith("memory_") else f"cost.{name}"
        if key not in section_keys():
            raise _no_settings(path, f"{name} = {value}")
        whole = isinstance(value, float) and value.is_integer()
        stated[key] = value_text(int(value) if whole else value)
    for name in found.keys() - wanted.keys():
        raise _no_settings(path, f"{name} (not set)")
    return stated


def reliability_of(plan: ParallelPlan) -> Reliability | None:
    """How often the job of a plan fails, where its file says it.

    It saves as often as is best, if that is what the plan does.
    """
    found, num_gpus = plan.goodput, plan.layout.num_gpus
    if found is None:
        return None
    best = Reliability(
        mtbf_hours=float(f"{found.mtbf_s * num_gpus / 3600:.12g}"),
        checkpoint_s=found.checkpoint_s,
        restart_s=found.restart_s,
    )
    said = goodput(best, plan.predicted.iteration_time_s, num_gpus).save_interval
    if said == found.save_interval:
        return best
    return replace(best, save_interval=found.save_interval)


def rates_of(plan: ParallelPlan) -> Rates | None:
    """What a GPU of the job of a plan costs, where its file says it."""
    found = plan.price
    if found is None:
        return None
    return Rates(gpu_hour=found.gpu_hour, gpu_watts=found.gpu_watts, tokens=found.tokens)


_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
#: Longest time of all searches for layouts of one job, from when it is read.
SEARCH_S = 20.0


class PlannedJob:
    """The job of a plan file, as far as the file says it."""

    def __init__(self, plan: ParallelPlan, times: LayerTimes | None) -> None:
        self._plan, self._times = plan, times
        self._settings = restored_settings(plan.provenance.settings)
        launch = plan.launch.get(LAUNCHER)
        release = plan.provenance.framework_version
        self._version = release if release in RELEASES else self._target().megatron_core
        values: Mapping[str, Any] = {}
        if launch is not None:
            values = read_argv(launch.script, launch.argv, self._version).values
        self._values = values
        cluster = plan.cluster.resized(plan.layout.num_gpus)
        self._job = Request(
            spec=plan.model,
            cluster=cluster,
            global_batch_size=plan.layout.global_batch_size,
            settings=self._settings,
            times=times,
            batch_schedule=plan.train.batch_schedule,
            sequence_lengths=plan.train.sequence_lengths,
            not_modelled=plan.search.not_modelled,
            num_alternatives=0,
            remedies=False,
            reliability=reliability_of(plan),
            rates=rates_of(plan),
            site=None if plan.provenance.site is None else site_calibration(cluster)[0],
            space=SearchSpace(version=self._version),
            max_seconds=SEARCH_S,
            begun_s=time.monotonic(),
        )

    def _target(self) -> Target:
        return target_named(self._settings.target or DEFAULT_TARGET.name)

    def request(self, space: SearchSpace) -> Request:
        """The search for the fastest layout of a space."""
        return replace(self._job, space=space)

    def space(self, composed: Settings) -> SearchSpace:
        """All layouts with the sizes that were named; the sharding is the plan's otherwise."""
        schedule = self._plan.train.batch_schedule
        if composed.parallel.sequence_parallel is False:
            raise UserInputError(
                "sequence_parallel",
                False,
                "plans have it wherever tensor parallelism is on",
                "Give it to --versus.",
            )
        own, zero = self._plan.layout.sharding, read_zero(composed.parallel)
        zeros = (self._plan.layout.zero if zero is None else zero,)
        order = read_rank_order(composed.parallel)
        space = SearchSpace(
            fixed=(fixed := fixed_degrees(composed)),
            partition=self._stages(composed, fixed),
            zero_stages=zeros,
            sharding=own if zero is None else None,
            recompute=read_recompute(composed.parallel),
            execution=self._execution,
            version=self._version,
            batch_unit=schedule.batch_unit if schedule else None,
            rank_orders=tuple(RankOrder) if order is None else (order,),
        )
        degrees = buildable_degrees(self._plan.model, self._target(), space.fixed)
        return replace(space, fixed=degrees)

    @property
    def _execution(self) -> Execution:
        """As the plan's; what its own layout has no room for is on where it never costs time."""
        own, settings = self._plan.layout.execution, self._settings
        recipe = settings.traits.fp8_recipe.value if settings.precision.is_quantized else None
        conditions = KnobConditions(
            spec=self._plan.model,
            accelerator=self._plan.cluster.accelerator.name,
            fp8_recipe=recipe,
            can_state=fields_of(self._target()),
        )
        every = always_on(own, conditions)
        return every if allowed_execution(every, self._plan.layout) == own else own

    def variant(self, composed: Settings) -> Variant:
        """The plan's layout with what was named instead."""
        config, own = composed.parallel, self._plan.layout.without_stages()
        given = fixed_degrees(composed)
        micro = given.pop("micro_batch_size", own.micro_batch_size)
        stages = self._stages(composed, given)
        if stages is not None:
            given[_VPP] = stages.num_chunks // stages.pipeline_model_parallel_size
        dims = self._dims(given, read_rank_order(config))
        splits_sequence = config.sequence_parallel
        if splits_sequence is None:
            splits_sequence = dims.tensor_model_parallel_size > 1
        zero, recompute = read_zero(config), read_recompute(config)
        grid = replace(
            own,
            dims=dims,
            micro_batch_size=micro,
            sequence_parallel=splits_sequence,
            recompute=own.recompute if recompute is None else recompute,
            zero=own.zero if zero is None else zero,
        )
        if stages is None:
            stages = self._plan.layout.partition
            sizes = stages.pipeline_model_parallel_size, stages.num_chunks
            if sizes != (dims.pipeline_model_parallel_size, dims.num_chunks):
                stages = spread_partition(self._plan.model, dims)
        return self.variant_of(grid, stages, own=zero is None)

    def _stages(self, composed: Settings, given: Mapping[str, int]) -> StagePartition | None:
        """The stages that were named, for the pipeline's own size where no other is."""
        text = composed.parallel.pipeline_model_parallel_layout
        pp = given.get(_PP, self._plan.layout.dims.pipeline_model_parallel_size)
        return None if text is None else parse_layout(text, self._plan.model, pp)

    def variant_of(
        self, grid: PartialLayout, partition: StagePartition, *, own: bool = True
    ) -> Variant:
        """A grid and its stages as the job would run them.

        Args:
            own: the plan's sharding holds, as the ZeRO stage is the plan's.
        """
        grid = replace(grid, execution=allowed_execution(self._execution, grid))
        return Variant(
            settings=self._settings,
            layout=grid.with_stages(partition, self._plan.layout.sharding if own else None),
        )

    def _dims(self, given: Mapping[str, int], rank_order: RankOrder | None) -> ParallelDims:
        """The plan's degrees with those given; the GPUs that are left replicate."""
        own = self._plan.layout.dims
        kept = {name: getattr(own, name) for name in LAYOUT_DEGREES if name != "data_parallel_size"}
        if given.get(_PP, own.pipeline_model_parallel_size) != own.pipeline_model_parallel_size:
            kept[_VPP] = 1
        degrees = {**kept, **given}
        if "data_parallel_size" not in degrees:
            gpus = self._plan.layout.num_gpus
            replica = math.prod(degrees[name] for name in REPLICA_DEGREES)
            if gpus % replica:
                raise UserInputError(
                    "tp * cp * pp",
                    replica,
                    f"it must divide the plan's {gpus} GPUs",
                    "Change one of the sizes.",
                )
            degrees["data_parallel_size"] = gpus // replica
        return ParallelDims(**degrees, rank_order=rank_order or own.rank_order)

    def refusal(self, variant: Variant) -> str:
        """The first rule of Megatron that a layout breaks, with its source; empty for none."""
        gpus, placed = variant.layout.num_gpus, self._plan.layout.num_gpus
        if gpus != placed:
            return f"tp * pp * cp * dp = {gpus}: the plan is for {placed} GPUs"
        return refusal_text(self._job, variant, self._values, self._version, but=STATED_ELSEWHERE)

    def rule(self, composed: Settings) -> str:
        """The rule that the plan's layout with what was named breaks; empty for none."""
        try:
            return self.refusal(self.variant(composed))
        except UserInputError as error:
            return f"{error.what} = {error.value}: {error.limit}"

    def priced(self, variant: Variant) -> ParallelPlan:
        """A layout as a plan, with its prediction."""
        return estimate_for(self._job, variant.layout, settings=variant.settings)

    def difference(self, variant: Variant) -> Difference:
        """By how much a layout's step is longer than the plan's."""
        prices = Prices(self._job)
        return difference(prices.of(self.own), prices.of(variant))

    @property
    def own(self) -> Variant:
        """The plan's layout."""
        return Variant(settings=self._settings, layout=self._plan.layout)
