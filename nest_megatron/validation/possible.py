"""What a job may have been where a row leaves out its micro batch or its recomputation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.cluster.records import Precision
from nest_megatron.cost_model.execution_flags import execution_of
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.execution_rules import allowed_execution
from nest_megatron.parallel.grid import Grid
from nest_megatron.parallel.recompute import (
    FULL_RECOMPUTE,
    NO_RECOMPUTE,
    Recompute,
    RecomputeModule,
    selective_recompute,
)
from nest_megatron.solver.space import recompute_settings
from nest_megatron.validation.measured import ran_out_of_memory
from nest_megatron.validation.row_settings import NO_SETTINGS, RowSettings
from nest_megatron.validation.rows import Row, number

_MICRO_BATCHES = (1, 2, 4, 8)

_MODULES = RecomputeModule
#: Modules that recipes recompute, from little to much.
_EXPERTS = (
    (_MODULES.MOE_ACT,),
    (_MODULES.MOE_ACT, _MODULES.LAYERNORM),
    (_MODULES.LAYERNORM, _MODULES.MOE),
)
_LATENT = (
    (_MODULES.MLA_UP_PROJ,),
    (_MODULES.MOE_ACT, _MODULES.LAYERNORM, _MODULES.MLA_UP_PROJ),
    (_MODULES.LAYERNORM, _MODULES.MLA_UP_PROJ, _MODULES.MLP, _MODULES.MOE),
)


def possible_grids(
    row: Row,
    spec: TransformerSpec,
    grid: Grid,
    defaults: Mapping[str, Any],
    recipe: RowSettings = NO_SETTINGS,
) -> Iterator[Grid]:
    """The grid as the row and its recipe state it, or one for each thing that it may have been.

    Args:
        grid: micro batch, recomputation and execution as stated, or their defaults.
        defaults: of the row's target, and what the row states over them, by Megatron's names;
            ``recompute_granularity`` among them says that dense models run without recomputation.
        recipe: one more thing that the run may have been where it is not certain.
    """
    recomputes = _recomputes(
        row, spec, grid, recipe, keeps_dense="recompute_granularity" in defaults
    )
    usual = dataclasses.replace(grid, execution=execution_of(defaults))
    for size in _micro_batches(row, grid):
        for recompute in recomputes:
            for each in dict.fromkeys((grid,) if recipe.certain else (grid, usual)):
                found = dataclasses.replace(each, micro_batch_size=size, recompute=recompute)
                yield found if recipe.certain else _as_it_runs(found)


def planned_grids(
    row: Row, spec: TransformerSpec, grid: Grid, precision: Precision
) -> Iterator[Grid]:
    """The grid as a search would finish it: every recomputation and micro batch that are unstated.

    What a row states is kept, as a plan keeps what its user set: its time is that of a run that
    computed so much again.
    """
    settings: tuple[Recompute, ...] = (grid.recompute,)
    if not ran_out_of_memory(row) and not states_recompute(row):
        layers = -(-spec.num_layers // grid.dims.num_chunks)
        settings = tuple(recompute_settings(spec, precision, layers))
    for size in _micro_batches(row, grid):
        for recompute in settings:
            found = dataclasses.replace(grid, micro_batch_size=size, recompute=recompute)
            yield _as_it_runs(found)


def _as_it_runs(grid: Grid) -> Grid:
    """The grid without what Megatron refuses on it."""
    return dataclasses.replace(grid, execution=allowed_execution(grid.execution, grid))


#: A setting of recomputation, or a module that is recomputed.
_SETTING = re.compile(r"none|full|selective|per-op|offload|attn|norm|act\b|mlp|moe|expert|up_proj")


def states_recompute(row: Row) -> bool:
    """Whether a row says what is recomputed."""
    stated = row.get("recompute", "").strip().lower()
    return bool(_SETTING.search(stated)) and not stated.startswith("not stated")


def _micro_batches(row: Row, grid: Grid) -> tuple[int, ...]:
    if number(row, "mbs") or number(row, "ga"):
        return (grid.micro_batch_size,)
    dims, batch = grid.dims, grid.global_batch_size
    p, v = dims.pipeline_model_parallel_size, dims.virtual_pipeline_model_parallel_size
    sizes = tuple(
        size
        for size in _MICRO_BATCHES
        if batch % (size * dims.data_parallel_size) == 0
        and (v == 1 or batch // (size * dims.data_parallel_size) % p == 0)
    )
    return sizes or (grid.micro_batch_size,)


def _recomputes(
    row: Row, spec: TransformerSpec, grid: Grid, recipe: RowSettings, *, keeps_dense: bool
) -> tuple[Recompute, ...]:
    if states_recompute(row):
        return (grid.recompute,)
    if recipe.recompute is not None and (recipe.certain or ran_out_of_memory(row)):
        return (recipe.recompute,)
    # A run that ended out of memory did not look for a setting that fits.
    if ran_out_of_memory(row):
        return (grid.recompute,)
    own = () if recipe.recompute is None else (recipe.recompute,)
    if not spec.is_moe and keeps_dense:
        return tuple(dict.fromkeys((NO_RECOMPUTE, *own)))
    modules = (*_EXPERTS, *(_LATENT if spec.multi_latent_attention else ()))
    usual = (NO_RECOMPUTE, *map(selective_recompute, modules), FULL_RECOMPUTE)
    return tuple(dict.fromkeys((*usual, *own)))
