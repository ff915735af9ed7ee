"""The job that a configuration of NeMo or Megatron-Bridge states: its model, memory and layout.

Fields are read by name from anything that has them: a built config, a provider, or the Fiddle
``Config`` that would build one. What is ``None`` there follows Megatron's own default rules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import GATHER, Job, Requirement
from nest_megatron.config.space import class_limits
from nest_megatron.cost_model.execution_flags import time_notes
from nest_megatron.cost_model.memory_flags import memory_flags, text
from nest_megatron.cost_model.target_defaults import NEMO, newer_release_notes
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.architecture import (
    UNPRICED,
    family_of,
    notes_on_unknown_fields,
    refuse_unplannable,
    spec_of_config,
    unpriced,
)
from nest_megatron.integrations.fields import (
    ABSENT,
    ARGUMENTS,
    SPELLINGS,
    Configuration,
    ExecutionPlaces,
    FieldValue,
    attribute,
    class_names,
    layout_text,
    megatron_arguments,
    memory_fields,
    value_or,
    values_of,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import (
    OVERLAPS,
    RECOMPUTE,
    Values,
    naming_fields,
    read_recompute,
    read_sharding,
    read_zero,
)
from nest_megatron.integrations.restore import (
    Restored,
    data_requirements,
    differs_by_rank,
    is_finetuning,
    loss_notes,
    packed_sequence_size,
    packs_sequences,
    with_adapters,
)
from nest_megatron.layout.batch_schedule import RAMPUP, BatchSchedule, read_schedule
from nest_megatron.layout.cuda_graphs import FIELDS as GRAPH_FIELDS
from nest_megatron.layout.cuda_graphs import PACKED, cuda_graphs
from nest_megatron.layout.knobs import closed_fields
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import release_number
from nest_megatron.layout.rulebook.options import OPTIONS, fields_of_options
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec

#: What every plan takes back (``field_mapping``), so that it weighs on no plan's memory.
TAKEN_BACK = "defer_embedding_wgrad_compute"
#: Items that no choice of a layout is made of by itself.
_NOT_FIXED = (
    *RECOMPUTE,
    "sequence_parallel",
    "use_distributed_optimizer",
    "data_parallel_sharding_strategy",
    *OVERLAPS,
    "global_batch_size",
)
_ORDER = "use_tp_pp_dp_mapping"
_ETP, _PATTERN = "expert_tensor_parallel_size", "hybrid_layer_pattern"
_ONE_ORDER = Requirement(
    value=False,
    reason="it makes no groups in the other order",
    fix="leave dist.use_decentralized_pg out",
    who="dist.use_decentralized_pg",
)
_GATHERED_BEFORE = Requirement(
    value=False,
    reason="nothing copies the weights back into the buffer that they share with gradients",
    fix="set reuse_grad_buf_for_mxfp8_param_ag=False",
    who="reuse_grad_buf_for_mxfp8_param_ag",
)
_DISPATCHER = {"moe_token_dispatcher_type", "moe_flex_dispatcher_backend"}
#: Recipes of Megatron-Bridge set it, and nothing reads it there.
_NOT_READ = "model.fp8_param_gather"


class Recipe(Configuration, ABC):
    """A framework's configuration that states a job.

    Attributes:
        parts: without which it is none.
        variable, described, made_by: what messages call it, its kind, and what makes one.
        states_size: it says how many GPUs there are; otherwise its launcher does.
        restored_by: finds the checkpoint that it starts from.
        installed_name: the framework with its installed release, where that decides the target.
        training_parts: configurations of training whose fields may matter to time and memory.

    Args:
        assume_harmless: fields that are not known and are planned for all the same.
    """

    parts: tuple[str, ...]
    variable: str
    described: str
    made_by: str
    states_size: bool
    restored_by: Callable[[Any], Restored | None]
    training_parts: tuple[str, ...]
    installed_name: str = ""

    def __init__(self, root: Any, target: Target, assume_harmless: Collection[str] = ()) -> None:
        super().__init__(root, target)
        self._assume_harmless = assume_harmless

    @property
    @abstractmethod
    def places(self) -> ExecutionPlaces:
        """Where it says how layers run."""

    @property
    @abstractmethod
    def uses_fsdp(self) -> bool:
        """Whether Megatron-FSDP is on."""

    @abstractmethod
    def size(self) -> tuple[int | None, int | None]:
        """GPUs of the job and of each node, where they are known."""

    @abstractmethod
    def number_format(self) -> tuple[Precision, Any]:
        """The format of the parameters, and what holds the settings of FP8 and FP4 around them."""

    @property
    @abstractmethod
    def holders(self) -> Mapping[str, Any]:
        """Its parts by their paths; where several have a setting, that of the first counts."""

    def memory(self) -> Values:
        """Settings besides the layout that memory depends on, as of ``memory_fields``."""
        return memory_fields(*self.holders.values())

    def option_fields(self) -> dict[str, list[tuple[str, Any]]]:
        """The fields that state an option of ``OPTIONS``, with their values, by precedence.

        What overlap settings and mixed precision leave open is off, as they replace what others
        say; a callback sets its own once all is checked.
        """
        found: dict[str, list[tuple[str, Any]]] = {}
        replacing = (*self.places.overlap, "mixed_precision", "trainer.plugins")
        for name, (part, holder) in product(sorted({*OPTIONS.values()}), self.holders.items()):
            for path in (f"{part}.{spelled}" for spelled in SPELLINGS.get(name, (name,))):
                value = attribute(holder, path.rpartition(".")[2])
                if value is not ABSENT and "callbacks" not in part and path != _NOT_READ:
                    is_open = value is None and part in replacing
                    found.setdefault(name, []).append((path, False if is_open else value))
        return found

    def options(self, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """What it says of the options that rules read, with the fields that a plan has changed."""
        found: dict[str, Any] = {"finetunes": is_finetuning(self.find(self.data))}
        for name, fields in self.option_fields().items():
            for field in reversed(fields):
                if (value := (changed or {}).get(*field)) is not None:
                    plain = isinstance(value, int | float | list | tuple)
                    found[name] = value if plain else text(getattr(value, "__name__", value))
        return found

    @abstractmethod
    def vocabulary(self, given: int | None) -> tuple[int, bool, tuple[str, ...]]:
        """Rows of the embedding, whether they are padded already, and what was assumed."""

    @abstractmethod
    def wanted(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """All that a plan sets in it."""

    def declared(self, path: str) -> str:
        """A field by the path that overrides of the framework take."""
        return path

    def require_plannable(self) -> tuple[str, ...]:
        """Refuse what is no such configuration, or has a model that cannot be planned.

        Returns:
            Notes on what was assumed of it.
        """
        for path in self.parts:
            if self.value(path) is None:
                raise UserInputError(
                    f"{self.variable}.{path}",
                    None,
                    f"{self.described} has it",
                    f"Give what {self.made_by}.",
                )
        return refuse_unplannable(
            self.find(self.model), self.root.model, assume_harmless=self._assume_harmless
        )

    def spec(self, vocab_size: int | None) -> tuple[TransformerSpec, tuple[str, ...]]:
        """The model, and what was assumed of it; raises as ``job`` does."""
        assumed = self.require_plannable()
        config, data = self.find(self.model), self.find(self.data)
        rows, is_padded, notes = self.vocabulary(vocab_size)
        notes = (*notes, *assumed)
        of_data = value_or(data, "seq_length", 0)  # ``run_recipe.py`` copies it to the model
        length = packed_sequence_size(data) or self.whole(
            f"{self.data}.seq_length" if of_data else self.seq_length
        )
        spec = spec_of_config(config, seq_length=length, vocab_size=rows, vocab_is_padded=is_padded)
        if spec.decoder_seq_length is not None:
            spec = replace(
                spec, decoder_seq_length=value_or(data, "seq_length_dec", spec.decoder_seq_length)
            )
        for path in ("peft", "model_transform", "model.model_transform"):  # NeMo takes the first
            if (peft := self.value(path)) is not None:
                where = f"{self.variable}.{path}"
                spec, assumed = with_adapters(spec, peft, where, config, self._assume_harmless)
                return spec, (*notes, *assumed)
        return spec, notes

    def job(self, vocab_size: int | None = None) -> Job:
        """The job; nothing is changed.

        Args:
            vocab_size: of the tokenizer, where its files are not here.

        Raises:
            UnplannableModelError: if this planner does not support the model.
            UserInputError: if a field is missing or wrong.
        """
        spec, notes = self.spec(vocab_size)
        num_gpus, gpus_per_node = self.size()
        precision, fp8_recipe = self._precision()
        restored = self.restored_by(self.root)
        needs = self.requirements(spec)
        config = self.find(self.model)
        data = self.find(self.data)
        places = self.places
        stated = self.item_values()
        execution = places.values()
        # without it both frameworks turn the overlap off, with a warning
        if places.overlap and not stated.get("sequence_parallel"):
            execution["tp_comm_overlap"] = False
        for item, value in stated.items():
            if item.endswith("_parallel_size") and value not in (None, 1):
                self.whole(self.items[item])
        fsdp = {
            "use_megatron_fsdp": self.uses_fsdp,
            "use_torch_fsdp2": self.find("dist.use_torch_fsdp2") is True,
        }
        name = "megatron_fsdp_version"
        sharded = {**stated, **fsdp, name: self.find(f"{self.ddp}.{name}")}
        fixed = {
            ARGUMENTS.get(item, item): value
            for item, value in stated.items()
            if item not in _NOT_FIXED
            and value is not None
            and (spec.is_moe or not item.startswith("expert_"))
        }
        flags = self._memory_flags(execution, fp8_recipe)
        with naming_fields(self.items):
            recompute = read_recompute(stated)
        packs = self._packs()
        uneven = differs_by_rank(data)
        graphs = {name: value_or(config, name) for name in GRAPH_FIELDS} | {PACKED[0]: packs}
        unforced = replace(places, forced={}).values()
        closed = closed_fields(
            value_or(config, "deterministic_mode", False), lengths=packs or is_finetuning(data)
        )
        if uneven and self.find(self.hybridep_padding) is ABSENT:
            closed |= _DISPATCHER
        growth = self.value(self.rampup_batch_size)
        ramp_note = (
            f"{self.rampup_batch_size} = {growth} is ignored by megatron-core "
            f"{self.target.megatron_core}: every step has {self.items['global_batch_size']}."
        )
        return Job(
            spec=spec,
            target=self.target,
            version=self.target.megatron_core,
            global_batch_size=self.whole(self.items["global_batch_size"]),
            batch_schedule=self.batch_schedule(spec.seq_length),
            micro_batch_size=self.whole(self.items["micro_batch_size"]),
            precision=precision,
            fixed={**fixed, **execution},
            required={
                **({} if restored is None else restored.required()),
                **needs,
            },
            restored=restored,
            stated={**self.arguments(), **self._overlaps(stated), **graphs, **fsdp},
            options={**self.options(), "use_megatron_fsdp": self.uses_fsdp},
            recompute=recompute,
            zero=read_zero(sharded) or ZeroStage.NONE,
            sharding=read_sharding(sharded),
            memory_flags=flags,
            on_blackwell={name: unforced[name] for name in places.forced},
            graphs=cuda_graphs(graphs),
            capturable=not (packs or uneven),
            packs=packs,
            closed=closed,
            can_state=places.can_state(),
            fields={
                **fields_of_options({k: v[0][0] for k, v in self.option_fields().items()}),
                **places.choices(),
                **self.items,
                **{ARGUMENTS[item]: self.items[item] for item in ARGUMENTS},
            },
            use_distributed_optimizer=bool(stated.get("use_distributed_optimizer")),
            num_gpus=num_gpus,
            gpus_per_node=gpus_per_node,
            notes=(
                *notes,
                *unpriced({name: value_or(config, name) for name in UNPRICED}),
                *newer_release_notes(self.installed_name),
                *notes_on_unknown_fields({path: self.find(path) for path in self.training_parts}),
                *(() if restored is None else (restored.note(),)),
                *([ramp_note] if growth is not None and self._ignores_ramp else []),
                *loss_notes(self, needs),
                *self.own_notes(restored),
                *time_notes(flags),
            ),
        )

    def _precision(self) -> tuple[Precision, str]:
        """The narrowest format of its GEMMs, and its recipe of FP8."""
        params, holder = self.number_format()
        for name, narrow in (("fp4", Precision.NVFP4), ("fp8", Precision.FP8)):
            if given := value_or(holder, name):
                if params is Precision.FP32:
                    raise UserInputError(
                        name,
                        given,
                        "weights and activations are in 32 bits, which is not priced beside it",
                        "Train in bf16-mixed.",
                    )
                return narrow, str(value_or(holder, "fp8_recipe", "delayed"))
        return params, "delayed"

    def _packs(self) -> bool:
        """Whether its samples are packed, which the attention of its model must take."""
        config, data = self.find(self.model), self.find(self.data)
        if (size := packed_sequence_size(data)) is not None and not family_of(config).packs:
            raise UserInputError(
                f"{self.data}: packed_sequence_size",
                size,
                f"the attention of {class_names(config)[0]} takes no packed sequences",
                "Train without packing.",
            )
        return packs_sequences(data)

    def _memory_flags(self, execution: Values, fp8_recipe: str) -> Values:
        """What memory and time depend on besides the layout."""
        # the overlap settings have a size of their own (``_get_optimizer_overlap_cfgs``)
        overlap = self.places.overlap
        sizes = values_of(map(self.find, overlap or [self.ddp]), "bucket_size")
        keeps_scores = family_of(self.find(self.model)).keeps_scores
        return memory_flags(
            {
                **self.memory(),
                **({"attention_backend": "local"} if keeps_scores else {}),
                **execution,
                "ddp_bucket_size": next(sizes, None if overlap else 0),
                "params_dtype": self.number_format()[0].value,
                "fp8_recipe": fp8_recipe,
                TAKEN_BACK: None,
            }
        )

    def _overlaps(self, stated: Mapping[str, Any]) -> dict[str, Any]:
        """The overlaps that the overlap settings turn on or off by themselves."""
        overlap = self.places.overlap

        def said(name: str) -> list[Any]:
            return [self.find(f"{part}.{name}") for part in overlap or (self.model,)]

        # ``_get_optimizer_overlap_cfgs`` of both: from two replicas on, if not stated there
        found = {
            name: False not in said(name) and (True in said(name) or 2)
            for name in OVERLAPS
            if overlap and stated.get("use_distributed_optimizer")
        }
        # ``_get_model_comm_overlap_cfgs``: on with virtual stages, but not those of a layout alone
        sends = said("overlap_p2p_comm")
        virtual = stated.get("virtual_pipeline_model_parallel_size")
        if False in sends or (overlap and not (virtual or True in sends)):
            found["overlap_p2p_comm"] = False
        return found

    def requirements(self, spec: TransformerSpec) -> dict[str, Requirement]:
        """What its data and its classes fix of a layout."""
        return {
            **data_requirements(self, self.whole(self.items["micro_batch_size"])),
            **({_ORDER: _ONE_ORDER} if self._has_one_order else {}),
            **({GATHER: _GATHERED_BEFORE} if self.gathers_before_forward else {}),
            **class_limits(spec, self.target),
        }

    def batch_schedule(self, seq_length: int) -> BatchSchedule | None:
        """How the batch grows.

        Raises:
            UserInputError: for sizes that megatron-core refuses.
        """
        growth, steps = self.find(self.rampup_batch_size), self.find(self.iterations)
        if growth is ABSENT or self._ignores_ramp:
            return None
        return read_schedule(
            {RAMPUP: growth}.get,
            last=self.whole(self.items["global_batch_size"]),
            seq_length=seq_length,
            iterations=steps if isinstance(steps, int) and steps > 0 else None,
            name=lambda name: {**self.items, RAMPUP: self.rampup_batch_size}.get(name, name),
        )

    @property
    def _ignores_ramp(self) -> bool:
        """Whether megatron-core trains with the whole batch from the first step, ramp or not.

        Source: ``init_num_microbatches_calculator`` since 0.18.
        """
        return release_number(self.target.megatron_core) >= (0, 18)

    def item_values(self) -> dict[str, Any]:
        """The items of a plan that it has, with their values; a layout of stages as text."""
        stated = {
            item: value
            for item, path in self.items.items()
            if (value := self.find(path)) is not ABSENT
        }
        layout = "pipeline_model_parallel_layout"
        if self.find("ddp.use_distributed_optimizer") is True:  # Megatron-Bridge turns on both
            stated["use_distributed_optimizer"] = True
        # ``_set_moe_expert_tensor_parallel_default`` of Megatron-Bridge 0.6
        if stated.get("expert_model_parallel_size") not in (None, 1) and release_number(
            self.target.megatron_core
        ) >= (0, 19):
            stated[_ETP] = stated.get(_ETP) or 1
        if self._has_one_order and _ORDER in stated:
            stated[_ORDER] = False
        # ``_validate_config`` of NeMo drops them where there is no pipeline
        if self.target is NEMO and stated["pipeline_model_parallel_size"] in (None, 1):
            stated["virtual_pipeline_model_parallel_size"] = None
        return {**stated, layout: layout_text(stated.get(layout))}

    def own_notes(self, restored: Restored | None) -> tuple[str, ...]:
        """What a plan takes for granted of this framework's fields."""
        return ()

    @property
    def hybridep_padding(self) -> str:
        """The field that lets HybridEP take micro batches of different lengths, since 0.6."""
        return f"{self.model}.moe_hybridep_pad_uneven_dispatch_inputs"

    @property
    def gathers_before_forward(self) -> bool:
        """Whether weights must be gathered before the forward passes, where its loop says so."""
        return False

    @property
    def _has_one_order(self) -> bool:
        """Whether process groups are made by ``HyperCommGrid``, in the order tp-cp-dp-pp alone.

        Source: ``_create_pg_collection`` of Megatron-Bridge's ``initialize.py``.
        """
        return self.find("dist.use_decentralized_pg") is True

    def arguments(self) -> dict[str, Any]:
        """The same by the names of Megatron-LM's arguments; a layout says the virtual stages."""
        stated = self.item_values()
        if "|" in str(found := self.find(f"{self.model}.{_PATTERN}")):
            stated[_PATTERN] = found
        return megatron_arguments(stated)
