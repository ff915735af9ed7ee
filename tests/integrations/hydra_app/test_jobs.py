"""Applications with ``+nest=auto``, run as processes: they train with the plan, or not at all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from nest_megatron.cli import main
from nest_megatron.history import store
from nest_megatron.history.records import Outcome
from nest_megatron.layout import plan_file
from tests.cli.runs import ROOT
from tests.integrations.hydra_app.apps import (
    AUTO,
    GPT,
    MAIN,
    NESTED,
    NESTED_MAIN,
    make_app,
    run_app,
    trained,
)

#: Fields of NeMo that a plan sets.
PLANNED = re.compile(r"_parallel_size|micro_batch_size|activations_checkpoint")


def test_an_application_trains_with_the_plan(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path), *AUTO, "nest.out=plan.yaml")
    plan = plan_file.read(tmp_path / "plan.yaml")
    chosen = plan.arguments
    assert run.code == 0, run.err
    assert trained(run) == [
        [
            str(chosen["tensor_model_parallel_size"]),
            str(chosen["pipeline_model_parallel_size"]),
            str(plan.layout.micro_batch_size),
            str(chosen["sequence_parallel"]),
        ]
    ]
    assert plan.search.certificate in ("optimal", "chosen")
    assert plan.search.space["stage_layout"] == "even"
    assert "model.tensor_model_parallel_size" in run.out
    assert run.out.count("nest: this job runs as") == 1


def test_the_plan_lies_in_hydra_s_output_folder(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path), *AUTO, "hydra.run.dir=here")
    assert plan_file.read(tmp_path / "here" / "nest_plan.yaml").model.name == "gpt", run.err


def test_what_is_given_on_the_command_line_is_kept(tmp_path: Path) -> None:
    words = ("model.tensor_model_parallel_size=8", "model.micro_batch_size=1")
    run = run_app(make_app(tmp_path), *words, *AUTO)
    assert [row[0] + row[2] for row in trained(run)] == ["81"], run.err
    assert "model.tensor_model_parallel_size" not in run.out
    assert "model.pipeline_model_parallel_size" in run.out


def test_without_the_word_nothing_changes(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path))
    assert (run.code, run.err) == (0, "")
    assert trained(run) == [["1", "1", "4", "None"]]


def test_a_sweep_plans_each_job(tmp_path: Path) -> None:
    sweep = ("-m", "model.tensor_model_parallel_size=2,4", "trainer.num_nodes=4")
    run = run_app(make_app(tmp_path), *sweep, *AUTO)
    assert [row[0] for row in trained(run)] == ["2", "4"], run.err
    assert run.out.count("nest: this job runs as") == 2


def test_launchers_that_start_other_processes_know_the_values(tmp_path: Path) -> None:
    """The joblib launcher pickles the job; a worker has seen no plugin of Hydra."""
    main = """
        import hydra

        @hydra.main(version_base="1.3", config_path="conf", config_name="app")
        def main(cfg):
            with open("trained.txt", "a") as file:
                file.write(f"{cfg.model.tensor_model_parallel_size} {cfg.model.micro_batch_size};")

        main()
    """
    words = ("-m", "hydra/launcher=joblib", "model.tensor_model_parallel_size=2,4")
    run = run_app(make_app(tmp_path, main=main), *words, *AUTO)
    assert run.code == 0, run.err
    rows = (tmp_path / "trained.txt").read_text(encoding="utf-8").split(";")
    assert sorted(row.split()[0] for row in rows if row) == ["2", "4"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("nest.cluster=dgx_h1000",), 2, "nest.cluster = dgx_h1000: there is no such"),
        (("nest.clusters=dgx_h100",), 1, "Key 'clusters' is not in struct"),
        (("model.hidden_size=51200", "model.num_layers=200"), 1, "predicted to fit in memory"),
        (("model.ffn_hidden_size=${nest:micro_batch_size}",), 2, "asks for the plan"),
        (("+nest.fields.num_layers=model.depth",), 2, "no such field"),
    ],
)
def test_a_job_without_a_plan_ends_before_it_trains(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    run = run_app(make_app(tmp_path), *AUTO, *words)
    assert run.code == code
    assert said in run.err + run.out
    assert not trained(run)


def test_without_a_cluster_the_gpus_of_the_host_are_asked(tmp_path: Path) -> None:
    run = run_app(make_app(tmp_path), "+nest=auto")
    assert run.code == 2
    assert "nest.cluster" in run.err
    assert not trained(run)


def test_a_launcher_s_ranks_must_be_the_trainer_s(tmp_path: Path) -> None:
    script = make_app(tmp_path)
    alike = run_app(script, *AUTO, RANK="1", WORLD_SIZE="64", LOCAL_RANK="1")
    other = run_app(script, *AUTO, RANK="0", WORLD_SIZE="32", LOCAL_RANK="0")
    assert trained(alike), alike.err
    assert "this job runs as" not in alike.out  # the first rank speaks for all
    assert "WORLD_SIZE" in other.err
    assert not trained(other)


def test_an_audit_has_how_it_began(tmp_path: Path) -> None:
    policy, path = tmp_path / "policy.yaml", tmp_path / "audit.jsonl"
    policy.write_text(f"audit: {{file: {path}, required: true}}\n")
    ranks = {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    run = run_app(make_app(tmp_path), *AUTO, NEST_MEGATRON_POLICY=str(policy), **ranks)
    assert trained(run), run.err
    (record,) = store.read(path)
    assert record.outcome is Outcome.STARTED
    assert record.launch is not None
    assert "model.tensor_model_parallel_size" in {each.name for each in record.launch.changes}


def test_an_audit_has_a_refusal_once_for_all_ranks(tmp_path: Path) -> None:
    policy, path = tmp_path / "policy.yaml", tmp_path / "audit.jsonl"
    policy.write_text(f"audit: {{file: {path}}}\nlaunch: {{pinned_only: true}}\n")
    script = make_app(tmp_path)
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "WORLD_SIZE": "64", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "8"}
        run = run_app(script, *AUTO, NEST_MEGATRON_POLICY=str(policy), **ranks)
        assert run.code == 16
    runs, (refused,) = store.read_audit(path)
    assert not runs
    assert (refused.rule, refused.num_ranks) == ("launch.pinned_only", 64)


def test_the_boot_line_leaves_the_application_alone(tmp_path: Path) -> None:
    """With ``+nest`` on its command line the process also watches for Megatron."""
    run = run_app(make_app(tmp_path, main="\n    import nest_megatron.boot\n" + MAIN), *AUTO)
    assert trained(run), run.err


GROUPS = """
    import nest_megatron.boot
    import hydra

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        import megatron.core.parallel_state as state
        state.initialize_model_parallel()

    main()
