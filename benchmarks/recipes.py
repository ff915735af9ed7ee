"""Every recipe of NeMo and Megatron-Bridge that trains all weights, planned and validated.

Run from the project's root in the environment that ``bash .ci/nemo`` makes::

    .venv-nemo/bin/python benchmarks/recipes.py --out docs/recipes.md

Each recipe is built, planned by ``auto_recipe`` on dgx_h100 at the first of 64, 1,024 and 8 GPUs
where a plan fits, written back, and given to the framework's own checks (``tests/nemo``); then the
plan is written once more, which must change nothing.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import inspect
import itertools
import logging
import pkgutil
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.errors import NestError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.integrations import megatron_bridge, nemo  # noqa: E402
from nest_megatron.report.failure import NothingFitsError  # noqa: E402
from nest_megatron.research.comparison_run import layout_lines  # noqa: E402
from tests.nemo import bridge, recipes, substitutes  # noqa: E402
from tools.markdown import table  # noqa: E402

SIZES = (64, 1024, 8)
COMMAND = ".venv-nemo/bin/python benchmarks/recipes.py --out docs/recipes.md"
#: Jobs that the framework itself ends with an assertion as training starts, by our own reason.
UNRUNNABLE = {
    "takes no packed sequences": "Gemma2DotProductAttention.forward",
    "shared experts have no bias": "SharedExpertMLP.__init__",
}
OUTCOMES = ("accepted", "nothing fits", "refused", "ends by itself", "not built", "failed")
#: Rows of an embedding where a recipe names a tokenizer: their files are not here.
VOCABULARY = 152_000
#: What some of NeMo's recipes ask for: files of the user's.
_OF_THE_USER = {"resume_path": "/nowhere/checkpoint", "tokenizer_model": "/nowhere/tokenizer.model"}
_VISION = re.compile(r"vl\b|_vl|45v|ministral3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recipe.

    Args:
        told: the layout, or why there is none.
    """

    framework: str
    kind: str
    name: str
    num_gpus: int = 0
    outcome: str
    told: str

    @property
    def recipe(self) -> tuple[str, str, str]:
        """What it is a row of."""
        return self.framework, self.kind, self.name


