"""Imports point down: the packages, and the layers they stand in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, SOURCES, dotted_name, imports_of

#: The layers, lowest first; a package imports itself and what is in lower layers. What follows
#: "nest_megatron." is the package, or a module at the top.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"base"}),
    frozenset({"catalogue_files"}),
    frozenset({"model", "cluster"}),
    frozenset({"layout"}),
    frozenset({"megatron_core"}),
    frozenset({"profile", "history"}),
    frozenset({"cost_model"}),
    frozenset({"solver"}),
    frozenset({"planner"}),
    frozenset({"config"}),
    frozenset({"report"}),
    frozenset({"integrations"}),
    frozenset({"api"}),
    frozenset({"tuning"}),
    frozenset({"research", "validation"}),
    frozenset({"app"}),
    frozenset({"cli"}),
    frozenset({"__main__", "profile.__main__"}),
)
#: Modules at the top that every package may use.
BASE = {
    "boot",
    "caching",
    "deadline",
    "documents",
    "errors",
    "files",
    "minisign",
    "names",
    "packages",
}
BASE |= {"plain", "printing", "units", "version"}
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}

HEAVY = {"torch", "megatron", "nemo", "nemo_run", "numpy"}
HEAVY_PACKAGES = {"megatron_core", "profile", "integrations", "cli"}
HYDRA = {"hydra", "omegaconf"}
HYDRA_PACKAGES = {"config", "integrations", "api"}


def package_of(module: str) -> str:
    """The package that a module is in.

    >>> package_of("nest_megatron.cost_model.compute"), package_of("nest_megatron.profile.__main__")
    ('cost_model', 'profile.__main__')
    """
    _, _, inside = module.partition(".")
    first = inside.partition(".")[0]
    if inside in LAYER_OF:
        return inside
    if not inside:  # what ``import nest_megatron`` gives, by the names of ``api``
        return "api"
    return "base" if first in BASE else first


def allowed(importer: str, imported: str) -> bool:
    """Whether a package may import another."""
    return importer == imported or LAYER_OF[imported] < LAYER_OF[importer]


def test_every_package_has_a_layer() -> None:
    packages = {package_of(dotted_name(path)) for path in SOURCES}
    assert packages <= LAYER_OF.keys(), f"put {sorted(packages - LAYER_OF.keys())} into LAYERS"


def test_every_folder_of_modules_is_a_package() -> None:
    """Without an ``__init__.py`` the folder would be left out of the wheel."""
    folders = {path.parent for path in SOURCES}
    lacking = sorted(str(f) for f in folders if not (f / "__init__.py").is_file())
    assert not lacking


@pytest.mark.parametrize("path", SOURCES, ids=dotted_name)
def test_imports_point_down(path: Path) -> None:
    package = package_of(dotted_name(path))
    wrong = [
        f"line {found.line}: {package} imports {found.module}"
        for found in imports_of(path)
        if found.module.partition(".")[0] == PACKAGE.name
        and not allowed(package, package_of(found.module))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=dotted_name)
def test_heavy_libraries_stay_where_they_are_needed(path: Path) -> None:
    package = package_of(dotted_name(path))
    banned = set() if package in HEAVY_PACKAGES else set(HEAVY)
    banned |= set() if package in HYDRA_PACKAGES else HYDRA
    wrong = [
        f"line {found.line}: {package} imports {found.module}"
        for found in imports_of(path)
        if found.module.partition(".")[0] in banned
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("importer", "imported", "may"),
    [
        ("solver", "cost_model", True),
        ("cost_model", "solver", False),
        ("model", "cluster", False),
        ("model", "catalogue_files", True),
        ("integrations", "cli", False),
        ("planner", "research", False),
        ("validation", "research", False),
        ("cli", "report", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, may: bool) -> None:
    assert allowed(importer, imported) is may
