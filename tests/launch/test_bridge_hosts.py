"""``+nest`` behind a script of Megatron-Bridge looks at all hosts of the job, not rank 0 alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nest_megatron.cluster.hosts import Host
from nest_megatron.config import cluster_detection
from nest_megatron.errors import UserInputError
from nest_megatron.integrations import recipe_plan
from nest_megatron.integrations.megatron_bridge import hook
from nest_megatron.integrations.megatron_lm import ranks
from nest_megatron.layout import plan_file
from nest_megatron.layout.plan import ParallelPlan
from tests import catalogue
from tests.cluster.test_described import A100, H200, adapters, host
from tests.integrations.frameworks import bridge_config

Planned = Callable[..., ParallelPlan]


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Planned:
    """The plan that rank 0 makes of what hosts of eight GPUs tell it."""
    path = tmp_path / "plan.yaml"

    def plan(hosts: tuple[Host, ...], *words: str) -> ParallelPlan:
        monkeypatch.delenv("RANK", raising=False)
        monkeypatch.setenv("WORLD_SIZE", str(8 * len(hosts)))
        monkeypatch.setattr(ranks, "job_hosts", lambda _: hosts)
        for module in (cluster_detection, recipe_plan):
            monkeypatch.setattr(module, "local_gpus", lambda: hosts[0].gpus)
        cfg = bridge_config(catalogue.model("llama3_8b"))
        job = ranks.launched_job(["+nest=auto", f"nest.out={path}", *words])
        assert job is not None
        hook.run(job, cfg, ())
        return plan_file.read(path)

    return plan


def test_the_slowest_host_s_adapters_count(
    planned: Planned, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = host("b", adapters=adapters(200.0), groups=("s1",))
    found = planned((host("a", groups=("s1",)), slow))
    assert found.cluster.levels[1].bandwidth_bytes_per_s == 2.5e10
    told = " ".join(capsys.readouterr().out.split())
    assert "between hosts: 25 GB/s for each GPU: 8 adapters of 200 Gb/s InfiniBand (b)" in told
    assert "switch_1" not in told, "ranks are not numbered by switches"


@pytest.mark.parametrize("words", [(), ("nest.cluster=dgx_h100",)])
def test_unlike_hosts_are_refused(planned: Planned, words: tuple[str, ...]) -> None:
    with pytest.raises(UserInputError, match="A100"):
        planned((host("a"), host("b", A100)), *words)


@pytest.mark.parametrize("words", [(), ("nest.cluster=dgx_h100",)])
def test_the_slower_kind_s_figures_are_taken_where_that_is_asked_for(
    planned: Planned, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned((host("a", H200), host("b")), "nest.mixed_gpus=slower", *words)
    assert found.cluster.accelerator.name.startswith("H100")
    told = " ".join(capsys.readouterr().out.split())
    assert "the slower kind" in told
    assert "What others have more of memory and speed is not used." in told


def test_a_launch_is_of_as_many_gpus_as_are_named(planned: Planned) -> None:
    with pytest.raises(UserInputError, match="the launcher started 8 ranks"):
        planned((host("a"),), "nest.cluster=dgx_h100", "nest.cluster.num_gpus=16")
