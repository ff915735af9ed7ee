"""``Settings -> Job -> Request``: each is made once, and a default is stated in one file."""

from __future__ import annotations

import ast
import dataclasses
import json
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import FrameType

import pytest
from omegaconf.errors import ReadonlyConfigError

from nest_megatron import catalogue_files
from nest_megatron.catalogue_files import catalogue_root, default_setting
from nest_megatron.cli import main
from nest_megatron.config import compose as composing
from nest_megatron.config.compose import Settings, compose
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import GROUPS, parse
from nest_megatron.config.request import request_of
from nest_megatron.config.schema import SECTIONS, PlanConfig, stated_values
from nest_megatron.errors import UserInputError
from nest_megatron.planner import Request

ROOT = Path(__file__).parents[1]
JOB = ("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8")
#: Settings of the file, each with another value than it has there.
OTHER = {
    "search.max_seconds": 12.5,
    "search.num_alternatives": 3,
    "search.tie_percent": 2.5,
    "memory.max_oom_chance": 0.07,
    "search.use_all_gpus": False,
    "search.keep": ["cp_comm_type"],
    "search.packages": ["deep_ep"],
    "profile.mode": "analytic",
    "profile.max_seconds": 33.0,
    "profile.site": False,
    "checks.plausibility": False,
}


def readme_words() -> list[str]:
    """The arguments of the README's ``nest-megatron plan``."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (typed,) = (line for line in lines if line.startswith("$ nest-megatron plan "))
    return typed.split()[2:]


def test_a_plan_makes_each_record_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made, through = Counter[str](), set[str]()

    def count(kind: type) -> None:
        modules = set[str]()
        frame: FrameType | None = sys._getframe()
        while (frame := frame and frame.f_back) is not None:
            modules.add(frame.f_globals["__name__"])
        if "nest_megatron.planner" not in modules:  # whose side searches ask something else
            made[kind.__name__] += 1
        through.update(modules)

    def counted(kind: type) -> type:
        check = getattr(kind, "__post_init__", lambda _: None)
        return type(kind)(
            kind.__name__, (kind,), {"__post_init__": lambda it: (count(kind), check(it))}
        )

    for kind in (Settings, Job, Request):
        counting = counted(kind)
        for module in [m for m in sys.modules.values() if vars(m).get(kind.__name__) is kind]:
            monkeypatch.setattr(module, kind.__name__, counting)
    words = [word for word in readme_words() if not word.startswith("out=")]
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    assert capsys.readouterr().out
    assert made == {"Settings": 1, "Job": 1, "Request": 1}
    assert not {name for name in through if name.startswith("nest_megatron.integrations")}


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A copy of the catalogue, with other values in ``plan.yaml``, in the place of it."""
    folder = tmp_path / "hydra_configs"
    shutil.copytree(str(catalogue_root()), folder)
    text = (folder / "plan.yaml").read_text(encoding="utf-8")
    for key, value in OTHER.items():
        section, _, name = key.partition(".")
        head, start, rest = text.partition(f"\n{section}:")
        old = next(line for line in rest.splitlines() if line.startswith(f"  {name}: "))
        text = head + start + rest.replace(old, f"  {name}: {json.dumps(value)}", 1)
    (folder / "plan.yaml").write_text(text, encoding="utf-8")
    monkeypatch.setattr(catalogue_files, "catalogue_root", lambda: folder)
    _forget()
    return folder


@pytest.fixture(autouse=True)
def _read_again() -> Iterator[None]:
    yield
    _forget()


def _forget() -> None:
    catalogue_files._plan_file.cache_clear()
    composing._base.cache_clear()


def test_the_file_alone_states_defaults(edited: Path) -> None:
    settings = compose(parse(JOB))
    for key, value in OTHER.items():
        found = attrgetter(key)(settings)
        assert found == value, key
        assert default_setting(key) == value
    asked = request_of(settings, choose_execution=True)
    plain = Request(spec=asked.spec, cluster=asked.cluster, global_batch_size=512)
    for name in (key.removeprefix("search.") for key in OTHER if key.startswith("search.")):
        for request in (asked, plain):
            if hasattr(request, name) and name != "packages":
                assert getattr(request, name) == OTHER[f"search.{name}"], name
    assert not asked.space.use_all_gpus
    assert "cp_comm_type" not in asked.space.executions
    assert asked.given == ()  # nothing differs from the file


def test_the_file_states_every_value_that_is_none() -> None:
    stated = {
        f"{section}.{name}"
        for section in SECTIONS
        for name in getattr(compose(()), section)
        if default_setting(f"{section}.{name}") is not None
    }
    assert stated == OTHER.keys()


@pytest.mark.parametrize("kind", [*SECTIONS.values(), PlanConfig], ids=lambda kind: kind.__name__)
def test_types_state_no_value(kind: type) -> None:
    for each in dataclasses.fields(kind):
        allowed = (None,) if each.name in GROUPS else (dataclasses.MISSING,)
        assert each.default in allowed, each.name
        assert each.default_factory is dataclasses.MISSING, each.name


def test_settings_cannot_be_changed() -> None:
    words = (*JOB, "search.keep=[cp_comm_type]", "parallel.recompute_modules=[mlp]")
    settings = compose(parse(words))
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.target = "nemo"  # type: ignore[misc]
    with pytest.raises(ReadonlyConfigError):
        settings.search.backend = "kernel"
    with pytest.raises(ReadonlyConfigError):
        settings.parallel.recompute_modules[0] = "moe"  # type: ignore[index]
    assert settings.search.keep == ("cp_comm_type",)
    assert settings.parallel.recompute_modules == ("mlp",)
    assert stated_values(settings.parallel) == {"recompute_modules": ["mlp"]}
    with pytest.raises(TypeError):
        settings.model["num_layers"] = 1  # type: ignore[index]


def test_one_composition_starts_no_other() -> None:
    """``compose`` is not called for parts of what it composes."""
    tree = ast.parse(Path(composing.__file__).read_text(encoding="utf-8"))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called >= {"_base", "_entries", "_update"}
    assert "compose" not in called


def test_levels_are_named_in_any_description() -> None:
    """The names of levels are those of the cluster that other settings describe."""
    words = (*JOB, "cluster.levels.node.latency_s=3us")
    plain = compose(parse((*JOB, "cluster.levels.0.latency_s=3us")))
    assert compose(parse(words)).cluster == plain.cluster
    with pytest.raises(UserInputError, match="no such network level"):
        compose(parse((*JOB, "cluster.levels.rack.latency_s=3us")))
