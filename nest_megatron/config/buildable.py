"""Whether the framework that a plan is for can build the model."""

from __future__ import annotations

import dataclasses

from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UnplannableModelError, UserInputError
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.model.variant import NormPlacement
from nest_megatron.solver.space import SearchSpace

_FIX = "nest-megatron models shows the model, nest-megatron estimate prices a layout of it."


def require_buildable(spec: TransformerSpec, target: Target) -> None:
    """Refuse to plan a job that its framework cannot start.

    Raises:
        UnplannableModelError: naming the first part of the model that the framework does not build.
    """
    differences = spec.variant.differences().items()
    parts = {f"variant.{name}": value for name, value in differences if name not in target.builds}
    if spec.position_embedding_type == "alibi":
        parts["position_embedding_type"] = "alibi"
    if spec.vision is not None and not spec.has_split_encoder and "vision" not in target.builds:
        parts["vision"] = f"of {spec.vision.num_layers} layers"
    for name, value in parts.items():
        limit = f"{target.framework} cannot build such a model"
        raise UnplannableModelError(
            f"model {spec.name}: {name}", value=value, limit=limit, fix=_FIX
        )


def buildable_space(spec: TransformerSpec, target: Target, space: SearchSpace) -> SearchSpace:
    """The degrees that a model's own class takes: NeMo's Gemma 3 has no virtual stages.

    Raises:
        UserInputError: if they are asked for.

    Source: ``nemo.collections.llm.gpt.model.gemma3.Gemma3Config.configure_model``.
    """
    around = spec.variant.norm_placement is NormPlacement.SANDWICH
    if not (target.fitted == "nemo" and around and spec.qk_layernorm):
        return space
    name = "virtual_pipeline_model_parallel_size"
    if (value := space.fixed.get(name, 1)) != 1:
        limit = f"the class of {spec.name} in {target.framework} refuses virtual stages"
        raise UserInputError(f"parallel.{name}", value=value, limit=limit, fix="Use 1.")
    return dataclasses.replace(space, fixed={**space.fixed, name: 1})
