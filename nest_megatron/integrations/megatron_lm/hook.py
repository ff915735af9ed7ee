"""What happens inside a training process that was started with ``+nest=...``.

``nest_megatron.boot`` calls the functions named ``before_*`` and ``after_*`` as Megatron's modules
load. The plan is made in ``validate_args``: there the arguments are complete (a checkpoint's are
merged in), nothing has touched a GPU, and Megatron's own validation judges the result.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from nest_megatron.boot import is_asked_for
from nest_megatron.config.launch import Mode, split_words
from nest_megatron.errors import OK, NestError, UserInputError
from nest_megatron.integrations.megatron_lm.ranks import (
    LaunchedJob,
    Watch,
    compare_groups,
    launched_job,
)
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.layout.rulebook.facts import RELEASES
from nest_megatron.report.failure import end, ending_on_errors

Function = Callable[..., Any]

_job: LaunchedJob | None = None


def before_training() -> None:
    """Take our words off the command line, before Megatron's parser sees them."""
    global _job  # noqa: PLW0603 - one process, one job
    if _job is not None or not is_asked_for(sys.argv):
        return
    if "megatron.bridge" in sys.modules:
        return  # since 0.4 it loads this package, and its scripts read their words themselves
    if _plan_of_hydra_application() is not None or _is_hydras_own():
        return  # its words are Hydra's
    ours, rest = split_words(sys.argv[1:])
    sys.argv[1:] = rest
    _job = launched_job(ours)
    if _job is not None and any(word.partition("=")[0] == "--yaml-cfg" for word in rest):
        end(
            UserInputError(
                "--yaml-cfg",
                True,
                "Megatron's own parser fails on files like its example, which lacks arguments that "
                "it reads (enable_msc), in every release that was tried",
                "Give the settings as flags, or leave out nest.",
            )
        )


def _is_hydras_own() -> bool:
    """Whether a Hydra application runs here whose words mean a group or a field of its own."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    running = hydra_config is not None and hydra_config.HydraConfig.initialized()
    asked = [word.partition("=")[2] for word in sys.argv if is_asked_for([word])]
    return running and not set(asked).intersection(Mode)


def _wrap(module: ModuleType, name: str, wrapper: Function) -> Function | None:
    """Put a function in the place of a module's own (returned, if any), which it takes first."""
    original: Function | None = getattr(module, name, None)
    if original is not None:
        setattr(module, name, functools.wraps(original)(functools.partial(wrapper, original)))
    return original


def after_arguments(module: ModuleType) -> None:
    """Plan where Megatron validates its arguments."""
    if _job is None:
        return
    original = _wrap(module, "validate_args", _validate_args)
    if original is None:
        end(
            NestError(
                f"this Megatron-LM has no {module.__name__}.validate_args, so nothing can be "
                f"planned (releases that were tried: {', '.join(RELEASES)}). Launch without +nest."
            )
        )
    bound = sys.modules.get("megatron.training.initialize")
    if getattr(bound, "validate_args", None) is original:
        bound.validate_args = module.validate_args  # type: ignore[union-attr]


def _validate_args(
    validate: Function, args: Namespace, defaults: Mapping[str, Any] | None = None
) -> Any:
    job = _job
    defaults = defaults or {}
    if job is None or job.decision is not None:
        return validate(args, defaults)
    with job.ending_together():
        from nest_megatron.integrations.megatron_lm.launch import dry_run, run

        job.args = args
        job.defaults = defaults
        job.validate = validate
        if job.launch.dry_run:
            dry_run(job)
            sys.exit(OK)
        return run(job)


def after_bridge_overrides(module: ModuleType) -> None:
    """Plan where Megatron-Bridge applies overrides."""
    from nest_megatron.integrations.megatron_bridge.hook import planning

    def planned(job: LaunchedJob) -> None:
        global _job  # noqa: PLW0603 - one process, one job
        _job = job

    module.process_config_with_overrides = planning(  # type: ignore[attr-defined]
        module.process_config_with_overrides, planned
    )


