"""A plan in the fields of a Megatron-Bridge ``ConfigContainer``; what it makes stale is cleared.

For the framework's own override machinery it is a dotlist, or a YAML file to merge: both go to
``process_config_with_overrides``, as ``cli_overrides=to_dotlist(changes)`` or as
``config_filepath=`` a file with the text of ``to_yaml(changes)``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.field_mapping import (
    Recorded,
    fields_beside,
    layout_fields,
)
from nest_megatron.integrations.field_mapping import plan_changes as recipe_changes
from nest_megatron.integrations.fields import ABSENT, FieldValue, carry_out
from nest_megatron.integrations.megatron_bridge.read import FSDP_SWITCHES, BridgeConfig
from nest_megatron.integrations.restore import packed_sequence_size
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.plan import ParallelPlan


def to_dotlist(changes: Iterable[Change]) -> list[str]:
    """Changes as overrides in Hydra's grammar, one a field.

    >>> to_dotlist([Change(field="model.recompute_modules", before=None, after=["mlp"], reason="")])
    ['model.recompute_modules=["mlp"]']
    """
    words = []
    for change in changes:
        removed = _removed(change)
        words += [f"~{path}" for path in removed] or [f"{change.field}={_text(change.after)}"]
    return words


def to_yaml(changes: Iterable[Change]) -> str:
    """Changes as a YAML overlay, each field with its reason."""
    tree: dict[str, Any] = {}
    for change in changes:
        *parents, name = change.field.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = change
    return "\n".join([*_lines(tree, ""), ""])


def _lines(tree: dict[str, Any], indent: str) -> list[str]:
    lines = []
    for name, node in tree.items():
        if isinstance(node, Change) and (removed := _removed(node)):
            lines.append(f"{indent}# take {', '.join(removed)} out: {node.reason}")
        elif isinstance(node, Change):
            lines.append(f"{indent}# {node.reason}")
            lines.append(f"{indent}{name}: {_text(node.after)}")
        else:
            lines += [f"{indent}{name}:", *_lines(node, f"{indent}  ")]
    return lines


def _removed(change: Change) -> list[str]:
    """Entries of a mapping that a change takes out, which a file to merge cannot say."""
    if not (isinstance(change.before, Mapping) and isinstance(change.after, Mapping)):
        return []
    return [f"{change.field}.{name}" for name in change.before.keys() - change.after.keys()]


def _text(value: Any) -> str:
    """A value that Hydra's grammar and YAML read alike; of other objects (torch types) the text."""
    plain = value is None or isinstance(value, bool | int | float | str | list | tuple)
    return json.dumps(value if plain else str(value))


#: Variable of HybridEP: ranks of a group of experts that share NVLink. A wrong one spoils the
#: all-to-all (Megatron-Bridge's notes on dispatchers).
NVLINK_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"


def apply_plan(
    cfg: Any,
    plan: ParallelPlan | Recorded,
    *,
    free: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """Write a plan into a configuration, in place, as ``nemo.apply_plan`` does into a recipe.

    Args:
        cfg: as for ``read_recipe``.
        free: ``global_batch_size``, ``seq_length``; the number of ranks is the launcher's.
        environment: the launcher's variables; those of this process if not given.
    """
    return carry_out(cfg, plan_changes(cfg, plan, free=free, environment=environment))


def plan_changes(
    cfg: Any,
    plan: ParallelPlan | Recorded,
    *,
    free: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> tuple[Change, ...]:
    """As ``apply_plan``, but the configuration stays as it is."""
    return recipe_changes(BridgeConfig(cfg, environment), plan, free, _wanted)


def _wanted(cfg: BridgeConfig, plan: ParallelPlan) -> Iterator[FieldValue]:
    packed = packed_sequence_size(cfg.root.dataset) is not None  # the length is that of a pack
    for path in () if packed else ("dataset.seq_length", "model.seq_length"):
        if cfg.find(path) is not ABSENT:
            yield path, plan.train.seq_length, "the sequences that were planned for"
    yield from layout_fields(cfg, plan)
    if cfg.find("dataset.micro_batch_size") is not ABSENT:  # Energon's data keep a copy
        why = "the data and training state the same size"
        yield "dataset.micro_batch_size", plan.layout.micro_batch_size, why
    sharded = plan.layout.shards_optimizer
    yield "ddp.use_distributed_optimizer", sharded, reason(plan, "use_distributed_optimizer")
    yield from _fsdp(cfg, plan)
    yield from fields_beside(cfg, plan)
    yield from cfg.places.fields(plan)
    yield from _nvlink_ranks(cfg, plan)
    predictors, why = "model.mtp_num_layers", "with the overlapped all-to-all 0.3 takes 1 or none"
    if plan.layout.execution.overlap_moe_expert_parallel_comm and cfg.find(predictors) == 0:
        yield predictors, None, why


def _nvlink_ranks(cfg: BridgeConfig, plan: ParallelPlan) -> Iterator[FieldValue]:
    """Take out a number of ranks that was for another group; HybridEP finds it by itself."""
    variables = cfg.find("env_vars")
    differs = any(
        cfg.find(cfg.items[name]) != getattr(plan.layout.dims, name)
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size")
    )
    if isinstance(variables, Mapping) and NVLINK_RANKS in variables and differs:
        others = {name: value for name, value in variables.items() if name != NVLINK_RANKS}
        why = f"{NVLINK_RANKS} was for another group of experts; HybridEP finds it by itself"
        yield "env_vars", others, why


def _fsdp(cfg: BridgeConfig, plan: ParallelPlan) -> Iterator[FieldValue]:
    """The switches of Megatron-FSDP. Source: ``ConfigContainer.validate``."""
    fsdp, used = plan.layout.uses_megatron_fsdp, cfg.uses_fsdp
    if fsdp and not used and cfg.find("model._pre_wrap_hooks") not in (ABSENT, None, []):
        raise UserInputError(
            "use_megatron_fsdp",
            True,
            limit="a hook changes the model before it is wrapped (register_pre_wrap_hook): the "
            "weights are then on the meta device, and what it loads is lost",
            fix="Load weights from a checkpoint, or leave use_megatron_fsdp as it is.",
        )
    if fsdp or used:
        for path in FSDP_SWITCHES:
            yield path, fsdp, reason(plan, "use_megatron_fsdp")
