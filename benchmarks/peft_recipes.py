"""Every recipe of NeMo and Megatron-Bridge with adapters, planned and validated.

Run from the project's root in the environment that ``bash .ci/nemo`` makes::

    .venv-nemo/bin/python benchmarks/peft_recipes.py --out docs/peft_recipes.md

Each with LoRA and with DoRA, at 64 GPUs of dgx_h100 with everything freed. NeMo's data module is
built, and ``llm.api._validate_config`` asked; of Megatron-Bridge the whole ``ConfigContainer`` is
validated.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import itertools
import logging
import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.errors import NestError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.integrations import megatron_bridge, nemo  # noqa: E402
from nest_megatron.report.failure import NothingFitsError  # noqa: E402
from nest_megatron.report.markdown import table  # noqa: E402
from nest_megatron.research.comparison_run import layout_words  # noqa: E402
from tests.nemo import bridge, hugging_face, recipes, substitutes  # noqa: E402

GPUS = 64
COMMAND = ".venv-nemo/bin/python benchmarks/peft_recipes.py --out docs/peft_recipes.md"
OUTCOMES = ("accepted", "nothing fits", "refused", "not built", "failed")
#: Rows of an embedding; the tokenizers are not here.
VOCABULARY = 152_000
Row = tuple[str, str, str, str]
SCHEMES = ("lora", "dora")


def nemo_rows() -> Iterator[Row]:
    """Every recipe of NeMo that takes adapters."""
    package = importlib.import_module("nemo.collections.llm.recipes")
    for module in pkgutil.iter_modules(package.__path__):
        if hasattr(importlib.import_module(f"{package.__name__}.{module.name}"), "finetune_recipe"):
            for scheme in SCHEMES:
                yield ("NeMo", f"{module.name}, {scheme}", *_of_nemo(module.name, scheme))


def _of_nemo(name: str, scheme: str) -> tuple[str, str]:
    try:
        source = recipes.finetune(name, scheme=scheme)
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        return "not built", f"{type(error).__name__}: {error}"

    def plan() -> Any:
        return nemo.auto_recipe(source, cluster="dgx_h100", free=["all"], vocab_size=VOCABULARY)[0]

    return _judged(plan, lambda: recipes.validate(source))


def bridge_rows() -> Iterator[Row]:
    """Every recipe of Megatron-Bridge with adapters."""
    package = importlib.import_module("megatron.bridge.recipes")
    for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", lambda _: None):
        try:
            module = importlib.import_module(info.name)
        except ImportError:
            continue
        for name, make in vars(module).items():
            if getattr(make, "__module__", "") != module.__name__:
                continue
            is_recipe = name.endswith("_peft_config") and not name.startswith("default")
            for scheme in SCHEMES if is_recipe else ():
                made = functools.partial(make, peft_scheme=scheme)
                yield ("Megatron-Bridge", f"{name}, {scheme}", *_of_bridge(module, made))


def _of_bridge(module: Any, make: Callable[[], Any]) -> tuple[str, str]:
    try:
        with bridge.on_hopper() as patch:
            patch.setattr(module, "AutoBridge", hugging_face.Offline, raising=False)
            cfg = make()
    except Exception as error:  # noqa: BLE001 - whatever a recipe raises is an answer
        return "not built", f"{type(error).__name__}: {error}"

    def plan() -> Any:
        return megatron_bridge.auto_recipe(
            cfg,
            cluster="dgx_h100",
            overrides=[f"cluster.num_gpus={GPUS}"],
            free=["all"],
            vocab_size=VOCABULARY,
            environment={},
        )[0]

    def validate() -> None:
        if cfg.peft is not None:  # which the user names
            cfg.checkpoint.pretrained_checkpoint = "/nowhere"
        bridge.validate(cfg, GPUS)

    return _judged(plan, validate)


def _judged(plan: Callable[[], Any], validate: Callable[[], None]) -> tuple[str, str]:
    try:
        found = plan()
    except NothingFitsError as error:
        return "nothing fits", str(error)
    except NestError as error:
        return "refused", str(error)
    try:
        validate()
    except Exception as error:  # noqa: BLE001 - whatever a framework raises is an answer
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0]
    return "accepted", " ".join(layout_words(found))


def page(found: list[Row]) -> Iterator[str]:
    """The page: the counts of each framework, then all rows."""
    yield "# Recipes with adapters, planned\n"
    yield f"Every recipe that takes adapters, with LoRA and with DoRA, at {GPUS} GPUs of dgx_h100"
    yield "with all choices freed: NeMo 2.7.3 (the data is built, `llm.api._validate_config` asked)"
    yield "and Megatron-Bridge 0.3.1 (all of `ConfigContainer` is validated)."
    yield f"[recipes.md](recipes.md) has those that train all weights. Written by `{COMMAND}`.\n"
    counts = [
        [name, *(str(sum(r[0] == name and r[2] == o for r in found)) for o in OUTCOMES)]
        for name in dict.fromkeys(row[0] for row in found)
    ]
    yield table(("framework", *OUTCOMES), counts)
    yield ""
    yield table(("framework", "recipe", "outcome", "layout, or why"), [list(row) for row in found])


def main() -> int:
    """Write the page, or print it; 1 if a plan was not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    substitutes.install()
    importlib.import_module("nemo.collections.llm.recipes")
    logging.disable(logging.CRITICAL)
    found = []
    for row in itertools.chain(nemo_rows(), bridge_rows()):
        print(row, file=sys.stderr)
        found.append(row)
    text = "\n".join(page(found)) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return int(any(row[2] == "failed" for row in found))


if __name__ == "__main__":
    sys.exit(main())
