"""Number formats below 16 bits: their bytes, casts, rates and alignment, by recipe.

Rates and casts were checked against Transformer Engine's own benchmark of a layer (its
``docs/examples/gemm_profiling``: hidden 4096, feed-forward 16384, 15,872 tokens), as
``docs/cost_model.md`` shows.
"""

from __future__ import annotations

import re

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.traits import Fp8Recipe
from nest_megatron.model.execution import Execution
from nest_megatron.plain import frozen


@frozen
class NumberFormat:
    """What a recipe does to an element of a product.

    Args:
        scale_bytes: of the scales of its block, for each element; the other field of a weight.
        swizzles: scales are written again in the order that the product reads.
        seeks_largest: the tensor is read once more, before the cast, for its largest element.
        casts_together: one kernel casts the inputs of all products of a grouped one.
        cast_slowdown: time of a cast over what its traffic takes.
        gemm_share: rate of a product over that of its format's ``gemm_efficiency``.
        alignment: tokens of an expert come in multiples of it.
    """

    element_bytes: float = 1.0
    scale_bytes: float = 0.0
    weight_scale_bytes: float = 0.0
    swizzles: bool = False
    seeks_largest: bool = False
    casts_together: bool = False
    cast_slowdown: float = 1.0
    gemm_share: float = 1.0
    alignment: int = 16

    @property
    def bytes(self) -> float:
        """An element with its share of the scales."""
        return self.element_bytes + self.scale_bytes

    @property
    def weight_bytes(self) -> float:
        """The same of a weight."""
        return self.element_bytes + self.weight_scale_bytes

    def cast_bytes(self, layouts: int) -> float:
        """Traffic of a cast into so many layouts for each element, or as much as takes its time."""
        read = WIDE * (2 if self.seeks_largest else 1)
        written = self.bytes + (2 * self.scale_bytes if self.swizzles else 0.0)
        return self.cast_slowdown * (read + layouts * written)


#: Casts read 16 bits.
WIDE = 2.0
#: Source of alignments: ``get_fp8_align_size``, ``get_fp4_align_size``; of blocks: 128 elements, or
#: 128 x 128 of a weight (``Float8BlockScaling``), 32 (``MXFP8BlockScaling``), 16
#: (``NVFP4BlockScaling``, whose casts transform and round at random as well: 2.69 ms of that layer
#: on B300, 1.35 times what their traffic takes). Products of blockwise scales take 1 / 0.82 times
#: as long as those of one scale on H200: 22.9 ms with casts, 20.3 and 16.8 ms. Inputs of experts
#: are cast one by one, but for delayed scaling (``multi_tensor_quantize_impl``).
FORMATS = {
    Fp8Recipe.DELAYED: NumberFormat(casts_together=True),
    Fp8Recipe.TENSORWISE: NumberFormat(seeks_largest=True),
    Fp8Recipe.BLOCKWISE: NumberFormat(scale_bytes=4 / 128, gemm_share=0.82),
    Fp8Recipe.MXFP8: NumberFormat(
        scale_bytes=1 / 32, weight_scale_bytes=1 / 32, swizzles=True, alignment=32
    ),
    Fp8Recipe.CUSTOM: NumberFormat(),
    Fp8Recipe.NVFP4: NumberFormat(
        element_bytes=0.5,
        scale_bytes=1 / 16,
        weight_scale_bytes=1 / 16,
        swizzles=True,
        seeks_largest=True,
        cast_slowdown=1.35,
        alignment=128,
    ),
}
#: Tokens of an expert under Transformer Engine's fused operators (0.20,
#: ``get_align_size_for_quantization``).
FUSED_ALIGNMENT = 256

#: Devices of compute capability 10.0 to 11.x multiply fp8 matrices in any layout.
_BLACKWELL = re.compile(r"G?B[23]00", re.IGNORECASE)


def format_of(precision: Precision, recipe: Fp8Recipe) -> NumberFormat | None:
    """The format of GEMMs in layers; ``None`` for those of 16 and 32 bits."""
    if precision is Precision.NVFP4:
        return FORMATS[Fp8Recipe.NVFP4]
    return FORMATS[recipe] if precision is Precision.FP8 else None


def expert_alignment(settings: CostSettings, execution: Execution) -> int:
    """Multiple up to which the tokens of each expert are filled."""
    found = format_of(settings.precision, settings.traits.fp8_recipe)
    if found is None:
        return 1
    return FUSED_ALIGNMENT if execution.use_transformer_engine_op_fuser else found.alignment


def gemm_share(accelerator: str, recipe: Fp8Recipe) -> float:
    """Rate of a product over that of ``gemm_efficiency``.

    Blackwell has no GEMMs with blockwise scales and runs those of MXFP8 in their place
    (Transformer Engine, ``fp8_blockwise_scaling``).
    """
    if recipe is Fp8Recipe.BLOCKWISE and _BLACKWELL.match(accelerator):
        recipe = Fp8Recipe.MXFP8
    return FORMATS[recipe].gemm_share


def fp8_layouts(accelerator: str, recipe: Fp8Recipe) -> int:
    """Layouts of a matrix that GEMMs need: row by row, and column by column.

    Hopper multiplies one layout alone. Blackwell takes both, so one copy serves under a scale for
    the whole tensor; scales of blocks run along rows or columns and need two.

    Source: Transformer Engine, ``is_non_tn_fp8_gemm_supported`` and ``Float8Quantizer``.
    """
    whole_tensor = recipe in (Fp8Recipe.DELAYED, Fp8Recipe.TENSORWISE)
    return 1 if whole_tensor and _BLACKWELL.match(accelerator) else 2
