"""What the commands print and write, and with which exit code."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from nest_megatron import load_plan
from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.cli.commands import COMMANDS, cli
from nest_megatron.history import store as history
from nest_megatron.layout import plan_file
from nest_megatron.planner import Request
from nest_megatron.planner import plan as find_plan
from nest_megatron.profile import store
from nest_megatron.report.failure import ending_on_errors, require_plan
from tests import catalogue
from tests.catalogue import CORE
from tests.cli.runs import LIMITS, ROOT, SMALL, environment, run, spawn
from tests.cli.test_cluster import FABRIC, reports
from tests.history.runs import run_record
from tests.integrations.commands import LLAMA3_8B, MIXTRAL
from tests.profile.profiles import whole_profile

DOCS = ROOT / "docs"
FIRST_PAGES = (
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in ("first_plan", "adding", "sizing", "troubleshooting")),
    DOCS / "research.md",
)
PUBLISHED = ROOT / "tests" / "published" / "data"


@pytest.fixture(scope="module")
def small_plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plans") / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    return path


def shown_commands() -> Iterator[str]:
    """Every example of every --help, of the README and of the pages that users begin with."""
    for name, command in commands_below("", cli):
        for example in getattr(command, "examples", ()):
            if example.startswith("nest-megatron"):
                yield " ".join(example.replace("\\\n", " ").split())
        assert getattr(command, "examples", ()), f"{name} has no example"
    for page in FIRST_PAGES:
        joined = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for block in re.findall(r"^ *```bash\n(.*?)^ *```$", joined, re.M | re.S):
            lines = (" ".join(line.split()) for line in block.splitlines())
            yield from (line for line in lines if line.startswith("nest-megatron "))


def commands_below(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and, of a group, those inside it, with their names."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for inner in command.list_commands(context):
            below = command.get_command(context, inner)
            assert below is not None
            yield from commands_below(f"{name} {inner}".strip(), below)


#: What takes seconds of a core: fits, other planners, layers that megatron-core builds, and many
#: plans, which tests of their own run in small.
LONG = re.compile(
    r"calibrate|compare|paper|profile model|extract|whatif|tune|plan .*(-m|--for-\w+) "
)


def is_long(command: str) -> bool:
    return LONG.match(command.removeprefix("nest-megatron ")) is not None


def marked(command: str) -> object:
    if command.startswith("nest-megatron app"):
        serves = pytest.mark.skip(
            reason="it serves until Ctrl-C: tests/app/test_server.py starts it"
        )
        return pytest.param(command, marks=serves)
    return pytest.param(command, marks=pytest.mark.slow if is_long(command) else ())


@pytest.fixture(scope="module")
def named_files(small_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples name."""
    folder = tmp_path_factory.mktemp("named")
    (folder / "plan.yaml").write_text(small_plan.read_text())
    (folder / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000,'
        ' "num_attention_heads": 8, "intermediate_size": 4096, "max_position_embeddings": 2048}'
    )
    write_signed(folder)
    write_measurements(folder)
    write_networks(folder)
    write_module(folder)
    write_profiles(folder)
    artifact = ROOT / "tests" / "research" / "nest_artifact" / "data"
    shutil.copytree(artifact, folder, dirs_exist_ok=True)
    shutil.copy(ROOT / "hydra_configs" / "cluster" / "custom.yaml", folder / "mine.yaml")
    shutil.copy(DOCS / "samples" / "train_llama3_8b.sh", folder / "train.sh")
    write_hosts(folder)
    return folder


def write_hosts(folder: Path) -> None:
    """What machines say, as examples name it."""
    reports(folder)
    shutil.copy(FABRIC, folder / "fabric.txt")
    (folder / "racks.txt").write_text("n1 r1\nn2 r1\nn3 r2\nn4 r2\n")


