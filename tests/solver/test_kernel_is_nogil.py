"""The part of the kernel that runs without the gil touches no Python and allocates nothing."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("Cython", reason="Cython is not installed")

SOURCES = Path(__file__).parents[2] / "cython_ext"
DIRECTIVES = ("boundscheck=False", "wraparound=False", "initializedcheck=False", "cdivision=True")
WITH_GIL = {"solution_of", "claim"}
TOUCHES_PYTHON = re.compile(r"\b(?:Py[A-Z]\w*|_Py\w+|__Pyx_\w+|__pyx_pf_\w+|malloc|calloc|free)\b")
#: What Cython writes into every function, and what costs nothing.
HARMLESS = {"Py_ssize_t", "__Pyx_XDECREF", "__Pyx_RefNannyDeclarations"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The C that Cython makes of the kernel."""
    place = tmp_path_factory.mktemp("kernel")
    for source in (*SOURCES.glob("*.pyx"), *SOURCES.glob("*.pxd")):
        shutil.copy(source, place)
    command = [sys.executable, "-m", "cython", "-3", "_stage_dp.pyx", "--module-name"]
    subprocess.run([*command, "nest_megatron.solver._stage_dp"], cwd=place, check=True)
    return (place / "_stage_dp.c").read_text()


def functions_of(source: str) -> list[str]:
    """Names of the C-level functions defined in a Cython file."""
    return re.findall(r"^cdef (?:inline )?(?:const )?\w+\*? (\w+)\(", source, re.MULTILINE)


def bodies(generated: str, name: str) -> list[str]:
    """The C definitions of a function, comments removed."""
    pattern = re.compile(
        rf"^(?:static|CYTHON_INLINE)[^\n;]*\b__pyx_f_\w*?_{name}\([^\n;]*\) \{{\n(.*?)^\}}",
        re.MULTILINE | re.DOTALL,
    )
    return [re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL) for body in pattern.findall(generated)]


def test_every_inner_function_declares_itself() -> None:
    for path in sorted([*SOURCES.glob("*.pyx"), *SOURCES.glob("*.pxd")]):
        source = path.read_text()
        declared = re.findall(
            r"^cdef [^=\n]*?\b(\w+)\([^:]*?\) noexcept nogil:$", source, re.MULTILINE
        )
        assert set(functions_of(source)) - WITH_GIL == set(declared), path.name


def test_no_inner_function_touches_python(generated: str) -> None:
    seen = 0
    for path in sorted([*SOURCES.glob("*.pyx"), *SOURCES.glob("*.pxd")]):
        for name in set(functions_of(path.read_text())) - WITH_GIL:
            found = bodies(generated, name)
            assert found, f"{name} is not in the generated C"
            for body in found:
                assert not set(TOUCHES_PYTHON.findall(body)) - HARMLESS, (path.name, name)
            seen += 1
    assert seen > 50


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.p*")), ids=lambda path: path.name)
def test_directives_stand_at_the_top(path: Path) -> None:
    """Inline functions keep the directives of their own file, not of the one that uses them."""
    table = path.read_text().split('"""')[0]
    assert all(directive in table for directive in DIRECTIVES)


def test_division_is_plain(generated: str) -> None:
    assert not re.search(r"__Pyx_(?:div|mod)_|ZeroDivisionError", generated)
