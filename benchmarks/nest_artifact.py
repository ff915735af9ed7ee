"""NEST's published solver and our artifact mode, on the same instances and by the same formula.

Run from the project's root, with a folder of instances and recorded results::

    python benchmarks/nest_artifact.py FOLDER
    python benchmarks/nest_artifact.py FOLDER --out docs/nest_artifact.md

One process an instance. Ours is the CPU time to read the file, search and price; imports and the
start of Python are not in it, and neither is the artifact's scheduling of operators.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from nest_megatron.errors import UserInputError  # noqa: E402
from nest_megatron.files import write_text  # noqa: E402
from nest_megatron.research.nest_artifact.files import (  # noqa: E402
    named_baseline,
    read_instance,
    read_placement,
)
from nest_megatron.research.nest_artifact.price import (  # noqa: E402
    Instance,
    price,
    rule_without,
)
from nest_megatron.research.nest_artifact.search import (  # noqa: E402
    ArtifactSolution,
    has_kernel,
    solve,
)
from tools.markdown import table  # noqa: E402

MIB = 2**20
HEAD = ("setup", "instance", "p, d, t", "artifact's time", "ours", "ratio")
HEAD += ("its CPU s", "ours, CPU ms", "speed-up", "its peak MiB", "ours, MiB")
#: A size that the artifact's authors report and nobody recorded here: GPT-3 on 1,024 devices.
GROWN = ("gpt3_128", 1024)


def one(path: Path, num_devices: int | None) -> dict[str, Any]:
    """One instance, to be run in a process of its own so that the peak memory is its own.

    Args:
        num_devices: what its outermost level is grown to; nothing recorded is then compared.
    """
    has_kernel()
    started = time.process_time()
    instance = read_instance(path)
    if num_devices is not None:
        instance = grown(instance, num_devices)
    read = time.process_time()
    found = solve(instance)
    done = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    assert isinstance(found, ArtifactSolution)
    placement = found.placement
    row = {
        "setup": path.parent.name,
        "name": path.stem if num_devices is None else f"{path.stem} at {num_devices:,}",
        "degrees": (
            len(placement.stages),
            placement.data_parallel_size,
            placement.tensor_model_parallel_size,
        ),
        "ours": found.price.time,
        "search_s": done - read,
        "cpu_s": done - started,
        "peak_mib": peak,
    }
    return row if num_devices is not None else {**row, **recorded(path, instance)}


def grown(instance: Instance, num_devices: int) -> Instance:
    """The same job on more devices of the outermost level."""
    inner = instance.network.fan_outs[:-1]
    network = dataclasses.replace(
        instance.network, fan_outs=(*inner, num_devices // math.prod(inner))
    )
    return dataclasses.replace(instance, network=network, num_devices=num_devices)


def recorded(path: Path, instance: Instance) -> dict[str, Any]:
    """What the artifact answered, and whether our formula repeats it to the last digit."""
    result = path.with_name(f"{path.stem}.result.json")
    document = json.loads(result.read_text(encoding="utf-8"))
    placement, given = read_placement(result, instance)
    assert given is not None
    listed = price(instance, placement, rule_without(["links_from_printed_placement"])).time
    printed = document["output"]["baselineResults"] or {}
    return {
        "artifact": min(given, listed),
        "listed": listed / given - 1.0,
        "matched": price(instance, placement).time_per_batch == given,
        "artifact_cpu_s": document["user_s"],
        "artifact_peak_mib": document["peak_rss_mb"],
        "baselines": {name: baseline(instance, name, time) for name, time in printed.items()},
    }


def baseline(instance: Instance, name: str, printed: float | str | None) -> str:
    """How our price of a baseline compares with the printed one."""
    try:
        ours = price(instance, named_baseline(instance, name)).time_per_batch
    except UserInputError as error:
        return f"refused: {error.limit}" if isinstance(printed, str) else "differs"
    return "same" if ours == printed else "differs"


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """All instances below a folder, each in its own process, and one that is grown."""
    inputs = sorted(p for p in folder.rglob("*.json") if not p.stem.endswith(".result"))
    for path in inputs:
        yield child(path)
    name, num_devices = GROWN
    for path in inputs:
        if path.stem == name:
            yield child(path, "--devices", str(num_devices))


def child(path: Path, *more: str) -> dict[str, Any]:
    """The row of one instance."""
    command = [sys.executable, __file__, str(path), "--one", *more]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text."""
    ours = [f"{1e3 * row['cpu_s']:.2f}", f"{row['peak_mib']:.0f}"]
    head = [row["setup"], row["name"], ", ".join(map(str, row["degrees"]))]
    if "artifact" not in row:
        return [*head, "", f"{row['ours']:.10g}", "", "", ours[0], "", "", ours[1]]
    return [
        *head,
        f"{row['artifact']:.10g}",
        f"{row['ours']:.10g}",
        f"{row['ours'] / row['artifact']:.9f}",
        f"{row['artifact_cpu_s']:.2f}",
        ours[0],
        f"{row['artifact_cpu_s'] / row['cpu_s']:,.0f}",
        f"{row['artifact_peak_mib']:,.0f}",
        ours[1],
    ]