def after_bridge_pretrain(module: ModuleType) -> None:
    """Train as planned, and watch Megatron-Bridge's loop as Megatron-LM's."""
    training = sys.modules.get("megatron.bridge.training.train")  # which it has imported
    if training is not None:
        _watch(module, training)

    def pretrain(original: Function, *args: Any, **kwargs: Any) -> Any:
        if _job is not None:
            from nest_megatron.integrations.megatron_bridge.hook import begin_training

            with _job.ending_together():
                begin_training(_job, *args, **kwargs)
        return original(*args, **kwargs)

    _wrap(module, "pretrain", pretrain)


def after_initialize(module: ModuleType) -> None:
    """Let what does not train come as far as the arguments without CUDA (0.16 asks first)."""
    if _job is not None and (_job.launch.dry_run or _job.launch.stop_before_training):

        def initialize_megatron(original: Function, *args: Any, **kwargs: Any) -> Any:
            without = {} if len(args) > 3 else {"allow_no_cuda": True}
            return original(*args, **{**kwargs, **without})

        _wrap(module, "initialize_megatron", initialize_megatron)


def after_training(module: ModuleType) -> None:
    """Compare the first steps with the prediction, and keep what became of the run."""
    if _job is not None:
        _watch(module, module)


def _watch(module: ModuleType, training: ModuleType) -> None:
    """Watch the loop of ``training``, which ``module.pretrain`` runs."""
    watch = Watch(training, lambda: _job)
    _wrap(module, "pretrain", watch.pretrain)
    _wrap(training, "train_step", watch.train_step)


def after_parallel_state(module: ModuleType) -> None:
    """No groups without a plan, and none other than the plan's."""

    def initialize_model_parallel(original: Function, *args: Any, **kwargs: Any) -> Any:
        with ending_on_errors():
            _require_plan()
        result = original(*args, **kwargs)
        plan = None  # that Megatron's groups are compared with, once in a job of Megatron-LM
        if _job is None:
            plan = _plan_of_hydra_application()
        elif not _job.groups_checked and _job.decision is not None:
            _job.groups_checked = True
            plan = _job.decision.plan
        if plan:
            with ending_on_errors():
                compare_groups(plan, module)
        return result

    _wrap(module, "initialize_model_parallel", initialize_model_parallel)


def _plan_of_hydra_application() -> ParallelPlan | None:
    plans = sys.modules.get("nest_megatron.integrations.hydra.plans")
    latest = None if plans is None else plans.PLANS.latest
    return None if latest is None else latest.plan


def after_hydra(module: ModuleType) -> None:
    """No job of a Hydra application with ``nest`` as a stray value.

    Hydra takes ``+nest=auto`` for a new value where our plugin did not give it the group ``nest``:
    the package is broken, or not installed where Hydra looks for plugins.
    """

    def run_job(original: Function, *args: Any, **kwargs: Any) -> Any:
        for config in (*args, *kwargs.values()):
            stray = config.get("nest") if type(config).__name__ == "DictConfig" else None
            if stray in (Mode.AUTO.value, Mode.PINNED.value):
                end(
                    NestError(
                        f"Hydra took +nest={stray} for a value of the application, so nothing "
                        "would be planned: hydra_plugins.nest_megatron was not found or could not "
                        "be loaded (see the warnings above). Install nest-megatron into this "
                        "environment anew, or launch without +nest."
                    )
                )
        return original(*args, **kwargs)

    _wrap(module, "run_job", run_job)


def _require_plan() -> None:
    if _plan_of_hydra_application() is not None or _is_hydras_own():
        return
    asked = is_asked_for([word for word in sys.argv if not word.endswith("=off")])
    if (asked and _job is None) or (_job is not None and _job.decision is None):
        raise NestError(
            "the command asks for +nest, but nothing was planned: this program calls neither "
            "megatron.training.arguments.validate_args, where Megatron-LM "
            f"{', '.join(RELEASES)} check their arguments, nor Megatron-Bridge's "
            "process_config_with_overrides with the words of its command. Launch it without +nest."
        )
