"""``+nest=auto`` among the overrides of a Megatron-Bridge script: plan instead of being skipped.

Megatron-Bridge's ``run_recipe.py`` hands every word that it does not know to
``process_config_with_overrides``, which passes over keys that its configuration lacks with a line
in the log. Wrapped, it plans after the user's own overrides, and those stay as they are.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nest_megatron.config.job import installed_packages
from nest_megatron.config.launch import MixedGpus, Mode, split_words
from nest_megatron.config.overrides import leaves
from nest_megatron.documents import read_yaml
from nest_megatron.errors import OK, UserInputError
from nest_megatron.integrations.fields import ARGUMENTS
from nest_megatron.integrations.megatron_bridge import (
    CONNECTIONS,
    apply_plan,
    as_script,
    needs_connections,
    read_recipe,
)
from nest_megatron.integrations.megatron_lm.agreement import propagating_errors
from nest_megatron.integrations.megatron_lm.planning import Decision
from nest_megatron.integrations.megatron_lm.ranks import LaunchedJob, launched_job
from nest_megatron.integrations.megatron_lm.rendezvous import comparable_fields
from nest_megatron.integrations.megatron_lm.search_space import CHOICES, free_parameters
from nest_megatron.integrations.plan_output import (
    launched_report,
    pinned_file,
    pinned_recipe,
    plan_output,
    require_launch,
)
from nest_megatron.integrations.process_variables import set_variables
from nest_megatron.integrations.recipe_plan import (
    fields_assumed_harmless,
    plan_recipe,
)
from nest_megatron.layout import plan_file
from nest_megatron.layout.execution_rules import execution_environment
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.report.console import show

#: How often this process has planned: what it agreed on before it started Python anew is over.
_PASSES = "NEST_MEGATRON_PASSES"

Process = Callable[..., Any]


def planning(process: Process, on_plan: Callable[[LaunchedJob], None]) -> Process:
    """``process_config_with_overrides`` that plans where its overrides ask for it.

    Args:
        process: the framework's own.
        on_plan: told the job once a plan is in place.
    """

    @functools.wraps(process)
    def process_config_with_overrides(
        config: Any,
        config_filepath: str | None = None,
        cli_overrides: list[str] | None = None,
    ) -> Any:
        ours, rest = split_words(cli_overrides or [])
        config = process(config, config_filepath, rest or None)
        job = launched_job(ours) if ours else None
        if job is None:
            return config
        with job.ending_together():
            stated = [word.lstrip("+~").partition("=")[0] for word in rest]
            if config_filepath is not None:
                node = read_yaml(Path(config_filepath), "config-file")
                stated += dict(leaves(node)) if isinstance(node, Mapping) else {}
            if "recipe_runner" in sys.modules:  # run_recipe.py does the same to what is returned
                as_script(config, rest)
                script = sys.modules["__main__"]
                for word in " ".join(sys.argv).replace("=", " ").split():
                    if benchmark := script.resolved_benchmark_recipe_metadata(word):
                        script._apply_benchmark_runtime_defaults(config, benchmark, stated)
            run(job, config, stated)
            on_plan(job)
        return config

    return process_config_with_overrides


def run(job: LaunchedJob, cfg: Any, stated: Iterable[str]) -> None:
    """Plan the job, and write the plan into every rank's configuration, in place.

    Args:
        stated: fields that the user set themselves, which stay unless ``nest.free`` names them.
    """
    words = job.words
    launch = job.launch
    not_here = ("on_mismatch", "ranks", "stop_before_training")  # of Megatron-LM's own arguments
    for setting in words.launch:
        if setting.origin is None and setting.key.partition(".")[0] in not_here:
            raise UserInputError(
                f"nest.{setting.key}",
                setting.value,
                "it works with Megatron-LM's own script alone",
                "Leave it out.",
            )
    job.groups_checked = True
    harmless = fields_assumed_harmless(words.job)
    recipe = read_recipe(cfg, assume_harmless=harmless)
    keep = choices_of_fields(stated, launch.free)
    notes = recipe.notes
    job.args.rank = int(os.environ.get("RANK", "0"))
    job.args.world_size = recipe.num_gpus or 1
    set_variables({_PASSES: f"{os.environ.get(_PASSES, '')}+"})

    def comparable() -> dict[str, str]:
        return comparable_fields(cfg, launch.may_differ)

    def decide(_: object) -> Decision:
        nonlocal notes
        if not launch.dry_run:
            require_launch(words.mode, launch.free)
        # ranks are not numbered by switches here, so that no host is near another
        hosts = job.unordered_hosts
        mixed = MixedGpus(launch.mixed_gpus)
        if words.mode is Mode.PINNED:
            path = pinned_file(launch.plan)
            pinned = pinned_recipe(recipe, path, words.job, hosts=hosts, mixed=mixed)
            job.signer = pinned.signer
            return Decision(plan=pinned.plan, values={})
        out = plan_output(job.last_value("out"))
        frees_all = {"all", "use_megatron_fsdp"}.intersection(launch.free)
        free = free_parameters(("all",) if frees_all else None, keep)
        found, notes = plan_recipe(
            replace(recipe, free=free, free_option="nest.free", packages=installed_packages()),
            cluster=None,
            overrides=[setting for setting in words.job if setting.key != "out"],
            choose=launch.alternative,
            hosts=hosts,
            mixed=mixed,
        )
        if out is not None:
            plan_file.write(found, out)
        return Decision(plan=found, values={})

    def write(decision: Decision) -> None:
        plan = decision.plan
        job.changes = apply_plan(
            cfg, plan, environment={} if launch.dry_run else None, assume_harmless=harmless
        )
        variables = dict(os.environ)
        told = tuple(adapt(plan, variables))
        set_variables(dict(variables.items() - os.environ.items()))
        if job.args.rank == 0:
            show(launched_report(plan, job.changes, (*notes, *told), "fields"))
        if launch.dry_run:
            sys.exit(OK)

    def wait() -> None:  # a script may start Python anew, and rank 0 may host the store
        if job.store is not None:
            job.store.leave("end", None)
            if job.args.rank == 0:
                job.store.collect("end")

    job.run(comparable, decide, write, wait, what="configuration")


def begin_training(job: LaunchedJob, config: Any, *_: Any, **__: Any) -> None:
    """Put back what a script has changed of a plan, and begin the record of the run.

    ``run_recipe.py`` scales the batch of a benchmark with its replicas.
    """
    assert job.decision
    plan = job.decision.plan
    harmless = fields_assumed_harmless(job.words.job)
    with propagating_errors(job.store):
        changed = apply_plan(config, plan, free=["global_batch_size"], assume_harmless=harmless)
        if changed and job.args.rank == 0:
            why = "The script changed these fields after they were planned, and they are put back."
            show(launched_report(plan, changed, [why], "fields"))
        job.begin_record()


def adapt(plan: ParallelPlan, variables: MutableMapping[str, str]) -> Iterator[str]:
    """Bring variables of a process to a plan, in place; what became of each is one sentence.

    CUDA reads the number of connections to the device as it starts. NCCL may not register the
    buffers of graphs (``execution_environment``).
    """
    why = needs_connections(plan)
    if why and variables.get(CONNECTIONS) == "1":
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            yield (
                f"{CONNECTIONS}=1 is too few ({why}), and CUDA has started: launch the job with 32."
            )
        else:
            variables[CONNECTIONS] = "32"
            yield f"{CONNECTIONS}=32 instead of 1: {why}."
    for name, value in execution_environment(plan.layout.execution).items():
        if name.startswith("NCCL_") and value is not None and variables.get(name) != value:
            variables[name] = value
            yield f"{name}={value}: with CUDA graphs Megatron asks for it."


def choices_of_fields(stated: Iterable[str], free: Sequence[str]) -> tuple[str, ...]:
    """Choices that the user made by hand and has not freed.

    Args:
        stated: fields that the user typed.

    >>> choices_of_fields(["model.context_parallel_size", "model.recompute_method"], ["recompute"])
    ('context_parallel_size',)
    """
    if "all" in free:
        return ()
    choices = {name: choice for choice, names in CHOICES.items() for name in names}
    items = (path.rpartition(".")[2] for path in stated)
    # what a plan derives from other choices is none, and nothing of it is kept
    said = dict.fromkeys(choices.get(ARGUMENTS.get(item, item)) for item in items)
    return tuple(choice for choice in said if choice and choice not in free)
