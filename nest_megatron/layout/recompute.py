"""What the backward pass recomputes instead of saving."""

from __future__ import annotations

from collections.abc import Iterable

from nest_megatron.errors import UserInputError, nearest
from nest_megatron.plain import Name, frozen

#: Megatron's arguments that say it.
RECOMPUTE_ARGUMENTS = (
    "recompute_granularity",
    "recompute_method",
    "recompute_num_layers",
    "recompute_modules",
)
#: What selective recomputation is of where nothing says it.
DEFAULT_MODULES = ("core_attn",)


class RecomputeGranularity(Name):
    """Megatron's ``--recompute-granularity``; ``NONE`` stands for the flag's absence."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeMethod(Name):
    """Megatron's ``--recompute-method``, for full granularity."""

    UNIFORM = "uniform"
    BLOCK = "block"


class RecomputeModule(Name):
    """Megatron's ``--recompute-modules``, for selective granularity."""

    CORE_ATTN = "core_attn"
    MOE_ACT = "moe_act"
    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"


@frozen
class Recompute:
    """One recomputation setting.

    Args:
        modules: for ``selective``, the modules recomputed, in Megatron's order.
        method: for ``full``, ``uniform`` (every group of ``num_layers`` layers keeps its input) or
            ``block`` (the first ``num_layers`` layers of each virtual stage are recomputed).
    """

    granularity: RecomputeGranularity = RecomputeGranularity.NONE
    method: RecomputeMethod | None = None
    num_layers: int | None = None
    modules: tuple[RecomputeModule, ...] = ()

    def __post_init__(self) -> None:
        full = self.granularity is RecomputeGranularity.FULL
        if full != (self.method is not None) or full != (self.num_layers is not None):
            raise UserInputError(
                "recompute_method / recompute_num_layers",
                f"{self.method and self.method.value} / {self.num_layers}",
                "recompute_granularity full needs both, and no other takes them",
                "With full add recompute_method=uniform and recompute_num_layers=1 (it saves each "
                "layer's input); else leave both out.",
            )
        if self.num_layers is not None and self.num_layers < 1:
            raise UserInputError(
                "recompute_num_layers",
                self.num_layers,
                "it counts layers, so it is at least 1",
                "Give a positive whole number.",
            )
        if bool(self.modules) != (self.granularity is RecomputeGranularity.SELECTIVE):
            raise UserInputError(
                "recompute_modules",
                self.modules,
                "it goes with recompute_granularity selective, and only with it",
                "Name at least one module with selective, none otherwise.",
            )

    def label(self) -> str:
        """A short name for tables.

        >>> Recompute().label()
        'none'
        """
        if self.granularity is RecomputeGranularity.FULL:
            return f"full {self.method} {self.num_layers}"
        return "+".join(self.modules) or "none"


NO_RECOMPUTE = Recompute()

#: Each layer saves its input alone.
FULL_RECOMPUTE = Recompute(
    granularity=RecomputeGranularity.FULL, method=RecomputeMethod.UNIFORM, num_layers=1
)


def selective_recompute(modules: Iterable[str]) -> Recompute:
    """Some modules recomputed, put in Megatron's order.

    Raises:
        UserInputError: for a name that is no module, with the nearest, or if there is none.

    >>> selective_recompute(["mlp", "layernorm"]).label()
    'layernorm+mlp'
    """
    named, known = tuple(modules), tuple(RecomputeModule)
    for name in named:
        if name not in known:
            raise UserInputError(
                "recompute_modules",
                name,
                f"the modules that are supported are {', '.join(known)}",
                nearest(str(name), known),
            )
    return Recompute(
        granularity=RecomputeGranularity.SELECTIVE,
        modules=tuple(module for module in known if module in named),
    )
