"""A training job as every reader states it, and what its framework takes for the rest."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from nest_megatron.cluster.records import Precision
from nest_megatron.config.compose import Settings
from nest_megatron.config.overrides import choice
from nest_megatron.config.schema import stated_values
from nest_megatron.cost_model.memory_flags import not_modelled, text
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.target_defaults import (
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
from nest_megatron.errors import UnplannableModelError, UserInputError, require_known
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.cuda_graphs import CudaGraphs
from nest_megatron.layout.diff import Change
from nest_megatron.layout.execution_rules import EXECUTION_ARGUMENTS
from nest_megatron.layout.knobs import KNOBS, KnobConditions, Package, choices_of_execution
from nest_megatron.layout.numeric_knobs import NumericKnob, refused_together
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.rulebook.facts import (
    DEFAULT_VERSION,
    is_within,
    known_release,
    release_number,
)
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import Execution
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.packages import installed_version
from nest_megatron.plain import frozen
from nest_megatron.planner.request import NumericOffer

#: Values by Megatron's names.
Flags = Mapping[str, Any]


@frozen
class LaunchedRanks:
    """How many ranks a launch has, and on how many nodes; ``None`` where nothing says it.

    Args:
        notes: what was assumed, one sentence each.
        unsaid: why the number of ranks is not known.
    """

    num_ranks: int | None = None
    num_nodes: int | None = None
    notes: tuple[str, ...] = ()
    unsaid: str = "nothing says it"


@dataclass(frozen=True, slots=True)
class Option:
    """A flag with its values as words; ``dest`` is ``None`` for what Megatron lacks."""

    dest: str | None
    tokens: tuple[str, ...]

    @property
    def flag(self) -> str:
        """The flag alone."""
        return self.tokens[0].partition("=")[0]

    @property
    def value(self) -> str:
        """Its values as one text."""
        _, equals, inline = self.tokens[0].partition("=")
        return inline if equals else " ".join(self.tokens[1:])


@frozen
class ReadCommand:
    """A training command, taken apart.

    Args:
        version: the Megatron release whose options were used.
        environment: ``NAME=value`` assignments before the command.
        launcher: everything before the script (``torchrun --nnodes 4 ...``).
        script: path of the training script, empty if only flags were given.
        options: the script's arguments, without this package's own tokens.
        values: every option of Megatron by destination, defaults filled in.
        explicit: destinations that ``options`` set.
        unknown: tokens of ``options`` that Megatron does not know, in order; the user's own flags.
        notes: likely spelling mistakes and options of another release, one sentence each.
        ranks: that it launches.
    """

    version: str
    environment: Mapping[str, str]
    launcher: tuple[str, ...]
    script: str
    options: tuple[Option, ...]
    values: Flags
    explicit: frozenset[str]
    unknown: tuple[str, ...]
    notes: tuple[str, ...]
    ranks: LaunchedRanks

    @property
    def argv(self) -> tuple[str, ...]:
        """The script's arguments as words."""
        return tuple(word for option in self.options for word in option.tokens)

    def namespace(self) -> argparse.Namespace:
        """The values as Megatron's parser would return them."""
        return argparse.Namespace(**self.values)


@frozen
class Requirement:
    """A value that a plan must keep, and why; ``None`` is a value that cannot be read."""

    value: int | bool | str | None
    reason: str
    fix: str
    who: str = "the checkpoint to be loaded"

    @property
    def limit(self) -> str:
        """What refuses another value."""
        return f"{self.who} needs {self.value}: {self.reason}"


#: What a requirement may keep off: weights that are gathered beside forward passes.
GATHER = "overlap_param_gather"


class Restored(Protocol):
    """A checkpoint that a job restores (``integrations/restore.py``)."""

    def required(self) -> Mapping[str, Requirement]:
        """What a plan must keep, by the names of ``layout_arguments``."""

    def check(self, plan: ParallelPlan, version: str) -> None:
        """Raise if a plan's layout is one that the checkpoint cannot be loaded into."""


