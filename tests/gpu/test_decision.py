"""From a plan to its profile and back, on a GPU that stands in."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from nest_megatron.cli import profile as command
from nest_megatron.cli.profile_request import request_of_plan
from nest_megatron.config.cluster_detection import JobCluster, find_cluster
from nest_megatron.config.job import Job
from nest_megatron.config.launch import read_words
from nest_megatron.integrations.megatron_lm import measure, measure_child
from nest_megatron.integrations.megatron_lm.measure import measure_job
from nest_megatron.integrations.megatron_lm.planning import decide
from nest_megatron.layout import plan_file
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.profile import store
from tests.cli.runs import run
from tests.gpu.stand_in import H100, stand_in_gpu
from tests.gpu.test_machine import MODEL
from tests.launch.jobs import job_argv, namespace, pad_like_megatron, running

HOST = Path(__file__).with_name("host")

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
    asked = request_of_plan(out)
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


@pytest.mark.parametrize("in_child", [False, True])
def test_a_job_that_measures_first_is_planned_with_what_it_measured(
    in_child: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``+nest=auto nest.profile.mode=measure``, in a child or its work in this process."""
    monkeypatch.setenv(store.FOLDER_VARIABLE, str(tmp_path / "profiles"))
    pad_like_megatron(monkeypatch)
    if in_child:
        monkeypatch.syspath_prepend(str(HOST))  # the child's, too
        monkeypatch.setenv("NEST_TEST_GPUS", "8")
    else:
        # the layers that a script builds need its Megatron-LM: here those of the model's shape
        monkeypatch.setattr(measure_child, "JobLayers", lambda *_: None)
        monkeypatch.setattr(
            measure,
            "measure_in_child",
            lambda orders, *_: measure_child.measure(orders, 1),
        )
    argv = job_argv(TransformerSpec(**MODEL), "--global-batch-size", "16")
    argv += ["--transformer-impl", "local"]

    def job() -> tuple[Job, JobCluster]:
        words = ["+nest=auto", "nest.cluster=dgx_h100", "nest.profile.mode=measure"]
        words.append("nest.profile.max_seconds=3600")
        place = find_cluster(read_words(words).job, 8, {}, dry_run=False)
        return running(namespace(argv), argv), place

    with stand_in_gpu(devices=8):
        measured = measure_job(job)
    assert measured is not None
    reads, place = measured
    assert not any("timed" in note or "Too large" in note for note in place.notes)
    name = place.settings.profile.name
    assert name is not None
    assert store.find_entry(name).read().machine.device_name == H100
    outcome = decide(reads, place, free=(), alternative=0)
    used = outcome.decision.plan.provenance.profile
    assert used == f"{name}: 4 measured"
