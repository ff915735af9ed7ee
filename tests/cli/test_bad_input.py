"""A mistake ends in two lines that name the value, the limit and the fix; never in a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from nest_megatron import cli
from nest_megatron.config.compose import compose
from nest_megatron.config.keywords import read_layout
from nest_megatron.config.overrides import parse
from nest_megatron.errors import INTERRUPTED, UserInputError, settings_typed_as
from tests.cli.runs import SMALL, interrupted, run

LLAMA = ("plan", *SMALL)
WITHOUT_MODEL = ("plan", "cluster=dgx_h100")

# Arguments, and words that the message must hold.
BAD = {
    "unknown model": (("plan", "model=lama3_70b", "cluster=dgx_h100"), "llama3_70b"),
    "unknown cluster": (("plan", "model=llama3_8b", "cluster=dgx_h10"), "dgx_h100"),
    "unknown accelerator": ((*LLAMA, "cluster.accelerator=h100"), "h100_sxm_80gb"),
    "empty model": (("plan", "model=", "cluster=dgx_h100"), "it is empty"),
    "empty cluster": (("plan", "model=llama3_8b", "cluster=''"), "it is empty"),
    "empty accelerator": ((*LLAMA, "cluster.accelerator="), "it is empty"),
    "no model": (WITHOUT_MODEL, "model=llama3_70b"),
    "no cluster": (("plan", "model=llama3_8b"), "cluster=dgx_h100"),
    "removed cluster": (
        ("plan", "model=llama3_8b", "cluster=h100_spine_leaf", "~cluster"),
        "cluster=dgx_h100",
    ),
    "a bare name": (("plan", "llama3_70b"), "model=llama3_70b"),
    "broken nodes": ((*LLAMA, "cluster.num_gpus=100"), "96 or 104"),
    "negative bandwidth": ((*LLAMA, "cluster.levels.0.bandwidth_bytes_per_s=-4"), "above 0"),
    "nan latency": ((*LLAMA, "cluster.levels.0.latency_s=nan"), "finite"),
    "yaml nan": ((*LLAMA, "cluster.levels.0.latency_s=.nan"), "number"),
    "no such level": ((*LLAMA, "cluster.levels.9.latency_s=1"), "no such entry"),
    "no number of GPUs": ((*LLAMA, "cluster.num_gpus=many"), "Correct this value of the cluster."),
    "unknown cluster field": ((*LLAMA, "cluster.num_gpu=8"), "num_gpus"),
    "unknown model field": ((*LLAMA, "model.num_layrs=8"), "num_layers"),
    "unknown setting": ((*LLAMA, "train.micro_batch=1"), "train.micro_batch_size"),
    "wrong section": ((*LLAMA, "parallel.micro_batch_size=1"), "train.micro_batch_size"),
    "unknown section": ((*LLAMA, "traim.precision=bf16"), "train.precision"),
    "hydra's own keys": ((*LLAMA, "hydra.run.dir=/tmp"), "no such setting"),
    "no margin": ((*LLAMA, "memory.margin=nan"), "memory.margin"),
    "no reserve": ((*LLAMA, "memory.reserve_bytes=-1"), "memory.reserve_bytes"),
    "not a number": ((*LLAMA, "train.micro_batch_size=abc"), "abc"),
    "no list": ((*LLAMA, "search.keep={}"), "it must be a list, [A,B]"),
    "no list of levels": ((*LLAMA, "cluster.levels={}"), "it must be a list, [A,B]"),
    "half a sequence": ((*LLAMA, "train.micro_batch_size=2.5"), "it must be a whole number"),
    "no sequence": ((*LLAMA, "train.micro_batch_size=0"), "at least 1"),
    "negative batch": ((*LLAMA, "train.global_batch_size=-8"), "at least 1"),
    "indivisible batch": (
        (*LLAMA, "train.global_batch_size=7", "parallel.data_parallel_size=4"),
        "must divide the global batch of 7",
    ),
    "indivisible GPUs": ((*LLAMA, "parallel.tensor_model_parallel_size=3"), "divide the 8 GPUs"),
    "negative degree": ((*LLAMA, "parallel.tensor_model_parallel_size=-2"), "at least 1"),
    "nan seconds": ((*LLAMA, "search.max_seconds=nan"), "above 0"),
    "no time": ((*LLAMA, "search.max_seconds=0"), "above 0"),
    "negative runners-up": ((*LLAMA, "search.num_alternatives=-1"), "at least 0"),
    "unknown backend": ((*LLAMA, "search.backend=gpu"), "kernel, reference"),
    "nan assumption": ((*LLAMA, "cost.dp_overlap=nan"), "between 0 and 1"),
    "full margin": ((*LLAMA, "memory.margin=1.0"), "between"),
    "unknown precision": ((*LLAMA, "train.precision=bf17"), "bf16"),
    "a recipe of fp8": ((*LLAMA, "train.precision=mxfp8"), "train.fp8_recipe=mxfp8"),
    "a format by its recipe": (
        (*LLAMA, "train.precision=fp8_blockwise"),
        "train.precision=fp8 train.fp8_recipe=blockwise",
    ),
    "a recipe without fp8": ((*LLAMA, "train.fp8_recipe=mxfp8"), "train.precision=fp8"),
    "a field of no model": ((*WITHOUT_MODEL, "model.num_layers=3"), "model=NAME"),
    "unknown order": ((*LLAMA, "parallel.rank_order=dp"), "tp-cp-ep-dp-pp"),
    "experts of a dense model": (
        (*LLAMA, "parallel.expert_tensor_parallel_size=2"),
        "llama3_8b has no experts",
    ),
    "zero stage 4": ((*LLAMA, "parallel.zero_stage=4"), "0, 1, 2 or 3"),
    "half a recompute": ((*LLAMA, "parallel.recompute_granularity=full"), "needs both"),
    "recompute without kind": ((*LLAMA, "parallel.recompute_num_layers=1"), "granularity=full"),
    "unknown module": (
        (*LLAMA, "parallel.recompute_granularity=selective", "parallel.recompute_modules=[mpl]"),
        "mlp",
    ),
    "layout in a search": ((*LLAMA, "parallel.pipeline_model_parallel_layout=EttL"), "estimate"),
    "missing folder": ((*LLAMA, "out=/nope/plan.yaml"), "mkdir -p /nope"),
    "folder as file": ((*LLAMA, "out=/tmp"), "folder"),
    "open bracket": ((*LLAMA, "train.global_batch_size=[1"), "train.global_batch_size"),
    "interpolation": ((*LLAMA, "train.seq_length=${oc.env:NEST_NOT_SET}"), "NEST_NOT_SET"),
    "sweep without -m": ((*LLAMA, "cluster.oversubscription=1,2"), "--multirun"),
    "removed setting": ((*LLAMA, "~train.precision"), "train.precision=null"),
    "missing model file": (("plan", "model=./no.json", "cluster=dgx_h100"), "No such file"),
    "missing config dir": ((*LLAMA, "--config-dir", "/nope"), "no such folder"),
    "unknown option": ((*LLAMA, "--jsn"), "Did you mean --json"),
    "unknown command": (("plna",), "Did you mean plan?"),
    "unknown subcommand": (("cluster", "discver"), "Did you mean discover?"),
    "no command": (("model=llama3_8b",), "before the settings"),
    "plan of a profile": (("profile", *SMALL[:1], "out=x.yaml"), "profiles export NAME"),
    "misspelt setting": ((*LLAMA, "search.num_alternative=3"), "mean search.num_alternatives"),
    "free without from": ((*LLAMA, "--free", "all"), "--from"),
    "wrong flag value": (
        (*WITHOUT_MODEL, "--from", "pretrain_gpt.py --num-layers x"),
        "--num-layers",
    ),
    "no flags": ((*WITHOUT_MODEL, "--from", "pretrain_gpt.py"), "no flags"),
    "no script": ((*WITHOUT_MODEL, "--from", "foo bar"), "script"),
    "open quote": ((*WITHOUT_MODEL, "--from", "pretrain_gpt.py --data-path 'x"), "quot"),
    "unplannable model": (
        (*WITHOUT_MODEL, "--from", "pretrain_gpt.py --bf16 --perform-rl-step"),
        "RL step",
    ),
    "command and model": ((*LLAMA, "--from", "pretrain_gpt.py --bf16"), "--from"),
    "command in a sweep": ((*WITHOUT_MODEL, "-m", "--from", "x.py --bf16"), "--multirun"),
    "unknown release": (
        (*WITHOUT_MODEL, "--from", "pretrain_gpt.py --bf16", "--megatron-version", "main"),
        "0.16",
    ),
    "indivisible estimate": (
        ("estimate", *SMALL, "parallel.tensor_model_parallel_size=3"),
        "divide the 8 GPUs",
    ),
    "estimate too large": (
        ("estimate", *SMALL, "parallel.data_parallel_size=16"),
        "8 GPUs",
    ),
    "estimate's bad layout": (
        ("estimate", *SMALL, "parallel.pipeline_model_parallel_layout=EttXL"),
        "E t m L",
    ),
    "no such plan": (("explain", "/nope.yaml"), "No such file"),
}

JOB = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --bf16 --global-batch-size 64 "
)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("<x>", "a character stands in quotes alone"),
        ("'a", "or a quote is not closed"),
        ("(1", "its brackets do not match, or a character is too much.\n"),
        ("a]", "its brackets do not match"),
    ],
)
def test_a_value_that_hydra_cannot_read_is_told_in_words(value: str, words: str) -> None:
    done = run(*LLAMA, f"train.precision={value}")
    assert f"train.precision = {value}: it cannot be read: " in done.err
    assert words in done.err
    assert "Exception" not in done.err


def test_an_empty_value_is_shown() -> None:
    done = run(*LLAMA, "train.precision=")
    assert done.err.startswith("error: train.precision = '': it must be one of fp32")


def test_a_setting_of_a_launch_is_named_as_it_is_typed() -> None:
    for text, words in {
        "cluster=": "nest.cluster = '': it is empty",
        "cluster.num_gpus=8": "Name one: nest.cluster=NAME",
        "memory.margin=x": "nest.memory.margin = 'x': it must be a number",
    }.items():
        with settings_typed_as("nest.{}".format), pytest.raises(UserInputError, match=words):
            compose(parse([text]))


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_is_named(case: str) -> None:
    arguments, words = BAD[case]
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert words in done.err
    assert done.err.startswith("error: ")
    assert len(done.err.splitlines()) == 2


@pytest.mark.parametrize("case", BAD)
def test_a_mistake_in_json(case: str) -> None:
    arguments, words = BAD[case]
    done = run(*arguments, "--json")
    assert done.code == 2
    error = done.json()["error"]
    assert set(error) == {"what", "value", "limit", "fix"}
    assert words in str(error)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Ett|tt|tt|tL'",
            "pipeline_model_parallel_layout",
        ),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
            "decoder_first",
        ),
        (
            "--num-layers-per-virtual-pipeline-stage 3 --pipeline-model-parallel-size 2",
            "no whole number",
        ),
        ("--tensor-model-parallel-size 3", "divide the 8 GPUs"),
    ],
)
def test_a_command_whose_wish_cannot_be_kept(flags: str, words: str) -> None:
    done = run("plan", "--from", JOB + flags, "cluster=dgx_h100", "cluster.num_gpus=8")
    assert done.code == 2
    assert words in done.err
    freed = ("--free", "all")
    done = run("plan", "--from", JOB + flags, "cluster=dgx_h100", "cluster.num_gpus=8", *freed)
    assert done.code == 0


@pytest.mark.parametrize(
    ("setting", "own"),
    [
        ("train.precision=fp8", "bf16"),
        ("train.precision=fp16", "bf16"),
    ],
)
def test_a_job_is_not_priced_as_another_one(setting: str, own: str) -> None:
    """The command would stay as it is: its price would be that of no job."""
    done = run("plan", "--from", JOB, "cluster=dgx_h100", "cluster.num_gpus=8", setting)
    assert done.code == 2
    assert f"{setting.replace('=', ' = ')}: the job says {own}" in done.err


def test_a_misspelt_free() -> None:
    job = f"torchrun --nproc-per-node 8 {JOB}"
    done = run("plan", "--from", job, "cluster=dgx_h100", "--free", "tensor_parallel_size")
    assert done.code == 2
    assert "tensor_model_parallel_size" in done.err


@pytest.fixture(scope="module")
def plan_text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    return path.read_text()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[: len(text) // 2], ""),
        (lambda text: text.replace("schema: 2", "schema: 99"), "Upgrade"),
        (lambda text: text.replace("micro_batch_size: ", "micro_batch_size: 1"), "a multiple of"),
        (lambda text: text.replace("mfu: 0.", "mfu: 0.1"), "edited"),
        (lambda text: text.replace("mfu: ", "mfu: .nan #"), "finite"),
        (lambda text: "", "no plan file"),
        (lambda text: "\x00", "YAML"),
    ],
)
def test_a_plan_file_that_is_not_sound(
    change: object, words: str, plan_text: str, tmp_path: Path
) -> None:
    assert callable(change)
    path = tmp_path / "plan.yaml"
    path.write_text(change(plan_text))
    done = run("explain", str(path))
    assert done.code == 2
    assert "plan.yaml" in done.err
    assert words in done.err
    assert "Traceback" not in done.err


def test_an_old_file_outlives_a_failed_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    assert run("plan", "model=llama3_70b", *SMALL[1:], f"out={path}", "--force").code == 1
    assert path.read_text() == "mine"


LARGE = (
    *("cluster=h100_spine_leaf", "cluster.num_gpus=1024"),
    *("search.backend=reference", "search.num_alternatives=200"),
)
SEARCH = "nest_megatron.solver.search:Search.run"
SCRIPT = "nest_megatron.integrations.dry_run:_run"
#: Functions, and commands that are inside them for as long as one waits.
SLOW: dict[str, tuple[str, ...]] = {
    "search": (SEARCH, "plan", "model=deepseek_v3", *LARGE),
    "command": (SEARCH, "plan", "--from", JOB, *LARGE, "--free", "all"),
    "endless script": (SCRIPT, "plan", *LARGE, "--", "bash", "endless.sh"),
    "standard input": ("sys:stdin.read", "plan", "--from", "-", *LARGE),
}
#: No other end of an endless script.
ENDLESS = """
from nest_megatron.integrations import dry_run
dry_run.MAX_SECONDS = 10.0**6
"""


@pytest.mark.parametrize("name", SLOW)
def test_ctrl_c_ends_a_command_without_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / "endless.sh").write_text(f"while true; do x=1; done\n{JOB}\n")
    before = sorted(tmp_path.iterdir())
    out = f"out={tmp_path / 'plan.yaml'}"
    at, command, *words = SLOW[name]
    done = interrupted(at, command, out, *words, cwd=tmp_path, prepare=ENDLESS)
    assert (done.code, done.out) == (130, "")
    assert done.err.strip() == "Interrupted."
    assert sorted(tmp_path.iterdir()) == before


def test_a_misspelt_flag_is_told_apart_from_the_users_own() -> None:
    flags = "--tensor-model-paralel-size 2 --our-own-flag 3"
    done = run("plan", "--from", JOB + flags, "cluster=dgx_h100", "cluster.num_gpus=8")
    assert done.code == 0
    said = " ".join(done.out.split())
    assert "no flag --tensor-model-paralel-size. Did you mean --tensor-model-parallel-size?" in said
    assert "--our-own-flag 3" in said


def test_a_long_name_or_value_is_repeated_in_part(tmp_path: Path) -> None:
    text = tmp_path / "notes"
    text.write_text("root:x:0:0:root:/root:/bin/bash\n" * 100)
    done = run("models", str(text))
    assert done.code == 2
    assert len(done.err.partition("Known:")[0]) < 300
    assert len(run("models", "m" * 5000, "--json").out.partition('"fix"')[0]) < 600


@pytest.mark.parametrize("group", [(), ("nest",), ("network",), ("profiles",)])
def test_a_group_alone_shows_its_help(group: tuple[str, ...]) -> None:
    done = run(*group)
    assert done.code == 2
    assert done.err.startswith("Usage: nest-megatron")
    assert "error:" not in done.err


def test_an_interruption_inside_a_class_body_is_no_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Python 3.11 wraps what ``__set_name__`` raises in a RuntimeError."""

    def interrupted(*_: object) -> int:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr(cli, "_run", interrupted)
    assert cli.main(["models"]) == INTERRUPTED
    assert capsys.readouterr().err == "Interrupted.\n"


