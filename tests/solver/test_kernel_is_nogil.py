"""The part of the kernels that runs without the gil touches no Python and allocates nothing."""

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
KERNELS = {
    "cost_model": "_schedule",
    "research.nest_artifact": "_nest_cuts",
    "research.nest_dp": "_recurrence",
    "solver": "_stage_dp",
}
WITH_GIL = {"solution_of", "claim", "grow"}
TOUCHES_PYTHON = re.compile(r"\b(?:Py[A-Z]\w*|_Py\w+|__Pyx_\w+|__pyx_pf_\w+|malloc|calloc|free)\b")
#: What Cython writes into every function, and what costs nothing.
HARMLESS = {"Py_ssize_t", "__Pyx_XDECREF", "__Pyx_RefNannyDeclarations"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The C that Cython makes of the kernels."""
    place = tmp_path_factory.mktemp("kernel")
    for source in (*SOURCES.glob("*.pyx"), *SOURCES.glob("*.pxd")):
        shutil.copy(source, place)
    command = [sys.executable, "-m", "cython", "-3", "--module-name"]
    for room, name in KERNELS.items():
        module = [f"nest_megatron.{room}.{name}", f"{name}.pyx"]
        subprocess.run([*command, *module], cwd=place, check=True)
    return "\n".join((place / f"{name}.c").read_text() for name in KERNELS.values())


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


@pytest.mark.parametrize("path", sorted(SOURCES.glob("*.p*")), ids=lambda path: path.name)
def test_counts_and_indices_are_wide(path: Path) -> None:
    """A C ``int`` holds a status, bits or one of a few kinds; a count may pass 2**31."""
    source = path.read_text().split('"""', 2)[-1]
    declared = re.findall(r"^ +(?:cdef )?int ([\w, =-]+)", source, re.MULTILINE)
    names = [re.split(r"\W", name)[0] for names in declared for name in names.split(", ")]
    assert set(names) <= {"status", "bits", "head_kind", "tail_kind"}
    narrow = re.findall(r"^ +int32_t\*? (num_\w+|\w+_made|row_\w+|cursor|live\w*)", source, re.M)
    assert set(narrow) <= {"num_devices"}


def test_division_is_plain(generated: str) -> None:
    """In our functions; Cython's own, for what memoryviews could do, are not called."""
    for source in (*SOURCES.glob("*.pyx"), *SOURCES.glob("*.pxd")):
        for name in functions_of(source.read_text()):
            text = "".join(bodies(generated, name))
            assert not re.search(r"__Pyx_(?:div|mod)_|ZeroDivisionError", text), name
