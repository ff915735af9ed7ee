"""What packed sequences fix of a Megatron-LM job's layout, which ``validate_args`` does not check.

Sources are of core_v0.16.1: ``get_batch`` of ``pretrain_gpt.py`` and ``get_batch_on_this_tp_rank``
of ``megatron/training/utils.py``. Since 0.17 every stage has the bounds of sequences; since
0.19 the packs of a micro batch are joined (``flatten_batch_for_packed_sequences``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nest_megatron.config.job import Requirement
from nest_megatron.layout.rulebook.facts import release_number

#: Arguments of jobs that pack several sequences into one.
PACKED = ("sft", "dataloader_inter_document_masking")
_MICRO, _PP = "micro_batch_size", "pipeline_model_parallel_size"
_VPP = "virtual_pipeline_model_parallel_size"


def is_packed(values: Mapping[str, Any]) -> bool:
    """Whether a job with these arguments packs several sequences into one."""
    return any(map(values.get, PACKED))


def needs_of_packs(values: Mapping[str, Any], version: str) -> Mapping[str, Requirement]:
    """What packs fix of a layout, by the names of its degrees."""
    if not (values.get("sft") and release_number(version) < (0, 19)):
        return MappingProxyType({})
    why, fix = "a micro batch is one pack of sequences", "train without --sft"
    return MappingProxyType({_MICRO: Requirement(value=1, reason=why, fix=fix, who="--sft")})


def pipeline_limits(values: Mapping[str, Any], script: str, version: str) -> Mapping[str, int]:
    """Largest pipelines that know where the sequences of a pack begin.

    Before 0.17 ``pretrain_gpt.py`` tells it to the first and to the last virtual stage alone: those
    between attend across sequences.
    """
    lost = values.get("sft") and release_number(version) < (0, 17) and "mamba" not in script
    return {_PP: 2, _VPP: 1} if lost else {}


def packing_notes(values: Mapping[str, Any], script: str, version: str) -> Iterator[str]:
    """What is not as it seems in a job that packs."""
    if pipeline_limits(values, script, version):
        yield (
            "--sft: before 0.17 stages of pretrain_gpt.py between the first and the last attend "
            "across the sequences of a pack; pipelines above 2 and virtual stages are taken only "
            "where you state them."
        )
