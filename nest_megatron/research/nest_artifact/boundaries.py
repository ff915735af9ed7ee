"""The stage boundaries of one tensor degree: a question, its answer, and who answers it."""

from __future__ import annotations

import logging
import math
from array import array
from dataclasses import dataclass
from functools import cache

from nest_megatron.research.nest_artifact import reference
from nest_megatron.research.nest_artifact.records import Chain, Instance
from nest_megatron.research.nest_artifact.rule import ArtifactRule
from nest_megatron.research.nest_artifact.stage_cost import links_of

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryTable:
    """For every depth, the least bottleneck of the chain divided into so many stages.

    Args:
        num_layers: of the chain.
        firsts: [depth, end of the first stage], the slowest stage's time; infinite where memory
            does not hold the stages.
        ends: [position from the end, start of a stage], where that stage ends.
    """

    num_layers: int
    firsts: array[float]
    ends: array[int]

    def first_stages(self, depth: int) -> list[tuple[float, int]]:
        """Bottleneck and end of the first stage, for each end that can be had."""
        size = self.num_layers + 1
        row = self.firsts[depth * size : (depth + 1) * size]
        return [(value, end) for end, value in enumerate(row) if value < math.inf]

    def boundaries(self, depth: int, first_end: int) -> tuple[int, ...]:
        """Where the stages begin and end: depth + 1 numbers from 0 to that of layers."""
        found = [0, first_end]
        for position in range(depth - 1, 0, -1):
            found.append(self.ends[position * (self.num_layers + 1) + found[-1]])
        return tuple(found)


def deepest(instance: Instance, tensor_model_parallel_size: int) -> int:
    """The most stages that layers and devices allow."""
    devices = instance.num_devices // instance.devices_per_stage(tensor_model_parallel_size)
    return min(len(instance.chains[tensor_model_parallel_size].layers), devices)


def boundary_table(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    *,
    most_weight_bytes: float = math.inf,
    compiled: bool | None = None,
) -> BoundaryTable:
    """All depths of one tensor degree, stages packed on the devices, the last one first.

    Args:
        most_weight_bytes: stages with more weights are left out.
        compiled: whether the kernel or the reference answers; they agree bit for bit. The kernel
            where it is built, if not given.
    """
    num_stages, num_layers = deepest(instance, tp), len(instance.chains[tp].layers)
    size = (num_stages + 1) * (num_layers + 1)
    firsts, ends = array("d", [math.inf]) * size, array("i", [0]) * size
    if has_kernel() if compiled is None else compiled:
        _fill_by_kernel(instance, tp, rule, most_weight_bytes, firsts, ends)
    else:
        reference.fill(instance, tp, rule, most_weight_bytes, firsts, ends)
    return BoundaryTable(num_layers=num_layers, firsts=firsts, ends=ends)


@cache
def has_kernel() -> bool:
    """Whether the compiled kernel is there; one warning says so if it is not."""
    try:
        from nest_megatron.research.nest_artifact import _stage_boundaries  # noqa: F401
    except ImportError:
        _log.warning("The compiled kernel is not built: the search of stage boundaries is slower.")
        return False
    return True


def _fill_by_kernel(
    instance: Instance,
    tp: int,
    rule: ArtifactRule,
    most_weight_bytes: float,
    firsts: array[float],
    ends: array[int],
) -> None:
    from nest_megatron.research.nest_artifact import _stage_boundaries

    chain, links = instance.chains[tp], links_of(instance, rule)
    layers, num_stages = chain.layers, deepest(instance, tp)
    n, backward = len(layers), array("d", [layer.backward for layer in layers])
    forward = array("d", [layer.forward for layer in layers])
    scratch = len(firsts) + (3 + 2 * len(links)) * n * n + n
    _stage_boundaries.fill(
        num_stages,
        forward,
        backward,
        backward if rule.recomputed_forward_costs_backward else forward,
        array("d", [layer.weight_bytes for layer in layers]),
        array("d", [layer.activation_bytes for layer in layers]),
        _edge_matrix(chain),
        array("d", [link.bandwidth for link in links]),
        array("d", [link.latency for link in links]),
        array("d", [link.factor for link in links]),
        array("i", reference.link_levels(instance, tp, num_stages)),
        instance.memory_bytes,
        instance.optimizer.state_bytes_per_weight_byte,
        most_weight_bytes,
        instance.num_devices,
        instance.recompute,
        firsts,
        ends,
        array("d", [math.inf]) * scratch,
        array("i", [0]) * (n * n),
    )


def _edge_matrix(chain: Chain) -> array[float]:
    """Bytes from each layer to each, row by row; -1 where there is no edge."""
    n = len(chain.layers)
    matrix = array("d", [-1.0]) * (n * n)
    for source, edges in enumerate(chain.outgoing):
        for target, num_bytes in edges:
            matrix[source * n + target] = num_bytes
    return matrix
