"""Stage partitions, and in Megatron's own words the layout string, and the split without one.

A layout names every unit by a letter (``E`` embedding, ``t`` transformer layer, ``m`` one
multi-token-prediction layer, ``L`` loss head) and cuts virtual stages with ``|``; ``x*n`` and
``(...)*n`` repeat. Stage ``k`` of the string lies on pipeline rank ``k % pp``.

A hybrid model has no such string: 0.20 cuts stages with ``|`` inside ``--hybrid-layer-pattern``,
where embedding and head need no letter (``hybrid_layer_allocation.select_pipeline_segment``).

Source: ``megatron.core.transformer.pipeline_parallel_layer_layout`` (the same grammar in 0.16.1 and
0.20) and ``megatron.core.transformer.transformer_block.get_num_layers_to_build``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen


@frozen
class StagePartition:
    """The layer sequence cut into virtual stages, as in ``PipelineParallelLayerLayout``.

    Chunk ``k`` holds units ``boundaries[k] .. boundaries[k+1]`` and lies on pipeline rank ``k %
    pp`` as its virtual stage ``k // pp``.

    Args:
        boundaries: ``pp * vpp + 1`` unit indices, strictly increasing from 0 to the number of units
            (a chunk without units makes Megatron's GPUs wait for ever, issue 1852).
        pipeline_model_parallel_size: number of pipeline ranks.
    """

    boundaries: tuple[int, ...]
    pipeline_model_parallel_size: int

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in pairwise(self.boundaries))
        if self.boundaries[:1] != (0,) or self.num_chunks < 1 or not rises:
            raise UserInputError(
                "stage partition boundaries",
                self.boundaries,
                "they rise strictly from 0, so that every virtual stage holds a unit",
                "Use fewer stages than units.",
            )
        if self.num_chunks % self.pipeline_model_parallel_size:
            raise UserInputError(
                "stage partition",
                self.num_chunks,
                f"chunks come in whole rounds of {self.pipeline_model_parallel_size} ranks",
                "Give every rank the same number of virtual stages.",
            )

    @property
    def num_chunks(self) -> int:
        """Virtual stages in the whole pipeline."""
        return len(self.boundaries) - 1

    def chunk(self, index: int) -> range:
        """Units of one chunk."""
        return range(self.boundaries[index], self.boundaries[index + 1])

    def chunks_of_rank(self, pipeline_rank: int) -> tuple[range, ...]:
        """Units of each virtual stage of one pipeline rank, in order of virtual stage."""
        step = self.pipeline_model_parallel_size
        return tuple(self.chunk(k) for k in range(pipeline_rank, self.num_chunks, step))


_GROUP_TIMES = re.compile(r"\(([^)]+)\)\*(\d+)")
_LETTER_TIMES = re.compile(r"(.)\*(\d+)")
_MAX_LETTERS = 100_000
#: Eight stages of llama3_8b.
_EXAMPLE = "Et*4|(t*4|)*6t*4L"
_LAYOUT = "pipeline_model_parallel_layout"
_LAYOUT_FLAG = "--pipeline-model-parallel-layout"


def layout_string(spec: TransformerSpec, partition: StagePartition) -> str:
    """The argument of ``--pipeline-model-parallel-layout`` for a partition.

    For a hybrid model that of ``--hybrid-layer-pattern``.

    Raises:
        UserInputError: if the partition does not cut this model's units.

    For the 61 layers and the MTP layer of DeepSeek-V3 over 16 ranks: ``Et*4|(t*4|)*14tmL``.
    """
    units = _unit_letters(spec)
    if partition.boundaries[-1] != spec.num_units:
        raise UserInputError(
            "stage partition boundaries",
            partition.boundaries[-1],
            f"model {spec.name} has {spec.num_units} units (layers, embedding, MTP, head)",
            "Cut the units of this very model.",
        )
    chunks = map(partition.chunk, range(partition.num_chunks))
    if spec.hybrid_layer_pattern:
        layers, slash, depths = spec.hybrid_layer_pattern.replace("|", "").partition("/")
        stages = (layers[max(chunk.start - 1, 0) : chunk.stop - 1] for chunk in chunks)
        return f"{'|'.join(stages)}{slash}{depths}"
    *inner, last = (_compact("".join(units[chunk.start : chunk.stop])) for chunk in chunks)
    return _repeated(inner) + last


def parse_layout(
    text: str, spec: TransformerSpec, pipeline_model_parallel_size: int
) -> StagePartition:
    """Read a layout string for a model.

    Raises:
        UserInputError: if Megatron would refuse the string, or if a virtual stage is empty.
    """
    if spec.hybrid_layer_pattern:
        return _parse_pattern(text, spec, pipeline_model_parallel_size)
    stages, pp, mtp = expand_layout(text), pipeline_model_parallel_size, spec.num_mtp_layers
    if len(stages) % pp:
        raise _bad(text, f"its {len(stages)} stages are not a multiple of the {pp} ranks")
    letters, expected = "".join(stages), "".join(_unit_letters(spec))
    if letters != expected:
        raise _bad(
            text,
            f"the units must be, in order, {_compact(expected)}; found {_compact(letters)}",
            "Name the embedding, every layer, every MTP layer and the head once, in order.",
        )
    if any(0 < stage.count("m") < mtp for stage in stages):
        raise _bad(
            text, "all MTP layers lie in one virtual stage", f"Write {'m' * mtp} in one stage."
        )
    counts = [len(stage) - (mtp - 1 if "m" in stage else 0) for stage in stages]
    return StagePartition(boundaries=(0, *accumulate(counts)), pipeline_model_parallel_size=pp)


def _parse_pattern(text: str, spec: TransformerSpec, pp: int) -> StagePartition:
    """A hybrid model's pattern with its stages; without ``|`` all layers are one."""
    stages = text.partition("/")[0].split("|")
    if len(stages) % pp:
        raise UserInputError(
            "hybrid_layer_pattern",
            text,
            f"its {len(stages)} stages are not a multiple of the {pp} ranks",
            "Cut as many stages with |.",
        )
    whole = spec.hybrid_layer_pattern.replace("|", "")
    if text.replace("|", "") != whole:
        raise UserInputError(
            "hybrid_layer_pattern",
            text,
            f"its layers must be {whole}",
            "Cut this very model.",
        )
    return _partition(spec, pp, list(map(len, stages)))


def _partition(spec: TransformerSpec, pp: int, layers: Sequence[int]) -> StagePartition:
    """So many layers in each virtual stage, behind the embedding and before MTP and the head."""
    boundaries = (0, *(1 + end for end in accumulate(layers[:-1])), spec.num_units)
    return StagePartition(boundaries=boundaries, pipeline_model_parallel_size=pp)


def expand_layout(text: str) -> tuple[str, ...]:
    """Letters of each virtual stage of a layout string, repetitions written out.

    >>> expand_layout("Et*2|(t|)*2,tL")
    ('Ett', 't', 't', 'tL')

    Raises:
        UserInputError: if a character is not one of Megatron's four.
    """
    if sum(map(int, re.findall(r"\*(\d+)", text))) > _MAX_LETTERS:
        raise _bad(text, f"it repeats more than {_MAX_LETTERS} times")
    plain = text.replace(",", "")
    for pattern in (_GROUP_TIMES, _LETTER_TIMES):
        plain = pattern.sub(lambda match: match.group(1) * int(match.group(2)), plain)
    strange = sorted(set(plain) - set("EtmL|"))
    if strange:
        raise _bad(text, f"only E t m L | x*n (...)*n and commas may occur, not {strange}")
    return tuple(plain.split("|"))


def uniform_partition(
    spec: TransformerSpec,
    pipeline_model_parallel_size: int,
    virtual_pipeline_model_parallel_size: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    account_embedding: bool = False,
    account_loss: bool = False,
) -> StagePartition:
    """The partition that Megatron makes without a layout.

    Args:
        first, last: ``--decoder-first-pipeline-num-layers``, ``--decoder-last-...``.
        account_embedding, account_loss: ``--account-for-...-in-pipeline-split``.

    Raises:
        UserInputError: if Megatron refuses the split.

    Source: ``get_num_layers_to_build``; MTP layers and the head follow the last layer.
    """
    pp, vpp = pipeline_model_parallel_size, virtual_pipeline_model_parallel_size
    if first is None and last is None:
        layers = spec.num_layers + int(account_embedding) + int(account_loss)
        if layers % pp:
            ways = uneven_flags(spec, pp, vpp)
            if account_embedding or account_loss:
                ways = f"Add {_LAYOUT_FLAG} in the place of --account-for-..-in-pipeline-split"
            raise UserInputError(
                "num_layers",
                layers,
                f"without a layout it must be a multiple of the {pp} pipeline ranks",
                f"{ways}, or use another pipeline_model_parallel_size.",
            )
        per_rank = [layers // pp] * pp
    elif account_embedding or account_loss:
        raise UserInputError(
            "decoder_first_pipeline_num_layers / decoder_last_pipeline_num_layers",
            (first, last),
            "they exclude the account_for_..._in_pipeline_split flags",
            "Use one way to state an uneven split.",
        )
    else:
        per_rank = _uneven_layers(spec, pp, first, last)
    for layers in per_rank:
        if layers % vpp:
            raise UserInputError(
                "virtual_pipeline_model_parallel_size",
                vpp,
                f"it must divide the {layers} layers of a pipeline rank",
                f"Give {_LAYOUT}, or another number of virtual stages.",
            )
    counts = [layers // vpp for layers in per_rank] * vpp
    counts[0] -= int(account_embedding)
    counts[-1] -= int(account_loss)
    return _partition(spec, pp, counts)


def spread_partition(spec: TransformerSpec, dims: ParallelDims) -> StagePartition:
    """Megatron's own stages, or where its layers do not divide evenly, as even as they go.

    Raises:
        UserInputError: if there are more stages than units.
    """
    pp, chunks, units = dims.pipeline_model_parallel_size, dims.num_chunks, spec.num_units
    try:
        return uniform_partition(spec, pp, dims.virtual_pipeline_model_parallel_size)
    except UserInputError:
        if chunks > units:
            raise UserInputError(
                "pipeline_model_parallel_size * virtual_pipeline_model_parallel_size",
                chunks,
                f"every stage holds a unit, and the model has {units}",
                "Use fewer stages.",
            ) from None
    return StagePartition(
        boundaries=tuple(k * units // chunks for k in range(chunks + 1)),
        pipeline_model_parallel_size=pp,
    )


def is_uniform(spec: TransformerSpec, partition: StagePartition, **ends: Any) -> bool:
    """Whether Megatron makes this partition from the degrees alone.

    Args:
        ends: what else it knows, of ``first`` and ``last``.
    """
    pp = partition.pipeline_model_parallel_size
    try:
        return uniform_partition(spec, pp, partition.num_chunks // pp, **ends) == partition
    except UserInputError:
        return False


def is_uneven_at_ends(spec: TransformerSpec, partition: StagePartition) -> bool:
    """Whether numbers of layers for the first and the last rank alone make this partition."""
    pp, boundaries = partition.pipeline_model_parallel_size, partition.boundaries
    first, last = boundaries[1] - 1, 1 + spec.num_layers - boundaries[-2]
    is_plain = partition.num_chunks == pp and pp > 1
    return is_plain and is_uniform(spec, partition, first=first, last=last)


def _unit_letters(spec: TransformerSpec) -> tuple[str, ...]:
    counts = {LayerKind.MTP: spec.num_mtp_layers}
    return tuple(kind.letter * counts.get(kind, 1) for kind in spec.layer_kinds())


def _compact(letters: str) -> str:
    """Runs of four and more letters as ``x*n``."""
    runs = ((letter, len(list(run))) for letter, run in groupby(letters))
    return "".join(f"{x}*{n}" if n > 3 else x * n for x, n in runs)


def _repeated(stages: list[str]) -> str:
    """Stages with their bars, runs of equal ones as ``(...|)*n``."""
    runs = ((stage, len(list(run))) for stage, run in groupby(stages))
    return "".join(f"({s}|)*{n}" if n > 1 and len(s) + n > 4 else f"{s}|" * n for s, n in runs)


def _bad(text: str, limit: str, fix: str = f"Write for example {_EXAMPLE}.") -> UserInputError:
    return UserInputError(_LAYOUT, text, limit, fix)


def uneven_flags(spec: TransformerSpec, pp: int, vpp: int = 1) -> str:
    """Which flags state stages of layers that the pipeline ranks do not divide, as advice.

    Hybrid models have no layout; since 0.17 their pattern takes it. With virtual stages numbers of
    the ends alone seldom divide.
    """
    layout = f"a layout ({_LAYOUT_FLAG}, parallel.{_LAYOUT})"
    if spec.hybrid_layer_pattern:
        layout = "| in --hybrid-layer-pattern (since Megatron-LM 0.17)"
    middle = max(1, round(spec.num_layers / pp))
    while middle > 1 and spec.num_layers - middle * (pp - 2) < 2:
        middle -= 1
    ends = spec.num_layers - middle * (pp - 2)
    if pp < 2 or ends < 2 or vpp > 1:
        return f"Add {layout}"
    flags = (
        f"--decoder-first-pipeline-num-layers {ends // 2} --decoder-last-pipeline-num-layers "
        f"{ends - ends // 2}"
    )
    if spec.hybrid_layer_pattern:  # whose stages are not searched for
        flags = f"--pipeline-model-parallel-size {pp} {flags} (kept, not in --free)"
    return f"Add {flags}, or {layout}"


def _uneven_layers(
    spec: TransformerSpec, pp: int, first: int | None, last: int | None
) -> list[int]:
    at_first = [] if first is None else [first]
    at_last = [] if last is None else [last]
    ends = at_first + at_last
    stages, middle = pp - len(ends), spec.num_layers - sum(ends)
    between = [middle // stages] * stages if stages > 0 else []
    per_rank = at_first + between + at_last
    if sum(per_rank) != spec.num_layers or len(per_rank) != pp or min(per_rank) < 1:
        raise UserInputError(
            "decoder_first_pipeline_num_layers / decoder_last_pipeline_num_layers",
            (first, last),
            f"{middle} layers are left for {stages} middle pipeline ranks",
            f"{uneven_flags(spec, pp)}.",
        )
    return per_rank
