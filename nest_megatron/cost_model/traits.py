"""How a job is executed, as far as it changes bytes or traffic: one record, read from the job."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.plain import Name, frozen


class Fp8Recipe(Name):
    """How scales of fp8 numbers are found (``--fp8-recipe``), or of NVFP4 (``--fp4-recipe``)."""

    DELAYED = "delayed"
    TENSORWISE = "tensorwise"
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    CUSTOM = "custom"
    NVFP4 = "nvfp4"


def ranged(default: Any, low: float, high: float = math.inf) -> Any:
    """A field whose numbers lie between two limits, the lower one among them."""
    return dataclasses.field(default=default, metadata={_RANGE: (low, high)})


_RANGE = "range"


def require_ranges(record: Any, name_of: Callable[[str], str] = str) -> None:
    """Check a record's ``ranged`` fields, named as a user calls them.

    ``None`` passes where it is the default; a field out of range is a ``UserInputError``.
    """
    for field in dataclasses.fields(record):
        value, limits = getattr(record, field.name), field.metadata.get(_RANGE)
        if limits is None or (value is None and field.default is None):
            continue
        low, high = limits
        if not (isinstance(value, int | float) and low <= value <= high and value < math.inf):
            limit = f"must lie between {low:g} and {high:g}"
            if high == math.inf:
                limit = f"must be at least {low:g} and finite"
            raise UserInputError(
                name_of(field.name),
                value,
                f"it {limit}",
                "Leave it out to take the documented default.",
            )


#: A float32 master weight and the two moments of Adam.
ADAM_BYTES = 12.0


@frozen
class ExecutionTraits:
    """What a job's flags, or its framework's defaults, say apart from the layout.

    The defaults are those of Megatron-LM with ``--bf16``: 16-bit weights, gradients reduced and
    stored in float32 (``validate_args``), Adam. ``cost_model/execution_flags.py`` reads them from a
    job, ``validation/frameworks.py`` has what other frameworks and releases do.

    Args:
        async_tensor_traffic: backward tensor-parallel traffic overlaps the weight gradients.
        scatter_between_stages: without sequence parallelism, the tensor ranks of a stage send a
            share of the activation each (``scatter_gather_tensors_in_pipeline`` of 2021), not all.
        flash_attention: fused attention without a score matrix, where the device has it.
        params_bytes: width of weights and activations (``params_dtype``).
        fp8_recipe: how the scales of fp8 numbers are found. What is said of fp8 here holds for
            NVFP4 as well, in its width (``formats.FORMATS``).
        fp8_attention: attention's own GEMMs run in fp8 (``fp8_dot_product_attention`` of recipes).
        fp8_weights: weights of GEMMs are in fp8 alone (``--fp8-param-gather``), without 16 bits.
        fp8_gather: those weights are gathered in fp8; 16 bits for MXFP8 without FSDP.
        fp8_inputs: GEMMs in fp8 save their input in fp8 for the weight's gradient (not with
            ``--no-fp8-wgrad``, nor in torchao).
        fp8_weight_copies: layouts of a weight that GEMMs in fp8 need (``formats.fp8_layouts``).
        fp8_transpose_cache: transposes of fp8 weights stay between micro batches (not with
            ``disable_parameter_transpose_cache``, where the backward pass makes them again).
        keep_fp8_transpose_cache: Megatron-FSDP keeps the transposes of gathered fp8 weights.
        gradient_bytes: width of the gradients that replicas reduce.
        keeps_narrow_gradients: gradients as wide as weights stay next to those that are accumulated
            in float32 (DeepSpeed's ``BF16_Optimizer``, nanotron).
        loss_bytes: memory of one logit while the cross entropy is worked out: 6 in Megatron's own
            (float32 softmax in place, 16-bit logits or gradient), 10 where a compiler fuses it out
            of place (``--cross-entropy-loss-fusion``), 2 where logits turn into gradients in place
            (Transformer Engine's kernel).
        loss_traffic_bytes: memory traffic of one 16-bit logit in the cross entropy, forward and
            back: 52 in Megatron's own (``execution_flags`` counts them), 28 where a compiler fuses
            it, 10 in Transformer Engine's kernels.
        optimizer_bytes: states of one parameter on the device: its master weight and moments.
        matrix_optimizer_bytes: the same for matrices inside layers, where their optimizer is
            another one (Muon has one momentum).
        optimizer_offload_fraction: share of the states that is on the host, where Adam then runs
            (``--optimizer-cpu-offload``).
        overlaps_optimizer_copies: ``--overlap-cpu-optimizer-d2h-h2d``.
        overlap_param_gather: weights that replicas gather once a step travel during the forward
            pass (``--overlap-param-gather``), not before it.
        overlap_p2p_comm: virtual stages send during their work, not in its time
            (``--no-overlap-p2p-communication``, with more than two pipeline ranks).
        optimizer_instances: groups of replicas that each divide all optimizer states
            (``--num-distributed-optimizer-instances``).
        microbatch_group_size_per_vp_stage: micro batches of a round of virtual stages
            (``--microbatch-group-size-per-virtual-pipeline-stage``); 0 is one a rank.
        ddp_bucket_size: parameters whose gradients travel together (``--ddp-bucket-size``); 0
            leaves it to Megatron.
        layer_wise_optimizer: replicas divide the optimizer states by whole matrices without the
            distributed optimizer (``LayerWiseDistributedOptimizer``).
        fused_activation: a gated activation saves its input alone (``bias_swiglu_fusion``).
        fp8_activation_input: it saves it in fp8 (``activation_func_fp8_input_store``).
        torch_fsdp2: PyTorch's FSDP2 divides weights and gradients, not Megatron-FSDP. It gathers
            one layer ahead; under a pipeline, gathered weights and whole gradients stay until the
            last micro batch.
        communication_unit_size: parameters whose gradients Megatron-FSDP lets wait to be reduced,
            and twice those that it gathers ahead (``--suggested-communication-unit-size``); 0
            leaves it to Megatron.
        fsdp_double_buffer: Megatron-FSDP holds two layers whole, at all times.
        fsdp_reduce_bytes: width in which Megatron-FSDP reduces gradients
            (``--megatron-fsdp-grad-comm-dtype`` of 0.20); 0 is that of ``gradient_bytes``.
        reshard_after_forward: weights that FSDP2 gathered for the forward pass go again before the
            backward pass (not with ``--torch-fsdp2-no-reshard-after-forward``).
        nccl_ub: collectives between replicas run in registered buffers, on few processors.
        keeps_stage_outputs: a pipeline stage keeps what it sent on until its backward pass
            (DeepSpeed), where Megatron frees it (``deallocate_pipeline_outputs``).
        loss_chunk_tokens: tokens whose logits exist at once, where the output layer and the cross
            entropy run in chunks of tokens; 0 is all of a micro batch.
        expert_capacity_factor: tokens that an expert takes at most, over the mean
            (``--moe-expert-capacity-factor``); ``None`` drops none.
        pads_to_capacity: each expert is filled up to that.
        attended_tokens: tokens of the sequence that a token stands in, on average over tokens,
            where sequences are packed (``SequenceLengths.attended``).
        attention_deviation: of the same (``SequenceLengths.attention_deviation``).
        offloads_layer_inputs: full recomputation keeps the inputs of layers on the host.
        recompute_stops_early: recomputation ends with the last tensor that the backward pass
            needs (``torch.utils.checkpoint`` with ``use_reentrant=False``, and so PyTorch's
            ``checkpoint_wrapper``), where Megatron's goes through the whole layer.
    """

    async_tensor_traffic: bool = True
    scatter_between_stages: bool = False
    flash_attention: bool = True
    params_bytes: int = ranged(2, 1)
    fp8_recipe: Fp8Recipe = Fp8Recipe.DELAYED
    fp8_attention: bool = False
    fp8_weights: bool = False
    fp8_gather: bool = False
    fp8_inputs: bool = True
    fp8_weight_copies: int = ranged(2, 1)
    fp8_transpose_cache: bool = True
    keep_fp8_transpose_cache: bool = False
    gradient_bytes: int = ranged(4, 1)
    keeps_narrow_gradients: bool = False
    loss_bytes: int = ranged(6, 1)
    loss_traffic_bytes: int = ranged(52, 1)
    optimizer_bytes: float = ranged(ADAM_BYTES, 0)
    matrix_optimizer_bytes: float | None = None
    optimizer_offload_fraction: float = 0.0
    overlaps_optimizer_copies: bool = False
    overlap_param_gather: bool = True
    overlap_p2p_comm: bool = True
    optimizer_instances: int = ranged(1, 1)
    microbatch_group_size_per_vp_stage: int = ranged(0, 0)
    ddp_bucket_size: int = ranged(0, 0)
    layer_wise_optimizer: bool = False
    fused_activation: bool = True
    fp8_activation_input: bool = False
    torch_fsdp2: bool = False
    communication_unit_size: int = ranged(0, 0)
    fsdp_double_buffer: bool = False
    fsdp_reduce_bytes: int = ranged(0, 0)
    reshard_after_forward: bool = True
    nccl_ub: bool = False
    keeps_stage_outputs: bool = False
    loss_chunk_tokens: int = ranged(0, 0)
    expert_capacity_factor: float | None = None
    pads_to_capacity: bool = False
    offloads_layer_inputs: bool = False
    recompute_stops_early: bool = False
    attended_tokens: float | None = ranged(None, 1)
    attention_deviation: float = ranged(0.0, 0)

    def __post_init__(self) -> None:
        capacity = self.expert_capacity_factor
        if capacity is not None and not 0.0 < capacity < math.inf:
            raise UserInputError(
                "--moe-expert-capacity-factor",
                capacity,
                "it must be above 0 and finite",
                "Leave it out to drop no tokens.",
            )
        require_ranges(self)

    @property
    def optimizer_traffic_bytes(self) -> float:
        """Memory traffic of a step for one parameter: gradient and states read, all but it written.

        30 bytes with Adam in 16-bit training.
        """
        return self.gradient_bytes + 2 * self.optimizer_bytes + self.params_bytes
