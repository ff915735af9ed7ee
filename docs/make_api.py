"""Write docs/api.md from the docstrings of the Python API: python docs/make_api.py [--check].

``--check`` writes nothing and ends with 1 where the page is not what the docstrings say.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import nest_megatron
from nest_megatron import api
from nest_megatron.api import sweep
from nest_megatron.report.console import Shown

PAGE = Path(__file__).with_name("api.md")
HEAD = """\
<!-- Written by `python docs/make_api.py` from the docstrings of nest_megatron/api/. -->
# The Python API

For notebooks and scripts: plans, settings and errors are those of the command line, which calls
the same functions. `import nest_megatron` loads nothing else; a name loads what it needs when it is
first used, and never torch.
[recipes/plan_from_python.ipynb](../recipes/plan_from_python.ipynb) shows each of them at work.

```python
>>> from nest_megatron import clusters, estimate, estimate_command, load_plan, models
>>> from nest_megatron import plan, plan_command, plan_for_gpus, plan_table, whatif

```

A setting that only one section of [hydra_configs/plan.yaml](../hydra_configs/plan.yaml) has is a
keyword by its name (`tensor_model_parallel_size=8`); the others are given by section
(`search={"max_seconds": 5}`) or with a dot (`**{"cluster.oversubscription": 4}`). A mistake raises
the `UserInputError` whose text the command line prints; it is a `ValueError` with `what`, `value`,
`limit` and `fix`. Errors are imported from `nest_megatron.errors` (`UserInputError`,
`PlanFileError`) and `nest_megatron.report.failure` (`NothingFitsError`, `SearchEndedError`). A
`Source` is a name or a path, or the fields of such a file as a mapping; a `StrPath` is a path, as
`str` or as `os.PathLike`.
"""
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def page() -> str:
    """The whole page."""
    public = [name for name in nest_megatron.__all__ if not name.startswith("_")]
    in_order = {**vars(api), **vars(sweep)}  # of the source
    names = [name for name in in_order if name in public]
    found = {name: getattr(nest_megatron, name) for name in names}
    functions = [name for name in names if not inspect.isclass(found[name])]
    functions.sort(
        key=lambda name: name not in ("plan", "plan_command", "estimate", "estimate_command")
    )
    parts = [HEAD, "## Functions\n"]
    parts += [_entry("###", name, found[name]) for name in functions]
    for name in (name for name in names if inspect.isclass(found[name])):
        parts += [f"## {name}\n\n{_body(found[name])}"]
        parts += [_member(name, each) for each in _members(found[name])]
    return "\n".join(parts)


def _members(kind: type) -> Iterator[tuple[str, object]]:
    """Public methods and properties, in the order of the source."""
    ours = [each for each in kind.__mro__ if each.__module__.startswith("nest_megatron.")]
    for base in reversed([each for each in ours if each is not Shown]):
        for name, member in vars(base).items():
            is_called = inspect.isfunction(member) or isinstance(member, property)
            if is_called and not name.startswith("_"):
                yield name, member


def _member(owner: str, member: tuple[str, object]) -> str:
    name, value = member
    if isinstance(value, property):
        return f"`{owner}.{name}`: {inspect.getdoc(value)}\n"
    return _entry("###", f"{owner}.{name}", value)


def _entry(level: str, name: str, function: object) -> str:
    assert callable(function)
    return f"{level} `{name}`\n\n```python\n{_call(name, function)}\n```\n\n{_body(function)}"


def _call(name: str, function: object) -> str:
    """The signature as it is written, one argument a line where it is long."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    given = [each for each in signature.parameters.values() if each.name != "self"]
    words = [_argument(each) for each in given]
    if any(each.kind is each.KEYWORD_ONLY for each in given):
        first = next(n for n, each in enumerate(given) if each.kind is each.KEYWORD_ONLY)
        words.insert(first, "*")
    result = f" -> {signature.return_annotation}"
    line = f"{name}({', '.join(words)}){result}"
    return line if len(line) <= 100 else f"{name}(\n    " + ",\n    ".join(words) + f",\n){result}"


def _argument(parameter: inspect.Parameter) -> str:
    stars = "**" if parameter.kind is parameter.VAR_KEYWORD else ""
    default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
    return f"{stars}{parameter.name}: {parameter.annotation}{default}"


def _body(function: object) -> str:
    """A docstring in Google's form as Markdown."""
    text = inspect.getdoc(function) or ""
    lines: list[str] = []
    inside, fenced = False, False
    for line in text.replace("``", "`").splitlines():
        example = line.startswith(("    >>>", ">>>", "...")) or (fenced and line.strip() != "")
        if example != fenced:
            lines += ["```python"] if example else ["", "```"]  # doctest reads up to an empty line
            fenced = example
        heading = re.fullmatch(r"(\w+):", line)
        if fenced:
            lines.append(line.strip())
        elif heading and heading[1] in _SECTIONS:
            inside = True
            lines += [f"**{heading[1]}**", ""]
        elif inside and (item := re.fullmatch(r"    ([\w, ]+): (.*)", line)):
            lines.append(f"* `{item[1]}`: {item[2]}")
        elif inside and line.startswith("        "):
            lines.append(f"  {line.strip()}")
        else:
            lines.append(line.strip())
            inside = inside and line != ""
    return "\n".join([*lines, *(["", "```"] if fenced else [])]) + "\n"


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true")
    text = page()
    if parser.parse_args(arguments).check:
        return int(PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
