"""A rule, and what it reads of a job and its layout: all for a launch, some in a search."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from operator import attrgetter
from types import CodeType
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.errors import UserInputError
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.cuda_graphs import CudaGraphs, Flags, kept_modules
from nest_megatron.layout.dims import SHORT_DEGREES, ParallelDims
from nest_megatron.layout.layout import PartialLayout
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.recompute import RecomputeGranularity
from nest_megatron.layout.stage_layout import StagePartition, layout_string
from nest_megatron.layout.zero import (
    DataParallelSharding,
    ZeroStage,
    shards_optimizer,
    uses_megatron_fsdp,
)
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

#: The releases of Megatron-LM whose rules are known, oldest first.
RELEASES = ("0.15", "0.16", "0.17", "0.18", "0.19", "0.20")
#: The newest that is stable, which is meant where none is named.
DEFAULT_VERSION = "0.19"
#: A release without its patch level, which compares: 0.19 is (0, 19).
Release = tuple[int, int]
#: How its text begins; a number alone is a release, too.
_RELEASE = re.compile(r"(\d{1,3})(?:\.(\d+)|\Z)")
#: Groups that DeepEP has buffer sizes for. Source: deepseek-ai/DeepEP, deep_ep/buffer.py
#: (``Buffer.get_dispatch_config``); its first releases lack 48 and 96.
DEEPEP_RANKS = frozenset({2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160})
#: Short names of the degrees, as rules have them, and Megatron's.
DEGREES = {short.lower(): name for name, short in SHORT_DEGREES.items()}
OF_DIMS = (*DEGREES, "rank_order", "world_size")
_OF_GRIDS = ("micro_batch_size", "sequence_parallel", "zero", "recompute", "execution")

#: Files of Megatron-LM as sources of rules shorten them.
_FILES = {
    "args": "arguments.py",
    "tc": "transformer_config.py",
    "ps": "parallel_state.py",
    "mpc": "model_parallel_config.py",
}


@functools.cache
def release_number(version: str) -> Release:
    """A release without its patch level, as numbers; (0, 0) for what is none.

    >>> release_number("0.16.1") < release_number("0.20.0rc0") < release_number("1")
    True
    """
    found = _RELEASE.match(version)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def is_within(version: str, since: str = "", until: str = "") -> bool:
    """Whether a release is one of some, of which the first and the last are named; empty for none.

    >>> is_within("0.17", since="0.17"), is_within("0.17.1", until="0.16")
    (True, False)
    """
    number = release_number(version)
    after = not since or release_number(since) <= number
    return after and (not until or number <= release_number(until))


def last_until(version: str, releases: Iterable[str]) -> str | None:
    """The last of some releases, oldest first, that is no later; ``None`` where all are."""
    return next((each for each in reversed([*releases]) if is_within(version, since=each)), None)


def known_release(version: str) -> str:
    """The release whose rules and options stand for one: a newer one has those of the newest.

    >>> known_release("0.16.1"), known_release("0.21.0")
    ('0.16', '0.20')

    Raises:
        UserInputError: for one that is older than all of them, and for what is no release.
    """
    found = last_until(version, RELEASES)
    if found is None:
        limit = f"{RELEASES[0]} is the oldest release whose options and rules are known"
        if _RELEASE.match(version) is None:
            limit = f"a release is a number such as {DEFAULT_VERSION}"
        raise UserInputError(
            "Megatron-LM release", version, limit, f"Use one of {', '.join(RELEASES)}."
        )
    return found


@frozen
class LaunchRequest(PartialLayout):
    """Everything about a job that Megatron's rules look at: its layout, which may break them, too.

    Args:
        partition: ``None`` while a search has not chosen one.
        sharding: what divides states among replicas; ``None`` leaves it to the ZeRO stage.
        overlap_grad_reduce, overlap_param_gather: as of ``Layout``.
        gradient_bytes: width of the gradients that replicas reduce and keep.
        cuda_graphs: the job's own, of which ``execution`` says what they capture; ``None`` where a
            plan chooses them, or there are none.
        fused_attention: attention runs in a fused kernel (``ExecutionTraits.flash_attention``).
        microbatch_group_size_per_vp_stage: micro batches of a round of virtual stages; 0 is one a
            pipeline rank.
        version: the release of Megatron-LM, or of a recipe's megatron-core; one of ``RELEASES``.
        framework: what starts the job; one that takes recipes has its release.
        batch_schedule: how the batch grows; every rule holds at each of its sizes.
        even_stages: layers of which every virtual stage has the same multiple, as no layout can be
            stated; 0 where stages may be uneven.
        layers_in_bf16: at the longer end, of ``--first-last-layers-bf16``.
        options: the job's own options that are no part of a layout, by Megatron's name.
        accelerator: name of the device; empty where it is not known.
    """

    spec: TransformerSpec
    sequence_parallel: bool = False
    zero: ZeroStage = ZeroStage.NONE
    partition: StagePartition | None = None
    precision: Precision = Precision.BF16
    moe_grouped_gemm: bool = False
    gradient_bytes: int = 4
    sharding: DataParallelSharding | None = None
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = True
    optimizer: str = "adam"
    cuda_graphs: CudaGraphs | None = None
    fp8_recipe: str = "delayed"
    transformer_impl: str = "transformer_engine"
    fused_attention: bool = True
    microbatch_group_size_per_vp_stage: int = 0
    version: str = DEFAULT_VERSION
    framework: str = MEGATRON_LM
    batch_schedule: BatchSchedule | None = None
    even_stages: int = 0
    layers_in_bf16: int = 0
    options: Flags = field(default_factory=dict)
    accelerator: str = ""

    def __post_init__(self) -> None:
        """A batch that replicas do not divide breaks a rule."""

    @classmethod
    def of(cls, spec: TransformerSpec, grid: PartialLayout, **others: Any) -> LaunchRequest:
        """A grid of a model, but its execution; ``others`` are the fields that it does not say.

        Every plan has grouped GEMMs of experts where the layers are Transformer Engine's.
        """
        engine = others.get("transformer_impl", "transformer_engine")
        others.setdefault("moe_grouped_gemm", spec.is_moe and engine != "local")
        return cls(spec=spec, **{**grid.partial_fields(), "execution": PLAIN, **others})

    @property
    def batch_unit(self) -> int:
        """The global batch, or what every size of one that grows is a multiple of."""
        growing = self.batch_schedule
        return self.global_batch_size if growing is None else growing.batch_unit

    @property
    def batch_grows(self) -> bool:
        """Whether the run has several batch sizes."""
        return self.batch_schedule is not None

    @property
    def uneven_sides(self) -> tuple[int, ...]:
        """Sides of a rank's matrices that the number format does not divide."""
        return uneven_sides(self.spec, self.dims, self.precision, self.fp8_recipe)

    @property
    def facts(self) -> Facts:
        """What rules read of it."""
        return Facts(job=self)


