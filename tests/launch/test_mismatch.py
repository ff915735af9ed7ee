"""``nest.on_mismatch``: the table of docs/launching.md, each of its rows run."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron.cluster.discovery import LocalGpus
from nest_megatron.config import defaults
from nest_megatron.config import policy as policies
from nest_megatron.config.launch import read_launch, read_words
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm import launch as pinning
from nest_megatron.integrations.megatron_lm.launch import pinned_plan
from nest_megatron.integrations.megatron_lm.planning import LaunchPlan
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.policy import OnMismatch, PolicyError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner.pins import Pin, PinnedPlan, read_pinned, write_pinned
from nest_megatron.report.failure import NothingFitsError
from nest_megatron.version import __version__
from tests.launch.jobs import decided, job_argv, namespace, pad_like_megatron, running

DOCS = Path(__file__).resolve().parents[2] / "docs" / "launching.md"
SPEC = TransformerSpec(
    name="small",
    num_layers=8,
    hidden_size=1024,
    ffn_hidden_size=4096,
    num_attention_heads=8,
    seq_length=1024,
    vocab_size=32000,
)
ARGV = job_argv(SPEC, "--global-batch-size", "48")
#: What the plan is made with, and what a search for this job does not choose.
DEGREES = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
H100 = LocalGpus(device_name="NVIDIA H100 80GB HBM3", memory_bytes=85520809984, count=8)
A100 = LocalGpus(device_name="NVIDIA A100-SXM4-80GB", memory_bytes=85899345920, count=8)


@dataclasses.dataclass(frozen=True)
class Case:
    """A launch on 16 GPUs in hosts of 8, as the plan was made for, but for what is said."""

    world_size: int = 16
    gpus: LocalGpus = H100
    per_host: int = 8
    words: str = ""
    argv: tuple[str, ...] = ()
    pin: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, float] = dataclasses.field(default_factory=dict)


def with_memory(gib: int) -> Case:
    """GPUs of the same name that hold another number of bytes, on a cluster that says so."""
    size = gib << 30
    words = f"nest.cluster=dgx_h100 nest.cluster.accelerator.memory_bytes={size}"
    return Case(gpus=dataclasses.replace(H100, memory_bytes=size), words=words)


#: The rows of the document, by their first cells.
CASES = {
    "nothing": Case(),
    "fewer nodes": Case(world_size=8),
    "more nodes": Case(world_size=24),
    "nodes over which the replicas cannot be spread": Case(world_size=40),
    "GPUs of each host": Case(per_host=4),
    "another kind of GPU": Case(gpus=A100),
    "less memory on the GPU": with_memory(40),
    "far less memory on the GPU": with_memory(1),
    "more memory on the GPU": with_memory(160),
    "another network, of a named cluster": Case(words="nest.cluster=h100_spine_leaf"),
    "another release of Megatron-LM": Case(pin={"megatron_lm": "0.20"}),
    "another nest-megatron": Case(pin={"nest_megatron_version": "0.0.9"}),
    "flags that take more memory": Case(settings={"traits.gradient_bytes": 2.0}),
    "the model": Case(argv=("--num-layers", "6")),
    "the batch": Case(argv=("--global-batch-size", "96")),
    "the precision": Case(argv=("--fp16",)),
}


def documented() -> dict[str, dict[OnMismatch, str]]:
    """The cells of the document's table, by row and policy."""
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \| (.*?) \|$", DOCS.read_text("utf-8"), re.M)
    head = next(n for n, row in enumerate(rows) if row[1:] == tuple(map("`{}`".format, OnMismatch)))
    found = {row[0]: dict(zip(OnMismatch, row[1:], strict=True)) for row in rows[head + 1 :]}
    return {name: found[name] for name in found if name in CASES}


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    with pytest.MonkeyPatch.context() as patch:
        pad_like_megatron(patch)
        _, _, outcome = decided([*ARGV, *DEGREES], world_size=16)
    return outcome.decision.plan


