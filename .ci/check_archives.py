"""Checks what lies in the sdist and in the wheel: ``python check_archives.py FILE...``."""

import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

CATALOGUE = ("accelerator", "cluster", "model")
ROOT = Path(__file__).parent.parent
#: Every file that modules read beside them: tables, templates, types.
DATA = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "nest_megatron").rglob("*")
    if path.suffix in {".toml", ".yaml", ".json", ".html", ".css", ".js", ".j2", ".pyi", ".typed"}
)
SDIST_HOLDS = (
    "cython_ext/_recurrence.pyx",
    "cython_ext/_schedule.pyx",
    "cython_ext/_stage_boundaries.pyx",
    "cython_ext/_stage_dp.pyx",
    "docs/",
    "recipes/__init__.py",
    "tests/run.sh",
    "tools/calibration/command.py",
    "requirements-dev.txt",
    "requirements-release.txt",
    "LICENSE",
    "nest_megatron/boot.pth",
    "hydra_plugins/nest_megatron/__init__.py",
    "hydra_configs/hydra_app/nest/auto.yaml",
    *(f"hydra_configs/{group}/" for group in CATALOGUE),
)
WHEEL_HOLDS = (
    *DATA,
    "nest_megatron.pth",
    "hydra_plugins/nest_megatron/__init__.py",
    "nest_megatron/hydra_configs/hydra_app/__init__.py",
    "nest_megatron/hydra_configs/hydra_app/nest/auto.yaml",
    "nest_megatron/recipes/__init__.py",
    "nest_megatron/cost_model/_schedule.",
    "nest_megatron/research/nest_artifact/_stage_boundaries.",
    "nest_megatron/research/nest_dp/_recurrence.",
    "nest_megatron/solver/_stage_dp.",
    *(f"nest_megatron/hydra_configs/{group}/" for group in CATALOGUE),
)
NEVER = {".c", ".pyc"}


def names_in(archive: Path) -> list[str]:
    """Paths of the files in an archive, without the sdist's top directory."""
    if archive.suffix == ".whl":
        return zipfile.ZipFile(archive).namelist()
    with tarfile.open(archive) as sdist:
        return [member.name.partition("/")[2] for member in sdist if member.isfile()]


def complaints(archive: Path) -> list[str]:
    """What is missing from an archive and what should not be in it."""
    names = names_in(archive)
    is_wheel = archive.suffix == ".whl"
    never = NEVER if is_wheel else NEVER | {".so"}
    missing = [
        start
        for start in (WHEEL_HOLDS if is_wheel else SDIST_HOLDS)
        if not any(name.startswith(start) for name in names)
    ]
    extra = [name for name in names if PurePosixPath(name).suffix in never]
    return [f"{archive.name} lacks {name}" for name in missing] + [
        f"{archive.name} should not hold {name}" for name in extra
    ]


found = [line for name in sys.argv[1:] for line in complaints(Path(name))]
print("\n".join(found) or "archives hold what they should")
sys.exit(bool(found))
