"""Megatron-Bridge: a ``ConfigContainer`` read as a job, and a plan in its fields.

>>> from nest_megatron.integrations.megatron_bridge import auto_recipe
>>> cfg = llama3_70b_pretrain_config()  # doctest: +SKIP
>>> plan, changes = auto_recipe(
...     cfg, cluster="dgx_h100", overrides=["cluster.num_gpus=64"]
... )  # doctest: +SKIP

Nothing of Megatron-Bridge or torch is loaded here: a configuration is read by its fields' names.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.cluster_detection import number_said, processes_per_host
from nest_megatron.cost_model.target_defaults import installed_name, target_named
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.fields import (
    ABSENT,
    ExecutionPlaces,
    FieldValue,
    value_or,
)
from nest_megatron.integrations.process_variables import Environment
from nest_megatron.integrations.recipe_plan import PlannedRecipe, layout_fields, other_fields
from nest_megatron.integrations.restore import (
    Restored,
    is_finetuning,
    packed_sequence_size,
    restored_by_bridge,
)
from nest_megatron.integrations.vocabulary import hub_name, rows_of_model
from nest_megatron.layout.diff import Change, reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.layout.zero import DataParallelSharding

#: Where Megatron-Bridge makes mixed precision of a name.
_MIXED_PRECISION = "megatron.bridge.training.mixed_precision"
#: Both switches of Megatron-FSDP.
FSDP_SWITCHES = ("dist.use_megatron_fsdp", "ddp.use_megatron_fsdp")
_TORCH_FSDP2 = "dist.use_torch_fsdp2"
#: Variable of HybridEP: ranks of a group of experts that share NVLink. A wrong one spoils the
#: all-to-all (Megatron-Bridge's notes on dispatchers).
NVLINK_RANKS = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
#: Parts of a configuration whose settings count, by precedence after mixed precision.
_PARTS = "comm_overlap model optimizer ddp dist checkpoint train validation rerun_state_machine"
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_ENDS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


def needs_connections(plan: ParallelPlan) -> str:
    """Why a plan takes more than one connection to the device; empty where it does not.

    Source: ``ConfigContainer._validate_and_apply_megatron_fsdp_configs``, ``combined_1f1b``.
    """
    if plan.layout.uses_megatron_fsdp:
        return "Megatron-FSDP needs several"
    if plan.layout.execution.overlap_moe_expert_parallel_comm:
        return "the token all-to-all overlaps"
    return ""


class BridgeConfig(PlannedRecipe, framework="megatron_bridge"):
    """A ``ConfigContainer``.

    Args:
        environment: the launcher's variables, which alone know the number of ranks; those of this
            process if not given.
        assume_harmless: as of ``Recipe``.
    """

    restored_by = staticmethod(restored_by_bridge)
    states_size = False

    def __init__(
        self,
        root: Any,
        environment: Environment | None = None,
        assume_harmless: Collection[str] = (),
    ) -> None:
        self.installed_name = installed_name("megatron_bridge")
        super().__init__(root, target_named(self.installed_name), assume_harmless)
        self._environment = os.environ if environment is None else environment

    @property
    def places(self) -> ExecutionPlaces:
        """``comm_overlap`` replaces the model's settings (``CommOverlapConfig.setup``)."""
        why = "dist.use_decentralized_pg makes no process groups of two levels"
        return ExecutionPlaces(
            recipe=self,
            overlap=() if self.value("comm_overlap") is None else ("comm_overlap",),
            lacks={"hierarchical_context_parallel_sizes": why} if self._has_one_order else {},
            graph_switches=("model.use_te_rng_tracker", "rng.te_rng_tracker"),
        )

    @property
    def uses_fsdp(self) -> bool:
        """Whether either of the two switches is on."""
        return any(self.find(path) is True for path in FSDP_SWITCHES)

    def size(self) -> tuple[int | None, int | None]:
        """What the job's launcher says; as ``get_world_size_safe`` looks."""
        ranks = number_said(self._environment, "WORLD_SIZE", "SLURM_NTASKS")
        return ranks, processes_per_host(self._environment)

    def vocabulary(self, given: int | None) -> tuple[int, bool, tuple[str, ...]]:
        """A size of the model's own is taken as it is, that of the tokenizer is padded.

        It replaces the model's if ``use_tokenizer_vocab_size`` is on; ``should_pad_vocab`` is set
        by training itself. ``NullTokenizer`` has a row beside those that it is given, for a
        document's end, before megatron-core 0.18; Megatron-Bridge 0.3.1 has none with
        ``legacy_tokenizer``.

        Source: ``setup._validate_and_set_vocab_size``, ``_NullTokenizer.vocab_size``.
        """
        preset = value_or(self.root.model, "vocab_size")
        if preset is not None and self.find("tokenizer.use_tokenizer_vocab_size") is not True:
            return preset, True, ()
        kind = str(self.find("tokenizer.tokenizer_type"))
        rows = self.find("tokenizer.vocab_size")
        if kind == "NullTokenizer" and isinstance(rows, int):
            is_legacy = self.find("tokenizer.legacy_tokenizer") is True
            adds_end = not is_legacy and release_number(self.target.megatron_core) < (0, 18)
            return rows + adds_end, False, ()
        if given is not None:
            return given, False, ()
        base = hub_name(self.find("tokenizer.tokenizer_model"))
        if base is not None and (known := rows_of_model(base)) is not None:
            return known, False, ()
        raise UserInputError(
            "model.vocab_size",
            None,
            f"it comes from the files of {kind}, which are not read",
            "Set it, or give vocab_size=.",
        )

    @property
    def holders(self) -> Mapping[str, Any]:
        """Settings of mixed precision are copied over the others before training.

        Source: ``update_config_with_precision_overrides``.
        """
        return {"mixed_precision": self._mixed, **{n: self.find(n) for n in _PARTS.split()}}

    def memory(self) -> Mapping[str, Any]:
        """Megatron-LM alone divides the states of Muon by ``use_distributed_optimizer``."""
        own = "use_layer_wise_distributed_optimizer"
        return {**super().memory(), "use_distributed_optimizer": value_or(self.root.optimizer, own)}

    def number_format(self) -> tuple[Precision, Any]:
        """That of the mixed precision, or of a model without it."""
        mixed = self._mixed
        holder = self.root.model if mixed is None else mixed
        around = next((kind for kind in ("bf16", "fp16") if value_or(holder, kind, False)), "fp32")
        return Precision(around), holder

    @property
    def _mixed(self) -> Any:
        """Mixed precision; of a name what Megatron-Bridge makes of it, as in ``validate``."""
        mixed = value_or(self.root, "mixed_precision")
        if not isinstance(mixed, str):
            return mixed
        of_bridge = sys.modules.get(_MIXED_PRECISION)  # whose configuration has loaded it
        if of_bridge is None:
            raise UserInputError(
                "mixed_precision",
                mixed,
                f"{_MIXED_PRECISION} knows the name, and is not loaded",
                "Give what its get_mixed_precision_config makes of the name.",
            )
        try:
            return of_bridge.get_mixed_precision_config(mixed)
        except ValueError as error:
            known = nearest(mixed, of_bridge.MIXED_PRECISION_RECIPES)
            raise UserInputError(
                "mixed_precision", mixed, "Megatron-Bridge has no recipe of this name", known
            ) from error

    def declared(self, path: str) -> str:
        """0.7 declares fields of layers in a part of the model, which gives them as its own.

        Source: ``GPTModelConfig.__getattr__``.
        """
        parent, _, name = path.partition(".")
        model = self.root.model
        inside = parent == "model" and value_or(model, "transformer") is not None
        if not inside or name in type(model).__dataclass_fields__:
            return path
        return f"model.transformer.{name}"

    def wanted(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """The plan, and what it makes stale cleared."""
        packed = packed_sequence_size(self.root.dataset) is not None  # the length is that of a pack
        for path in () if packed else ("dataset.seq_length", "model.seq_length"):
            if self.find(path) is not ABSENT:
                yield path, plan.train.seq_length, "the sequences that were planned for"
        yield from layout_fields(self, plan)
        if self.find("dataset.micro_batch_size") is not ABSENT:  # Energon's data keep a copy
            why = "the data and training state the same size"
            yield "dataset.micro_batch_size", plan.layout.micro_batch_size, why
            yield "validation.eval_micro_batch_size", None, why
        sharded = plan.layout.shards_optimizer
        yield "ddp.use_distributed_optimizer", sharded, reason(plan, "use_distributed_optimizer")
        fsdp = plan.layout.uses_megatron_fsdp
        used = self.uses_fsdp
        if fsdp and not used and self.value("model._pre_wrap_hooks") not in (None, []):
            raise UserInputError(
                "use_megatron_fsdp",
                True,
                "a hook changes the model before it is wrapped (register_pre_wrap_hook): the "
                "weights are then on the meta device, and what it loads is lost",
                "Load weights from a checkpoint, or leave use_megatron_fsdp as it is.",
            )
        for path in FSDP_SWITCHES if fsdp or used else ():  # as ``ConfigContainer.validate`` asks
            yield path, fsdp, reason(plan, "use_megatron_fsdp")
        if self.find(_TORCH_FSDP2) is True:
            kept = plan.layout.sharding is DataParallelSharding.TORCH_FSDP2
            yield _TORCH_FSDP2, kept, reason(plan, "use_torch_fsdp2")
        yield from other_fields(self, plan)
        yield from self.places.fields(plan)
        yield from self._variables(plan)
        predictors = "model.mtp_num_layers"
        if plan.layout.execution.overlap_moe_expert_parallel_comm and self.find(predictors) == 0:
            yield predictors, None, "with the overlapped all-to-all 0.3 takes 1 or none"

    def own_notes(self, restored: Restored | None) -> tuple[str, ...]:
        """Lengths that differ; a folder that is not on this host may hold a run that goes on."""
        load = self.find("checkpoint.load")
        notes = []
        lengths = [self.find(f"{part}.seq_length") for part in ("dataset", "model")]
        if all(isinstance(each, int) for each in lengths) and lengths[0] != lengths[1]:
            notes.append(
                "dataset.seq_length is {}, and model.seq_length {}: the data's is planned.".format(
                    *lengths
                )
            )
        if restored is None and isinstance(load, str) and not Path(load).parent.is_dir():
            notes.append(
                f"checkpoint.load ({load}) is not on this host: a run that goes on there keeps the "
                "degrees, stages and format that it was saved with (pin its plan)."
            )
        return tuple(notes)

    def _variables(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """The recipe's own variables that are for another layout, taken out."""
        stated = self.find("env_vars")
        if not isinstance(stated, Mapping):
            return
        stale = dict[str, str]()
        experts = ("expert_model_parallel_size", "expert_tensor_parallel_size")
        if any(self.find(self.items[each]) != getattr(plan.layout.dims, each) for each in experts):
            stale[NVLINK_RANKS] = "was for another group of experts; HybridEP finds it by itself"
        if str(stated.get(CONNECTIONS)) == "1" and (why := needs_connections(plan)):
            stale[CONNECTIONS] = f"=1 is too few: {why}"
        if found := {name: why for name, why in stale.items() if name in stated}:
            others = {name: value for name, value in stated.items() if name not in found}
            yield "env_vars", others, "; ".join(f"{name} {why}" for name, why in found.items())


read_recipe = BridgeConfig.read_recipe
auto_recipe = BridgeConfig.auto_recipe
apply_plan = BridgeConfig.apply_plan
plan_changes = BridgeConfig.plan_changes


def as_script(cfg: Any, words: Iterable[str]) -> Any:
    """A configuration as ``run_recipe.py`` trains it with some overrides.

    Packs are as long as sequences, and stages are laid out for the sizes that are typed: once, as
    the function that does so ends for other sizes, which a plan may have. 0.7 drops the layers of
    the first and the last stage where they do not go with a number of stages that is typed.

    Source: ``sync_offline_packing_alignment``, ``sync_model_pipeline_layout``,
    ``sync_finetuning_cp_invariants`` (0.6).
    """
    if specs := value_or(cfg.dataset, "offline_packing_specs"):
        specs.packed_sequence_size = cfg.dataset.seq_length
    model = cfg.model
    typed = " ".join(words)
    if is_finetuning(cfg.dataset) and model.context_parallel_size > 1:
        model.calculate_per_token_loss = True
        cfg.ddp.average_in_collective = False
    layout = value_or(model, "_pipeline_model_parallel_layout_builder")
    if layout and "model.pipeline_model_parallel_layout=" not in typed:
        model.pipeline_model_parallel_layout = layout(
            model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
        )
        model._pipeline_model_parallel_layout_builder = None
    ends = {name: size for name in _ENDS if (size := value_or(model, name))}
    release = release_number(target_named("megatron_bridge").megatron_core)
    if ends and release > (0, 19) and "model.pipeline_model_parallel_size=" in typed:
        stages = model.pipeline_model_parallel_size - len(ends)
        layers = model.num_layers - sum(ends.values())
        if layers % stages or min(layers, stages) < 1 if stages else layers:
            for name in ends:
                if f"model.{name}=" not in typed:
                    setattr(model, name, None)
    return cfg


#: A value that Hydra's grammar and YAML read alike; of other objects (torch types) the text.
_text = partial(json.dumps, default=str)


def to_dotlist(changes: Iterable[Change]) -> list[str]:
    """Changes as overrides in Hydra's grammar, one a field.

    >>> to_dotlist([Change(field="model.recompute_modules", before=None, after=["mlp"], reason="")])
    ['model.recompute_modules=["mlp"]']
    """
    words = []
    for change in changes:
        if isinstance(change.after, Mapping):
            words += [f"~{path}" for path in _removed(change)]
            before = change.before if isinstance(change.before, Mapping) else {}
            words += [
                f"++{change.field}.{name}={_text(value)}"
                for name, value in change.after.items()
                if before.get(name) != value
            ]
        else:
            words.append(f"{change.field}={_text(change.after)}")
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
