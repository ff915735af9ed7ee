"""Take in a release: the table of its parser, and what changed since the release before.

    python tools/release.py CHECKOUT --since CHECKOUT [--write]

A checkout is a work tree of Megatron-LM or of Megatron-Bridge. Megatron-LM's parser is built, which
needs PyTorch and what the checkout imports (``bash .ci/megatron_lm`` installs it); all else is read
from the source. ``--write`` adds the parser to ``arguments_data/arguments.json``. CONTRIBUTING.md
says what follows.
"""

from __future__ import annotations

import argparse
import ast
import enum
import functools
import json
import re
import subprocess
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nest_megatron.files import write_text
from nest_megatron.integrations import architecture
from nest_megatron.integrations.megatron_lm.attach import WRITABLE
from nest_megatron.integrations.megatron_lm.layout_arguments import PARALLEL_ARGUMENTS, REASONS
from nest_megatron.integrations.megatron_lm.parser import rows_of

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "nest_megatron/integrations/megatron_lm/arguments_data/arguments.json"
_CORE = "megatron/core/"
#: Files whose dataclasses and checks say what a job may be, of Megatron-LM and of Megatron-Bridge.
_SOURCES = (
    _CORE + "transformer/transformer_config.py",
    _CORE + "model_parallel_config.py",
    _CORE + "optimizer/optimizer_config.py",
    _CORE + "distributed/distributed_data_parallel_config.py",
    "megatron/training/arguments.py",
    "megatron/training/argument_utils.py",
    "src/megatron/bridge/models/gpt_provider.py",
    "src/megatron/bridge/models/hybrid/hybrid_provider.py",
    "src/megatron/bridge/models/mla_provider.py",
    "src/megatron/bridge/training/config.py",
    "src/megatron/bridge/training/mixed_precision.py",
    "src/megatron/bridge/training/comm_overlap.py",
    "src/megatron/bridge/peft/lora.py",
)
_RECIPES = ("src/megatron/bridge/recipes", "src/megatron/bridge/perf_recipes")
_ACTIONS = {
    "_StoreTrueAction": "store_true",
    "_StoreFalseAction": "store_false",
    "BooleanOptionalAction": "boolean_optional",
}


def main() -> None:
    """Print what changed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--since", type=Path, help="a checkout of the release before")
    parser.add_argument("--write", action="store_true", help="add the parser to arguments.json")
    given = parser.parse_args()
    for each in filter(None, (given.checkout, given.since)):
        if not any((each / part).is_dir() for part in ("megatron", "src/megatron/bridge")):
            parser.error(f"{each} is no work tree of Megatron-LM or Megatron-Bridge")
    if not given.write and given.since is None:
        parser.error("nothing to do: add --since CHECKOUT, --write, or both")
    rows = parser_rows(given.checkout)
    if given.write:
        write(release_of(given.checkout), source_of(given.checkout), rows)
    if given.since is not None:
        print("\n".join(report(given.since, given.checkout, rows)))


def release_of(checkout: Path) -> str:
    r"""Its release as tables name it.

    >>> checkout = getfixture("tmp_path")
    >>> _ = (checkout / "megatron/core").mkdir(parents=True)
    >>> _ = (checkout / "megatron/core/package_info.py").write_text("MAJOR = 0\nMINOR = 19\n")
    >>> release_of(checkout)
    '0.19'
    """
    text = (checkout / _CORE / "package_info.py").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^(?:MAJOR|MINOR) = (\d+)", text, re.MULTILINE))


def source_of(checkout: Path) -> str:
    """The tag of a work tree, or its commit; its release where it has no history."""
    for words in (["describe", "--tags", "--exact-match"], ["log", "-1", "--format=%h of %cs"]):
        git = ["git", "-C", str(checkout), *words]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return release_of(checkout)


def parser_rows(checkout: Path) -> list[dict[str, Any]]:
    """Every option of Megatron-LM's parser, with the default that it has before validation.

    A checkout of Megatron-Bridge has none.
    """
    if not (checkout / "megatron/training/arguments.py").exists():
        return []
    sys.path.insert(0, str(checkout))
    if not hasattr(typing, "override"):  # Megatron-LM wants Python 3.12
        typing.override = lambda method: method
    from megatron.training import arguments

    found = argparse.ArgumentParser(add_help=False)
    arguments.add_megatron_arguments(found)
    return [_row(action) for action in found._actions]


def _row(action: argparse.Action) -> dict[str, Any]:
    kind = _ACTIONS.get(type(action).__name__)
    flags = [*action.option_strings]
    if kind == "boolean_optional" and len(flags) == 1:  # Python 3.13 keeps the other to itself
        flags.append(flags[0].replace("--", "--no-", 1))
    row: dict[str, Any] = {"flags": flags, "dest": action.dest}
    if kind is not None:
        row["action"] = kind
    elif (name := _type(action)) != "str":
        row["type"] = name
    if kind is None and action.nargs is not None:
        row["nargs"] = action.nargs
    if action.choices is not None:
        row["choices"] = [_plain(choice) for choice in action.choices]
    if action.default is not None:
        row["default"] = _plain(action.default)
    return row


def _type(action: argparse.Action) -> str:
    """How ``parser.py`` reads its values."""
    name: str = getattr(action.type, "__name__", "str")
    if name in ("int", "float", "bool", "str"):
        return name
    by_name = {"_freq_type": "pattern", "tuple_type": "tuple", "enum_type_handler": "name"}
    kinds = (kind for end, kind in by_name.items() if name.endswith(end))
    enumerated = isinstance(action.default, enum.Enum)
    return next(kinds, "name" if enumerated else "str")


def _plain(value: object) -> object:
    if isinstance(value, enum.Enum):
        return value.name
    return list(value) if isinstance(value, tuple) else value


def write(release: str, source: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add a release, newer than all others, to the table.

    A row that it has as the release before had it goes on; others end there or begin here.
    """
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {"releases": {}, "arguments": []}
    releases: dict[str, str] = table["releases"]
    if release in releases:
        raise SystemExit(f"{release} is in {TABLE.name} already: remove it there first")
    last = next(reversed(releases), None)
    ours = {_key(row): dict(row) for row in rows}
    for old in table["arguments"]:
        if "until" not in old and ours.pop(_key(old), None) is None:
            old["until"] = last
    begin = {} if last is None else {"since": release}
    table["arguments"] += [{**row, **begin} for row in ours.values()]
    releases[release] = source
    lines = (json.dumps(row, ensure_ascii=False) for row in table["arguments"])
    text = f'{{"releases": {json.dumps(releases, indent=1)},\n "arguments": [\n  '
    write_text(TABLE, text + ",\n  ".join(lines) + "\n ]}\n")


