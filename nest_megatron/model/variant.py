"""Parts of a published model that the layers of Megatron-LM's command line do not have."""

from __future__ import annotations

import dataclasses

from nest_megatron.plain import Name, added, frozen


class NormPlacement(Name):
    """Where a decoder layer has its norms."""

    PRE = "pre"
    POST = "post"
    SANDWICH = "sandwich"
    SHARED = "shared"


class NormParameters(Name):
    """What is learned of a LayerNorm; an RMSNorm has no bias."""

    ALL = "weight_and_bias"
    WEIGHT = "weight"
    NONE = "none"


class Bias(Name):
    """A projection that has a bias although ``add_bias_linear`` is off."""

    PROJECTION = "linear_proj"
    LATENT_DOWN = "mla_down"
    MLP = "mlp"
    ROUTER = "router"
    EXPERT_BIAS = "expert_bias"
    MAMBA_IN = "mamba_in_proj"
    MAMBA_OUT = "mamba_out_proj"
    OUTPUT_LAYER = "output_layer"


@frozen
class ModelVariant:
    """How a model differs from the layers that Megatron-LM's command line builds.

    Args:
        parallel_attention: attention and MLP read the same hidden states, and their outputs are
            added to the residual together (GPT-J, PaLM).
        norm_placement: ``pre``: one norm before each block; ``post``: one behind each (OLMo 2);
            ``sandwich``: both (Gemma 2, GLM-4); ``shared``: attention and MLP have the one norm
            before them in common.
        norm_parameters: what is learned of a LayerNorm.
        qk_norm_full_width: norms of queries and keys have a weight for each channel of all heads,
            instead of for those of one head.
        biases: the projections that have one although ``add_bias_linear`` is off; ``expert_bias``
            is the router's bias that balances experts, where the model counts it as a parameter.
        attn_logit_softcapping: scores are capped at it by a tanh.
        final_logit_softcapping: logits are capped at it by a tanh.
        embedding_norm: a norm behind the word embedding (BLOOM).
        embedding_size: width of the word embedding where projections lie between it and the
            decoder (OPT 350M).
        final_norm: a norm before the output layer.
        mamba_conv_kernel: width of the convolution in a Mamba layer.
        mamba_conv_bias: the convolution has a bias.
        dense_mtp: layers of multi-token prediction have an MLP where the last layer has experts
            (K-EXAONE).
    """

    parallel_attention: bool = added(False)
    norm_placement: NormPlacement = added(NormPlacement.PRE)
    norm_parameters: NormParameters = added(NormParameters.ALL)
    qk_norm_full_width: bool = added(False)
    biases: tuple[Bias, ...] = added(())
    attn_logit_softcapping: float | None = added(None)
    final_logit_softcapping: float | None = added(None)
    embedding_norm: bool = added(False)
    embedding_size: int | None = added(None)
    final_norm: bool = added(True)
    mamba_conv_kernel: int = added(4)
    mamba_conv_bias: bool = added(True)
    dense_mtp: bool = added(False)

    def differences(self) -> dict[str, object]:
        """The fields that are not as Megatron-LM builds them, with their values.

        ``expert_bias`` is a buffer there: no other model, but another count.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["biases"] = tuple(bias for bias in self.biases if bias is not Bias.EXPERT_BIAS)
        return {name: value for name, value in values.items() if value != getattr(PLAIN, name)}

    def has_bias(self, projection: Bias) -> bool:
        """Whether a projection has a bias of its own."""
        return projection in self.biases


PLAIN = ModelVariant()
