"""The units of a layer sequence, built from megatron-core's own modules and run with made-up input.

Call these where the groups of ``stage.as_rank`` exist.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from nest_megatron.errors import UserInputError
from nest_megatron.layout.recompute import FULL_RECOMPUTE, Recompute
from nest_megatron.model.block_parameters import decoder_of, encoder_of
from nest_megatron.model.execution import Implementation
from nest_megatron.model.layer_pattern import LayerBlock, LayerKind
from nest_megatron.model.shard import LayerShard
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import Name, frozen


class Stretch(Name):
    """How much of a unit is run."""

    WHOLE = "whole"
    ATTENTION = "attention"
    FEED_FORWARD = "feed_forward"
    AROUND = "around"  # what an MTP layer does besides its decoder layer


@dataclass(frozen=True, slots=True)
class Unit:
    """A module, what makes its inputs (those with gradients first), and what runs it on them."""

    module: Any
    inputs: Callable[[], tuple[Any, ...]]
    forward: Callable[..., Any]


@frozen
class Layers:
    """megatron-core's own description of layers: configuration, ``ModuleSpec``s, final norm."""

    spec: TransformerSpec
    shard: LayerShard
    config: Any
    layer: Any
    norm: Any
    mtp: Any = None


def described_layers(
    spec: TransformerSpec, shard: LayerShard, config: Any, implementation: Implementation
) -> Layers:
    """The layers of ``--transformer-impl``."""
    from megatron.core.models.gpt import gpt_layer_specs as specs

    engine = implementation is Implementation.TRANSFORMER_ENGINE
    if spec.heterogeneous_layers:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import (
            get_gpt_heterogeneous_layer_spec,
        )

        block = get_gpt_heterogeneous_layer_spec(config, use_te=engine)
        config = config.get_config_for_layer(len(config.per_block_parameters))
    else:
        block = specs.get_gpt_decoder_block_spec(
            config, use_transformer_engine=engine, normalization=spec.normalization
        )
    mtp = None
    if spec.num_mtp_layers:
        layer = block.layer_specs[-1]
        mtp_block = specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=engine)
        mtp = mtp_block.layer_specs[0]
    return Layers(
        spec=spec,
        shard=shard,
        config=config,
        layer=block.layer_specs[-1],
        norm=block.layer_norm,
        mtp=mtp,
    )


def build(
    layers: Layers,
    kind: LayerKind,
    *,
    stretch: Stretch = Stretch.WHOLE,
    recompute: Recompute | None = None,
) -> Unit:
    """One unit of a model on this rank.

    Args:
        layers: their ``config`` is the one of a model with a single decoder layer of this kind.
        recompute: what to recompute; of it only ``full`` is applied here, the rest is in
            the configuration.

    Raises:
        UserInputError: for the heads of BERT, whose loss needs labels of its own.
    """
    if kind is LayerKind.EMBEDDING:
        return _embedding(layers)
    if kind is LayerKind.HEAD:
        return _head(layers)
    if kind is LayerKind.MTP:
        return _mtp(layers, stretch)
    if kind is LayerKind.MAMBA:
        from nest_megatron.megatron_core.scans import mamba_layer

        layer = mamba_layer(layers.config, layers.norm)
        return Unit(layer, lambda: (_hidden(layers),), layer)
    if kind in (LayerKind.ENCODER, LayerKind.CROSS):
        return _stack_layer(layers, kind, recompute)
    if LayerBlock.GATED_DELTA_NET in kind.blocks:  # where attention would be
        from nest_megatron.megatron_core.scans import gated_delta_net

        layers = replace(layers, layer=_with(layers.layer, self_attention=gated_delta_net()))
    return _decoder_layer(layers, _HALVES.get(kind, stretch), recompute)


#: Layers of a hybrid model that are half of a decoder layer.
_HALVES = {
    LayerKind.ATTENTION: Stretch.ATTENTION,
    LayerKind.LINEAR: Stretch.ATTENTION,
    LayerKind.MLP: Stretch.FEED_FORWARD,
    LayerKind.EXPERTS: Stretch.FEED_FORWARD,
}


def _sequence(layers: Layers) -> int:
    return round(layers.shard.tokens(layers.spec)) // layers.shard.micro_batch_size


def _hidden(layers: Layers) -> Any:
    """Hidden states ``[tokens, micro batch, hidden]`` between the blocks of a rank.

    They are random: on zeros a GPU's matrix units draw less power, so that it clocks higher and
    a timing is too short.
    """
    import torch

    spec = layers.spec
    micro_batch = layers.shard.micro_batch_size
    tokens = round(layers.shard.tokens_between_blocks(spec)) // micro_batch
    return torch.randn(
        (tokens, micro_batch, spec.hidden_size),
        dtype=layers.config.params_dtype,
        device=torch.cuda.current_device(),
        requires_grad=True,
    )


