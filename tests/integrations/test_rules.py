"""Every rule fires on a request that breaks it, and on no sound plan."""

from __future__ import annotations

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.rules import RULES, check, require_launchable
from nest_megatron.model.execution import GraphImpl
from nest_megatron.parallel.degree_rules import is_legal_grid
from nest_megatron.parallel.rules import launched_expert_tensor_size
from tests.contract.hand_models import LLAMA, MIXTRAL
from tests.integrations.requests import BROKEN, SECOND, SOUND, carried, dims


@pytest.mark.parametrize("name", SOUND)
def test_sound_plans_break_no_rule(name: str) -> None:
    sound = SOUND[name]
    assert not tuple(check(sound))
    require_launchable(sound)
    assert is_legal_grid(sound.spec, sound.dims, sequence_parallel=sound.sequence_parallel)


@pytest.mark.parametrize("name", BROKEN)
def test_each_rule_names_its_breach(name: str) -> None:
    broken = [rule.name for rule, _ in check(BROKEN[name])]
    assert name in broken
    with pytest.raises(UserInputError, match="Megatron-LM"):
        require_launchable(BROKEN[name])


def test_every_rule_has_a_breach_and_a_source() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert set(names) - {"layout_grammar"} == set(BROKEN)
    assert all(rule.source for rule in RULES)


def test_a_graph_of_the_step_holds_the_experts_of_the_newer_release() -> None:
    whole = {"cuda_graph_impl": GraphImpl.FULL_ITERATION}
    new = carried(MIXTRAL, dims(dp=2), {"version": "0.20"}, **whole)
    assert "graphs_experts" not in [rule.name for rule, _ in check(new)]
    with pytest.raises(UserInputError, match="cuda_graph_impl = 'full_iteration': experts without"):
        require_launchable(carried(MIXTRAL, dims(dp=2), **whole))


def test_dense_models_may_use_the_second_rank_order_with_context_parallelism() -> None:
    grid = dims(tp=2, cp=2, pp=2, rank_order=SECOND)
    assert launched_expert_tensor_size(LLAMA, grid) == 4
    assert launched_expert_tensor_size(LLAMA, dims(tp=2, cp=2, pp=2)) is None
    assert launched_expert_tensor_size(MIXTRAL, grid) == 1
