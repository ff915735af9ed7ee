"""Imports point down: the rooms of the package, and the floors they stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.architecture.imports import PACKAGE, SOURCES, dotted_name, imports_of

# A room is what follows "nest_megatron."; a new one gets its floor here.
FLOORS = {
    "base": 0,
    "catalogue_files": 1,
    "model": 1,
    "cluster": 1,
    "parallel": 2,
    "framework": 3,
    "extract": 3,
    "profile": 3,
    "cost_model": 4,
    "solver": 5,
    "nest": 5,
    "recurrence": 6,
    "baselines": 6,
    "planner": 6,
    "comparison": 7,
    "launchers": 7,
    "paper": 7,
    "pinning": 7,
    "validation": 7,
    "report": 8,
    "entry": 9,
}
# Modules that share a room with others although their names differ.
ROOM_OF = {
    "": "base",  # nest_megatron/__init__.py
    "deadline": "base",
    "errors": "base",
    "units": "base",
    "files": "base",
    "documents": "base",
    "packages": "base",
    "names": "base",
    "boot": "base",
    "plain": "base",
    "config": "entry",
    "app": "entry",
    "hydra_app": "entry",
}
# Doors of a launcher that plan as well: they join what is read and written with the planner's door.
DOORS = {"launchers.nemo", "launchers.megatron_bridge"}
# A helper that the rooms of its own floor may use.
SHARED = {"catalogue_files", "framework"}

HEAVY = {"torch", "megatron", "nemo", "nemo_run", "numpy"}
HEAVY_ROOMS = {"extract", "framework", "profile", "launchers", "entry"}
# Fits of ``calibrate`` import it where they run.
NUMPY_ROOMS = {"validation"}
HYDRA = {"hydra", "omegaconf"}


def room_of(module: str) -> str:
    """The room that a module of the package is in.

    >>> room_of("nest_megatron.cost_model.compute"), room_of("nest_megatron.profile.__main__")
    ('cost_model', 'entry')
    """
    _, _, inside = module.partition(".")
    if inside.rpartition(".")[2] == "__main__":
        return "entry"
    if inside in DOORS or inside.startswith("launchers.nemo_run"):
        return "entry"
    first = inside.partition(".")[0]
    return ROOM_OF.get(first, first)


def allowed(importer: str, imported: str) -> bool:
    """Whether a room may import another."""
    if importer == imported:
        return True
    if FLOORS[imported] == FLOORS[importer]:
        return imported in SHARED
    return FLOORS[imported] < FLOORS[importer]


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(dotted_name(path)) for path in SOURCES}
    assert rooms <= FLOORS.keys(), f"put {sorted(rooms - FLOORS.keys())} into FLOORS"


def test_every_folder_of_modules_is_a_package() -> None:
    """Without an ``__init__.py`` the folder would be left out of the wheel."""
    folders = {path.parent for path in SOURCES}
    lacking = sorted(str(f) for f in folders if not (f / "__init__.py").is_file())
    assert not lacking


@pytest.mark.parametrize("path", SOURCES, ids=dotted_name)
def test_imports_point_down(path: Path) -> None:
    room = room_of(dotted_name(path))
    wrong = [
        f"line {found.line}: {room} (floor {FLOORS[room]}) imports {found.module}"
        for found in imports_of(path)
        if found.module.partition(".")[0] == PACKAGE.name
        and not allowed(room, room_of(found.module))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=dotted_name)
def test_heavy_packages_stay_in_their_rooms(path: Path) -> None:
    """Frameworks are for the profilers, the extractor and the launchers; Hydra for the door."""
    room = room_of(dotted_name(path))
    banned = (set() if room in HEAVY_ROOMS else HEAVY) | (set() if room == "entry" else HYDRA)
    banned -= {"numpy"} if room in NUMPY_ROOMS else set()
    wrong = [
        f"line {found.line}: {room} imports {found.module}"
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
        ("catalogue_files", "model", False),
        ("launchers", "pinning", False),
        ("entry", "report", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, may: bool) -> None:
    assert allowed(importer, imported) is may
