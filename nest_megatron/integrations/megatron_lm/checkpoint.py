"""The checkpoint that a job would load, and the layouts that it can be loaded into.

Megatron and torch are not imported, and nothing that was pickled is run. Sources: ``a`` is
Megatron-LM core_v0.16.1, ``b`` 0.20; ``ckpt`` is ``training/checkpointing.py``, ``args``
``training/arguments.py``, ``do`` ``core/optimizer/distrib_optimizer.py``, ``dc``
``core/dist_checkpointing``; "(run)" was tried with Megatron's own functions, on CPU ranks.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, NoReturn

from nest_megatron.config.job import Requirement
from nest_megatron.documents import read_json
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_bytes
from nest_megatron.integrations.megatron_lm.inert_pickle import (
    MAX_METADATA_BYTES,
    MAX_STATE_BYTES,
    Inert,
    is_plain,
    load_inert,
    load_state,
)
from nest_megatron.integrations.megatron_lm.layout_arguments import Values, partition_of_values
from nest_megatron.integrations.megatron_lm.model_arguments import saved_pattern
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import Release, release_number
from nest_megatron.layout.stage_layout import expand_layout, layout_string, uniform_partition
from nest_megatron.model.layer_pattern import hybrid_kinds
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen

_Sizes = dict[str, tuple[int, ...]]
_RANKS = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")
_RNG_KEY = re.compile(r"rng_state/shard_[\d.]+_([\d.]+)")
_BUCKET_KEY = re.compile(r"(.*)\.bucket_idx_\d+\.param")
_TP, _PP = "tensor_model_parallel_size", "pipeline_model_parallel_size"
_VPP, _LAYOUT = "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
_DEGREES = (_TP, _PP, _VPP, _EP, _ETP)
_FSDP, _DIST_OPT = "use_megatron_fsdp", "use_distributed_optimizer"
_FIXED_LAYOUT = ("dp_reshardable", "dp_zero_gather_scatter")
_NO_OPTIM = "add --no-load-optim to start the optimizer afresh"
_CONVERT = "convert it, laid out as it was, with --ckpt-convert-format torch_dist"
_ALONE = "launch this job without nest"
_TRACKER, _INF = "latest_checkpointed_iteration.txt", float("inf")
_MODEL = TransformerSpec(
    name="saved",
    num_layers=1,
    vocab_size=1,
    hidden_size=1,
    ffn_hidden_size=1,
    num_attention_heads=1,
    seq_length=1,
)


@frozen
class SavedCheckpoint:
    """What is known of a checkpoint; ``None`` is what it does not say.

    Args:
        weights_only: a release, or loaded for fine-tuning because ``--load`` is still empty.
        num_optimizers: 2 where experts have an optimizer of their own.
        largest_buffer: parameters of the largest gradient buffer (``dp_reshardable`` only).
        rng_shape: how the random states are sharded, (pp, tp) or (pp, tp, dp).
        arguments: those it was saved with, by destination; empty if unreadable.
    """

    directory: Path
    format: str
    weights_only: bool = False
    tensor_model_parallel_size: int | None = None
    pipeline_model_parallel_size: int | None = None
    virtual_pipeline_model_parallel_size: int | None = None
    expert_model_parallel_size: int | None = None
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_layout: str | None = None
    use_distributed_optimizer: bool | None = None
    distrib_optim_sharding_type: str | None = None
    num_optimizers: int | None = None
    largest_buffer: int | None = None
    rng_shape: tuple[int, ...] | None = None
    arguments: Values = field(default_factory=dict)


def read_checkpoint(values: Values) -> SavedCheckpoint | None:
    """The checkpoint that Megatron would load, or ``None`` where training starts afresh.

    Source: a ckpt:1490-1504, :1171-1225, training.py:1529; b ckpt:2478-2506, :2009-2071.

    Args:
        values: Megatron's arguments by destination, before or after its validation.

    Raises:
        UserInputError: if what is there cannot be opened, by Megatron or from here.
    """
    load, pretrained = values.get("load"), values.get("pretrained_checkpoint")
    if not (load or pretrained) or values.get("moe_use_upcycling"):
        return None
    finetune = bool(pretrained) and not (load and (Path(load) / _TRACKER).is_file())
    where = str(pretrained if finetune else load)
    if "://" in where:
        _refuse("--load", where, "a remote store cannot be looked at before the launch", _ALONE)
    kind = values.get("non_persistent_ckpt_type")
    local = values.get("non_persistent_local_ckpt_dir")
    if kind == "local" and local and any(Path(local).rglob("*.pt")):
        _refuse("--non-persistent-local-ckpt-dir", local, "its layout is not recorded", _ALONE)
    latest, release = _latest(base := Path(where))
    iteration = (base.is_dir() and values.get("ckpt_step")) or latest
    other = Path(values.get("non_persistent_global_ckpt_dir") or base / "non_persistent")
    newer = _latest(other)[0] if kind == "global" else None
    if newer is not None and newer >= (iteration or 0):
        base, iteration, release = other, newer, False
    if iteration is None:
        return None
    return _describe(
        base / ("release" if release else f"iter_{iteration:07d}"),
        release or finetune,
        values,
    )


def loads_optimizer(saved: SavedCheckpoint, values: Values) -> bool:
    """Whether Megatron would ask the checkpoint for the optimizer's state.

    Source: a ckpt:1579, :1785, args:1173; b ckpt:2487, :2611, :2958, args:1875.
    """
    unsaved = saved.weights_only or saved.arguments.get("no_save_optim")
    names = ("finetune", "freeze_all_layers", "no_load_optim", "skip_train")
    return not unsaved and not any(map(values.get, names))


def requirements(saved: SavedCheckpoint, values: Values) -> Mapping[str, Requirement]:
    """What a plan must keep to load this, by the names of ``layout_arguments``.

    A virtual size of 1 stands for none; ``check_loadable`` sees what hangs on several choices.
    Megatron-FSDP: args a:690, :1050; b:1169, :1676. Distributed optimizer: do a:1748, dc/mapping.py
    :133, optimizer.py:820; do b:2047, dc/mapping.py:129 (run, both ways). Legacy files are named by
    TP, PP and EP rank, their layers and experts by local number (a ckpt:191-199; b:266-274): with
    other stages, VPP or EP weights stay random in silence, for a failed strict load is repeated
    without (a ckpt:1759-1777; b:2909-2949) (run). ``_FIXED_LAYOUT``: TP, PP a ckpt:1594; b:2649;
    the rest do a:1779, :2001; b:2078 (run).
    """
    kind = saved.distrib_optim_sharding_type
    fsdp = saved.format == "fsdp_dtensor"
    reason = "Megatron-FSDP reads checkpoints of the fsdp_dtensor format, and nothing else does"
    needs: dict[str, tuple[Any, str, str]] = {_FSDP: (fsdp, reason, _ALONE)}
    follows, fix = saved.format == "torch", _CONVERT
    reason = "a rank of a torch checkpoint reads the one file that was written for it"
    if loads_optimizer(saved, values) and not fsdp:
        on = saved.use_distributed_optimizer
        needs[_DIST_OPT] = (on, "the state has other keys with and without it", _NO_OPTIM)
        if not follows and on and kind in _FIXED_LAYOUT:
            follows, fix = True, _NO_OPTIM
            reason = f"its optimizer state is {kind}, which keeps the saved layout"
        elif not follows and values.get("num_experts") and saved.num_optimizers == 1:
            needs[_EP] = (1, "it holds one optimizer for experts and the rest", _NO_OPTIM)
    piped = () if saved.pipeline_model_parallel_size == 1 else (_VPP, _LAYOUT)
    names = (_TP, _PP, *piped, *((_EP, _ETP) if values.get("num_experts") else ()))
    needs |= {name: (getattr(saved, name), reason, fix) for name in names if follows}
    return {n: Requirement(value=v, reason=why, fix=fix) for n, (v, why, fix) in needs.items()}


def check_loadable(saved: SavedCheckpoint, arguments: Values, values: Values, version: str) -> None:
    """Raise if a plan's layout is one that the checkpoint cannot be loaded into.

    Raises:
        UserInputError: naming the choice, its value, what the checkpoint demands and the way out.
    """
    release = release_number(version)
    _check_format(saved, values, release)
    for name, need in requirements(saved, values).items():
        planned, value = arguments[name], need.value
        same = (planned or (1 if name == _VPP else False)) == value
        if name == _LAYOUT and planned and value and not saved_pattern(saved.arguments):
            same = expand_layout(planned) == expand_layout(str(value))
        if same:
            continue
        if value is None:
            said = f"what {saved.directory} was saved with cannot be read: its files are damaged"
            fix = f"load another iteration with --ckpt-step, or, if they are whole, {need.fix}"
        else:
            said = f"{saved.directory} needs {value}: {need.reason}"
            fix = f"keep it, or {need.fix}"
        _refuse(name, planned, said, fix)
    _check_rng(saved, arguments, values, release)
    if loads_optimizer(saved, values) and saved.format == "torch_dist":
        _check_optimizer(saved, arguments, values, release)


def _check_format(saved: SavedCheckpoint, values: Values, release: Release) -> None:
    """What does not go together whatever the degrees.

    torch_dcp is torch FSDP2's (args a:1042; b:1668). torch_dist loads only where ``--ckpt-format``
    names it, detected or not (a ckpt:902, :1112; b:1581, :1923) (run). Since 0.19 there is no
    ``common.pt`` (a dc/strategies/common.py:90; b dc/serialization.py:431) (run). Grouped
    experts have names that only torch_dist translates (core/transformer/moe/experts.py);
    rewriting turns grouping on.
    """
    where = str(saved.directory)
    dist = saved.format == "torch_dist"
    if saved.format == "torch_dcp":
        _refuse("--load", where, "torch_dcp is torch FSDP2's format; no plan uses that", _ALONE)
    if dist and values.get("ckpt_format") in ("torch", "torch_dcp"):
        _refuse("--ckpt-format", values["ckpt_format"], f"{where} is torch_dist", "name that")
    common = saved.directory / "common.pt"  # no folder is there of what a plan's job would save
    if dist and release < (0, 19) and saved.directory.is_dir() and not common.is_file():
        _refuse(
            "--load",
            where,
            "it has no common.pt, which releases before 0.19 read",
            "run what saved it",
        )
    grouped = bool(values.get("moe_grouped_gemm")) or values.get("transformer_impl") != "local"
    before = bool(saved.arguments.get("moe_grouped_gemm", grouped))
    if values.get("num_experts") and not dist and before != grouped:
        _refuse("--moe-grouped-gemm", grouped, f"{where} names experts as with {before}", _ALONE)


def _check_rng(saved: SavedCheckpoint, arguments: Values, values: Values, release: Release) -> None:
    """Random states are asked for, with TP and PP as saved, by a key that says their shards.

    Source: a ckpt:358-383 (0.16 alone: expert parallelism shards them by replica), :1560;
    b:493-504, :2574;
    fsdp_dtensor a ckpt:384, :1691; b:505, :2775: a new TP rank finds none (run).
    """
    unsaved = saved.weights_only or saved.arguments.get("no_save_rng")
    if unsaved or any(map(values.get, ("finetune", "freeze_all_layers", "no_load_rng"))):
        return
    asked = [arguments[_PP], arguments[_TP]]
    stored = [saved.pipeline_model_parallel_size, saved.tensor_model_parallel_size]
    if saved.format == "fsdp_dtensor":
        broken = values.get("strict_fsdp_dtensor_load", True) and asked[1] > (stored[1] or asked[1])
    else:
        same = asked == stored
        stored = list(saved.rng_shape or ())
        if release == (0, 16) and arguments[_EP] > 1:
            asked.append(arguments["data_parallel_size"] * arguments["context_parallel_size"])
        broken = same and saved.rng_shape is not None and asked != stored
    if broken:
        _refuse(
            "random states [pp, tp, dp]", asked, f"they were saved {stored}", "add --no-load-rng"
        )


def _check_optimizer(
    saved: SavedCheckpoint, arguments: Values, values: Values, release: Release
) -> None:
    """Optimizer state in a form that is gone, or for another number of optimizers.

    ``flattened_range`` is gone (dc/mapping.py a:133; b:129) (run). Experts have an optimizer of
    their own with EP (tensor_parallel/layers.py a:886), since 0.19 also with an ETP other than TP
    (b:1033); one state is not divided in two nor two joined (optimizer.py a:1216; b:1605) (run).

    ``dp_reshardable`` state lies by bucket; their size hangs on overlap and on the replicas. A
    buffer smaller than both sizes is one bucket either way. Source: a training.py:1298-1322,
    do:1603, :1779; b training.py:2179-2194, do:1902, :2078 (run).
    """
    kind = saved.distrib_optim_sharding_type
    count = saved.num_optimizers
    if saved.use_distributed_optimizer and kind not in ("fully_reshardable", *_FIXED_LAYOUT):
        _refuse("distrib_optim_sharding_type", kind, "0.15 was the last to read it", _NO_OPTIM)
    sizes = (arguments[_EP], arguments[_ETP])
    apart = _is_apart(arguments, release)
    if values.get("num_experts") and count is not None and apart != (count > 1):
        fix = f"fix an expert-parallel size {'of 1' if apart else 'above 1'}, or {_NO_OPTIM}"
        _refuse(f"{_EP}, {_ETP}", sizes, f"{saved.directory} holds {count} optimizer(s)", fix)
    before = saved.arguments
    if kind != "dp_reshardable" or not before or before.get("ddp_num_buckets"):
        return
    was = before.get("data_parallel_size", 1) * before.get("context_parallel_size", 1)
    now = arguments["data_parallel_size"] * arguments["context_parallel_size"]
    overlaps = (before.get("overlap_grad_reduce"), arguments["overlap_grad_reduce"])
    old, new = (
        float(run.get("ddp_bucket_size") or max(40_000_000, 1_000_000 * n)) if on else _INF
        for run, on, n in zip((before, values), overlaps, (was, now), strict=True)
    )
    if old != new and (saved.largest_buffer or _INF) >= min(old, new):
        fix = f"add --ddp-bucket-size {min(old, 1e15):.0f}, or {_NO_OPTIM}"
        _refuse("--ddp-bucket-size", new, f"{saved.directory} was saved with {old:.0f}", fix)


def _is_apart(sizes: Values, release: Release) -> bool:
    """Whether experts have an optimizer besides that of the rest."""
    return sizes[_EP] > 1 or (release >= (0, 19) and sizes[_ETP] != sizes[_TP])


def _describe(folder: Path, weights_only: bool, values: Values) -> SavedCheckpoint:
    kind = _format(folder)
    try:
        sizes, state = _read(folder, kind)
        content = _plain(dict(state.get("content_metadata") or {}))
        parts = list(state.get("optimizer") or ())
    except UserInputError:  # it is beyond a limit
        raise
    except Exception:  # noqa: BLE001 - a damaged pickle may raise anything
        sizes, state, content, parts = {}, {}, {}, []
    arguments = _plain(vars(state["args"])) if isinstance(state.get("args"), Inert) else {}
    if kind == "torch_dcp" and (arguments or values).get("ckpt_format") != kind:
        kind = "fsdp_dtensor"
    sharding = content.get("distrib_optim_sharding_type")
    if kind == "torch_dist" and "content_metadata" not in state and arguments.get(_DIST_OPT):
        parallel = arguments.get("ckpt_fully_parallel_save")  # a ckpt:1585, b:2621: before 0.13
        sharding = "fully_sharded_model_space" if parallel else "dp_zero_gather_scatter"
    shapes = [tuple(map(int, m[1].split("."))) for m in map(_RNG_KEY.fullmatch, sizes) if m]
    buffers: dict[str, int] = {}
    for bucket in filter(None, map(_BUCKET_KEY.fullmatch, filter(sizes.get, sizes))):
        buffers[bucket[1]] = buffers.get(bucket[1], 0) + sizes[bucket[0]][0]
    return SavedCheckpoint(
        directory=folder,
        format=kind,
        weights_only=weights_only,
        **_degrees(folder, kind, arguments, values),
        use_distributed_optimizer=True if sharding else arguments.get(_DIST_OPT),
        distrib_optim_sharding_type=sharding,
        num_optimizers=sum(not isinstance(n, str) for n in parts) or 1 if parts else None,
        largest_buffer=max(buffers.values(), default=None),
        rng_shape=next(iter(shapes), None),
        arguments=arguments,
    )


def _plain(values: Values) -> dict[str, Any]:
    """Values of a pickle by their names; ``Inert`` for each that is no small plain one."""
    return {str(name): v if is_plain(v) else Inert() for name, v in values.items()}


def _degrees(folder: Path, kind: str, arguments: Values, values: Values) -> dict[str, Any]:
    """Saved degrees and stages: from the arguments, else from legacy folder names.

    With experts, ``mp_rank_00_000`` may be their rank or the pipeline's: that stays unknown. TP and
    PP that torch_dist does not say are 1 to Megatron (a ckpt:1542; b:2559).
    """
    if arguments:
        return sizes_of(arguments)
    if kind != "torch":
        return {_TP: 1, _PP: 1} if kind == "torch_dist" else {}
    ranks = [m.groups("-1") for m in (_RANKS.fullmatch(p.name) for p in folder.iterdir()) if m]
    tp, second, third = (max((int(rank[i]) for rank in ranks), default=-1) + 1 for i in range(3))
    if second and not third and values.get("num_experts"):
        return {_TP: tp}
    return {_TP: tp or None, _PP: second or 1, _EP: third or 1}


def sizes_of(arguments: Values) -> dict[str, Any]:
    """The degrees and stages that arguments state, by fields of ``SavedCheckpoint``."""
    found = {name: arguments.get(name) or 1 for name in _DEGREES}
    layout = None
    pp = found[_PP]
    with contextlib.suppress(UserInputError, LookupError, TypeError):
        if pattern := saved_pattern(arguments):
            layers, _, depths = hybrid_kinds(pattern)
            spec = replace(
                _MODEL,
                num_layers=len(layers),
                mtp_num_layers=depths or None,
                hybrid_layer_pattern=pattern,
                num_experts=2 if "E" in pattern else None,
            )
        else:
            depth, mtp = arguments["num_layers"], arguments.get("mtp_num_layers") or None
            spec = replace(_MODEL, num_layers=depth, mtp_num_layers=mtp)
        stages = partition_of_values(spec, arguments, pp) or uniform_partition(
            spec, pp, found[_VPP]
        )
        layout, found[_VPP] = layout_string(spec, stages), stages.num_chunks // pp
    return {**found, _ETP: arguments.get(_ETP) or found[_TP], _LAYOUT: layout}


def _format(folder: Path) -> str:
    """Source: ``_get_checkpoint_format`` (a ckpt:1134; b:1974)."""
    try:
        names = {path.name for path in folder.iterdir()}
        config = read_json(folder / "metadata.json", "--load") if "metadata.json" in names else {}
        kind = config.get("sharded_backend")
    except (OSError, AttributeError) as error:
        _refuse("--load", str(folder), f"it cannot be opened ({error})", "check the path")
    if kind is None and any(name.startswith("mp_rank_0") for name in names):
        return "torch"
    kind = "torch_dcp" if kind is None and ".metadata" in names else kind
    if kind not in ("torch_dist", "torch_dcp"):
        _refuse("--load", str(folder), f"its format is unknown ({kind})", "check the path")
    return str(kind)


def _read(folder: Path, kind: str) -> tuple[_Sizes, dict[str, Any]]:
    """Sizes of what is stored, by key, and the state that is not sharded among the ranks."""
    sizes: _Sizes = {}
    places = {}
    listed = folder / ".metadata"
    if listed.is_file():
        content = read_bytes(listed, "--load", most=MAX_METADATA_BYTES)
        index = vars(load_inert(content, str(listed), most=MAX_METADATA_BYTES))
        for key, value in index["state_dict_metadata"].items():
            size = vars(value).get("size") or ()  # random states and objects have none
            sizes[str(key)] = tuple(n for n in size if isinstance(n, int))
        places = {vars(k)["fqn"]: vars(v) for k, v in index["storage_data"].items()}
    legacy = folder.glob("mp_rank_0*/model_optim_rng.pt")
    path = min(legacy) if kind == "torch" else folder / "common.pt"
    if path.is_file():
        with path.open("rb") as stream:
            return sizes, dict(load_state(stream, str(path)))
    name = "args" if kind == "torch_dcp" else "common_state/shard_0_1"
    place = places[name]
    path = folder / Path(place["relative_path"]).name  # never a file elsewhere
    if not path.is_file():
        raise FileNotFoundError(path)
    with path.open("rb") as stream:
        stream.seek(place["offset"])
        part = stream.read(min(place["length"], 2 * MAX_STATE_BYTES))
    found = load_state(io.BytesIO(part), str(path))
    return sizes, {"args": found} if name == "args" else dict(found[0])


def _latest(base: Path) -> tuple[int | None, bool]:
    """Iteration, and whether it is a release. Source: ``read_metadata`` (a ckpt:291; b:388)."""
    path = base / _TRACKER
    if not path.is_file():
        return None, False
    text = read_bytes(path, str(path), most=64, whole=False).decode(errors="replace").strip()
    if not re.fullmatch(r"\d{1,18}|release", text):
        _refuse(str(path), text, "it holds an iteration or the word release", "correct it")
    return (0, True) if text == "release" else (int(text), False)


def _refuse(what: str, value: object, limit: str, fix: str) -> NoReturn:
    raise UserInputError(what, value, limit, f"{fix[0].upper()}{fix[1:]}.")


#: Flags that a checkpoint keeps and that decide how it can be loaded.
_KEPT = ("ddp_bucket_size", "ddp_num_buckets", "no_save_optim", "no_save_rng", "moe_grouped_gemm")


def checkpoint_of_plan(
    plan: ParallelPlan, values: Values, version: str, name: str
) -> SavedCheckpoint:
    """What a plan's job saves.

    Source: ``_build_sharded_state_dict_metadata`` (core_v0.16.1 ``training/checkpointing.py``:405;
    0.20 :527), and what ``checkpoint.py`` says of each part.

    Args:
        values: the job's arguments by destination; Megatron's defaults where it states none.
        version: of Megatron-LM.
        name: for errors.
    """
    layout = plan.layout
    dims = plan.layout.dims
    saved = {name: getattr(dims, name) for name in _DEGREES}
    replicas = dims.data_parallel_size * dims.context_parallel_size
    release = release_number(version)
    kind = (
        "fsdp_dtensor" if layout.uses_megatron_fsdp else values.get("ckpt_format") or "torch_dist"
    )
    sharding = "dp_reshardable"
    if kind == "fsdp_dtensor":
        sharding = kind
    elif values.get("dist_ckpt_optim_fully_reshardable"):
        sharding = "fully_reshardable"
    shape = [saved[_PP], saved[_TP]]
    if release == (0, 16) and saved[_EP] > 1:
        shape.append(replicas)
    return SavedCheckpoint(
        directory=Path(name),
        format=kind,
        **saved,
        pipeline_model_parallel_layout=plan.arguments[_LAYOUT],
        use_distributed_optimizer=layout.shards_optimizer,
        distrib_optim_sharding_type=sharding if layout.shards_optimizer else None,
        num_optimizers=1 + (plan.model.is_moe and _is_apart(saved, release)),
        largest_buffer=max(stage.parameters for stage in plan.predicted.stages),
        rng_shape=tuple(shape),
        arguments={
            **{name: values.get(name) for name in _KEPT},
            "data_parallel_size": dims.data_parallel_size,
            "context_parallel_size": dims.context_parallel_size,
            "overlap_grad_reduce": layout.overlap_grad_reduce,
        },
    )
