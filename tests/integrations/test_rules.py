"""Every rule fires on a request that breaks it, and on no sound plan."""

from __future__ import annotations

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.layout.rulebook import RULES, check, is_legal_grid, require_launchable
from nest_megatron.layout.rulebook.degrees import launched_expert_tensor_size
from nest_megatron.layout.rulebook.facts import Rule, violations
from nest_megatron.model.execution import GraphImpl
from tests.contract.hand_models import LLAMA, MIXTRAL
from tests.integrations.requests import BROKEN, IMPOSSIBLE, OPTIONED, SECOND, SOUND, carried, dims


@pytest.mark.parametrize("name", SOUND)
def test_sound_plans_break_no_rule(name: str) -> None:
    sound = SOUND[name]
    assert not tuple(check(sound))
    require_launchable(sound)
    assert is_legal_grid(sound.spec, sound.dims, sequence_parallel=sound.sequence_parallel)


@pytest.mark.parametrize("name", BROKEN | OPTIONED)
def test_each_rule_names_its_breach(name: str) -> None:
    request = (BROKEN | OPTIONED)[name]
    broken = [rule.id for rule, _ in check(request)]
    assert name in broken
    with pytest.raises(
        UserInputError, match=r"\((Megatron-LM|megatron-core|NeMo|Megatron-Bridge) "
    ):
        require_launchable(request)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_rules_that_records_keep_are_broken_by_facts_alone(name: str) -> None:
    facts = IMPOSSIBLE[name]
    broken = dict(violations(facts, [rule for rule in RULES if rule.id == name]))
    assert [violation.limit for violation in broken.values()] != []
    assert name not in [rule.id for rule, _ in check(facts["job"])]


def test_every_rule_has_a_breach_and_a_source() -> None:
    names = [rule.id for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) == {*BROKEN, *OPTIONED, *IMPOSSIBLE}
    assert all(rule.source and rule.names for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.id)
def test_words_of_every_rule_can_be_said(rule: Rule) -> None:
    """Every placeholder is a fact, and every sentence a user's."""
    facts = IMPOSSIBLE.get(rule.id) or (BROKEN | OPTIONED)[rule.id].facts
    ((_, found),) = violations(facts, [rule])
    assert found.what
    assert found.fix.endswith(".")
    assert "{" not in f"{found.what} {found.limit} {found.fix}"


def test_a_graph_of_the_step_holds_the_experts_of_the_newer_release() -> None:
    whole = {"cuda_graph_impl": GraphImpl.FULL_ITERATION}
    new = carried(MIXTRAL, dims(dp=2), {"version": "0.20"}, **whole)
    assert "graphs_experts" not in [rule.id for rule, _ in check(new)]
    with pytest.raises(
        UserInputError, match="cuda_graph_impl = 'full_iteration': experts that nothing pads"
    ):
        require_launchable(carried(MIXTRAL, dims(dp=2), {"version": "0.16"}, **whole))


def test_dense_models_may_use_the_second_rank_order_with_context_parallelism() -> None:
    grid = dims(tp=2, cp=2, pp=2, rank_order=SECOND)
    assert launched_expert_tensor_size(LLAMA, grid) == 4
    assert launched_expert_tensor_size(LLAMA, dims(tp=2, cp=2, pp=2)) is None
    assert launched_expert_tensor_size(MIXTRAL, grid) == 1
