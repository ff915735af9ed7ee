"""Draw the pictures of docs/concepts.md: python docs/make_drawings.py [--check].

What they show is computed: rank orders and groups by ``layout.rank_order``, schedules by the
simulator of the cost model. ``--check`` writes nothing and ends with 1 where a picture is stale.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from nest_megatron.cost_model.schedule import ChunkTimes, num_warmup, simulate
from nest_megatron.layout.dims import ParallelDims, RankOrder
from nest_megatron.layout.rank_order import GroupKind, group_of_rank

IMAGES = Path(__file__).resolve().parent / "images"
FORWARD = ("#9cc3ec", "#4d86c6")
BACKWARD = ("#93d3c0", "#3f9c84")
STAGES = ("#9cc3ec", "#f3c98b")
IDLE, LINE, EXPOSED = "#ececec", "#444444", "#d98880"


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    """A rectangle with words in its middle."""
    found = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"'
    found += ' stroke="white"/>'
    middle = text(x + width / 2, y + height / 2 + 4, words, anchor="middle") if words else ""
    return found + middle


def text(x: float, y: float, words: str, *, anchor: str = "start") -> str:
    """A line of words."""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def frame(x: float, y: float, width: float, height: float) -> str:
    """An outline."""
    size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {size} fill="none" stroke="{LINE}"/>'


def drawing(width: int, height: int, parts: Iterator[str]) -> str:
    """A whole picture on white."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    head += ' font-family="sans-serif" font-size="12">'
    back = f'<rect width="{width}" height="{height}" fill="white"/>'
    return "\n".join([head, back, *parts, "</svg>"]) + "\n"


def ranks() -> Iterator[str]:
    """16 GPUs on two nodes in both rank orders; the colour is the pipeline rank."""
    for row, order in enumerate(RankOrder):
        dims = ParallelDims(
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=2,
            data_parallel_size=4,
            rank_order=order,
        )
        top = 20 + 120 * row
        yield text(10, top, f"{order.value}: TP 2, PP 2, DP 4")
        for node in range(2):
            yield frame(8 + 384 * node, top + 8, 376, 84)
            yield text(14 + 384 * node, top + 88, f"node {node}")
        for rank in range(16):
            stage = group_of_rank(dims, GroupKind.PP, rank).index(rank)
            replica = group_of_rank(dims, GroupKind.DP, rank).index(rank)
            left = 12 + 384 * (rank // 8) + 46 * (rank % 8)
            yield box(left, top + 14, 44, 56, STAGES[stage])
            yield text(left + 22, top + 32, str(rank), anchor="middle")
            yield text(left + 22, top + 48, f"pp {stage}", anchor="middle")
            yield text(left + 22, top + 63, f"dp {replica}", anchor="middle")


def schedules() -> Iterator[str]:
    """1F1B and the interleaved schedule of four pipeline ranks and eight micro batches."""
    num_ranks, num_microbatches, top = 4, 8, 20
    for num_virtual, name in ((1, "1F1B"), (2, "interleaved, 2 virtual stages on each rank")):
        forward = 12 // num_virtual
        times = ChunkTimes(forward=forward, backward=2 * forward)
        chunks = [times] * (num_ranks * num_virtual)
        lines = simulate(num_ranks, num_virtual, num_microbatches, chunks, [0] * num_ranks)
        end = max(timed.end for line in lines for timed in line)
        yield text(10, top, f"{name}: {end} units of time")
        for rank, line in enumerate(lines):
            y = top + 8 + 26 * rank
            yield text(10, y + 16, f"rank {rank}")
            yield box(60, y, 1.6 * end, 24, IDLE)
            for timed in line:
                shades = FORWARD if timed.op.is_forward else BACKWARD
                fill = shades[timed.op.chunk // num_ranks]
                width = 1.6 * (timed.end - timed.start)
                yield box(60 + 1.6 * timed.start, y, width, 24, fill, str(timed.op.microbatch + 1))
        top += 140


def in_flight() -> Iterator[str]:
    """Micro batches whose activations a rank keeps at its peak, 1F1B, by pipeline rank."""
    num_ranks, num_microbatches = 4, 8
    for rank in range(num_ranks):
        y = 12 + 30 * rank
        kept = num_warmup(num_ranks, 1, num_microbatches, rank) + 1
        yield text(10, y + 17, f"rank {rank}")
        yield box(60, y, 150, 24, "#cfcfcf", "weights, gradients, states")
        for place in range(kept):
            yield box(210 + 70 * place, y, 70, 24, FORWARD[0], "activations")


def overlap() -> Iterator[str]:
    """Traffic beside the work that hides it; what is left is exposed."""
    yield text(10, 37, "compute")
    yield box(110, 20, 300, 24, FORWARD[0], "backward pass")
    yield text(10, 67, "network")
    yield box(190, 50, 220, 24, BACKWARD[0], "gradients, hidden")
    yield box(410, 50, 60, 24, EXPOSED, "exposed")
    yield text(110, 96, "The step takes the exposed part, and what hidden traffic slows.")


def certificate() -> Iterator[str]:
    """The proven bound, the step of the plan, and between which steps 9 of 10 runs lie."""
    yield f'<line x1="40" y1="70" x2="600" y2="70" stroke="{LINE}"/>'
    yield text(600, 90, "step", anchor="end")
    yield box(190, 58, 280, 24, FORWARD[0])
    for x, words, y in (
        (130, "proven: no plan has less, under this cost model", 24),
        (320, "the plan's predicted step", 44),
    ):
        yield f'<line x1="{x}" y1="{y + 4}" x2="{x}" y2="84" stroke="{LINE}" stroke-width="2"/>'
        yield text(x + 6, y, words)
    yield text(330, 102, "9 of 10 runs", anchor="middle")


PICTURES = {
    "concept_ranks.svg": (784, 240, ranks),
    "concept_schedules.svg": (720, 280, schedules),
    "concept_memory.svg": (500, 136, in_flight),
    "concept_overlap.svg": (600, 110, overlap),
    "concept_certificate.svg": (640, 112, certificate),
}


def main(arguments: Sequence[str]) -> int:
    """Draw them, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true")
    is_check = parser.parse_args(arguments).check
    stale = 0
    for name, (width, height, parts) in PICTURES.items():
        path, drawn = IMAGES / name, drawing(width, height, parts())
        if is_check:
            stale |= not path.is_file() or path.read_text(encoding="utf-8") != drawn
        else:
            path.write_text(drawn, encoding="utf-8")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
