"""NeMo 2.x: a recipe (a Fiddle ``run.Partial`` of ``llm.pretrain`` or its like) read and planned.

>>> from nest_megatron.integrations.nemo import auto_recipe
>>> recipe = llm.recipes.llama3_70b.pretrain_recipe(num_nodes=8)  # doctest: +SKIP
>>> plan, changes = auto_recipe(recipe, cluster="dgx_h100")  # doctest: +SKIP

Nothing of NeMo, torch or Fiddle is loaded here: a recipe is read by the names of its fields.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.target_defaults import NEMO, NEMO_LACKS
from nest_megatron.errors import UserInputError, require_at_least
from nest_megatron.integrations.fields import (
    ABSENT,
    ExecutionPlaces,
    FieldValue,
    changes,
    class_names,
    classes_of,
    lightning_precision,
    value_or,
)
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.megatron_lm.layout_arguments import OVERLAPS
from nest_megatron.integrations.megatron_lm.rendezvous import within
from nest_megatron.integrations.recipe_plan import (
    PlannedRecipe,
    layout_fields,
    other_fields,
    planned_items,
)
from nest_megatron.integrations.restore import Restored, packed_sequence_size, restored_by_nemo
from nest_megatron.integrations.vocabulary import hub_name, is_cached, rows_of_model, without_hub
from nest_megatron.integrations.watching import STEPS
from nest_megatron.layout import plan_file
from nest_megatron.layout.diff import reason
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.packages import install_command, installed_version

_STRATEGY = "trainer.strategy"
#: Longest wait for a tokenizer whose files are not here: without a network, retries take minutes.
FETCH_S = 20.0
#: Rows of the tokenizer that NeMo's mock data builds where none is given.
#: The last is called as the first, in another module (``llm.t5.data``).
_MOCK_ROWS = {
    "MockDataModule": 50_257,
    "BERTMockDataModule": 30_522,
    "T5MockDataModule": 28_996,
}
#: What ``DeepEPCallback`` sets, on Ampere and Hopper; its backend stays the model's.
_DEEPEP = {
    "moe_token_dispatcher_type": "flex",
    "moe_shared_expert_overlap": False,
}


class NemoRecipe(PlannedRecipe, framework="nemo"):
    """A recipe of NeMo 2.x.

    Source: NeMo 2.7.3 ``nemo.lightning.MegatronStrategy``, which copies its own sizes over those of
    ``model.config`` before the model is built.

    Args:
        root: a Fiddle ``Partial`` or ``Config`` with ``model``, ``data``, ``trainer`` and
            ``optim``, or an object with the same attributes.
        assume_harmless: fields that are not known and are planned for all the same.
    """

    states_size = True

    def __init__(self, root: Any, assume_harmless: Collection[str] = ()) -> None:
        super().__init__(root, NEMO, assume_harmless)

    def of_trainer(self, name: str = "callbacks") -> Sequence[Any]:
        """What the trainer has of a kind, where it may have a single one."""
        found = value_or(self.root.trainer, name, [])
        return found if isinstance(found, list | tuple) else [found]

    @property
    def places(self) -> ExecutionPlaces:
        """Callbacks that set overlaps of communication, a built one's in what it was given.

        Their settings replace those of the model (``MegatronCommOverlapCallback.setup``).
        """
        overlap = []
        for index, callback in enumerate(self.of_trainer()):
            if "MegatronCommOverlapCallback" in class_names(callback):
                path = f"trainer.callbacks[{index}]"
                given = f"{path}.user_comm_overlap_cfg"
                overlap.append(path if self.find(given) is ABSENT else given)
        lacks = NEMO_LACKS
        option = "tp_comm_overlap"
        if not overlap:
            why = "only MegatronCommOverlapCallback makes the user buffers, and there is none"
            lacks = {**lacks, option: why}
        length = self.find(self.seq_length)
        learned = self.find(f"{self.model}.position_embedding_type") == "learned_absolute"
        if learned and value_or(self.root.model.config, "seq_length", length) != length:
            why = "its buffers are as long as model.config.seq_length, which has learned positions"
            lacks = {**lacks, option: why}
        return ExecutionPlaces(
            recipe=self,
            overlap=tuple(overlap),
            lacks=lacks,
            forced=_DEEPEP if any(map(turns_on_deepep, self.of_trainer())) else {},
        )

    @property
    def gathers_before_forward(self) -> bool:
        """NeMo clears the buffer that MXFP8 weights share with gradients, and never fills it again.

        Source: ``MegatronStrategy.training_step``; ``_copy_main_params_to_param_buffer`` of
        megatron-core is the training loop's to call.
        """
        holders = (self._plugin, self.find(self.ddp), self.find("optim.config"))
        return any(value_or(each, "reuse_grad_buf_for_mxfp8_param_ag", False) for each in holders)

    @property
    def uses_fsdp(self) -> bool:
        """Whether the strategy or its ``ddp`` says so (``MegatronStrategy.__init__``)."""
        return (
            self.find(f"{_STRATEGY}.fsdp") == "megatron"
            or self.find(f"{self.ddp}.use_megatron_fsdp") is True
        )

    def size(self) -> tuple[int, int]:
        """GPUs of the job and of each node, which a recipe may leave to the launch: an error."""
        devices = value_or(self.root.trainer, "devices", "auto")
        if isinstance(devices, str) and re.fullmatch(r"\d+|\d+(,\d*)+", devices):  # as Lightning
            devices = list(filter(None, devices.split(","))) if "," in devices else int(devices)
        per_node = len(devices) if isinstance(devices, list | tuple) else devices
        if isinstance(per_node, int) and per_node > 0:
            nodes = value_or(self.root.trainer, "num_nodes")
            return per_node * (1 if nodes is None else self.whole("trainer.num_nodes")), per_node
        raise UserInputError(
            "trainer.devices",
            devices,
            "a plan needs the number of GPUs in a node",
            "Set it, for example to 8.",
        )

    def restored_by(self, root: Any) -> Restored | None:
        """What ``resume`` restores, of which an optimizer's state keeps the recipe's layout."""
        names = ("num_layers", "mtp_num_layers")
        layers = {name: value_or(root.model.config, name) for name in names}
        return restored_by_nemo(root, {**self.arguments(), **layers})

    def require_plannable(self) -> tuple[str, ...]:
        """Refuse another strategy, too."""
        notes = super().require_plannable()
        strategy = class_names(self.root.trainer.strategy)
        if "MegatronStrategy" not in strategy:
            raise UserInputError(
                "trainer.strategy",
                strategy[0],
                "only MegatronStrategy lays a model out over ranks",
                "Launch this job without nest.",
            )
        return notes

    @property
    def holders(self) -> Mapping[str, Any]:
        """Settings of callbacks win over those of the plugin, and these over the others."""
        plugin = "trainer.plugins"
        drops = (
            f"trainer.callbacks[{index}]"
            for index, each in enumerate(self.of_trainer())
            if "MegatronTokenDropCallback" in class_names(each)
        )
        others = (_STRATEGY, plugin, self.model, "optim.config", self.ddp)
        paths = (*self.places.overlap, *drops, *others)
        return {path: self.find(path) for path in paths} | {plugin: self._plugin}

    @property
    def _plugin(self) -> Any:
        plugins = self.of_trainer("plugins")
        return next((each for each in plugins if "Precision" in " ".join(class_names(each))), None)

    def number_format(self) -> tuple[Precision, Any]:
        """That of the plugin, or Lightning's own."""
        plugin = self._plugin
        stated = value_or(self.root.trainer if plugin is None else plugin, "precision", "32")
        return lightning_precision(stated, "trainer.plugins.precision"), plugin

    def vocabulary(self, given: int | None) -> tuple[int, bool, tuple[str, ...]]:
        """A size in the config is taken as it is, that of the tokenizer is padded.

        Source: ``GPTConfig.configure_model``.
        """
        recipe = self.root
        if (preset := value_or(recipe.model.config, "vocab_size")) is not None:
            return preset, True, ()
        if given is not None:
            return given, False, ()
        holders = [recipe, recipe.model, recipe.data]
        if value_or(recipe, "tokenizer") == "data":  # one of its own, or whose of the two both take
            holders = [recipe.data, recipe.model]
        for holder in holders:
            if not isinstance(tokenizer := value_or(holder, "tokenizer"), str | None):
                rows, notes = _tokenizer_rows(tokenizer)
                return rows, False, notes
        base = hub_name(self.find("resume.restore_config.path"))
        if base is not None and (found := rows_of_model(base)) is not None:
            return found, False, (_base_note(base, found),)
        kind = class_names(recipe.data)[0]
        if kind == "MockDataModule" and "T5Model" in class_names(recipe.model):
            kind = "T5MockDataModule"
        if kind in _MOCK_ROWS:
            rows = _MOCK_ROWS[kind]
            note = f"The recipe names no tokenizer; {rows} rows are assumed, as {kind} takes."
            return rows, False, (note,)
        limit = "the recipe names no tokenizer"
        if base is not None:
            limit += f", and how many rows that of {base} has is not known"
        raise _vocabulary_error(kind, limit)

    def wanted(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """The plan, and what it makes stale cleared."""
        gpus, (_, devices) = plan.layout.num_gpus, self.size()
        per_node = min(devices, gpus)
        why = "the GPUs that were planned for"
        if gpus % per_node:  # whole nodes stay as the recipe has them
            raise UserInputError(
                "num_gpus",
                gpus,
                f"the recipe's nodes have {per_node} GPUs each",
                "Set trainer.devices to the size of a node, and plan for whole nodes.",
            )
        yield "trainer.num_nodes", gpus // per_node, why
        if per_node != devices:
            yield "trainer.devices", per_node, why
        length = plan.train.seq_length
        why = "the sequences that were planned for"
        if packed_sequence_size(self.root.data) is None:  # else the length is that of a pack
            yield self.seq_length, length, why
        cp = plan.layout.dims.context_parallel_size
        own = value_or(self.root.model.config, "seq_length", length)  # by default the data's
        if (cp > 1 and own % (2 * cp)) or (
            own != length and plan.layout.execution.tp_comm_overlap  # user buffers are as long
        ):
            yield f"{self.model}.seq_length", length, why
        fsdp = plan.layout.uses_megatron_fsdp
        why = reason(plan, "use_megatron_fsdp")
        inside = f"{self.ddp}."
        layout = layout_fields(self, plan)
        if isinstance(self.find(self.ddp), str):  # it has no fields, and becomes an object
            yield from (row for row in layout if not row[0].startswith(inside))
            why_ddp = "the plan's time counts on gradients and weights that travel beside the work"
            yield self.ddp, self._ddp_config(plan), why_ddp
        else:
            yield from layout
            yield f"{inside}use_megatron_fsdp", fsdp, why
        yield "trainer.strategy.fsdp", "megatron" if fsdp else None, why
        yield from other_fields(self, plan)
        yield from self._execution(plan)

    def _ddp_config(self, plan: ParallelPlan) -> Any:
        """A configuration in the place of the text ``megatron``, of the kind that recipes use."""
        from megatron.core.distributed import DistributedDataParallelConfig

        if not _is_unbuilt(self.root):
            raise UserInputError(
                self.ddp,
                "megatron",
                "a strategy that is built already cannot take another DDP configuration",
                "Give the recipe itself, before it is built.",
            )
        chosen = planned_items(plan)
        names = (*OVERLAPS, "use_distributed_optimizer", "data_parallel_sharding_strategy")
        return type(self.root.trainer.strategy)(
            DistributedDataParallelConfig,
            check_for_nan_in_grad=True,  # what the strategy sets by itself
            use_megatron_fsdp=plan.layout.uses_megatron_fsdp,
            **{name: chosen[name] for name in names},
        )

    def _execution(self, plan: ParallelPlan) -> Iterator[FieldValue]:
        """How layers run, without the callback that would change it in training."""
        places = self.places
        option = "tp_comm_overlap"
        added = plan.layout.execution.tp_comm_overlap and not places.overlap
        if added and _is_unbuilt(self.root):
            yield self._overlap_callback(plan)
            able = {name: why for name, why in places.lacks.items() if name != option}
            places = replace(places, lacks=able)
            own = f"{self.model}.{option}"  # the callback sets it as training starts
            found = tuple(row for row in places.fields(plan) if row[0] != own)
        else:
            found = tuple(places.fields(plan))
        works = not is_blackwell(plan.cluster.accelerator.name)
        if not places.forced or not plan.model.is_moe or (works and not changes(self.root, found)):
            yield from found
            return
        yield from replace(places, forced={}).fields(plan)
        others = [each for each in self.of_trainer() if not turns_on_deepep(each)]
        why = "the plan states the dispatcher itself, which this callback would replace"
        yield "trainer.callbacks", others, why

    def _overlap_callback(self, plan: ParallelPlan) -> FieldValue:
        """The callbacks with the one that makes user buffers, which a plain recipe does not have.

        It exchanges between stages as plans do, and would overlap gradients and weights by itself
        (``MegatronCommOverlapCallback``).
        """
        from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import (
            MegatronCommOverlapCallback,
        )

        callback = type(self.root.trainer.strategy)(
            MegatronCommOverlapCallback,
            tp_comm_overlap=True,
            **{name: plan.arguments[name] for name in OVERLAPS},
        )
        why = "it makes the user buffers of tp_comm_overlap"
        return "trainer.callbacks", [*self.of_trainer(), callback], why


def turns_on_deepep(callback: Any) -> bool:
    """Whether it is the callback that turns DeepEP on."""
    return "DeepEPCallback" in class_names(callback)


def require_language_models() -> None:
    """Explain an installed release of NeMo that has no language models."""
    what = "nemo-toolkit"
    fix = f"{install_command('nemo')} (nemo-toolkit >=2.4,<3; 2.7.3 is what was tried)."
    installed = installed_version(what)
    if installed is None:
        raise UserInputError(what, None, "it is not installed", fix)
    if int(installed.partition(".")[0]) >= 3:
        raise UserInputError(
            what,
            installed,
            "since 3.0.0 it has no collection of language models and no MegatronStrategy",
            fix,
        )


def _tokenizer_rows(tokenizer: Any) -> tuple[int, tuple[str, ...]]:
    """Rows of a tokenizer, which is built if it is not yet and can be, and what was assumed."""
    if not hasattr(tokenizer, "__fn_or_cls__"):
        return int(tokenizer.vocab_size), ()
    import fiddle

    names = (value_or(tokenizer, each) for each in ("pretrained_model_name", "model_name"))
    name = next(filter(None, map(hub_name, names)), None)
    is_here = name is not None and is_cached(name)
    if name is not None and not is_here and (known := rows_of_model(name)) is not None:
        return known, (_base_note(name, known),)
    try:
        with without_hub() if is_here else contextlib.nullcontext():
            return int(within(FETCH_S, lambda: fiddle.build(tokenizer)).vocab_size), ()
    except Exception as error:
        why = f"the tokenizer cannot be built here ({type(error).__name__})"
        if isinstance(error, TimeoutError):
            late = str(error) or f"not within {FETCH_S:g} s"
            why = f"the tokenizer cannot be fetched ({late}; is there a network here?)"
        raise _vocabulary_error(name or repr(tokenizer), why) from error


def _base_note(name: str, rows: int) -> str:
    return (
        f"The vocabulary has {rows:,} rows, as {name} has; its tokenizer is not here. vocab_size= "
        "says another number."
    )


def _vocabulary_error(value: str, limit: str) -> UserInputError:
    return UserInputError(
        "recipe.data.tokenizer",
        value,
        limit,
        "Give vocab_size= (of a command --set --vocab-size=), set model.config.vocab_size if there "
        "is one, or data.tokenizer.",
    )


read_recipe = NemoRecipe.read_recipe
auto_recipe = NemoRecipe.auto_recipe
apply_plan = NemoRecipe.apply_plan
plan_changes = NemoRecipe.plan_changes


def watch_recipe(recipe: Any, plan: Any, *, steps: int = STEPS) -> None:
    """Have a planned recipe's run keep a record of itself, next to what the plan predicts.

    Where it trains, nest-megatron has to be installed, and writes to the history of that host.

    Args:
        recipe: as for ``read_recipe``; its callbacks get one more, in place.
        plan: the one in its fields, as for ``apply_plan``.
        steps: how many are watched.
    """
    require_at_least("steps", steps, 1, "Give at least 1, or do not watch it.")
    from nest_megatron.integrations.lightning import WatchCallback

    make: Any = WatchCallback
    if _is_unbuilt(recipe):
        make = partial(recipe.trainer.strategy.__class__, WatchCallback)
    recipe.trainer.callbacks = [
        *(
            each
            for each in NemoRecipe(recipe).of_trainer()
            if classes_of(each)[0] is not WatchCallback
        ),
        make(plan=plan_file.dump(getattr(plan, "record", plan)), steps=steps),
    ]


def _is_unbuilt(recipe: Any) -> bool:
    return hasattr(recipe.trainer.strategy, "__fn_or_cls__")
