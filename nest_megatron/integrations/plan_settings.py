"""The settings with which the job of a plan file is planned again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.overrides import Setting, value_text
from nest_megatron.config.request import recorded_defaults
from nest_megatron.config.schema import section_keys
from nest_megatron.cost_model.goodput import Reliability, goodput
from nest_megatron.cost_model.settings import (
    is_trait,
    stored_settings,
    traits_of,
)
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.stated_job import StatedJob
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.price import Rates
from nest_megatron.planner import Request
from nest_megatron.planner.assemble import describe_space
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.profile.records import ANALYTIC_NAME
from nest_megatron.solver.space import DEGREES


def settings_of(plan: ParallelPlan, path: Path) -> list[Setting]:
    """Settings that state the job of a plan file: its model, cluster, batch and search space.

    With them goes all that the plan was made with: what it was chosen for, whether by a profile and
    the site's calibration, what a GPU costs, how often the job fails.

    Args:
        path: of the file, which holds the model and the cluster; by ``is_path`` it is one.

    Raises:
        UserInputError: if settings cannot state it: it was planned from a command or a recipe.
    """
    _refuse_unstated(plan, path)
    stated = {"model": str(path), "cluster": str(path), "cluster.num_gpus": plan.cluster.num_gpus}
    stated["target"] = plan.provenance.settings.get("target")
    stated["train.precision"] = plan.train.precision.value
    stated["train.global_batch_size"] = plan.layout.global_batch_size
    found = {key: value_text(value) for key, value in stated.items() if value is not None}
    found |= _recorded(plan) | _sources(plan) | _paid(plan)
    job = StatedJob.of(plan)
    request = job.request(_composed(found))
    found |= _space_settings(plan, _words(request))
    found |= _assumptions(plan, stored_settings(request.settings), path)
    request = job.request(_composed(found))
    if plan.search.space and dict(plan.search.space) != _words(request):
        lacks = _differing(plan.search.space, _words(request))
        raise _unstated(path, f"searched {lacks}")
    return [Setting(key=key, value=value) for key, value in found.items()]


def stated_job(plan: ParallelPlan, settings: Sequence[Setting]) -> StatedJob:
    """What the fields of a plan's recipe say; nothing where settings say the same.

    Args:
        settings: that state the plan's job.
    """
    found = StatedJob.of(plan)
    if found.fields is not None:
        return found
    stated = stored_settings(found.request(compose(settings)).settings)
    own, theirs = (traits_of(each) for each in (plan.provenance.settings, stated))
    return found if own == theirs else StatedJob(traits=own)


def _composed(stated: Mapping[str, str]) -> Settings:
    return compose([Setting(key=key, value=value) for key, value in stated.items()])


def _words(request: Request) -> dict[str, str]:
    """A request's space in the words of a plan file."""
    return dict(describe_space(request.space, request.cluster, request.policy))


def _recorded(plan: ParallelPlan) -> dict[str, str]:
    """Settings that no other part of a plan's file says; files of earlier versions say few."""
    found = recorded_defaults()
    if plan.choice is not None:
        found["memory.max_oom_chance"] = value_text(plan.choice.max_oom_chance)
        found["search.tie_percent"] = value_text(plan.choice.tie_percent)
    pairs = (text.partition("=") for text in plan.provenance.given)
    return found | {key: value for key, _, value in pairs}


def _sources(plan: ParallelPlan) -> dict[str, str]:
    """What of measurements a plan was made without: its changes are not priced by it either."""
    found = {}
    if plan.provenance.profile == ANALYTIC_NAME:
        found["profile.mode"] = ProfileMode.ANALYTIC.value
    if plan.provenance.site is None:
        found["profile.site"] = "false"
    return found


def _paid(plan: ParallelPlan) -> dict[str, str]:
    """What a GPU costs, the length of the run, and how often it fails."""
    rates, reliability = rates_of(plan), reliability_of(plan)
    found = {} if reliability is None else _fields("reliability", reliability)
    if rates is not None:
        found |= _fields("cost", rates)
        if (tokens := found.pop("cost.tokens", None)) is not None:
            found["train.tokens"] = tokens
    return found


def _fields(section: str, record: Rates | Reliability) -> dict[str, str]:
    return {
        f"{section}.{name}": value_text(value)
        for name, value in dataclasses.asdict(record).items()
        if value is not None
    }


def _refuse_unstated(plan: ParallelPlan, path: Path) -> None:
    train = plan.train
    for what, value in (
        ("a batch that grows", train.batch_schedule),
        ("lengths of sequences", train.sequence_lengths),
    ):
        if value is not None:
            raise _unstated(path, what)


def _unstated(path: Path, value: str) -> UserInputError:
    limit = "the plan's job has it, and the file does not say by which settings"
    fix = "Plan each change of it with nest-megatron plan, from its command or its settings."
    return UserInputError(str(path), value, limit, fix)


def _differing(wanted: Mapping[str, object], found: Mapping[str, object]) -> str:
    names = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
    return ", ".join(f"{name} {wanted.get(name, '(not set)')}" for name in names)


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
        found |= _recompute(plan)
    if said.get("num_gpus") == "any whole nodes":
        found["search.use_all_gpus"] = "false"
    return found


def _recompute(plan: ParallelPlan) -> dict[str, str]:
    recompute = plan.layout.recompute
    names = [field.name for field in dataclasses.fields(recompute) if field.init]
    fields = {name: getattr(recompute, name) for name in names}
    said = {name: value for name, value in fields.items() if value not in (None, ())}
    return {f"parallel.recompute_{name}": value_text(value) for name, value in said.items()}


def _assumptions(
    plan: ParallelPlan, found: Mapping[str, float | str], path: Path
) -> dict[str, str]:
    """Assumptions of the cost model that are not the target's own."""
    stated, wanted = {}, plan.provenance.settings
    if not plan.launch:  # a recipe's fields say them (``StatedJob``)
        wanted, found = (
            {name: value for name, value in each.items() if not is_trait(name)}
            for each in (wanted, found)
        )
    for name, value in wanted.items():
        if found.get(name) == value:
            continue
        key = f"memory.{name[7:]}" if name.startswith("memory_") else f"cost.{name}"
        if key not in section_keys():
            raise _unstated(path, f"{name} = {value}")
        whole = isinstance(value, float) and value.is_integer()
        stated[key] = value_text(int(value) if whole else value)
    for name in found.keys() - wanted.keys():
        raise _unstated(path, f"{name} (not set)")
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
    return dataclasses.replace(best, save_interval=found.save_interval)


def rates_of(plan: ParallelPlan) -> Rates | None:
    """What a GPU of the job of a plan costs, where its file says it."""
    found = plan.price
    if found is None:
        return None
    return Rates(gpu_hour=found.gpu_hour, gpu_watts=found.gpu_watts, tokens=found.tokens)
