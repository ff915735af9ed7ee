"""Checkpoints on disk: what is read of them, what a plan must keep, and what is refused.

The verdicts in ``TRIED`` and ``RANDOM`` are those of Megatron-LM's own ``save_checkpoint`` and
``load_checkpoint``, core_v0.16.1 and 0.20, on CPU ranks with gloo, unless marked as read.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm import checkpoint
from nest_megatron.integrations.megatron_lm.checkpoint import SavedCheckpoint, read_checkpoint
from nest_megatron.layout.layout import LAYOUT_ARGUMENTS

OLD, NEW = "0.16", "0.20"
_SIZES = {"tp": "tensor_model", "pp": "pipeline_model", "vpp": "virtual_pipeline_model"}
_SIZES |= {"cp": "context", "dp": "data", "ep": "expert_model", "etp": "expert_tensor"}
SHORT = {short: f"{name}_parallel_size" for short, name in _SIZES.items()}
SHORT |= {"layout": "pipeline_model_parallel_layout", "dist": "use_distributed_optimizer"}
SHORT |= {"fsdp": "use_megatron_fsdp", "overlap": "overlap_grad_reduce"}
FORMS = {"fully": "fully_reshardable", "dp": "dp_reshardable", "zero": "dp_zero_gather_scatter"}
EVEN, UNEVEN, INTERLEAVED = "Et*4|t*4L", "Et|t*7L", "Ett|tt|tt|ttL"
EXPERTS = {"num_experts": 4}
WHOLE, WEIGHTS = {"tp": 2, "pp": 2}, {"finetune": True, "ckpt_format": "torch_dist"}


@dataclass(frozen=True)
class Index:
    fqn: str  # as torch's MetadataIndex


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("ran",)


def torch_saved(content: object) -> bytes:
    """What ``torch.save`` writes of objects without tensors."""
    stream = BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content, protocol=2))
    return stream.getvalue()


def arguments(**short: Any) -> Namespace:
    """Saved arguments: 8 layers on one rank with the distributed optimizer, unless said."""
    plain = {"tp": 1, "pp": 1, "vpp": None, "dp": 1, "cp": 1, "ep": 1, "etp": None}
    plain |= {"dist": True, "overlap": True, "num_layers": 8, **short}
    return Namespace(**{SHORT.get(name, name): value for name, value in plain.items()})


def choice(**short: Any) -> dict[str, Any]:
    """A plan's choice: one rank with the distributed optimizer, unless said."""
    names: dict[str, Any] = dict.fromkeys(LAYOUT_ARGUMENTS)
    names |= dict.fromkeys((SHORT[n] for n in ("tp", "pp", "cp", "dp", "ep", "etp")), 1)
    plain = {"fsdp": False, "dist": True, "overlap": True, **short}
    return names | {SHORT[name]: value for name, value in plain.items()}


def start(base: Path, tracker: str = "7") -> Path:
    (base / "iter_0000007").mkdir(parents=True)
    (base / "latest_checkpointed_iteration.txt").write_text(tracker)
    return base / "iter_0000007"


def index(folder: Path, sizes: Mapping[str, Any], objects: Mapping[str, object]) -> None:
    """A ``.metadata`` file, and the objects that it says lie in a data file."""
    places, data = {}, b"before"
    for key, content in objects.items():
        blob = torch_saved(content)
        place = {"relative_path": "__0_0.distcp", "offset": len(data), "length": len(blob)}
        places[Index(key)] = SimpleNamespace(**place)
        data += blob
    (folder / "__0_0.distcp").write_bytes(data + b"after")
    stored = {key: SimpleNamespace(size=size) for key, size in sizes.items()}
    content = SimpleNamespace(state_dict_metadata=stored, storage_data=places)
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def torch_dist(base: Path, form: str, *, common: bool = True, **saved: Any) -> Path:
    """As Megatron saves it; ``"dp two"`` has two optimizers, no form is that of before 0.13."""
    folder = start(base)
    sizes = saved.pop("sizes", {"gbuf.bucket_idx_0.param": (saved.pop("numel", 10**9),)})
    word, *two = form.split() or [""]
    state: dict[str, Any] = {"optimizer": {0: {}, 1: {}} if two else {"optimizer": {}}}
    state["args"] = arguments(**{"dist": word != "plain", **saved})
    kind = {"distrib_optim_sharding_type": FORMS[word]} if word in FORMS else {}
    state |= {"content_metadata": kind} if form else {}
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    if common:
        (folder / "common.pt").write_bytes(torch_saved(state))
    index(folder, sizes, {} if common else {"common_state/shard_0_1": [state]})
    return base


