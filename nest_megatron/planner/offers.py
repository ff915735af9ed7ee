"""What choices that are not searched would gain: priced, and never taken."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TypeVar

from nest_megatron.cost_model.estimate import estimate
from nest_megatron.cost_model.target_defaults import MEGATRON_LM
from nest_megatron.errors import UserInputError
from nest_megatron.layout.dims import LAYER_DEGREES
from nest_megatron.layout.estimate import Estimate
from nest_megatron.layout.execution_rules import allowed_execution
from nest_megatron.layout.knobs import WITHOUT_USER_BUFFERS
from nest_megatron.layout.layout import Layout
from nest_megatron.layout.rulebook.execution import FORMAT_RULES, allows_execution
from nest_megatron.layout.rulebook.facts import LaunchRequest
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import TokenDispatcher
from nest_megatron.planner.layouts import PredictedLayout, describe_grid
from nest_megatron.planner.request import NumericOffer, Request
from nest_megatron.solver.executions import launch_request
from nest_megatron.solver.ranking import SolvedLayout
from nest_megatron.units import Bytes, Seconds, format_gib, format_seconds, to_seconds

T = TypeVar("T")
#: Finds the fastest plan of a request, if its step is shorter than one.
Faster = Callable[[Request, Seconds], SolvedLayout | None]

#: Smaller gains are below what the cost model can tell apart (docs/accuracy.md).
_LEAST_GAIN_PERCENT = 1.0
#: Freed memory that is reported where a choice is no faster.
_LEAST_FREED_PERCENT = 5.0
#: Sentences on choices that change numbers.
_MOST_NUMERIC = 5
#: More groups of replicas than this are not tried: states are then divided among few.
_MOST_INSTANCES = 16


def offers(
    plan: PredictedLayout,
    request: Request,
    find: Callable[[Request], PredictedLayout | None],
    faster: Faster,
) -> tuple[str, ...]:
    """A sentence for each choice that would gain something.

    Args:
        request: the question that ``plan`` answers.
        find: the best layout of a request, if there is one.
        faster: the fastest plan that takes less than some time, if there is one.
    """
    return (
        *_of_sharding(plan, request, find),
        *_of_packages(plan, request),
        *_of_instances(plan, request),
        *numeric_offers(plan, request, faster),
    )


def _gain_percent(step_s: Seconds, other_s: Seconds) -> float:
    return 100.0 * (step_s / other_s - 1.0)


def _of_sharding(
    plan: PredictedLayout,
    request: Request,
    find: Callable[[Request], PredictedLayout | None],
) -> Iterator[str]:
    """Another data-parallel sharding than the job's."""
    offer = request.offer
    if offer is None:
        return
    bare = replace(request, space=offer.space, offer=None, present=None, num_alternatives=0)
    try:
        other = find(bare)
    except UserInputError:  # its degrees have no legal layout under another sharding
        return
    if other is None:
        return
    step_s = other.predicted.iteration_time_s
    gain = _gain_percent(plan.predicted.iteration_time_s, step_s)
    if gain >= _LEAST_GAIN_PERCENT:
        sharding = other.layout.zero.sharding
        kind = offer.ckpt_format.get(sharding)
        needs = f"; it needs ckpt_format {kind}" if kind else ""
        fsdp = other.layout.uses_megatron_fsdp
        how = "through Megatron-FSDP" if fsdp else "without Megatron-FSDP"
        if offer.own is DataParallelSharding.TORCH_FSDP2:
            how = f"{how} instead of PyTorch FSDP2" if fsdp else "without PyTorch FSDP2"
        yield (
            f"ZeRO-{int(other.layout.zero)} {how} would be {gain:.1f} % faster "
            f"({format_seconds(step_s)}){needs}. To have it: {offer.free[sharding]}"
        )


