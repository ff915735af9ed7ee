"""Plans of the configurations that this process composes, each found once."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.hydra.planning import AppPlan, plan_app
from nest_megatron.integrations.hydra.ranks import require_same_plan
from nest_megatron.integrations.hydra.size import launched
from nest_megatron.integrations.hydra.view import AppView, view_of
from nest_megatron.model.execution import Execution
from nest_megatron.parallel.plan import ParallelChoice

#: Choices that an application may have a field for.
_ITEMS = (
    "micro_batch_size",
    "use_tp_pp_dp_mapping",
    *(field.name for field in dataclasses.fields(ParallelChoice)),
    *(field.name for field in dataclasses.fields(Execution) if field.init),
)


class Plans:
    """Plans by configuration: an application reads one value after another, and means one plan.

    Attributes:
        latest: the plan of the job that runs now.
    """

    def __init__(self) -> None:
        self.latest: AppPlan | None = None
        self._known: dict[str, AppPlan] = {}
        self._of_root: dict[int, tuple[weakref.ref[Any], str, AppPlan]] = {}
        self._planning = threading.local()

    def of(self, root: Any) -> AppPlan:
        """The plan of a composed configuration.

        An application may change its configuration later; as long as the job is the same, so is
        the plan, whatever became of the planned fields.

        Raises:
            NestError: if there is none.
        """
        view = view_of(root)
        job = _digest(_job_of(view))
        known = self._of_root.get(id(root))
        if known is not None and known[0]() is root and known[1] == job:
            return known[2]
        found = self._found(view, _digest(view.raw), job)
        key = id(root)
        reference = weakref.ref(root, lambda _: self._of_root.pop(key, None))
        self._of_root[key] = (reference, job, found)
        self.latest = found
        return found

    def _found(self, view: AppView, whole: str, job: str) -> AppPlan:
        if whole not in self._known:
            if getattr(self._planning, "on", False):
                raise UserInputError(
                    "${nest:...}",
                    value=None,
                    limit="the model or the batch is computed from a value of the plan, which is "
                    "made for that model and batch",
                    fix="State num_layers, global_batch_size and the like without the plan.",
                )
            self._planning.on = True
            try:
                environment = launched(os.environ)
                found = plan_app(view, environment)
                require_same_plan(found.plan, job, environment)
                self._known[whole] = found
            finally:
                self._planning.on = False
        return self._known[whole]


#: Of this process.
PLANS = Plans()


def _job_of(view: AppView) -> Any:
    """All that a plan is made for: the configuration without the planned choices."""
    places = {view.place(item) for _, item in view.uses()}
    places |= {view.place(item) for item in _ITEMS}
    return _without(view.raw, "", places)


def _without(node: Any, path: str, places: set[str | None]) -> Any:
    if not isinstance(node, Mapping):
        return node
    inside = {name: f"{path}.{name}" if path else str(name) for name in node}
    return {
        name: _without(node[name], where, places)
        for name, where in inside.items()
        if where not in places
    }


def _digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain, default=str, sort_keys=True).encode()).hexdigest()[:16]
