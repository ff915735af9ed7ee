"""Megatron-LM's arguments that state a layout, the stages that they make, and their names.

Source lines are those of Megatron-LM core_v0.16.1; ``args`` stands for
``megatron/training/arguments.py``, ``tc`` for ``megatron/core/transformer/transformer_config.py``,
``layer`` for ``megatron/core/transformer/transformer_layer.py``. 0.20 has the same rules.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import EXECUTION_ARGUMENTS
from nest_megatron.layout.recompute import (
    DEFAULT_MODULES,
    RECOMPUTE_ARGUMENTS,
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    selective_recompute,
)
from nest_megatron.layout.rulebook.schedule import misplaced_mtp_chunk
from nest_megatron.layout.stage_layout import StagePartition, parse_layout, uniform_partition
from nest_megatron.layout.zero import ZERO_STAGES, DataParallelSharding, ZeroStage
from nest_megatron.model.spec import TransformerSpec

#: Megatron's arguments by destination.
Values = Mapping[str, Any]
#: Arguments that say how many virtual stages a rank has.
VIRTUAL_STAGES = ("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank")
#: Arguments that state the stage boundaries.
STAGE_OPTIONS = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",  # with a | in it, see ``states_stages``
)
#: Arguments that state the recomputation.
RECOMPUTE = (*RECOMPUTE_ARGUMENTS, "recompute_activations", "moe_layer_recompute")
#: What replicas exchange during the passes.
OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
#: Arguments that a plan may set; what a user gives of them stays fixed.
PARALLEL_ARGUMENTS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "sequence_parallel",
    "use_tp_pp_dp_mapping",
    *VIRTUAL_STAGES,
    *STAGE_OPTIONS,
    "micro_batch_size",
    *RECOMPUTE,
    "use_distributed_optimizer",
    "use_megatron_fsdp",
    "use_torch_fsdp2",
    "data_parallel_sharding_strategy",
    *OVERLAPS,
    *(name for names in EXECUTION_ARGUMENTS.values() for name in names),
)


def states_stages(values: Values, dest: str) -> bool:
    """Whether an argument of ``STAGE_OPTIONS`` is given; a pattern without ``|`` cuts nothing.

    >>> [states_stages({"hybrid_layer_pattern": text}, STAGE_OPTIONS[-1]) for text in ("M*", "M|*")]
    [False, True]
    """
    value = values.get(dest)
    if dest == "hybrid_layer_pattern":
        return isinstance(value, str) and "|" in value
    return value is not None and value is not False


ROLES = packaged(__package__, "arguments_data/roles.toml")
#: Why arguments are ``refused``, ``set`` or ``removed``, by destination.
REASONS: Mapping[str, Mapping[str, str]] = ROLES["reasons"]


def arguments_of(role: str) -> tuple[str, ...]:
    """The arguments of one table of ``arguments_data/roles.toml``."""
    return tuple(name for names in ROLES[role].values() for name in names.split())


def flag_of(dest: str) -> str:
    """An argument as it is typed."""
    return f"--{dest.replace('_', '-')}"


def flag_error(dest: str, value: object, limit: str, fix: str) -> UserInputError:
    """What is wrong with an argument, by its flag."""
    return UserInputError(flag_of(dest), value, limit, fix)


def in_fields(text: str, fields: Mapping[str, str]) -> str:
    """A text with fields, by the names of arguments, in the place of Megatron-LM's flags.

    >>> in_fields("Add --no-load-optim.", {"no_load_optim": "checkpoint.load_optim=False"})
    'Add checkpoint.load_optim=False.'
    """
    named = {flag_of(name): field for name, field in fields.items()}
    return re.sub(r"--[a-z0-9-]+", lambda flag: named.get(flag[0], flag[0]), text)


@contextlib.contextmanager
def naming_fields(fields: Mapping[str, str]) -> Iterator[None]:
    """Name fields in the place of Megatron-LM's flags in what is refused."""
    try:
        yield
    except UserInputError as error:
        said = error.what, error.limit, error.fix
        what, limit, fix = (in_fields(fields.get(text, text), fields) for text in said)
        if (what, limit, fix) == said or type(error) is not UserInputError:
            raise
        raise UserInputError(what, error.value, limit, fix) from error


