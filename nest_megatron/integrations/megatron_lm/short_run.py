"""A training command as a short run that leaves nothing behind.

Its steps are those of the job: model, data, batch, layout, number formats, and what it logs on its
standard output, stay. ``--train-iters`` stays too, because the learning rate, and the indices of
the data, hang on it; ``--exit-interval`` ends the run. Source: ``checkpoint_and_decide_exit`` of
``megatron/training/training.py``, which ends a run without a last evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_argv

#: Checkpoints written, what asks for them to be written, and files and services of other kinds.
_WRITES = frozenset(
    {
        "save",
        "async_save",
        "log_progress",
        "moe_use_upcycling",
        "ckpt_convert_format",
        "ckpt_convert_save",
        "ckpt_convert_update_legacy_dist_opt_format",
        "non_persistent_ckpt_type",
        "non_persistent_save_interval",
        "replication",
        "replication_jump",
        "save_activations_interval",
        "save_dgrads_interval",
        "save_params_interval",
        "save_tokens_per_expert_interval",
        "save_wgrads_interval",
        "config_logger_dir",
        "dump_param_to_param_group_map",
        "logits_save_dir",
        "moe_routing_trace_path",
        "tensorboard_dir",
        "wandb_exp_name",
        "wandb_project",
        "otel_enabled",
        "profile",
        "use_pytorch_profiler",
        "record_memory_history",
        "run_workload_inspector_server",
    }
)
#: What would make a run longer, or start it again.
_LASTS = frozenset({"exit_interval", "eval_iters", "full_validation", "inprocess_restart"})
#: What is restored: weights change no step's time but for the routing of tokens to experts.
_RESTORED = frozenset({"load", "pretrained_checkpoint", "ckpt_step"})
#: How; a run that restores takes the weights alone, so that its steps are counted from 0.
_RESTORES = frozenset({"finetune", "no_load_optim", "no_load_rng", "override_ckpt_iteration"})
_WEIGHTS_ALONE = ("--finetune", "--no-load-optim", "--no-load-rng")


def short_run(argv: Sequence[str], version: str, iterations: int) -> tuple[str, ...]:
    """A script's arguments for a run of some steps, without checkpoints, evaluation or trackers.

    A checkpoint is not loaded, unless ``--use-checkpoint-args`` takes the model from it: then its
    weights are, and steps are counted from 0.

    Args:
        version: the release of Megatron-LM whose flags they are.

    Raises:
        UserInputError: for a job whose batch grows: its first steps are not those of the plan.

    >>> " ".join(short_run(["--bf16", "--save", "/ckpt", "--train-iters", "500"], "0.16", 20))
    '--bf16 --train-iters 500 --exit-interval 20 --eval-iters 0 --no-one-logger'
    """
    command = read_argv("", argv, version)
    values = command.values
    for name in ("rampup_batch_size", "step_batch_size_schedule"):
        if values.get(name):
            raise UserInputError(
                f"--{name.replace('_', '-')}",
                values[name],
                "the first steps have another batch than the one that is planned for",
                "Leave it out of the command to tune at the batch where it ends.",
            )
    restores = bool(values.get("use_checkpoint_args"))
    left_out = _WRITES | _LASTS | _RESTORES | (frozenset() if restores else _RESTORED)
    kept = (each for each in command.options if each.dest not in left_out)
    words = [word for option in kept for word in option.tokens]
    words += ["--exit-interval", str(iterations), "--eval-iters", "0", "--no-one-logger"]
    return (*words, *(_WEIGHTS_ALONE if restores else ()))
