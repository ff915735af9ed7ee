"""The framework that a plan is for, what its defaults and the job's flags say, and what is open."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from nest_megatron.cluster.records import Precision
from nest_megatron.config.job import Job
from nest_megatron.config.schema import PlanConfig
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import (
    BRIDGE_0_3,
    DEFAULT_TARGET,
    MEGATRON_LM,
    NEMO,
    NEMO_LACKS,
    NUMERIC_FIELDS,
    OF_THE_JOB,
    target_named,
)
from nest_megatron.cost_model.targets import Target
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.model.adapters import Adapters, PeftScheme
from nest_megatron.model.execution import Execution
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.names import Name
from nest_megatron.parallel.execution_argv import EXECUTION_ARGUMENTS
from nest_megatron.parallel.knobs import KNOBS, Package, choices_of_execution
from nest_megatron.parallel.numeric_knobs import (
    MEMORY_KNOBS,
    NUMERIC_KNOBS,
    NumericKnob,
    refused_together,
)
from nest_megatron.parallel.recompute import RecomputeGranularity
from nest_megatron.planner.request import MemoryOffer, NumericOffer
from nest_megatron.solver.space import SearchSpace

#: Module of DeepEP whose presence tells that it has HybridEP's kernels as well. Source:
#: deepseek-ai/DeepEP, branch hybrid-ep, deep_ep/hybrid_ep_buffer.py.
_HYBRID_EP = "hybrid_ep_buffer.py"
#: Recipes of ``--fp8-recipe`` that need no code of the user's.
_FP8_RECIPES = [each.value for each in Fp8Recipe if each not in (Fp8Recipe.CUSTOM, Fp8Recipe.NVFP4)]


def fixed_choices(
    config: PlanConfig, typed: Collection[str] = (), freed: Collection[str] = ()
) -> frozenset[str]:
    """Choices that stay as the job has them; ``UserInputError`` for a name that is none.

    Args:
        typed: Megatron's arguments that the user set.
        freed: those of them that a plan may change.
    """
    names = {*choices_of_execution(), "all"}
    for name in config.search.keep:
        require_known("search.keep", name, names, "it is no choice of docs/knobs.md")
    if "all" in config.search.keep:
        return frozenset(choices_of_execution())
    own = set(typed) - set(freed)
    stated = (name for name, flags in EXECUTION_ARGUMENTS.items() if own.intersection(flags))
    return frozenset((*config.search.keep, *stated))


def stated_packages(config: PlanConfig, installed: Iterable[str] = ()) -> frozenset[str]:
    """Packages known to be where the job runs; ``UserInputError`` for one that no choice needs."""
    known = [package.value for package in Package]
    for name in config.search.packages:
        require_known("search.packages", name, known, "no choice needs such a package")
    return frozenset((*config.search.packages, *installed))


def fields_of(target: Target) -> frozenset[str] | None:
    """Fields of ``Execution`` that a job of a framework can be told; ``None`` is all.

    Of NeMo those of its performance recipes, which have ``MegatronCommOverlapCallback``.
    """
    if target in MEGATRON_LM:
        return None
    lacks = NEMO_LACKS if target is NEMO else {}
    return frozenset(knob.name for knob in KNOBS) - {*lacks, *OF_THE_JOB}


def installed_packages() -> tuple[str, ...]:
    """Packages of this environment that a choice needs; nothing is imported."""
    found = []
    if (deep_ep := importlib.util.find_spec(Package.DEEP_EP.value)) is not None:
        found.append(Package.DEEP_EP)
        folders = map(Path, deep_ep.submodule_search_locations or ())
        if any(folder.joinpath(_HYBRID_EP).exists() for folder in folders):
            found.append(Package.HYBRID_EP)
    try:
        release = importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return tuple(found)
    if [int(part) for part in release.split(".")[:2] if part.isdigit()] >= [2, 9]:
        found.append(Package.ENGINE_2_9)
    return tuple(found)


Choice = TypeVar("Choice", bound=Name)


def read_settings(
    config: PlanConfig, job: Job, accelerator: str = "", lengths: SequenceLengths | None = None
) -> CostSettings:
    """The cost model's assumptions: the job's flags over its target's defaults, then ``cost.*``.

    Args:
        lengths: of the data's sequences, which count where they are packed.
    """
    own = {field.name for field in dataclasses.fields(CostSettings)}
    given = {k: value for k, value in dataclasses.asdict(config.cost).items() if k in own}
    given["memory_margin"] = config.memory.margin
    given["memory_reserve_bytes"] = config.memory.reserve_bytes
    said = {name: value for name, value in given.items() if value is not None}
    precision = read_precision(config, job.precision)
    settings = read_target(config, job.target).settings(
        accelerator, precision, job.memory_flags, job.spec, **said
    )
    return settings.on_packs(lengths) if lengths is not None and lengths.packed else settings


def read_execution(config: PlanConfig, job: Job, accelerator: str) -> Execution:
    """How layers are carried out: the job's flags over its target's defaults."""
    precision, said = read_precision(config, job.precision), job.memory_flags
    if job.spec.vision is not None:  # samples have lengths for which no buffers are made
        said = {"tp_comm_overlap": False, **said}
    return read_target(config, job.target).execution(accelerator, precision, said, job.spec)


def read_numeric_offers(
    config: PlanConfig, job: Job, accelerator: str, lengths: SequenceLengths | None = None
) -> tuple[NumericOffer, ...]:
    """Choices that change numbers and that the job has not made."""
    return tuple(
        NumericOffer(
            knob=knob,
            settings=_with_knobs(config, job, accelerator, lengths, [knob]),
            words=words,
        )
        for knob, words in _open_knobs(config, job, accelerator, NUMERIC_KNOBS)
    )


def read_memory_offers(
    config: PlanConfig,
    job: Job,
    accelerator: str,
    lengths: SequenceLengths | None,
    spaces: Mapping[tuple[str, ...], SearchSpace],
) -> tuple[MemoryOffer, ...]:
    """Ways to need less memory that the job has not taken, singly and together.

    Args:
        spaces: what is searched as the job is, without words, and after other changes.
    """
    groups = [_open_knobs(config, job, accelerator, knobs) for knobs in MEMORY_KNOBS]
    own, found = _own_flags(config, job, accelerator), []
    for chosen in product(*((None, *group) for group in groups)):
        pairs = [pair for pair in chosen if pair is not None]
        knobs = [knob for knob, _ in pairs]
        if refused_together(own, knobs):
            continue
        settings = _with_knobs(config, job, accelerator, lengths, knobs)
        for more, space in spaces.items():
            stages = space.zero_stages
            for knob in knobs:
                stages = knob.zero_stages(stages)
            if stages and (words := (*(word for _, word in pairs), *more)):
                narrow = dataclasses.replace(space, zero_stages=stages)
                offer = MemoryOffer(words=words, settings=settings, space=narrow)
                found.append((len(words), len(more), offer))
    return tuple(offer for *_, offer in sorted(found, key=itemgetter(0, 1)))


def _open_knobs(
    config: PlanConfig, job: Job, accelerator: str, knobs: Iterable[NumericKnob]
) -> list[tuple[NumericKnob, str]]:
    """Those of some choices that a job could make and has not, and what its user sets."""
    target, precision = read_target(config, job.target), read_precision(config, job.precision)
    own = _own_flags(config, job, accelerator)
    fields = None if target in MEGATRON_LM else NUMERIC_FIELDS.get(target.fitted, {})
    return [
        (knob, knob.flags if fields is None else fields[knob.flags])
        for knob in knobs
        if (fields is None or knob.flags in fields)
        # an encoder of images is priced in 16 bits
        and (knob.precision is None or job.spec.vision is None)
        and knob.is_for(own, precision, accelerator, has_experts=job.spec.is_moe)
    ]


def _own_flags(config: PlanConfig, job: Job, accelerator: str) -> Mapping[str, Any]:
    """A job's flags over its target's defaults."""
    target, precision = read_target(config, job.target), read_precision(config, job.precision)
    return target.flags(accelerator, precision, job.memory_flags, job.spec)


def _with_knobs(
    config: PlanConfig,
    job: Job,
    accelerator: str,
    lengths: SequenceLengths | None,
    knobs: Iterable[NumericKnob],
) -> CostSettings:
    """The settings of a job after some choices."""
    flags = dict(job.memory_flags)
    for knob in knobs:
        flags |= {**dict.fromkeys(knob.instead_of, False), **knob.values}
        if knob.precision is not None:
            train = dataclasses.replace(config.train, precision=knob.precision.value)
            config = dataclasses.replace(config, train=train)
    changed = dataclasses.replace(job, memory_flags=flags)
    return read_settings(config, changed, accelerator, lengths)


def read_precision(config: PlanConfig, own: Precision = Precision.BF16) -> Precision:
    """The number format: the one asked for, or the job's own."""
    named = config.train.precision
    if named in _FP8_RECIPES:
        limit, fix = "it is a recipe of fp8", f"train.precision=fp8 train.fp8_recipe={named}."
        raise UserInputError("train.precision", value=named, limit=limit, fix=fix)
    return own if named is None else choice("train.precision", named, Precision)


