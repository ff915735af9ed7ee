"""The schema, the YAML beside it and the records below say the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import yaml

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import expand, parse
from nest_megatron.config.request import (
    request_of,
)
from nest_megatron.config.schema import SECTIONS, section_keys
from nest_megatron.config.space import read_space
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import DEFAULT_TARGET
from nest_megatron.layout.recompute import RecomputeModule, selective_recompute
from nest_megatron.planner import Request
from nest_megatron.solver.space import DEGREES, SearchSpace
from tests.cli.runs import ROOT, SMALL, run


def test_the_yaml_holds_every_key_of_the_schema() -> None:
    text = (ROOT / "hydra_configs" / "plan.yaml").read_text(encoding="utf-8")
    loaded = yaml.safe_load(text)
    keys = [f"{name}.{key}" for name in SECTIONS for key in loaded[name]]
    assert [*keys, "assume_harmless", "flags", "target", "out"] == list(section_keys())


def test_every_degree_can_be_fixed_and_limited() -> None:
    keys = section_keys()
    for name in DEGREES:
        assert f"search.max_{name}" in keys
        assert f"parallel.{name}" in keys or f"train.{name}" in keys


def test_every_assumption_of_the_cost_model_can_be_set() -> None:
    elsewhere = {"precision": "train.precision", "target": "target"}
    names = {field.name for field in dataclasses.fields(CostSettings)} - {"traits"}
    for name in names:
        key = elsewhere.get(name, f"cost.{name}").replace("cost.memory_", "memory.")
        assert key in section_keys()


def test_nothing_said_is_the_planners_own_default() -> None:
    composed = compose(parse(SMALL))
    inputs, space = request_of(composed), read_space(composed)
    offers = {"numeric_offers": (), "memory_offers": ()}
    request = dataclasses.replace(inputs, **offers, notes=())
    plain = Request(
        space=SearchSpace(),
        spec=inputs.spec,
        cluster=inputs.cluster,
        global_batch_size=inputs.global_batch_size,
        settings=DEFAULT_TARGET.settings(inputs.cluster.accelerator.name, Precision.BF16),
    )
    assert space == SearchSpace()
    assert request == plain


def test_sweeps_follow_hydras_grammar() -> None:
    jobs = expand(parse(["model=a,b", "cluster.num_gpus=range(8,32,8)", "out='x,y'"]))
    assert [str(job[0]) + " " + str(job[1]) for job in jobs] == [
        f"model={model} cluster.num_gpus={gpus}" for model in "ab" for gpus in (8, 16, 24)
    ]


def test_a_plan_for_another_framework_promises_no_command(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    found = run("plan", *SMALL, "target=nemo_2.7", f"out={out}")
    assert "prints the launch command" not in found.out
    assert "docs/nemo.md" in found.out
    shown = run("explain", str(out)).out
    assert "plan again" not in shown
    assert "The plan is for NeMo 2.7" in shown


def test_selective_recomputation_has_megatrons_default_modules() -> None:
    found = read_space(compose(parse([*SMALL, "parallel.recompute_granularity=selective"])))
    assert found.recompute == selective_recompute([RecomputeModule.CORE_ATTN])
