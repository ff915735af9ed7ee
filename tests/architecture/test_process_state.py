"""What belongs to the whole process is not ours to change: other threads of it train."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

from nest_megatron.caching import rare_garbage_collection
from nest_megatron.config.compose import compose
from nest_megatron.config.overrides import parse
from nest_megatron.config.request import request_of
from nest_megatron.planner import plan
from tests.architecture.imports import PACKAGE, SOURCES, imports_of, named_by

#: Calls that change something for all threads, by module.
FORBIDDEN = {("os", "umask"), ("os", "chdir"), ("sys", "setrecursionlimit")}
#: What keeps its work in a place of the process, and what is there in its stead.
SINGLETONS = {"initialize_config_dir", "initialize_config_module", "create_main_hydra2"}
#: What fails for users and accounts that are not there; ``files`` has it with an error of ours.
HOMES = {"expanduser", "home", "getuser", "platformdirs"}
#: A program by itself, which no thread of ours runs.
PROGRAM = PACKAGE / "integrations" / "dry_run" / "view.py"
#: Sets how often garbage is looked for, and sets it back.
COLLECTOR = PACKAGE / "caching.py"


@pytest.mark.parametrize(
    "path",
    [each for each in SOURCES if each != PROGRAM],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_nothing_is_set_for_all_threads(path: Path) -> None:
    assert path == COLLECTOR or "gc" not in {each.module for each in imports_of(path)}
    tree = ast.parse(path.read_text(encoding="utf-8"))
    used = {
        (node.value.id, node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    }
    assert not used & FORBIDDEN
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {each.module.partition(".")[0] for each in imports_of(path)}
    assert not names & SINGLETONS
    if path != PACKAGE / "files.py":
        assert not names & HOMES


def test_how_often_garbage_is_looked_for_is_set_back() -> None:
    before = gc.get_threshold()

    @rare_garbage_collection()
    def interrupted() -> None:
        with rare_garbage_collection():
            pass
        assert gc.get_threshold()[0] > 100 * before[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert gc.get_threshold() == before


def test_a_search_makes_few_collections() -> None:
    request = request_of(compose(parse(["model=llama3_70b", "cluster=dgx_h100"])))
    gc.collect()
    before = sum(each["collections"] for each in gc.get_stats())
    assert plan(request)
    assert sum(each["collections"] for each in gc.get_stats()) - before < 5


#: Methods that change what they are of.
CHANGING = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem"}
CHANGING |= {"popleft", "remove", "reverse", "setdefault", "sort", "update"}
#: State of a process that is meant to be its only one: where it is, and why.
REGISTERED = {
    ("integrations/hydra/plans.py", "PLANS"): "an application reads its plan value by value",
    ("integrations/megatron_lm/hook.py", "_job"): "one process runs one job",
    ("integrations/nemo_run/plugin.py", "_waiting"): "plugins that no task has called, weakly held",
}
_FUNCTION = (ast.FunctionDef, ast.Lambda)
#: The module that changes the variables of its process.
VARIABLES = PACKAGE / "integrations" / "process_variables.py"
#: Attributes that are filled by key, and hold more than values worked out once.
FILLED = {
    ("integrations/hydra/plans.py", "_known"): "plans by configuration, made once even if it fails",
    ("megatron_core/recorder.py", "_kept"): "tensors that a backward pass needs",
    (
        "solver/search.py",
        "in_any_memory",
    ): "proven under the threshold of its time",
}


def is_value(module: str, name: str) -> bool:
    """Whether ``from module import name`` gives a value of the package, and no module."""
    return module.startswith(PACKAGE.name) and named_by(module, name) == module


def names_at_the_top(tree: ast.Module) -> set[str]:
    """What a module binds itself, or takes from others of the package."""
    found = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            values = (each for each in node.names if is_value(node.module, each.name))
            found |= {each.asname or each.name for each in values}
        elif not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found |= {
                each.id
                for each in ast.walk(node)
                if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
            }
    return found


def stored(node: ast.AST) -> set[str]:
    """Names that a function has as arguments, or binds."""
    inside = list(ast.walk(node))
    bound = {
        each.id for each in inside if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)
    }
    return bound | {each.arg for each in inside if isinstance(each, ast.arg)}


def changed_by(node: ast.AST) -> list[ast.expr]:
    """What a statement or a call changes, where that is no name alone."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return [node.func.value] if node.func.attr in CHANGING else []
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    return [each.value for each in targets if isinstance(each, (ast.Subscript, ast.Attribute))]


