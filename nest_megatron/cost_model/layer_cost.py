"""Time and memory of one unit on one rank, part by part, without recomputation.

Sources for what goes over a device's link to its host: ``fine_grained_activation_offload.py`` and
``HybridDeviceOptimizer`` of megatron-core, ``get_cpu_offload_context`` of Transformer Engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.graph_times import ROUTED, GraphTimes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.execution import Execution, GraphImpl, TokenDispatcher
from nest_megatron.model.graph import Group, LayerCollective, LayerGraph, Part
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.model.operators.attention import GRAPH_INPUTS
from nest_megatron.plain import frozen
from nest_megatron.profile.records import Source
from nest_megatron.units import Seconds

#: Places in a ``PassTime``.
_COMPUTE = 0
_TERM_OF = {Group.TENSOR: 1, Group.CONTEXT: 2, Group.EXPERT: 3, Group.EXPERT_TENSOR: 3}


class PassTime(NamedTuple):
    """One direction of a unit, split by what the time goes into."""

    compute: Seconds = 0.0
    tp: Seconds = 0.0
    cp: Seconds = 0.0
    ep: Seconds = 0.0

    def plus(self, other: PassTime) -> PassTime:
        """Both, term by term."""
        compute, tp, cp, ep = other
        return PassTime(self.compute + compute, self.tp + tp, self.cp + cp, self.ep + ep)

    def less(self, other: PassTime) -> PassTime:
        """Without a part of it, term by term."""
        return PassTime(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))

    @property
    def total(self) -> Seconds:
        """All of it."""
        return self.compute + self.tp + self.cp + self.ep


_NO_TIME = PassTime()


@frozen
class UnitTimes:
    """A unit without recomputation.

    Args:
        forward: by part of the layer; only what communication leaves exposed counts.
        saved_bytes: for the backward pass by part; ``input_bytes`` comes on top.
        launch_s: what of both passes is spent waiting for the host to launch kernels.
        offloaded_bytes: sent to the host and fetched for the backward pass.
        not_recomputed: what recomputation up to the end leaves out of the forward pass.
    """

    forward: Mapping[Part, PassTime]
    whole_forward: PassTime
    backward: PassTime
    input_bytes: float
    saved_bytes: Mapping[Part, float]
    working_bytes: float
    launch_s: Seconds = 0.0
    offloaded_bytes: float = 0.0
    not_recomputed: PassTime = _NO_TIME

    def __add__(self, other: UnitTimes) -> UnitTimes:
        forward, saved = dict(self.forward), dict(self.saved_bytes)
        for part, time in other.forward.items():
            forward[part] = forward[part].plus(time) if part in forward else time
        for part, num in other.saved_bytes.items():
            saved[part] = saved.get(part, 0.0) + num
        return UnitTimes(
            forward=dict(sorted(forward.items())),  # one order for sums of parts
            whole_forward=self.whole_forward.plus(other.whole_forward),
            backward=self.backward.plus(other.backward),
            input_bytes=self.input_bytes + other.input_bytes,
            saved_bytes=dict(sorted(saved.items())),
            working_bytes=max(self.working_bytes, other.working_bytes),
            launch_s=self.launch_s + other.launch_s,
            offloaded_bytes=self.offloaded_bytes + other.offloaded_bytes,
            not_recomputed=other.not_recomputed,  # the end of the unit
        )

    def with_input(self, num_bytes: float) -> UnitTimes:
        """Those of a unit that begins with an MLP: what its residual saves is its input."""
        kept = self.saved_bytes[Part.RESIDUAL] - num_bytes
        return dataclasses.replace(
            self,
            input_bytes=self.input_bytes + num_bytes,
            saved_bytes={**self.saved_bytes, Part.RESIDUAL: kept},
        )


#: Of a unit that does nothing: a layer whose halves are both left out.
NO_WORK = UnitTimes(
    forward={},
    whole_forward=PassTime(),
    backward=PassTime(),
    input_bytes=0.0,
    saved_bytes={},
    working_bytes=0.0,
)


def unit_times(
    times: GraphTimes,
    accelerator: Accelerator,
    settings: CostSettings,
    execution: Execution,
    overlap_limit_s: Seconds = 0.0,
) -> UnitTimes:
    """A unit as it is carried out, what runs beside something else hidden.

    The token all-to-all can overlap ``overlap_limit_s`` of the same layer's compute outside the
    graph.
    """
    forward = {part: _only_compute(seconds) for part, seconds in times.forward.items()}
    backward = _only_compute(times.backward)
    if times.source is Source.ANALYTIC and (
        wait := _count_sync_time(times.graph, accelerator, settings, execution)
    ):
        forward.setdefault(Part.DISPATCH, _only_compute(0.0))[_COMPUTE] += wait
    for part, is_backward, term, seconds in _exposed(times, settings, execution, overlap_limit_s):
        paced = seconds * times.pace(part)
        if is_backward:
            backward[term] += paced
        else:
            forward.setdefault(part, _only_compute(0.0))[term] += paced
    whole = [sum(terms) for terms in zip(*forward.values(), strict=True)]
    waits = [0.0, 0.0]
    if times.source is Source.ANALYTIC:
        host = _host_time(times.graph, accelerator, settings, execution)
        passes = 0 if all(op.is_forward_only for op in times.graph.operators) else 2
        waits = [max(0.0, host - sum(whole)), max(0.0, passes * host - sum(backward))]
        whole[_COMPUTE] += waits[0]
        backward[_COMPUTE] += waits[1]
    return UnitTimes(
        forward={part: PassTime(*terms) for part, terms in forward.items()},
        whole_forward=PassTime(*whole),
        backward=PassTime(*backward),
        input_bytes=times.graph.input_bytes,
        saved_bytes=times.saved_bytes,
        working_bytes=times.graph.working_bytes,
        launch_s=sum(waits),
        offloaded_bytes=times.graph.offloaded_bytes,
        not_recomputed=_after_last_saved(times, settings, execution),
    )


def _after_last_saved(times: GraphTimes, settings: CostSettings, execution: Execution) -> PassTime:
    """What comes after the last tensor that a layer's backward pass needs.

    A dense layer ends with its last product, the sum of that over tensor ranks and the residual;
    one with experts with the way back of the tokens.
    """
    if not settings.traits.recompute_stops_early:
        return _NO_TIME
    compute = sum(times.operators[name][0] for name in _LAST if name in times.operators)
    tp = ep = 0.0
    for call, seconds in zip(times.graph.collectives, times.traffic, strict=True):
        own = _own_time(call, seconds, times, settings, execution)
        if call.name.startswith("fc2.") and not call.backward:
            tp += own
        elif call.part is Part.DISPATCH and call.group is Group.EXPERT and not call.backward:
            ep += own * times.pace(call.part) / 2
    return PassTime(compute=compute, tp=tp, ep=ep)


#: Operators behind the last tensor that a dense layer saves.
_LAST = ("fc2", "mlp_residual")


def _only_compute(seconds: Seconds) -> list[Seconds]:
    return [seconds, 0.0, 0.0, 0.0]


#: Parts of a layer that a graph of each module holds (``cuda_graph_scope``; both releases'
#: ``TransformerLayer._te_cuda_graph_capture`` and ``MoELayer``).
_CAPTURED: Mapping[str, frozenset[Part]] = {
    "attn": frozenset(
        {
            Part.INPUT_NORM,
            Part.QKV,
            Part.MLA_DOWN,
            Part.MLA_UP,
            Part.CORE_ATTENTION,
            Part.PROJECTION,
            Part.RESIDUAL,
        }
    ),
    "mamba": frozenset({Part.SSM}),
    "mlp": frozenset({Part.MLP_NORM, Part.MLP}),
    "moe": ROUTED | {Part.MLP_NORM, Part.ROUTER, Part.SHARED_EXPERTS},
    "moe_router": frozenset({Part.MLP_NORM, Part.ROUTER, Part.SHARED_EXPERTS}),
}
#: What launching one product of a grouped one, or a cast for it, from C++ takes of launching a
#: kernel from Python: of 0.3, 0.6 and 1 the one with which x86 and Grace hosts explain runs as well
#: as a time for each generation of devices.
_PRODUCT_LAUNCH = 0.6


def _launch_time(accelerator: Accelerator, settings: CostSettings) -> Seconds:
    """Time that the host takes to launch one operator."""
    own = settings.host_kernel_s
    return accelerator.host_kernel_s if own is None else own


def _host_time(
    graph: LayerGraph, accelerator: Accelerator, settings: CostSettings, execution: Execution
) -> Seconds:
    """Time that the host takes to launch the forward pass of a unit.

    A graph of a layer takes one launch, its inputs another; that of a whole step takes none.
    """
    each = _launch_time(accelerator, settings)
    if not each or execution.cuda_graph_impl is GraphImpl.FULL_ITERATION:
        return 0.0
    held = _captured_parts(execution)
    is_fp8 = settings.precision.is_quantized
    launches = sum(
        op.num_kernels
        + _PRODUCT_LAUNCH * (op.num_gemms - 1 + (op.num_gemms if is_fp8 and op.fp8 else 0))
        for op in graph.operators
        if op.part not in held or op.name == GRAPH_INPUTS
    )
    launches += sum(1 for call in graph.collectives if not call.backward and call.part not in held)
    return each * launches


def _count_sync_time(
    graph: LayerGraph, accelerator: Accelerator, settings: CostSettings, execution: Execution
) -> Seconds:
    """Time for which a device waits behind the host's copy of the experts' token counts.

    Where experts are padded to their capacity, or a graph holds the whole step, nothing is copied.
    """
    if execution.cuda_graph_impl is GraphImpl.FULL_ITERATION or settings.traits.pads_to_capacity:
        return 0.0
    if all(operator.part is not Part.EXPERTS for operator in graph.operators):
        return 0.0
    return settings.count_sync_launches * _launch_time(accelerator, settings)


def _captured_parts(execution: Execution) -> frozenset[Part]:
    if execution.cuda_graph_impl is GraphImpl.NONE:
        return frozenset()
    scope = execution.cuda_graph_scope or tuple(_CAPTURED)
    held = frozenset().union(*(_CAPTURED.get(module, frozenset()) for module in scope))
    return held - {Part.SHARED_EXPERTS} if execution.moe_shared_expert_overlap else held


def _exposed(
    times: GraphTimes, settings: CostSettings, execution: Execution, overlap_limit_s: Seconds
) -> Iterator[tuple[Part, bool, int, Seconds]]:
    """Part, whether backward, place in ``PassTime`` and seconds of what each collective adds.

    All of it, or what the operator that hides it leaves over.
    """
    hidden: dict[tuple[str, bool], tuple[Part, int, Seconds]] = {}
    calls = times.graph.collectives
    traffic = [
        _own_time(call, seconds, times, settings, execution)
        for call, seconds in zip(calls, times.traffic, strict=True)
    ]
    left = _left_of_all_to_all(times, traffic, settings, execution, overlap_limit_s)
    for call, time in zip(calls, traffic, strict=True):
        seconds = time * (left[call.backward] if call.part is Part.DISPATCH else 1.0)
        term = _TERM_OF[call.group]
        is_tensor = call.group is Group.TENSOR
        if not call.hidden_under or (is_tensor and not settings.traits.async_tensor_traffic):
            yield call.part, call.backward, term, seconds
            continue
        key = (call.hidden_under, call.backward)
        before = hidden.get(key)
        hidden[key] = (call.part, term, seconds + (before[2] if before else 0.0))
    for (name, is_backward), (part, term, seconds) in hidden.items():
        yield part, is_backward, term, max(0.0, seconds - times.operators[name][is_backward])


def _own_time(
    call: LayerCollective,
    seconds: Seconds,
    times: GraphTimes,
    settings: CostSettings,
    execution: Execution,
) -> Seconds:
    """Time of a collective, less what its own overlap with GEMMs hides."""
    if call.group is Group.TENSOR and execution.tp_comm_overlap:
        return seconds * (1.0 - settings.tp_overlap)
    if call.part is not Part.DISPATCH:
        return seconds
    match execution.moe_token_dispatcher_type:
        case TokenDispatcher.ALLTOALL if times.tokens_cross_nodes:
            return seconds * settings.alltoall_slowdown
        case TokenDispatcher.FLEX:
            return seconds * settings.flex_slowdown
    return seconds


def _left_of_all_to_all(
    times: GraphTimes,
    seconds: Sequence[Seconds],
    settings: CostSettings,
    execution: Execution,
    overlap_limit_s: Seconds,
) -> tuple[float, float]:
    """Share of the traffic between tokens and experts that other work leaves over, each way.

    The shared expert hides it in its own micro batch; another micro batch's work (1F1B) hides the
    traffic of both passes together under their compute, and is slowed down by it. Of both the
    better counts.
    """
    overlaps = execution.overlap_moe_expert_parallel_comm
    if not (overlaps or execution.moe_shared_expert_overlap):
        return 1.0, 1.0
    traffic, shared, compute = [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]
    for call, each in zip(times.graph.collectives, seconds, strict=True):
        traffic[call.backward] += each if call.part is Part.DISPATCH else 0.0
    for op in times.graph.operators:
        for way, each in enumerate(times.operators[op.name]):
            compute[way] += each
            shared[way] += each if op.part is Part.SHARED_EXPERTS else 0.0
    if not sum(traffic):
        return 1.0, 1.0
    forward = backward = 1.0
    if overlaps:
        hidden = min(settings.ep_overlap, (sum(compute) + overlap_limit_s) / sum(traffic))
        forward = backward = 1.0 - hidden * (1.0 - settings.overlap_slowdown)
    if execution.moe_shared_expert_overlap:
        forward = min(forward, max(0.0, 1.0 - shared[0] / traffic[0]))
        backward = min(backward, max(0.0, 1.0 - shared[1] / traffic[1]))
    return forward, backward


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