@frozen
class Job:
    """A training job without its cluster; a model of the catalogue is one that states nothing else.

    What is ``None`` the job does not state.

    Args:
        target: the framework and release whose defaults fill what the job leaves open.
        version: the release of Megatron-LM whose rules hold.
        batch_schedule: how its batch grows; ``global_batch_size`` is then where it ends, if stated.
        fixed: the parallel settings that the job states, by Megatron's names.
        stated: all that the fields of a recipe say of its layout, by the same names.
        options: of a recipe what rules read beside that.
        free: those of them that a plan may change: flags, choices, or ``all``.
        free_option: how the user gives these, for messages.
        required: what a checkpoint or the data fixes, by the names of ``layout_arguments``.
        restored: the checkpoint that it starts from, where a plan is checked against it.
        sharding: what divides states among its data-parallel ranks.
        save_interval: steps between the checkpoints that it writes.
        memory_flags: what memory and traffic depend on beside the layout, by Megatron's names
            (``cost_model/memory_flags.py``).
        on_blackwell: those of them that have other values there.
        graphs: what of it CUDA graphs capture.
        capturable: its layers are Megatron's own, and every step runs as many micro batches of the
            same shapes, so that CUDA graphs could hold them.
        packs: several sequences stand in one, each attending to itself alone.
        closed: fields of ``Execution`` that it does not allow.
        can_state: fields of ``Execution`` that the job can be told; ``None`` is all.
        packages: packages of a choice that were found where it runs.
        counts_on_host: numbers of tokens are read by the host before the all-to-all of experts.
        num_gpus, gpus_per_node: ranks of the whole job, and on each host.
        command: that was read; ``None`` of a recipe.
        changes: what a plan changes in the fields of a recipe.
        fields: the recipe's field of each choice whose value is the field's own.
        passthrough: flags that Megatron does not have, kept untouched.
        notes: what was assumed or will be ignored, one sentence each.
    """

    spec: TransformerSpec
    target: Target | None = None
    version: str = DEFAULT_VERSION
    script: str = ""
    global_batch_size: int | None = None
    batch_schedule: BatchSchedule | None = None
    micro_batch_size: int | None = None
    precision: Precision = Precision.BF16
    transformer_impl: str = "transformer_engine"
    fixed: Flags = field(default_factory=dict)
    stated: Flags = field(default_factory=dict)
    options: Flags = field(default_factory=dict)
    free: tuple[str, ...] = ()
    free_option: str = "--free"
    required: Mapping[str, Requirement] = field(default_factory=dict)
    restored: Restored | None = None
    recompute: Recompute | None = None
    zero: ZeroStage | None = None
    sharding: DataParallelSharding = DataParallelSharding.DDP
    ckpt_format: str | None = None
    save_interval: int | None = None
    memory_flags: Flags = field(default_factory=dict)
    on_blackwell: Flags = field(default_factory=dict)
    graphs: CudaGraphs | None = None
    capturable: bool = True
    packs: bool = False
    closed: frozenset[str] = frozenset()
    can_state: frozenset[str] | None = None
    packages: tuple[str, ...] = ()
    counts_on_host: bool = False
    use_distributed_optimizer: bool = False
    num_gpus: int | None = None
    gpus_per_node: int | None = None
    command: ReadCommand | None = None
    changes: Callable[[ParallelPlan], tuple[Change, ...]] | None = None
    fields: Mapping[str, str] = field(default_factory=dict)
    passthrough: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def values(self) -> Flags:
        """What it says of its layout, by Megatron's names: all flags of a command."""
        return self.command.values if self.command else self.stated

    @property
    def num_nodes(self) -> int | None:
        """Hosts that its ranks are on, where it says so."""
        return self.num_gpus and self.gpus_per_node and self.num_gpus // self.gpus_per_node

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Flags whose effect on memory is not known here: Megatron's, and those that it lacks.

        Of a recipe they are fields.
        """
        own = (word.partition("=")[0] for word in self.passthrough if word.startswith("--"))
        found = not_modelled(self.memory_flags, as_fields=self.command is None)
        return tuple(dict.fromkeys((*found, *own)))

    @property
    def final_batch_size(self) -> int | None:
        """Sequences of one step at the end of the run."""
        return self.batch_schedule.last if self.batch_schedule else self.global_batch_size

    @property
    def optimizer(self) -> str:
        """Its optimizer, by Megatron's name."""
        return text(self.memory_flags.get("optimizer") or "adam")


#: Module of DeepEP whose presence tells that it has HybridEP's kernels as well. Source:
#: deepseek-ai/DeepEP, branch hybrid-ep, deep_ep/hybrid_ep_buffer.py.
_HYBRID_EP = "hybrid_ep_buffer.py"
#: Recipes of ``--fp8-recipe`` that need no code of the user's.
_FP8_RECIPES = [each.value for each in Fp8Recipe if each not in (Fp8Recipe.CUSTOM, Fp8Recipe.NVFP4)]


