"""What happens inside a training process that was started with ``+nest=...``.

``nest_megatron.boot`` calls the functions named ``before_*`` and ``after_*`` as Megatron's modules
load. The plan is made in ``validate_args``: there the arguments are complete (a checkpoint's are
merged in), nothing has touched a GPU, and Megatron's own validation judges the result.
"""

from __future__ import annotations

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nest_megatron.boot import is_asked_for, settings_in
from nest_megatron.config.launch import Mode, read_launch, read_words, split_words
from nest_megatron.errors import OK, NestError, UserInputError
from nest_megatron.integrations.megatron_lm.launched_job import LaunchedJob
from nest_megatron.integrations.megatron_lm.parser import VERSIONS
from nest_megatron.integrations.megatron_lm.ranks import ending_together
from nest_megatron.integrations.slurm import rank_variables
from nest_megatron.report.failure import end, ending_on_errors

if TYPE_CHECKING:
    from nest_megatron.parallel.plan import ParallelPlan


_job: LaunchedJob | None = None
#: Megatron-Bridge's configuration was planned, or ``+nest=off`` asked for nothing.
_bridge_is_settled = False


def before_training() -> None:
    """Take our words off the command line, before Megatron's parser sees them."""
    global _job  # noqa: PLW0603 - one process, one job
    if _job is not None:
        return
    if not is_asked_for(sys.argv):
        with ending_on_errors():
            _refuse_settings_alone(sys.argv[1:])
        return
    if _plan_of_hydra_application() is not None or _is_hydras_own():
        return  # its words are Hydra's
    ours, rest = split_words(sys.argv[1:])
    sys.argv[1:] = rest
    with ending_on_errors():
        words = read_words(ours)
        launch = read_launch(words)
        if words.mode is Mode.OFF:
            return
        _refuse_yaml(rest)
        os.environ.update(rank_variables(os.environ))
        _job = LaunchedJob(words=words, launch=launch, script=sys.argv[0], argv=tuple(rest))


def _is_hydras_own() -> bool:
    """Whether a Hydra application runs here whose words mean a group or a field of its own."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    running = hydra_config is not None and hydra_config.HydraConfig.initialized()
    asked = [word.partition("=")[2] for word in sys.argv if is_asked_for([word])]
    return running and not set(asked).intersection(Mode)


def _refuse_settings_alone(argv: Sequence[str]) -> None:
    """Refuse ``nest.KEY=VALUE`` without ``+nest=``, which Megatron's parser only calls unknown."""
    words = settings_in(argv)
    if words:
        key, _, value = words[0].lstrip("+").partition("=")
        raise UserInputError(
            key,
            value=value,
            limit="nothing is planned without +nest=auto or +nest=pinned",
            fix=f"Add +nest=auto to the command, or leave {' '.join(words)} out.",
        )


def _refuse_yaml(argv: Sequence[str]) -> None:
    if any(word.partition("=")[0] == "--yaml-cfg" for word in argv):
        raise UserInputError(
            "--yaml-cfg",
            value=True,
            limit="Megatron's own parser fails on it, in every release that was tried",
            fix="Give the settings as flags, or launch without nest.",
        )


def after_arguments(module: ModuleType) -> None:
    """Plan where Megatron validates its arguments."""
    if _job is None:
        return
    original = getattr(module, "validate_args", None)
    if original is None:
        end(
            NestError(
                f"this Megatron-LM has no {module.__name__}.validate_args, so nothing can be "
                f"planned (releases that were tried: {', '.join(VERSIONS)}). Launch without +nest."
            )
        )
    wrapped = _planning(original)
    module.validate_args = wrapped  # type: ignore[attr-defined]
    bound = sys.modules.get("megatron.training.initialize")
    if getattr(bound, "validate_args", None) is original:
        bound.validate_args = wrapped  # type: ignore[union-attr]


