"""What the configuration fixes of a layout, and what it leaves to the search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from nest_megatron.config.schema import ParallelConfig, PlanConfig
from nest_megatron.config.target import choice
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.parallel.dims import RankOrder
from nest_megatron.parallel.recompute import (
    Recompute,
    RecomputeGranularity,
    RecomputeMethod,
    RecomputeModule,
)
from nest_megatron.parallel.zero import ZeroStage
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.space import DEGREES, SearchSpace


def read_space(config: PlanConfig) -> SearchSpace:
    """What the search may choose.

    Raises:
        UserInputError: for a bad degree, or a choice that only ``estimate`` takes.
    """
    _refuse_estimate_only(config.parallel)
    limits = {name: getattr(config.search, f"max_{name}") for name in DEGREES}
    return SearchSpace(
        fixed=fixed_degrees(config),
        limits={name: value for name, value in limits.items() if value is not None},
        rank_orders=_one_or_all(read_rank_order(config.parallel), RankOrder),
        zero_stages=_one_or_all(read_zero(config.parallel), ZeroStage),
        recompute=read_recompute(config.parallel),
        use_all_gpus=config.search.use_all_gpus,
    )


def fixed_degrees(config: PlanConfig) -> dict[str, int]:
    """Degrees that the configuration fixes, the micro batch among them."""
    values = {name: getattr(config.parallel, name, None) for name in DEGREES}
    values["micro_batch_size"] = config.train.micro_batch_size
    micro = config.train.micro_batch_size
    if micro is not None and micro < 1:
        raise UserInputError(
            "train.micro_batch_size",
            value=micro,
            limit="it must be a whole number of at least 1",
            fix="Give the sequences of one micro batch, or leave it out to search it.",
        )
    return {name: value for name, value in values.items() if value is not None}


def read_rank_order(parallel: ParallelConfig) -> RankOrder | None:
    """The rank order, if fixed."""
    name = parallel.rank_order
    return None if name is None else choice("parallel.rank_order", name, RankOrder)


def read_zero(parallel: ParallelConfig) -> ZeroStage | None:
    """The ZeRO stage, if fixed."""
    stage = parallel.zero_stage
    if stage is None:
        return None
    if stage not in tuple(ZeroStage):
        raise UserInputError(
            "parallel.zero_stage", value=stage, limit="it is 0, 1, 2 or 3", fix="Give one of them."
        )
    return ZeroStage(stage)


def read_recompute(parallel: ParallelConfig) -> Recompute | None:
    """The recomputation, if fixed.

    Raises:
        UserInputError: if its parts do not belong together.
    """
    rest = (parallel.recompute_method, parallel.recompute_num_layers, parallel.recompute_modules)
    if parallel.recompute_granularity is None:
        if any(part is not None for part in rest):
            raise UserInputError(
                "parallel.recompute_granularity",
                value=None,
                limit="the other recompute settings need it",
                fix="Add parallel.recompute_granularity=full or selective.",
            )
        return None
    method, modules = parallel.recompute_method, parallel.recompute_modules or []
    return Recompute(
        granularity=choice(
            "parallel.recompute_granularity", parallel.recompute_granularity, RecomputeGranularity
        ),
        method=method
        if method is None
        else choice("parallel.recompute_method", method, RecomputeMethod),
        num_layers=parallel.recompute_num_layers,
        modules=_modules(modules),
    )


def _modules(names: Iterable[str]) -> tuple[RecomputeModule, ...]:
    wanted = {choice("parallel.recompute_modules", name, RecomputeModule) for name in names}
    return tuple(module for module in RecomputeModule if module in wanted)


def _refuse_estimate_only(parallel: ParallelConfig) -> None:
    if parallel.pipeline_model_parallel_layout is not None:
        raise UserInputError(
            "parallel.pipeline_model_parallel_layout",
            value=parallel.pipeline_model_parallel_layout,
            limit="plan finds the fastest layout itself",
            fix="Leave it out, or use `nest-megatron estimate` to price this one.",
        )
    if parallel.sequence_parallel is False and parallel.tensor_model_parallel_size != 1:
        raise UserInputError(
            "parallel.sequence_parallel",
            value=False,
            limit="plan uses it wherever tensor parallelism is on: same time, less memory",
            fix="Leave it out, or use `nest-megatron estimate` to price a layout without it.",
        )


def read_backend(name: str | None) -> Backend | None:
    """The solver's backend, if asked for by name."""
    known = [backend.value for backend in Backend]
    if name is not None and name not in known:
        raise UserInputError(
            "search.backend",
            value=name,
            limit=f"it is one of {', '.join(known)}",
            fix=nearest(name, known),
        )
    return None if name is None else Backend(name)


Value = TypeVar("Value")


def _one_or_all(value: Value | None, every: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(every) if value is None else (value,)