def pinned_file(plan: ParallelPlan, folder: Path, case: Case) -> Path:
    pin = Pin(
        created="2026-01-02",
        by="ada",
        note="",
        nest_megatron_version=__version__,
        megatron_lm="0.16",
    )
    settings = {**plan.provenance.settings, **case.settings}
    made = dataclasses.replace(plan.provenance, settings=settings)
    plan = dataclasses.replace(plan, provenance=made)
    path = folder / "pinned.yaml"
    content = PinnedPlan(pin=dataclasses.replace(pin, **case.pin), plan=plan)
    write_pinned(content, path)
    return path


def launch(
    path: Path, case: Case, policy: str | None, patch: pytest.MonkeyPatch, *argv: str
) -> LaunchPlan:
    pad_like_megatron(patch)
    patch.setenv("LOCAL_WORLD_SIZE", str(case.per_host))
    patch.setattr(pinning, "local_gpus", lambda: case.gpus)
    patch.setattr("nest_megatron.config.cluster_detection.local_gpus", lambda: case.gpus)
    typed = [word for word in ARGV if not (word == "--bf16" and "--fp16" in case.argv)]
    flags = [*typed, *case.argv, *argv]
    words = read_words(["+nest=pinned", f"nest.plan={path}", *case.words.split()])
    settings = dataclasses.replace(read_launch(words), on_mismatch=policy)
    args = namespace(flags, world_size=case.world_size)
    launched = LaunchedJob(
        words=words, launch=settings, script="pretrain_gpt.py", argv=tuple(flags), args=args
    )
    return pinned_plan(launched, running(args, flags))


def outcome_of(launched: LaunchPlan, plan: ParallelPlan) -> str:
    found = launched.decision.plan
    notes = [note for note in launched.notes if "takes its place" in note]
    if not notes:
        assert (found.layout, found.placement) == (plan.layout, plan.placement)
        return "pinned"
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_layout")
    kept = all(found.arguments[name] == plan.arguments[name] for name in sizes)
    policy = "nearest" if kept else "replan"
    assert f"nest.on_mismatch={policy}" in notes[0]
    assert found.provenance.made_by == f"+nest=pinned nest.on_mismatch={policy}"
    return "kept" if kept else "searched"


#: The beginnings of the document's cells.
SAID = {"the pinned plan": "pinned", "ends": "ends", "its layout": "kept", "searched": "searched"}