def _fastest(
    plan: PredictedLayout, priced: Iterable[tuple[T, Estimate]]
) -> Iterator[tuple[T, str]]:
    """The fastest choice for a plan's layout that fits, and what it gains, if it gains enough."""
    fitting = [each for each in priced if each[1].fits]
    if fitting:
        choice, best = min(fitting, key=lambda each: each[1].iteration_time_s)
        gain = _gain_percent(plan.predicted.iteration_time_s, best.iteration_time_s)
        if gain >= _LEAST_GAIN_PERCENT:
            yield choice, _faster(gain, best.iteration_time_s)


def _faster(gain_percent: float, step_s: Seconds) -> str:
    return f"make this layout {gain_percent:.1f} % faster ({format_seconds(step_s)})"


def _of_packages(plan: PredictedLayout, request: Request) -> Iterator[str]:
    """The dispatcher that would make a plan's layout fastest of those with other packages."""
    if plan.layout.execution.is_node_limited:
        return
    layout, model, found = plan.layout, request.cost_model(), []
    for backend in request.packages:
        execution = replace(
            layout.execution,
            moe_token_dispatcher_type=TokenDispatcher.FLEX,
            moe_flex_dispatcher_backend=backend,
        )
        other = replace(layout, execution=allowed_execution(execution, layout))
        accepted = allows_execution(launch_request(model, request.space, other))
        if accepted and other.execution.is_node_limited:
            found.append((backend, estimate(model, other)))
    for backend, faster in _fastest(plan, found):
        values = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
        words = " ".join(f"{name}={value}" for name, value in values.items())
        if (target := request.settings.target) is None or target.startswith("megatron_lm"):
            flags = (f"--{name.replace('_', '-')} {value}" for name, value in values.items())
            words = " ".join(flags)
        package = request.packages[backend]
        yield (
            f"{words} would {faster}. It needs a package where the job runs; "
            f"search.packages=[{package}] says that it is there"
        )


