"""What a form asks for, without a browser."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nest_megatron.app.task import (
    BATCH,
    CLUSTER,
    CLUSTER_FILE,
    COMMAND,
    FREE,
    GPUS,
    MODEL,
    MODEL_FILE,
    RELEASE,
    SETTINGS,
    Answer,
    MistakesError,
    Task,
    Work,
)
from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.errors import UserInputError
from nest_megatron.layout import plan_file
from nest_megatron.report.failure import NothingFitsError
from nest_megatron.research.comparison import PLANNERS
from tests.integrations.commands import LLAMA3_8B

CONFIG = {
    **{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000},
    **{"num_attention_heads": 8, "intermediate_size": 4096, "max_position_embeddings": 2048},
}
SMALL = {"cluster": "dgx_h100", "num_gpus": "8", "global_batch_size": "64"}


def answer(work: Work = Work.PLAN, **fields: object) -> Answer:
    return Task(work=work, **{**SMALL, **fields}).answer()


@pytest.fixture(scope="module")
def planned() -> Answer:
    return answer(model="llama3_8b")


def test_a_plan_has_its_text_its_page_and_its_file(planned: Answer) -> None:
    assert not planned.is_error
    plan = plan_file.load(planned.plan_file)
    assert (plan.layout.num_gpus, plan.layout.global_batch_size) == (8, 64)
    assert planned.text.startswith("llama3_8b on 8 x H100")
    assert "torchrun" in planned.page
    assert "default-src 'none'" in planned.page


def test_contents_and_paths_are_models_and_clusters(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps(CONFIG), encoding="utf-8")
    cluster = catalogue_root().joinpath("cluster", "dgx_h100.yaml").read_text(encoding="utf-8")
    for model in (json.dumps(CONFIG), str(path)):
        found = answer(Work.ESTIMATE, model=model, cluster=cluster)
        assert plan_file.load(found.plan_file).model.num_layers == 8


def test_a_command_is_planned_beside_what_it_runs() -> None:
    found = answer(command=LLAMA3_8B, free="all", num_gpus="16", global_batch_size="")
    assert re.search(r"Step +\S+ s -> \S+ s", found.text)
    own = answer(Work.ESTIMATE, command=LLAMA3_8B, num_gpus="16", global_batch_size="")
    assert not own.is_error
    assert "->" not in own.text


def test_a_flag_that_megatron_lacks_is_named() -> None:
    command = f"{LLAMA3_8B} --frobnicate 3"
    found = answer(Work.ESTIMATE, command=command, num_gpus="16", global_batch_size="")
    assert "Megatron 0.19 has no flag --frobnicate; it is passed on as it is." in found.text


def test_a_sweep_has_a_row_for_each_change(planned: Answer) -> None:
    told: list[str] = []
    task = Task(work=Work.WHATIF, plan_file=planned.plan_file, changes="memory=141GiB")
    found = task.answer(on_part=told.append)
    changed = "cluster.accelerator.memory_bytes=141GiB"
    assert told == ["planning 1 of 2: unchanged", f"planning 2 of 2: {changed}"]
    assert "unchanged" in found.text
    assert "141GiB" in found.text
    assert "A cell is the darker the larger its share of the most" in found.page


@pytest.mark.slow
def test_a_sweep_of_a_command_says_what_runs_today_there() -> None:
    job = {"command": LLAMA3_8B, "free": "micro_batch_size", "num_gpus": "16"}
    found = answer(Work.WHATIF, **job, global_batch_size="", changes="memory=80GiB,141GiB")
    assert "141GiB" in found.text


def test_several_numbers_of_gpus_have_a_table_and_their_plans() -> None:
    told: list[str] = []
    task = Task(work=Work.SIZES, model="llama3_8b", **{**SMALL, "num_gpus": "8..16:4"})
    found = task.answer(on_part=told.append)
    assert told == [f"planning for {size} GPUs" for size in (8, 12, 16)]
    assert "job takes" in found.text  # whole nodes, and 12 is one and a half
    assert list(found.plans) == [8, 16]
    assert len(found.table.splitlines()) == 4
    shown = answer(Work.SHOW, model="llama3_8b", plan_file=found.plans[16])
    assert plan_file.load(shown.plan_file).layout.num_gpus == 16
    assert "torchrun" in shown.page


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"num_gpus": "16..8"}, "GPUs"),
        ({"settings": "cluster.num_gpus=8"}, f"{SETTINGS}: cluster.num_gpus=8: it is given twice"),
        ({"command": LLAMA3_8B}, COMMAND),
        ({"command": LLAMA3_8B, "work": Work.PLANNERS}, COMMAND),
    ],
)
def test_what_is_not_asked_of_several_is_said(fields: dict[str, object], what: str) -> None:
    asked = {**SMALL, "work": Work.SIZES, "model": "llama3_8b", "num_gpus": "8..16", **fields}
    with pytest.raises((UserInputError, MistakesError), match=what):
        Task(**asked).answer()  # type: ignore[arg-type]


def test_planners_are_compared_on_the_page_of_compare() -> None:
    told: list[str] = []
    task = Task(work=Work.PLANNERS, model="gpt3_126m", **SMALL)
    found = task.answer(on_part=told.append)
    assert told == [f"planning: {name}" for name in PLANNERS]
    assert "Why each is where it is" in found.text
    assert "default-src 'none'" in found.page


def test_settings_are_those_of_the_command_line() -> None:
    lines = "\n parallel.tensor_model_parallel_size = 2\n\ncluster.levels.node.latency=2us\n"
    assert Task(work=Work.PLAN, num_gpus=" 16 ", settings=lines).keywords() == {
        "cluster.num_gpus": "16",
        "parallel.tensor_model_parallel_size": "2",
        "cluster.levels.node.latency": "2us",
    }


def test_settings_without_a_section_are_taken_and_changes_are_given_once() -> None:
    found = answer(model="llama3_8b", settings="target=nemo_2.7", work=Work.ESTIMATE)
    assert "The plan is for NeMo" in found.text
    planned = answer(model="llama3_8b").plan_file
    task = Task(work=Work.WHATIF, plan_file=planned, changes="gpus=16 gpus=32")
    with pytest.raises(UserInputError, match="it is given twice"):
        task.answer()


@pytest.mark.parametrize(
    ("fields", "label", "said"),
    [
        ({"settings": "tensor 8"}, SETTINGS, "section.key=value"),
        ({"settings": "targett=nemo_2.7"}, SETTINGS, "Did you mean target"),
        ({"num_gpus": "8,16"}, GPUS, "it is one number"),
        ({"settings": "model=llama3_70b"}, SETTINGS, "section.key=value"),
        ({"settings": "cluster.num_gpus=16"}, SETTINGS, "given twice"),
        ({"settings": "gpus=16"}, SETTINGS, "given twice"),
        ({"settings": "parallel.tensor=8"}, SETTINGS, "no such setting"),
        ({"num_gpus": "some"}, GPUS, "some"),
        ({"num_gpus": "8..4", "work": Work.SIZES}, GPUS, "8..4"),
        ({"global_batch_size": "9000000000"}, BATCH, "9000000000: it is implausible"),
        ({"model": "llama9"}, MODEL, "no such model in the catalogue"),
        ({"model": "./missing.json"}, MODEL_FILE, "cannot be read"),
        ({"model": '{"model_type": '}, MODEL_FILE, "JSON"),
        ({"model": ""}, "Model or command", "neither is given"),
        ({"command": "train.sh '--bf16"}, COMMAND, "quot"),
        ({"command": LLAMA3_8B, "megatron_version": "0.1"}, RELEASE, "oldest release"),
        ({"cluster": "dgx"}, CLUSTER, "no such cluster in the catalogue"),
        ({"cluster": "x: ${oc.env:HOME}\ny: 1"}, CLUSTER_FILE, "calls a resolver"),
        (
            {"model": json.dumps({**CONFIG, "hidden_size": "4096"})},
            MODEL_FILE,
            'config.json: hidden_size = "4096": it must be a whole number',
        ),
        (
            {"cluster": "name: c\nnum_gpus: 8\nfoo: 5"},
            CLUSTER_FILE,
            "cluster c: foo = 5: there is no such field",
        ),
    ],
)
def test_what_is_wrong_is_named_by_the_label_of_its_field(
    fields: dict[str, str], label: str, said: str
) -> None:
    with pytest.raises(MistakesError) as raised:
        answer(**{"model": "llama3_8b", **fields})
    (text,) = raised.value.texts.values()
    assert list(raised.value.texts) == [label]
    assert said in text
    assert str(raised.value) == f"{label}: {text}"
    assert "/nest-megatron-app-" not in text


def test_settings_that_need_each_other_are_no_mistakes() -> None:
    lines = ["num_attention_heads=12", "hidden_size=3072", "num_query_groups=4"]
    settings = "\n".join(f"model.{line}" for line in lines)
    assert answer(Work.ESTIMATE, model="llama3_8b", settings=settings).page
    with pytest.raises(MistakesError, match=f"{SETTINGS}: model.num_attention_heads=12: "):
        answer(Work.ESTIMATE, model="llama3_8b", settings=settings.partition("\n")[0])


def test_everything_that_is_wrong_is_told_at_once() -> None:
    wrong = {"model": "llama9", "cluster": "./none.yaml", "num_gpus": "13x"}
    settings = "parallel.tensor=8\ncluster.levels.node.latency=2s\ntrain.precision=bf16"
    with pytest.raises(MistakesError) as raised:
        answer(**wrong, global_batch_size="0", settings=settings)
    assert list(raised.value.texts) == [MODEL, CLUSTER_FILE, GPUS, BATCH, SETTINGS]
    head, *lines = str(raised.value).splitlines()
    assert head == "6 entries of the form cannot be used."
    assert [line.strip().partition(":")[0] for line in lines[:4]] == [
        *(MODEL, "Or a cluster file", GPUS, BATCH)
    ]
    assert "parallel.tensor=8: there is no such setting" in lines[4]
    assert "cluster.levels.node.latency=2s: it is implausible" in lines[5]


@pytest.mark.parametrize(
    ("fields", "what", "limit"),
    [
        ({"command": "bash missing.sh"}, "script", "no such file"),
        ({"command": LLAMA3_8B, "free": "tensor"}, FREE, "no flag"),
    ],
)
def test_what_a_command_is_refused_for_is_named_with_its_limit(
    fields: dict[str, str], what: str, limit: str
) -> None:
    with pytest.raises(UserInputError) as raised:
        answer(**{"model": "llama3_8b", **fields})
    assert raised.value.what == what
    assert limit in raised.value.limit
    assert raised.value.fix


def test_a_model_that_does_not_fit_is_no_mistake() -> None:
    with pytest.raises(NothingFitsError):
        answer(model="llama3_70b", settings="cluster.accelerator.memory=16GiB")


@pytest.mark.parametrize(
    "fields",
    [
        {"model": "/etc/passwd"},
        {"model": "./config.json"},
        {"model": "~/config.json"},
        {"model": "config.json"},
        {"model": json.dumps(CONFIG)},
        {"cluster": "mine.yaml"},
        {"cluster": "defaults:\n- /accelerator@accelerator: ../../secret\n"},
        {"model": "", "command": LLAMA3_8B},
        {"model": "", "command": "bash train.sh"},
        {"settings": "train.sequence_lengths=lengths.txt"},
        {"settings": "profile.name=/home/other/profile"},
        {"settings": "cluster.name=a/b"},
        {"settings": "cluster.num_gpus=8\nout=plan.yaml"},
        {"work": Work.WHATIF, "changes": "cluster=./mine.yaml"},
        {"work": Work.WHATIF, "changes": "gpus=8,16 hydra/launcher=joblib"},
    ],
    ids=str,
)
def test_over_the_network_nothing_names_a_file(fields: dict[str, object]) -> None:
    fields = {"work": Work.PLAN, "model": "llama3_8b", **fields}
    with pytest.raises(MistakesError, match="whoever reaches this page"):
        answer(**fields, is_local=False)


def test_over_the_network_names_and_numbers_are_planned() -> None:
    settings = "parallel.tensor_model_parallel_size=2\ncluster.levels.node.bandwidth=300GB/s"
    asked = {"model": "llama3_8b", "settings": settings, "is_local": False}
    assert answer(Work.ESTIMATE, **asked).page
