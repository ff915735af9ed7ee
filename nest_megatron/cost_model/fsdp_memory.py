"""What FSDP has whole for a while: gathered weights, gradients that wait, double buffers.

By megatron-core 0.16.1, ``distributed/fsdp/src/megatron_fsdp``: *buffer* is
``param_and_grad_buffer.py``, *hooks* is ``megatron_fsdp.py``; 0.20 does the same where nothing else
is said. PyTorch's FSDP2 by torch 2.13, ``distributed/fsdp/_fully_shard``. Strategies differ:

* ``no_shard`` and ``optim`` keep weights and gradients whole (*buffer*:1849), so nothing comes and
  goes, but for a buffer in the width of the reduction where that is another (0.20 *buffer*:4067).
* ``optim_grads`` has no FSDP units (``mcore_fsdp_adapter.py``:96): gradients wait in buckets of
  ``--ddp-bucket-size`` until more than 1e9 of them do, whatever the layers' size (*hooks*:391).
* ``optim_grads_params`` gathers layers ahead, for half a unit of two layers and 1e9 parameters at
  least (*hooks*:387, *buffer*:3548), and lets gradients wait until more than a unit does
  (*buffer*:3110). ``--fsdp-double-buffer`` keeps two layers of both at all times (*buffer*:1875).
* FSDP2 gathers the layer behind the one at work (``_backward_prefetch``), and keeps the input of
  one reduction (``reduce_scatter_max_input_buffers``) next to the gradients that are made.

Parameters of a group of one rank are not divided (``is_data_distributed``, *buffer*:1974): they
count in what is under way, and are never there twice.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from nest_megatron.cost_model.memory import quantized_bytes, ranks_of_states, weight_bytes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.block_parameters import ParameterCount
from nest_megatron.units import Bytes

#: Parameters of Megatron-FSDP's communication unit at least.
LEAST_UNIT_SIZE = 1_000_000_000
#: Of a bucket at least, and for each replica (``training.py``:1318).
_LEAST_BUCKET, _BUCKET_OF_REPLICA = 40_000_000, 1_000_000


class RankParameters(NamedTuple):
    """Parameters around a unit on its rank.

    Args:
        replicas: ranks that dense and expert parameters are divided over.
        held: all of the rank.
        layer: the mean layer.
    """

    replicas: tuple[int, int]
    held: ParameterCount
    layer: ParameterCount
    settings: CostSettings

    def divided(self, count: ParameterCount) -> int:
        """Those that more than one rank shares."""
        dense_ranks, expert_ranks = ranks_of_states(self.replicas, self.settings)
        dense = count.dense if dense_ranks > 1 else 0
        return dense + (count.expert if expert_ranks > 1 else 0)

    @property
    def reduce_bytes(self) -> int:
        """Width in which Megatron-FSDP reduces gradients."""
        traits = self.settings.traits
        return traits.fsdp_reduce_bytes or traits.gradient_bytes


def unsharded_bytes(
    count: ParameterCount, rank: RankParameters, zero: ZeroStage, *, in_layer: bool
) -> Bytes:
    """Bytes that are whole for a while when a unit is at work, apart from what is kept.

    Args:
        count: the unit's parameters.
        in_layer: it is a layer, and no embedding or head.
    """
    if not count.total:
        return 0
    is_torch = rank.settings.traits.torch_fsdp2
    if zero < ZeroStage.WEIGHTS:
        return 0 if is_torch else _of_buckets(count, rank, zero, in_layer)
    found = _of_fsdp2(count, rank) if is_torch else _of_layers(count, rank, in_layer)
    return found + (_fp8_copies(count, rank.settings) if in_layer else 0)


def _of_buckets(
    count: ParameterCount, rank: RankParameters, zero: ZeroStage, in_layer: bool
) -> Bytes:
    """Gradients of ``optim_grads``, and of other strategies that reduce in another width.

    Buckets wait, one is added before the next wait, and one of each group is made.
    """
    traits, trained, width = rank.settings.traits, rank.held.trained, rank.reduce_bytes
    if zero < ZeroStage.GRADIENTS and width == traits.gradient_bytes:
        return 0
    unit = traits.communication_unit_size or LEAST_UNIT_SIZE
    bucket = traits.ddp_bucket_size or max(_LEAST_BUCKET, _BUCKET_OF_REPLICA * rank.replicas[0])
    if zero < ZeroStage.GRADIENTS:  # after the last micro batch, in a buffer of its own
        return min(unit + bucket, trained.total) * width
    buckets = 3 if trained.expert else 2
    waiting = unit + buckets * bucket if in_layer else rank.divided(count.trained)
    return min(waiting, rank.divided(trained)) * width


def _of_layers(count: ParameterCount, rank: RankParameters, in_layer: bool) -> Bytes:
    """Weights and gradients of ``optim_grads_params``.

    Buckets outside layers come first, so the head's forward pass gathers the first layers ahead
    (``next_bucket_id``); they go when the backward pass gathers. Its own weights stay.
    """
    traits = rank.settings.traits
    near = count if in_layer else rank.layer
    unit = traits.communication_unit_size or max(LEAST_UNIT_SIZE, 2 * rank.layer.total)
    ahead = math.ceil(unit // 2 / max(1, near.total))
    waiting = unit // max(1, near.trained.total) + 2
    if traits.fsdp_double_buffer:
        ahead, waiting = 1, 2
    weights = (1 + ahead) * rank.divided(near)
    gradients = waiting * rank.divided(near.trained)
    if not in_layer:
        weights = ahead * rank.divided(near)
        gradients = rank.divided(count.trained)
        if traits.fsdp_double_buffer:  # buffers of layers stay
            weights = 2 * rank.divided(near)
            gradients += 2 * rank.divided(near.trained)
    weights = min(weights, rank.divided(rank.held))
    gradients = min(gradients, rank.divided(rank.held.trained))
    each = weight_bytes(rank.settings, in_layer=True)
    return math.ceil(weights * each + gradients * rank.reduce_bytes)


def _of_fsdp2(count: ParameterCount, rank: RankParameters) -> Bytes:
    """Weights and gradients of FSDP2, of which embedding and head are units as layers are.

    In the backward pass the layer's weights and those that are gathered for the next; its
    gradients as autograd makes them, and the last layer's in the width of the reduction. Where
    gathered weights stay, those of all layers are counted with what is kept: in addition there is
    what the last layer was gathered into, or gradients, for which the weights of layers go.
    """
    traits = rank.settings.traits
    weight, gradient = traits.params_bytes, traits.gradient_bytes
    own, trained = rank.divided(count), rank.divided(count.trained)
    if not traits.reshard_after_forward:
        return max(own * weight, trained * max(weight, gradient))
    return min(2 * own, rank.divided(rank.held)) * weight + trained * (weight + gradient)


def _fp8_copies(count: ParameterCount, settings: CostSettings) -> Bytes:
    """What the layer at work has in fp8 with its gathered weights.

    Copies of 16-bit weights for its products, or the transposes that the backward pass makes of
    fp8 ones (*hooks*:453), unless they stay.
    """
    traits = settings.traits
    if not settings.precision.is_quantized:
        return 0
    copies = traits.fp8_weight_copies
    if traits.fp8_weights:
        copies = 0 if traits.keep_fp8_transpose_cache else copies - 1
    return math.ceil(copies * quantized_bytes(settings) * count.total)
