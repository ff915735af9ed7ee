"""Fields of a framework's configuration by dotted path: read, compared, and set all or nothing.

Works on plain objects and on Fiddle's ``Config`` and ``Partial`` alike, and loads neither. How
layers run has megatron-core's own names in the model's configuration; both NeMo and Megatron-Bridge
copy some of them from an object of overlap settings over it, which takes what is unset as off.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.cost_model.target_defaults import (
    GRAPHS_OF_THE_JOB,
    OF_THE_JOB,
    OFFLOADS_OF_THE_JOB,
)
from nest_megatron.cost_model.targets import Target
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, message_line
from nest_megatron.layout.diff import Change
from nest_megatron.layout.execution_rules import (
    EXECUTION_ARGUMENTS,
    EXECUTION_FIELDS,
    allowed_execution,
    execution_arguments,
)
from nest_megatron.layout.knobs import KNOBS, execution_reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.options import contradicted
from nest_megatron.model.execution import OF_LAYERS, PLAIN, ContextTraffic
from nest_megatron.plain import frozen, to_plain

#: Where the configurations of frameworks hold what a plan reads and writes.
FIELDS = packaged(__package__, "recipe_fields.toml")
#: A field that is not there.
ABSENT: Any = object()
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


#: A field as a plan wants it: path (``trainer.callbacks[2].tp_comm_overlap``), value and reason.
FieldValue = tuple[str, Any, str]


class Configuration:
    """A framework's configuration, and where it has what a plan reads and writes (``FIELDS``).

    Attributes:
        root: the configuration.
        target: the framework and its release.
        items: item of a plan -> its field.
        model, data, ddp: configurations of the model, of the data and of data parallelism.
        pipeline_types: fields of the number format between stages; the first is written.
        seq_length: what user buffers are tuned for.
        rampup_batch_size, iterations: how the batch grows, and the number of steps of the run.
        called: what the configuration is called in errors, in front of a path.
    """

    items: Mapping[str, str]
    model: str
    data: str
    ddp: str
    pipeline_types: tuple[str, str]
    ckpt_format: str
    async_save: str
    seq_length: str
    rampup_batch_size: str
    iterations: str
    called: str

    def __init_subclass__(cls, framework: str = "") -> None:
        if not framework:
            return
        table = FIELDS[framework]
        for name, text in table["fields"].items():
            setattr(cls, name, text)
        for name, paths in table["paths"].items():
            setattr(cls, name, tuple(paths.split()))
        rows = ((part, name) for part, names in table["items"].items() for name in names.split())
        cls.items = {name: f"{part}.{name}" for part, name in rows}

    def __init__(self, root: Any, target: Target) -> None:
        self.root = root
        self.target = target

    def find(self, path: str) -> Any:
        """The value at a path, or ``ABSENT``."""
        return find(self.root, path)

    def value(self, path: str) -> Any:
        """The value at a path; ``None`` where there is nothing."""
        found = self.find(path)
        return None if found is ABSENT else found

    def whole(self, path: str) -> int:
        """A whole number of at least 1 at a path; ``UserInputError`` if there is none."""
        value = self.value(path)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise UserInputError(
            f"{self.called}.{path}" if self.called else path,
            value,
            "it must be a whole number of at least 1",
            f"Set it in the {self.called or 'configuration'}.",
        )


#: Items of a plan whose names among Megatron-LM's arguments are others.
ARGUMENTS = {
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
}
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def layout_text(layout: Any) -> str | None:
    """A pipeline layout as text, from any form that megatron-core takes.

    >>> layout_text([["embedding", "decoder"], ["decoder", "loss"]])
    'Et|tL'
    """
    layout = getattr(layout, "input_data", layout)  # megatron-core's own parsed form
    if layout is None or isinstance(layout, str):
        return layout
    try:
        return "|".join(
            "".join(_LETTERS[str(getattr(unit, "name", unit)).strip().lower()] for unit in stage)
            for stage in layout
        )
    except (KeyError, TypeError) as error:
        raise UserInputError(
            "pipeline_model_parallel_layout",
            layout,
            f"a stage is a list of {', '.join(_LETTERS)}",
            "Write for example 'Et*4|t*4L'.",
        ) from error


def megatron_arguments(items: Mapping[str, Any]) -> dict[str, Any]:
    """A framework's items by the names of Megatron-LM's arguments.

    A layout of stages is text, and says the virtual stages.
    """
    found = dict(items)
    virtual = "virtual_pipeline_model_parallel_size"
    layout = "pipeline_model_parallel_layout"
    found[layout] = layout_text(found.get(layout))
    if found.get(virtual) == 1 or found[layout] is not None:
        found.pop(virtual, None)
    return {ARGUMENTS.get(item, item): value for item, value in found.items()}


def lightning_precision(stated: object, where: str) -> Precision:
    """The number format that Lightning's word for one (``bf16-mixed``) means, if there is one."""
    short = str(stated).removesuffix("-mixed").removesuffix("-true")
    short = {"16": "fp16", "32": "fp32"}.get(short, short)
    if short not in ("bf16", "fp16", "fp32"):
        raise UserInputError(
            where, stated, "number formats of training are bf16, fp16 and 32", "Use bf16-mixed."
        )
    return Precision(short)


