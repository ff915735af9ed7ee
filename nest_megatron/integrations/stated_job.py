"""What the fields of a recipe say of a job, kept in the file of its plan to be planned again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, get_type_hints

from nest_megatron.config.catalogue import read_cluster, read_spec
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.config.request import request_of
from nest_megatron.config.target import read_target
from nest_megatron.cost_model.memory_flags import text
from nest_megatron.cost_model.settings import is_trait, restored_settings, stored_settings
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.plain import from_plain, to_plain
from nest_megatron.planner import Request

_PLAIN: Final = (bool, int, float, str, list, dict, type(None))
#: What the plan's file says elsewhere, and what is of the process that has read the recipe.
_LEFT_OUT: Final = ("spec", "target", "restored", "command", "changes", "fields", "notes")


def recorded(job: Job) -> dict[str, Any]:
    """The fields of a recipe's job that are not the defaults, as plain data."""
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(job)
        if field.name not in _LEFT_OUT and (value := getattr(job, field.name)) != _default(field)
    }


@functools.cache
def _record() -> type:
    """A record of the fields of ``Job`` that files have."""
    kinds = get_type_hints(Job)
    fields = [
        (field.name, kinds[field.name], dataclasses.field(default=None))
        for field in dataclasses.fields(Job)
        if field.name not in _LEFT_OUT
    ]
    return dataclasses.make_dataclass("RecordedJob", fields, kw_only=True, frozen=True)


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


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
class StatedJob:
    """What the fields of a recipe say and settings cannot.

    Args:
        fields: of the job, as ``recorded``; ``None`` in plans of an application.
        traits: of the cost model's settings, which stand for them there.
    """

    fields: Mapping[str, Any] | None = None
    traits: Mapping[str, float | str] | None = None

    @classmethod
    def of(cls, plan: ParallelPlan) -> StatedJob:
        """What the file of a plan says; nothing where it is no recipe's."""
        return cls(fields=plan.provenance.recipe)

    def request(self, composed: Settings) -> Request:
        """What to plan for the job under settings that are composed.

        Raises:
            UserInputError: for a setting that is wrong, or that the recipe says otherwise.
        """
        if self.fields is None:
            return self._with_traits(request_of(composed, choose_execution=True))
        from nest_megatron.integrations.megatron_lm.planning import job_request

        return job_request(self._job(composed), read_cluster(composed), composed)

    def _job(self, composed: Settings) -> Job:
        spec, target = read_spec(composed), read_target(composed)
        said: Any = from_plain(_record(), self.fields, "provenance.recipe")
        fields = {name: getattr(said, name) for name in self.fields or {}}
        return Job(**fields, spec=spec, target=target)

    def _with_traits(self, request: Request) -> Request:
        """With the traits of a plan's file, which offers no other numbers."""
        if self.traits is None:
            return request
        stated = stored_settings(request.settings)
        others = {name: value for name, value in stated.items() if not is_trait(name)}
        settings = restored_settings({**others, **self.traits})
        return dataclasses.replace(request, settings=settings, numeric_offers=())
