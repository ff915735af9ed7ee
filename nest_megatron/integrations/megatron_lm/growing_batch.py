"""How the batch of a Megatron-LM job grows, as its arguments say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.integrations.megatron_lm.layout_arguments import flag_error, flag_of
from nest_megatron.layout.batch_schedule import RAMPUP, STEPS, BatchSchedule, read_schedule
from nest_megatron.layout.rulebook.facts import release_number


def stated_schedule(
    values: Mapping[str, Any], seq_length: int, version: str
) -> BatchSchedule | None:
    """How the batch grows; 0.20 takes no notice of ``--rampup-batch-size``."""
    stated = {STEPS: values.get(STEPS)} if _ignores_rampup(version) else values
    last = values.get("global_batch_size")
    if last is not None and stated.get(STEPS):
        raise flag_error(
            "global_batch_size",
            last,
            f"{flag_of(STEPS)} is given as well, and Megatron takes one",
            "Drop one of the two.",
        )
    return read_schedule(
        stated.get,
        last=last,
        seq_length=seq_length,
        samples=values.get("train_samples"),
        iterations=values.get("train_iters"),
        name=flag_of,
    )


def _ignores_rampup(version: str) -> bool:
    return release_number(version) >= (0, 18)


def schedule_notes(values: Mapping[str, Any], version: str) -> Iterator[str]:
    """What Megatron does not do of what a job says, one sentence."""
    if values.get(RAMPUP) and _ignores_rampup(version):
        yield f"Megatron-LM {version} ignores {flag_of(RAMPUP)}: the batch does not grow."