class Facts(dict[str, Any]):
    """Facts by name; what they do not hold follows from others, or is read from the ``job``.

    >>> Facts(pp=2, vpp=3)["num_chunks"]
    6
    """

    def __missing__(self, name: str) -> Any:
        if name in DERIVED:
            self[name] = self.read(DERIVED[name])
        else:
            job, field = self["job"], DEGREES.get(name, name)
            records = (job, job.dims, job.spec, job.execution)
            self[name] = next(getattr(each, field) for each in records if hasattr(each, field))
        return self[name]

    def read(self, function: Callable[..., Any] | str) -> Any:
        """What a function says of the facts that its parameters name.

        A text names facts that all hold; behind a ``!`` is one that does not.
        """
        values = [self[name] for name in parameters(function)]
        if isinstance(function, str):
            words = function.split()
            return all(bool(v) != w.startswith("!") for v, w in zip(values, words, strict=True))
        return function(*values)


@functools.cache
def parameters(function: Callable[..., object] | str) -> tuple[str, ...]:
    """The names of a function's parameters, or of a text: the facts that it reads."""
    if isinstance(function, str):
        return tuple(function.replace("!", "").split())
    code: CodeType = inspect.unwrap(function).__code__
    return code.co_varnames[: code.co_argcount]


def sources(name: str) -> Iterator[str]:
    """The facts that one follows from, or itself."""
    derived = DERIVED.get(name)
    if derived is None:
        yield name
        return
    for each in parameters(derived):
        yield from sources(each)


def facts_of_dims(dims: ParallelDims) -> dict[str, Any]:
    """The degrees by their short names, and what they come to."""
    return {name: getattr(dims, DEGREES.get(name, name)) for name in OF_DIMS}


def facts_of(grid: PartialLayout) -> dict[str, Any]:
    """What rules read of a layout without its stages."""
    return {**facts_of_dims(grid.dims), **{name: getattr(grid, name) for name in _OF_GRIDS}}


def facts_reader(names: Iterable[str]) -> Callable[[PartialLayout], tuple[Any, ...]]:
    """What gives the values of some facts of a layout as one key."""
    paths = [f"dims.{DEGREES.get(name, name)}" if name in OF_DIMS else name for name in names]
    readers = [attrgetter(path) for path in paths]
    # one reader of a single path would give no tuple
    return attrgetter(*paths) if paths[1:] else lambda grid: tuple(read(grid) for read in readers)