def attribute(holder: Any, name: str) -> Any:
    """An attribute, or ``ABSENT``.

    Fiddle gives a parameter's default where nothing is set, but refuses to call a dataclass
    field's default factory; it is called here, and there is none where it needs what is not
    installed (NeMo's stack of Mamba layers).
    """
    try:
        return getattr(holder, name)
    except AttributeError:
        return ABSENT
    except ValueError:
        field = getattr(holder.__fn_or_cls__, "__dataclass_fields__", {})[name]
        try:
            return field.default_factory()
        except (ImportError, NameError):
            return ABSENT


def value_or(holder: Any, name: str, default: Any = None) -> Any:
    """An attribute, or a default where it is absent or ``None``."""
    found = attribute(holder, name)
    return default if found is ABSENT or found is None else found


def find(root: Any, path: str) -> Any:
    """The value at a path, or ``ABSENT`` if any step of it is not there."""
    for name, index in _STEP.findall(path):
        if name:
            root = attribute(root, name)
        else:
            each = root if isinstance(root, Sequence) else [root]  # the one in the place of a list
            root = each[int(index)] if int(index) < len(each) else ABSENT
        if root is ABSENT:
            break
    return root


def classes_of(holder: Any) -> tuple[type, ...]:
    """An object's class and its bases; for a Fiddle buildable, those of what it builds."""
    built = getattr(holder, "__fn_or_cls__", type(holder))
    found: tuple[type, ...] = getattr(built, "__mro__", (built,))
    return found


def class_names(holder: Any) -> tuple[str, ...]:
    """Names of an object's class and its bases."""
    return tuple(base.__name__ for base in classes_of(holder))


