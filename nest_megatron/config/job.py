"""A training job as its framework's configuration states it: the record that every reader makes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.memory_flags import not_modelled, text
from nest_megatron.cost_model.targets import Target
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.cuda_graphs import CudaGraphs
from nest_megatron.layout.diff import Change
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import Recompute
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.spec import TransformerSpec


@dataclass(frozen=True, slots=True, kw_only=True)
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


@dataclass(frozen=True, slots=True, kw_only=True)
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
    values: Mapping[str, Any]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """A value that a plan must keep, and why; ``None`` is a value that cannot be read."""

    value: int | bool | str | None
    reason: str
    fix: str
    who: str = "the checkpoint to be loaded"


class Restored(Protocol):
    """A checkpoint that a job restores (``integrations/restore.py``)."""

    def check(self, plan: ParallelPlan, version: str) -> None:
        """Raise if a plan's layout is one that the checkpoint cannot be loaded into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeParameters:
    """The user's own parallel settings that a plan may change.

    Args:
        names: of flags or of choices, or ``all``.
        option: how the user gives them, for messages.
    """

    names: tuple[str, ...] = ()
    option: str = "--free"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A training job without its cluster; a model of the catalogue is one that states nothing else.

    What is ``None`` the job does not state.

    Args:
        target: the framework and release whose defaults fill what the job leaves open.
        version: the release of Megatron-LM whose rules hold.
        batch_schedule: how its batch grows; ``global_batch_size`` is then where it ends, if stated.
        fixed: the parallel settings that the job states, by Megatron's names.
        stated: all that the fields of a recipe say of its layout, by the same names.
        free: those of them that a plan may change.
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
        full_recompute: its code can recompute whole layers.
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
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    free: FreeParameters = FreeParameters()
    required: Mapping[str, Requirement] = field(default_factory=dict)
    restored: Restored | None = None
    recompute: Recompute | None = None
    zero: ZeroStage | None = None
    sharding: DataParallelSharding = DataParallelSharding.DDP
    ckpt_format: str | None = None
    save_interval: int | None = None
    memory_flags: Mapping[str, Any] = field(default_factory=dict)
    on_blackwell: Mapping[str, Any] = field(default_factory=dict)
    graphs: CudaGraphs | None = None
    capturable: bool = True
    packs: bool = False
    closed: frozenset[str] = frozenset()
    full_recompute: bool = True
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
    def values(self) -> Mapping[str, Any]:
        """What it says of its layout, by Megatron's names: all flags of a command."""
        return self.stated if self.command is None else self.command.values

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """Flags whose effect on memory is not known here: Megatron's, and those that it lacks."""
        own = (word.partition("=")[0] for word in self.passthrough if word.startswith("--"))
        return tuple(dict.fromkeys((*not_modelled(self.memory_flags), *own)))

    @property
    def final_batch_size(self) -> int | None:
        """Sequences of one step at the end of the run."""
        return self.batch_schedule.last if self.batch_schedule else self.global_batch_size

    @property
    def optimizer(self) -> str:
        """Its optimizer, by Megatron's name."""
        return text(self.memory_flags.get("optimizer") or "adam")