def num_microbatches(batch_unit: int, micro_batch_size: int, dp: int) -> int:
    """Micro batches of one step on each rank, 0 if they do not come out whole.

    Where those of the unit of a growing batch are whole, and whole rounds of virtual stages, so are
    those of every multiple.
    """
    samples = micro_batch_size * dp
    return 0 if samples < 1 or batch_unit % samples else batch_unit // samples


def matrix_sides(precision: Precision, fp8_recipe: str) -> int:
    """What the sides of matrices are multiples of; 1 in 16 and 32 bits."""
    if not precision.is_quantized:
        return 1
    return 32 if precision is Precision.NVFP4 or fp8_recipe in ("mxfp8", "nvfp4") else 16


def uneven_sides(
    spec: TransformerSpec, dims: ParallelDims, precision: Precision, recipe: str
) -> tuple[int, ...]:
    """Sides of a rank's matrices that the format does not divide (``assert_dim_for_fp8_exec``)."""
    multiple = matrix_sides(precision, recipe)
    if multiple == 1:
        return ()
    tp, etp = dims.tensor_model_parallel_size, dims.expert_tensor_parallel_size
    head_dim = spec.v_head_dim if spec.multi_latent_attention else spec.head_dim
    sides = {spec.hidden_size, spec.num_attention_heads * head_dim // tp}
    sides.update(size // tp for size in spec.ffn_hidden_sizes)
    if spec.is_moe:
        sides.add(spec.expert_ffn_hidden_size // etp)
    return tuple(sorted(side for side in sides if side % multiple))


def token_multiple(precision: Precision, fp8_recipe: str, gathering_ranks: int) -> int:
    """What the tokens of a matrix on a rank are a multiple of; 1 in 16 and 32 bits.

    Blocks of two formats lie along them; others that are gathered among tensor ranks are whole
    tiles (``MXFP8Quantizer.make_empty``, ``assert_dim_for_all_gather``).
    """
    if not precision.is_quantized:
        return 1
    recipe = "nvfp4" if precision is Precision.NVFP4 else fp8_recipe
    return {"mxfp8": 32, "nvfp4": 16, "blockwise": 128 if gathering_ranks > 1 else 8}.get(recipe, 8)


def tokens_on_rank(
    spec: TransformerSpec, micro_batch_size: int, cp: int, gathering_ranks: int
) -> tuple[int, ...]:
    """Rows of a layer's matrices that a rank has before it gathers more, of each stack."""
    lengths = {spec.seq_length, spec.decoder_seq_length or spec.seq_length}
    return tuple(micro_batch_size * length // (cp * gathering_ranks) for length in sorted(lengths))


def shape_of(partition: StagePartition) -> tuple[int, int, int]:
    """Pipeline ranks, virtual stages and units of a partition."""
    return partition.pipeline_model_parallel_size, partition.num_chunks, partition.boundaries[-1]


def _stages(
    spec: TransformerSpec, partition: StagePartition | None, pp: int, num_chunks: int
) -> StagePartition | None:
    """The partition, where it has the shape that the degrees and the model say."""
    expected = (pp, num_chunks, spec.num_units)
    return partition if partition is not None and shape_of(partition) == expected else None


#: Facts that follow from others: those that their parameters name.
DERIVED: Mapping[str, Callable[..., Any]] = {
    "release": release_number,
    "has_command": lambda framework: framework.startswith(MEGATRON_LM),
    "core": lambda has_command, version: (
        f"{MEGATRON_LM if has_command else 'megatron-core'} {version}"
    ),
    "launcher": lambda has_command, core, framework: core if has_command else framework,
    "splits_losses": lambda options, cp: cp > 1 and bool(options.get("finetunes")),
    "is_local": lambda transformer_impl: transformer_impl == "local",
    "num_chunks": lambda pp, vpp: pp * vpp,
    "expert_ranks": lambda ep, etp: ep * etp,
    "batch_sizes": lambda global_batch_size, batch_schedule: {
        global_batch_size,
        *(batch_schedule.sizes if batch_schedule else ()),
    },
    "num_microbatches": num_microbatches,
    "gathering_ranks": lambda tp, sequence_parallel: tp if sequence_parallel else 1,
    "tokens_on_rank": tokens_on_rank,
    "token_multiple": token_multiple,
    "one_context_rank": lambda cp: cp == 1,
    "context_split": lambda tp, cp: None if cp == 1 else (tp, cp),
    "one_expert_rank": lambda ep: ep == 1,
    "experts_alone": lambda expert_ranks: expert_ranks == 1,
    "has_deepep_buffers": lambda expert_ranks: expert_ranks in DEEPEP_RANKS,
    "is_pipelined": lambda pp: pp > 1,
    "is_interleaved": lambda vpp: vpp > 1,
    "is_fsdp": lambda zero: zero.is_fsdp,
    "zero_name": lambda zero: zero.name,
    "uses_megatron_fsdp": uses_megatron_fsdp,
    "uses_torch_fsdp2": lambda sharding: sharding is DataParallelSharding.TORCH_FSDP2,
    "shards_optimizer": shards_optimizer,
    "expert_replicas": lambda tp, cp, dp, expert_ranks: tp * cp * dp // expert_ranks,
    "modules": lambda recompute: frozenset(recompute.modules),
    "one_tensor_rank": lambda tp: tp == 1,
    "recomputes_layers": lambda recompute: recompute.granularity is RecomputeGranularity.FULL,
    "kept_modules": kept_modules,
    "recipe": lambda precision, fp8_recipe: {
        Precision.FP8: fp8_recipe,
        Precision.NVFP4: "nvfp4",
    }.get(precision),
    "stages": _stages,
    "stage_text": lambda spec, stages: stages and layout_string(spec, stages),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of Megatron.

    Args:
        id: short and stable, for tests and messages.
        source: where Megatron enforces it.
        holds: whether the facts that its parameters name keep it; or as of ``Facts.read``.
        what: the facts to blame, by Megatron's names.
        limit, fix: with ``{fact}`` for a fact, as ``what`` may be.
        value: the fact that is shown, where it is not ``what``; or a function of facts.
        words: facts that its own texts name, each worked out of others.
        reason: what the certificate of a search counts it as; empty where it does not.
        since, until: the first and the last release that have it; empty where all have.
        framework: the only ones that have it, by name; empty where megatron-core has.
        ours: Megatron takes what breaks it, and no plan has that.
        about: whether it is about a job's model; others keep it.
        when: a field of ``Execution``; at its default the rule holds.
        option: ``what`` is an option of the job's own, which the rule looks at where it is on.
        turns_off: the option is a switch that turns something off: it is on where the value is not.

    Attributes:
        names: the facts that ``holds`` reads.
        reads: all that decide it: facts in whose place stand those that they follow from.
    """

    id: str
    source: str
    holds: Callable[..., bool] | str
    what: str
    limit: str
    fix: str
    _: KW_ONLY
    value: str | Callable[..., object] = ""
    words: Mapping[str, Callable[..., object]] = field(default_factory=dict, hash=False)
    reason: str = ""
    since: str = ""
    until: str = ""
    framework: str = ""
    ours: bool = False
    about: Callable[[TransformerSpec], bool] | None = None
    when: str = ""
    option: bool = False
    turns_off: bool = False
    names: tuple[str, ...] = field(init=False)
    reads: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        read_by = {"execution": self.when, "options": self.option, "spec": self.about}
        others = [name for name, reader in read_by.items() if reader]
        names = parameters(self.holds)
        read = [each for name in (*names, *others) for each in sources(name)]
        object.__setattr__(self, "names", names)
        object.__setattr__(self, "reads", tuple(dict.fromkeys(read)))

    @property
    def file(self) -> str:
        """``source`` with the names of files whole, for a message."""
        return re.sub(r"\b(args|tc|ps|mpc)\b", lambda found: _FILES[found[1]], self.source)

    def keeps(self, facts: Facts) -> bool:
        """Whether facts keep it."""
        dated = self.since or self.until
        if dated and not is_within(facts["version"], self.since, self.until):
            return True
        if self.framework and facts["framework"].partition(" ")[0] not in self.framework:
            return True
        if self.when and not self.concerns(facts["execution"]):
            return True
        if self.about and not self.about(facts["spec"]):
            return True
        if self.option:
            facts["option"] = facts["options"].get(self.what, self.turns_off)
            if bool(facts["option"]) is self.turns_off:
                return True
        return bool(facts.read(self.holds))

    def who(self, facts: Facts) -> str:
        """What refuses facts that break it, with its release."""
        return str(facts["launcher" if self.framework else "core"])

    def concerns(self, execution: Execution) -> bool:
        """Whether it looks at layers whose work is done so."""
        return not self.when or getattr(execution, self.when) != getattr(PLAIN, self.when)

    def violation(self, facts: Facts) -> UserInputError:
        """What breaks it, where it is broken, in words for a user."""
        facts = Facts(facts, **{name: facts.read(word) for name, word in self.words.items()})
        what = self.what.format_map(facts)
        if isinstance(self.value, str):
            values = [facts[name] for name in (self.value or what).split(", ")]
            value = tuple(values) if values[1:] else values[0]
        else:
            value = facts.read(self.value)
        return UserInputError(what, value, self.limit.format_map(facts), self.fix.format_map(facts))


def violations(facts: Facts, rules: Iterable[Rule]) -> Iterator[tuple[Rule, UserInputError]]:
    """Every broken rule, in the order of the rules."""
    return ((rule, rule.violation(facts)) for rule in rules if not rule.keeps(facts))