def test_an_interruption_of_which_a_library_makes_an_error_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """OmegaConf sets its flags back in a ``finally`` that needs what was interrupted."""

    def interrupted(*_: object) -> None:
        try:
            raise KeyboardInterrupt
        finally:
            raise AttributeError("'NoneType' object has no attribute '_invalidate_flags_cache'")

    monkeypatch.setattr("omegaconf.OmegaConf.merge", interrupted)
    done = run(*LLAMA)
    assert (done.code, done.err) == (INTERRUPTED, "Interrupted.\n")


def test_a_document_on_standard_output_is_the_only_one() -> None:
    done = run(*LLAMA, "out=-", "--json")
    assert done.code == 2
    assert done.json()["error"]["what"] == "out"
    assert "leave --json out" in done.json()["error"]["fix"]


def test_of_many_known_names_the_nearest_stand_once() -> None:
    with pytest.raises(UserInputError, match="The nearest are ") as raised:
        read_layout("qqqqqq=1", "--versus")
    names = str(raised.value).partition("The nearest are ")[2].rstrip(".").split(", ")
    assert len(set(names)) == len(names) == 3


def test_what_click_refuses_has_two_lines() -> None:
    done = run("paper")
    assert (done.code, done.err.count("\n")) == (2, 2)
    assert "Choose from: table2, figure5" in done.err
