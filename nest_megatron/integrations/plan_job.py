"""Jobs that are read later: of a command as typed, and of a plan file, to be planned again."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

from nest_megatron.config.catalogue import read_cluster, read_spec
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.job import Job, read_target
from nest_megatron.config.overrides import Setting, value_text
from nest_megatron.config.request import recorded_defaults, request_of
from nest_megatron.config.schema import section_keys
from nest_megatron.cost_model.goodput import Reliability, goodput
from nest_megatron.cost_model.memory_flags import text
from nest_megatron.cost_model.settings import (
    is_trait,
    restored_settings,
    stored_settings,
    traits_of,
)
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.integrations.megatron_lm.attach import require_launchable_model
from nest_megatron.layout.estimate import Rates
from nest_megatron.layout.plan import MEGATRON_LM, ParallelPlan
from nest_megatron.plain import from_plain, frozen, to_plain
from nest_megatron.planner import Request
from nest_megatron.planner.layouts import describe_space
from nest_megatron.profile.records import ANALYTIC_NAME, ProfileMode
from nest_megatron.solver.space import DEGREES


@frozen
class TypedCommand:
    """A command as a user types it, of Megatron-LM or of a recipe.

    Args:
        text: the command, or its words; those of a script's launch once that was run.
        free: parallel flags that the search may change, or ``all``; of a recipe what leaves the
            format of its checkpoints, where nothing is named.
        version: the release whose flags it uses, as of ``megatron_version``.
        strict: refuse flags that Megatron-LM does not have.
        folder: in which its script starts it; ``""`` where that is not known.
        notes: what was assumed of the script, one sentence each.
    """

    text: str | tuple[str, ...]
    free: tuple[str, ...] = ()
    version: str | None = None
    strict: bool = False
    folder: str = ""
    notes: tuple[str, ...] = ()


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
    if job.command:
        origin = origin.made_for(MEGATRON_LM, job.version, made_by)
    else:
        assert job.target
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
    is_plain = isinstance(plain, bool | int | float | str | list | dict | None)
    return text(value) if counts or not is_plain else plain


@frozen
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

            kinds = get_type_hints(Job)
            fields = {}
            for name, value in self.fields.items():
                require_known("provenance.recipe", name, _FIELDS)
                fields[name] = from_plain(kinds[name], value, f"provenance.recipe.{name}")
            job = Job(**fields, spec=read_spec(composed), target=read_target(composed))
            return job_request(job, read_cluster(composed), composed)
        request = request_of(composed, choose_execution=True)
        if self.traits is None:
            require_launchable_model(request.spec, read_target(composed))
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
    stated = {
        "model": str(path),
        "cluster": str(path),
        "cluster.num_gpus": plan.cluster.num_gpus,
        "target": plan.provenance.settings.get("target"),
        "train.precision": plan.train.precision,
        "train.global_batch_size": (plan.train.batch_schedule or plan.layout).global_batch_size,
    }
    found = _as_settings("", stated) | recorded_defaults()
    if plan.choice:
        found["memory.max_oom_chance"] = value_text(plan.choice.max_oom_chance)
        found["search.tie_percent"] = value_text(plan.choice.tie_percent)
    found |= dict(text.partition("=")[::2] for text in plan.provenance.given)
    if plan.provenance.profile == ANALYTIC_NAME:  # its changes are not priced by one either
        found["profile.mode"] = ProfileMode.ANALYTIC.value
    if not plan.provenance.site:
        found["profile.site"] = "false"
    found |= _as_settings("reliability.", reliability_of(plan))
    found |= _as_settings("cost.", rates_of(plan))
    tokens = found.pop("cost.tokens", "null")
    if found["train.train_samples"] == "null":
        found["train.tokens"] = tokens
    job = RecipeJob(fields=plan.provenance.recipe)

    def request() -> Request:
        return job.request(compose([Setting(key=k, value=value) for k, value in found.items()]))

    free = request()
    for name in ("sequence_lengths", "batch_schedule"):
        if getattr(free, name) != getattr(plan.train, name):
            raise _no_settings(path, name.replace("_", " "))
    found |= _space_settings(plan, _words(free))
    found |= _assumptions(plan, stored_settings(free.settings), path)
    space = plan.search.space
    words = _words(request())
    differing = [name for name in {**space, **words} if space.get(name) != words.get(name)]
    # a policy narrows it as settings do
    if space and differing and "policy" not in {**space, **words}:
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
    own = traits_of(plan.provenance.settings)
    return found if own == traits_of(stated) else RecipeJob(traits=own)


def _words(request: Request) -> dict[str, str]:
    """A request's space in the words of a plan file."""
    return dict(describe_space(request.space, request.cluster, request.policy))


def _as_settings(prefix: str, record: object) -> dict[str, str]:
    """The fields of a record, or of a mapping, that are set, as settings."""
    fields = to_plain(record) or {}
    return {f"{prefix}{k}": value_text(v) for k, v in fields.items() if v not in (None, [])}


def _no_settings(path: Path, value: str) -> UserInputError:
    return UserInputError(
        str(path),
        value,
        "the plan's job has it, and the settings of its file do not give it",
        "Plan each change of it with nest-megatron plan, from its command or its settings.",
    )


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
    stated = {}
    wanted = plan.provenance.settings
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
    found = plan.goodput
    num_gpus = plan.layout.num_gpus
    if found is None:
        return None
    best = Reliability(
        mtbf_hours=float(f"{found.mtbf_s * num_gpus / 3600:.12g}"),
        checkpoint_s=found.checkpoint_s,
        restart_s=found.restart_s,
    )
    said = goodput(best, plan.predicted.iteration_time_s, num_gpus).save_interval
    return replace(best, save_interval=None if said == found.save_interval else found.save_interval)


def rates_of(plan: ParallelPlan) -> Rates | None:
    """What a GPU of the job of a plan costs, where its file says it."""
    if found := plan.price:
        return Rates(gpu_hour=found.gpu_hour, gpu_watts=found.gpu_watts, tokens=found.tokens)
    return None