"""
GETTERS = (
    "get_tensor_model_parallel_group",
    "get_context_parallel_group",
    "get_pipeline_model_parallel_group",
    "get_data_parallel_group",
)


def test_megatron_s_groups_are_compared_with_the_plan(tmp_path: Path) -> None:
    """An application that does not use its values is noticed where Megatron makes its groups."""
    made = "def initialize_model_parallel(): pass\n"
    files = {
        "megatron/__init__.py": "",
        "megatron/core/__init__.py": "",
        "megatron/core/parallel_state.py": made
        + "".join(f"def {name}(**_): return [0]\n" for name in GETTERS),
        "torch/__init__.py": "from torch import distributed\n",
        "torch/distributed.py": "def get_rank(): return 0\n"
        "def get_process_group_ranks(group): return group\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    run = run_app(make_app(tmp_path, main=GROUPS), *AUTO, "model.tensor_model_parallel_size=2")
    assert run.code != 0
    assert "Megatron's tp group is [0], the plan's is [0, 1]" in run.err


WRAPPER = """
    import nest_megatron.boot
    import hydra

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        import megatron.training
        print("TRAINS", megatron.training.validate_args.__name__)

    main()
"""


def test_a_plan_of_hydra_is_not_made_again_by_megatron_s_hook(tmp_path: Path) -> None:
    """An application around Megatron-LM: its words are Hydra's, and Megatron's stay its own."""
    package = tmp_path / "megatron" / "training"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text(
        "from megatron.training.arguments import validate_args\n", encoding="utf-8"
    )
    arguments = "def validate_args(args, defaults={}): pass\nvalidate_args.__name__ = 'own'\n"
    (package / "arguments.py").write_text(arguments, encoding="utf-8")
    run = run_app(
        make_app(tmp_path, main=WRAPPER), *AUTO, "+nest.fields.num_layers=model.num_layers"
    )
    assert trained(run) == [["own"]], run.err


def test_a_plugin_that_is_not_there_is_no_stray_value(tmp_path: Path) -> None:
    """Hydra would take ``nest: auto`` for a value of the application and train."""
    main = (
        "\n    import sys; sys.modules['nest_megatron.integrations.hydra'] = None"
        "\n    import nest_megatron.boot\n"
    )
    script = make_app(tmp_path, main=main + MAIN)
    asked, plain = run_app(script, "+nest=auto"), run_app(script)
    assert asked.code == 2
    assert "hydra_plugins.nest_megatron was not found or could not be loaded" in asked.err
    assert not trained(asked)
    assert trained(plain)  # who does not ask for a plan is not disturbed
    assert "nest-megatron is not available" in plain.err


def test_fields_that_nobody_reads_are_no_plan(tmp_path: Path) -> None:
    """Our group would add NeMo's fields to an application that has others of its own."""
    config = "\n".join(line for line in GPT.splitlines() if not PLANNED.search(line))
    config = f"{config.rstrip()}\n    parallel: {{tp: 1, pp: 1}}\n"
    for words in ((), ("-m",)):
        run = run_app(make_app(tmp_path, config=config), *words, *AUTO)
        assert run.code == 2
        assert "none of the planned fields is in the application's own" in run.err
        assert not trained(run)