def legacy(base: Path, names: str, **saved: Any) -> Path:
    """A checkpoint of the torch format; its file is damaged unless saved arguments are given."""
    folder = start(base)
    for name in names.split() if "mp_rank" in names else ("mp_rank_00_000", "mp_rank_01_001"):
        (folder / name).mkdir()
    state = torch_saved({"args": arguments(**saved), "optimizer": [{}, {}]}) if saved else b"?"
    (min(folder.iterdir()) / "model_optim_rng.pt").write_bytes(state)
    return base


def read(base: Path, **values: Any) -> SavedCheckpoint:
    found = read_checkpoint({"load": str(base), **values})
    assert found is not None
    return found


def kept(saved: SavedCheckpoint, **values: Any) -> dict[str, Any]:
    needs = checkpoint.requirements(saved, values)
    return {short: needs[name].value for short, name in SHORT.items() if name in needs}


def refusal(saved: SavedCheckpoint, plan: dict[str, Any], version: str = OLD, **values: Any) -> str:
    """What a plan is refused with; ``loads`` if it is not."""
    try:
        checkpoint.check_loadable(saved, choice(**plan), values, version)
    except UserInputError as error:
        return str(error)
    return "loads"


def test_a_fresh_start_loads_nothing(tmp_path: Path) -> None:
    base = torch_dist(tmp_path / "a", "dp")
    assert read_checkpoint({"load": str(tmp_path), "pretrained_checkpoint": None}) is None
    assert read_checkpoint({"load": str(base), "moe_use_upcycling": True}) is None
    assert read_checkpoint({"load": str(base)}) is not None


def test_the_iteration_that_megatron_takes(tmp_path: Path) -> None:
    base = torch_dist(tmp_path / "a", "dp")
    (base / "iter_0000007").rename(base / "iter_0000012")
    with pytest.raises(UserInputError, match=r"--load.*iter_0000007.*cannot be opened"):
        read(base)
    (base / "latest_checkpointed_iteration.txt").unlink()
    found = read(base, ckpt_step=12)  # a step needs no tracker
    assert found.directory == base / "iter_0000012"
    assert read_checkpoint({"load": str(base), "ckpt_step": 0}) is None
    assert checkpoint.loads_optimizer(found, {})
    (base / "iter_0000012").rename(base / "release")
    (base / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert (read(base).directory.name, read(base).weights_only) == ("release", True)
    assert not checkpoint.loads_optimizer(read(base), {})


def test_a_pretrained_checkpoint_stands_in_for_an_empty_folder(tmp_path: Path) -> None:
    mine, theirs = tmp_path / "mine", torch_dist(tmp_path / "theirs", "dp")
    for load in (None, str(mine)):
        found = read(theirs, load=load, pretrained_checkpoint=str(theirs))
        assert (found.directory.parent, found.weights_only) == (theirs, True)
    found = read(torch_dist(mine, "dp"), pretrained_checkpoint=str(theirs))
    assert (found.directory.parent, found.weights_only) == (mine, False)


def test_newer_non_persistent_checkpoints_win(tmp_path: Path) -> None:
    base = torch_dist(tmp_path / "a", "dp")
    torch_dist(base / "non_persistent", "dp", tp=4)
    assert read(base).tensor_model_parallel_size == 1
    assert read(base, non_persistent_ckpt_type="global").tensor_model_parallel_size == 4
    (base / "iter_0000007").rename(base / "iter_0000008")
    (base / "latest_checkpointed_iteration.txt").write_text("8")
    assert read(base, non_persistent_ckpt_type="global").tensor_model_parallel_size == 1


def test_what_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="remote store"):
        read_checkpoint({"load": "msc://bucket/run"})
    folder = start(tmp_path / "a")
    deep = "[" * 100_000
    damaged = (("{", "not readable JSON"), (deep, "nested more"), ("[]", "be opened"))
    for config, said in (*damaged, ('{"sharded_backend": "zarr"}', "zarr")):
        (folder / "metadata.json").write_text(config)
        with pytest.raises(UserInputError, match=said):
            read(tmp_path / "a")
    for text in ("", "seven", "-1", "7.0", "7" * 5_000):
        (tmp_path / "a" / "latest_checkpointed_iteration.txt").write_text(text)
        with pytest.raises(UserInputError, match=r"latest_checkpointed_iteration\.txt = "):
            read(tmp_path / "a")
    local = {"non_persistent_ckpt_type": "local", "non_persistent_local_ckpt_dir": str(tmp_path)}
    assert read_checkpoint({"load": str(tmp_path), **local}) is None
    (tmp_path / "a" / "iter_0000007_local.pt").touch()
    with pytest.raises(UserInputError, match="--non-persistent-local-ckpt-dir"):
        read_checkpoint({"load": str(tmp_path), **local})