@pytest.mark.parametrize("policy", OnMismatch)
@pytest.mark.parametrize("row", CASES)
def test_each_row_of_the_document(
    row: str,
    policy: OnMismatch,
    plan: ParallelPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = pinned_file(plan, tmp_path, CASES[row])
    try:
        found = outcome_of(launch(path, CASES[row], policy, monkeypatch), read_pinned(path).plan)
    except NestError:
        found = "ends"
    cell = documented()[row][policy]
    assert found == next(word for text, word in SAID.items() if cell.startswith(text)), row


def test_the_document_has_every_row() -> None:
    assert list(documented()) == list(CASES)


def test_an_error_names_what_differs_and_both_ways_out(
    plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pinned_file(plan, tmp_path, Case())
    with pytest.raises(UserInputError) as caught:
        launch(path, Case(world_size=8), "refuse", monkeypatch)
    assert "number of GPUs is 8, pinned 16" in str(caught.value)
    assert "nest.on_mismatch=nearest or replan" in str(caught.value)
    with pytest.raises(UserInputError) as caught:
        launch(path, CASES["the batch"], "replan", monkeypatch)
    assert "nest.on_mismatch" not in str(caught.value)


@pytest.mark.parametrize(
    ("rules", "asked", "outcome"),
    [
        ([{}], None, "ends"),
        ([{"on_mismatch": ["nearest"]}], None, "kept"),
        ([{"on_mismatch": ["replan", "refuse"]}], None, "searched"),
        ([{"on_mismatch": ["replan", "refuse"]}], "refuse", "ends"),
        ([{"on_mismatch": ["nearest", "refuse"]}, {"on_mismatch": ["refuse"]}], None, "ends"),
        ([{"pinned_only": True}], None, "ends"),
    ],
)
def test_a_policy_says_what_happens_where_a_job_does_not(
    rules: list[dict[str, Any]],
    asked: str | None,
    outcome: str,
    plan: ParallelPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy_files(tmp_path, monkeypatch, *rules)
    path = pinned_file(plan, tmp_path, Case())
    try:
        found = outcome_of(launch(path, Case(world_size=8), asked, monkeypatch), plan)
    except UserInputError:
        found = "ends"
    assert found == outcome


@pytest.mark.parametrize(
    ("rules", "asked", "said"),
    [
        ([{"on_mismatch": ["refuse", "nearest"]}], "replan", "it is refuse or nearest"),
        ([{"pinned_only": True}], "nearest", "it is refuse (launch.pinned_only"),
        (
            [{"on_mismatch": ["nearest"]}, {"on_mismatch": ["replan"]}],
            None,
            "other rules allow nearest alone",
        ),
    ],
)
def test_what_a_policy_forbids_ends_the_job_although_nothing_differs(
    rules: list[dict[str, Any]],
    asked: str | None,
    said: str,
    plan: ParallelPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy_files(tmp_path, monkeypatch, *rules)
    with pytest.raises(PolicyError, match=re.escape(said)):
        launch(pinned_file(plan, tmp_path, Case()), Case(), asked, monkeypatch)


def test_no_error_proposes_what_a_policy_forbids(
    plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy_files(tmp_path, monkeypatch, {"on_mismatch": ["refuse", "nearest"]})
    path = pinned_file(plan, tmp_path, Case())
    with pytest.raises(UserInputError, match=r"on_mismatch=nearest has another") as caught:
        launch(path, Case(world_size=8), None, monkeypatch)
    assert "replan" not in str(caught.value)
    with pytest.raises(UserInputError, match=r"or pin a plan for these machines") as caught:
        launch(path, Case(world_size=40), "nearest", monkeypatch)
    assert "replan" not in str(caught.value)


def policy_files(folder: Path, patch: pytest.MonkeyPatch, *rules: Mapping[str, Any]) -> None:
    """The operators' rules of launches, and those of another file."""
    patch.setattr(defaults, "SYSTEM_FOLDER", folder / "etc")
    for path, launches in zip(
        (folder / "etc" / "policy.yaml", folder / "more.yaml"), rules, strict=False
    ):
        path.parent.mkdir(exist_ok=True)
        path.write_text(yaml.safe_dump({"launch": dict(launches)}), encoding="utf-8")
        if path.name == "more.yaml":
            patch.setenv(policies.VARIABLE, str(path))


def test_where_replicas_do_not_spread_the_most_ranks_below_are_named(
    plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pinned_file(plan, tmp_path, Case())
    with pytest.raises(UserInputError, match="Start 32 ranks, the most below 40"):
        launch(path, Case(world_size=40), "nearest", monkeypatch)


@pytest.mark.parametrize("policy", ["nearest", "replan"])
def test_where_nothing_fits_the_missing_bytes_are_named(
    policy: str, plan: ParallelPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["far less memory on the GPU"]
    with pytest.raises(NothingFitsError, match="GiB"):
        launch(pinned_file(plan, tmp_path, case), case, policy, monkeypatch)


@pytest.mark.parametrize(
    ("word", "policy", "is_refused"),
    [
        ("nest.free=[all]", None, True),
        ("nest.free=[all]", "nearest", True),
        ("nest.free=[all]", "replan", False),
        ("nest.parallel.zero_stage=1", None, True),
        ("nest.memory.margin=0.1", "nearest", False),
    ],
)
def test_what_a_pinned_plan_does_not_follow_is_refused(
    word: str,
    policy: str | None,
    is_refused: bool,
    plan: ParallelPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, case = pinned_file(plan, tmp_path, Case()), Case(words=word)
    if not is_refused:
        assert outcome_of(launch(path, case, policy, monkeypatch), plan) == "pinned"
        return
    with pytest.raises(UserInputError, match="nest=pinned launches the plan as it was") as caught:
        launch(path, case, policy, monkeypatch)
    assert caught.value.what == word.partition("=")[0]
    policy_files(tmp_path, monkeypatch, {"on_mismatch": ["refuse", "nearest"]})
    with pytest.raises(UserInputError) as caught:
        launch(path, case, policy, monkeypatch)
    assert "replan" not in str(caught.value)


def test_an_unknown_policy_is_refused() -> None:
    words = read_words(["+nest=pinned", "nest.on_mismatch=nearst"])
    with pytest.raises(UserInputError, match=r"nest\.on_mismatch = 'nearst'.*Did you mean nearest"):
        read_launch(words)