def test_a_reviewed_plan_is_launched(tmp_path: Path) -> None:
    script = make_app(tmp_path)
    assert run_app(script, *AUTO, "nest.out=plan.yaml").code == 0
    assert main(["pin", str(tmp_path / "plan.yaml"), "--by", "ada"]) == 0
    pinned = run_app(script, "+nest=pinned", "nest.plan=plan.yaml")
    assert trained(pinned), pinned.err
    other = run_app(script, "+nest=pinned", "nest.plan=plan.yaml", "model.num_layers=20")
    assert other.code == 2
    assert "num_layers is 20, pinned 40" in other.err


def test_paths_are_those_that_were_typed(tmp_path: Path) -> None:
    """Hydra may start a job in its output folder."""
    script, chdir = make_app(tmp_path), "hydra.job.chdir=true"
    assert run_app(script, *AUTO, "nest.out=plan.yaml", chdir).code == 0
    assert main(["pin", str(tmp_path / "plan.yaml")]) == 0
    done = run_app(script, "+nest=pinned", "nest.plan=plan.yaml", chdir)
    assert (done.code, len(trained(done))) == (0, 1), done.err
    swept = run_app(
        script, "-m", *AUTO, "nest.out=swept.yaml", "model.global_batch_size=256,512", chdir
    )
    assert swept.code == 0, swept.err
    batches = [
        plan_file.read(tmp_path / name).layout.global_batch_size
        for name in ("swept.yaml", "swept_1.yaml")
    ]
    assert batches == [256, 512]
    done = run_app(script, *AUTO, "+nest.overrides.out=x.yaml")
    assert (done.code, "Use nest.out" in done.err) == (2, True)


def test_what_nemo_1_does_otherwise_than_megatron_lm(tmp_path: Path) -> None:
    script = make_app(tmp_path)
    done = run_app(script, *AUTO, "model.rampup_batch_size=[32,32,100000]")
    assert (done.code, "lets grow is not planned" in done.err) == (2, True)
    words = (
        "+model.megatron_amp_O2=false",
        "model.tensor_model_parallel_size=2",
        "nest.out=plan.yaml",
    )
    assert run_app(script, *AUTO, *words).code == 0
    dims = plan_file.read(tmp_path / "plan.yaml").layout.dims
    assert dims.virtual_pipeline_model_parallel_size == 1
    virtual = "model.virtual_pipeline_model_parallel_size=2"
    done = run_app(script, *AUTO, words[0], "model.pipeline_model_parallel_size=4", virtual)
    assert (done.code, "Set model.megatron_amp_O2=true" in done.err) == (2, True)


def test_a_variable_that_holds_no_number_is_none(tmp_path: Path) -> None:
    done = run_app(make_app(tmp_path), *AUTO, WORLD_SIZE="x")
    assert "Traceback" not in done.err
    assert "a bug of nest-megatron" not in done.err


def test_a_plan_takes_no_script_s_place(tmp_path: Path) -> None:
    app = make_app(tmp_path)
    mine = tmp_path / "mine.py"
    mine.write_text("import torch\n", encoding="utf-8")
    run = run_app(app, *AUTO, f"nest.out={mine}")
    assert run.code == 2
    assert "nothing in it says that nest-megatron has written it" in run.err
    assert mine.read_text(encoding="utf-8") == "import torch\n"
    assert not trained(run)


def test_advice_names_settings_as_they_are_typed(tmp_path: Path) -> None:
    slow = "+nest.overrides.cluster.levels.1.bandwidth_bytes_per_s=25"
    run = run_app(make_app(tmp_path), *AUTO, slow)
    assert run.code == 2
    assert "add +nest.overrides.checks.plausibility=off" in run.err


WATCHED = """
    import hydra

    from nest_megatron.integrations.watching import watching

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        print("TRAINS", cfg.model.tensor_model_parallel_size)
        with watching(steps=3) as watched:
            for _ in range(5):
                with watched.step():
                    pass

    main()
"""


