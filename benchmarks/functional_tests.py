"""Megatron-LM's functional tests, planned and asked of it: docs/functional_tests.md.

    python benchmarks/functional_tests.py [--out FILE] CHECKOUT...

Each checkout is a Megatron-LM tree (core_v0.16.1, main); two minutes each on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.megatron_lm.functional import DECODERS, FAMILIES, Survey, survey  # noqa: E402

PAGE = ROOT / "docs" / "functional_tests.md"
HEAD = """# Megatron-LM's own functional tests

`tests/functional_tests/test_cases` of a Megatron-LM checkout holds the jobs that NVIDIA trains to
test a release. Each that trains is planned with its own script on the cluster of its recipe, with
nothing freed. Where no recipe launches it that is `dgx_h100`, or `b200` or `gb200_nvl72` if its
name says so, with 8 GPUs or the fewest that its degrees divide. The written arguments go through
Megatron's own `parse_args`, `validate_args`, `TransformerConfig` and `initialize_model_parallel`
for a world of that size, on a CPU. Transformer Engine is stood in for by a release number (2.13.0).
Jobs that Megatron refuses as they stand are no goal: `of those` is the share of the others that is
planned and accepted.

Written on {today} by `python benchmarks/functional_tests.py CHECKOUT...`;
`tests/megatron_lm/test_functional.py` asserts that Megatron refuses nothing that we wrote and that
it accepts as it stands, that every flag that was typed is there unchanged, and that 95 % of the
jobs of decoders (gpt, moe, mixtral, hybrid, nemotron) are planned and accepted.

"""


def main() -> None:
    """Survey every checkout and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+", metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, default=PAGE)
    given = parser.parse_args()
    surveys = []
    for checkout in given.checkouts:
        os.environ["MEGATRON_LM_HOME"] = checkout
        surveys.append(survey(Path(checkout)))
        print(f"{checkout}: Megatron {surveys[-1].version}", flush=True)
    text = HEAD.format(today=date.today()) + "\n".join(_page(surveys)) + "\n"
    given.out.write_text(text, encoding="utf-8")


def _page(surveys: list[Survey]) -> Iterator[str]:
    yield "| Megatron-LM | jobs of | all | planned | accepted | legal as they stand | of those |"
    yield "|---|---|--:|--:|--:|--:|--:|"
    for each in surveys:
        for title, families in _groups(each):
            yield f"| {_release(each)} | {title} | {_counts(each, families)} |"
    for each in surveys:
        yield f"\n## {_release(each)}\n"
        yield from _reasons("Not planned, in our words", each.not_planned)
        yield from _reasons("Refused by Megatron with the plan's flags and without", each.refused)
        yield "Configurations that are no such job:\n"
        yield from (f"- {count}: {reason}" for reason, count in sorted(each.apart.items()))
        yield ""


def _release(survey: Survey) -> str:
    return survey.version.partition("+")[0]


def _groups(survey: Survey) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Rows of a release: every family that it has, and the decoders together."""
    there = {name.partition("/")[0] for name in (*survey.written, *survey.not_planned)}
    yield from ((family, (family,)) for family in FAMILIES if family in there)
    yield "all decoders", DECODERS


def _counts(survey: Survey, families: tuple[str, ...]) -> str:
    def of(names: Iterable[str]) -> int:
        return sum(name.partition("/")[0] in families for name in names)

    possible = survey.possible(families)
    done = len(survey.accepted.intersection(possible))
    planned, accepted = of(survey.written), of(survey.accepted)
    share = f"{100 * done / len(possible):.0f} %" if possible else "-"
    total = planned + of(survey.not_planned)
    return f"{total} | {planned} | {accepted} | {len(possible)} | {share}"


def _reasons(title: str, refusals: Mapping[str, str]) -> Iterator[str]:
    if not refusals:
        return
    yield f"{title}:\n"
    short = {
        name: re.sub(r"the job = '[^']*': ", "", said)[:280] for name, said in refusals.items()
    }
    for reason, count in Counter(short.values()).most_common():
        names = ", ".join(f"`{name.partition('/')[2]}`" for name in short if short[name] == reason)
        yield f"- {count}: {reason} ({names})"
    yield ""


if __name__ == "__main__":
    main()
