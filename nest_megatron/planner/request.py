"""What to plan and by when, and the answers that are no plan."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING, Any

from nest_megatron.catalogue_files import default_setting
from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.goodput import Reliability
from nest_megatron.cost_model.model import CostModel
from nest_megatron.cost_model.peak_limit import MOST_OOM_CHANCE
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.site import Site
from nest_megatron.errors import UserInputError
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.estimate import Rates
from nest_megatron.layout.knobs import Package
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.numeric_knobs import NumericKnob
from nest_megatron.layout.plan import SearchRecord
from nest_megatron.layout.policy import Policy
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.layout.rulebook.schedule import cuts_anywhere
from nest_megatron.layout.zero import DataParallelSharding
from nest_megatron.model.encoder import EncoderSpec
from nest_megatron.model.execution import FlexBackend
from nest_megatron.model.sequence_lengths import SequenceLengths
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen, set_field
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Bytes, Seconds, format_gib, format_seconds

if TYPE_CHECKING:
    from nest_megatron.solver.memory_shortage import Shortage

_SHARDINGS = {
    DataParallelSharding.DDP: "no FSDP",
    DataParallelSharding.MEGATRON_FSDP: "ZeRO-2 or ZeRO-3 through Megatron-FSDP",
    DataParallelSharding.TORCH_FSDP2: "PyTorch FSDP2",
}


@frozen
class Deadline:
    """A stretch of time on the monotonic clock of this process.

    Args:
        begun_s: when it began.
        seconds: how long it is.
    """

    begun_s: Seconds
    seconds: Seconds

    def passed(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() - self.begun_s >= self.seconds

    def without(self, seconds: Seconds) -> Deadline:
        """The same, ending earlier."""
        return Deadline(begun_s=self.begun_s, seconds=self.seconds - seconds)

    def within(self, seconds: Seconds) -> Deadline:
        """The same, or so many seconds from now where that is earlier."""
        now = time.monotonic()
        return Deadline(begun_s=now, seconds=min(seconds, self.begun_s + self.seconds - now))

    def part(self, share: float) -> Deadline:
        """From now on, a share of the time that is left."""
        return self.within(share * self.within(math.inf).seconds)


@frozen
class Offer:
    """Another data-parallel sharding, which is priced with the plan and never taken.

    Args:
        space: what is searched for it.
        own: the job's sharding.
        free: what the user types to have each of the others.
        ckpt_format: the format that a sharding needs, where it is not the job's.
    """

    space: SearchSpace
    own: DataParallelSharding
    free: Mapping[DataParallelSharding, str]
    ckpt_format: Mapping[DataParallelSharding, str]

    @property
    def words(self) -> tuple[str, ...]:
        """What the user types to have any of the others."""
        names = (_SHARDINGS[sharding] for sharding in self.free)
        return (f"{' or '.join(names)} ({' or '.join(dict.fromkeys(self.free.values()))})",)


@frozen
class NumericOffer:
    """Choices that change numbers: priced with a plan, or tried where none fits; never taken.

    Args:
        words: what the user sets, one entry for each choice.
        settings: the job's, with the choices made.
    """

    knobs: tuple[NumericKnob, ...]
    words: tuple[str, ...]
    settings: CostSettings

    def space_of(self, space: SearchSpace) -> SearchSpace:
        """What of a space may be searched with the choices: no ZeRO stage where it is nothing."""
        stages = space.zero_stages
        for knob in self.knobs:
            stages = knob.zero_stages(stages)
        return replace(space, zero_stages=stages)


def _space_with_images(
    spec: TransformerSpec, vision: EncoderSpec, space: SearchSpace
) -> SearchSpace:
    """Stages that an encoder of images leaves.

    ``pretrain_vlm.py`` copies a layout to its encoder; the layers that deepstack adds features to
    lie on the first stage (``Qwen3VLModel``).
    """
    name, needed = "pipeline_model_parallel_size", vision.deepstack_layers
    if needed:
        most = spec.num_layers // needed
        if (fixed := space.fixed.get(name, 1)) > most:
            raise UserInputError(
                f"parallel.{name}",
                fixed,
                f"its first stage must hold {needed} layers, so it is at most {most}",
                "Give less.",
            )
        limits = {**space.limits, name: min(most, space.limits.get(name, most))}
        space = replace(space, limits=limits)
    return replace(space, even_stages=space.even_stages or vision.is_split or needed > 0)


def _default(name: str) -> Any:
    return field(default_factory=lambda: default_setting(name))


@frozen
class Request:
    """What to plan.

    Args:
        times: measured times of the model's layers; ``None`` takes all from data sheets.
        not_modelled: flags of the job that change memory in a way not known here: no verdict on
            memory is certain.
        max_seconds: time for everything, from reading the job to its report; when it ends the
            search, the plan says how far from the optimum it can be at most.
        begun_s: when that time began (``time.monotonic``); ``None`` is when planning begins.
        offer: another sharding to be priced by ``offers.offers``.
        packages: backends of the token all-to-all whose package is not known to be there.
        numeric_offers: single choices, for ``offers.numeric_offers``.
        remedies: whether what would help is looked for where nothing fits.
        memory_offers: choices that need less memory, singly and together, tried where nothing fits.
        memory_spaces: what is searched then as well as ``space``, by what the user sets.
        reliability: how often the job fails; ``None`` says nothing of goodput.
        max_oom_chance: largest chance of a plan to run out of memory.
        tie_percent: plans so close to the fastest count as equal; the simplest one is taken.
        own: the user's parallel settings, by Megatron's names.
        shortlist: whether to say which of the plans could be the fastest.
        notes: what was assumed of the job, one sentence each.
        batch_schedule: how the batch grows, for the time at each size; ``global_batch_size`` is the
            one that is searched for, ``space.batch_unit`` holds the others.
        sequence_lengths: of the data, which the traits of ``settings`` price.
        policy: rules that plans keep to, with those that ``space`` holds already.
        defaults: settings of the job that are the site's, each with its file and line.
        given: settings that only the plan's record of them says, as typed.
        site: the site's calibration, by which plans are chosen; ``None`` for the catalogue's alone.
        present: what the job runs today, where it may be kept: a plan of the space, with the batch
            that is planned for.
        present_settings: those under which it runs, where the plan's are others.
        rates: what a GPU costs, and the length of the run; ``None`` says nothing of prices.
    """

    spec: TransformerSpec
    cluster: Cluster
    global_batch_size: int
    settings: CostSettings = field(default_factory=CostSettings)
    space: SearchSpace = field(default_factory=SearchSpace)
    max_seconds: float = _default("search.max_seconds")
    begun_s: Seconds | None = None
    num_alternatives: int = _default("search.num_alternatives")
    backend: Backend | None = None
    times: LayerTimes | None = None
    not_modelled: tuple[str, ...] = ()
    offer: Offer | None = None
    packages: Mapping[FlexBackend, Package] = field(default_factory=dict)
    numeric_offers: tuple[NumericOffer, ...] = ()
    remedies: bool = True
    memory_offers: tuple[NumericOffer, ...] = ()
    memory_spaces: Mapping[tuple[str, ...], SearchSpace] = field(default_factory=dict)
    reliability: Reliability | None = None
    max_oom_chance: float = _default("memory.max_oom_chance")
    tie_percent: float = _default("search.tie_percent")
    own: Mapping[str, object] = field(default_factory=dict)
    shortlist: bool = False
    notes: tuple[str, ...] = ()
    batch_schedule: BatchSchedule | None = None
    sequence_lengths: SequenceLengths | None = None
    policy: Policy = ()
    defaults: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    site: Site | None = None
    present: Layout | None = None
    present_settings: CostSettings | None = None
    rates: Rates | None = None

    def __post_init__(self) -> None:
        batch, chance = self.global_batch_size, self.max_oom_chance
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise UserInputError(
                "train.global_batch_size",
                batch,
                "it must be a whole number of at least 1",
                "Give the sequences of one optimizer step.",
            )
        if not self.max_seconds > 0:  # nor is NaN
            raise UserInputError(
                "search.max_seconds",
                self.max_seconds,
                "it must be above 0",
                "Give the seconds that the search may take.",
            )
        if not 0 <= self.tie_percent <= 100:
            raise UserInputError(
                "search.tie_percent",
                self.tie_percent,
                "it must be at least 0 and at most 100",
                "Give percent, such as 1.",
            )
        if not 0 < chance <= MOST_OOM_CHANCE:
            raise UserInputError(
                "memory.max_oom_chance",
                chance,
                f"it must be above 0 and at most {MOST_OOM_CHANCE:g}",
                "Give a share, such as 0.05.",
            )
        if self.present is not None and self.present.global_batch_size != batch:
            set_field(self, "present", replace(self.present, global_batch_size=batch))
        recompute = self.space.recompute or NO_RECOMPUTE
        cuts = cuts_anywhere(self.spec, recompute, self.space.version)
        if self.space.partition is None and not cuts:
            set_field(self, "space", replace(self.space, even_stages=True))
        if self.spec.vision is not None:
            space = _space_with_images(self.spec, self.spec.vision, self.space)
            set_field(self, "space", space)

    def cost_model(self, settings: CostSettings | None = None) -> CostModel:
        """What the job costs, by default under its settings."""
        return CostModel(self.spec, self.cluster, settings or self.settings, self.times)

    def deadline(self) -> Deadline:
        """The time that planning has, from now on where nothing says when it began."""
        begun = time.monotonic() if self.begun_s is None else self.begun_s
        return Deadline(begun_s=begun, seconds=self.max_seconds)


@frozen
class Remedy:
    """A change after which something fits, and the plan that was found then.

    Args:
        change: what the user sets.
        layout: the plan's degrees in words; empty where time allowed to find none.
    """

    change: str
    layout: str = ""
    iteration_time_s: Seconds | None = None
    peak_memory_bytes: Bytes | None = None

    def words(self) -> str:
        """The change and the plan, for people."""
        if self.iteration_time_s is None or self.peak_memory_bytes is None:
            return self.change
        step, peak = format_seconds(self.iteration_time_s), format_gib(self.peak_memory_bytes)
        return f"{self.change}: {step} a step, {peak} per GPU with {self.layout}"


@frozen
class NoPlan:
    """Nothing fits: how far off the nearest plan is, and what would make it fit.

    Args:
        missing_bytes: what the nearest plan lacks on the GPU with the highest peak.
        nearest: that plan's degrees, in words.
        remedies: changes that make some plan fit, a larger number of GPUs first.
        complete: false if time ended the analysis: some other plan may lack less, and other changes
            may help.
    """

    shortage: Shortage
    missing_bytes: int
    capacity_bytes: int
    nearest: str
    remedies: tuple[Remedy, ...]
    search: SearchRecord
    complete: bool = True


@frozen
class EndedEarly:
    """Time ran out before a plan was found; whether there is one is not known.

    Args:
        lower_bound_s: no plan of the searched space has a shorter step.
        max_seconds: the limit.
        search: what was looked at; its certificate is ``ended-early``.
    """

    lower_bound_s: Seconds
    max_seconds: Seconds
    search: SearchRecord
