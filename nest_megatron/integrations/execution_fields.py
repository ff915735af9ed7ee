"""How layers are carried out, in the fields of NeMo's and Megatron-Bridge's configurations.

Both keep megatron-core's own names in the model's configuration, and copy some of them from an
object of overlap settings over it, which takes what is unset there as off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.target_defaults import (
    GRAPHS_OF_THE_JOB,
    OF_THE_JOB,
    OFFLOADS_OF_THE_JOB,
)
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, FieldValue, find
from nest_megatron.integrations.megatron_lm.attach import launch_request
from nest_megatron.layout.execution_rules import (
    EXECUTION_ARGUMENTS,
    EXECUTION_FIELDS,
    execution_arguments,
)
from nest_megatron.layout.knobs import KNOBS, execution_reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.options import contradicted
from nest_megatron.model.execution import OF_LAYERS, PLAIN, ContextTraffic, Execution

#: Settings that such an object has, where it has them: NeMo's has the first alone.
OVERLAPPED = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
_OF_EXPERTS = frozenset(knob.name for knob in KNOBS if knob.of_experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionPlaces:
    """Where a configuration says how layers are carried out.

    Args:
        root: the configuration.
        model: path of the model's configuration in it.
        version: the release of megatron-core.
        overlap: paths of the objects whose ``OVERLAPPED`` the framework copies over the model's.
        lacks: field of ``Execution`` -> why the framework cannot have it here.
        forced: settings that something puts over the model's as training starts.
        beside_graphs: switches that graphs of layers need on; without any, those are the job's own.
    """

    root: Any
    model: str
    version: str
    overlap: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    forced: Mapping[str, object] = field(default_factory=dict)
    beside_graphs: tuple[str, ...] = ()

    def paths(self, argument: str) -> tuple[str, ...]:
        """Paths of a setting that counts."""
        inside = (f"{path}.{argument}" for path in self.overlap if argument in OVERLAPPED)
        found = tuple(path for path in inside if find(self.root, path) is not ABSENT)
        return found or (f"{self.model}.{argument}",)

    def can_state(self) -> frozenset[str]:
        """Fields of ``Execution`` that a plan can write there."""
        names = {knob.name for knob in KNOBS} - OF_THE_JOB - {*self.lacks}
        return frozenset(name for name in names if self._present(name))

    def choices(self) -> dict[str, str]:
        """The field of each choice that is a single one."""
        groups = {knob.group for knob in KNOBS}
        single = (knob.name for knob in KNOBS if knob.choice not in groups)
        return {name: self.paths(name)[0] for name in single}

    def stated(self) -> dict[str, Any]:
        """What the configuration means by these settings: what it lacks or leaves unset is off."""
        found = {name: self._meant(name) for name in EXECUTION_FIELDS}
        if find(self.root, f"{self.model}.cpu_offloading") is False:
            found["cpu_offloading_num_layers"] = 0
        if (
            "hierarchical_context_parallel_sizes" in self.lacks
            and _first(found["cp_comm_type"]) == ContextTraffic.A2A_P2P
        ):
            found["cp_comm_type"] = None
        return found

    def unforced(self) -> dict[str, Any]:
        """What the model's configuration itself says of the settings that something puts over."""
        own = dataclasses.replace(self, forced={})
        return {name: own._meant(name) for name in self.forced}

    def fields(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """What carries layers out as priced; a choice that the framework lacks is refused."""
        wanted = launch_request(plan, version=self.version).execution
        planned = execution_arguments(wanted, self.version)
        planned["cpu_offloading"] = wanted.cpu_offloading_num_layers > 0
        planned["cuda_graph_scope_deprecated"] = planned["cuda_graph_modules"]
        if self._value("cuda_graph_modules") is not ABSENT:  # 0.19 refuses both
            planned["cuda_graph_scope"] = None
        stated = self.stated()
        asked, changed = _unlike(wanted, PLAIN), _unlike(wanted, execution_of(stated))
        values = {name: self._value(name) for name in EXECUTION_FIELDS}
        raw = {name: value for name, value in values.items() if value not in (ABSENT, None, "")}
        levels = ContextTraffic.A2A_P2P  # a framework that makes no two would train without any
        idle = _first(raw.get("cp_comm_type")) == levels and wanted.cp_comm_type is not levels
        refused = contradicted(plan, raw, self.version)
        in_graphs = wanted.cuda_graph_impl in OF_LAYERS
        own = {} if self.beside_graphs and in_graphs else GRAPHS_OF_THE_JOB
        lacking = {**OFFLOADS_OF_THE_JOB, **own, **self.lacks}
        for names in EXECUTION_ARGUMENTS.values():
            fields = dict.fromkeys(EXECUTION_FIELDS[name] for name in names)
            if not plan.model.is_moe and _OF_EXPERTS.issuperset(fields):
                continue
            for name, why in lacking.items():
                if name in fields and name in asked and name in changed:
                    raise UserInputError(
                        name,
                        getattr(wanted, name),
                        why,
                        "Set it up in the job, or plan the job itself (auto_recipe) with what it "
                        "has.",
                    )
            switches = {name: getattr(wanted, name) for name in fields}
            differs = not changed.isdisjoint(fields) or ("cp_comm_type" in fields and idle)
            differs |= any(  # a switch would be beside the plan's
                isinstance(value, bool) and bool(stated[name]) != value
                for name, value in switches.items()
            )
            for name in fields:
                arguments = self._present(name)
                if not differs:  # what the framework lacks has no effect, and is set all the same
                    arguments = arguments if name in self.lacks else []
                elif not arguments and name in asked:
                    arguments = [name]
                why = "belongs to the choice beside it"
                if name == "cp_comm_type":
                    why = self.lacks.get("hierarchical_context_parallel_sizes", why)
                if name in changed:
                    why = "this plan is priced without it"
                if name in asked:
                    why = execution_reason(name)
                why = self.lacks.get(name, why)
                for argument in arguments:
                    for path in self.paths(argument):
                        yield path, planned[argument], refused.get(argument) or why
        for path in self.beside_graphs if in_graphs else ():
            yield path, True, "random numbers inside CUDA graphs are drawn by this tracker"

    def _value(self, argument: str) -> Any:
        return find(self.root, self.paths(argument)[0])

    def _present(self, name: str) -> list[str]:
        """The settings of a field that the configuration has."""
        names = [argument for argument, of in EXECUTION_FIELDS.items() if of == name]
        beside = ["cpu_offloading"] if name == "cpu_offloading_num_layers" else []
        return [each for each in names + beside if self._value(each) is not ABSENT]

    def _meant(self, argument: str) -> Any:
        if EXECUTION_FIELDS[argument] in self.lacks:
            return False
        if argument in self.forced:
            return self.forced[argument]
        value = self._value(argument)
        if value == "allgather" and argument == "cp_comm_type":  # so Megatron spells it with dsa
            return ContextTraffic.ALL_GATHER.value
        return False if value is ABSENT or value is None else value


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list | tuple) and value else value


def _unlike(wanted: Execution, other: Execution) -> set[str]:
    """Fields of two executions that differ."""
    names = (knob.name for knob in KNOBS)
    return {name for name in names if getattr(wanted, name) != getattr(other, name)}


def execution_items(plan: ParallelPlan) -> dict[str, Any]:
    """The same choices by Megatron's names, whatever the job has, in plain values."""
    request = launch_request(plan)
    values = execution_arguments(request.execution, request.version)
    return {knob.name: values[knob.name] for knob in KNOBS}
