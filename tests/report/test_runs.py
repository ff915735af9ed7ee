"""A run beside its prediction: what its range rests on."""

from __future__ import annotations

import dataclasses

import pytest
from rich.console import Console

from nest_megatron.integrations.run_record import predicted
from nest_megatron.report.runs import audit_table, comparison
from tests.history.runs import run_record
from tests.report.plans import hand_plan
from tests.report.test_html_sections import SITE


@pytest.mark.parametrize(("own_runs", "said"), [(0, False), (1, True), (2, False)])
def test_a_range_after_one_run_is_said_to_be_too_narrow(own_runs: int, said: bool) -> None:
    run = run_record()
    run = dataclasses.replace(run, predicted=dataclasses.replace(run.predicted, own_runs=own_runs))
    console = Console(width=240)
    with console.capture() as captured:
        console.print(audit_table([run_record(), run]))
    for told in (comparison(run), captured.get()):
        assert ("too narrow after one run of the job" in told) is said
    assert captured.get().count(" s*") == said


def test_a_record_keeps_what_the_prediction_rests_on() -> None:
    plan = hand_plan(1, model="bert_large")
    assert predicted(plan).own_runs == 0
    site = dataclasses.replace(SITE, own_runs=1)
    provenance = dataclasses.replace(plan.provenance, site=site)
    assert predicted(dataclasses.replace(plan, provenance=provenance)).own_runs == 1
