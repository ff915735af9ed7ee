"""Every recipe of NeMo and Megatron-Bridge with adapters, planned and validated.

Run from the project's root in the environment that ``bash .ci/nemo`` makes::

    .venv-nemo/bin/python benchmarks/peft_recipes.py --out docs/peft_recipes.md

Each with LoRA and with DoRA, at 64 GPUs of dgx_h100 with everything freed. NeMo's data module is
built, and ``llm.api._validate_config`` asked; of Megatron-Bridge the whole ``ConfigContainer`` is
validated.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.recipes import (  # noqa: E402
    VOCABULARY,
    Row,
    judged,
    write_page,
)
from nest_megatron.integrations import megatron_bridge, nemo  # noqa: E402
from tests.nemo import bridge, recipes  # noqa: E402
from tools.markdown import table  # noqa: E402

GPUS = 64
COMMAND = ".venv-nemo/bin/python benchmarks/peft_recipes.py --out docs/peft_recipes.md"
OUTCOMES = ("accepted", "nothing fits", "refused", "ends by itself", "not built", "failed")
SCHEMES = ("lora", "dora")
#: No runners-up are ranked: the page has none.
BEST_ALONE = ["search.num_alternatives=0"]


def nemo_rows(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Every recipe of NeMo that takes adapters."""
    package = importlib.import_module("nemo.collections.llm.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        if not wanted.search(module.name):
            continue
        if hasattr(importlib.import_module(f"{package.__name__}.{module.name}"), "finetune_recipe"):
            for scheme in SCHEMES:
                yield _row("NeMo", module.name, scheme, _of_nemo(module.name, scheme))


def _row(framework: str, name: str, scheme: str, found: tuple[str, str]) -> Row:
    return Row(
        framework=framework,
        kind="adapters",
        name=f"{name}, {scheme}",
        num_gpus=GPUS,
        outcome=found[0],
        told=found[1],
    )


def _of_nemo(name: str, scheme: str) -> tuple[str, str]:
    try:
        source = recipes.finetune(name, scheme=scheme)
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        return "not built", f"{type(error).__name__}: {error}"

    def plan() -> Any:
        return nemo.auto_recipe(
            source,
            cluster="dgx_h100",
            overrides=BEST_ALONE,
            free=["all"],
            vocab_size=VOCABULARY,
        )[0]

    return judged(plan, lambda: recipes.validate(source))


def bridge_rows(wanted: re.Pattern[str]) -> Iterator[Row]:
    """Every recipe of Megatron-Bridge with adapters."""
    for _, name, make in bridge.recipes(r"^(?!default).*_peft_config$"):
        if not wanted.search(name):
            continue
        for scheme in SCHEMES:
            made = functools.partial(make, peft_scheme=scheme)
            yield _row("Megatron-Bridge", name, scheme, _of_bridge(made))


def _of_bridge(make: Callable[[], Any]) -> tuple[str, str]:
    try:
        cfg = bridge.built(make)
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        return "not built", f"{type(error).__name__}: {error}"

    def plan() -> Any:
        return megatron_bridge.auto_recipe(
            cfg,
            cluster="dgx_h100",
            overrides=[f"cluster.num_gpus={GPUS}", *BEST_ALONE],
            free=["all"],
            vocab_size=VOCABULARY,
            environment={},
        )[0]

    def validate() -> None:
        if cfg.peft is not None:  # which the user names
            cfg.checkpoint.pretrained_checkpoint = "/nowhere"
        bridge.validate(cfg, GPUS)

    return judged(plan, validate)


def page(found: list[Row]) -> Iterator[str]:
    """The page: the counts of each framework, then all rows."""
    yield "# Recipes with adapters, planned\n"
    yield f"Every recipe that takes adapters, with LoRA and with DoRA, at {GPUS} GPUs of dgx_h100"
    yield "with all choices freed: NeMo 2.7.3 (the data is built, `llm.api._validate_config` asked)"
    yield "and Megatron-Bridge 0.3.1 (all of `ConfigContainer` is validated)."
    yield "[recipes.md](recipes.md) has those that train all weights."
    yield f"Written on {date.today()} by `{COMMAND}`.\n"
    counts = [
        [name, *(str(sum(r.framework == name and r.outcome == o for r in found)) for o in OUTCOMES)]
        for name in dict.fromkeys(row.framework for row in found)
    ]
    yield table(("framework", *OUTCOMES), counts)
    yield ""
    cells = [[r.framework, r.name, r.outcome, r.told] for r in found]
    yield table(("framework", "recipe", "outcome", "layout, or why"), cells)


def main() -> int:
    """Write the page, or print it; 1 if a plan was not accepted."""
    return write_page(__doc__, (nemo_rows, bridge_rows), page)


if __name__ == "__main__":
    sys.exit(main())