def changed_fields(
    holder: Any, classes: Collection[str], known: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Fields that are not known and differ from what a class makes of them, with their values.

    Args:
        classes: names of those whose defaults count, the first among the bases of the holder's own;
            a field that they do not have differs where it is neither empty nor off.
        known: fields to pass over.
    """
    bases = classes_of(holder)
    defaults: dict[str, Field[Any]] = next(
        (vars(base).get("__dataclass_fields__", {}) for base in bases if base.__name__ in classes),
        {},
    )
    own = getattr(bases[0], "__dataclass_fields__", {})
    set_here = getattr(holder, "__arguments__", None) or getattr(holder, "__dict__", {})
    for name in dict.fromkeys((*own, *set_here)):
        value = attribute(holder, name)
        if name in known or name.startswith("_") or value is ABSENT:
            continue
        default: Any = MISSING
        if (default_field := defaults.get(name)) is not None:
            factory = default_field.default_factory
            default = default_field.default if factory is MISSING else factory()
        default = None if default is MISSING else default
        if value != default and (value or default):
            yield name, value


def short_text(value: Any) -> str:
    """A value in a few letters: of a configuration inside, its kind alone.

    >>> short_text(["mlp"]), short_text(type("Sizes", (), {})())
    ("['mlp']", 'Sizes')
    >>> short_text([type("Callback", (), {})()])
    '[Callback]'
    """
    if isinstance(value, list | tuple) and not all(map(_is_plain, value)):
        return f"[{', '.join(map(short_text, value))}]"
    return str(value) if _is_plain(value) else class_names(value)[0]


def _is_plain(value: Any) -> bool:
    plain = value is None or isinstance(value, int | float | str | list | tuple)
    return plain or type(value).__module__ == "torch"


def changes(root: Any, wanted: Iterable[FieldValue]) -> tuple[Change, ...]:
    """What differs from what is wanted; nothing is set. A field that does not exist is refused."""
    found = []
    for path, value, reason in wanted:
        before = find(root, path)
        if before is not ABSENT:
            old, new = to_plain(before), to_plain(value)
            are_lists = isinstance(old, list) and isinstance(new, list)
            if path.endswith("recompute_modules") and are_lists:
                old, new = set(old), set(new)  # in whatever order
            if old != new:
                found.append(Change(field=path, before=before, after=value, reason=reason))
        # what a framework does that has no such field: one rank, off, or unset
        elif not (
            value is None or value is False or (value in (1, "no_shard") and value is not True)
        ):
            raise UserInputError(
                path,
                value,
                "the installed framework has no such field, and the plan needs it",
                "Upgrade the framework, or plan again with this choice fixed at its default.",
            )
    return tuple(found)


def set_fields(root: Any, changed: tuple[Change, ...]) -> tuple[Change, ...]:
    """Set every field, or none: where one is refused, those before it get their values back."""
    done: list[Change] = []
    for change in changed:
        try:
            _set(root, change.field, change.after)
        except (AttributeError, TypeError, ValueError) as error:
            for earlier in reversed(done):
                _set(root, earlier.field, earlier.before)
            raise UserInputError(
                change.field,
                change.after,
                f"the configuration refuses it: {message_line(error)}",
                "Report it with the framework's version; nothing was changed.",
            ) from error
        done.append(change)
    return changed


def _set(root: Any, path: str, value: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(find(root, parent), name, value)


#: Settings that such an object has, where it has them: NeMo's has the first alone.
OVERLAPPED = ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute")
_OF_EXPERTS = frozenset(knob.name for knob in KNOBS if knob.of_experts)


@frozen
class ExecutionPlaces:
    """Where a configuration says how layers run.

    Args:
        overlap: paths of the objects whose ``OVERLAPPED`` the framework copies over the model's.
        lacks: field of ``Execution`` -> why the framework cannot have it here.
        forced: settings that something puts over the model's as training starts.
        graph_switches: what graphs of layers need on; without any, graphs are the job's own.
    """

    recipe: Configuration
    overlap: tuple[str, ...] = ()
    lacks: Mapping[str, str] = field(default_factory=dict)
    forced: Mapping[str, object] = field(default_factory=dict)
    graph_switches: tuple[str, ...] = ()

    def paths(self, argument: str) -> tuple[str, ...]:
        """Paths of a setting that counts."""
        inside = (f"{path}.{argument}" for path in self.overlap if argument in OVERLAPPED)
        found = tuple(path for path in inside if self.recipe.find(path) is not ABSENT)
        return found or (f"{self.recipe.model}.{argument}",)

    def can_state(self) -> frozenset[str]:
        """Fields of ``Execution`` that a plan can write there."""
        names = {knob.name for knob in KNOBS} - OF_THE_JOB - {*self.lacks}
        return frozenset(filter(self._present, names))

    def choices(self) -> dict[str, str]:
        """The field of each choice that is a single one."""
        groups = {knob.group for knob in KNOBS}
        return {k.name: self.paths(k.name)[0] for k in KNOBS if k.choice not in groups}

    def values(self) -> dict[str, Any]:
        """What the configuration means by these settings: what it lacks or leaves unset is off."""
        found = {name: self._meant(name) for name in EXECUTION_FIELDS}
        if self.recipe.find(f"{self.recipe.model}.cpu_offloading") is False:
            found["cpu_offloading_num_layers"] = 0
        if (
            "hierarchical_context_parallel_sizes" in self.lacks
            and _first(found["cp_comm_type"]) == ContextTraffic.A2A_P2P
        ):
            found["cp_comm_type"] = None
        return found

    def fields(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """Yield fields with which layers run as priced; refuse what the framework lacks."""
        version = self.recipe.target.megatron_core
        wanted = allowed_execution(plan.layout.execution, plan.layout)
        planned = execution_arguments(wanted, version)
        planned["cpu_offloading"] = wanted.cpu_offloading_num_layers > 0
        planned["cuda_graph_scope_deprecated"] = planned["cuda_graph_modules"]
        if self._value("cuda_graph_modules") is not ABSENT:  # 0.19 refuses both
            planned["cuda_graph_scope"] = None
        stated = self.values()
        asked, changed = (
            {knob.name for knob in KNOBS if getattr(wanted, knob.name) != getattr(each, knob.name)}
            for each in (PLAIN, execution_of(stated))
        )
        raw = {
            name: value
            for name in EXECUTION_FIELDS
            if (value := self._value(name)) not in (ABSENT, None, "")
        }
        levels = ContextTraffic.A2A_P2P  # a framework that makes no two would train without any
        idle = _first(raw.get("cp_comm_type")) == levels and wanted.cp_comm_type is not levels
        refused = contradicted(plan, raw, version)
        in_graphs = wanted.cuda_graph_impl in OF_LAYERS
        lacking = {
            **OFFLOADS_OF_THE_JOB,
            **({} if self.graph_switches and in_graphs else GRAPHS_OF_THE_JOB),
            **self.lacks,
        }
        for names in EXECUTION_ARGUMENTS.values():
            fields = dict.fromkeys(EXECUTION_FIELDS[name] for name in names)
            of_experts = _OF_EXPERTS.issuperset(fields) and refused.keys().isdisjoint(names)
            if of_experts and not plan.model.is_moe:
                continue
            differs = not changed.isdisjoint(fields) or ("cp_comm_type" in fields and idle)
            for name in fields:
                if name in lacking and name in asked & changed:
                    raise UserInputError(
                        name,
                        getattr(wanted, name),
                        lacking[name],
                        "Set it up in the job, or plan the job itself (auto_recipe) with what it "
                        "has.",
                    )
                switch = getattr(wanted, name)  # another one would contradict the plan's
                differs |= isinstance(switch, bool) and bool(stated[name]) != switch
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
        for path in self.graph_switches if in_graphs else ():
            yield path, True, "random numbers inside CUDA graphs are drawn by this tracker"

    def _value(self, argument: str) -> Any:
        return self.recipe.find(self.paths(argument)[0])

    def _present(self, name: str) -> list[str]:
        """The settings of a field that the configuration has."""
        names = [argument for argument, of in EXECUTION_FIELDS.items() if of == name]
        names += ["cpu_offloading"] if name == "cpu_offloading_num_layers" else []
        return [each for each in names if self._value(each) is not ABSENT]

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


#: Megatron's name of a setting -> other names for it in configurations.
SPELLINGS: Mapping[str, list[str]] = {k: v.split() for k, v in FIELDS["spellings"].items()}
#: Settings that follow from the number format, which each reader finds in a way of its own.
_OF_PRECISION = ("bf16", "fp16", "fp8", "fp8_recipe", "params_dtype")


def memory_fields(*holders: Any) -> Mapping[str, Any]:
    """Settings besides the layout that memory depends on, by Megatron's names.

    The frameworks keep them in several objects: the recipe of mixed precision, the model's, the
    optimizer's and data parallelism's configuration. The first holder's word counts: the one whose
    settings the framework copies over the others'; ``None`` is passed over.
    """
    stated = {
        name: next(values_of(holders, name), None) for name in READ if name not in _OF_PRECISION
    }
    stated["num_distributed_optimizer_instances"] = max(
        map(int, values_of(holders, "num_distributed_optimizer_instances")), default=None
    )
    wide = next(values_of(holders, "grad_reduce_in_fp32"), None)
    if wide is not None:
        stated["accumulate_allreduce_grads_in_fp32"] = bool(wide)
        stated["grad_reduce_in_bf16"] = not wide
    return {name: value for name, value in stated.items() if value is not None}


def values_of(holders: Iterable[Any], name: str) -> Iterator[Any]:
    """What objects say of a setting, under any of its names; ``None`` is passed over."""
    for holder in holders:
        for spelled in SPELLINGS.get(name, (name,)):
            if (value := value_or(holder, spelled)) is not None:
                yield value
