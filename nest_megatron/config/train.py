"""What settings say of a job's batch and of its sequences: their lengths, and their images."""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job, read_target
from nest_megatron.config.schema import TrainConfig, stated_values
from nest_megatron.cost_model.target_defaults import MEGATRON_LM, newer_release_notes
from nest_megatron.documents import parse_json
from nest_megatron.errors import UserInputError, shortened
from nest_megatron.files import expanded, read_bytes, read_text
from nest_megatron.layout.batch_schedule import RAMPUP, STEPS, BatchSchedule, read_schedule
from nest_megatron.layout.dims import REPLICA_DEGREES
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.model.sequence_lengths import (
    SequenceLengths,
    lengths_from_counts,
    lengths_from_moments,
)
from nest_megatron.model.spec import TransformerSpec

#: Sequences of one optimizer step where nobody says: with 8,192 tokens each, the 4 Mi tokens a step
#: that models of 70 B parameters and more are trained with.
DEFAULT_GLOBAL_BATCH_SIZE = 512


def batch_schedule_of(settings: Settings, job: Job, seq_length: int) -> BatchSchedule | None:
    """How the batch grows: as the job says, or the settings of a model of the catalogue."""
    train, own = settings.train, job.batch_schedule
    size = train.global_batch_size
    values = stated_values(train)
    stated = {name: values[name] for name in (RAMPUP, STEPS) if name in values}
    if own is not None and size is not None and job.command is None:
        stated["global_batch_size"] = size
    if stated and (own or job.command or job.fixed):
        name = next(iter(stated))
        raise UserInputError(
            f"train.{name}",
            stated[name],
            "the batch, and how it grows, are the job's own",
            "Change the job.",
        )
    if own is not None or not stated:
        return own
    target = read_target(settings, job.target)
    # releases before 0.18 know no schedule of steps; those since take no notice of a ramp
    taken = RAMPUP if release_number(target.megatron_core) < (0, 18) else STEPS
    for name in stated.keys() - {taken}:
        raise UserInputError(
            f"train.{name}",
            stated[name],
            f"{target.framework} with megatron-core {target.megatron_core} does not take it",
            f"Give train.{taken}, or another target.",
        )
    if taken == STEPS and size is not None:
        raise UserInputError(
            "train.global_batch_size", size, "the schedule says every size", "Leave it out."
        )
    return read_schedule(
        stated.get,
        last=size,
        seq_length=seq_length,
        samples=train.train_samples,
        name="train.{}".format,
    )


