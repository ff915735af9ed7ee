"""A rule that is added to the table is at once kept by the search, the launch and the documents."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from itertools import islice
from types import ModuleType

import pytest

from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.layout import rulebook
from nest_megatron.layout.recompute import RecomputeModule
from nest_megatron.layout.rulebook.facts import Rule, facts_of, facts_reader
from nest_megatron.layout.rulebook.search import STEPS, is_searched, search_steps
from nest_megatron.solver.executions import known_facts, launch_request
from nest_megatron.solver.grids import GridSpace
from nest_megatron.solver.search import Search
from nest_megatron.solver.space import SearchSpace
from tests import catalogue
from tests.architecture.imports import ROOT
from tests.integrations.requests import dims, request
from tests.solver.jobs import KERNEL, families
from tests.solver.test_executions import SETTINGS

BATCH = 16
#: Predicates on what each step of a search decides, and whether the certificate counts them.
MADE_UP: dict[str, tuple[Callable[..., bool], bool]] = {
    "tensor": (lambda tp: tp != 2, True),
    "context": (lambda tp, cp: tp * cp < 4, True),
    "experts": (lambda cp, ep, etp: ep == 1 or etp == 1 or cp > 1, True),
    "shard": (lambda micro_batch_size: micro_batch_size < 2, True),
    "pipeline": (lambda spec, pp, micro_batch_size: pp * micro_batch_size < spec.num_layers, True),
    "rank_order": (lambda pp, rank_order: pp < 2 or rank_order == "tp-cp-ep-dp-pp", True),
    "virtual": (lambda vpp: vpp < 2, False),
    "zero": (lambda tp, zero: zero < 3 or tp > 1, False),
    "recompute": (lambda modules: RecomputeModule.LAYERNORM not in modules, False),
    "execution": (lambda execution, tp: tp != 2 or not execution.tp_comm_overlap, False),
    "both": (lambda zero, vpp, modules: not modules or zero < 1 or vpp > 1, False),
}


def made_up(name: str, monkeypatch: pytest.MonkeyPatch) -> Rule:
    """A rule of no release, at the end of the table."""
    rule = Rule(
        "made_up",
        "megatron/nowhere.py:1",
        MADE_UP[name][0],
        "tensor_model_parallel_size",
        "a made-up limit of {tp}",
        "Use another size.",
        reason="made up",
    )
    monkeypatch.setattr(rulebook, "RULES", (*rulebook.RULES, rule))
    return rule


def grid_space() -> GridSpace:
    mixtral = catalogue.model("mixtral_8x7b")
    spec = dataclasses.replace(mixtral, num_layers=8, moe_layer_pattern=(1,) * 8)
    model = CostModel(spec, catalogue.cluster("dgx_h100", 8), SETTINGS)
    limits = {"micro_batch_size": 2, "virtual_pipeline_model_parallel_size": 2}
    space = SearchSpace(limits=limits, executions={"tp_comm_overlap": (True,)})
    return GridSpace(model, BATCH, space)


def breaches(grids: GridSpace, rule: Rule) -> set[bool]:
    """Whether candidates of a space keep a rule."""
    return {
        rule.keeps(launch_request(grids.model, grids.space, grid).facts)
        for family in islice(families(grids), 0, None, 3)
        for recompute in grids.recompute_settings(family)[:6]
        for grid in [dataclasses.replace(family, recompute=recompute)]
    }


@pytest.mark.parametrize("name", MADE_UP)
def test_a_search_keeps_to_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without = grid_space()
    rule = made_up(name, monkeypatch)
    assert breaches(without, rule) == {True, False}
    grids = grid_space()
    assert breaches(grids, rule) == {True}
    assert ("made up" in grids.illegal) is MADE_UP[name][1]


def test_its_plans_and_its_certificate_know_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def found() -> Search:
        spec = dataclasses.replace(catalogue.model("llama3_8b"), num_layers=8)
        model = CostModel(spec, catalogue.cluster("dgx_h100", 8), CostSettings())
        return Search(model, BATCH, SearchSpace(limits={"micro_batch_size": 1}), KERNEL)

    before = found().run()
    rule = made_up("tensor", monkeypatch)
    after = found().run()
    sizes = {plan.layout.dims.tensor_model_parallel_size for plan in before.plans}
    assert 2 in sizes
    assert all(plan.layout.dims.tensor_model_parallel_size != 2 for plan in after.plans)
    assert after.plans
    assert {*after.illegal} == {*before.illegal, rule.reason}
    assert after.candidates < before.candidates


def test_a_launch_is_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request(grid=dims(tp=2, dp=2))
    rulebook.require_launchable(asked)
    made_up("tensor", monkeypatch)
    with pytest.raises(
        UserInputError,
        match=r"_size = 2: a made-up limit of 2 \(Megatron-LM megatron/nowhere.py:1\)",
    ):
        rulebook.require_launchable(asked)
    refused = "Megatron-LM 0.19 refuses it: tensor_model_parallel_size = 2: a made-up limit of 2"
    assert rulebook.first_broken(asked).startswith(refused)
    rulebook.require_launchable(request(grid=dims(tp=4)))


def reference_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_rules_has_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = reference_pages()
    assert pages.rules_page() == (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    made_up("pipeline", monkeypatch)
    last = pages.rules_page().partition("\n\n## Releases")[0].splitlines()[-1]
    cells = [cell.strip() for cell in last.split("|")[1:-1]]
    assert cells == [
        "`made_up`",
        "all",
        "model, `pipeline_model_parallel_size`, `micro_batch_size`",
        "`tensor_model_parallel_size`",
        "a made-up limit of *tp*",
        "Use another size.",
        "megatron/nowhere.py:1",
        "made up",
    ]


@pytest.mark.parametrize("names", [(), ("tp",), ("tp", "micro_batch_size"), ("zero", "pp", "vpp")])
def test_facts_of_a_layout_are_read_as_a_tuple_however_few(names: tuple[str, ...]) -> None:
    grid = next(families(grid_space()))
    facts = facts_of(grid)
    assert facts_reader(names)(grid) == tuple(facts[name] for name in names)


def test_every_rule_on_layouts_has_a_step() -> None:
    grids = grid_space()
    known = known_facts(grids.model, grids.space, BATCH)
    steps = search_steps(known, rulebook.RULES)
    decided = {rule.id for step in steps.values() for rule in step.rules}
    searched = filter(is_searched, rulebook.RULES)
    concern = (r for r in searched if r.about is None or r.about(grids.model.spec))
    assert decided == {rule.id for rule in concern}
    for name, step in steps.items():
        assert set(step.names) <= set(STEPS[name])
    assert {*facts_of(next(grids.shards())), "uneven_sides"} == {
        name for names in STEPS.values() for name in names
    }
