"""Bytes that weights, gradients and optimizer states take on one rank: the one formula.

In 16-bit training without other flags a parameter has 2 bytes of weight, 4 of float32 gradient
(``accumulate_allreduce_grads_in_fp32``), and 12 of optimizer state: a float32 master weight and two
Adam moments. ZeRO divides shares of that among the data-parallel ranks.

Source: ``_ParamAndGradBuffer`` (weights and gradients), ``DistributedOptimizer.
_build_model_and_main_param_groups`` (states), of megatron-core 0.16.1 and 0.20.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

from nest_megatron.cluster.records import Accelerator
from nest_megatron.cost_model.formats import format_of
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.layout.dims import ParallelDims
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.model.layer_pattern import LayerKind
from nest_megatron.units import Bytes

WEIGHT_BYTES = 2
#: Mean size of the error of predicted peaks on Megatron's own functional tests
#: (``docs/accuracy.md``): closer to the limit than this, memory alone proves nothing.
PEAK_ERROR = 0.031
#: The same of all public runs whose peak is known, of any framework (``docs/accuracy.md``).
PUBLIC_PEAK_ERROR = 0.11


class StaticBytes(NamedTuple):
    """What is kept for as long as training runs, by what it is."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer

    def plus(self, other: StaticBytes) -> StaticBytes:
        """Both, term by term."""
        return StaticBytes(*map(operator.add, self, other))

    def rounded(self) -> StaticBytes:
        """In whole bytes that add up to the rounded total."""
        weights, gradients = int(self.weights), int(self.gradients)
        return StaticBytes(weights, gradients, round(self.total) - weights - gradients)


class ParameterBytes(NamedTuple):
    """Bytes of one parameter of a rank: of layers, dense and expert, and of embedding and head."""

    dense: StaticBytes
    expert: StaticBytes
    outside: StaticBytes

    def of_unit(self, kind: LayerKind, count: ParameterCount) -> StaticBytes:
        """What a unit's parameters take, in whole bytes."""
        dense, expert = self.outside if kind.is_end else self.dense, self.expert
        trained, frozen = count.trained, count.frozen
        weights, gradients, optimizer = (
            of_dense * trained.dense + of_expert * trained.expert
            for of_dense, of_expert in zip(dense, expert, strict=True)
        )
        weights += dense.weights * frozen.dense
        weights += expert.weights * frozen.expert
        return StaticBytes(weights, gradients, optimizer).rounded()

    def least(self, count: ParameterCount) -> float:
        """Fewest bytes of parameters, whichever units those outside experts belong to."""
        trained, frozen = count.trained, count.frozen
        either = (self.dense, self.outside)
        least = trained.dense * min(each.total for each in either)
        least += frozen.dense * min(each.weights for each in either)
        return least + trained.expert * self.expert.total + frozen.expert * self.expert.weights


def parameter_bytes(
    zero: ZeroStage, replicas: tuple[int, int], settings: CostSettings, *, whole: bool = False
) -> ParameterBytes:
    """What one parameter takes, wherever it is, over dense and expert ranks that ZeRO divides over.

    ``whole`` says that gathered weights and gradients stay on every rank (``stays_whole``).
    """
    dense, expert = ranks_of_states(replicas, settings)
    return ParameterBytes(
        dense=static_bytes(zero, dense, settings, in_layer=True, whole=whole),
        expert=static_bytes(zero, expert, settings, in_layer=True, whole=whole),
        outside=static_bytes(zero, dense, settings, in_layer=False, whole=whole),
    )


def stays_whole(zero: ZeroStage, num_stages: int, settings: CostSettings) -> bool:
    """Whether what ZeRO-3 gathers, and the gradients of it, stay whole for the step.

    PyTorch's FSDP2 under a pipeline gathers once for all micro batches and reduces gradients after
    the last one (``_PipelineStageBase.backward_maybe_with_nosync``; ``reshard_after_forward`` is
    off by default there).
    """
    return settings.traits.torch_fsdp2 and zero >= ZeroStage.WEIGHTS and num_stages > 1


def static_bytes(
    zero: ZeroStage, shares: int, settings: CostSettings, *, in_layer: bool, whole: bool = False
) -> StaticBytes:
    """Bytes that one parameter of a rank costs for as long as training runs.

    ``in_layer`` says a matrix of a layer, which runs in fp8 where the job does and has the
    optimizer of matrices (its vectors are too few to matter); ``shares``, over how many ranks ZeRO
    divides it; ``whole``, that gathered weights and gradients stay with the shares.
    """
    traits, is_fp8 = settings.traits, in_layer and settings.precision.is_quantized
    weights = weight_bytes(settings, in_layer=in_layer) / (
        shares if zero >= ZeroStage.WEIGHTS else 1
    )
    if is_fp8:
        weights += fp8_copy_bytes(zero, settings)
    stays = not traits.reshard_after_forward if traits.torch_fsdp2 else not in_layer
    if whole or (zero >= ZeroStage.WEIGHTS and stays):
        weights += traits.params_bytes  # Megatron-FSDP gathers what is in no layer once a step
    states = traits.optimizer_bytes
    if in_layer and traits.matrix_optimizer_bytes is not None:
        states = traits.matrix_optimizer_bytes
    gradients = traits.gradient_bytes / (shares if zero >= ZeroStage.GRADIENTS else 1)
    if traits.keeps_narrow_gradients:
        gradients += traits.params_bytes
    return StaticBytes(
        weights,
        gradients + (traits.gradient_bytes if whole else 0),
        states / (shares if divides_states(zero, settings) else 1),
    )


