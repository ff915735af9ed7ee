"""What the configuration fixes of a layout, and what it leaves to the search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from nest_megatron.config.schema import ParallelConfig, PlanConfig
from nest_megatron.config.target import Choice, choice
from nest_megatron.errors import UserInputError, require_at_least, require_known
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

Value = TypeVar("Value")


def read_space(config: PlanConfig) -> SearchSpace:
    """What the search may choose; ``UserInputError`` for what only ``estimate`` takes."""
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
    values["micro_batch_size"] = micro = config.train.micro_batch_size
    if micro is not None:
        fix = "Give the sequences of one micro batch, or leave it out to search it."
        require_at_least("train.micro_batch_size", micro, 1, fix)
    return {name: value for name, value in values.items() if value is not None}


def read_rank_order(parallel: ParallelConfig) -> RankOrder | None:
    """The rank order, if fixed."""
    return _named("rank_order", parallel.rank_order, RankOrder)


def _named(name: str, value: str | None, kind: type[Choice]) -> Choice | None:
    return None if value is None else choice(f"parallel.{name}", value, kind)


def read_zero(parallel: ParallelConfig) -> ZeroStage | None:
    """The ZeRO stage, if fixed."""
    stage, limit = parallel.zero_stage, "it is 0, 1, 2 or 3"
    if stage not in (None, *ZeroStage):
        what = "parallel.zero_stage"
        raise UserInputError(what, value=stage, limit=limit, fix="Give one of them.")
    return None if stage is None else ZeroStage(stage)


def read_recompute(parallel: ParallelConfig) -> Recompute | None:
    """The recomputation, if fixed; parts that do not belong together are an error."""
    rest = (parallel.recompute_method, parallel.recompute_num_layers, parallel.recompute_modules)
    if parallel.recompute_granularity is None:
        if any(part is not None for part in rest):
            limit = "the other recompute settings need it"
            fix = "Add parallel.recompute_granularity=full or selective."
            raise UserInputError("parallel.recompute_granularity", value=None, limit=limit, fix=fix)
        return None
    wanted = {
        choice("parallel.recompute_modules", name, RecomputeModule)
        for name in parallel.recompute_modules or ()
    }
    return Recompute(
        granularity=choice(
            "parallel.recompute_granularity", parallel.recompute_granularity, RecomputeGranularity
        ),
        method=_named("recompute_method", parallel.recompute_method, RecomputeMethod),
        num_layers=parallel.recompute_num_layers,
        modules=tuple(module for module in RecomputeModule if module in wanted),
    )


def _refuse_estimate_only(parallel: ParallelConfig) -> None:
    if parallel.pipeline_model_parallel_layout is not None:
        raise UserInputError(
            "parallel.pipeline_model_parallel_layout",
            value=parallel.pipeline_model_parallel_layout,
            limit="plan finds the fastest layout itself",
            fix="Leave it out, or use `nest-megatron estimate` to price this one.",
        )
    if parallel.sequence_parallel is False and parallel.tensor_model_parallel_size != 1:
        limit = "plan uses it wherever tensor parallelism is on: same time, less memory"
        fix = "Leave it out, or use `nest-megatron estimate` to price a layout without it."
        raise UserInputError("parallel.sequence_parallel", value=False, limit=limit, fix=fix)


def read_backend(name: str | None) -> Backend | None:
    """The solver's backend, if asked for by name."""
    if name is not None:
        require_known("search.backend", name, [backend.value for backend in Backend])
    return None if name is None else Backend(name)


def _one_or_all(value: Value | None, every: Iterable[Value]) -> tuple[Value, ...]:
    return tuple(every) if value is None else (value,)