def batch_of(
    settings: Settings, job: Job, num_gpus: int, schedule: BatchSchedule | None
) -> tuple[int, list[str]]:
    """The global batch size, and what was assumed of the job.

    Megatron's own, where none is given, is one micro batch on each replica of the user's layout.
    Source: ``validate_args`` (0.16.1 :591).
    """
    notes, stated = list(job.notes), settings.train.global_batch_size
    batch = job.global_batch_size if stated is None else stated
    if schedule is not None:
        batch = schedule.longest
        known = "with which most of the run is trained"
        if schedule.parts[-1].samples is None:
            known = "the last; with the length of the run (train_samples) it would be the longest"
        notes.append(
            f"The batch grows ({schedule.words()}): every layout that is searched is legal at each "
            f"size; the plan is the best at {batch}, {known}."
        )
    if batch is None:
        batch = DEFAULT_GLOBAL_BATCH_SIZE
        if job.micro_batch_size and job.num_gpus is not None:
            one_replica = math.prod(int(job.fixed.get(name) or 1) for name in REPLICA_DEGREES)
            batch = job.micro_batch_size * max(1, num_gpus // one_replica)
        name = "train.global_batch_size" if job.target is None else "--global-batch-size"
        notes.append(assumed_batch(batch, name))
    target = read_target(settings, job.target)
    notes += newer_release_notes(settings.target or "")
    if job.target is None and settings.target is None:
        notes.append(f"{target.framework} is assumed (target={target.name}).")
    elif job.target is None and target not in MEGATRON_LM:
        notes.append(f"The plan is for {target.framework}; docs/nemo.md says how recipes take it.")
    return batch, notes


def assumed_batch(batch: int, name: str = "train.global_batch_size") -> str:
    """What a plan says where nobody gave the batch."""
    return f"{name} is not given; {batch} sequences are assumed."


_FILE, _MEAN, _STD = "sequence_lengths", "sequence_length_mean", "sequence_length_std"
#: Largest file of lengths.
_MAX_BYTES = 1 << 30
#: Settings that say it.
LENGTH_SETTINGS = (_FILE, _MEAN, _STD, "sequence_packing", "image_tokens", "images")
#: Fields of a JSON line that hold a length, or the tokens themselves.
_FIELDS = ("length", "seq_length", "num_tokens", "input_ids", "tokens")


def read_lengths(train: TrainConfig, longest: int, *, packed: bool) -> SequenceLengths | None:
    """The lengths that the settings say, ``None`` if they say nothing.

    Args:
        longest: tokens of a sequence at most.
        packed: several sequences stand in one.

    Raises:
        UserInputError: for settings that contradict each other, or a file that cannot be read.
    """
    mean, deviation = train.sequence_length_mean, train.sequence_length_std
    if train.sequence_lengths is not None:
        if (mean, deviation) != (None, None):
            raise _wrong(
                _FILE,
                train.sequence_lengths,
                "mean and deviation are given as well",
                "Give the file alone.",
            )
        path = expanded(Path(train.sequence_lengths), _FILE)
        return lengths_from_counts(_counts(path), longest, packed=packed, source=path.name)
    if mean is None or deviation is None:
        if mean is deviation:
            return None
        raise _wrong(
            _MEAN if mean is None else _STD,
            None,
            "the work of attention depends on the mean and on the standard deviation",
            "Give both, or a file (train.sequence_lengths).",
        )
    return lengths_from_moments(mean, deviation, longest, packed=packed)


def length_notes(lengths: SequenceLengths | None, *, packed: bool) -> Iterator[str]:
    """What is assumed of packed sequences whose lengths nothing says; ``packed`` as above."""
    if packed and lengths is None:
        yield (
            "Sequences are packed, and how long they are is not said: attention is priced as if "
            "each pack were one sequence, the most that it can be. train.sequence_lengths=FILE, or "
            "train.sequence_length_mean and train.sequence_length_std say it."
        )
    if lengths is not None and not lengths.packed:
        yield (
            "Each sequence stands alone and is filled up with padding: the lengths of data change "
            "no time of a step. If several stand in one, train.sequence_packing=true says so."
        )


def with_images(spec: TransformerSpec, train: TrainConfig) -> TransformerSpec:
    """The model on sequences with as many tokens of images as the settings say.

    Raises:
        UserInputError: if they say none for a model whose description does not, more than a
            sequence has, or some for a model that sees no images.
    """
    tokens, images, vision = train.image_tokens, train.images, spec.vision
    for name, value in (("image_tokens", tokens), ("images", images)):
        if value is not None and vision is None:
            raise _wrong(name, value, f"{spec.name} sees no images", "Leave it out.")
    if vision is None or (tokens is None and images is None and vision.num_images):
        return spec
    if tokens is None:
        raise _wrong(
            "image_tokens",
            None,
            "no field of the model says how many tokens of images a sequence has",
            "Give their mean, for example train.image_tokens=1024.",
        )
    if not 1 <= tokens <= spec.seq_length:
        raise _wrong(
            "image_tokens",
            tokens,
            f"a sequence has {spec.seq_length} tokens",
            "Give the mean of those of images.",
        )
    if images is None:
        images = 1 if vision.has_any_size else -(-tokens // vision.num_projected_tokens)
    elif not vision.has_any_size:
        raise _wrong(
            "images",
            images,
            f"each image has {vision.num_projected_tokens} tokens",
            "Give train.image_tokens alone.",
        )
    if not 1 <= images <= tokens:
        raise _wrong(
            "images",
            images,
            f"each has at least one of the {tokens} tokens (train.image_tokens)",
            "Give their mean, rounded up.",
        )
    return replace(spec, vision=vision.with_images(tokens, images))


def image_notes(spec: TransformerSpec) -> tuple[str, ...]:
    """What is assumed of a sequence's images, where an encoder of transformers' sees them."""
    vision = spec.vision
    if vision is None or vision.is_split:
        return ()
    images = "one image has" if vision.num_images == 1 else f"{vision.num_images} images have each"
    return (
        f"Of the {spec.seq_length:,} tokens of a sequence {images} {vision.num_projected_tokens:,} "
        "(train.image_tokens, train.images). Transformers' encoder is priced by megatron-core's "
        "operators, whole on each rank of the first stage; no public measurement of it is known.",
    )


def _wrong(name: str, value: object, limit: str, fix: str) -> UserInputError:
    return UserInputError(f"train.{name}", value, limit, fix)


def _counts(path: Path) -> Mapping[int, float]:
    """How often each length occurs, from a file.

    A ``.npy`` file holds one number for each sequence (nothing that was pickled is read); lines of
    a text file a length, a length and a count, or a JSON object.
    """
    if path.suffix == ".npy":
        return Counter(_array(path))
    counts: Counter[int] = Counter()
    for number, line in enumerate(
        read_text(path, "sequence lengths", most=_MAX_BYTES).splitlines(), 1
    ):
        if not line.strip():
            continue
        try:
            length, count = _row(line)
        except (KeyError, TypeError, ValueError):
            raise _wrong(
                _FILE,
                str(path),
                f"line {number} is {line[:60]!r}, no length in tokens",
                "Write LENGTH, LENGTH COUNT, or a JSON object with a length or input_ids.",
            ) from None
        counts[length] += count
    return counts


def _row(line: str) -> tuple[int, int]:
    if line.lstrip()[0] != "{":
        length, *count = line.replace(",", " ").split()
        return int(length), int(count[0]) if count else 1
    row = parse_json(line, _FILE)
    value = row[next(name for name in (*_FIELDS, "") if name in row or not name)]
    return (len(value) if isinstance(value, list) else int(value)), 1


def _array(path: Path) -> Iterable[int]:
    """The whole numbers of a one-dimensional NumPy array. Source: ``numpy.lib.format``."""
    content = read_bytes(path, "sequence lengths", most=_MAX_BYTES)
    try:
        wide = content[6] > 1  # version of the format: the header's length has 4 bytes, not 2
        start = (12 if wide else 10) + int.from_bytes(content[8 : 12 if wide else 10], "little")
        header = ast.literal_eval(content[12 if wide else 10 : start].decode())
        kind, (count,) = header["descr"], header["shape"]
        order, letter, width = kind[0], kind[1], int(kind[2:])
        if (
            content[:6] != b"\x93NUMPY"
            or letter not in "iu"
            or len(content) < start + count * width
        ):
            raise ValueError(kind)
    except (IndexError, KeyError, SyntaxError, TypeError, ValueError) as error:
        raise _wrong(
            _FILE,
            str(path),
            f"it is no array of one whole number for each sequence ({shortened(str(error))})",
            "Save the lengths alone: numpy.save(path, [len(x) for x in data]).",
        ) from error
    byte_order: Literal["big", "little"] = "big" if order == ">" else "little"
    rows = (content[at : at + width] for at in range(start, start + count * width, width))
    return (int.from_bytes(row, byte_order, signed=letter == "i") for row in rows)