def replicas(dims: ParallelDims) -> tuple[int, int]:
    """Ranks over which ZeRO divides dense and expert parameters."""
    return (
        dims.data_parallel_size * dims.context_parallel_size,
        dims.expert_data_parallel_size,
    )


def optimizer_instances(replicas: tuple[int, int], settings: CostSettings) -> int:
    """Instances of the distributed optimizer; one where a plan leaves the job's out.

    They have to divide all replicas, and an optimizer by layers has none
    (``option_num_distributed_optimizer_instances``).
    """
    traits = settings.traits
    number = 1 if traits.layer_wise_optimizer else traits.optimizer_instances
    return 1 if any(each % number for each in replicas) else number


def ranks_of_states(replicas: tuple[int, int], settings: CostSettings) -> tuple[int, int]:
    """Dense and expert ranks over which optimizer states are divided: those of one instance."""
    number = optimizer_instances(replicas, settings)
    dense, expert = replicas
    return dense // number, expert // number


def divides_states(zero: ZeroStage, settings: CostSettings) -> bool:
    """Whether replicas divide the optimizer states among them."""
    return zero >= ZeroStage.OPTIMIZER or settings.traits.layer_wise_optimizer


def quantized_bytes(settings: CostSettings) -> float:
    """Width of a weight of a product in the format of GEMMs, scales included."""
    found = format_of(settings.precision, settings.traits.fp8_recipe)
    return settings.traits.params_bytes if found is None else found.weight_bytes


def weight_bytes(settings: CostSettings, *, in_layer: bool) -> float:
    """Width of a weight, fp8 copies apart."""
    is_fp8 = in_layer and settings.traits.fp8_weights
    return quantized_bytes(settings) if is_fp8 else settings.traits.params_bytes


def gathered_bytes(settings: CostSettings, zero: ZeroStage, *, in_layer: bool) -> float:
    """Width of a weight on the wire when replicas gather it.

    Megatron-FSDP shards MXFP8 weights and their transposes, and gathers each for the pass that
    needs it (``transpose_weight_buffer``); the distributed optimizer gathers 16 bits and casts.
    """
    if settings.traits.fp8_gather or zero >= ZeroStage.WEIGHTS:
        return weight_bytes(settings, in_layer=in_layer)
    return settings.traits.params_bytes


def fp8_copy_bytes(zero: ZeroStage, settings: CostSettings) -> float:
    """Bytes on top of the weight for each parameter of a matrix product in fp8.

    Transformer Engine keeps an fp8 copy of each 16-bit weight and its transpose between micro
    batches (``TransformerEngineBaseModule.get_weight_workspace``), and of an fp8 weight the
    transpose (``Float8Tensor``). Those of gathered weights go again after use, unless a flag keeps
    them. Without its cache a transpose of an fp8 weight lives in the backward pass of one layer.
    """
    traits, width = settings.traits, quantized_bytes(settings)
    transposes = (traits.fp8_weight_copies - 1) * width
    if zero >= ZeroStage.WEIGHTS:
        return transposes if traits.fp8_weights and traits.keep_fp8_transpose_cache else 0
    if traits.fp8_weights:
        return transposes if traits.fp8_transpose_cache else 0
    return traits.fp8_weight_copies * width


def saved_input_bytes(settings: CostSettings) -> float:
    """Bytes that a product of a layer keeps of an element of its input for the backward pass.

    Transformer Engine's modules keep the fp8 input of a product in fp8, as the weight gradient's
    product in fp8 takes it (``_Linear.forward``, ``_LayerNormLinear.forward``).
    """
    found = format_of(settings.precision, settings.traits.fp8_recipe)
    if found is None or not settings.traits.fp8_inputs:
        return settings.traits.params_bytes
    return found.bytes


def saved_attention_bytes(settings: CostSettings) -> tuple[float | None, float | None]:
    """Widths in which attention saves queries, keys and values, and its output; ``None``: as wide.

    Transformer Engine's attention in fp8 saves its own fp8 tensors, of which the output stays in 16
    bits under a scale of the current tensor (``FusedAttnFunc.forward``,
    ``NVTE_DPA_FP8CS_O_in_F16``). What it saves under MXFP8 is not known.
    """
    traits = settings.traits
    if not traits.fp8_attention or traits.fp8_recipe not in _FP8_ATTENTION_OUTPUT:
        return None, None
    return 1.0, _FP8_ATTENTION_OUTPUT[traits.fp8_recipe]


#: Recipes under which attention runs in fp8, and the width in which it saves its output.
_FP8_ATTENTION_OUTPUT = {Fp8Recipe.DELAYED: 1.0, Fp8Recipe.TENSORWISE: None}


def capacity_bytes(accelerator: Accelerator, settings: CostSettings) -> Bytes:
    """Memory of one device that a plan may fill: all but the reserve and the margin."""
    usable = accelerator.memory_bytes * (1.0 - settings.memory_margin)
    return max(0, int(usable) - settings.memory_reserve_bytes)


def within_error(needed_bytes: float, limit_bytes: float) -> bool:
    """Whether a predicted peak exceeds the limit by less than such predictions are wrong."""
    return limit_bytes < needed_bytes <= limit_bytes * (1.0 + PEAK_ERROR)