def stated_recipe(config: PlanConfig) -> Mapping[str, Any]:
    """How scales of fp8 numbers are found, where the configuration says it, as Megatron's flag."""
    named = config.train.fp8_recipe
    if named is None:
        return {}
    require_known("train.fp8_recipe", named, _FP8_RECIPES)
    if read_precision(config) is not Precision.FP8:
        limit, fix = "it needs train.precision=fp8", "Add it."
        raise UserInputError("train.fp8_recipe", value=named, limit=limit, fix=fix)
    return {"fp8_recipe": named}


def read_target(config: PlanConfig, own: Target | None = None) -> Target:
    """The framework and release that the plan is for: no other than the job's own, if any."""
    if config.target is None:
        return own or DEFAULT_TARGET
    named = target_named(config.target)
    if own is not None and named.name != own.name:
        limit = f"the job runs on {own.framework}"
        fix = "Leave it out, or plan from a model and a cluster."
        raise UserInputError("target", value=config.target, limit=limit, fix=fix)
    return named


def read_adapters(config: PlanConfig) -> Adapters | None:
    """What is trained beside frozen weights; ``None`` where all weights are."""
    given = {k: v for k, v in dataclasses.asdict(config.peft).items() if v is not None}
    scheme = given.pop("scheme", None)
    if scheme is None:
        for name, value in given.items():
            limit, fix = "it needs a scheme", "Add for example peft.scheme=lora."
            raise UserInputError(f"peft.{name}", value=value, limit=limit, fix=fix)
        return None
    given["target_modules"] = tuple(given.get("target_modules", ()))
    return Adapters(scheme=choice("peft.scheme", scheme, PeftScheme), **given)