def _key(row: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in row.items() if k not in ("since", "until")}, sort_keys=True)


def report(old: Path, new: Path, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What changed, as Markdown: arguments, fields of configurations, checks, recipes."""
    if rows:
        before = {row["dest"]: _key(row) for row in rows_of(release_of(old))}
        now = {row["dest"]: _key(row) for row in rows}
        yield from _section("Arguments", before, now, with_role=True)
    yield from _section("Fields", fields(old), fields(new), with_role=True)
    yield from _section("Checks", checks(old), checks(new))
    yield from _section("Recipes", recipes(old), recipes(new))


def _section(
    title: str, old: Mapping[str, str], new: Mapping[str, str], *, with_role: bool = False
) -> Iterator[str]:
    changed = [name for name in new if name in old and new[name] != old[name]]
    groups = {
        "added": [name for name in new if name not in old],
        "gone": [name for name in old if name not in new],
        "changed": changed,
    }
    yield f"\n## {title}: " + ", ".join(f"{len(names)} {what}" for what, names in groups.items())
    for what, names in groups.items():
        for name in names:
            text = new.get(name, old.get(name))
            was = f"; before {old[name]}" if name in changed else ""
            yield f"- {what}{f' ({role(name)})' if with_role else ''}: {name}: {text}{was}"


def role(name: str) -> str:
    """What we do with an argument or a field: ``read`` is one that the package's source names.

    >>> [role(name) for name in ("tensor_model_parallel_size", "hidden_size", "log_interval")]
    ['written', 'read', 'not known']
    """
    dest = name.rpartition(".")[2]
    tables = {
        "written": {*PARALLEL_ARGUMENTS, *WRITABLE},
        "refused": {*REASONS["refused"], *architecture.REFUSED},
        "not priced": architecture.UNPRICED,
        "read": named(),
    }
    return next((what for what, names in tables.items() if dest in names), "not known")


@functools.cache
def named() -> frozenset[str]:
    """Words that the package's source has in quotes, keys of its tables, and names listed there."""
    package = ROOT / "nest_megatron"
    source, tables = (
        "".join(p.read_text() for p in package.rglob(f"*.{end}")) for end in ("py", "toml")
    )
    quoted = re.findall(r"(?:[\"']|^)(\w+)(?:[\"']| = )", source + tables, re.MULTILINE)
    lists = re.findall(r'= "+([\w\s.]+)"', tables)
    return frozenset((*quoted, *(name for names in lists for name in names.split())))


def fields(checkout: Path) -> dict[str, str]:
    """Fields of the configurations' dataclasses with type and default, by ``Class.field``."""
    found = {}
    for _, tree in _trees(checkout):
        for each in ast.walk(tree):
            if isinstance(each, ast.ClassDef):
                for line in each.body:
                    if isinstance(line, ast.AnnAssign):
                        default = "" if line.value is None else f" = {ast.unparse(line.value)}"
                        name = f"{each.name}.{ast.unparse(line.target)}"
                        found[name] = ast.unparse(line.annotation) + default
    return found


def checks(checkout: Path) -> dict[str, str]:
    """What ``validate_args`` and each ``__post_init__`` refuse, by condition, with the place."""
    found = {}
    for path, tree in _trees(checkout):
        for each in ast.walk(tree):
            if not isinstance(each, ast.FunctionDef):
                continue
            if each.name not in ("validate_args", "__post_init__", "finalize", "validate"):
                continue
            for line in ast.walk(each):
                raises = isinstance(line, ast.If) and isinstance(line.body[-1], ast.Raise)
                if isinstance(line, ast.Assert) or raises:
                    words = "" if isinstance(line, ast.Assert) else "not "
                    found[f"`{words}({ast.unparse(line.test)})`"] = f"{path} {each.name}"  # type: ignore[union-attr]
    return found


def recipes(checkout: Path) -> dict[str, str]:
    """Public functions of Megatron-Bridge's recipes that return a configuration, by name."""
    found = {}
    for folder in _RECIPES:
        for path in sorted((checkout / folder).rglob("*.py")):
            for each in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(each, ast.FunctionDef) and each.name.endswith("_config"):
                    found[each.name] = str(path.relative_to(checkout))
    return {name: path for name, path in found.items() if not name.startswith("_")}


def _trees(checkout: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in _SOURCES:
        if (checkout / path).exists():
            yield path, ast.parse((checkout / path).read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
