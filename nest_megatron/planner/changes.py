"""What lies between two layouts of a job: each choice alone, and one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any

from nest_megatron.caching import Caching, cached_by
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import DEGREES, ParallelDims
from nest_megatron.layout.estimate import Changes, ChoiceChange, LayoutChange
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.stage_layout import StagePartition, layout_string, spread_partition
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.layouts import PredictedLayout, Pricing, Variant, difference, pricing
from nest_megatron.planner.request import Request

#: Why Megatron refuses a layout, or nothing.
Refusal = Callable[[Variant], str]

_CHOSEN_DEGREES = tuple(name for name in DEGREES if name != "data_parallel_size")
_PP, _VPP = "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"
_STAGES, _ZERO = "pipeline_model_parallel_layout", "zero_stage"
_REDUCES, _GATHERS = "overlap_grad_reduce", "overlap_param_gather"
_OVERLAPS_P2P = "overlap_p2p_comm"
_FIELDS = tuple(each.name for each in dataclasses.fields(Execution) if each.init)
_CHOICES = {knob.name: knob.choice for knob in KNOBS}
_OF_EXECUTION = tuple(dict.fromkeys(_CHOICES.get(name, name) for name in _FIELDS))


def changes(request: Request, before: Variant, after: Variant, refusal: Refusal) -> Changes:
    """What each choice that differs between two layouts brings.

    In order, the choice comes first that leaves the shortest step of those that are legal and fit
    in memory. Where no choice is legal by itself, the fewest are changed together.

    Args:
        before: a layout that Megatron launches.
        refusal: why Megatron does not launch a layout.
    """
    between, price = _Between(request.spec, before, after, refusal), pricing(request)
    first, last = price(before), price(after)
    alone = []
    for name in between.names:
        layout, rule = between.layout(frozenset({name}))
        words = between.words([name])
        if layout is None:
            alone.append(LayoutChange(choices=words, rule=rule))
        else:
            alone.append(_change(words, first, price(layout)))
    return Changes(
        alone=tuple(alone),
        in_order=tuple(_in_order(between, price, first)),
        whole=difference(first, last),
    )


def _in_order(between: _Between, price: Pricing, now: PredictedLayout) -> Iterator[LayoutChange]:
    done: frozenset[str] = frozenset()
    while left := [name for name in between.names if name not in done]:
        taken, rule = _next(between, price, done, left)
        layout, _ = between.layout(done | {*taken})
        assert layout is not None, "the last layout is one that Megatron launches"
        then = price(layout)
        yield _change(between.words(taken), now, then, rule)
        now, done = then, done | {*taken}


def _next(
    between: _Between, price: Pricing, done: frozenset[str], left: list[str]
) -> tuple[tuple[str, ...], str]:
    """The choices to change next, and the rule for which it is not one alone."""
    for number in range(1, len(left)):
        legal = []
        for order, names in enumerate(combinations(left, number)):
            layout, _ = between.layout(done | {*names})
            if layout is not None:
                found = price(layout).predicted
                legal.append((not found.fits, found.iteration_time_s, order, names))
        if legal:
            taken = min(legal)[-1]
            return taken, between.rule(done, taken)
    return tuple(left), between.rule(done, left)


def _change(
    words: tuple[ChoiceChange, ...], now: PredictedLayout, then: PredictedLayout, rule: str = ""
) -> LayoutChange:
    return LayoutChange(
        choices=words,
        rule=rule,
        step_s=then.predicted.iteration_time_s,
        difference=difference(now, then),
        peak_memory_bytes=then.predicted.peak_memory_bytes,
        fits=then.predicted.fits,
    )


class _Between(Caching):
    """The layouts between two of a job: some choices of the one, the rest of the other."""

    def __init__(
        self, spec: TransformerSpec, before: Variant, after: Variant, refusal: Refusal
    ) -> None:
        self._spec, self._refusal = spec, refusal
        self._before, self._after = before, after
        self._old, self._new = _values(before), _values(after)
        self._follow()
        self.names = [name for name, value in self._old.items() if value != self._new[name]]

    def _follow(self) -> None:
        """Leave out what follows from other choices and is none by itself."""
        old, new, tp = self._old, self._new, "tensor_model_parallel_size"
        if (old[_PP], old[_VPP]) != (new[_PP], new[_VPP]):
            old[_STAGES] = new[_STAGES]
        if min(old[tp], new[tp]) == 1:
            old["sequence_parallel"] = new["sequence_parallel"] = True
        if new[_ZERO][0] is ZeroStage.NONE:  # no weights are gathered
            new[_GATHERS] = old[_GATHERS]
        kept = allowed_execution(self._before.layout.execution, self._after.layout)
        if kept == self._after.layout.execution:
            for name in {_CHOICES.get(each, each) for each in _FIELDS}:
                new[name] = old[name]

    def words(self, names: Any) -> tuple[ChoiceChange, ...]:
        """Choices as they are said."""
        return tuple(
            ChoiceChange(
                name=name,
                before=self._word(name, self._before, self._old[name]),
                after=self._word(name, self._after, self._new[name]),
            )
            for name in names
        )

    def _word(self, name: str, variant: Variant, value: Any) -> str:
        if name == _STAGES:
            return layout_string(self._spec, variant.layout.partition)
        if name == _REDUCES:
            return "on" if variant.settings.dp_overlap else "off"
        return _word(value)

    def rule(self, done: frozenset[str], taken: Any) -> str:
        """Why some choices are changed together; nothing for one."""
        if len(taken) == 1:
            return ""
        return next(filter(None, (self.layout(done | {name})[1] for name in taken)), "")

    def layout(self, chosen: frozenset[str]) -> tuple[Variant | None, str]:
        """The layout with these choices changed, or the rule that refuses it."""
        if chosen.issuperset(self.names):
            return self._after, ""
        return self._checked(chosen)

    @cached_by(lambda _, chosen: chosen)
    def _checked(self, chosen: frozenset[str]) -> tuple[Variant | None, str]:
        try:
            layout, wanted = self._made(chosen)
        except UserInputError as error:
            return None, f"{error.what} = {error.value}: {error.limit}"
        rule = self._without_effect(layout, wanted, chosen) or self._refusal(layout)
        return (None, rule) if rule else (layout, "")

    def _made(self, chosen: frozenset[str]) -> tuple[Variant, Execution]:
        """The layout, and the execution that its choices name."""
        new, old = self._new, self._old
        value = {name: (new if name in chosen else old)[name] for name in old}
        zero, sharding = value[_ZERO]
        grid = PartialLayout(
            dims=_dims(value),
            global_batch_size=self._before.layout.global_batch_size,
            micro_batch_size=value["micro_batch_size"],
            sequence_parallel=value["sequence_parallel"]
            and value["tensor_model_parallel_size"] > 1,
            recompute=value["recompute"],
            zero=zero,
        )
        wanted = Execution(**{f: part for each in _OF_EXECUTION for f, part in value[each]})
        grid = dataclasses.replace(grid, execution=allowed_execution(wanted, grid))
        stages = self._partition(grid.dims, with_stages=_STAGES in chosen)
        settings = self._after.settings
        overlaps = {name: value[name] for name in (_GATHERS, _OVERLAPS_P2P)}
        traits = dataclasses.replace(settings.traits, **overlaps)
        settings = dataclasses.replace(settings, dp_overlap=value[_REDUCES], traits=traits)
        return Variant(settings=settings, layout=grid.with_stages(stages, sharding)), wanted

    def _without_effect(self, variant: Variant, wanted: Execution, chosen: frozenset[str]) -> str:
        """Why a choice of the execution does nothing here; empty where all do."""
        lost = [
            name
            for name in _FIELDS
            if _CHOICES.get(name, name) in chosen
            and getattr(variant.layout.execution, name) != getattr(wanted, name)
        ]
        if not lost:
            return ""
        layout = dataclasses.replace(variant.layout, execution=wanted)
        rule = self._refusal(dataclasses.replace(variant, layout=layout))
        return rule or f"{lost[0]} does nothing on this layout"

    def _partition(self, dims: ParallelDims, *, with_stages: bool) -> StagePartition:
        """The stages of one of the two layouts where they are as many; otherwise even ones."""
        ends = (self._after, self._before) if with_stages else (self._before, self._after)
        for end in ends:
            if (dims.pipeline_model_parallel_size, dims.num_chunks) == (
                end.layout.partition.pipeline_model_parallel_size,
                end.layout.partition.num_chunks,
            ):
                return end.layout.partition
        return spread_partition(self._spec, dims)


def _values(variant: Variant) -> dict[str, Any]:
    """The choices of a layout by name, in the order in which they are said."""
    layout, dims = variant.layout, variant.layout.dims
    execution: dict[str, Any] = {}
    for name in _FIELDS:
        part = (name, getattr(layout.execution, name))
        execution[_CHOICES.get(name, name)] = (*execution.get(_CHOICES.get(name, name), ()), part)
    return {
        "num_gpus": dims.world_size,
        **{name: getattr(dims, name) for name in _CHOSEN_DEGREES},
        _STAGES: layout.partition.boundaries,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "recompute": layout.recompute,
        _ZERO: (layout.zero, layout.sharding),
        "rank_order": dims.rank_order,
        **execution,
        _REDUCES: variant.settings.dp_overlap,
        _GATHERS: variant.settings.traits.overlap_param_gather,
        _OVERLAPS_P2P: variant.settings.traits.overlap_p2p_comm,
    }


def _dims(value: Mapping[str, Any]) -> ParallelDims:
    """The degrees; all GPUs that are left replicate."""
    degrees = {name: value[name] for name in _CHOSEN_DEGREES}
    ranks = degrees["tensor_model_parallel_size"] * degrees["context_parallel_size"]
    replica, gpus = ranks * degrees[_PP], value["num_gpus"]
    if gpus % replica:
        raise UserInputError(
            "tp * cp * pp", replica, f"it must divide the {gpus} GPUs", "Change a degree."
        )
    return ParallelDims(
        **degrees, data_parallel_size=gpus // replica, rank_order=value["rank_order"]
    )


def _word(value: Any) -> str:
    """A choice's value as it is said."""
    if hasattr(value, "label"):
        return str(value.label())
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # of an execution
        said = [_word(part) for _, part in value if part not in (None, ())]
        return " ".join(said) or "none"
    if isinstance(value, tuple) and len(value) == 2 and hasattr(value[1], "zero_stages"):
        return f"ZeRO-{int(value[0])} ({value[1]})"
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
