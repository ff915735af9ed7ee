"""A rule of Megatron as a row: what it reads, when it holds, what a user is told."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field

from nest_megatron.errors import UserInputError
from nest_megatron.layout.rulebook.facts import Facts, is_within, parameters, sources
from nest_megatron.model.execution import PLAIN, Execution

#: Files of Megatron-LM as sources of rules shorten them.
_FILES = {
    "args": "arguments.py",
    "tc": "transformer_config.py",
    "ps": "parallel_state.py",
    "mpc": "model_parallel_config.py",
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of Megatron.

    Args:
        id: short and stable, for tests and messages.
        source: where Megatron enforces it.
        holds: whether the facts that its parameters name keep it.
        what: the facts to blame, by Megatron's names.
        limit, fix: with ``{fact}`` for a fact, as ``what`` may be.
        value: the fact that is shown, where it is not ``what``; or a function of facts.
        words: facts that its own texts name, each worked out of others.
        reason: what the certificate of a search counts it as; empty where it does not.
        since, until: the first and the last release that have it; empty where all have.
        framework: the only one that has it.
        when: a field of ``Execution``; at its default the rule holds.
        option: ``what`` is an option of the job's own, which the rule looks at where it is on.
        turns_off: the option is a switch that turns something off: it is on where the value is not.

    Attributes:
        names: the facts that ``holds`` reads.
        reads: all that decide it: facts in whose place stand those that they follow from.
    """

    id: str
    source: str
    holds: Callable[..., bool]
    what: str
    limit: str
    fix: str
    _: KW_ONLY
    value: str | Callable[..., object] = ""
    words: Mapping[str, Callable[..., object]] = field(default_factory=dict, hash=False)
    reason: str = ""
    since: str = ""
    until: str = ""
    framework: str = ""
    when: str = ""
    option: bool = False
    turns_off: bool = False
    names: tuple[str, ...] = field(init=False)
    reads: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        others = {"execution": self.when, "options": self.option}
        names = parameters(self.holds)
        read = [each for name in (*names, *filter(others.get, others)) for each in sources(name)]
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "reads", tuple(dict.fromkeys(read)))

    @property
    def file(self) -> str:
        """``source`` with the names of files whole, for a message."""
        return re.sub(r"\b(args|tc|ps|mpc)\b", lambda found: _FILES[found[1]], self.source)

    def keeps(self, facts: Facts) -> bool:
        """Whether facts keep it."""
        dated = self.since or self.until
        if dated and not is_within(facts["version"], self.since, self.until):
            return True
        if self.when and not self.concerns(facts["execution"]):
            return True
        if self.option:
            facts["option"] = facts["options"].get(self.what, self.turns_off)
            if bool(facts["option"]) is self.turns_off:
                return True
        return bool(facts.read(self.holds))

    def concerns(self, execution: Execution) -> bool:
        """Whether it looks at layers whose work is done so."""
        return not self.when or getattr(execution, self.when) != getattr(PLAIN, self.when)

    def violation(self, facts: Facts) -> UserInputError:
        """What breaks it, where it is broken, in words for a user."""
        facts = Facts(facts, **{name: facts.read(word) for name, word in self.words.items()})
        what = self.what.format_map(facts)
        if isinstance(self.value, str):
            values = [facts[name] for name in (self.value or what).split(", ")]
            value = tuple(values) if values[1:] else values[0]
        else:
            value = facts.read(self.value)
        limit, fix = self.limit.format_map(facts), self.fix.format_map(facts)
        return UserInputError(what, value, limit, fix)


def violations(facts: Facts, rules: Iterable[Rule]) -> Iterator[tuple[Rule, UserInputError]]:
    """Every broken rule, in the order of the rules."""
    return ((rule, rule.violation(facts)) for rule in rules if not rule.keeps(facts))
