"""Choose the stored rows, and set the thresholds from what is reached today.

Run from the project's root::

    python -m tests.published.make rows FOLDER    # FOLDER holds the whole collection
    python -m tests.published.make thresholds     # writes thresholds.yaml

A threshold is 1.15 times today's value (a rank correlation less 0.1), but never beyond the goal of
its set where the stored rows meet it. Loosen one only with a reason in the changelog.
"""

from __future__ import annotations

import csv
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import yaml

from nest_megatron.validation.outcome import GROUP_COLUMNS
from tests.published.sets import DATA, FILES, HERE, is_met, refused, scored, values
from tools.accuracy.named_sets import Measure, NamedSet

Row = dict[str, str]

#: About how many rows of each file are kept; each source keeps at least ``_LEAST``.
_MOST = {
    "throughput.csv": 50,
    "throughput_vtrain_a100.csv": 40,
    "memory_peak.csv": 25,
    "memory_megatron_golden.csv": 60,
    "comm_collectives.csv": 55,
}
_LEAST = 3
_CLUSTERS = " on several nodes"
#: More is kept of searches of layouts, so that there is something to rank, and of tuned runs.
_MORE = {
    "bigscience-bloom-prequel": 100,
    f"vtrain-ground-truth{_CLUSTERS}": 41,
    "nvidia-megatron-bridge-perf": 20,
    "nvidia-dgxc-benchmarking": 20,
    "simumax-b200-real": 8,
}
_SPARE, _RANKS_SPARE = 1.15, 0.1
#: Per cent that a value may grow by at least (else 0.3); one swapped pair moves a regret by more.
_LEAST_SPARE = {"regret": 2.0}
_HEAD = """\
# Written by `python -m tests.published.make thresholds`.
# sets: per cent, but spearman (a rank correlation) and refused (rows). refused: rows of each file.
"""


def choose(rows: Sequence[Row], most: int, part: Callable[[Row], tuple[str, ...]]) -> list[Row]:
    """Some rows of every source, whole jobs at a time, in their order.

    Args:
        part: rows that stay together: the layouts of one job.
    """
    draw = random.Random(0)
    by_source: dict[str, dict[tuple[str, ...], list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        by_source[_stratum(row)][part(row)].append(row)
    kept: set[int] = set()
    for stratum, jobs in by_source.items():
        share = round(most * sum(map(len, jobs.values())) / len(rows))
        wanted = max(_LEAST, share, _MORE.get(stratum, 0) if part is _job else 0)
        order = draw.sample(list(jobs.values()), len(jobs))
        kept |= {id(row) for row in _first(order, wanted)}
    return [row for row in rows if id(row) in kept]


def _stratum(row: Row) -> str:
    """The source; vTrain's clusters apart from its single nodes."""
    several = row["source"].startswith("vtrain") and int(row["n_gpus"]) > 8
    return row["source"] + (_CLUSTERS if several else "")


def _first(jobs: Iterable[list[Row]], wanted: int) -> list[Row]:
    found: list[Row] = []
    for job in jobs:
        if len(found) >= wanted:
            break
        found += job[: max(wanted - len(found), 2)]
    return found


def _job(row: Row) -> tuple[str, ...]:
    return tuple(row.get(column, "") for column in GROUP_COLUMNS)


def _alone(row: Row) -> tuple[str, ...]:
    return (row["row_id"],)


def write_rows(folder: Path) -> None:
    """Copy some rows of every source, all columns."""
    DATA.mkdir(exist_ok=True)
    for name in FILES:
        with (folder / name).open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            rows = list(reader)
            columns = list(reader.fieldnames or ())
        kept = choose(rows, _MOST[name], _job if name.startswith("throughput") else _alone)
        with (DATA / name).open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(kept)
        print(f"{name}: {len(kept)} of {len(rows)}")


def threshold(found: NamedSet, name: str, value: float) -> float:
    """A little worse than today's value, within the goal where today's value is."""
    if name == "refused":
        return value
    goals = {goal.measure.name.lower(): goal.value for goal in found.goals}
    if name == Measure.SPEARMAN.name.lower():
        loose = value - _RANKS_SPARE
        return round(max(loose, goals[name]) if value >= goals[name] else loose, 3)
    loose = max(value * _SPARE, value + _LEAST_SPARE.get(name, 0.3))
    return round(min(loose, goals[name]) if is_met(name, value, goals[name]) else loose, 2)


def write_thresholds() -> None:
    """Set every threshold anew."""
    sets = {
        key: {name: threshold(each, name, value) for name, value in values(each, scores).items()}
        for key, (each, scores) in scored().items()
    }
    text = _HEAD + yaml.safe_dump({"sets": sets, "refused": refused()}, sort_keys=False)
    (HERE / "thresholds.yaml").write_text(text, encoding="utf-8")
    print(text)


def main(arguments: Sequence[str]) -> None:
    """Run one of the two."""
    match list(arguments):
        case ["rows", folder]:
            write_rows(Path(folder))
        case ["thresholds"]:
            write_thresholds()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