def totals(found: Sequence[dict[str, Any]]) -> list[str]:
    """What the rows come to."""
    both = [row for row in found if "artifact" in row]
    theirs, ours = (sum(row[name] for row in both) for name in ("artifact_cpu_s", "cpu_s"))
    search = sum(row["search_s"] for row in both)
    speed_ups = [row["artifact_cpu_s"] / row["cpu_s"] for row in both]
    mean = math.exp(sum(map(math.log, speed_ups)) / len(speed_ups))
    slower = sum(row["ours"] > row["artifact"] for row in both)
    faster = sum(row["ours"] < row["artifact"] for row in both)
    verdicts = [verdict for row in both for verdict in row["baselines"].values()]
    same = verdicts.count("same")
    return [
        f"{len(both)} recorded instances: ours is faster on {faster}, equal to the last digit on "
        f"{len(both) - faster - slower}, slower on {slower}.",
        f"Printed times repeated to the last digit: {sum(row['matched'] for row in both)} of "
        f"{len(both)} plans, {same} of {len(verdicts)} baselines"
        f" ({verdicts.count('differs')} differ, {len(verdicts) - same} are refused here).",
        f"CPU time: {theirs:.1f} s by the artifact at -O2, {1e3 * ours:.1f} ms by ours, of which "
        f"{1e3 * search:.1f} ms are the searches; the rest is reading.",
        f"Speed-up: {min(speed_ups):,.0f} at least, {mean:,.0f} in the geometric mean, "
        f"{max(speed_ups):,.0f} at most.",
        f"Largest peak memory of ours: {max(row['peak_mib'] for row in found):.0f} MiB.",
    ]


def remarks(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Each difference from what was recorded, one a line."""
    unlike = [row for row in found if row.get("listed", 0.0) > 1e-12]
    if unlike:
        shares = (f"{name_of(row)} ({100 * row['listed']:.2g} %)" for row in unlike)
        yield (
            "In some results the printed stage list has other cuts than the printed placement, and "
            "the printed time looks links up in the latter. Packed as it is listed, such a plan "
            f"costs more: {', '.join(shares)}. Ours costs the printed time as it is listed."
        )
    for row in found:
        for name, verdict in row.get("baselines", {}).items():
            if verdict != "same":
                yield (
                    f"{name_of(row)}, {name}: the artifact's solver stops without an answer; "
                    f"here it is {verdict}."
                )


def name_of(row: dict[str, Any]) -> str:
    """An instance by its folder and file."""
    return f"{row['setup']}/{row['name']}"


def document(found: Sequence[dict[str, Any]]) -> str:
    """The page."""
    lines = "\n".join(f"* {line}" for line in totals(found))
    notes = "\n".join(f"* {line}" for line in remarks(found))
    return PAGE.format(
        today=date.today(),
        machine=machine(),
        kernel="the compiled kernel" if has_kernel() else "plain Python",
        table=table(HEAD, map(cells, found), numeric=8),
        totals=lines,
        remarks=notes,
    )


def machine() -> str:
    """Processor and Python, as far as the system says."""
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    name = names[0] if names else platform.machine()
    return f"{name}, {len(names)} cores, Python {platform.python_version()}"


PAGE = """\
# NEST's published solver, and our artifact mode

The authors' solver (scai-tech/Nest at 3e163ad) and `nest-megatron nest solve`, on the same inputs,
in the same space (tensor degree, replicas, stage boundaries; stages packed on the devices, the last
one first) and by the artifact's own formula with all its peculiarities, which
`nest_megatron/research/nest_artifact/price.py` lists. Times per batch are in the instances' unit,
which the authors take as milliseconds. The artifact's time is the lower of what it printed and its
stage list priced again; its CPU seconds (-O2, user) and peak memory were recorded beside its
results, on a machine of two shared cores; they include its own pricing of the
baselines. Ours is the CPU time to read the file, search and price by
{kernel}, in a fresh process an instance, without the start of Python;
peak memory is that of the whole process.

Machine of ours: {machine}.
Measured on {today} by `python benchmarks/nest_artifact.py FOLDER --out docs/nest_artifact.md`.

{totals}

{table}

A row without the artifact's figures is the instance with its outermost level grown to that many
devices. The authors' table gives 3 h 42 min for GPT-3 on 1,024 devices of the fat tree, unoptimised
and with the scheduling of operators.

## Where something differs

Both searches are exact in this space, so equal times are what is expected; plans of equal time may
be cut elsewhere. The larger space, with a network in SI units, is that of `nest-megatron plan`,
which does not price by this formula.

{remarks}

## One rule for any plan

`nest-megatron nest evaluate INSTANCE.json PLAN.json` prices any list of stages as above, and
`--baseline NAME` one of the instance's fixed plans as the artifact prices those: stages costed in
reversed order, and cuts that count the embedding. `--without baselines_last_stage_first` prices
them in the order of every other plan: Manual for Llama-2 on 64 devices then takes 997,064.7
instead of 1,246,330.9, and is the plan that the artifact finds. `--without all` turns every
peculiarity off; `nest solve` takes the same switches and is exact under each.

ZeRO is not searched: the artifact tries it only where its last layer does not fit alone, and then
asks a network simulator for the price of a collective. No recorded instance comes to that; one that
does is refused with the bytes that are missing.
"""


def main() -> None:
    """Print the table, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="write the page here (docs/nest_artifact.md)")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.folder, options.devices)))
        return
    found = list(rows(options.folder))
    if not found:
        parser.error(f"{options.folder} holds no instance")
    print(table(HEAD, map(cells, found), numeric=8))
    print("\n".join(("", *totals(found), *remarks(found))))
    if options.out is not None:
        write_text(options.out, document(found))


if __name__ == "__main__":
    main()
