"""The rules of a search: each is evaluated in the step that decides the last fact that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from nest_megatron.caching import Caching, cached_by
from nest_megatron.layout.rulebook.facts import Facts, Rule
from nest_megatron.model.execution import Execution

_DENSE = ("world_size", "tp", "sequence_parallel", "cp")
_EXPERTS = (*_DENSE, "ep", "etp")
_PIPELINE = (*_EXPERTS, "micro_batch_size", "pp", "dp")
#: Facts of a layout, but for what is recomputed and how the work of its layers is done.
OF_LAYOUT = (*_PIPELINE, "rank_order", "vpp", "zero")
#: Facts that are decided at the end of each step of a search, in its order. Virtual stages, ZeRO
#: stages and recomputation are chosen apart from one another. A pipeline has one virtual stage on
#: each rank at first: what that breaks, more of them break.
STEPS: Mapping[str, tuple[str, ...]] = {
    "tensor": _DENSE[:-1],
    "context": _DENSE,
    "experts": _EXPERTS,
    "shard": (*_EXPERTS, "micro_batch_size", "uneven_sides"),
    "pipeline": (*_PIPELINE, "vpp"),
    "rank_order": (*_PIPELINE, "rank_order"),
    "virtual": (*_PIPELINE, "rank_order", "vpp"),
    "zero": (*_DENSE, "ep", "etp", "pp", "dp", "rank_order", "zero"),
    "recompute": ("recompute",),
    "execution": (*OF_LAYOUT, "recompute", "execution"),
}
#: A rule, its reason, the facts that it reads, by name and of values, and what it said of them.
_Entry = tuple[Rule, str, Sequence[str], Callable[[Any], object], dict[object, bool]]
#: All facts that a search decides.
CHOSEN = (*STEPS["execution"], "uneven_sides")


def is_searched(rule: Rule) -> bool:
    """Whether a search holds its layouts to a rule: others are of the job, or of the stages."""
    if not {"partition", "options"}.isdisjoint(rule.reads):
        return False
    return bool(rule.reason) or not {*CHOSEN}.isdisjoint(rule.reads)


class SearchStep(Caching):
    """The rules of one step, each evaluated once for the same values of what it reads.

    Args:
        known: facts that are the same for every layout of the search.
        decided: facts that this step or an earlier one decides.
        rules: in their order.

    Attributes:
        names: decided facts that the rules read.
    """

    def __init__(self, known: Facts, decided: Sequence[str], rules: Sequence[Rule]) -> None:
        self.rules, self._known = rules, known
        self.names = tuple(name for name in decided if any(name in rule.reads for rule in rules))
        self._evaluated: list[_Entry] = []
        for rule in rules:
            names = [name for name in decided if name in rule.reads] or decided[:1]
            met: dict[object, bool] = {}
            entry = (rule, rule.reason.format_map(known), names, itemgetter(*names), met)
            self._evaluated.append(entry)
        self._is_of_execution = any(rule.when for rule in rules)

    def refusal(self, values: Mapping[str, Any]) -> str | None:
        """The reason of the first rule that values break; ``None`` where they keep all.

        Values of what no rule of the step reads may be stand-ins.
        """
        return next((reason for _, reason in self._broken(values)), None)

    def broken(self, values: Mapping[str, Any]) -> list[Rule]:
        """Every rule that values break."""
        return [rule for rule, _ in self._broken(values)]

    def _broken(self, values: Mapping[str, Any]) -> Iterator[tuple[Rule, str]]:
        evaluated = self._evaluated
        if self._is_of_execution:
            evaluated = self._concerned(values["execution"])
        for rule, reason, names, read, met in evaluated:
            key = read(values)
            if key not in met:
                met[key] = rule.keeps(Facts(self._known, **{name: values[name] for name in names}))
            if not met[key]:
                yield rule, reason

    @cached_by(lambda _, execution: execution)
    def _concerned(self, execution: Execution) -> list[_Entry]:
        """The rules that an execution of layers concerns."""
        return [each for each in self._evaluated if each[0].concerns(execution)]


def search_steps(known: Facts, rules: Iterable[Rule]) -> dict[str, SearchStep]:
    """The steps of a search, each with the rules that it decides, in the order of the rules."""
    spec = known["spec"]
    left = [r for r in rules if is_searched(r) and (r.about is None or r.about(spec))]
    steps = {}
    for step, decided in STEPS.items():
        found = [rule for rule in left if {*CHOSEN}.intersection(rule.reads) <= {*decided}]
        steps[step] = SearchStep(known, decided, found)
        waiting = "vpp" if step == "pipeline" else None
        left = [rule for rule in left if rule not in found or waiting in rule.reads]
    return steps
