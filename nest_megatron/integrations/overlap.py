"""Settings that hide communication: what of them a new layout makes stale or wrong.

Both frameworks keep them in one object (NeMo's ``MegatronCommOverlapCallback``, Megatron-Bridge's
``CommOverlapConfig``) that works out by itself what is ``None`` there, and both let a job set the
same names on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.integrations.field_mapping import contradicted_fields
from nest_megatron.integrations.fields import ABSENT, FieldValue, find
from nest_megatron.parallel.plan import ParallelPlan

_DEFERRED = (
    "the last stage would keep the gradients of logits of many micro batches, which the plan's "
    "memory does not count"
)
#: What every plan takes back (``stale_fields``), so that it weighs on no plan's memory.
TAKEN_BACK = frozenset({"defer_embedding_wgrad_compute"})
_LINKS = "virtual stages overlap their exchanges, others batch them"
_SCHEDULED = ("overlap_p2p_comm", "batch_p2p_comm")
_OVERLAPPED = ("overlap_grad_reduce", "overlap_param_gather")
_CONTRADICTED = ("overlap_param_gather_with_optimizer_step",)


def keeps_shapes(root: Any, plan: ParallelPlan, table: Mapping[str, str], seq_length: str) -> bool:
    """Whether a plan keeps the sizes that user buffers are tuned for.

    Args:
        table: item -> path.
        seq_length: path of the sequence length.
    """
    wanted = {
        table["tensor_model_parallel_size"]: plan.parallel.tensor_model_parallel_size,
        table["context_parallel_size"]: plan.parallel.context_parallel_size,
        table["micro_batch_size"]: plan.train.micro_batch_size,
        seq_length: plan.train.seq_length,
    }
    return all(find(root, path) == value for path, value in wanted.items())


def overlap_fields(
    root: Any, plan: ParallelPlan, prefix: str, *, same_shapes: bool
) -> Iterator[FieldValue]:
    """What an object of overlap settings must lose or change under a plan.

    Args:
        prefix: its path.
        same_shapes: the plan keeps the sizes that user buffers were tuned for.
    """
    stated = {
        name: find(root, f"{prefix}.{name}")
        for name in (*_SCHEDULED, *_OVERLAPPED, "wgrad_deferral_limit")
    }
    yield from stale_fields(root, plan, prefix, same_shapes=same_shapes)
    if stated["wgrad_deferral_limit"] not in (ABSENT, None):
        yield FieldValue(path=f"{prefix}.wgrad_deferral_limit", value=None, reason=_DEFERRED)
    yield from _schedule(plan, prefix, stated)
    for name in _OVERLAPPED:
        planned = getattr(plan.parallel, name)
        if stated[name] not in (ABSENT, None, planned):
            reason = "the plan's time counts on it" if planned else "there is nothing to gather"
            yield FieldValue(path=f"{prefix}.{name}", value=planned, reason=reason)


def stale_fields(
    root: Any, plan: ParallelPlan, prefix: str, *, same_shapes: bool
) -> Iterator[FieldValue]:
    """What a plan makes stale both in such an object and on the model itself."""
    table = {name: f"{prefix}.{name}" for name in _CONTRADICTED}
    yield from contradicted_fields(root, plan, table)
    buffers = f"{prefix}.tp_comm_overlap_cfg"
    unused = not plan.parallel.sequence_parallel
    if (unused or not same_shapes) and find(root, buffers) not in (ABSENT, None):
        yield FieldValue(
            path=buffers,
            value=None,
            reason="these user buffers were tuned for another layout or micro batch",
        )
    deferred = f"{prefix}.defer_embedding_wgrad_compute"
    if find(root, deferred) not in (ABSENT, None, False):
        yield FieldValue(path=deferred, value=False, reason=_DEFERRED)


def link_fields(plan: ParallelPlan, prefix: str) -> Iterator[FieldValue]:
    """How pipeline ranks exchange, where no such object works it out. Source: ``schedules.py``."""
    if plan.parallel.pipeline_model_parallel_size > 1:
        virtual = plan.parallel.virtual_pipeline_model_parallel_size is not None
        yield FieldValue(path=f"{prefix}.overlap_p2p_comm", value=virtual, reason=_LINKS)
        yield FieldValue(path=f"{prefix}.batch_p2p_comm", value=not virtual, reason=_LINKS)


def _schedule(plan: ParallelPlan, prefix: str, stated: Mapping[str, Any]) -> Iterator[FieldValue]:
    virtual = plan.parallel.virtual_pipeline_model_parallel_size is not None
    fitting = dict(zip(_SCHEDULED, (virtual, not virtual), strict=True))
    if all(stated[name] in (ABSENT, None, fitting[name]) for name in _SCHEDULED):
        return
    for name in _SCHEDULED:
        if stated[name] not in (ABSENT, None):
            yield FieldValue(path=f"{prefix}.{name}", value=None, reason=f"{_LINKS}, by themselves")