def _mask_and_angles(layers: Layers) -> tuple[Any, Any]:
    """The causal mask that attention in two GEMMs needs, and the angles of the rotary embedding.

    Angles are ``[tokens, 1, 1, width]``; latent attention has its own.
    """
    import torch

    mask = angles = None
    spec = layers.spec
    length = _sequence(layers)
    device = torch.cuda.current_device()
    if not layers.shard.flash_attention:
        mask = torch.ones((1, 1, length, length), dtype=torch.bool, device=device).triu_(1)
    if spec.position_embedding_type == "rope" and not spec.multi_latent_attention:
        width = int(spec.head_dim * spec.rotary_percent)
        angles = torch.zeros((length, 1, 1, width), device=device)
    return mask, angles


def _only(layer: Any, stretch: Stretch) -> Any:
    """A layer's description without the half that is not run, so that it is not built either."""
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    left_out = {
        Stretch.ATTENTION: ("pre_mlp_layernorm", "mlp", "mlp_bda"),
        Stretch.FEED_FORWARD: ("input_layernorm", "self_attention", "self_attn_bda"),
    }.get(stretch, ())
    nothing = {n: IdentityFuncOp if n.endswith("_bda") else IdentityOp for n in left_out}
    return _with(layer, **nothing)


def _with(described: Any, **submodules: Any) -> Any:
    """A ``ModuleSpec`` with some submodules replaced."""
    return replace(described, submodules=replace(described.submodules, **submodules))


def _decoder_layer(layers: Layers, stretch: Stretch, recompute: Recompute | None) -> Unit:
    from megatron.core.transformer.spec_utils import build_module

    layer = build_module(_only(layers.layer, stretch), config=layers.config, layer_number=1)

    def inputs() -> tuple[Any, ...]:
        return _hidden(layers), *_mask_and_angles(layers)

    def forward(hidden: Any, mask: Any, rotary: Any) -> Any:
        if stretch is Stretch.FEED_FORWARD:
            return layer._forward_mlp(hidden)
        run = layer._forward_attention if stretch is Stretch.ATTENTION else layer
        return run(hidden_states=hidden, attention_mask=mask, rotary_pos_emb=rotary)[0]

    return Unit(layer, inputs, _in_format(layers.config, _recomputed(forward, recompute)))


def _recomputed(forward: Callable[..., Any], recompute: Recompute | None) -> Callable[..., Any]:
    """A forward pass that the backward pass repeats, where whole layers are recomputed."""
    if recompute is None or recompute.granularity is not FULL_RECOMPUTE.granularity:
        return forward
    from megatron.core import tensor_parallel

    return partial(tensor_parallel.checkpoint, forward, False)


def _stack_layer(layers: Layers, kind: LayerKind, recompute: Recompute | None) -> Unit:
    """A layer of a T5-like model's encoder, or of the decoder with the encoder's output.

    Without fused attention its masks are ``[1, 1, queries, keys]``.
    """
    import torch
    from megatron.core.models.T5 import t5_spec as specs
    from megatron.core.transformer.spec_utils import build_module

    spec = layers.spec
    is_encoder = kind is LayerKind.ENCODER
    encoder = replace(layers, spec=encoder_of(spec))
    own = encoder
    describe = specs.encoder_model_with_local_spec
    if not is_encoder:
        own = replace(layers, spec=decoder_of(spec))
        describe = specs.decoder_model_with_local_spec
    layer = build_module(describe(), config=layers.config, layer_number=1)

    def mask(keys: Layers) -> Any:
        if layers.shard.flash_attention:
            return None
        shape = (1, 1, _sequence(own), _sequence(keys))
        device = torch.cuda.current_device()
        return torch.zeros(shape, dtype=torch.bool, device=device)

    def inputs() -> tuple[Any, ...]:
        _, angles = _mask_and_angles(own)
        context = None if is_encoder else _hidden(encoder)
        return _hidden(own), context, mask(own), mask(encoder), angles

    def whole(hidden: Any, context: Any, own_mask: Any, context_mask: Any, rotary: Any) -> Any:
        return layer(
            hidden_states=hidden,
            attention_mask=own_mask,
            context=context,
            context_mask=context_mask,
            rotary_pos_emb=rotary,
        )[0]

    return Unit(layer, inputs, _recomputed(whole, recompute))


