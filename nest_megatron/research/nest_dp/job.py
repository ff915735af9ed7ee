"""The question: a model on a cluster, and what the recurrence may choose (``research.*``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, field, fields
from itertools import product
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Settings
from nest_megatron.config.request import request_of
from nest_megatron.config.schema import stated_values
from nest_megatron.config.space import fixed_degrees
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError, nearest, require_at_least, require_known
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.rulebook import is_legal_grid
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import Name, frozen
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.research.nest_dp.records import Schedule
from nest_megatron.research.nest_dp.topology import Block, Topology
from nest_megatron.solver.space import SearchSpace


class RecomputeChoice(Name):
    """Whether stages recompute their forward pass."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


class Division(Name):
    """Whether replicas must divide devices and micro batches."""

    EXACTLY = "exactly"
    LOOSELY = "loosely"


class MemoryRule(Name):
    """Whose account of memory holds."""

    PAPER = "paper"
    OURS = "ours"


class PaperOptimizer(Name):
    """Optimizers that the paper's memory rule knows; ours is Adam."""

    SGD = "sgd"
    ADAM = "adam"


@frozen
class ResearchChoices:
    """What may be chosen, and by which rules.

    Args:
        zero: stages that do not fit may take more devices, over which ZeRO divides their states.
        strategy_per_stage: stages of one pipeline may differ in their degrees; otherwise all have
            the same ones.
        optimizer: of the paper's memory rule.
        flash_attention: ``False`` counts what unfused attention takes and saves.
        fixed, limits: degrees fixed at a value or limited to one, by name.
    """

    schedule: Schedule = Schedule.ONE_F_ONE_B
    recompute: RecomputeChoice = RecomputeChoice.AUTO
    zero: bool = True
    strategy_per_stage: bool = False
    memory: MemoryRule = MemoryRule.OURS
    optimizer: PaperOptimizer = PaperOptimizer.ADAM
    divide: Division = Division.EXACTLY
    topology: Topology = Topology.LEVELS
    flash_attention: bool = True
    fixed: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def recomputes(self) -> tuple[bool, ...]:
        """Settings to try, without recomputation first."""
        return {
            RecomputeChoice.AUTO: (False, True),
            RecomputeChoice.ON: (True,),
            RecomputeChoice.OFF: (False,),
        }[self.recompute]


@frozen
class ResearchJob:
    """A job for the recurrence; ``times`` are measured times of its layers, if any."""

    spec: TransformerSpec
    cluster: Cluster
    settings: CostSettings
    global_batch_size: int
    choices: ResearchChoices = ResearchChoices()
    times: LayerTimes | None = None

    def __post_init__(self) -> None:
        require_at_least(
            "train.global_batch_size", self.global_batch_size, 1, "Give the sequences of one step."
        )


_PREFIX = "research."
_UNKNOWN = "the recurrence does not know it"
#: The values of each key of ``research`` by the word that is typed.
_WORDS: Mapping[str, Mapping[str, Any]] = {
    each.name: {"true": True, "false": False}
    if isinstance(each.default, bool)
    else {choice.value: choice for choice in type(each.default)}
    for each in fields(ResearchChoices)
    if each.default is not MISSING
}
#: Degrees that a stage has, or a pipeline.
_FIXED = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "micro_batch_size",
    "pipeline_model_parallel_size",
    "data_parallel_size",
)


def split_research(texts: Iterable[str]) -> tuple[list[str], dict[str, Any]]:
    """Overrides of the job, and the recurrence's settings.

    Raises:
        UserInputError: for a key or a value that does not exist, naming the nearest.

    >>> split_research(["model=llama3_8b", "research.zero=false"])
    (['model=llama3_8b'], {'zero': False})
    """
    job, found = [], {}
    for text in texts:
        path, _, value = text.partition("=")
        if not path.startswith(_PREFIX):
            job.append(text)
            continue
        key = path.removeprefix(_PREFIX)
        if (words := _WORDS.get(key)) is None:
            limit, fix = "there is no such setting", nearest(path, [_PREFIX + k for k in _WORDS])
            raise UserInputError(path, value, limit, fix)
        require_known(path, value.lower(), words)
        found[key] = words[value.lower()]
    if "optimizer" in found and found.get("memory") is not MemoryRule.PAPER:
        raise UserInputError(
            "research.optimizer",
            None,
            "it is of the paper's memory rule",
            "Add research.memory=paper.",
        )
    return job, found