_LAYOUT, _FIRST, _LAST, _EMBEDDING, _LOSS, _PATTERN = STAGE_OPTIONS
_LAYERS_A_STAGE, _STAGES_A_RANK = VIRTUAL_STAGES

#: Arguments with those that Megatron refuses together with them.
_EXCLUDED: Mapping[str, tuple[str, ...]] = {
    _LAYOUT: (_FIRST, _LAST, _EMBEDDING, _LOSS, _LAYERS_A_STAGE, _STAGES_A_RANK),
    _FIRST: (_EMBEDDING, _LOSS, _LAYERS_A_STAGE),
    _LAST: (_EMBEDDING, _LOSS, _LAYERS_A_STAGE),
    _LAYERS_A_STAGE: (_STAGES_A_RANK,),
    _PATTERN: (_FIRST, _LAST),
}
#: What no hybrid model takes: 0.16.1 builds other stages without a word (``MambaStack.
#: _select_layers_for_pipeline_parallel``), 0.20 ends (args:813-839).
_NOT_OF_HYBRIDS = (_LAYOUT, _EMBEDDING, _LOSS, *VIRTUAL_STAGES)


def read_recompute(values: Values) -> Recompute | None:
    """The user's recomputation, ``None`` if they said nothing of it."""
    granularity = values.get("recompute_granularity")
    if values.get("recompute_activations"):
        granularity = "selective"
    modules = list(values.get("recompute_modules") or DEFAULT_MODULES)
    if values.get("moe_layer_recompute"):
        granularity, modules = "selective", [*modules, "moe"]
    if granularity is None:
        return None
    method = values.get("recompute_method")  # a recipe may hold any text
    require_known("--recompute-granularity", granularity, ("full", "selective"))
    require_known("--recompute-method", method or "uniform", RecomputeMethod)
    if granularity == "full":
        return Recompute(
            granularity=RecomputeGranularity.FULL,
            method=RecomputeMethod(method) if method is not None else None,
            num_layers=values.get("recompute_num_layers"),
        )
    return selective_recompute(modules)


def layers_in_bf16(values: Values) -> int:
    """Layers at the longer end that ``--first-last-layers-bf16`` keeps out of fp8."""
    if not (values.get("first_last_layers_bf16") and values.get("fp8")):
        return 0
    return int(max(values["num_layers_at_start_in_bf16"], values["num_layers_at_end_in_bf16"]))


def rank_order_of(values: Values) -> RankOrder:
    """The order in which ranks are numbered."""
    if values.get("use_tp_pp_dp_mapping"):
        return RankOrder.TP_CP_EP_PP_DP
    return RankOrder.TP_CP_EP_DP_PP


def read_zero(values: Values) -> ZeroStage | None:
    """The user's ZeRO stage, ``None`` if they said nothing of it."""
    if values.get("use_megatron_fsdp"):
        return ZERO_STAGES[values.get("data_parallel_sharding_strategy") or "no_shard"]
    if values.get("use_torch_fsdp2"):
        return ZeroStage.WEIGHTS
    return ZeroStage.OPTIMIZER if values.get("use_distributed_optimizer") else None


def read_sharding(values: Values) -> DataParallelSharding:
    """What divides the user's states among replicas."""
    if values.get("use_megatron_fsdp"):
        if values.get("megatron_fsdp_version") == 2:
            raise flag_error(
                "megatron_fsdp_version",
                2,
                "it takes neither the distributed optimizer nor tensor, pipeline or context "
                "parallelism, and is not planned",
                "Use version 1, or launch without nest.",
            )
        return DataParallelSharding.MEGATRON_FSDP
    if values.get("use_torch_fsdp2"):
        return DataParallelSharding.TORCH_FSDP2
    return DataParallelSharding.DDP


