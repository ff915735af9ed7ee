"""From a plan to its profile and back, on a GPU that stands in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.cli import profile as command
from nest_megatron.cli.profile_asked import asked_by_plan
from nest_megatron.parallel import plan_file
from nest_megatron.profile import store
from tests.cli.runs import run
from tests.gpu.stand_in import H100, stand_in_gpu
from tests.gpu.test_machine import MODEL

pytestmark = [pytest.mark.megatron_lm, pytest.mark.slow]


def test_what_was_measured_for_a_decision_is_what_the_next_plan_rests_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    model, out = tmp_path / "tiny.yaml", tmp_path / "plan.yaml"
    model.write_text(yaml.safe_dump(MODEL), encoding="utf-8")
    job = (f"model={model}", "cluster=dgx_h100", "cluster.num_gpus=8")
    job += ("train.global_batch_size=16", f"out={out}")
    assert run("plan", *job, "--shortlist").code == 0
    asked = asked_by_plan(out, ())
    shapes = {command.shape_of(task) for task in asked.tasks(flash_attention=False)}
    with stand_in_gpu():
        done = run("profile", "--for", str(out), "--max-seconds", "3600", "--json")
    assert done.code == 0, done.err
    assert (
        f"Timing {len(shapes)} shapes of layers in which {asked.names} differ: about " in done.err
    )
    (entry,) = store.stored_entries()
    found = entry.read()
    assert found.machine.device_name == H100
    assert {timing.shape for timing in found.timings} == shapes
    assert run("plan", *job, "--force").code == 0
    used = plan_file.read(out).provenance.profile
    assert used.startswith(f"{found.name}: ")
    assert "measured" in used