def changed_in_functions(tree: ast.Module) -> set[str]:
    """Names of a module that some function changes, its local ones left out."""
    found = set()

    def look(node: ast.AST, names: set[str]) -> None:
        if isinstance(node, ast.Global):
            found.update(node.names)
        for changed in changed_by(node):
            at = changed
            while isinstance(at, (ast.Subscript, ast.Attribute)):
                at = at.value
            if isinstance(at, ast.Name):
                found.update({at.id} & names)
        for child in ast.iter_child_nodes(node):
            look(child, names - stored(child) if isinstance(child, _FUNCTION) else names)

    def enter(node: ast.AST, top: set[str]) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _FUNCTION):
                look(child, top - stored(child))
            else:
                enter(child, top)

    enter(tree, names_at_the_top(tree))
    return found


def test_no_function_changes_what_belongs_to_a_module() -> None:
    """Its tables are read alone; what a process holds once is registered with its reason."""
    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in SOURCES
        for name in changed_in_functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == REGISTERED.keys()


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        ("TABLE['a'] = 1", {"TABLE"}),
        ("TABLE.setdefault('a', []).append(1)", {"TABLE"}),
        ("TABLE['a'].b = 1", {"TABLE"}),
        ("del TABLE['a']", {"TABLE"}),
        ("global TABLE; TABLE = {}", {"TABLE"}),
        ("TABLE = {}; TABLE['a'] = 1", set()),
        ("return TABLE['a']", set()),
    ],
)
def test_changes_are_found(body: str, changed: set[str]) -> None:
    assert changed_in_functions(ast.parse(f"TABLE = {{}}\ndef f():\n    {body}")) == changed


def writes_variables(tree: ast.Module) -> bool:
    """Whether a module changes ``os.environ``, or the environment below it."""
    changed = {ast.unparse(each) for node in ast.walk(tree) for each in changed_by(node)}
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return "os.environ" in changed or bool(called & {"os.putenv", "os.unsetenv"})


def test_one_module_changes_the_variables_of_the_process() -> None:
    writing = [each for each in SOURCES if writes_variables(ast.parse(each.read_text("utf-8")))]
    assert writing == [VARIABLES]


def test_values_that_methods_work_out_once_are_kept_by_caching() -> None:
    """And not by a dictionary of their object, nor by ``functools``, which keeps the object."""
    filled, methods = set(), set()
    for path in SOURCES:
        module = str(path.relative_to(PACKAGE))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.If):
                asked = {
                    ast.unparse(each.comparators[0])
                    for each in ast.walk(node.test)
                    if isinstance(each, ast.Compare) and isinstance(each.ops[0], ast.NotIn)
                }
                changed = {
                    ast.unparse(each)
                    for line in node.body
                    for inside in ast.walk(line)
                    for each in changed_by(inside)
                    if isinstance(inside, ast.Assign)
                }
                filled |= {
                    (module, name.removeprefix("self."))
                    for name in asked & changed
                    if name.startswith("self.")
                }
            elif isinstance(node, ast.ClassDef):
                methods |= {
                    (module, f"{node.name}.{each.name}")
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                    for name in map(ast.unparse, each.decorator_list)
                    if name.partition("(")[0].rpartition(".")[2] in ("cache", "lru_cache")
                }
    assert filled == FILLED.keys()
    assert not methods
