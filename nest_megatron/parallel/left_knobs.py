"""Choices of Megatron about speed that a plan leaves to the job, beside those of ``Execution``.

``docs/knobs.md`` shows the table; a test keeps it true.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftKnob:
    """A choice that a plan neither makes nor changes.

    Args:
        flag: Megatron-LM's.
        price: what of it is priced where a job has it.
        why: it is not chosen.
    """

    flag: str
    price: str
    why: str


LEFT_KNOBS: tuple[LeftKnob, ...] = (
    LeftKnob(
        flag="--num-distributed-optimizer-instances",
        price="traffic and memory",
        why="it holds for the whole job, so each number would be a search of its own; what the "
        "best of up to 16 would gain on the plan's own layout is said under *Not taken*",
    ),
    LeftKnob(
        flag="--ddp-bucket-size",
        price="latency for each bucket, and the first one, beside which nothing runs",
        why="Megatron's own size grows with the replicas; no public runs tell two sizes apart",
    ),
    LeftKnob(
        flag="--overlap-param-gather-with-optimizer-step",
        price="nothing",
        why="it hides the first bucket's gathering beside the optimizer's step, so it saves no "
        "more than that step takes, as the report says; Megatron refuses it beside distributed "
        "checkpoints",
    ),
    LeftKnob(
        flag="--manual-gc",
        price="nothing",
        why="ranks collect garbage in the same step, so fewer wait; eight public pairs of runs on "
        "64 GPUs got 2 % faster with it in the median, and releases alone drift by up to 5 %, so "
        "no price can be told from theirs",
    ),
    LeftKnob(
        flag="--optimizer-cpu-offload",
        price="memory, Adam on the host, and the copies",
        why="a step takes two to four times as long; sharding the states frees as much, and Adam "
        "of the host does not round as the device's kernel",
    ),
)


def left_table() -> str:
    """The choices that are the job's, as ``docs/knobs.md`` lists them."""
    head = ["| Flag | What is priced | Why a plan leaves it alone |", "|---|---|---|"]
    rows = (f"| `{knob.flag}` | {knob.price} | {knob.why} |" for knob in LEFT_KNOBS)
    return "\n".join([*head, *rows])