def nemo_rows(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Every recipe of NeMo's collection of language models, packed and plain where it has both."""
    package = importlib.import_module("nemo.collections.llm.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        for kind, function in (("pretraining", "pretrain_recipe"), ("SFT", "finetune_recipe")):
            make = getattr(loaded, function, None)
            if make is None or not wanted.search(module.name):
                continue
            packs = "packed_sequence" in inspect.signature(make).parameters
            for packed in (False, True)[: 1 + packs]:
                name = f"{module.name}{', packed' if packed else ''}"
                options = {"packed_sequence": True} if packed else {}
                row = _first(lambda gpus: _of_nemo(make, gpus, options))  # noqa: B023 - used here
                if row is not None:
                    yield Row(framework="NeMo", kind=kind, name=name, **row)


def _of_nemo(make: Any, num_gpus: int, options: dict[str, Any]) -> tuple[str, str] | None:
    """What becomes of a recipe, or ``None`` if it is none of its kind."""
    takes = inspect.signature(make).parameters
    options |= {name: value for name, value in _OF_THE_USER.items() if name in takes}
    options |= {"peft_scheme": "none"} if "peft_scheme" in takes else {}
    try:
        source = make(
            name="nest", dir="/nowhere", num_nodes=num_gpus // 8, num_gpus_per_node=8, **options
        )
    except NotImplementedError:
        return None
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        if options.get("packed_sequence"):  # it takes the word to say that it cannot
            return None
        return "not built", f"{type(error).__name__}: {error}".splitlines()[0]
    return judged(
        lambda: nemo.auto_recipe(source, cluster="dgx_h100", vocab_size=VOCABULARY)[0],
        lambda: recipes.validate(source),
        lambda plan: nemo.plan_changes(source, plan),
    )


def bridge_rows(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Every recipe of Megatron-Bridge for language models."""
    for module, name, make in bridge.recipes(r"_(pretrain|sft)_config$"):
        if _VISION.search(module) or not wanted.search(name):
            continue
        kind = "SFT" if name.endswith("_sft_config") else "pretraining"
        row = _first(lambda gpus: _of_bridge(make, gpus))  # noqa: B023 - used here
        yield Row(framework="Megatron-Bridge", kind=kind, name=name, **row)


def _of_bridge(make: Callable[..., Any], num_gpus: int) -> tuple[str, str]:
    words = {"mixed_precision_recipe": "bf16_with_fp8_current_scaling_mixed"}
    takes = inspect.signature(make).parameters
    options = {name: word for name, word in words.items() if name in takes}
    try:
        cfg = bridge.built(make, **options)
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        return "not built", f"{type(error).__name__}: {error}".splitlines()[0]

    def plan() -> Any:
        return megatron_bridge.auto_recipe(
            cfg,
            cluster="dgx_h100",
            overrides=[f"cluster.num_gpus={num_gpus}"],
            vocab_size=VOCABULARY,
            environment={},
        )[0]

    return judged(
        plan,
        lambda: bridge.validate(cfg, num_gpus),
        lambda found: megatron_bridge.plan_changes(cfg, found, environment={}),
    )


def _first(judge: Callable[[int], tuple[str, str] | None]) -> dict[str, Any] | None:
    """The first number of GPUs where a plan is accepted; else what the first said."""
    found: dict[str, Any] | None = None
    for num_gpus in SIZES:
        if (answer := judge(num_gpus)) is None:
            return None
        row = {"num_gpus": num_gpus, "outcome": answer[0], "told": answer[1]}
        found = found or row
        if answer[0] in ("accepted", "failed"):
            return row
    return found


def judged(
    plan: Callable[[], Any],
    validate: Callable[[], None],
    again: Callable[[Any], tuple[Any, ...]] = lambda _: (),
) -> tuple[str, str]:
    """What becomes of a recipe, in one word, and its layout or why there is none.

    Args:
        plan: plans the recipe and writes the plan into it.
        validate: asks the framework, which raises for a recipe that it does not take.
        again: what the plan would change, written once more.
    """
    try:
        found = plan()
    except NothingFitsError as error:
        return "nothing fits", str(error)
    except NestError as error:
        ends = any(reason in str(error) for reason in UNRUNNABLE)
        return "ends by itself" if ends else "refused", str(error)
    try:
        validate()
        assert again(found) == (), "written again, a plan changes nothing"
    except Exception as error:  # noqa: BLE001 - whatever a framework raises is an answer
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return "accepted", " ".join(layout_lines(found))


def page(found: list[Row]) -> Iterator[str]:
    """The page: the share of each framework, the refusals by reason, then all rows."""
    accepted = sum(row.outcome == "accepted" for row in found)
    runnable = sum(row.outcome != "ends by itself" for row in found)
    yield "# Recipes, planned\n"
    yield "Every recipe of NeMo 2.7.3 and Megatron-Bridge 0.3.1 for language models that trains all"
    yield "weights, at the first of 64, 1,024 and 8 GPUs of dgx_h100 where a plan fits. A plan"
    yield "counts as accepted where the framework takes the rewritten recipe (NeMo's data module,"
    yield "`llm.api._validate_config` and megatron-core's count of layers; all of Megatron-Bridge's"
    yield "`ConfigContainer`), and where writing it again changes nothing."
    yield f"Written on {date.today()} by `{COMMAND}`.\n"
    yield f"**{accepted / len(found):.1%}** of {len(found)} recipes are planned and accepted,"
    yield f"{accepted / runnable:.1%} of the {runnable} that the framework itself can run: the"
    yield "others (*ends by itself*) are refused here, and end there with an assertion as training"
    yield f"starts ({', '.join(f'`{where}`' for where in UNRUNNABLE.values())}).\n"
    groups = dict.fromkeys((row.framework, row.kind) for row in found)
    counts = [[*key, *map(str, _counts(found, *key))] for key in groups]
    yield table(("framework", "kind", *OUTCOMES, "share"), counts)
    yield "\n## What is not planned\n"
    reasons: dict[str, list[str]] = collections.defaultdict(list)
    for row in found:
        if row.outcome != "accepted":
            reasons[f"{row.outcome}: {_reason(row.told)}"].append(row.name)
    ranked = sorted(reasons.items(), key=lambda item: -len(item[1]))
    rows = [[str(len(names)), why, ", ".join(dict.fromkeys(names))] for why, names in ranked]
    yield table(("recipes", "why", "which"), rows)
    yield "\n## All recipes\n"
    cells = [[r.framework, r.kind, r.name, f"{r.num_gpus:,}", r.outcome, r.told] for r in found]
    header = ("framework", "kind", "recipe", "GPUs", "outcome", "layout, or why")
    yield table(header, cells)


def _counts(found: list[Row], framework: str, kind: str) -> Iterator[int | str]:
    rows = [row for row in found if (row.framework, row.kind) == (framework, kind)]
    of = collections.Counter(row.outcome for row in rows)
    yield from (of[outcome] for outcome in OUTCOMES)
    yield f"{of['accepted'] / len(rows):.1%}"


def _reason(told: str) -> str:
    """A reason without the names of models: what follows the value."""
    found = re.search(r"': (.*?)(\. Launch|$)", told)
    return found[1] if found else told


def main() -> int:
    """Write the page, or print it; 1 if a plan was not accepted."""
    return write_page(__doc__, (nemo_rows, bridge_rows), page)


def write_page(
    about: str | None,
    kinds: Sequence[Callable[[re.Pattern[str]], Iterator[Row]]],
    page_of: Callable[[list[Row]], Iterator[str]],
) -> int:
    """Judge recipes under the stand-ins of a machine without CUDA; write their page, or print it.

    Returns:
        1 if a plan was not accepted.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--only", default="", help="a pattern in names: others stay as they are on the page"
    )
    options = parser.parse_args()
    wanted = re.compile(options.only)
    warnings.filterwarnings("ignore")
    substitutes.install()
    importlib.import_module("nemo.collections.llm.recipes")
    logging.disable(logging.CRITICAL)
    found = {}
    if options.only and options.out is not None:
        found = {row.recipe: row for row in rows_on(options.out.read_text(encoding="utf-8"))}
    for row in itertools.chain.from_iterable(kind(wanted) for kind in kinds):
        print(row, file=sys.stderr)
        found[row.recipe] = row
    text = "\n".join(page_of([*found.values()])) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return int(any(row.outcome == "failed" for row in found.values()))


def rows_on(text: str) -> Iterator[Row]:
    """The rows of a page's last table, whose header says which fields it has."""
    *_, last = text.strip().split("\n\n")
    header, _, *lines = [line.strip("| ").split(" | ") for line in last.splitlines()]
    for line in lines:
        cells = dict(zip(header, line, strict=True))
        yield Row(
            framework=cells["framework"],
            kind=cells.get("kind", "adapters"),
            name=cells["recipe"],
            num_gpus=int(cells.get("GPUs", "0").replace(",", "")),
            outcome=cells["outcome"],
            told=cells["layout, or why"],
        )


if __name__ == "__main__":
    sys.exit(main())
