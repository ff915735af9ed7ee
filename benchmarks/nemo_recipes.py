"""Every pretraining recipe of NeMo, planned and judged by NeMo's and megatron-core's own checks.

Run from the project's root in the environment that ``bash .ci/nemo`` makes::

    .venv-nemo/bin/python benchmarks/nemo_recipes.py --out docs/nemo_recipes.md

Each recipe at 8, 64 and 1,024 GPUs of dgx_h100. The time is that of ``auto_recipe`` alone: reading,
planning and writing, without NeMo's import. Then the same plan is written once more, and that is
timed by itself.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import pkgutil
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.errors import NestError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.integrations.nemo import apply_plan, auto_recipe  # noqa: E402
from nest_megatron.report.failure import NothingFitsError  # noqa: E402
from nest_megatron.report.markdown import table  # noqa: E402
from nest_megatron.research.comparison_run import layout_words  # noqa: E402
from tests.nemo.recipes import recipe, validate  # noqa: E402

NODES = (1, 8, 128)
PATIENCE_S = 1.5
COMMAND = ".venv-nemo/bin/python benchmarks/nemo_recipes.py --out docs/nemo_recipes.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One recipe at one size.

    Args:
        outcome: ``accepted``, ``nothing fits``, ``refused`` or ``failed``.
        told: the layout, or why there is none.
        apply_s: of ``apply_plan`` alone.
    """

    name: str
    num_gpus: int
    outcome: str
    told: str
    seconds: float
    apply_s: float | None = None


def rows() -> Iterator[Row]:
    """Every recipe that pretrains, at every size; a model that is refused is not asked again."""
    recipes = importlib.import_module("nemo.collections.llm.recipes")
    for module in pkgutil.iter_modules(recipes.__path__):
        loaded = importlib.import_module(f"{recipes.__name__}.{module.name}")
        if not hasattr(loaded, "pretrain_recipe"):
            continue
        for nodes in NODES:
            row = one(module.name, nodes)
            if row is None:
                break
            print(row, file=sys.stderr)
            yield row
            if row.outcome == "refused":
                break


def one(name: str, nodes: int) -> Row | None:
    """A recipe planned and judged, or ``None`` if it does not pretrain."""
    try:
        source = recipe(name, num_nodes=nodes)
    except NotImplementedError:
        return None
    started = time.perf_counter()
    try:
        plan, _ = auto_recipe(source, cluster="dgx_h100")
        outcome, told = "accepted", " ".join(layout_words(plan))
    except NothingFitsError as error:
        outcome, told = "nothing fits", str(error)
    except NestError as error:
        outcome, told = "refused", str(error)
    seconds = time.perf_counter() - started
    apply_s = None
    if outcome == "accepted":
        try:
            validate(source)
            again = time.perf_counter()
            assert apply_plan(source, plan) == (), "written again, a plan changes nothing"
            apply_s = time.perf_counter() - again
        except Exception as error:  # noqa: BLE001 - whatever a framework raises is an answer
            outcome, told = "failed", f"{type(error).__name__}: {error}"
    return Row(
        name=name,
        num_gpus=8 * nodes,
        outcome=outcome,
        told=told,
        seconds=seconds,
        apply_s=apply_s,
    )


def page(found: list[Row], import_s: float) -> Iterator[str]:
    """The page: what was judged, how long it took, all rows."""
    counts = {name: sum(row.outcome == name for row in found) for name in _OUTCOMES}
    times = sorted(row.seconds for row in found if row.outcome == "accepted")
    late = sum(seconds > PATIENCE_S for seconds in times)
    yield "# NeMo's recipes, planned\n"
    yield "Every pretraining recipe of nemo-toolkit 2.7.3 at 8, 64 and 1,024 GPUs of dgx_h100,"
    yield "through `nest_megatron.integrations.nemo.auto_recipe`. A plan counts as accepted where"
    yield "`llm.api._validate_config`, `TransformerConfig` and megatron-core's count of layers take"
    yield "the rewritten recipe, and where writing it again changes nothing.\n"
    yield f"Machine: {platform.machine()}, {os.cpu_count()} cores, Python"
    yield f"{platform.python_version()}. Command: `{COMMAND}`\n"
    planned = counts["accepted"] + counts["failed"]
    yield f"* {counts['accepted']} of {planned} plans are accepted."
    yield f"* {counts['refused']} models are refused, {counts['nothing fits']} jobs fit nowhere."
    yield f"* Reading, planning and writing: {statistics.median(times):.2f} s in the median,"
    yield f"  {times[-1]:.1f} s at most, more than {PATIENCE_S} s in {late} of {len(times)};"
    yield f"  NeMo's own import took {import_s:.0f} s before."
    writing = sorted(row.apply_s for row in found if row.apply_s is not None)
    yield f"* `apply_plan` by itself: {1e3 * statistics.median(writing):.0f} ms in the median,"
    yield f"  {1e3 * writing[-1]:.0f} ms at most.\n"
    cells = ([r.name, str(r.num_gpus), r.outcome, r.told, f"{r.seconds:.2f}"] for r in found)
    yield table(("recipe", "GPUs", "outcome", "layout, or why", "seconds"), list(cells))


_OUTCOMES = ("accepted", "nothing fits", "refused", "failed")


def main() -> int:
    """Write the page, or print it; 1 if a plan was not accepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    started = time.perf_counter()
    importlib.import_module("nemo.collections.llm.recipes")
    import_s = time.perf_counter() - started
    logging.disable(logging.CRITICAL)
    found = list(rows())
    text = "\n".join(page(found, import_s)) + "\n"
    if options.out is None:
        print(text, end="")
    else:
        write_text(options.out, text)
    return int(any(row.outcome == "failed" for row in found))


if __name__ == "__main__":
    sys.exit(main())
