"""What a user typed and did not free stays in the command, word for word, and means the plan."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from nest_megatron.api import plan_command
from nest_megatron.config.compose import compose
from nest_megatron.config.job import ReadCommand
from nest_megatron.config.overrides import parse
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm.attach import require_kept, rewrite_command
from nest_megatron.integrations.megatron_lm.layout_arguments import read_recompute
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.search_space import kept_flags
from nest_megatron.integrations.plan_job import TypedCommand
from nest_megatron.integrations.typed_command import kept_command, read_request
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.recompute import NO_RECOMPUTE
from nest_megatron.planner import plan
from tests.altered import altered
from tests.cli.runs import run
from tests.integrations.test_sharding import job

VIRTUAL = "virtual_pipeline_model_parallel_size"
#: Flags in every spelling, and the layout that Megatron makes of them.
TYPED = {
    "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2": (
        "Ett|(tt|)*14ttL"
    ),
    "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2": (
        "Et*4|(t*4|)*6t*4L"
    ),
    "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 5 "
    "--decoder-last-pipeline-num-layers 7": "Et*5|(t*10|)*2t*7L",
    "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
    "--account-for-loss-in-pipeline-split": "Et*16|t*16L",
    "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*15|t*17L": (
        "Et*15|t*17L"
    ),
}


def asked(flags: str, free: str = "") -> tuple[ReadCommand, frozenset[str], ParallelPlan]:
    """A command, its flags that stay, and its plan."""
    composed = compose(parse(["cluster=dgx_h100", "search.num_alternatives=0"]))
    names = free.split(",") if free else []
    read, request = read_request(
        TypedCommand(text=job(flags), free=tuple(names), version="0.16"), composed
    )
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    assert read.command is not None
    return read.command, kept_flags(read, request, composed), found


def test_an_expert_grid_of_a_dense_model_is_left_out() -> None:
    """In this rank order Megatron refuses one that is not as large as the dense grid (ps:811)."""
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    command, kept, found = asked(
        f"{grid} --context-parallel-size 1 --expert-tensor-parallel-size 1"
    )
    argv = rewrite_command(found, command, kept).argv
    assert "--use-tp-pp-dp-mapping" in argv
    assert "--expert-tensor-parallel-size" not in argv


@pytest.mark.parametrize("flag", ["--recompute-num-layers 2", "--recompute-method uniform"])
def test_a_part_of_full_recomputation_by_itself_is_left_out(flag: str) -> None:
    """Megatron refuses it beside overlapped traffic of experts, which a plan may add (tc:1871)."""
    command, kept, found = asked(flag)
    argv = rewrite_command(found, command, kept).argv
    assert read_recompute(read_command(argv, "0.16").values) == found.layout.recompute
    command, kept, found = asked(f"{flag} --tensor-model-parallel-size 8")
    assert found.layout.recompute == NO_RECOMPUTE
    assert flag.partition(" ")[0] not in rewrite_command(found, command, kept).argv


@pytest.mark.parametrize(("flags", "layout"), TYPED.items())
def test_stages_stay_as_they_were_typed(flags: str, layout: str) -> None:
    command, kept, found = asked(flags)
    argv = rewrite_command(found, command, kept).argv
    assert " ".join(flags.split()) in " ".join(argv).replace("'", "")
    assert argv.count("--pipeline-model-parallel-layout") == ("layout" in flags)
    assert found.arguments["pipeline_model_parallel_layout"] == layout


@pytest.mark.parametrize(
    "flags",
    [
        "--recompute-activations",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        "--recompute-granularity selective --recompute-modules mlp layernorm",
        "--use-tp-pp-dp-mapping --sequence-parallel --overlap-grad-reduce",
    ],
)
def test_other_choices_stay_as_they_were_typed(flags: str) -> None:
    command, kept, found = asked(flags)
    rewrite = rewrite_command(found, command, kept)
    assert f" {flags}" in " ".join(rewrite.argv)
    assert not {change.field for change in rewrite.changes} & set(flags.split())


def test_what_is_freed_changes() -> None:
    flags = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    command, kept, found = asked(flags, "stage_layout")
    values = read_command(["s.py", *rewrite_command(found, command, kept).argv])
    assert values.values["pipeline_model_parallel_layout"]
    assert values.values["num_virtual_stages_per_pipeline_rank"] is None
    assert found.arguments[VIRTUAL] == 2
    full = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    _, kept, _ = asked(full, "recompute")
    assert not any("recompute" in name for name in kept)


@pytest.mark.parametrize("freed", ["num_virtual_stages_per_pipeline_rank", VIRTUAL])
@pytest.mark.parametrize(
    "stages",
    [
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--num-layers 30",
        "--decoder-last-pipeline-num-layers 8",
        "--decoder-first-pipeline-num-layers 8 --decoder-last-pipeline-num-layers 8",
    ],
)
def test_virtual_stages_are_freed_with_the_stages_that_are_made_of_them(
    stages: str, freed: str
) -> None:
    flags = f"--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 {stages}"
    with pytest.raises(UserInputError, match=r"one number of virtual stages.*stage_layout"):
        asked(flags, freed)


def test_a_changed_flag_is_an_error_of_ours() -> None:
    command, kept, found = asked("--tensor-model-parallel-size 2 --recompute-activations")
    rewrite = rewrite_command(found, command, kept)
    values = {**rewrite.values, "tensor_model_parallel_size": 4}
    broken = dataclasses.replace(rewrite, values=values)
    changed = r"--tensor-model-parallel-size 2 -> 4.*bug of nest"
    with pytest.raises(NestError, match=changed) as fault:
        require_kept(broken, command, found, kept)
    assert fault.value.exit_code == 70
    kept = {"recompute_activations"}
    none = altered(found, recompute=NO_RECOMPUTE)
    with pytest.raises(NestError, match="the recomputation is not none"):
        require_kept(rewrite, command, none, kept)


@pytest.mark.parametrize(
    ("release", "planned"), [(("0", "16"), "0.16"), (("0", "12"), "0.19"), (("0", "21"), "0.20")]
)
def test_a_program_in_a_tree_of_megatron_has_the_release_of_the_tree(
    release: tuple[str, str], planned: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = {}\nMINOR = {}\nPATCH = 1\n".format(*release))
    command = job("")
    (tmp_path / "pretrain_gpt.py").touch()
    composed = compose(parse(["cluster=dgx_h100"]))
    assert read_request(TypedCommand(text=command), composed)[0].version == "0.19"
    script = tmp_path / "train.sh"
    script.write_text(f"cd {tmp_path}\n{command}\n")
    found = read_request(TypedCommand(text=("bash", str(script))), composed)[0]
    assert found.version == planned
    kept = kept_command(TypedCommand(text=("bash", str(script))), composed)
    assert (
        read_request(TypedCommand(text=kept.text, version=kept.version), composed)[0].version
        == planned
    )
    done = run("tune", "cluster=dgx_h100", "--", "bash", str(script))
    assert (done.code, f"cd {tmp_path}" in done.err) == (2, True)
    monkeypatch.chdir(tmp_path)
    found = read_request(TypedCommand(text=command), composed)[0]
    assert found.version == planned
    assert any(str(tmp_path) in note for note in (found.command and found.command.notes) or ())
    named = compose(parse(["cluster=dgx_h100", "target=megatron_lm_0.18"]))
    assert read_request(TypedCommand(text=command), named)[0].version == "0.18"


def test_rows_that_are_only_assumed_are_not_written() -> None:
    """Rows beyond them would be zero in silence, and Megatron pads what the files hold."""
    text = job("--tensor-model-parallel-size 8 --tokenizer-type Llama2Tokenizer ")
    text = text.replace("--vocab-size 128256 ", "")
    for command, is_written in ((text, False), (f"{text} --vocab-size 64000", True)):
        found = plan_command(
            f"{command} --tokenizer-model /absent",
            cluster="dgx_h100",
            free="all",
            search={"num_alternatives": 0},
        )
        argv = found.record.launch["megatron_lm"].argv
        assert found.record.layout.dims.tensor_model_parallel_size != 8
        assert ("--padded-vocab-size" in argv) == is_written, command
