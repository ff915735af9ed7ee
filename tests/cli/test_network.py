"""``nest-megatron network``: logs in, a cluster out that plans take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from nest_megatron.profile import network
from nest_megatron.profile.network_fit import fit_hosts
from nest_megatron.profile.network_import import read_measurements
from tests.cli.runs import ROOT, run

DATA = ROOT / "tests" / "profile" / "data"
NODE, OVER = str(DATA / "h100_node.log"), str(DATA / "h100_one_gpu_a_node.log")
A100 = str(DATA / "all_reduce_a100.log")


def test_an_import_prints_what_it_fitted() -> None:
    done = run("network", "import", NODE, OVER)
    assert (done.code, done.err) == (0, "")
    for words in ("h100_node, 70 samples", "nccl 2.29.2", "node", "network", "all_to_all"):
        assert words in done.out
    found = run("network", "import", NODE, OVER, "--json").json()
    node, over = found["levels"]
    # an all-reduce of the switch passes the nominal 450 GB/s; one adapter has 50
    assert node["bandwidth_bytes_per_s"] == pytest.approx(475e9, rel=0.03)
    assert over["bandwidth_bytes_per_s"] == pytest.approx(49e9, rel=0.03)
    assert node["residuals"]["all_gather"] < 0.1
    assert found["samples"] == 70


def test_a_file_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    once, twice = (
        run("network", "import", *files, "--profile", str(path), "--force", "--json").json()
        for files in ((NODE,), (NODE, NODE))
    )
    assert once == twice
    again = run("network", "import", str(path), str(path), "--json")
    assert again.json()["samples"] == once["samples"]
    assert path.read_text().count(Path(NODE).name) == 1


@pytest.mark.parametrize("cluster", ["dgx_h100", "file"])
def test_a_measured_cluster_is_planned_on(cluster: str, tmp_path: Path) -> None:
    out, mine = tmp_path / "measured.yaml", tmp_path / "mine.yaml"
    mine.write_text((ROOT / "hydra_configs" / "cluster" / "dgx_h100.yaml").read_text())
    name = cluster if cluster == "dgx_h100" else str(mine)
    done = run("network", "import", NODE, OVER, "--cluster", name, "--out", str(out))
    assert (done.code, done.err) == (0, "")
    assert "Described" in done.out
    assert f"Wrote {out}." in done.out
    written = yaml.safe_load(out.read_text())
    assert ("defaults" in written) is (cluster == "dgx_h100")
    node, unit, spine = written["levels"]
    assert node["source"].startswith("measured: nccl-tests: h100_node.log, h100_one_gpu_a_node.log")
    assert "reduce by switch" in done.out
    assert "as described" not in node["source"]
    assert unit["efficiency"]["all_gather"] == pytest.approx(0.97, abs=0.02)
    assert "as described: reduce_scatter" in unit["source"]
    assert spine["source"].startswith("not measured")
    plan = run("plan", "model=llama3_8b", f"cluster={out}", "cluster.num_gpus=16", "--json")
    assert plan.code == 0
    assert plan.json()["cluster"]["levels"][0]["latency_s"] == node["latency_s"]


def test_a_profile_is_kept_shown_and_imported_again(tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    assert run("network", "import", NODE, "--profile", str(path)).code == 0
    profile = network.read(path)
    assert len(profile.samples) == 50
    shown = run("network", "show", str(path))
    assert shown.code == 0
    assert "reduce_scatter" in shown.out
    assert "32 MiB" in shown.out
    assert run("network", "show", str(path), "--json").json()["checksum"] == profile.checksum
    again = run("network", "import", str(path), "--cluster", "dgx_h100", "--json").json()
    assert again["levels"][0]["bandwidth_bytes_per_s"] == 450e9


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((NODE, "--out", "x.yaml"), "Add --cluster"),
        ((NODE, "--cluster", "dgx_h10"), "Did you mean dgx_h100"),
        ((NODE, "--cluster", "v100_spine_leaf"), "its GPUs are V100-SXM2-32GB, and the file names"),
        (("missing.log",), "cannot be read"),
        ((str(ROOT / "LICENSE"),), "no table of nccl-tests"),
        ((NODE, "--kind", "broadcast"), "command line"),
        ((), "Missing argument"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = run("network", "import", *arguments)
    assert done.code == 2
    assert words in done.err


def test_a_link_that_is_faster_than_described_is_refused(tmp_path: Path) -> None:
    slow = tmp_path / "slow.yaml"
    assert run("cluster", "new", "--out", str(slow)).code == 0
    slow.write_text(slow.read_text().replace("4.5e+11", "1.0e+11"))
    assert "more than 1.5 times" in run("network", "import", NODE, "--cluster", str(slow)).err


def test_a_log_of_other_gpus_is_refused_or_named(tmp_path: Path) -> None:
    log = tmp_path / "all_reduce.log"
    log.write_text(Path(A100).read_text().replace("A100-SXM4-80GB", "A100-PCIE-40GB"))
    refused = run("network", "import", str(log), "--cluster", "dgx_h100")
    assert refused.code == 2
    assert "its GPUs are H100-SXM-80GB, and the file names NVIDIA A100-PCIE-40GB" in refused.err
    assert run("network", "import", str(log), "--cluster", "dgx_a100").code == 2  # SXM, not PCIe
    assert run("network", "import", str(log)).code == 0
    kept = tmp_path / "network.yaml"
    assert run("network", "import", A100, "--profile", str(kept)).code == 0
    assert network.read(kept).devices == ("NVIDIA A100-SXM4-80GB",)
    assert run("network", "import", str(kept), "--cluster", "dgx_h100").code == 2
    assert run("network", "import", str(kept), "--cluster", "dgx_a100").code == 0
    # a GPU of one's own may have any name
    mine = tmp_path / "mine.yaml"
    shown = run("clusters", "dgx_a100", "--json").json()
    fields = {k: shown[k] for k in ("name", "num_gpus", "levels", "accelerator")}
    fields["accelerator"]["name"] = "ours"
    mine.write_text(yaml.safe_dump(fields))
    noted = run("network", "import", A100, "--cluster", str(mine))
    assert noted.code == 0, noted.err
    words = " ".join(noted.out.split())
    assert "NVIDIA A100-SXM4-80GB was measured, and the accelerator of" in words


def test_a_log_that_does_not_say_what_it_measures(tmp_path: Path) -> None:
    path = tmp_path / "8.log"
    path.write_text(Path(A100).read_text())
    done = run("network", "import", str(path))
    assert "give --kind" in done.err
    assert run("network", "import", str(path), "--kind", "all_reduce").code == 0


def test_a_profile_that_was_edited_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "network.yaml"
    assert run("network", "import", A100, "--profile", str(path)).code == 0
    path.write_text(path.read_text().replace("seconds: 0.0010", "seconds: 0.0011"))
    path.write_text(path.read_text().replace("name: all", "name: some"))
    assert "does not match the contents" in run("network", "show", str(path)).err
    both = run("network", "import", str(path), A100)
    assert both.code == 2


def test_what_a_fit_says_is_said_once(tmp_path: Path) -> None:
    """A profile that was measured holds its fit's notes; an import fits anew and has its own."""
    path = tmp_path / "network.yaml"
    noisy = [
        replace(each, seconds=each.seconds * (1 + 9 * (n % 2)))
        for n, each in enumerate(read_measurements([Path(NODE)], None).samples)
    ]
    fitted = fit_hosts(noisy)
    measured = replace(
        read_measurements([Path(NODE)], None),
        samples=tuple(noisy),
        fits=fitted.fits,
        fit_notes=fitted.notes,
    )
    network.write(measured, path)
    words = "predicted and measured times differ by"
    for arguments in (("show",), ("import",), ("import", "--cluster", "dgx_h100")):
        done = run("network", *arguments, str(path))
        assert done.code == 0, done.err
        assert " ".join(done.out.split()).count(words) == 1, arguments
