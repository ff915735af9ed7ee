"""Feed every reader with broken documents, and write down what came of it.

``python -m tests.fuzz --cases 1000000 --write`` puts the counts into ``docs/reliability.md``;
``--reader NAME --start I --cases 1`` repeats a case that was reported. A case is made from the
seed, the reader's name and its number alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import mmap
import os
import resource
import shlex
import signal
import struct
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from nest_megatron.errors import NestError
from tests.fuzz.readers import READERS, ROOT, Reader

#: What a case may take.
MAX_SECONDS, MAX_BYTES = 5.0, 500 * 2**20
_ROUND = 20_000
_PAGE = ROOT / "docs" / "reliability.md"
_BEGIN, _END = "<!-- readers: begin -->", "<!-- readers: end -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What became of cases.

    Args:
        accepted: read as sound.
        refused: ended in an error of ours that names the mistake.
        faults: anything else, with the case's number.
        peak_bytes: what a process grew by, over all its cases.
    """

    accepted: int = 0
    refused: int = 0
    faults: tuple[tuple[int, str], ...] = ()
    slowest_s: float = 0.0
    peak_bytes: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            accepted=self.accepted + other.accepted,
            refused=self.refused + other.refused,
            faults=self.faults + other.faults,
            slowest_s=max(self.slowest_s, other.slowest_s),
            peak_bytes=max(self.peak_bytes, other.peak_bytes),
        )

    @property
    def cases(self) -> int:
        """How many there were."""
        return self.accepted + self.refused + len(self.faults)


class TooSlowError(BaseException):
    """A case ran past its time; no handler of errors may catch it."""


def _too_slow(*_: object) -> None:
    raise TooSlowError


def run_case(reader: Reader, seeds: tuple[str, ...], number: int, seed: int) -> Counts:
    """Read one broken text."""
    text = reader.case(Random(f"{seed}:{reader.name}:{number}"), seeds)
    begun = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, 2 * MAX_SECONDS)
    try:
        reader.read(text)
        counts = Counts(accepted=1)
    except NestError:
        counts = Counts(refused=1)
    except (Exception, SystemExit, TooSlowError) as error:  # noqa: BLE001 - each is a fault
        counts = Counts(faults=((number, _told(error)),))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    seconds = time.process_time() - begun
    if seconds > MAX_SECONDS and not counts.faults:
        counts = Counts(faults=((number, f"it took {seconds:.1f} s of CPU"),))
    return dataclasses.replace(counts, slowest_s=seconds)


def _told(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:300]}"


def _work(reader: Reader, seeds: tuple[str, ...], numbers: range, seed: int, shared: Any) -> None:
    """A block of cases in a process of its own; ``shared`` holds the number that it is at."""
    signal.signal(signal.SIGPROF, _too_slow)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    total = Counts()
    for number in numbers:
        struct.pack_into("q", shared, 0, number)
        total += run_case(reader, seeds, number, seed)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    total = dataclasses.replace(total, peak_bytes=max(0, grown))
    os.write(3, repr(dataclasses.astuple(total)).encode())


def run_block(reader: Reader, seeds: tuple[str, ...], numbers: range, seed: int) -> Counts:
    """A block of cases; one that kills its process is a fault, and the rest goes on behind it."""
    shared = mmap.mmap(-1, 8)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write_end, 3) if write_end != 3 else None
        code = 1
        try:
            _work(reader, seeds, numbers, seed, shared)
            code = 0
        except BaseException:  # noqa: BLE001 - the parent hears of it by the code
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        told = stream.read()
    _, status = os.waitpid(child, 0)
    if status == 0:
        import ast

        values = ast.literal_eval(told.decode())
        return Counts(
            **dict(zip((f.name for f in dataclasses.fields(Counts)), values, strict=True))
        )
    (at,) = struct.unpack_from("q", shared, 0)
    died = Counts(faults=((at, f"the process ended with status {status}"),))
    done = (
        run_block(reader, seeds, range(numbers.start, at), seed) if at > numbers.start else Counts()
    )
    left = range(at + 1, numbers.stop)
    return done + died + (run_block(reader, seeds, left, seed) if left else Counts())


def fuzz(
    readers: tuple[Reader, ...],
    cases: int,
    seed: int,
    *,
    start: int = 0,
    until: float = math.inf,
) -> dict[str, Counts]:
    """Share cases out among readers, and run them in rounds in which each has its turn.

    Args:
        until: no round begins after this time of ``time.monotonic``.
    """
    whole = sum(reader.share for reader in readers)
    wanted = [max(1, round(cases * reader.share / whole)) for reader in readers]
    seeds = [reader.seeds() for reader in readers]
    totals = {reader.name: Counts() for reader in readers}
    rounds = max(1, cases // _ROUND)
    for turn in range(rounds):
        for reader, texts, number in zip(readers, seeds, wanted, strict=True):
            first, last = (start + number * each // rounds for each in (turn, turn + 1))
            if first < last:
                totals[reader.name] += run_block(reader, texts, range(first, last), seed)
        done = sum(counts.cases for counts in totals.values())
        faults = sum(len(counts.faults) for counts in totals.values())
        print(f"{done:,} cases, {faults} faults", file=sys.stderr, flush=True)
        if time.monotonic() > until:
            break
    return totals


def table(results: dict[str, Counts], command: str) -> str:
    """The section of the page."""
    cases = sum(counts.cases for counts in results.values())
    faults = sum(len(counts.faults) for counts in results.values())
    rows = [
        f"| {name} | {c.cases:,} | {c.accepted:,} | {c.refused:,} | {len(c.faults)} | "
        f"{c.slowest_s * 1000:,.0f} | {c.peak_bytes / 2**20:,.0f} |"
        for name, c in results.items()
    ]
    head = (
        f"`{command}` fed every reader with broken documents: {cases:,} cases, {faults} faults. A "
        "case is a sound document with characters, words or values of its tree changed. It must be "
        "read, or refused with an error that names the mistake; within "
        f"{MAX_SECONDS:g} s of CPU and {MAX_BYTES // 2**20} MB. A fault is anything else.\n"
    )
    return "\n".join(
        [
            head,
            "| reader | cases | read | refused | faults | slowest, ms | growth of a process, MB |",
            "|---|--:|--:|--:|--:|--:|--:|",
            *rows,
        ]
    )


def main() -> int:
    """Run, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--reader", action="append", help="only this one")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after a while")
    parser.add_argument("--write", action="store_true", help="write docs/reliability.md")
    options = parser.parse_args()
    readers = tuple(r for r in READERS if not options.reader or r.name in options.reader)
    until = time.monotonic() + 60 * options.minutes
    results = fuzz(readers, options.cases, options.seed, start=options.start, until=until)
    for name, counts in results.items():
        for number, told in counts.faults[:20]:
            print(f"{name}, case {number}: {told}", flush=True)
    section = table(results, shlex.join(["python", "-m", "tests.fuzz", *sys.argv[1:]]))
    print(section)
    if options.write:
        text = _PAGE.read_text(encoding="utf-8")
        before, after = text.partition(_BEGIN)[0], text.partition(_END)[2]
        _PAGE.write_text(f"{before}{_BEGIN}\n{section}\n{_END}{after}", encoding="utf-8")
    return 1 if any(counts.faults for counts in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