def partition_of_values(spec: TransformerSpec, values: Values, pp: int) -> StagePartition | None:
    """The stages that Megatron's arguments make of a model; ``None`` if none of them states any.

    Args:
        values: Megatron's arguments by destination name. Those of ``STAGE_OPTIONS`` state the
            boundaries; the two on virtual stages how many of them a rank has, which are even by
            themselves. What is absent, ``None`` or false is not given.
        pp: pipeline-parallel ranks.

    Raises:
        UserInputError: for what Megatron refuses:

            * a layout with any of the others (tc:1307, args:503), one that it cannot read, or
              whose stages are not a multiple of the ranks (args:520);
            * both flags on virtual stages (args:503), or sizes that are not positive;
            * first or last layers with an account-for flag (tc:1294) or with
              ``num_layers_per_virtual_pipeline_stage`` (args:530);
            * layers that the ranks or virtual stages do not divide (args:539-545, tc:1360-1480);
            * virtual stages on one rank (args:575), or with first and last layers given and no rank
              between them (layer:138 divides by zero);
            * MTP layers elsewhere than in the last virtual stage of a rank other than the first
              (``pipeline_parallel_layer_layout.py:120-134``).

            Also for what it takes and should not: a stage without a unit (issue 1852), first and
            last layers that leave some layer to no rank or to two, and both of them for one rank.
    """
    is_cut = any(states_stages(values, name) for name in STAGE_OPTIONS)
    if not (is_cut or any(map(values.get, VIRTUAL_STAGES))):
        return None
    if pp < 1:
        raise flag_error("pipeline_model_parallel_size", pp, "it is at least 1", "Raise it.")
    for name, others in _EXCLUDED.items():
        for other in others:
            if states_stages(values, name) and states_stages(values, other):
                raise flag_error(
                    name,
                    values[name],
                    f"Megatron refuses it beside {other} ({values[other]})",
                    "Give one of the two.",
                )
    for name in _NOT_OF_HYBRIDS if spec.hybrid_layer_pattern else ():
        if states_stages(values, name):
            raise flag_error(
                name,
                values[name],
                "it does not cut the stages of a hybrid model",
                "Leave it out; since Megatron-LM 0.17 | stands in --hybrid-layer-pattern.",
            )
    layout = values.get(_PATTERN if states_stages(values, _PATTERN) else _LAYOUT)
    partition = _split(spec, values, pp) if layout is None else parse_layout(str(layout), spec, pp)
    if pp == 1 and partition.num_chunks > 1:
        raise flag_error(
            "pipeline_model_parallel_size",
            pp,
            f"{partition.num_chunks} virtual stages need more than one pipeline rank",
            "Raise it, or give one stage.",
        )
    if (chunk := misplaced_mtp_chunk(spec, partition)) is not None:
        raise flag_error(
            _LAYOUT,
            f"m in stage {chunk + 1} of {partition.num_chunks}",
            "MTP layers lie in the last virtual stage of a rank other than the first",
            "Write m in the last stage.",
        )
    return partition


def _split(spec: TransformerSpec, values: Values, pp: int) -> StagePartition:
    """The stages of flags that state no layout.

    Virtual stages: args:524-550; embedding and loss count as layers where they are accounted for.
    """
    for name in (_STAGES_A_RANK, _LAYERS_A_STAGE):
        if values.get(name) is not None and values[name] < 1:
            raise flag_error(name, values[name], "it is at least 1", "Raise it, or leave it out.")
    embedding, loss = bool(values.get(_EMBEDDING)), bool(values.get(_LOSS))
    layers = values.get(_LAYERS_A_STAGE)
    virtual = int(values.get(_STAGES_A_RANK) or 1)
    if layers is not None:
        total = spec.num_layers + embedding + loss
        virtual, rest = divmod(total, pp * layers)
        if rest:
            raise flag_error(
                _LAYERS_A_STAGE,
                layers,
                f"{total} layers, embedding and loss included where they are accounted for, make "
                f"no whole number of such stages on each of {pp} pipeline ranks",
                f"Use {_STAGES_A_RANK}, or a layout.",
            )
    first, last = values.get(_FIRST), values.get(_LAST)
    if virtual > 1 and pp == 2 and first is not None and last is not None:
        raise UserInputError(
            f"{flag_of(_FIRST)}, {flag_of(_LAST)}",
            (first, last),
            "with virtual stages Megatron needs a rank between the first and the last one",
            "Give one of the two, or a layout.",
        )
    return uniform_partition(
        spec,
        pp,
        virtual,
        first=first,
        last=last,
        account_embedding=embedding,
        account_loss=loss,
    )