def _in_format(config: Any, forward: Callable[..., Any], *, fp4: bool = True) -> Callable[..., Any]:
    """A forward pass in the 8-bit or 4-bit numbers that a job asks for.

    Args:
        fp4: 4-bit numbers, too, which Megatron leaves out of MTP layers.

    Source: ``TransformerBlock.forward``, which sets them around its layers.
    """
    in_fp4 = fp4 and bool(getattr(config, "fp4", None))  # since 0.15
    if not config.fp8 and not in_fp4:
        return forward

    def in_format(*given: Any) -> Any:
        if in_fp4:
            from megatron.core.fp4_utils import get_fp4_context as context
        else:
            from megatron.core.fp8_utils import get_fp8_context as context

        with context(config):
            return forward(*given)

    return in_format


def _without_layer(mtp: Any) -> Any:
    """An MTP layer's description without the decoder layer inside it."""
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.spec_utils import ModuleSpec

    has_old_name = hasattr(mtp.submodules, "transformer_layer")
    name = "transformer_layer" if has_old_name else "mtp_model_layer"  # 0.16, and since
    inner = getattr(mtp.submodules, name)
    hollow = _only(_only(inner, Stretch.ATTENTION), Stretch.FEED_FORWARD)
    # an MTP layer looks at the mask of the attention that it is given
    masked = ModuleSpec(module=IdentityOp, params=inner.submodules.self_attention.params)
    return _with(mtp, **{name: _with(hollow, self_attention=masked)})


def _mtp(layers: Layers, stretch: Stretch) -> Unit:
    """One layer of multi-token prediction, with the embedding of the shifted tokens as input."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    groups = ProcessGroupCollection.use_mpu_process_groups()
    described = layers.mtp if stretch is Stretch.WHOLE else _without_layer(layers.mtp)
    layer = build_module(described, config=layers.config, layer_number=1, pg_collection=groups)

    def inputs() -> tuple[Any, ...]:
        return _hidden(layers), _hidden(layers), *_mask_and_angles(layers)

    def whole(hidden: Any, embedded: Any, mask: Any, rotary: Any) -> Any:
        return layer._proj_and_transformer_layer(
            hidden_states=hidden,
            decoder_input=embedded,
            attention_mask=mask,
            rotary_pos_emb=rotary,
        )

    def around(hidden: Any, embedded: Any, *_: Any) -> Any:
        return layer._postprocess(layer._concat_embeddings(hidden, embedded))

    chosen = _in_format(layers.config, around, fp4=False) if stretch is Stretch.AROUND else whole
    return Unit(layer, inputs, chosen)


def _tokens(layers: Layers) -> Any:
    """Tokens ``[micro batch, tokens]`` of the whole vocabulary.

    Were they all the same, the gradients of one row would be summed one after the other.
    """
    import torch

    shape = (layers.shard.micro_batch_size, _sequence(layers))
    rows = layers.spec.padded_vocab_size(layers.shard.tensor_model_parallel_size)
    return torch.randint(rows, shape, device=torch.cuda.current_device())


def _embedding(layers: Layers) -> Unit:
    import torch
    from megatron.core.models.common.embeddings.language_model_embedding import (
        LanguageModelEmbedding,
    )

    spec = layers.spec
    learned = spec.position_embedding_type == "learned_absolute"
    module = LanguageModelEmbedding(
        config=layers.config,
        vocab_size=spec.padded_vocab_size(layers.shard.tensor_model_parallel_size),
        max_sequence_length=spec.max_position_embeddings or spec.seq_length,
        position_embedding_type=spec.position_embedding_type,
    )

    def inputs() -> tuple[Any, ...]:
        tokens = _tokens(layers)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return tokens, positions if learned else None

    return Unit(module, inputs, module)


def _head(layers: Layers) -> Unit:
    """Final norm, output layer and loss. Source: ``GPTModel.forward``."""
    import torch
    from megatron.core import tensor_parallel

    spec = layers.spec
    config = layers.config
    if spec.family != "gpt":
        raise UserInputError(
            "model",
            spec.name,
            "the heads of BERT have labels of their own, which are not made up here",
            "Leave the head out: --layer dense or --layer embedding.",
        )
    norm = layers.norm(config=config, hidden_size=spec.hidden_size, eps=config.layernorm_epsilon)
    output = tensor_parallel.ColumnParallelLinear(
        spec.hidden_size,
        spec.padded_vocab_size(layers.shard.tensor_model_parallel_size),
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
    )
    module = torch.nn.ModuleDict({"final_layernorm": norm, "output_layer": output})

    def inputs() -> tuple[Any, ...]:
        return _hidden(layers), _tokens(layers).transpose(0, 1).contiguous()

    def forward(hidden: Any, labels: Any) -> Any:
        logits, _ = module["output_layer"](module["final_layernorm"](hidden))
        return tensor_parallel.vocab_parallel_cross_entropy(logits, labels)

    return Unit(module, inputs, forward)
