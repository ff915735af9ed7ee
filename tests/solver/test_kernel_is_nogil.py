"""The part of the kernels that runs without the gil touches no Python and allocates nothing."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("Cython", reason="Cython is not installed")

pytestmark = pytest.mark.slow  # Cython translates every kernel anew

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "cython_ext").glob("*.p*"))


def table_of_setup(name: str) -> dict[str, object]:
    """A table of ``setup.py``, read without running it."""
    assigned = {
        target.id: node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return dict(ast.literal_eval(assigned[name]))


DIRECTIVES, KERNELS = table_of_setup("DIRECTIVES"), table_of_setup("KERNELS")
WITH_GIL = {"solution_of", "claim", "grow"}
TOUCHES_PYTHON = re.compile(r"\b(?:Py[A-Z]\w*|_Py\w+|__Pyx_\w+|__pyx_pf_\w+|malloc|calloc|free)\b")
#: What Cython writes into every function, and what costs nothing.
HARMLESS = {"Py_ssize_t", "__Pyx_XDECREF", "__Pyx_RefNannyDeclarations"}


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The C that Cython makes of the kernels."""
    place = tmp_path_factory.mktemp("kernel")
    options = [word for pair in DIRECTIVES.items() for word in ("-X", "=".join(map(str, pair)))]
    for module, source in KERNELS.items():
        shutil.copy(ROOT / str(source), place)
        command = [sys.executable, "-m", "cython", *options, "--module-name", module]
        subprocess.run([*command, Path(str(source)).name], cwd=place, check=True)
    return "\n".join(path.read_text() for path in sorted(place.glob("*.c")))


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
    for path in SOURCES:
        source = path.read_text()
        declared = re.findall(
            r"^cdef [^=\n]*?\b(\w+)\([^:]*?\) noexcept nogil:$", source, re.MULTILINE
        )
        assert set(functions_of(source)) - WITH_GIL == set(declared), path.name


def test_no_inner_function_touches_python(generated: str) -> None:
    seen = 0
    for path in SOURCES:
        for name in set(functions_of(path.read_text())) - WITH_GIL:
            found = bodies(generated, name)
            assert found, f"{name} is not in the generated C"
            for body in found:
                assert not set(TOUCHES_PYTHON.findall(body)) - HARMLESS, (path.name, name)
            seen += 1
    assert seen > 50


def test_one_table_holds_the_directives() -> None:
    unchecked = ("boundscheck", "wraparound", "initializedcheck", "nonecheck", "overflowcheck")
    assert not any(DIRECTIVES[name] for name in unchecked)
    assert DIRECTIVES["cdivision"] is True
    repeated = [path.name for path in SOURCES if "# cython:" in path.read_text()]
    assert not repeated


def test_every_source_is_a_kernel() -> None:
    assert [path.relative_to(ROOT).as_posix() for path in SOURCES] == sorted(
        map(str, KERNELS.values())
    )


def test_maxima_are_the_language_s() -> None:
    twin = re.compile(r"return (\w+) if \1 [<>] (\w+) else \2\b")
    assert not [path.name for path in SOURCES if twin.search(path.read_text())]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_counts_and_indices_are_wide(path: Path) -> None:
    """A C ``int`` holds a status, bits or one of a few kinds; a count may pass 2**31."""
    source = path.read_text().split('"""', 2)[-1]
    declared = re.findall(r"^ +(?:cdef )?int ([\w, =-]+)", source, re.MULTILINE)
    names = [re.split(r"\W", name)[0] for names in declared for name in names.split(", ")]
    assert set(names) <= {"status", "bits", "gather_kind", "reduction_kind"}
    narrow = re.findall(r"^ +int32_t\*? (num_\w+|\w+_made|row_\w+|cursor|live\w*)", source, re.M)
    assert set(narrow) <= {"num_devices"}


def test_division_is_plain(generated: str) -> None:
    """In our functions; Cython's own, for what memoryviews could do, are not called."""
    for source in SOURCES:
        for name in functions_of(source.read_text()):
            text = "".join(bodies(generated, name))
            assert not re.search(r"__Pyx_(?:div|mod)_|ZeroDivisionError", text), name
