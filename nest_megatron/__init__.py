"""Plans for Megatron training jobs: the fastest layout that is expected to fit in memory.

>>> import nest_megatron
>>> plan = nest_megatron.plan(
...     model="llama3_8b", cluster="dgx_h100", num_gpus=16, global_batch_size=128
... )
>>> plan.layout.dims.tensor_model_parallel_size * plan.layout.dims.data_parallel_size
16

``docs/api.md`` describes each name. Importing the package loads nothing else: a name loads what it
needs when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from nest_megatron.version import __version__

if TYPE_CHECKING:
    from nest_megatron.api import (
        Explanation,
        Plan,
        PlanTable,
        Scaling,
        clusters,
        estimate,
        estimate_command,
        load_plan,
        models,
        plan,
        plan_command,
        plan_for_gpus,
        plan_table,
    )
    from nest_megatron.api.sweep import WhatIf, whatif, whatif_command

__all__ = [
    "Explanation",
    "Plan",
    "PlanTable",
    "Scaling",
    "WhatIf",
    "__version__",
    "clusters",
    "estimate",
    "estimate_command",
    "load_plan",
    "models",
    "plan",
    "plan_command",
    "plan_for_gpus",
    "plan_table",
    "whatif",
    "whatif_command",
]


#: Where names are that are looked for here.
_ELSEWHERE = {
    "apply_plan": "a plan writes itself into a recipe: nest_megatron.load_plan(path).apply(recipe)",
    "auto_recipe": "import it from nest_megatron.integrations.nemo, or .megatron_bridge",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        hint = f"; {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
    module = "api.sweep" if name.lower().startswith("whatif") else "api"
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
