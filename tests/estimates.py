"""Layouts priced without a job."""

from __future__ import annotations

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Request, estimate_for
from nest_megatron.profile.lookup import LayerTimes


def estimate_plan(
    spec: TransformerSpec,
    cluster: Cluster,
    settings: CostSettings,
    layout: Layout,
    times: LayerTimes | None = None,
) -> ParallelPlan:
    """A layout as a plan, with its prediction."""
    batch = layout.global_batch_size
    request = Request(
        spec=spec, cluster=cluster, global_batch_size=batch, settings=settings, times=times
    )
    return estimate_for(request, layout)
