"""The package weighs no more than `size_limits.toml` allows; raising a limit is a decision."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter
from pathlib import Path

from tests.architecture.imports import PACKAGE, SOURCES

LIMITS = tomllib.loads(Path(__file__).with_name("size_limits.toml").read_text(encoding="utf-8"))
#: Tokens that say nothing: packing lines and leaving out comments move no count.
_EMPTY = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def num_tokens(source: str) -> int:
    """Names, numbers, strings and operators of a module, without docstrings."""
    documentation = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            first = node.body[0]
            documentation.update(range(first.lineno, (first.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    said = (each for each in tokens if tokenize.tok_name[each.type] not in _EMPTY)
    return sum(each.start[0] not in documentation for each in said)


def folder(path: Path) -> str:
    """The folder of the package that a module lies in."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "top level"


def test_lines_comments_and_docstrings_weigh_nothing() -> None:
    packed = "def f(a):\n    return a + 1\n"
    loose = '"""A module."""\n\n\ndef f(\n    a\n):\n    """Why."""\n    return a + 1  # one\n'
    assert num_tokens(packed) == num_tokens(loose) == 10


def test_each_folder_keeps_to_its_limit() -> None:
    found = Counter[str]()
    for path in SOURCES:
        found[folder(path)] += num_tokens(path.read_text(encoding="utf-8"))
    assert found.keys() == LIMITS["tokens"].keys()
    over = {name: n for name, n in found.items() if n > LIMITS["tokens"][name]}
    assert not over, "heavier than its limit"
    loose = {name: n for name, n in found.items() if n < 0.97 * LIMITS["tokens"][name]}
    assert not loose, "lighter than its limit by 3 %: lower that"


def test_the_whole_keeps_to_its_limits() -> None:
    whole, texts = LIMITS["whole"], [path.read_text(encoding="utf-8") for path in SOURCES]
    for pattern, most in (("*.toml", "tokens_of_rules"), ("rulebook/*.json", "tokens_of_rows")):
        rules = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob(pattern))
        assert 0 < len(re.findall(r"\w+|[^\w\s]", rules)) <= whole[most]
    assert len(SOURCES) <= whole["files"]
    assert max(text.count("\n") for text in texts) <= whole["lines_of_a_file"]
    named = Counter(name for text in texts for name in re.findall(r"\w+", text))
    functions = [
        node.name
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("__")
    ]
    once = sum(named[name] <= 2 for name in functions)
    assert 100 * once <= whole["percent_of_functions_named_once"] * len(functions)
