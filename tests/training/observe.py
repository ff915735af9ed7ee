"""What megatron-core built and did on one rank, for comparison with the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from nest_megatron.model.spec import TransformerSpec
from tests.training.weights import global_parameters, is_expert


def built(spec: TransformerSpec, models: list[Any]) -> dict[str, Any]:
    """The layers and parameters of each virtual stage, before buffers replace them."""
    parameters = list(global_parameters(spec, models))
    return {
        "pipeline_rank": parallel_state.get_pipeline_model_parallel_rank(),
        "chunks": [
            {
                "layers": [layer.layer_number for layer in model.decoder.layers],
                "embedding": model.pre_process,
                "head": model.post_process,
            }
            for model in models
        ],
        "dense_parameters": sum(p.numel() for name, p in parameters if not is_expert(name)),
        "expert_parameters": sum(p.numel() for name, p in parameters if is_expert(name)),
    }


class Forwards:
    """Counts how often layers, their attention and their routers are computed.

    Recomputation recomputes them. It also notes the rows of a layer's output, of which sequence
    parallelism leaves each tensor rank a share.
    """

    def __init__(self, models: list[Any]) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()
        self.rows: set[int] = set()
        for model in models:
            for layer in model.decoder.layers:
                self._watch(layer)

    def _watch(self, layer: Any) -> None:
        number = layer.layer_number
        layer.register_forward_hook(self._counter("layer", number))
        layer.register_forward_hook(lambda _, __, output: self.rows.add(output[0].shape[0]))
        attention = layer.self_attention.core_attention
        attention.register_forward_hook(self._counter("core_attn", number))
        if hasattr(layer.mlp, "router"):
            layer.mlp.router.register_forward_hook(self._counter("moe", number))

    def _counter(self, part: str, number: int) -> Callable[..., None]:
        def count(*_: object) -> None:
            self.counts[part, number] += 1

        return count

    def report(self) -> dict[str, Any]:
        """Counts by part and layer, and the rows."""
        return {
            "forwards": [[part, number, n] for (part, number), n in self.counts.items()],
            "rows": sorted(self.rows),
        }


def num_moments(optimizer: Any) -> int:
    """Elements of Adam's first moment that this rank keeps."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    return sum(state["exp_avg"].numel() for state in states)