def test_a_distributed_checkpoint_is_read(tmp_path: Path) -> None:
    sizes = {"gbuf_idx_0.x.bucket_idx_0.param": (40,), "gbuf_idx_0.x.bucket_idx_1.param": (30,)}
    sizes |= {"gbuf_idx_0.x.bucket_idx_0.exp_avg": (900,), "gbuf_idx_1.bucket_idx_0.param": (65,)}
    saved = {"tp": 2, "pp": 2, "ep": 2, "num_layers": 6, "decoder_last_pipeline_num_layers": 2}
    keys: dict[str, Any] = {**sizes, "rng_state/shard_1.0.3_2.2.4": None}
    found = read(torch_dist(tmp_path / "a", "dp two", sizes=keys, **saved))
    assert (found.format, found.directory.name, found.num_optimizers) == (
        "torch_dist",
        "iter_0000007",
        2,
    )
    assert found.pipeline_model_parallel_layout == "Et*4|ttL"
    assert found.expert_tensor_parallel_size == 2
    assert found.virtual_pipeline_model_parallel_size == 1
    assert found.distrib_optim_sharding_type == "dp_reshardable"
    assert (found.largest_buffer, found.rng_shape) == (70, (2, 2, 4))


def test_the_newer_release_writes_no_common_file(tmp_path: Path) -> None:
    found = read(torch_dist(tmp_path / "a", "fully two", common=False, tp=2))
    assert (found.tensor_model_parallel_size, found.num_optimizers) == (2, 2)
    assert found.distrib_optim_sharding_type == "fully_reshardable"
    assert refusal(found, {"tp": 4}, NEW) == "loads"
    assert "no common.pt" in refusal(found, {"tp": 4}, OLD)


def test_a_damaged_file_leaves_the_optimizer_unknown(tmp_path: Path) -> None:
    base = torch_dist(tmp_path / "a", "fully", tp=2)
    (base / "iter_0000007" / "common.pt").write_bytes(b"PK\x03\x04 no archive")
    found = read(base)
    assert (found.tensor_model_parallel_size, found.arguments) == (1, {})  # as Megatron takes it
    said = refusal(found, {})
    assert said.startswith("use_distributed_optimizer = True: ")
    assert "cannot be read: its files are damaged. Load another iteration" in said
    assert refusal(found, {"tp": 8}, no_load_optim=True) == "loads"


def test_nothing_that_was_pickled_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = read(torch_dist(tmp_path / "a", "dp", tp=2, strange=Bomb()))
    assert found.tensor_model_parallel_size == 2
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb()))  # as a plain reader would
    assert (tmp_path / "ran").exists()


def test_fsdp_checkpoints_go_with_megatron_fsdp(tmp_path: Path) -> None:
    index(start(tmp_path / "a"), {}, {"args": arguments(tp=2, ckpt_format="fsdp_dtensor")})
    found, other = read(tmp_path / "a"), read(torch_dist(tmp_path / "b", "fully"))
    assert kept(found, num_experts=8) == {"fsdp": True}
    assert "use_megatron_fsdp = False" in refusal(found, {"tp": 2}, no_load_optim=True)
    assert "use_megatron_fsdp = True" in refusal(other, {"fsdp": True}, no_load_optim=True)
    assert [refusal(found, {"fsdp": True, "tp": tp, "ep": 8}) for tp in (1, 2)] == ["loads"] * 2
    wider = {"fsdp": True, "tp": 4}  # no rank saved the random state of TP rank 3
    assert "random states" in refusal(found, wider)
    for free in ({"no_load_rng": True}, {"finetune": True}, {"strict_fsdp_dtensor_load": False}):
        assert refusal(found, wider, **free) == "loads"


