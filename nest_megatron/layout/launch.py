"""How a plan's command is launched: torchrun of the plan's size, the script, its flags."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.cluster.placement import torchrun_words
from nest_megatron.layout.plan import ParallelPlan


def script_words(script: str) -> tuple[str, ...]:
    """A script as launchers take it: a file, a module behind ``-m``, or nothing for none.

    >>> script_words("pretrain_gpt.py"), script_words("site.train"), script_words("./train")
    (('pretrain_gpt.py',), ('-m', 'site.train'), ('./train',))
    """
    if not script:
        return ()
    is_file = script.endswith(".py") or not script.replace(".", "_").isidentifier()
    return (script,) if is_file or script.startswith(".") else ("-m", script)


def launch_size(plan: ParallelPlan) -> tuple[int, int]:
    """Hosts that a plan is launched on, and processes that a launcher starts on each."""
    gpus = plan.layout.num_gpus
    per_host = min(plan.cluster.launch_gpus_per_host, gpus)
    return gpus // per_host, per_host


def launch_words(plan: ParallelPlan, script: str, argv: Sequence[str]) -> list[str]:
    """A ``torchrun`` command of the plan's size."""
    return [*torchrun_words(*launch_size(plan)), *script_words(script), *argv]
