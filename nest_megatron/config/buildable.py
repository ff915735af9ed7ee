"""Whether the framework that a plan is for can build the model."""

from __future__ import annotations

from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import UnplannableModelError
from nest_megatron.model.spec import TransformerSpec

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
    for name, value in parts.items():
        limit = f"{target.framework} cannot build such a model"
        raise UnplannableModelError(
            f"model {spec.name}: {name}", value=value, limit=limit, fix=_FIX
        )