def test_formats_that_no_plan_loads(tmp_path: Path) -> None:
    folder = start(tmp_path / "a")
    for objects in ({"args": arguments(ckpt_format="torch_dcp")}, {}):  # else as the run says
        index(folder, {}, objects)
        found = read(tmp_path / "a", ckpt_format="fsdp_dtensor" if objects else "torch_dcp")
        assert "torch FSDP2" in refusal(found, {"fsdp": True})
    dist = read(torch_dist(tmp_path / "b", "fully"))
    old = read(legacy(tmp_path / "c", "mp_rank_00", tp=1))
    for name, said in (("torch", "--ckpt-format = 'torch'"), ("torch_dist", "loads")):
        assert refusal(old, {}, ckpt_format=name) == "loads"
        assert refusal(dist, {}, ckpt_format=name, auto_detect_ckpt_format=True).startswith(said)


def test_grouped_experts_have_other_names(tmp_path: Path) -> None:
    old = read(legacy(tmp_path / "a", "mp_rank_00", moe_grouped_gemm=False))
    assert "--moe-grouped-gemm = True" in refusal(old, {}, **EXPERTS)
    assert refusal(old, {}, transformer_impl="local", **EXPERTS) == "loads"
    assert refusal(old, {}) == "loads"
    dist = read(torch_dist(tmp_path / "b", "fully", moe_grouped_gemm=False))
    assert refusal(dist, {}, **EXPERTS) == "loads"