def fixed_choices(
    settings: Settings, typed: Collection[str] = (), freed: Collection[str] = ()
) -> frozenset[str]:
    """Choices that stay as the job has them; ``UserInputError`` for a name that is none.

    Args:
        typed: Megatron's arguments that the user set.
        freed: those of them that a plan may change.
    """
    names, keep = {*choices_of_execution(), "all"}, settings.search.keep
    for name in keep:
        require_known("search.keep", name, names, "there is no such choice (docs/knobs.md)")
    if "all" in keep:
        return frozenset(choices_of_execution())
    own = set(typed) - set(freed)
    set_by_user = (name for name, flags in EXECUTION_ARGUMENTS.items() if own.intersection(flags))
    return frozenset((*keep, *set_by_user))


def fields_of(target: Target) -> frozenset[str] | None:
    """Fields of ``Execution`` that a job of a framework can be told; ``None`` is all.

    Of NeMo those of its performance recipes, which have ``MegatronCommOverlapCallback``.
    """
    if target in MEGATRON_LM:
        return None
    names = {knob.name for knob in KNOBS} - {*OF_THE_JOB}
    return frozenset(names.difference(NEMO_LACKS) if target is NEMO else names)


def installed_packages() -> tuple[str, ...]:
    """Packages of this environment that a choice needs; nothing is imported."""
    found = []
    if (deep_ep := find_spec(Package.DEEP_EP.value)) is not None:
        found.append(Package.DEEP_EP)
        folders = map(Path, deep_ep.submodule_search_locations or ())
        if any(folder.joinpath(_HYBRID_EP).exists() for folder in folders):
            found.append(Package.HYBRID_EP)
    if release_number(installed_version("transformer_engine") or "") >= (2, 9):
        found.append(Package.ENGINE_2_9)
    return tuple(found)


#: 0.15 refuses CUDA graphs beside expandable segments, for which a job's environment may ask.
_GRAPHS_SINCE = "0.16"


