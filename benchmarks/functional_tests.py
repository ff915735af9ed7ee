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
from collections.abc import Iterator, Mapping
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
The table says of each release how many are planned and accepted, of those that Megatron accepts as
they stand.

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
    releases = [_release(each) for each in surveys]
    rows = [[title, *(_count(each, names) for each in surveys)] for title, names in _GROUPS]
    yield from _table(releases, rows)
    for each in surveys:
        yield f"\n## {_release(each)}\n"
        yield from _reasons("Not planned, in our words", each.not_planned)
        yield from _reasons("Refused by Megatron with the plan's flags and without", each.refused)
        yield "Configurations that are no such job:\n"
        yield from (f"- {count}: {reason}" for reason, count in sorted(each.apart.items()))
        yield ""


def _release(survey: Survey) -> str:
    return survey.version.partition("+")[0]


def _table(releases: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| jobs of | {' | '.join(releases)} |"
    yield f"|---|{'--:|' * len(releases)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


#: Rows of the table: every family, and the decoders together.
_GROUPS = (*((family, (family,)) for family in FAMILIES), ("all decoders", DECODERS))


def _count(survey: Survey, families: tuple[str, ...]) -> str:
    possible = survey.possible(families)
    done = len(survey.accepted.intersection(possible))
    return f"{done} of {len(possible)}" if possible else "-"


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