@pytest.mark.parametrize("command", [marked(each) for each in sorted(set(shown_commands()))])
def test_examples_run(
    command: str, named_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(named_files, tmp_path, dirs_exist_ok=True)
    shell = command.partition(">")[0] if "completion" in command else command
    words = shlex.split(shell, comments=True)
    if "--from" in words:
        words[words.index("--from") + 1] = LLAMA3_8B
    store, cache = tmp_path / "store", tmp_path / "cache"
    folders = {
        "NEST_MEGATRON_PROFILES": str(store),
        "NEST_MEGATRON_EXTRACT_CACHE": str(cache),
        "NEST_MEGATRON_SITES": str(tmp_path / "sites"),
        "NEST_MEGATRON_HISTORY": str(tmp_path / "runs.jsonl"),
    }
    if is_long(command):  # some leave process groups and worker processes behind
        done = spawn(*words[1:], cwd=tmp_path, **folders)
    else:
        monkeypatch.chdir(tmp_path)
        for name, folder in folders.items():
            monkeypatch.setenv(name, folder)
        done = run(*words[1:])
    ends = (0, 3) if "search.max_seconds" in command else (0,)  # others may hold the cores
    assert (done.code in ends, done.err) == (True, ""), done.code


def write_signed(folder: Path) -> None:
    """The key and the signed plan that examples name."""
    key, pinned = folder / "reviewer.key", folder / "pinned.yaml"
    shutil.copy(folder / "plan.yaml", pinned)
    assert run("keygen", "--out", str(key), "--no-password").code == 0
    assert run("pin", str(pinned), "--sign", str(key)).code == 0


def write_module(folder: Path) -> None:
    """The model of the user's own that examples name."""
    layers = "nn.Embedding(100, 8), nn.Linear(8, 16), nn.ReLU()"
    text = f"from torch import nn\n\n\ndef build():\n    return nn.Sequential({layers})\n"
    (folder / "my_model.py").write_text(text, encoding="utf-8")


def write_profiles(folder: Path) -> Path:
    """A store with the profile that examples name, and a file of it to import."""
    made = whole_profile("llama3_8b-h100")
    store.write(made, folder / "profile.yaml")
    (folder / "store").mkdir()
    store.write(made, folder / "store" / "llama3_8b-h100.yaml")
    history.append(run_record(), folder / "runs.jsonl")
    history.append(run_record(), folder / "audit.jsonl")
    return folder / "store"


def write_measurements(folder: Path) -> None:
    """The files of measurements that examples name, a few rows each."""
    rows = {"runs.csv": "throughput.csv", "throughput_vtrain_a100.csv": "throughput.csv"}
    for name in (*rows, "throughput.csv", "comm_collectives.csv", "memory_peak.csv"):
        source = PUBLISHED / rows.get(name, name)
        head = source.read_text(encoding="utf-8").splitlines(keepends=True)[:6]
        (folder / name).write_text("".join(head), encoding="utf-8")
    columns = "name,layers,hidden,ffn,heads,vocab,seq\n"
    (folder / "models.csv").write_text(columns + "mine,8,1024,4096,8,32000,2048\n")
    (folder / "hydra_configs" / "accelerator").mkdir(parents=True)
    (folder / "docs").mkdir()


def write_networks(folder: Path) -> None:
    """The logs of collectives that examples name, and a profile made of one."""
    logs = {"all_reduce_perf": "all_reduce_a100", "inside": "h100_node"}
    for name, source in {**logs, "over": "h100_one_gpu_a_node"}.items():
        text = (ROOT / "tests" / "profile" / "data" / f"{source}.log").read_text(encoding="utf-8")
        # examples name a cluster of H100
        text = text.replace("A100-SXM4-80GB", "H100 80GB HBM3")
        (folder / f"{name}.log").write_text(text, encoding="utf-8")
    kept = ("--profile", str(folder / "network.yaml"))
    assert run("network", "import", str(folder / "inside.log"), *kept).code == 0


def test_help_names_every_command_and_loads_nothing_slow() -> None:
    text = run("--help").out
    assert all(name in text for name in COMMANDS)
    loads = "import sys; from nest_megatron.cli import main; main(['plan', '--help'])"
    modules = set(spawn_code(f"{loads}; print(*sys.modules)").split())
    assert not {"hydra", "omegaconf", "rich", "yaml", "nest_megatron.planner"} & modules


def spawn_code(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True
    )
    return done.stdout


def test_a_plan_that_may_be_far_from_the_best_is_written_and_ends_with_3(tmp_path: Path) -> None:
    out = tmp_path / "plan.yaml"
    sizes = ("cluster.num_gpus=1024", "train.global_batch_size=64", "search.max_seconds=0.000001")
    done = run("plan", *SMALL[:2], *sizes, f"out={out}")
    assert done.code == 3
    assert re.match(r"Search ended early: within [\d.]+ % of the best\.\n", done.out)
    assert run("explain", str(out)).out.startswith("Search ended early: within ")
    loaded = load_plan(out)
    assert loaded.ended_early
    assert loaded.search.gap_percent > 10


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--for-gpus", "1024"),
        ("plan", "--for-nodes", "64"),
        ("compare", "cluster.num_gpus=1024", "planners=[phaze]"),
    ],
)
def test_other_tables_of_such_a_plan_end_with_3(words: tuple[str, ...]) -> None:
    job = (*SMALL[:2], "train.global_batch_size=64", "search.max_seconds=0.000001")
    assert run(*words, *job).code == 3