def research_job(
    composed: Settings, chosen: Mapping[str, Any]
) -> tuple[ResearchJob, tuple[str, ...]]:
    """The job for the recurrence with its settings, and what was assumed.

    Raises:
        UserInputError: if something is missing or wrong, or fixed that the recurrence has not.
    """
    read = {"search.backend", *(f"search.max_{name}" for name in _FIXED)}
    for key in sorted(composed.given):
        if key == "out" or (key.startswith("search.") and key not in read):
            raise UserInputError(
                key, None, _UNKNOWN, "Leave it out; --json prints the plan for programs."
            )
    request = request_of(composed, SearchSpace())
    job = ResearchJob(
        spec=request.spec,
        cluster=request.cluster,
        settings=request.settings,
        global_batch_size=request.global_batch_size,
        choices=ResearchChoices(
            **chosen,
            fixed=_fixed(composed),
            limits={
                name: limit
                for name in _FIXED
                if (limit := getattr(composed.search, f"max_{name}")) is not None
            },
        ),
        times=request.times,
    )
    return job, request.notes


def _fixed(settings: Settings) -> dict[str, int]:
    """Degrees fixed at a value; other settings of ``parallel`` are refused."""
    for name, value in stated_values(settings.parallel).items():
        what = f"parallel.{name}"
        if name not in _FIXED:
            raise UserInputError(
                what,
                value,
                _UNKNOWN,
                f"Leave it out; {', '.join(_FIXED)} can be fixed, and research.* be set.",
            )
        require_at_least(what, value, 1, "Use 1 or more.")
    return fixed_degrees(settings)


#: Largest degrees tried where nobody says otherwise; tensor-parallel sizes go up to one node.
_LIMITS = {"context_parallel_size": 8, "expert_model_parallel_size": 64, "micro_batch_size": 8}


@frozen
class Strategy:
    """The devices of a stage, and what they work on.

    Each expert rank works on other tokens, so a micro batch of the pipeline has
    ``micro_batch_size`` sequences for each.
    """

    block: Block
    micro_batch_size: int
    sequence_parallel: bool

    @property
    def samples(self) -> int:
        """Sequences of one micro batch of the pipeline."""
        return self.micro_batch_size * self.block.ep

    def label(self) -> str:
        """A short name for tables.

        >>> Strategy(block=Block(4, 1, 1), micro_batch_size=1, sequence_parallel=True).label()
        'tp 4 sp, micro batch 1'
        """
        tp, cp, ep = self.block
        words = [f"tp {tp} sp" if self.sequence_parallel else f"tp {tp}"]
        words += [f"cp {cp}"] * (cp > 1) + [f"ep {ep}"] * (ep > 1)
        return ", ".join([*words, f"micro batch {self.micro_batch_size}"])


def strategies(job: ResearchJob) -> Iterator[Strategy]:
    """Every strategy that Megatron's rules allow: degrees that are powers of two, or those fixed.

    None takes more devices than there are.
    """
    spec, choices = job.spec, job.choices

    def values(name: str) -> list[int]:
        if name in choices.fixed:
            return [choices.fixed[name]]
        most = choices.limits.get(name, _LIMITS.get(name, max(8, job.cluster.gpus_per_node)))
        return [1 << power for power in range(most.bit_length()) if 1 << power <= most]

    for tp, cp, ep, sequence_parallel in product(
        values("tensor_model_parallel_size"),
        values("context_parallel_size"),
        values("expert_model_parallel_size") if spec.is_moe else [1],
        (False, True),
    ):
        dims = ParallelDims(
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            data_parallel_size=ep,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=tp if spec.is_moe else 1,
        )
        if (
            tp * cp * ep > job.cluster.num_gpus
            or (sequence_parallel and tp == 1)
            or not is_legal_grid(spec, dims, sequence_parallel=sequence_parallel)
        ):
            continue
        for micro in values("micro_batch_size"):
            if job.global_batch_size % (micro * ep) == 0:
                yield Strategy(
                    block=Block(tp, cp, ep),
                    micro_batch_size=micro,
                    sequence_parallel=sequence_parallel,
                )
