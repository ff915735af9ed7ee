"""What fine-tuning asks of a plan: packed sequences and losses over masked tokens.

Sources: ``FineTuningDataModule`` and ``llm.api._validate_config`` of NeMo 2.7.3; Megatron-Bridge's
``ConfigContainer`` (0.3.1, and its main branch of August 2026).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, FieldValue, class_names, find, value_or
from nest_megatron.parallel.knobs import closed_fields
from nest_megatron.parallel.plan import ParallelPlan

#: Data of supervised fine-tuning, by the classes of both frameworks.
_SFT_DATA = frozenset(
    (
        "DirectHFSFTDatasetConfig",
        "EnergonDatasetConfig",
        "FineTuningDataModule",
        "FinetuningDatasetConfig",
        "GPTSFTDatasetConfig",
        "MockVLMSFTDatasetConfig",
    )
)
#: Where the packs that were made beforehand are described.
_SPECS = ("packed_sequence_specs", "offline_packing_specs")
#: Switches of packs that are made of the sequences of one micro batch.
_IN_BATCH = ("pack_sequences_in_batch", "enable_in_batch_packing")
_PER_TOKEN_LOSS = "calculate_per_token_loss"
_MICRO, _CONTEXT = "micro_batch_size", "context_parallel_size"


def is_finetuning(data: Any) -> bool:
    """Whether a loss is taken over some tokens of a sequence only."""
    return not _SFT_DATA.isdisjoint(class_names(data))


def closed_choices(data: Any, config: Any) -> frozenset[str]:
    """Fields of ``Execution`` that data and model do not allow.

    Samples of fine-tuning are as long as they are, packed or not.

    Args:
        config: of the transformer.
    """
    packs = any(value_or(data, name, False) for name in (*_IN_BATCH, "packing_buffer_size"))
    varies = is_finetuning(data) or packs or packed_sequence_size(data) is not None
    return closed_fields(value_or(config, "deterministic_mode", False), lengths=varies)


def packed_sequence_size(data: Any) -> int | None:
    """Tokens of a pack that was made beforehand, or ``None`` where nothing is packed so."""
    for name in _SPECS:
        size = find(data, f"{name}.packed_sequence_size")
        if isinstance(size, int) and size > 0:
            return size
    return None


def data_requirements(
    root: Any, data: str, micro_batch_size: int, model: str
) -> Mapping[str, Requirement]:
    """What the data fixes of a layout, by the names of its degrees.

    Args:
        data: path of the data's configuration.
        model: path of the model's configuration.

    Raises:
        UserInputError: for packs of one micro batch that holds a single sequence.
    """
    found = find(root, data)
    needs: dict[str, Requirement] = {}
    if packed_sequence_size(found) is not None or value_or(found, "packing_buffer_size", None):
        why = "a micro batch is one pack of sequences"
        needs[_MICRO] = _need(1, why, f"train without packing ({data})")
    elif name := next((n for n in _IN_BATCH if value_or(found, n, False)), None):
        needs[_MICRO] = _need(
            _several(f"{data}.{name}", micro_batch_size),
            "the sequences of a micro batch are packed into one",
            f"turn {data}.{name} off",
        )
    padded = all(find(found, f"{n}.pad_seq_to_mult") is ABSENT for n in _SPECS)
    if packed_sequence_size(found) is not None and padded:
        why = "this framework pads the sequences of a pack for one context-parallel size"
        needs[_CONTEXT] = _need(_stated_cp(root), why, f"train without packing ({data})")
    elif is_finetuning(found) and find(root, f"{model}.{_PER_TOKEN_LOSS}") is ABSENT:
        why = "fine-tuning with context parallelism needs calculate_per_token_loss"
        needs[_CONTEXT] = _need(1, why, "upgrade the framework")
    return needs


def finetuning_fields(
    root: Any, plan: ParallelPlan, *, data: str, model: str, averaging: str | None
) -> Iterator[FieldValue]:
    """What context parallelism needs where a rank may hold masked tokens alone.

    Args:
        averaging: path of ``average_in_collective``, or ``None`` where the configuration of data
            parallelism is written as a whole.
    """
    found, cp = find(root, data), plan.parallel.context_parallel_size
    if cp == 1 or not is_finetuning(found):
        return
    why = "with context parallelism a rank may hold masked tokens alone, so the loss is per token"
    yield FieldValue(path=f"{model}.{_PER_TOKEN_LOSS}", value=True, reason=why)
    if averaging is not None and find(root, averaging) is not ABSENT:
        yield FieldValue(path=averaging, value=False, reason=why)
    for name in _SPECS:
        path = f"{data}.{name}.pad_seq_to_mult"
        stated = find(root, path)
        if stated is not ABSENT and (stated or 1) % (2 * cp):
            why = f"{cp} context-parallel ranks hold two parts of every sequence of a pack"
            yield FieldValue(path=path, value=2 * cp, reason=why)


def _several(what: str, micro_batch_size: int) -> int:
    if micro_batch_size > 1:
        return micro_batch_size
    raise UserInputError(
        what,
        value=True,
        limit=f"a micro batch of {micro_batch_size} holds no two sequences to pack",
        fix="Set micro_batch_size to at least 2, or turn it off.",
    )


def _stated_cp(root: Any) -> int:
    for path in ("trainer.strategy", "model"):
        stated = find(root, f"{path}.{_CONTEXT}")
        if isinstance(stated, int):
            return stated
    return 1


def _need(value: int, reason: str, fix: str) -> Requirement:
    return Requirement(value=value, reason=reason, fix=fix, who="the data")