def _of_instances(plan: PredictedLayout, request: Request) -> Iterator[str]:
    """The number of instances of the distributed optimizer that would make a layout fastest.

    They bring the gathering of weights nearer, at the price of as many copies of the optimizer
    states. It is not searched: it is a setting of the whole job, whose every value would make
    another search.
    """
    settings, layout = request.settings, plan.layout
    targets = [target.name for target in MEGATRON_LM]
    if settings.target not in targets or settings.traits.optimizer_instances > 1:
        return
    if layout.zero.is_fsdp or not layout.shards_optimizer:
        return
    dims, found = layout.dims, []
    replicas = dims.data_parallel_size * dims.context_parallel_size
    if request.spec.is_moe:  # those of experts as well (0.16.1 parallel_state:833)
        replicas = math.gcd(replicas, dims.expert_data_parallel_size)
    for number in range(2, min(_MOST_INSTANCES, replicas // 2) + 1):
        if replicas % number:
            continue
        traits = replace(settings.traits, optimizer_instances=number)
        other = replace(settings, traits=traits)
        found.append((number, estimate(request.cost_model(other), layout)))
    for number, faster in _fastest(plan, found):
        yield (
            f"--num-distributed-optimizer-instances {number} would {faster}. It keeps {number} "
            "copies of the optimizer states"
        )


def numeric_offers(plan: PredictedLayout, request: Request, faster: Faster) -> tuple[str, ...]:
    """The choices that change numbers and would gain something, the best first.

    Of choices of one family (formats of GEMMs) the best is said.
    """
    gains = ((_gain_of(offer, plan, request, faster), offer) for offer in request.numeric_offers)
    found = [(gain, offer.knobs[0].family) for gain, offer in gains if gain is not None]
    said: dict[str, str] = {}
    for (*_, sentence), family in sorted(found, key=lambda each: each[0][:2]):
        said.setdefault(family, sentence)
    return tuple(said.values())[:_MOST_NUMERIC]


def _gain_of(
    offer: NumericOffer, plan: PredictedLayout, request: Request, faster: Faster
) -> tuple[Seconds, Bytes, str] | None:
    """What a choice brings to the plan's layout, or to one that the memory it frees allows.

    Returns:
        The step, the freed memory below 0, and a sentence; ``None`` for nothing that the cost model
        can tell from the plan.
    """
    (knob,), layout = offer.knobs, _layout_with_choice(plan, offer, request)
    if layout is None:
        return None
    before, found = plan.predicted, estimate(request.cost_model(offer.settings), layout)
    step_s, freed = found.iteration_time_s, before.peak_memory_bytes - found.peak_memory_bytes
    freed_percent = 100.0 * freed / before.peak_memory_bytes
    other = None
    if freed > 0:
        limit_s = min(before.iteration_time_s, step_s) / (1.0 + _LEAST_GAIN_PERCENT / 100.0)
        # degrees inside a layer are the plan's: a search over all takes as long as the first
        fixed = {**request.space.fixed, **{name: plan.layout.sizes[name] for name in LAYER_DEGREES}}
        space = replace(offer.space_of(request.space), fixed=fixed)
        other = faster(replace(request, settings=offer.settings, space=space), limit_s)
    if other is not None:
        step_s = to_seconds(other.iteration)
    gain = _gain_percent(before.iteration_time_s, step_s)
    frees = freed_percent >= _LEAST_FREED_PERCENT and gain > -1.0
    if not (found.fits or other) or not (gain >= _LEAST_GAIN_PERCENT or frees):
        return None
    words, gains = " ".join(offer.words), list[str]()
    words += "" if layout.zero is plan.layout.zero else " with ZeRO-1"
    if other is None:
        gains += [_faster(gain, step_s)] if gain >= _LEAST_GAIN_PERCENT else []
    if freed_percent >= _LEAST_GAIN_PERCENT:
        gains.append(f"free {format_gib(freed)} of peak memory per GPU")
    said = " and ".join(gains)
    if other is not None:
        job = f"make the job {gain:.1f} % faster ({format_seconds(step_s)})"
        said += f"{', or ' if said else ''}{job}: {_difference(plan.layout, other.layout)}"
    return step_s, -freed, f"{words} would {said}. It changes numbers: {knob.changes}"


def _difference(before: Layout, after: Layout) -> str:
    """What one layout has otherwise than another, in words."""
    known = describe_grid(before).split(", ")
    changed = [words for words in describe_grid(after).split(", ") if words not in known]
    virtual = after.dims.virtual_pipeline_model_parallel_size
    if virtual != before.dims.virtual_pipeline_model_parallel_size:
        changed.append(f"VPP {virtual}")
    return ", ".join(changed) or "with other stages"


def _layout_with_choice(
    plan: PredictedLayout, offer: NumericOffer, request: Request
) -> Layout | None:
    """The plan's layout as it would run with the choice; ``None`` where Megatron refuses it.

    Layers that were timed in one number format say nothing of another.
    """
    (knob,), traits, layout = offer.knobs, offer.settings.traits, plan.layout
    if layout.zero.is_fsdp and knob.precision is None:
        return None  # whose widths are other flags
    if knob.of_sharded_optimizer and not plan.layout.shards_optimizer:
        if ZeroStage.OPTIMIZER not in request.space.zero_stages:
            return None
        layout = replace(layout, zero=ZeroStage.OPTIMIZER)
    if knob.of_experts and plan.layout.execution.is_node_limited:
        return None  # its kernels drop nothing
    if knob.precision is None:
        return layout
    precision, recipe = offer.settings.precision, traits.fp8_recipe
    if request.times is not None or not precision.is_quantized:
        return None
    tried = LaunchRequest.of(request.spec, layout, precision=precision, fp8_recipe=recipe)
    if not all(rule.keeps(tried.facts) for rule in FORMAT_RULES):
        return None
    if traits.fp8_recipe in WITHOUT_USER_BUFFERS:
        execution = replace(layout.execution, tp_comm_overlap=False)
        layout = replace(layout, execution=execution)
    return layout