def test_a_watched_loop_is_in_the_history_and_in_the_audit(tmp_path: Path) -> None:
    policy, audit, runs = (tmp_path / name for name in ("policy.yaml", "audit.jsonl", "runs.jsonl"))
    policy.write_text(f"audit: {{file: {audit}, required: true}}\n")
    script = make_app(tmp_path, main=WATCHED)
    words = ("trainer.devices=1", "trainer.num_nodes=1", "model.num_layers=2")
    one = {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "1"}
    done = run_app(
        script,
        *(*AUTO, *words),
        NEST_MEGATRON_POLICY=str(policy),
        NEST_MEGATRON_HISTORY=str(runs),
        **one,
    )
    assert done.code == 0, done.err
    (kept,), (audited,) = store.read(runs), store.read(audit)
    assert kept.id == audited.id
    for run in (kept, audited):
        assert run.outcome is Outcome.FINISHED
        assert run.measured is not None
    assert kept.launch is not None
    assert kept.launch.mode == "auto"
    without = run_app(script, *words)
    assert "no Hydra application was planned in this process" in without.err


#: Sends its configuration to a process that knows no plan, as Ray does under verl.
SENDING = """
    import pickle, subprocess, sys
    import hydra

    CHILD = (
        "import pickle, sys; from omegaconf import OmegaConf; "
        "cfg = OmegaConf.to_container(pickle.loads(sys.stdin.buffer.read()), resolve=True); "
        "print('TRAINS', cfg['model']['tensor_model_parallel_size'], cfg['size'], cfg['twice'])"
    )

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        sent = pickle.dumps(cfg)
        done = subprocess.run([sys.executable, "-c", CHILD], input=sent, capture_output=True)
        print(done.stdout.decode(), done.stderr.decode())

    main()
"""


@pytest.mark.parametrize("many", [(), ("-m",)])
def test_a_job_sends_its_configuration_to_another_process(
    many: tuple[str, ...], tmp_path: Path
) -> None:
    config = (
        GPT
        + """
    size: tp${nest:tensor_model_parallel_size}
    twice: "${oc.decode:'[${nest:pipeline_model_parallel_size},2]'}"
"""
    )
    words = ("hydra.run.dir=here", "hydra.sweep.dir=here", "hydra.sweep.subdir=.")
    fixed = ("model.pipeline_model_parallel_size=2", *AUTO)
    run = run_app(make_app(tmp_path, config, SENDING), *many, *words, *fixed)
    plan = plan_file.read(tmp_path / "here" / "nest_plan.yaml")
    tensor = str(plan.layout.dims.tensor_model_parallel_size)
    assert trained(run) == [[tensor, f"tp{tensor}", "[2,", "2]"]], run.out + run.err
    assert "${nest" not in (tmp_path / "here" / ".hydra" / "config.yaml").read_text()


def commands_of(page: str, name: str) -> list[list[str]]:
    """What a page's commands of an application say, but for the user's own words."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("python ") and name in line]
    return [shlex.split(line.replace("<your overrides>", ""))[2:] for line in lines]


def test_the_page_s_command_for_fields_elsewhere(tmp_path: Path) -> None:
    (words,) = commands_of("hydra_apps.md", "nest.root=")
    script = make_app(tmp_path, NESTED, NESTED_MAIN)
    run = run_app(script, *words, "nest.out=plan.yaml", "trainer.num_nodes=2")
    plan = plan_file.read(tmp_path / "plan.yaml")
    chosen, micro = plan.arguments, plan.layout.micro_batch_size
    tensor, pipeline = chosen["tensor_model_parallel_size"], chosen["pipeline_model_parallel_size"]
    assert trained(run) == [[*map(str, (tensor, pipeline, micro, chosen["sequence_parallel"]))]]
    assert "  data.micro_batch = " in run.out
    # what is typed is kept, and Hydra shows what would be trained with
    look = ("--cfg", "job", "--resolve", "--package", "model.megatron")
    typed = ("model.megatron.tensor_model_parallel_size=8", "trainer.num_nodes=2")
    shown = run_app(script, *words, *typed, *look)
    assert "tensor_model_parallel_size: 8" in shown.out, shown.err
    assert "${" not in shown.out


def test_a_group_file_that_only_says_the_root(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "hydra_apps.md").read_text(encoding="utf-8")
    found = re.search(r"^```yaml\n# conf/nest/rooted.yaml\n(.*?)^```", text, re.M | re.S)
    assert found is not None
    config = NESTED.replace("data: {micro_batch: 4}", "data: {micro_batch: 1}")
    config = config.replace("megatron:\n", "megatron:\n    micro_batch_size: 4\n")
    main = NESTED_MAIN.replace("cfg.data.micro_batch", "model.micro_batch_size")
    main = main.replace(
        "model = cfg.model.megatron", "model = cfg.model.megatron; assert len(cfg.model) == 1"
    )
    script = make_app(tmp_path, config, main, rooted=found[1])
    words = ("nest.cluster=dgx_h100", "trainer.num_nodes=2", "nest.out=plan.yaml")
    run = run_app(script, "-m", "+nest=rooted", *words)
    chosen = plan_file.read(tmp_path / "plan.yaml").arguments
    assert [row[0] for row in trained(run)] == [str(chosen["tensor_model_parallel_size"])], run.err
