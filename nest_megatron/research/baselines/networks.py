"""The cluster as methods see it that know less of its network."""

from __future__ import annotations

import dataclasses

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.model import CostModel


def on_flat_network(model: CostModel) -> CostModel:
    """A cost model to which all GPUs are neighbours: one level, with the innermost's figures."""
    cluster = model.cluster
    level = dataclasses.replace(cluster.levels[0], num_devices=None)
    return _on(model, dataclasses.replace(cluster, levels=(level,)))


def on_two_level_mesh(model: CostModel) -> CostModel:
    """A cost model to which all nodes are neighbours: two levels, inside and between nodes."""
    cluster = model.cluster
    outer = (dataclasses.replace(level, num_devices=None) for level in cluster.levels[1:2])
    return _on(model, dataclasses.replace(cluster, levels=(cluster.levels[0], *outer)))


def _on(model: CostModel, cluster: Cluster) -> CostModel:
    return CostModel(model.spec, cluster, model.settings, model.times)
