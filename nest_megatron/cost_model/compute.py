"""Time of one operator on one device.

With ``a = flops / (peak * efficiency)`` and ``b = bytes / (bandwidth * efficiency)`` an operator
takes ``(a ** q + b ** q) ** (1 / q)`` and a floor for each kernel. ``q`` lies between 1, the sum,
and a roofline's larger of the two: prologue, epilogue and tails of a kernel do not overlap with its
main loop, but much of its traffic does. Fused attention runs its products beside the exponentials
of its softmax, which have units of their own: at the peaks of both, products of heads of 128 take
twice as long on H100 (FlashAttention-3, arXiv 2407.08608), and no longer on B200.

A scan (``OperatorKind.SCAN``: Mamba-2, gated delta net) is products inside kernels with elementwise
work between them, as attention is: its arithmetic takes attention's share of the peak and its
traffic that of streaming kernels, both times ``scan_share``, which is fitted to whole steps of
hybrid models; no public measurement of its kernels alone is known. Its traffic takes most of the
time on H100 and newer, as the authors of its fused kernel find (https://pytorch.org/blog,
"Accelerating Mamba2 with Kernel Fusion").
"""

from __future__ import annotations

import math

from nest_megatron.cluster.records import Accelerator, Precision
from nest_megatron.cost_model.formats import WIDE, NumberFormat, format_of, gemm_share
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError
from nest_megatron.model.graph import Operator, OperatorKind
from nest_megatron.units import Seconds

#: Exponent that joins arithmetic and traffic. Of 1, 1.25, 1.5, 2 and 4 the one with which GEMMs
#: that accumulate float32 gradients and all others of SimuMax's tables (697 on A100 and B200) are
#: missed to the same side by the same share; above it the mean error hardly falls.
_JOINT = 1.25

#: The exponent that joins products of attention and exponentials. Forward passes on a device with
#: 2.5 PFLOP/s reach 1,882 TFLOP/s with heads of 128 and 1,243 with heads of 64 (FlashAttention-4,
#: 16,384 tokens; cuDNN 1,157): Dao-AILab/flash-attention pull 2605. On H20, whose products are six
#: times slower, both reach the same (issue 1310 there).
_BESIDE_SOFTMAX = 2.5

#: What each further product of a grouped one adds, and each further cast for one: SimuMax's 94
#: grouped GEMMs on B200 (20 to 256 experts of 128 to 9,832 tokens) are missed by 8.5 % in the mean
#: with it, by 13 % without. Casts by themselves are not measured.
_PRODUCT_S = 3e-6
#: Share of the peak that a 16-bit product reaches which the matrix units refuse. BLOOM's search on
#: A100 (bigscience chronicles, tr11): heads of 108 instead of 144 cost 38.6 s of a step of 118 s,
#: all of it in the GEMMs of unfused attention.
UNALIGNED_EFFICIENCY = 0.033


def operator_times(
    operator: Operator, accelerator: Accelerator, settings: CostSettings
) -> tuple[Seconds, Seconds]:
    """Forward and backward time of an operator, in seconds.

    GEMMs that stay in 16 bits use the 16-bit peak.

    Raises:
        UserInputError: if the accelerator has no matrix units for the format.
    """
    rate = _flops_rate(operator, accelerator, settings)
    bandwidth = accelerator.memory_bandwidth_bytes_per_s * accelerator.memory_efficiency
    if operator.kind is OperatorKind.SCAN:
        rate, bandwidth = rate * accelerator.scan_share, bandwidth * accelerator.scan_share
    ahead, back = operator.flops / rate, operator.backward_flops / rate
    if operator.kind is OperatorKind.ATTENTION:
        softmax = operator.exponentials / (accelerator.exponentials_per_s or math.inf)
        idle = accelerator.attention_ramp_rows / operator.parallel_rows
        slower = settings.attention_slowdown * (1.0 + idle)
        faster = settings.fp8_attention_speedup if settings.traits.fp8_attention else 1.0
        ahead, back = (
            slower * _joined(softmax, products / faster, _BESIDE_SOFTMAX)
            for products in (ahead, back)
        )
    floor = accelerator.kernel_floor_s * operator.num_kernels
    floor += _PRODUCT_S * (operator.num_gemms - 1)
    moved, moved_back = operator.bytes_moved, operator.backward_bytes_moved
    number_format = format_of(settings.precision, settings.traits.fp8_recipe)
    if operator.fp8 and number_format is not None:
        narrower, narrower_back = _narrower_operands(operator, number_format)
        moved, moved_back = moved - narrower, max(0.0, moved_back - narrower_back)
    forward = floor + _joined(ahead, moved / bandwidth)
    backward = (1 if operator.frozen else 2) * floor + _joined(back, moved_back / bandwidth)
    if operator.fp8 and number_format is not None:
        # a weight's gradient alone needs its factors in the other layout as well
        layouts = 1 if operator.frozen else settings.traits.fp8_weight_copies
        cast = number_format.cast_bytes(layouts) / bandwidth
        floor = accelerator.kernel_floor_s
        if not number_format.casts_together:
            floor += _PRODUCT_S * (operator.num_gemms - 1)
        forward += floor + cast * operator.input_elements
        backward += floor + cast * operator.output_elements
    if operator.is_forward_only:
        backward = 0.0
    return settings.compute_slowdown * forward, settings.compute_slowdown * backward


def _narrower_operands(operator: Operator, number_format: NumberFormat) -> tuple[float, float]:
    """What a product reads less than its two factors of 16 bits, forward and back.

    Forward its input and its weight, back its output's gradient and the weight; for the weight's
    gradient, if it is trained, that of the output again and the input. Results stay wide.
    """
    saved = WIDE - number_format.bytes
    weight = (WIDE - number_format.weight_bytes) * operator.weight_elements
    back = saved * operator.output_elements + weight
    if not operator.frozen:
        back += saved * (operator.output_elements + operator.input_elements)
    return saved * operator.input_elements + weight, back


def _joined(arithmetic: Seconds, traffic: Seconds, exponent: float = _JOINT) -> Seconds:
    if not arithmetic:
        return traffic
    return float((arithmetic**exponent + traffic**exponent) ** (1 / exponent))


def sixteen_bit_format(accelerator: Accelerator) -> Precision:
    """The 16-bit format that the device's matrix units run."""
    return Precision.BF16 if accelerator.supports(Precision.BF16) else Precision.FP16


def _flops_rate(operator: Operator, accelerator: Accelerator, settings: CostSettings) -> float:
    precision = settings.precision
    is_single = precision is Precision.FP32
    wide = precision if is_single else sixteen_bit_format(accelerator)
    if operator.kind in (OperatorKind.ATTENTION, OperatorKind.SCAN):
        return accelerator.peak_flops_per_s[wide] * accelerator.attention_efficiency
    used = precision if operator.fp8 or not precision.is_quantized else wide
    if not accelerator.supports(used):
        raise UserInputError(
            "train.precision",
            str(precision),
            f"{accelerator.name} has matrix units for " + ", ".join(accelerator.peak_flops_per_s),
            f"Use {sixteen_bit_format(accelerator)}.",
        )
    share = accelerator.gemm_efficiency[used] if operator.aligned else UNALIGNED_EFFICIENCY
    if operator.kind is OperatorKind.GROUPED_GEMM:
        share /= 1.0 + accelerator.grouped_gemm_ramp_rows / operator.parallel_rows
    if used.is_quantized:
        share *= gemm_share(accelerator.name, settings.traits.fp8_recipe)
    return accelerator.peak_flops_per_s[used] * share
