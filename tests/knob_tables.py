"""The tables of ``docs/knobs.md``, as the code and this file's list of left choices make them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass

from nest_megatron.cost_model.target_defaults import GRAPHS_OF_THE_JOB, NEMO_LACKS, OF_THE_JOB
from nest_megatron.documents import packaged
from nest_megatron.integrations.fields import OVERLAPPED
from nest_megatron.integrations.megatron_lm.attach import WRITABLE
from nest_megatron.integrations.megatron_lm.layout_arguments import PARALLEL_ARGUMENTS, REASONS
from nest_megatron.integrations.megatron_lm.parser import load_arguments
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.numeric_knobs import (
    BLACKWELL,
    HOPPER,
    INSTINCT,
    NUMERIC_KNOBS,
    NumericKnob,
)
from nest_megatron.layout.rulebook.facts import RELEASES


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftKnob:
    """A choice about speed, beside those of ``Execution``, that a plan leaves to the job.

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
        "best of up to 16 would gain on the plan's own layout is said under *Suggestions*",
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


def knob_table() -> str:
    """The choices that leave numbers alone, as ``docs/knobs.md`` lists them."""
    rows = ["| Flag | `keep`, `free` | A plan | Why | What it costs | Needs |", "|---" * 6 + "|"]
    for knob in KNOBS:
        does = "searches it" if knob.values else "leaves it to the job"
        does = "has it on" if knob.always else does
        needs = ", ".join(
            f"`{package}`" if isinstance(value, tuple) else f"`{package}` for `{value}`"
            for value, package in knob.needs.items()
        )
        flag, name = f"`{knob.flag}`", f"`{knob.choice}`"
        rows.append(f"| {flag} | {name} | {does} | {knob.reason} | {knob.costs} | {needs} |")
    return "\n".join(rows)


def numeric_table() -> str:
    """The choices that change numbers, as ``docs/knobs.md`` lists them."""
    head = ["| Flags | What they change | Where |", "|---|---|---|"]
    rows = (f"| `{knob.flags}` | {knob.changes} | {_where(knob)} |" for knob in NUMERIC_KNOBS)
    return "\n".join([*head, *rows])


def _where(knob: NumericKnob) -> str:
    names = {HOPPER: "Hopper", BLACKWELL: "Blackwell", INSTINCT: "AMD Instinct"}
    devices = [name for pattern, name in names.items() if pattern in knob.devices]
    needs = {
        "experts": knob.of_experts,
        "Adam": knob.of_adam,
        "the distributed optimizer": knob.of_sharded_optimizer,
    }
    jobs = [] if len(knob.precisions) == 3 else [f"{'/'.join(knob.precisions)} jobs"]
    return ", ".join([*jobs, *devices, *(need for need, asked in needs.items() if asked)])


def framework_table() -> str:
    """Where both frameworks have each choice, as ``docs/knobs.md`` lists them."""
    rows = ["| Choice | NeMo 2.7 | Megatron-Bridge |", "|---" * 3 + "|"]
    for knob in KNOBS:
        nemo = NEMO_LACKS.get(knob.name)
        own, bridge = f"`model.config.{knob.name}`", f"`model.{knob.name}`"
        if knob.name == "tp_comm_overlap":
            own = f"`{knob.name}` of `MegatronCommOverlapCallback`, which a plan adds"
        if knob.name in OVERLAPPED:
            bridge = f"`comm_overlap.{knob.name}`, without that object {bridge}"
        if knob.name == "hierarchical_context_parallel_sizes":
            bridge = f"{bridge}; not with `dist.use_decentralized_pg`"
        if knob.name in OF_THE_JOB:
            own = "left to the job"
            graphs = knob.name in GRAPHS_OF_THE_JOB
            bridge = f"{bridge}; a search leaves it to the job" if graphs else own
        rows.append(f"| `{knob.name}` | {f'no: {nemo}' if nemo else own} | {bridge} |")
    return "\n".join(rows)


def newer_table() -> str:
    """Arguments of Megatron-LM that came after 0.16, by release and by what becomes of them."""
    head = "| since | a plan writes | priced | priced as if off | not priced: a note | refused |"
    lines = [head, "|---|---|---|---|---|---|"]
    for before, release in itertools.pairwise(RELEASES[1:]):
        older = {name for each in load_arguments(before) for name in (each.dest, *each.flags)}
        newer = {each.dest: each.flags[0] for each in load_arguments(release)}
        columns: dict[str, list[str]] = {what: [] for what in _PLACES}
        for dest in sorted(each for each, flag in newer.items() if not {each, flag} & older):
            place = next((what for what, names in _PLACES.items() if dest in names), None)
            if place is not None and not _OTHER_RUNS.match(dest):
                columns[place].append(f"`{newer[dest]}`")
        order = ("written", "priced", "off", "unpriced", "refused")
        cells = (" ".join(columns[what]) for what in order)
        lines.append(f"| {release} | {' | '.join(cells)} |")
    return "\n".join(lines)


#: Of generation, and of what is kept of a run.
_OTHER_RUNS = re.compile("inference_|rl_|mamba_inference_|flight_recorder_|ckpt_|save_|logits_")
_MODEL = packaged("nest_megatron.integrations", "model_fields.toml")
_MEMORY = packaged("nest_megatron.cost_model", "memory_flags.toml")
_PLACES: Mapping[str, Container[str]] = {
    "written": {*WRITABLE, *PARALLEL_ARGUMENTS, "step_batch_size_schedule"},
    "refused": {*REASONS["refused"], *_MODEL["refused"], *_MODEL["refused_otherwise"]},
    "unpriced": {*_MEMORY["not_modelled"], *_MODEL["unpriced"]},
    "priced": {*_MEMORY["priced"], *_MODEL["read"]},
    "off": {*_MEMORY["no_effect"], *_MODEL["no_effect"], *_MODEL["of_families"]},
}