def adapter_notes(spec: TransformerSpec) -> tuple[str, ...]:
    """What a plan says of its adapters."""
    if spec.adapters is None:
        return ()
    told = [f"All weights but those of adapters are frozen: {spec.adapters.words()}."]
    if spec.adapters.scheme is not PeftScheme.LORA:
        told.append(f"No measured run trains {spec.adapters.scheme}: it is priced from its code.")
    return tuple(told)


def beside_frozen_weights(
    config: PlanConfig, space: SearchSpace, spec: TransformerSpec, target: Target
) -> SearchSpace:
    """What a search may choose where only adapters are trained.

    NeMo lets the recomputation of whole layers lose the gradients of adapters: a frozen embedding's
    output needs no gradient, so that nothing calls the backward pass of the layers behind it.
    Megatron-Bridge mends that (``maybe_enable_recompute_inputs_grad``). Sharding of frozen weights
    by Megatron-FSDP is not chosen: neither framework's recipes have it.
    """
    if spec.adapters is None:
        return space
    if target in MEGATRON_LM:
        limit = f"{target.framework} trains all weights"
        fix = f"Add target={BRIDGE_0_3.name} or target={NEMO.name}."
        raise UserInputError("peft.scheme", value=str(spec.adapters.scheme), limit=limit, fix=fix)
    full, recompute = RecomputeGranularity.FULL, space.recompute
    asked = config.parallel.recompute_granularity or (recompute and recompute.granularity)
    if target is NEMO and asked == full:
        limit = "NeMo loses the gradients of adapters with it, as the embedding is frozen"
        fix = "Recompute modules (selective), or use Megatron-Bridge."
        raise UserInputError("recompute_granularity", value="full", limit=limit, fix=fix)
    stages = tuple(stage for stage in space.zero_stages if not stage.is_fsdp)
    return dataclasses.replace(
        space,
        zero_stages=stages or space.zero_stages,
        full_recompute=space.full_recompute and target is not NEMO,
    )


def choice(what: str, value: str, kind: type[Choice]) -> Choice:
    """A member of an enum by its name; any other is an error that names them."""
    require_known(what, value, [member.value for member in kind])
    return kind(value)
