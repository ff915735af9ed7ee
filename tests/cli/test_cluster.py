"""``nest-megatron cluster``: from what machines say to a file that ``plan`` takes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from nest_megatron.cluster import sources
from nest_megatron.errors import INTERRUPTED
from nest_megatron.plain import to_plain
from tests.cli.runs import interrupted, run
from tests.cluster.test_described import H200, host
from tests.cluster.test_outputs import CAPTURED, captured
from tests.patience import wait_until

FABRIC = CAPTURED / "ibnetdiscover_superpod.txt"
NAMES = ("a06-p1-dgx-02-c01", "a06-p1-dgx-02-c02", "a08-p1-dgx-04-c01", "a08-p1-dgx-04-c02")


def reports(folder: Path, **others: object) -> Path:
    path = folder / "reports.jsonl"
    hosts = [host(name, **({"gpus": others[name]} if name in others else {})) for name in NAMES]
    path.write_text("".join(f"{json.dumps(to_plain(each))}\n" for each in hosts))
    return path


def test_a_cluster_is_written_that_plan_takes(tmp_path: Path) -> None:
    out, hosts = tmp_path / "mine.yaml", tmp_path / "hosts.txt"
    given = ("--read", str(reports(tmp_path)), "--read", str(FABRIC))
    done = run("cluster", "discover", *given, "--out", str(out), "--hosts-out", str(hosts))
    assert (done.code, done.err) == (0, "")
    assert "between hosts: 50 GB/s for each GPU: 8 adapters of 400 Gb/s InfiniBand" in done.out
    assert "uplinks of level leaf: 0.67 of the rate of hosts: ibnetdiscover" in done.out
    assert "Not seen, and assumed\n  level node: 450 GB/s for each GPU: dgx_h100" in done.out
    shown = run("clusters", str(out), "--json").json()
    assert [(x["name"], x["num_devices"]) for x in shown["levels"]] == [
        ("node", 8),
        ("leaf", 24),
        ("fabric", None),
    ]
    assert shown["accelerator"]["name"] == "H100-SXM-80GB"
    assert hosts.read_text().splitlines()[0] == "# host leaf"
    fixed = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    planned = run("plan", "model=llama3_8b", f"cluster={out}", *fixed, "--hosts", str(hosts))
    assert planned.code == 0, planned.err
    assert "4 hosts in 2 groups of level leaf (2, 2)" in " ".join(planned.out.split())
    # our own file is replaced, another is not
    assert run("cluster", "discover", *given, "--out", str(out)).code == 0
    assert run("cluster", "discover", *given, "--out", str(reports(tmp_path))).code == 2


def test_a_new_cluster_can_be_planned_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("cluster", "new", "mine")
    assert (done.code, done.err) == (0, "")
    text = Path("mine.yaml").read_text()
    assert text.count("CHANGE") >= 9
    assert "nest-megatron plan model=llama3_8b cluster=./mine.yaml" in text
    shown = run("clusters", "./mine.yaml", "--json").json()
    assert (shown["name"], shown["num_gpus"]) == ("mine", 64)
    assert shown["accelerator"]["name"] == "H100-SXM-80GB"
    Path("mine.yaml").write_text(text.replace("num_gpus: 64", "num_gpus: 8"))
    fixed = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    assert run("plan", "model=llama3_8b", "cluster=./mine.yaml", *fixed).code == 0
    # what is there stays as it is, also what this program has written
    before = Path("mine.yaml").read_text()
    for again in (("mine",), ("--out", "mine.yaml"), ("other", "--out", "mine.yaml")):
        refused = run("cluster", "new", *again)
        assert (refused.code, "add --force to replace it" in refused.err) == (2, True)
    assert Path("mine.yaml").read_text() == before
    assert run("cluster", "new", "mine", "--force").code == 0
    assert Path("mine.yaml").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_new_cluster_has_the_name_that_was_given(tmp_path: Path) -> None:
    out = tmp_path / "site.yaml"
    assert run("cluster", "new", "123", "--out", str(out)).code == 0
    assert run("clusters", str(out), "--json").json()["name"] == "123"
    printed = run("cluster", "new", "--out", "-")
    assert 'name: "mine"' in printed.out
    assert "cluster=./mine.yaml" in printed.out
    assert "cluster=./a.yaml" in run("cluster", "new", "a", "--out", "-").out
    for wrong in (("../x",), ("a b",), ("--out", str(tmp_path / "a b.yaml")), ()):
        assert run("cluster", "new", *wrong).code == 2
    link = tmp_path / "link.yaml"
    link.symlink_to(tmp_path / "nowhere.yaml")
    assert "this file exists" in run("cluster", "new", "--out", str(link)).err


def test_mixed_hosts(tmp_path: Path) -> None:
    path = str(reports(tmp_path, **{NAMES[0]: H200}))
    refused = run("cluster", "discover", "--read", path)
    assert refused.code == 2
    assert f"1 host has 8 x NVIDIA H200 (140.4 GiB) ({NAMES[0]})" in refused.err
    taken = run("cluster", "discover", "--read", path, "--mixed-gpus", "slower", "--json").json()
    assert taken["cluster"]["accelerator"]["name"] == "H100-SXM-80GB"
    assert "is not used" in taken["notes"][0]
    assert "is not used" in taken["cluster"]["description"]


def test_hosts_with_racks_alone_need_a_named_cluster(tmp_path: Path) -> None:
    racks = tmp_path / "racks.txt"
    racks.write_text("n1 r1\nn2 r1\nn3 r2\nn4 r2\n")
    refused = run("cluster", "discover", "--hosts", str(racks))
    assert (refused.code, "name a cluster with --cluster" in " ".join(refused.err.split())) == (
        2,
        1,
    )
    found = run("cluster", "discover", "--hosts", str(racks), "--cluster", "dgx_h100", "--json")
    document = found.json()
    assert document["hosts"]["n3"] == ["r2"]
    assert document["notes"] == ["no host says what GPUs it has: those of dgx_h100 are assumed"]


def test_labels_of_kubernetes_and_one_host_s_adapters() -> None:
    nodes, port = CAPTURED / "nodes_kubernetes.json", CAPTURED / "nccl_h200.xml"
    document = run("cluster", "discover", "--read", str(nodes), "--json").json()
    assert document["cluster"]["num_gpus"] == 16
    assert any("adapters of Node201, Node304 were not seen" in x for x in document["assumed"])
    both = run("cluster", "discover", "--read", str(nodes), "--read", str(port), "--json").json()
    assert both["cluster"]["levels"][1]["bandwidth_bytes_per_s"] == 4e11 / 8 / 8
    assert both["assumed"][-1] == "adapters of hosts that do not tell theirs: those of one host (1)"


def test_a_report_is_one_line_of_json() -> None:
    done = run("cluster", "report", "--name", "node7")
    assert done.code == 0
    (found,) = sources.reports(done.out).hosts
    assert found.name == "node7"


def test_outside_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    done = run("cluster", "discover", "--slurm")
    assert (done.code, "no allocation of Slurm" in done.err) == (2, True)


def test_in_an_allocation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With programs that print what was captured, in the place of Slurm's."""
    (tmp_path / "bin").mkdir()
    texts = {
        "srun": reports(tmp_path).read_text(),
        "ibnetdiscover": captured("ibnetdiscover_superpod.txt"),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{shutil.which('cat')} {tmp_path / name}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(NAMES))
    document = run("cluster", "discover", "--json").json()
    assert document["cluster"]["num_gpus"] == 32
    assert document["hosts"][NAMES[0]] == ["leaf_of_a06-p1-dgx-02-c01"]
    assert [note.partition(":")[0] for note in document["notes"]].count("scontrol") == 2


def test_ctrl_c_ends_the_program_that_is_asked(tmp_path: Path) -> None:
    srun = tmp_path / "srun"
    srun.write_text(f"#!{sys.executable}\nimport time\ntime.sleep(3600)\n")
    srun.chmod(0o755)
    before = sorted(tmp_path.iterdir())
    variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "a[1-2]"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    words = ("cluster", "discover", "--out", "site.yaml", "--hosts-out", "hosts.txt")
    at = "subprocess:Popen.communicate"
    done = interrupted(at, *words, cwd=tmp_path, PATH=path, **variables)
    assert (done.code, done.out) == (INTERRUPTED, "")
    assert done.err.strip() == "Interrupted."
    assert sorted(tmp_path.iterdir()) == before
    wait_until(lambda: not running(srun))


def running(program: Path) -> list[Path]:
    """Processes of a program."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(program).encode() in path.read_bytes().split(b"\0"):
                found.append(path)
    return found
