"""Targets that plans are made for, by ``targets.toml``, and what some cannot express."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nest_megatron.cost_model.targets import Default, Target
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.layout.rulebook.facts import is_within, last_until
from nest_megatron.packages import installed_version

_TABLE = packaged(__package__, "targets.toml")
_FRAMEWORKS: Mapping[str, Mapping[str, Any]] = _TABLE["frameworks"]
#: Keys of a row of defaults that are no argument, apart from the conditions of a ``Default``.
_OF_ROWS = ("file", "since", "until", "unset")


def _targets() -> Iterator[Target]:
    for name, framework in _FRAMEWORKS.items():
        files = {**framework["files"]}
        for release, row in framework["releases"].items():
            files |= framework.get("files_since", {}).get(release, {})
            source = f"{framework['title']} {row.get('source', release)}"
            yield Target(
                name=f"{name}_{release}",
                framework=f"{framework['title']} {release}",
                reason=framework["reason"],
                fitted=row.get("fitted", name),
                megatron_core=row.get("megatron_core", release),
                builds=tuple(framework.get("builds", ())),
                packages=row.get("packages", {}),
                defaults=tuple(
                    default
                    for each in _TABLE["defaults"][name]
                    if is_within(release, each.get("since", ""), each.get("until", ""))
                    for default in _defaults(each, files[each["file"]], source)
                ),
            )


def _defaults(row: Mapping[str, Any], file: str, release: str) -> Iterator[Default]:
    source = file if file.startswith("nest_megatron/") else f"{release}: {file}"
    conditions = {key: row[key] for key in row if key in Default.__annotations__}
    values = {key: row[key] for key in row if key not in {*conditions, *_OF_ROWS}}
    if unset := row.get("unset"):
        values[unset] = None
    for argument, value in values.items():
        yield Default(argument=argument, value=value, source=source, **conditions)


#: Targets that a plan may be made for, by name.
TARGETS: Mapping[str, Target] = {target.name: target for target in _targets()}
#: Those that a plan's command launches, those of Megatron-Bridge, and NeMo's, oldest first.
MEGATRON_LM, BRIDGE, (NEMO,) = (
    tuple(target for name, target in TARGETS.items() if name.startswith(framework))
    for framework in ("megatron_lm", "megatron_bridge", "nemo")
)


def newest_stable(framework: str) -> Target:
    """The newest release of a framework (``megatron_lm``) that is no branch under work."""
    return TARGETS[f"{framework}_{_FRAMEWORKS[framework]['stable']}"]


#: What a plan is made for where neither the job nor the user names a framework.
DEFAULT_TARGET = newest_stable("megatron_lm")


def installed_name(framework: str) -> str:
    """A framework with the release that is installed, else its newest stable one."""
    version = installed_version(_FRAMEWORKS[framework]["package"])
    return newest_stable(framework).name if version is None else f"{framework}_{version}"


def target_named(name: str) -> Target:
    """A target by its name; a newer release than all that are known is taken as the newest.

    A framework's name alone is ``installed_name``.

    Raises:
        UserInputError: naming those that there are.
    """
    if name in _FRAMEWORKS:
        name = installed_name(name)
    if name in TARGETS:
        return TARGETS[name]
    found = re.fullmatch(r"(\w+?)_(\d{1,3}|\d+\.\d+.*)", name)
    if found is None or found[1] not in _FRAMEWORKS:
        raise UserInputError(
            "target",
            name,
            f"targets are {', '.join((*_FRAMEWORKS, *TARGETS))}",
            nearest(name, (*_FRAMEWORKS, *TARGETS)),
        )
    known = [*_FRAMEWORKS[found[1]]["releases"]]
    if (release := last_until(found[2], known)) is None:
        raise UserInputError(
            "target",
            name,
            f"{known[0]} is the oldest release of {found[1]} that is known",
            f"Use {found[1]}_{known[0]} or newer.",
        )
    return TARGETS[f"{found[1]}_{release}"]


def newer_release_notes(name: str) -> Iterator[str]:
    """One line where a target's name, or ``megatron_lm`` and a release, is newer than all known.

    >>> list(newer_release_notes("nemo_2.9.1"))
    ['nemo_2.9.1 is newer than the releases that are known: it is taken as nemo_2.7.']
    """
    if (release := re.search(r"_(\d+\.\d+|\d+\Z)", name)) is None:
        return
    known = target_named(name).name
    if not is_within(release[1], until=known.rpartition("_")[2]):
        yield f"{name} is newer than the releases that are known: it is taken as {known}."


#: Field of ``Execution`` -> why no recipe of NeMo 2.x can have it.
NEMO_LACKS: Mapping[str, str] = {
    **dict.fromkeys(
        ("overlap_moe_expert_parallel_comm", "delay_wgrad_compute"),
        "NeMo's training step makes no schedule of two micro batches (build_schedule_plan)",
    ),
    "hierarchical_context_parallel_sizes": "NeMo makes no process groups of two levels",
}
#: Fields of ``Execution`` that a plan does not set by itself, and why.
GRAPHS_OF_THE_JOB: Mapping[str, str] = dict.fromkeys(
    ("cuda_graph_impl", "cuda_graph_scope"),
    "CUDA graphs need the job's own RNG tracker (use_te_rng_tracker) and NCCL_GRAPH_REGISTER=0",
)
OFFLOADS_OF_THE_JOB: Mapping[str, str] = {
    "offload_modules": "offloaded modules need NVTE_CPU_OFFLOAD_V1=1 where the job is launched",
}
#: What the search for a job leaves as it is: it may switch it off, but not on.
OF_THE_JOB = frozenset({*GRAPHS_OF_THE_JOB, *OFFLOADS_OF_THE_JOB})
#: Flags of ``NUMERIC_KNOBS`` -> what a user of a recipe sets in their place, by part of it.
_FIELDS = {
    "--grad-reduce-in-bf16": "{precision}.grad_reduce_in_fp32=False",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16": (
        "{optimizer}.use_precision_aware_optimizer=True {optimizer}.exp_avg_dtype=torch.bfloat16 "
        "{optimizer}.exp_avg_sq_dtype=torch.bfloat16"
    ),
    "--use-precision-aware-optimizer --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8": (
        "{optimizer}.use_precision_aware_optimizer=True {optimizer}.exp_avg_dtype=torch.uint8 "
        "{optimizer}.exp_avg_sq_dtype=torch.uint8"
    ),
    "--optimizer-cpu-offload --use-precision-aware-optimizer": (
        "{optimizer}.optimizer_cpu_offload=True {optimizer}.use_precision_aware_optimizer=True"
    ),
    "--fp8-param-gather": "{precision}.fp8_param_gather=True",
    "--moe-expert-capacity-factor 1.0": "{model}.moe_expert_capacity_factor=1.0",
    "--fp8-format hybrid --fp8-recipe tensorwise": (
        "{precision}.fp8=hybrid {precision}.fp8_recipe=tensorwise"
    ),
    "--fp8-format e4m3 --fp8-recipe blockwise": (
        "{precision}.fp8=e4m3 {precision}.fp8_recipe=blockwise"
    ),
    "--fp8-format e4m3 --fp8-recipe mxfp8": "{precision}.fp8=e4m3 {precision}.fp8_recipe=mxfp8",
    "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather": (
        "{precision}.fp8=hybrid {precision}.fp8_recipe=tensorwise {precision}.fp8_param_gather=True"
    ),
    "--fp4-format e2m1 --fp4-recipe nvfp4": "{precision}.fp4=e2m1 {precision}.fp4_recipe=nvfp4",
}


def _numeric_fields(precision: str, optimizer: str, model: str) -> dict[str, str]:
    parts = {"precision": precision, "optimizer": optimizer, "model": model}
    return {flags: words.format(**parts) for flags, words in _FIELDS.items()}


#: Framework (``Target.fitted``) -> what its user sets in the place of flags of ``NUMERIC_KNOBS``.
NUMERIC_FIELDS: Mapping[str, Mapping[str, str]] = {
    NEMO.fitted: _numeric_fields("trainer.plugins", "optim.config", "model.config"),
    **dict.fromkeys(
        (target.fitted for target in BRIDGE),
        _numeric_fields("mixed_precision", "optimizer", "model"),
    ),
}
