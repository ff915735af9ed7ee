"""An application's fields as a job, by Megatron's names or NeMo 1's, and what a plan may set.

Source: ``MegatronGPTModel.build_transformer_config`` and
``MegatronBaseModel.build_transformer_config`` of NeMo 2.0.0.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.config.catalogue import read_spec, with_seq_length
from nest_megatron.config.compose import Settings
from nest_megatron.config.job import Job
from nest_megatron.config.overrides import choice, leaves, value_text
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.cost_model.memory_flags import READ
from nest_megatron.cost_model.target_defaults import OF_THE_JOB
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.architecture import (
    CLASSIFIED,
    OF_FAMILIES,
    REFUSED,
    SHAPE,
    unplannable,
)
from nest_megatron.integrations.fields import lightning_precision
from nest_megatron.integrations.hydra.view import AppView, names_of, node_at
from nest_megatron.integrations.megatron_lm.layout_arguments import read_recompute
from nest_megatron.integrations.megatron_lm.read import job_from_values
from nest_megatron.integrations.recipe_plan import planned_items
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import KNOBS
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import (
    NO_RECOMPUTE,
    RECOMPUTE_ARGUMENTS,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.solver.space import DEGREES, SearchSpace

_TABLE = packaged(__package__, "fields.toml")
_NAMES = (*SHAPE, *_TABLE["names"]["own"].split(), *READ)
_SIZES = _TABLE["names"]["sizes"].split()
#: What is read of an application whose model is named.
_OF_THE_JOB = ("global_batch_size", "rampup_batch_size", *READ)
_OF_THE_MODEL = tuple(name for name in _NAMES if name not in READ)
#: Whatever ``nest.fields`` may give a place.
_KNOWN = frozenset(
    (
        *_NAMES,
        *_TABLE["renamed"],
        *_TABLE["refused"],
        *CLASSIFIED,
        *(name for item in LAYOUT_ARGUMENTS for name in names_of(item)),
        *_TABLE["names"]["others"].split(),
    )
)
#: Likeness from which a field of the model is taken for another that is misspelt.
_NEARLY = 0.9
#: Ends of the paths of fields that make another job of it, or leave it less memory.
_OTHER_JOB = re.compile(
    r"offload(ing)?(_\w+)?$|lora[._](rank|dim|r)$|dynamic_(bsz|batch(_size|es)?)$|"
    r"memory_(utili[sz]ation|fraction|share|limit)$|mem_fraction(_static)?$"
)


def read_app(view: AppView, composed: Settings) -> Job:
    """The job of an application.

    Args:
        composed: the planning job's settings; a model named there is the application's.

    Raises:
        UnplannableModelError: for a model that this planner does not support.
        UserInputError: if a size is missing or impossible, naming where it could lie.
    """
    _require_known_fields(view)
    _refuse_unplannable(view)
    if growth := view.value("rampup_batch_size"):
        raise UserInputError(
            view.own_path("rampup_batch_size"),
            growth,
            "a batch that an application lets grow is not planned: every size of it has to be a "
            "multiple of what the replicas take at once",
            "Leave it out, or launch without nest.",
        )
    values = _values(view)
    if composed.train.global_batch_size is None:
        _require(values, "global_batch_size", view)
    if composed.model is not None:
        spec = with_seq_length(read_spec(composed), values.get("seq_length"))
        unsaid = []
        stated = {
            **{name: values[name] for name in _OF_THE_JOB if name in values},
            **{name: getattr(spec, name) for name in _SIZES},  # as a job needs to be read
            "padded_vocab_size": spec.vocab_size,
        }
        job = replace(job_from_values(stated, explicit=()), spec=spec)
        if composed.train.seq_length is None and values.get("seq_length") is None:
            unsaid.append(
                f"The application has no {view.own_path('seq_length')}: sequences of "
                f"{job.spec.seq_length:,} tokens are planned, as {job.spec.name} has them. "
                "+nest.fields.seq_length=PATH says where it lies, "
                "+nest.overrides.train.seq_length=N what it is."
            )
        return replace(job, notes=(*job.notes, *unsaid, *_unread_notes(view)))
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length"):
        _require(values, name, view)
    job = job_from_values(values, explicit=())
    gated: Any = {"activation": "gelu", "gated_linear_unit": True} if "geglu" in values else {}
    return replace(
        job,
        spec=replace(
            job.spec,
            **gated,
            name=str(view.at("name") or "model"),
            source="a Hydra application",
        ),
        notes=(*job.notes, *_assumptions(view)),
    )


def _values(view: AppView) -> dict[str, Any]:
    """The application's fields as Megatron's arguments; what it does not have is left out."""
    values = {name: view.value(name) for name in _NAMES}
    for theirs, ours in _TABLE["renamed"].items():
        if values.get(ours) is None:
            values[ours] = view.value(theirs)
    if not (view.value("bf16") or view.value("fp16")):
        stated = view.value("precision") or view.at("trainer.precision")
        kind = lightning_precision("bf16" if stated is None else stated, "trainer.precision")
        values[kind.value] = kind is not Precision.FP32 or None  # which has no switch
    norm = str(view.value("normalization")).lower()
    activation = view.value("activation")
    if norm in (*_TABLE["names"]["layernorms"].split(), "rmsnorm"):
        values["normalization"] = "RMSNorm" if norm == "rmsnorm" else "LayerNorm"
        values["apply_layernorm_1p"] = norm == "layernorm1p"
    if activation is not None:
        known = _TABLE["activations"]
        if activation not in known:
            raise unplannable("model.activation", activation, f"supported are {', '.join(known)}")
        values[known[activation]] = True
    shared = view.value("share_embeddings_and_output_weights")
    if shared is not None:
        values["untie_embeddings_and_output_weights"] = not shared
    tokenizer = view.value("tokenizer")
    if isinstance(tokenizer, Mapping) and view.value("tokenizer_type") is None:
        values["tokenizer_type"] = tokenizer.get("type")
    optimizer = view.value("optim")
    if isinstance(optimizer, Mapping) and view.value("use_distributed_optimizer") is None:
        values["use_distributed_optimizer"] = "dist" in str(optimizer.get("name"))
    values = {name: value for name, value in values.items() if value is not None}
    values["group_query_attention"] = "num_query_groups" in values
    return values


def _refuse_unplannable(view: AppView) -> None:
    mapped = view.settings.fields.values()
    unread = (n for n in OF_FAMILIES - {*_NAMES} if view.own_path(n) not in mapped)
    of_families = dict.fromkeys(sorted(unread), "it is not read of an application")
    for name, reason in {**of_families, **REFUSED, **_TABLE["refused"]}.items():
        if value := view.value(name):
            shown = value if isinstance(value, int | str) else name
            raise unplannable(f"{view.settings.root}.{name}", shown, reason)
    for path in ("peft", view.own_path("peft")):
        if (value := view.at(path)) and _scheme(value) not in (None, "none"):
            raise unplannable(path, _scheme(value), "adapters of an application are not read")
    if view.value("mcore_gpt") is False:
        raise unplannable(
            f"{view.settings.root}.mcore_gpt",
            False,
            "NeMo's own layers are not supported, only megatron-core's",
        )


def _scheme(peft: Any) -> Any:
    """What an application calls its adapters: NeMo 1 and Megatron-Bridge each in their own way."""
    if not isinstance(peft, Mapping):
        return peft
    schemes = map(peft.get, ("peft_scheme", "scheme", "_target_"))
    return next((scheme for scheme in schemes if scheme is not None), None)


def _require(values: Mapping[str, Any], name: str, view: AppView) -> None:
    if values.get(name) is None:
        fix = f"Say where it lies, +nest.fields.{name}=PATH"
        fix += "." if name == "global_batch_size" else ", or name the model, nest.model=NAME."
        raise UserInputError(name, None, f"the application has no {view.own_path(name)}", fix)


def _require_known_fields(view: AppView) -> None:
    """Refuse names in ``nest.fields`` that nothing reads, and misspelt fields of the model."""
    for name, path in view.settings.fields.items():
        if name not in _KNOWN:
            raise UserInputError(
                f"nest.fields.{name}",
                path,
                "a plan neither reads nor sets such a field",
                nearest(name, _KNOWN),
            )
    unsaid = [name for name in _OF_THE_MODEL if not _has_field(view, name)]
    for name in node_at(view.raw, view.settings.root):
        close = difflib.get_close_matches(name, unsaid, n=1, cutoff=_NEARLY)
        if close and name not in _KNOWN:
            path = view.own_path(name)
            raise UserInputError(
                path,
                view.at(path),
                f"there is no such field, and {close[0]} is not given",
                f"Write {close[0]}, or say where it lies: +nest.fields.{close[0]}=PATH.",
            )


def _assumptions(view: AppView) -> Iterator[str]:
    """What was assumed of the model, and what beside its fields was not read, as notes."""
    unsaid = [
        f"{first} ({default})"
        for names, default in _TABLE["assumed"].items()
        for first, *_ in [names.split()]
        if not any(_has_field(view, name) for name in names.split())
        and (first != "precision" or view.at("trainer.precision") is None)
    ]
    if unsaid:
        listed = ", ".join(unsaid)
        yield (
            f"The application leaves these open, and in brackets is what is assumed: {listed}. "
            "+nest.fields.NAME=PATH says where one lies."
        )
    yield from _unread_notes(view)


def _unread_notes(view: AppView) -> Iterator[str]:
    mapped = set(view.settings.fields.values())
    unread = []  # what is set in the nodes that ``nest.fields`` names
    for parent in {path.rpartition(".")[0] for path in mapped}:
        for name, value in node_at(view.raw, parent).items():
            path = f"{parent}.{name}" if parent else str(name)
            is_read = path in mapped or (parent == view.settings.root and name in _KNOWN)
            if not is_read and isinstance(value, bool | int | float | str) and value is not False:
                unread.append(path)
    if unread:
        yield f"Fields beside those of the model that are not read: {', '.join(sorted(unread))}."
    read = {*mapped, *map(view.own_path, _KNOWN)}
    set_elsewhere = []
    for path, _ in leaves(view.raw):
        if path.startswith("nest.") or path in read or not _OTHER_JOB.search(path):
            continue
        if (value := view.at(path)) not in (None, False, 0, "", "none", "null"):
            set_elsewhere.append(f"{path}={value_text(value)}")
    if set_elsewhere:
        yield (
            "Fields that are not read, though with them the job has other work or less memory: "
            f"{', '.join(sorted(set_elsewhere))}. It is planned without; "
            "+nest.overrides.memory.margin=0.3 keeps 30 % of the memory free."
        )


def _has_field(view: AppView, name: str) -> bool:
    return name in view.settings.fields or view.has(view.own_path(name))


#: Choices that need no field: they follow from others, or only save time where they are set.
_NEED_NO_FIELD = (
    "global_batch_size",
    "data_parallel_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_distributed_optimizer",
    "expert_tensor_parallel_size",
)
#: Degrees that are not 1 where the application has no field for them: what is wrong, and the fix.
_UNKNOWN = {
    "micro_batch_size": (
        "the application has no such field, so its micro batch is not known",
        "Name it with nest.fields.micro_batch_size, or fix it with "
        "+nest.overrides.train.micro_batch_size=1.",
    ),
    "expert_tensor_parallel_size": (
        "the application has no field for it, so it is the tensor-parallel size, which is free",
        "Give {tensor}, or name the place with nest.fields.expert_tensor_parallel_size.",
    ),
}
#: What an application does that has no such field.
_DEFAULTS: tuple[object, ...] = (None, False, 1, "no_shard", "", [])


def space_of(view: AppView, job: Job, own: SearchSpace) -> SearchSpace:
    """The part of the user's search space that an application's fields can state.

    A choice without a field is fixed at what Megatron does by itself; one that is given by hand is
    fixed at that; ``UserInputError`` for one that can be neither.
    """
    layout, mapping = "pipeline_model_parallel_layout", "use_tp_pp_dp_mapping"
    if not view.is_planned(layout) and (given := view.value_of_choice(layout)):
        raise UserInputError(
            str(view.place(layout)),
            given,
            "a layout given by hand leaves nothing to search for in a Hydra application",
            "Leave it out, or launch without nest.",
        )
    order = RankOrder.TP_CP_EP_PP_DP if view.value_of_choice(mapping) else RankOrder.TP_CP_EP_DP_PP
    orders = tuple(RankOrder) if view.is_planned(mapping) else (order,)
    # sequence parallelism comes with tensor parallelism, as every plan wants it
    divides_sequences = view.is_planned("sequence_parallel") or view.value_of_choice(
        "sequence_parallel"
    )
    recompute = own.recompute
    if not view.is_planned("recompute_granularity"):
        said = {name: view.value_of_choice(name) for name in RECOMPUTE_ARGUMENTS}
        if said["recompute_granularity"] == RecomputeGranularity.FULL:
            choice("recompute_method", str(said["recompute_method"]), RecomputeMethod)
            said["recompute_num_layers"] = int(said["recompute_num_layers"] or 1)
        recompute = read_recompute(said) or NO_RECOMPUTE
    with_modules = view.is_planned("recompute_modules")
    degrees = {**_degrees(own, view, job.spec), **own.fixed}
    if view.value("megatron_amp_O2") is False:  # ``MegatronGPTModel.__init__`` of NeMo 1
        for name in ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size"):
            if degrees.setdefault(name, 1) != 1:
                raise UserInputError(
                    name,
                    degrees[name],
                    f"NeMo refuses it with {view.own_path('megatron_amp_O2')}=false",
                    f"Set {view.own_path('megatron_amp_O2')}=true.",
                )
    return replace(
        own,
        fixed=degrees,
        limits=own.limits if divides_sequences else {"tensor_model_parallel_size": 1, **own.limits},
        rank_orders=_common("rank_order", own.rank_orders, orders),
        zero_stages=_common("zero_stage", own.zero_stages, zero_stages(view, job)),
        recompute=recompute,
        without_modules=own.without_modules if with_modules else frozenset(RecomputeModule),
        even_stages=not view.is_planned(layout),
    )


def require_expressible(plan: ParallelPlan, view: AppView, job: Job) -> None:
    """Refuse a plan that needs a field which the application lacks, or has another value in."""
    for item, value in planned_items(plan).items():
        if item in _NEED_NO_FIELD or view.is_planned(item):
            continue
        given = view.value_of_choice(item)
        if given == value or (given in _DEFAULTS and value in _DEFAULTS):
            continue
        limit, fix = f"the plan needs {value}", "Leave it to the plan, or plan again with it fixed."
        if (place := view.place(item)) is None:
            limit = f"{limit}, and the application has no field for it"
            fix = f"Name its place in nest.fields.{item}, or fix it with nest.overrides."
        raise UserInputError(place or item, given, limit, fix)
    # what the application leaves to itself is executed as its own fields say
    stated = allowed_execution(execution_of(job.memory_flags), plan.layout)
    wanted = allowed_execution(plan.layout.execution, plan.layout)
    for knob in KNOBS:
        own, needed = getattr(stated, knob.name), getattr(wanted, knob.name)
        applies = plan.model.is_moe or not knob.of_experts
        if own != needed and applies and knob.name not in planned_execution(view):
            raise UserInputError(
                view.place(knob.name) or knob.name,
                own,
                f"the plan was priced with {needed}",
                f"Give a field ${{nest:{knob.name}}}, or plan again with "
                f"+nest.overrides.search.keep=[{knob.choice}].",
            )
    if plan.layout.zero not in zero_stages(view, job) and plan.layout.dims.data_parallel_size > 1:
        raise UserInputError(
            "use_distributed_optimizer",
            plan.layout.shards_optimizer,
            "the plan says so, and the application's optimizer is another",
            "Change the application's optimizer, or plan again.",
        )


def planned_execution(view: AppView) -> frozenset[str]:
    """Fields of ``Execution`` that an application asks the plan for."""
    names = (knob.name for knob in KNOBS if knob.name not in OF_THE_JOB)
    return frozenset(filter(view.is_planned, names))


def zero_stages(view: AppView, job: Job) -> tuple[ZeroStage, ...]:
    """The ways to share states among replicas that an application can be told, or has."""
    if view.is_planned("use_megatron_fsdp") and view.is_planned("data_parallel_sharding_strategy"):
        return tuple(ZeroStage)
    if view.is_planned("use_distributed_optimizer"):
        return (ZeroStage.NONE, ZeroStage.OPTIMIZER)
    return (ZeroStage.OPTIMIZER if job.use_distributed_optimizer else ZeroStage.NONE,)


def _common(name: str, wanted: tuple[Any, ...], possible: tuple[Any, ...]) -> tuple[Any, ...]:
    found = tuple(each for each in wanted if each in possible)
    if not found:
        raise UserInputError(
            f"parallel.{name}",
            str(wanted[0]),
            f"the application's fields can only say {', '.join(map(str, possible))}",
            "Leave it out of nest.overrides, or give the application a field for it.",
        )
    return found


def _degrees(own: SearchSpace, view: AppView, spec: TransformerSpec) -> dict[str, int]:
    """Degrees that are given by hand, or that the application cannot be told."""
    fixed: dict[str, int] = {}
    for name in DEGREES:
        free = name == "data_parallel_size" or view.is_planned(name) or name in own.fixed
        if free or (name.startswith("expert_") and not spec.is_moe):
            continue
        given = view.value_of_choice(name)
        if name == "expert_tensor_parallel_size":  # Megatron divides an expert like a layer
            given = given or fixed.get(
                "tensor_model_parallel_size", own.fixed.get("tensor_model_parallel_size")
            )
        if given is None and name in _UNKNOWN:
            limit, fix = _UNKNOWN[name]
            fix = fix.format(tensor=view.place("tensor_model_parallel_size"))
            raise UserInputError(name, None, limit, fix)
        fixed[name] = 1 if given is None else int(given)
    return fixed
