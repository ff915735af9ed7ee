"""Facts of a plan in plain sentences."""

from __future__ import annotations

import inspect
import re

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.parameters import active_parameters, total_parameters
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.plan import ParallelPlan, SearchRecord
from nest_megatron.units import GIB

_ENTRY = re.compile(r"^(\w+): (.*(?:\n {4}.*)*)", re.MULTILINE)


def model_words(spec: TransformerSpec) -> str:
    """A model's shape in one line."""
    words = [f"{total_parameters(spec) / 1e9:.3g} billion parameters"]
    if spec.is_moe:
        words.append(f"{active_parameters(spec) / 1e9:.3g} billion of them active for a token")
    words += [f"{spec.num_layers} layers", f"hidden size {spec.hidden_size}"]
    if spec.is_moe:
        words.append(f"{spec.num_experts} experts, {spec.moe_router_topk} for each token")
    return ", ".join([*words, f"sequences of {spec.seq_length} tokens"])


def funnel_steps(search: SearchRecord) -> tuple[tuple[str, int], ...]:
    """How the search narrowed the candidates down, from all of them to the answer."""
    fitting = search.candidates - sum(search.infeasible.values())
    undecided = fitting - search.bounded
    left = [("not refuted by memory", fitting)] if search.infeasible else []
    unseen = [("left when time ran out", undecided)] if undecided > search.solved else []
    met = ", met before time ran out" if search.certificate == "gap" else ""
    return (
        (f"legal combinations of degrees, batch, recompute, ZeRO{met}", search.candidates),
        *left,
        *unseen,
        ("not refuted by a bound: stage layouts searched", search.solved),
        ("chosen", 1),
    )


def setting_meanings() -> dict[str, str]:
    """What each setting of the cost model means, from its own documentation."""
    text = inspect.cleandoc(CostSettings.__doc__ or "")
    _, _, rest = text.partition("Args:\n")
    body = inspect.cleandoc("    " + rest.partition("\n\n")[0].lstrip())
    return {name: " ".join(words.split()) for name, words in _ENTRY.findall(body)}


def setting_value(name: str, value: float | str) -> str:
    """A setting for people.

    >>> setting_value("memory_reserve_bytes", 2.0 * GIB), setting_value("iteration_floor_s", 0.005)
    ('2 GiB', '5 ms')
    """
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return f"{value / GIB:g} GiB"
    return f"{1e3 * value:g} ms" if name.endswith("_s") else f"{value:g}"


def launch_size(plan: ParallelPlan) -> tuple[int, int]:
    """Nodes of a launch, and processes on each."""
    gpus, per_node = plan.placement.num_gpus, plan.cluster.launch_gpus_per_host
    return (gpus // per_node, per_node) if gpus >= per_node else (1, gpus)