class CostInputs:
    """Inputs of the cost model for a job: its flags over its target's defaults, then ``cost.*``.

    Args:
        accelerator: its name; none where nothing depends on it.
        spec: in the place of the job's.
        lengths: of the data's sequences, which count where they are packed.

    Raises:
        UnplannableModelError: for a model that is not priced in the job's number format.
    """

    def __init__(
        self,
        settings: Settings,
        job: Job,
        accelerator: str = "",
        *,
        spec: TransformerSpec | None = None,
        lengths: SequenceLengths | None = None,
    ) -> None:
        own = {field.name for field in dataclasses.fields(CostSettings)}
        memory = {f"memory_{name}": each for name, each in stated_values(settings.memory).items()}
        assumed = {**stated_values(settings.cost), **memory}
        self._assumed = {name: value for name, value in assumed.items() if name in own}
        if GATHER in job.required:
            self._assumed[GATHER] = False
        self._target = read_target(settings, job.target)
        self._precision = read_precision(settings, job.precision)
        self._spec, self._flags = spec or job.spec, job.memory_flags
        if self._spec.vision is not None and self._precision.is_quantized:
            raise UnplannableModelError(
                "train.precision",
                self._precision.value,
                "an encoder of images is priced in 16 bits",
                "Use bf16.",
            )
        self._settings, self._job = settings, job
        self._accelerator, self._lengths = accelerator, lengths

    def costs(self, knobs: Iterable[NumericKnob] = ()) -> CostSettings:
        """The assumptions of the cost model, after some choices."""
        flags, precision = dict(self._flags), self._precision
        for knob in knobs:
            flags |= {**dict.fromkeys(knob.instead_of, False), **knob.values}
            precision = knob.precision or precision
        place = self._accelerator, precision, flags, self._spec
        found = self._target.settings(*place, **self._assumed)
        if self._lengths is None or not self._lengths.packed:
            return found
        return found.on_packs(self._lengths)

    def execution(self) -> Execution:
        """How layers are carried out."""
        flags = self._flags
        if self._spec.vision is not None:  # samples have lengths for which no buffers are made
            flags = {"tp_comm_overlap": False, **flags}
        return self._target.execution(self._accelerator, self._precision, flags, self._spec)

    def knob_conditions(
        self, freed: Collection[str], *, has_fast_link: bool, is_steady: bool
    ) -> KnobConditions:
        """What decides how the job's layers may be executed.

        Args:
            freed: Megatron's arguments that the job states and a plan may change.
            is_steady: every step runs as many micro batches.
        """
        job, costs = self._job, self.costs()
        packages = self._settings.search.packages
        for name in packages:
            require_known("search.packages", name, Package, "no choice needs such a package")
        has_graphs = is_within(self._target.megatron_core, since=_GRAPHS_SINCE)
        return KnobConditions(
            spec=self._spec,
            accelerator=self._accelerator,
            fp8_recipe=costs.traits.fp8_recipe.value if costs.precision.is_quantized else None,
            precision=costs.precision,
            packages=frozenset((*packages, *job.packages)),
            fixed=fixed_choices(self._settings, job.fixed, freed),
            has_engine=job.transformer_impl != "local",
            capturable=job.capturable and is_steady and has_graphs,
            has_fast_link=has_fast_link,
            counts_on_host=job.counts_on_host,
            can_state=job.can_state,
            closed=job.closed,
        )

    def offers(self, *groups: Iterable[NumericKnob]) -> tuple[NumericOffer, ...]:
        """Choices that change numbers and that the job has not made, at most one of each group."""
        flags = self._target.flags(self._accelerator, self._precision, self._flags, self._spec)
        found = []
        for chosen in product(*((None, *self._open_knobs(group, flags)) for group in groups)):
            pairs = [pair for pair in chosen if pair is not None]
            knobs = tuple(knob for knob, _ in pairs)
            if knobs and not refused_together(flags, knobs):
                words = tuple(each for _, each in pairs)
                found.append(NumericOffer(knobs=knobs, words=words, settings=self.costs(knobs)))
        return tuple(found)

    def _open_knobs(
        self, knobs: Iterable[NumericKnob], flags: Flags
    ) -> list[tuple[NumericKnob, str]]:
        """Those of some choices that a job of these flags has not made, and what its user sets."""
        target, spec = self._target, self._spec
        fields = None if target in MEGATRON_LM else NUMERIC_FIELDS.get(target.fitted, {})
        return [
            (knob, fields[knob.flags] if fields else knob.flags)
            for knob in knobs
            if (fields is None or knob.flags in fields)
            # an encoder of images is priced in 16 bits
            and not (knob.precision and spec.vision)
            and knob.is_for(flags, self._precision, self._accelerator, has_experts=spec.is_moe)
        ]


def read_precision(settings: Settings, own: Precision = Precision.BF16) -> Precision:
    """The number format: the one asked for, or the job's own."""
    named = settings.train.precision
    recipe = str(named).removeprefix("fp8_")
    if recipe in _FP8_RECIPES:
        raise UserInputError(
            "train.precision",
            named,
            "it is a recipe of fp8",
            f"Write train.precision=fp8 train.fp8_recipe={recipe}.",
        )
    return own if named is None else choice("train.precision", named, Precision)


def recipe_flags(settings: Settings) -> Flags:
    """How scales of fp8 numbers are found, where the configuration says it, as Megatron's flag."""
    named = settings.train.fp8_recipe
    if named is None:
        return {}
    require_known("train.fp8_recipe", named, _FP8_RECIPES)
    if read_precision(settings) is not Precision.FP8:
        raise UserInputError("train.fp8_recipe", named, "it needs train.precision=fp8", "Add it.")
    return {"fp8_recipe": named}


def megatron_version(settings: Settings, given: str | None) -> str:
    """The release of Megatron-LM whose flags a command has: as given, or that of the target.

    Raises:
        UserInputError: for one that is older than those that are known.
    """
    if given is not None:
        return known_release(given)
    target = read_target(settings)
    return (target if target in MEGATRON_LM else DEFAULT_TARGET).megatron_core


def read_target(settings: Settings, own: Target | None = None) -> Target:
    """The framework and release that the plan is for: no other than the job's own, if any."""
    if settings.target is None:
        return own or DEFAULT_TARGET
    named = target_named(settings.target)
    if own is not None and named.name != own.name:
        raise UserInputError(
            "target",
            settings.target,
            f"the job runs on {own.framework}",
            "Leave it out, or plan from a model and a cluster.",
        )
    return named