def test_a_plan_is_written_whole_and_explained(small_plan: Path) -> None:
    plan = plan_file.read(small_plan)
    assert plan == plan_file.load(plan_file.dump(plan))
    launch = plan.launch["megatron_lm"]
    assert launch.script == "pretrain_gpt.py"
    assert "--tensor-model-parallel-size" in launch.argv
    done = run("explain", str(small_plan))
    assert done.code == 0
    for words in ("Where the time goes", "Memory of each", "Certificate", "torchrun", "Proven: "):
        assert words in done.out


@pytest.mark.parametrize("columns", ["80", "120"])
def test_tables_keep_within_the_terminal_and_are_plain_when_piped(columns: str) -> None:
    done = spawn("plan", *SMALL, *LIMITS, COLUMNS=columns)
    assert "\x1b" not in done.out
    assert max(map(len, done.out.splitlines())) <= int(columns)
    assert all(line == line.rstrip() for line in done.out.splitlines())


def test_pages_and_traces_are_written(small_plan: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "plan.html", tmp_path / "plan.json"
    assert run("explain", str(small_plan), "--html", str(page), "--timeline", str(trace)).code == 0
    assert page.read_text().lstrip().lower().startswith("<!doctype html")
    assert "traceEvents" in trace.read_text()


def test_the_terms_add_up_in_json() -> None:
    plan = run("plan", *SMALL, *LIMITS, "--json").json()
    predicted = plan["predicted"]
    assert sum(predicted["terms"].values()) == pytest.approx(predicted["iteration_time_s"])
    assert plan["notes"][0].startswith("train.global_batch_size")


def test_json_everywhere(small_plan: Path) -> None:
    assert {m["name"] for m in run("models", "--json").json()["models"]} == {
        *catalogue_names("model")
    }
    assert len(run("clusters", "--json").json()["clusters"]) == len(catalogue_names("cluster"))
    assert run("models", "llama3_8b", "--json").json()["num_layers"] == 32
    assert run("clusters", "dgx_h100", "--json").json()["levels"][0]["name"] == "node"
    assert run("estimate", *SMALL, "parallel.zero_stage=1", "--json").json()["schema"] == 2
    explained = run("explain", str(small_plan), "--json").json()["explained"]
    assert explained["certificate"].startswith("Proven: among layouts with at most 5 % risk")
    assert all(d is not None for d in explained["alternative_term_differences_s"])


@pytest.mark.parametrize("name", CORE)
def test_every_model_has_details(name: str) -> None:
    assert name in run("models", name).out


@pytest.mark.parametrize("name", catalogue_names("cluster"))
def test_every_cluster_has_details(name: str) -> None:
    assert "GB/s" in run("clusters", name).out


def test_nothing_fits() -> None:
    large = ("plan", "model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=8")
    done = run(*large, "search.max_seconds=600")
    assert done.code == 1
    assert "GiB" in done.out
    assert "cluster.num_gpus=24" in done.out
    refusal = run(*large, "--json")
    assert refusal.code == 1
    assert refusal.json()["no_plan"]["missing_bytes"] > 0


NO_TIME = "search.max_seconds=1e-9"
TOO_LARGE = ("model=llama3_70b", *SMALL[1:])
#: What a search that time ended may not say.
CLAIMS = re.compile(r"(?i)\bproven\b|\bfits?\b|missing|\blacks?\b")


def test_a_search_that_time_ended_has_an_exit_code_of_its_own() -> None:
    done = run("plan", *TOO_LARGE, NO_TIME)
    assert done.code == 3
    assert "The search ended before it found a plan" in done.out
    assert "no plan has a step below" in done.out
    assert not CLAIMS.search(done.out)
    known = run("plan", *TOO_LARGE, NO_TIME, "--json")
    assert known.code == 3
    assert known.json()["ended_early"]["lower_bound_s"] > 0
    assert known.json()["ended_early"]["search"]["certificate"] == "ended-early"
    assert not CLAIMS.search(known.out.replace("no plan has", ""))


def test_your_command_without_time_ends_alike() -> None:
    deep = LLAMA3_8B.replace("--num-layers 32", "--num-layers 320")
    done = run("plan", "--from", deep, "cluster=dgx_h100", "cluster.num_gpus=8", NO_TIME)
    assert done.code == 3
    assert not CLAIMS.search(done.out)


def test_exit_codes_are_documented() -> None:
    for text in (run("--help").out, (DOCS / "commands.md").read_text(encoding="utf-8")):
        assert "3 the time limit ended the search" in " ".join(text.split())


def test_the_end_of_a_job_without_a_plan_is_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the launch hook, the Hydra group and the frameworks' adapters end with."""
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    request = Request(
        spec=catalogue.model("llama3_70b"),
        cluster=catalogue.cluster("dgx_h100", 8),
        global_batch_size=8,
        max_seconds=1e-9,
    )
    with pytest.raises(SystemExit) as ended, ending_on_errors():
        require_plan(find_plan(request))
    assert ended.value.code == 3
    assert "The search ended before it found a plan" in (told := capsys.readouterr().out)
    assert not CLAIMS.search(told)


def test_estimate_says_what_is_missing() -> None:
    done = run("estimate", "model=llama3_70b", "cluster=dgx_h100", "cluster.num_gpus=8")
    assert done.code == 1
    assert "Does not fit" in done.err


def test_estimate_takes_a_layout_with_bars_and_stars() -> None:
    layout = "Et*10|(t*11|)*2"
    given = (*SMALL, "parallel.pipeline_model_parallel_size=4", "train.micro_batch_size=1")
    given += ("model.num_layers=32", "train.seq_length=2048")
    done = run("estimate", *given, f"parallel.pipeline_model_parallel_layout={layout}L", "--json")
    assert done.code == 0
    boundaries = done.json()["layout"]["partition"]["boundaries"]
    assert boundaries == [0, 11, 22, 33, 34]


def test_estimate_of_an_uneven_depth_finds_the_fastest_split() -> None:
    done = run("estimate", *SMALL, "parallel.pipeline_model_parallel_size=8", "model.num_layers=30")
    assert done.code == 0
    assert "does not split evenly" in done.out


def test_single_fields_of_model_and_cluster_can_be_changed() -> None:
    changes = ("model.kv_channels=128", "cluster.levels.0.latency_s=1e-5", "train.seq_length=16384")
    more = ("cluster.accelerator=h200_sxm_141gb", "memory.margin=0.1", "cost.dp_overlap=0")
    plan = run("plan", *SMALL, *LIMITS, *changes, *more, "--json").json()
    assert plan["model"]["kv_channels"] == 128
    assert plan["model"]["seq_length"] == plan["train"]["seq_length"] == 16384
    assert plan["cluster"]["levels"][0]["latency_s"] == 1e-5
    assert plan["cluster"]["accelerator"]["name"] == "H200-SXM-141GB"
    assert plan["provenance"]["settings"]["memory_margin"] == 0.1
    assert plan["provenance"]["settings"]["dp_overlap"] == 0.0


def test_own_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    text = (ROOT / "hydra_configs" / "cluster" / "custom.yaml").read_text()
    (tmp_path / "cluster" / "ours.yaml").write_text(text.replace("name: custom", "name: ours"))
    folder = ("--config-dir", str(tmp_path))
    done = run("plan", SMALL[0], "cluster=ours", SMALL[2], *LIMITS, *folder, "--json")
    assert done.json()["cluster"]["name"] == "ours"
    path = tmp_path / "cluster" / "ours.yaml"
    done = run("plan", SMALL[0], f"cluster={path}", SMALL[2], *LIMITS, "--json")
    assert done.json()["cluster"]["name"] == "ours"


def test_a_command_keeps_what_its_user_fixed() -> None:
    plan = run("plan", "--from", MIXTRAL, "cluster=dgx_h100", "--json").json()
    assert plan["cluster"]["num_gpus"] == 32
    assert plan["layout"]["global_batch_size"] == 256
    assert plan["layout"]["dims"]["pipeline_model_parallel_size"] == 4
    assert plan["layout"]["dims"]["expert_model_parallel_size"] == 8
    words = ("plan", "--from", LLAMA3_8B, "cluster=dgx_h100", "search.tie_percent=0", "--json")
    fixed, freed = (run(*words, *more).json()["predicted"] for more in ((), ("--free", "all")))
    assert freed["iteration_time_s"] <= fixed["iteration_time_s"]


def test_a_command_is_rewritten_with_every_change_shown() -> None:
    done = run("plan", "--from", LLAMA3_8B, "cluster=dgx_h100")
    assert done.code == 0
    assert "--sequence-parallel" in done.out
    assert "absent -> 2" in done.out  # of the pipeline; what was typed stays
    assert "--data-cache-path /tmp/cache" in " ".join(done.out.replace("\\\n", " ").split())


def test_a_command_s_page_has_what_runs_today_and_its_plan_keeps_it(tmp_path: Path) -> None:
    page, plan = tmp_path / "plan.html", tmp_path / "plan.yaml"
    words = ("cluster=dgx_h100", f"out={plan}", "--html", str(page))
    done = run("plan", "--from", LLAMA3_8B, *words, "--full")
    assert done.code == 0, done.err
    text = page.read_text(encoding="utf-8")
    assert 0 < text.index("<h2>Launch") < text.index("<h2>Today and planned")
    again = tmp_path / "again.html"
    explained = run("explain", str(plan), "--html", str(again))
    assert again.read_text(encoding="utf-8") == text
    assert explained.out.startswith("Today and planned\n")
    report, _, _ = explained.out.partition("\nToday is ")
    assert done.out.startswith(report)


def test_a_table_for_numbers_of_nodes_has_no_page(tmp_path: Path) -> None:
    done = run("plan", *SMALL, "--for-nodes=1..2", "--html", str(tmp_path / "plan.html"))
    assert (done.code, "has no page" in done.err) == (2, True)


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        (("-m", *SMALL, "train.global_batch_size=64,128"), ("global_batch_size=64", "128")),
        (("--for-gpus=8..16", *SMALL[:2], "train.global_batch_size=64"), (">8<", ">16<", "Pareto")),
    ],
)
def test_a_page_of_several_jobs(
    words: tuple[str, ...], rows: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "rows.html"
    done = run("plan", *words, *LIMITS, "search.num_alternatives=0", "--html", str(path), "--json")
    assert done.code == 0, done.err
    page = path.read_text(encoding="utf-8")
    assert all(each in page for each in rows)
    assert page.count('data-label="Tokens/s/GPU"') == 2
    assert 'style="width:100.0%"' in page


def test_a_command_is_written_with_the_recipe_that_was_priced(tmp_path: Path) -> None:
    job = ("model=llama3_8b", "cluster=b200", "cluster.num_gpus=8", f"out={tmp_path / 'plan.yaml'}")
    fp8 = ("train.precision=fp8", "train.fp8_recipe=mxfp8", "search.num_alternatives=0")
    assert run("plan", *job, *fp8).code == 0
    written = " ".join(run("explain", str(tmp_path / "plan.yaml")).out.replace("\\\n", " ").split())
    assert "--fp8-format hybrid --fp8-recipe mxfp8" in written
    assert " B of copies of each weight beside its 2 B," in written
    assert "than in bf16; fp8_param_gather keeps the copies alone." in written


def test_a_command_from_standard_input() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nest_megatron", "plan", "--from", "-", "cluster=dgx_h100"],
        input=LLAMA3_8B,
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0


def test_a_reader_that_goes_away_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "nest_megatron", "models"],
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(),
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_module_is_launched_as_a_module() -> None:
    script = next(word for word in LLAMA3_8B.split() if word.endswith(".py"))
    done = run("plan", "--from", LLAMA3_8B.replace(script, "-m site.train"), "cluster=dgx_h100")
    assert done.code == 0, done.err
    assert " -m site.train" in done.out


@pytest.mark.parametrize("target", ["nemo", "megatron_bridge"])
def test_a_plan_is_pinned_by_the_rules_of_its_own_framework(tmp_path: Path, target: str) -> None:
    """Megatron-LM's command has no normalization on both sides of a sub-layer."""
    out = tmp_path / "plan.yaml"
    words = (*SMALL[1:], "model=gemma2_2b", *LIMITS, f"target={target}", f"out={out}")
    assert run("plan", *words).code == 0
    assert " ".join(run("explain", str(out)).out.split()).count("how recipes take it") == 1
    assert run("pin", str(out)).err == ""
    assert run("verify", str(out)).code == 0
