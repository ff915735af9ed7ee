"""What goes over a device's link to its host: activations, and an optimizer that runs there.

Source: ``fine_grained_activation_offload.py`` and ``HybridDeviceOptimizer`` of megatron-core,
``get_cpu_offload_context`` of Transformer Engine.
"""

from __future__ import annotations

import dataclasses

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.layer_cost import PassTime, UnitTimes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.execution import Execution
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.units import Seconds

#: Time of Adam on the host for one parameter of a rank. Qwen3-30B-A3B on 16 H100 (TP 2 PP 2 EP 4,
#: whose fullest rank updates 1.91e9 parameters): steps of 996 ms, with all states on the host 3,877
#: ms where copies overlap and 4,189 ms where they do not; 1,871, 2,484 and 3,187 ms with 25, 50 and
#: 75 % of them (Megatron-Bridge, skills/nemo-mbridge-perf-cpu-offloading/card.yaml @067f987). One
#: measurement of one kind of host.
HOST_ADAM_S: Seconds = 1.51e-9
#: Gradient and weight of a parameter, which cross in float32 both ways.
_CROSSING_BYTES = 8.0


def host_step(accelerator: Accelerator, settings: CostSettings) -> Seconds:
    """Time of an optimizer step for one parameter whose states are on the host."""
    if settings.traits.overlaps_optimizer_copies or not accelerator.host_bandwidth_bytes_per_s:
        return HOST_ADAM_S
    return HOST_ADAM_S + _CROSSING_BYTES / accelerator.host_bandwidth_bytes_per_s


def with_copies_to_host(
    times: UnitTimes, kind: LayerKind, execution: Execution, layers: int, accelerator: Accelerator
) -> UnitTimes:
    """A unit whose activations go to the host and come back beside its own work.

    Each way runs beside one pass; what is longer than the pass waits. Recomputation is not counted
    as time to hide under. Either way the device's memory is read or written once more. Where whole
    layers move, the copies of those are spread over all ``layers`` of the model
    (``AsyncDoubleBufferGroupOffloadHandler``), and one layer is on its way back beside another.
    """
    moved = times.offloaded_bytes
    if execution.cpu_offloading_num_layers and kind.is_layer:
        share = execution.cpu_offloading_num_layers / layers
        kept = times.input_bytes + sum(times.saved_bytes.values())
        moved += share * kept
        times = dataclasses.replace(
            times,
            input_bytes=(1.0 - share) * times.input_bytes,
            saved_bytes={part: (1.0 - share) * num for part, num in times.saved_bytes.items()},
            working_bytes=times.working_bytes + kept,
        )
    if not moved:
        return times
    link = accelerator.host_bandwidth_bytes_per_s
    copy = moved / link if link else 0.0
    memory = moved / (accelerator.memory_bandwidth_bytes_per_s * accelerator.memory_efficiency)
    return dataclasses.replace(
        times,
        whole_forward=_lengthened(times.whole_forward, copy, memory),
        backward=_lengthened(times.backward, copy, memory),
    )


def _lengthened(one_pass: PassTime, copy: Seconds, memory: Seconds) -> PassTime:
    waits = max(0.0, copy - one_pass.total)
    return one_pass._replace(compute=one_pass.compute + waits + memory)