def _planning(validate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(validate)
    def validate_args(args: Namespace, defaults: Mapping[str, Any] | None = None) -> Any:
        defaults = {} if defaults is None else defaults
        job = _job
        if job is None or job.decision is not None:
            return validate(args, defaults)
        with ending_together(job.rendezvous):
            if job.launch.dry_run:
                from nest_megatron.integrations.megatron_lm.dry_run import show

                show(job, args, defaults, validate)
                sys.exit(OK)
            from nest_megatron.integrations.megatron_lm.launch import run

            return run(job, args, defaults, validate)

    return validate_args


def after_bridge_overrides(module: ModuleType) -> None:
    """Plan where Megatron-Bridge applies overrides."""
    from nest_megatron.integrations.megatron_bridge.hook import planning

    def settled() -> None:
        global _bridge_is_settled  # noqa: PLW0603 - one process, one job
        _bridge_is_settled = True

    module.process_config_with_overrides = planning(  # type: ignore[attr-defined]
        module.process_config_with_overrides, settled
    )


def after_initialize(module: ModuleType) -> None:
    """Let what does not train come as far as the arguments without CUDA (0.16 asks first)."""
    original = getattr(module, "initialize_megatron", None)
    if _job is None or original is None:
        return
    if not (_job.launch.dry_run or _job.launch.stop_before_training):
        return

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **kwargs: Any) -> Any:
        if len(args) < 4:
            kwargs["allow_no_cuda"] = True
        return original(*args, **kwargs)

    module.initialize_megatron = initialize_megatron  # type: ignore[attr-defined]


def after_training(module: ModuleType) -> None:
    """Compare the first steps with the prediction, on rank 0."""
    job = _job
    original = getattr(module, "train_step", None)
    if job is None or job.launch.watch == 0 or original is None:
        return
    module.train_step = _first_step(job, module, original)  # type: ignore[attr-defined]


def _first_step(
    job: LaunchedJob, module: ModuleType, original: Callable[..., Any]
) -> Callable[..., Any]:
    """At the first step it is known which rank this is; only rank 0 keeps a wrapper."""

    @functools.wraps(original)
    def train_step(*args: Any, **kwargs: Any) -> Any:
        step = original
        if job.decision is not None and os.environ.get("RANK", "0") == "0":
            from nest_megatron.integrations.megatron_lm.watch import expected, watched

            step = watched(original, job.launch.watch, expected(job.decision.plan))
        module.train_step = step  # type: ignore[attr-defined]
        return step(*args, **kwargs)

    return train_step


def after_parallel_state(module: ModuleType) -> None:
    """No groups without a plan, and none other than the plan's."""
    original = getattr(module, "initialize_model_parallel", None)
    if original is None:
        return

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        with ending_on_errors():
            _require_plan()
        result = original(*args, **kwargs)
        plan = _plan_of_groups()
        if plan is not None:
            from nest_megatron.integrations.megatron_lm.launch import compare_groups

            with ending_on_errors():
                compare_groups(plan, module)
        return result

    module.initialize_model_parallel = initialize_model_parallel  # type: ignore[attr-defined]


def _plan_of_groups() -> ParallelPlan | None:
    """The plan that Megatron's groups are compared with, once in a job of Megatron-LM."""
    if _job is None:
        return _plan_of_hydra_application()
    if _job.groups_checked or _job.decision is None:
        return None
    _job.groups_checked = True
    return _job.decision.plan


def _plan_of_hydra_application() -> ParallelPlan | None:
    plans = sys.modules.get("nest_megatron.integrations.hydra.plans")
    latest = None if plans is None else plans.PLANS.latest
    return None if latest is None else latest.plan


def after_hydra(module: ModuleType) -> None:
    """No job of a Hydra application with ``nest`` as a stray value.

    Hydra takes ``+nest=auto`` for a new value where our plugin did not give it the group ``nest``:
    the package is broken, or not installed where Hydra looks for plugins.
    """
    original = getattr(module, "run_job", None)
    if original is None:
        return

    @functools.wraps(original)
    def run_job(*args: Any, **kwargs: Any) -> Any:
        with ending_on_errors():
            for each in (*args, *kwargs.values()):
                _refuse_stray(each)
        return original(*args, **kwargs)

    module.run_job = run_job  # type: ignore[attr-defined]


def _refuse_stray(config: Any) -> None:
    stray = config.get("nest") if type(config).__name__ == "DictConfig" else None
    if stray in (Mode.AUTO.value, Mode.PINNED.value):
        raise NestError(
            f"Hydra took +nest={stray} for a value of the application, so nothing would be "
            "planned: hydra_plugins.nest_megatron was not found or could not be loaded (see the "
            "warnings above). Install nest-megatron into this environment anew, or launch without "
            "+nest."
        )


def _require_plan() -> None:
    if _bridge_is_settled or _plan_of_hydra_application() is not None or _is_hydras_own():
        return
    asked = is_asked_for([word for word in sys.argv if not word.endswith("=off")])
    if (asked and _job is None) or (_job is not None and _job.decision is None):
        raise NestError(
            "the command asks for +nest, but nothing was planned: this program calls neither "
            "megatron.training.arguments.validate_args, where Megatron-LM "
            f"{' and '.join(VERSIONS)} check their arguments, nor Megatron-Bridge's "
            "process_config_with_overrides with the words of its command. Launch it without +nest."
        )