OF_0_20 = {"pp": 2, "num_layers": None, "hybrid_layer_pattern": "M*|MMEM*-", "num_experts": 4}
OF_0_16 = {"pp": 2, "hybrid_override_pattern": "M*MM-M*-", "is_hybrid_model": True}
#: State, saved arguments, plan, the run's values, release, what is refused.
TRIED: list[tuple[Any, ...]] = [
    ("fully", {"tp": 2}, {"dp": 2}, {}, OLD, "loads"),
    ("fully", {"pp": 2}, {"pp": 2, "vpp": 2, "layout": INTERLEAVED}, {}, NEW, "loads"),
    ("dp", {"tp": 2}, {}, {}, OLD, "tensor_model_parallel_size = 1"),
    ("dp", {"tp": 2}, {}, {"no_load_optim": True}, OLD, "loads"),
    ("dp", {"pp": 2}, {"pp": 2, "dp": 2, "layout": "Etttt|ttttL"}, {}, OLD, "loads"),
    ("dp", {"pp": 2}, {"pp": 2, "vpp": 2, "layout": INTERLEAVED}, {}, NEW, "virtual_pipeline"),
    ("dp", {"pp": 2}, {"pp": 2, "layout": UNEVEN}, {}, OLD, "pipeline_model_parallel_layout"),
    ("dp", {"dp": 50}, {"cp": 50}, {}, OLD, "loads"),
    ("dp", {"ddp_bucket_size": 20}, {}, {}, OLD, "--ddp-bucket-size"),
    ("dp", {"ddp_bucket_size": 20}, {}, {"ddp_bucket_size": 20}, OLD, "loads"),
    ("dp", {"overlap": False}, {}, {}, NEW, "--ddp-bucket-size"),
    ("dp", {"overlap": False, "numel": 1000, "dist": None}, {}, {}, OLD, "loads"),
    ("dp", {}, {"dist": False}, {}, OLD, "use_distributed_optimizer = False"),
    ("plain", {}, {}, {}, OLD, "use_distributed_optimizer = True"),
    ("plain", {"pp": 2}, {"tp": 2, "dist": False}, {}, OLD, "loads"),
    ("fully two", {"ep": 2}, {"ep": 4}, EXPERTS, OLD, "loads"),
    ("fully two", {"ep": 2}, {}, EXPERTS, OLD, "expert_model_parallel_size, expert_tensor"),
    ("fully", {}, {"ep": 2}, EXPERTS, NEW, "expert_model_parallel_size = 2"),
    ("fully", {"tp": 2}, {"tp": 2}, EXPERTS, NEW, "expert_model_parallel_size, expert_tensor"),
    ("fully two", {"tp": 2}, {"tp": 2}, EXPERTS, NEW, "loads"),  # 0.20 sets ETP 1 under TP 2 apart
    ("fully two", {"tp": 2}, {"tp": 2}, EXPERTS, OLD, "expert_model_parallel_size, expert_tensor"),
    ("dp two", {"ep": 2, "dp": 4}, {"ep": 4, "dp": 4}, EXPERTS, OLD, "expert_model_parallel_size"),
    ("legacy", WHOLE, {**WHOLE, "layout": EVEN, "dp": 8, "cp": 2}, WEIGHTS, OLD, "loads"),
    ("legacy", WHOLE, {**WHOLE, "layout": EVEN, "tp": 4}, WEIGHTS, OLD, "tensor_model_parallel"),
    ("legacy", WHOLE, {"tp": 2}, WEIGHTS, NEW, "pipeline_model_parallel_size = 1"),
    ("legacy", WHOLE, {**WHOLE, "vpp": 2, "layout": INTERLEAVED}, WEIGHTS, OLD, "virtual_pipeline"),
    ("legacy", WHOLE, {**WHOLE, "layout": UNEVEN}, WEIGHTS, NEW, "pipeline_model_parallel_layout"),
    # read in the code, not run:
    ("dp", OF_0_20, {"pp": 2, "layout": "M*|MMEM*-"}, {}, NEW, "loads"),
    ("dp", OF_0_20, {"pp": 2, "layout": "M*MM|EM*-"}, {}, NEW, "pipeline_model_parallel_layout"),
    ("dp", OF_0_16, {"pp": 2, "layout": "M*MM|-M*-"}, {}, OLD, "loads"),
    ("dp", OF_0_16, {"pp": 2, "layout": "M*|MM-M*-"}, {}, OLD, "pipeline_model_parallel_layout"),
    ("dp", {"tp": 2, "no_save_optim": True}, {}, {}, OLD, "loads"),
    ("dp", {"dp": 40}, {"dp": 41}, {}, OLD, "--ddp-bucket-size = 41000000"),
    ("dp", {"dp": 40, "ddp_num_buckets": 5}, {"dp": 80}, {}, OLD, "loads"),
    ("", {"ckpt_fully_parallel_save": True}, {}, {}, OLD, "distrib_optim_sharding_type = 'fully_s"),
    ("", {"ckpt_fully_parallel_save": False, "tp": 2}, {}, {}, OLD, "tensor_model_parallel_size"),
    ("", {"ckpt_fully_parallel_save": False}, {"dp": 80}, {}, OLD, "loads"),
    ("", {"dist": False, "tp": 2}, {"dist": False}, {}, OLD, "loads"),
    ("zero", {"pp": 2}, {}, {}, NEW, "pipeline_model_parallel_size = 1"),
]


@pytest.mark.parametrize("case", TRIED, ids=repr)
def test_what_megatron_does(tmp_path: Path, case: tuple[Any, ...]) -> None:
    kind, saved, plan, values, version, said = case
    make, way_out = torch_dist, "--no-load-optim to start the optimizer afresh."
    if kind == "legacy":
        make, way_out = legacy, "--ckpt-convert-format torch_dist."
    found = refusal(read(make(tmp_path / "a", kind, **saved)), plan, version, **values)
    assert found.startswith(said)
    assert said == "loads" or found.endswith(way_out)


RANDOM: list[tuple[Any, ...]] = [
    ("0.0.0_1.1.4", {"ep": 2, "dp": 4}, OLD, True),
    ("0.0.0_1.1.4", {"ep": 2, "dp": 2, "cp": 2}, OLD, True),
    ("0.0.0_1.1.4", {"ep": 4, "dp": 8}, OLD, False),
    ("0.0.0_1.1.4", {"ep": 2, "dp": 4}, NEW, False),
    ("0.0.0_1.1.4", {"ep": 2, "dp": 8, "tp": 2}, OLD, True),  # read: asked for with TP as saved
    ("0.0_1.1", {"ep": 2, "dp": 4}, OLD, False),
    ("0.0_1.1", {"ep": 2, "dp": 8}, NEW, True),
    ("0.0_1.1", {"dp": 16}, OLD, True),
]


