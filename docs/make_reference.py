"""Write the reference from the schemas: python docs/make_reference.py [--check].

``settings.md`` has every setting of hydra_configs/plan.yaml with its type and its comment,
``commands.md`` every command with its examples, ``rules.md`` every rule of Megatron that plans keep
to, ``plan.schema.json`` the JSON Schema of a plan file, and ``plan_file.md`` its records with what
their docstrings say. ``--check`` writes nothing and ends with 1 where a file is stale.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from nest_megatron.cli.commands import cli
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, TARGETS
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.layout import rulebook
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import DEGREES, Rule

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS))
import json_schema  # noqa: E402  (beside this file)

PLAN = DOCS.parent / "hydra_configs" / "plan.yaml"
SETTINGS_HEAD = """\
<!-- Written by `python docs/make_reference.py` from hydra_configs/plan.yaml and its schema. -->
# Settings

`nest-megatron plan`, `estimate`, `compare` and `tune` take settings as `key=value`, composed by
Hydra ([hydra_configs/plan.yaml](../hydra_configs/plan.yaml) is the primary configuration).
`model=` takes a name of `nest-megatron models` or a file, `cluster=` one of `nest-megatron
clusters` or a file; their fields are those of the catalogue's files ([adding.md](adding.md)), so
`cluster.num_gpus=64` sets one. `gpus`, `memory` and `max_seconds` are short for
`cluster.num_gpus`, `cluster.accelerator.memory_bytes` and `search.max_seconds`. `null` stands for
what is searched, or for the default that the last column names. In a training job the same settings
have `nest.` before them; [launching.md](launching.md#words) lists them.
"""
COMMANDS_HEAD = """\
<!-- Written by `python docs/make_reference.py` from the commands' own help. -->
# Commands

`nest-megatron COMMAND --help` says what each takes. `--json` prints every figure for programs. `-`
as an output is standard output, but for pictures, traces and folders. A file that nest-megatron has
not written is replaced with `--force` only, and so is one that appears while the command runs.
`eval "$(nest-megatron completion bash)"` completes commands, settings and names (zsh and fish as
well).
"""
EXIT_CODES = """\
With 1 `plan` says which bytes are missing, and the nearest change that fits; `estimate` ends with 0
where the layout may fit: it exceeds the limit by less than such predictions are wrong. With 3 what
is known is a lower bound on the step, or a plan that may be more than 10 % slower than the best and
is written all the same: its first line says how far. Raise `search.max_seconds`.
[policy.md](policy.md) explains 10 to 16.
"""
PLAN_HEAD = """\
<!-- Written by `python docs/make_reference.py` from nest_megatron/layout/plan.py. -->
# The plan file

`out=plan.yaml` writes a plan as YAML that people read and review: what is written into the job,
where each rank lies, what the cost model expects, the runners-up, what the search proved, and where
all of it comes from. It reads back exactly, and a checksum covers it.
[plan.schema.json](plan.schema.json) is its JSON Schema (draft 2020-12):

```bash
check-jsonschema --schemafile docs/plan.schema.json plan.yaml
```

A reader refuses a file of another `schema` than its own. Many fields are left out where they
have their default. `nest-megatron explain plan.yaml` prints the plan and its launch command. Sizes
are in bytes, times in seconds, rates in bytes/s and FLOP/s.
"""
RULES_HEAD = """\
<!-- Written by `python docs/make_reference.py` from nest_megatron/layout/rulebook. -->
# The rules of Megatron

Each row is a rule that Megatron, or what it runs on, has. A source without a release is a line of
Megatron-LM core_v0.16.1 (`args` is `megatron/training/arguments.py`, `tc` `transformer_config.py`,
`ps` `parallel_state.py`, `mpc` `model_parallel_config.py`); "(run)" and "(at build)" mark what its
own validation lets pass. A search evaluates a rule as soon as it has decided the fields that the
rule reads; the check of a launch evaluates all, in this order. Where a search counts what a rule
refuses, the last column is what the certificate calls it. An `option_` is an option of the job
beside its layout: a plan that goes without it drops it, with this reason.
"""
RELEASES_HEAD = """\
## Releases

What `target=NAME` may be, a row of `nest_megatron/cost_model/targets.toml` each. Options are those
of Megatron-LM's parser. Packages are of the container that is published with it, or of the source's
own requirements.

| target | megatron-core | options | packages |
|---|---|--:|---|
"""
#: Fields that rules read, where not by Megatron's own name.
_FACTS = {
    **{short: f"`{name}`" for short, name in DEGREES.items()},
    "spec": "model",
    "version": "release",
}
#: Types of settings as readers know them.
_TYPES = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "tuple[int, ...]": "list of integers",
    "tuple[str, ...]": "list of texts",
    "dict[str, typing.Any]": "name or file",
}
#: A line of plan.yaml: its indentation, key, value and comment.
_LINE = re.compile(r"^(?P<indent> *)(?P<key>\w+):(?P<value>[^#]*)(?:# (?P<comment>.*))?$")


def settings_page() -> str:
    """Every setting, a table for each section."""
    types = dict(_types(PlanConfig))
    parts, rows = [SETTINGS_HEAD], {name: [] for name in ("", *_sections())}
    about = {}
    section = ""
    for indent, key, value, comment in _entries():
        if not indent and key in rows:
            section, about[key] = key, comment
        elif key not in ("model", "cluster"):
            name = f"{section}.{key}" if indent else key
            rows[section if indent else ""].append(
                f"| `{name}` | {types[name]} | `{value}` | {_cell(comment)} |"
            )
    table = "| setting | type | default | meaning |\n|---|---|---|---|\n"
    for name, lines in rows.items():
        title = f"## {name}" if name else "## The job"
        said = about.get(name, "")
        intro = f"{said[:1].upper()}{said[1:]}.\n\n" if said else ""
        parts.append(f"{title}\n\n{intro}{table}" + "\n".join(lines) + "\n")
    return "\n".join(parts)


def _sections() -> Iterator[str]:
    hints = typing.get_type_hints(PlanConfig)
    yield from (name for name, hint in hints.items() if dataclasses.is_dataclass(hint))


def _entries() -> Iterator[tuple[int, str, str, str]]:
    """Indentation, key, value and comment of each entry; comments go on over lines."""
    body = PLAN.read_text(encoding="utf-8").partition("\n\n")[2]
    body = re.sub(r"\n +# ", " ", body)
    for line in body.splitlines():
        if found := _LINE.match(line):
            comment = (found["comment"] or "").strip()
            yield len(found["indent"]), found["key"], found["value"].strip(), comment


def _types(kind: type, path: str = "") -> Iterator[tuple[str, str]]:
    """Dotted names of the settings with their types."""
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            yield from _types(typing.cast(type, hint), f"{name}.")
        else:
            yield f"{path}{name}", _written(hint)


def _written(hint: Any) -> str:
    """A type as readers know it."""
    text = re.sub(r"<class '(\w+)'>", r"\1", str(hint)).removesuffix(" | None")
    return _TYPES[text]


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def commands_page() -> str:
    """Every command, those of groups below them."""
    exits = (cli.help or "").partition("\n\n")[2].partition("\n\n")[0]
    told = textwrap.fill(" ".join(exits.split()), 100)
    return "\n".join([COMMANDS_HEAD, told, "", EXIT_CODES, *_commands("", cli)])


def _commands(name: str, group: click.Group) -> Iterator[str]:
    context = click.Context(group)
    for each in group.list_commands(context):
        command = group.get_command(context, each)
        assert command is not None
        full = f"{name} {each}".strip()
        help_text = " ".join((command.help or "").partition("\f")[0].split("\n\n")[0].split())
        examples = "\n".join(getattr(command, "examples", ()))
        yield f"## {full}\n\n{help_text}\n\n```bash\n{examples}\n```\n"
        if isinstance(command, click.Group):
            yield from _commands(full, command)


def rules_page(rules: Iterable[Rule] | None = None) -> str:
    """Every rule, in the order in which a launch is held to them."""
    head = "| rule | release | reads | field | limit | fix | source | counted as |"
    lines = [RULES_HEAD, head, "|---|---|---|---|---|---|---|---|"]
    for rule in rulebook.RULES if rules is None else rules:
        ends = {"since": rule.since, "until": rule.until}
        releases = " ".join(f"{word} {end}" for word, end in ends.items() if end) or "all"
        fields = ", ".join(_FACTS.get(name, f"`{name}`") for name in rule.reads)
        what = re.sub(r"[\w.{}]+", r"`\g<0>`", rule.what)
        texts = (rule.limit, rule.fix, rule.reason)
        limit, fix, reason = (re.sub(r"\{([\w.]+)(:\w)?\}", r"*\1*", text) for text in texts)
        release = f"{releases} ({rule.framework})" if rule.framework else releases
        cells = (f"`{rule.id}`", release, fields, what, limit, fix, rule.source, reason)
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    lines += ["", RELEASES_HEAD.rstrip()]
    for name, target in TARGETS.items():
        packages = ", ".join(f"{each} {release}" for each, release in target.packages.items())
        options = len(load_arguments(target.megatron_core)) if target in MEGATRON_LM else ""
        lines.append(f"| `{name}` | {target.megatron_core} | {options} | {packages} |")
    return "\n".join(lines) + "\n"


def schema_text() -> str:
    """The JSON Schema of a plan file."""
    return json.dumps(_plan_schema(), indent=1) + "\n"


def _plan_schema() -> json_schema.Schema:
    """That of the plan's records, and the checksum that a file holds beside them."""
    schema = json_schema.of_record(ParallelPlan)
    schema["$defs"]["Provenance"]["properties"]["checksum"] = {"type": "string"}
    return schema


def plan_page() -> str:
    """The records of a plan file, the outermost first."""
    schema = _plan_schema()
    kinds = _records(ParallelPlan)
    parts = [PLAN_HEAD, _record_part(ParallelPlan, schema)]
    parts += [_record_part(kinds[name], schema["$defs"][name]) for name in sorted(kinds)]
    return "\n".join(parts)


def _records(kind: type) -> dict[str, type]:
    """The records inside a record, by name."""
    found: dict[str, type] = {}
    left = [kind]
    while left:
        for hint in typing.get_type_hints(left.pop()).values():
            for inner in (hint, *_inside(hint)):
                if dataclasses.is_dataclass(inner) and inner not in (kind, *found.values()):
                    record = typing.cast(type, inner)
                    found[record.__name__] = record
                    left.append(record)
    return found


def _inside(hint: Any) -> Iterator[Any]:
    for inner in typing.get_args(hint):
        yield inner
        yield from _inside(inner)


def _record_part(kind: type, schema: json_schema.Schema) -> str:
    """A record's heading, its docstring's first line, and its fields."""
    summary, _, rest = (inspect.getdoc(kind) or "").partition("\n")
    meanings = dict(_meanings(rest))
    lines = [f"## {kind.__name__}", "", _marked(summary), "", "| field | type | meaning |"]
    lines.append("|---|---|---|")
    for name, field in schema["properties"].items():
        meaning = _cell(_marked(meanings.get(name, "")))
        lines.append(f"| `{name}` | {_cell(_type_of(field))} | {meaning} |")
    return "\n".join(lines) + "\n"


def _meanings(text: str) -> Iterator[tuple[str, str]]:
    """Fields and what the docstring's ``Args`` say of them."""
    args = text.partition("Args:\n")[2].partition("\n\n")[0]
    for entry in re.split(r"\n(?=    \w)", "\n" + args):
        names, _, meaning = " ".join(entry.split()).partition(": ")
        yield from ((name.strip(), meaning) for name in names.split(","))


def _marked(text: str) -> str:
    return text.replace("``", "`")


def _type_of(schema: json_schema.Schema) -> str:
    """A schema in a cell of a table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_type_of(each) for each in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}"
    if schema.get("type") == "array":
        return f"list of {_type_of(schema['items'])}"
    if schema.get("type") == "object":
        return f"names to {_type_of(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def main(arguments: list[str]) -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    pages = {
        "commands.md": commands_page(),
        "rules.md": rules_page(),
        "settings.md": settings_page(),
        "plan_file.md": plan_page(),
        "plan.schema.json": schema_text(),
    }
    is_check = parser.parse_args(arguments).check
    stale = [
        name
        for name, text in pages.items()
        if not (DOCS / name).is_file() or (DOCS / name).read_text(encoding="utf-8") != text
    ]
    for name in () if is_check else stale:
        (DOCS / name).write_text(pages[name], encoding="utf-8")
    print(*(f"{name} {'differs' if is_check else 'written'}" for name in stale), sep="\n", end="")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