@pytest.mark.parametrize("case", RANDOM, ids=repr)
def test_random_states_are_cut_by_the_release(tmp_path: Path, case: tuple[Any, ...]) -> None:
    shape, plan, version, loads = case
    base = torch_dist(tmp_path / "a", "fully", sizes={f"rng_state/shard_{shape}": None})
    found = refusal(read(base), plan, version, no_load_optim=True)
    assert (found == "loads") is loads
    assert loads or ("random states" in found and "Add --no-load-rng" in found)
    assert refusal(read(base), plan, version, no_load_optim=True, no_load_rng=True) == "loads"


NAMES: list[tuple[Any, ...]] = [
    ("mp_rank_00 mp_rank_03", None, (4, 1, 1)),
    ("mp_rank_00_000 mp_rank_01_002", None, (2, 3, 1)),
    ("mp_rank_00_000_000 mp_rank_01_002_007", 8, (2, 3, 8)),
    ("mp_rank_00_000 mp_rank_01_002", 8, (2, None, None)),  # stages, or experts
]


@pytest.mark.parametrize("case", NAMES, ids=repr)
def test_folder_names_stand_in_for_a_damaged_file(tmp_path: Path, case: tuple[Any, ...]) -> None:
    names, experts, expected = case
    found = read(legacy(tmp_path / "a", names), num_experts=experts)
    sizes = (found.tensor_model_parallel_size, found.pipeline_model_parallel_size)
    assert (*sizes, found.expert_model_parallel_size) == expected
    assert "its files are damaged" in refusal(found, {"tp": sizes[0]})


def test_what_the_search_is_told(tmp_path: Path) -> None:
    free, stages = {"fsdp": False, "dist": True}, {"tp": 2, "pp": 2, "vpp": 1, "layout": EVEN}
    assert kept(read(torch_dist(tmp_path / "a", "fully", tp=2))) == free
    saved = read(torch_dist(tmp_path / "b", "dp two", tp=2, pp=2, ep=4, etp=1))
    assert kept(saved) == {**free, **stages}
    assert kept(saved, num_experts=8) == {**free, **stages, "ep": 4, "etp": 1}
    assert kept(saved, no_load_optim=True, num_experts=8) == {"fsdp": False}
    assert kept(read(torch_dist(tmp_path / "c", "zero", tp=2))) == {**free, "tp": 2, "pp": 1}
    joint = read(torch_dist(tmp_path / "d", "plain", tp=2))
    assert kept(joint) == {**free, "dist": False}
    assert kept(joint, num_experts=8) == {**free, "dist": False, "ep": 1}
    old = read(legacy(tmp_path / "e", "", tp=2, pp=2, vpp=2, ep=4, dist=False))
    whole = {**stages, "vpp": 2, "layout": INTERLEAVED, "ep": 4, "etp": 2}
    assert kept(old, num_experts=8) == {**free, "dist": False, **whole}
    assert kept(old, num_experts=8, finetune=True) == {"fsdp": False, **whole}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_files_of_torch_itself_are_read(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import torch.distributed.checkpoint as dcp

    args = arguments(tp=4, params_dtype=torch.bfloat16, ckpt_format="fsdp_dtensor")
    folder = torch_dist(tmp_path / "a", "dp") / "iter_0000007"
    optimizer = {0: {"w": torch.ones(3)}, 1: {}}
    torch.save({"args": args, "optimizer": optimizer}, folder / "common.pt")
    tensors = {"gbuf.bucket_idx_0.param": torch.ones(70), "rng_state/shard_0.0_1.4": BytesIO(b"x")}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    found = read(tmp_path / "a")
    assert (found.tensor_model_parallel_size, found.num_optimizers) == (4, 2)
    assert (found.largest_buffer, found.rng_shape) == (70, (1, 4))
    dcp.save({"args": args, "w": torch.ones(2)}, checkpoint_id=start(tmp_path / "b"), no_dist=True)
    found = read(tmp_path / "b")
    assert (found.format, found.tensor_model_parallel_size) == ("fsdp_dtensor", 4)
