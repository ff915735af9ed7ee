"""A plan in a task of NeMo-Run, in a recipe or a script; a script run on a user's executor.

Variables of a task's processes that depend on its layout follow the planned one. NeMo's and
Megatron-Bridge's ``PerfEnvPlugin`` set the same from the layout that they find. What it has set
from the recipe's own layout is brought to the planned one, so that both orders of the plugins end
alike. Source: ``PerfEnvPlugin.setup`` of NeMo 2.7.3.
"""

# ruff: noqa: UP045

import contextlib
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

from nest_megatron.config.defaults import with_defaults
from nest_megatron.config.launch import Mode, read_launch, read_words, split_words
from nest_megatron.config.overrides import Setting, parse
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.fields import ABSENT, attribute, find
from nest_megatron.integrations.megatron_lm.attach import is_blackwell
from nest_megatron.integrations.nemo import (
    apply_plan,
    auto_recipe,
    read_recipe,
    watch_recipe,
)
from nest_megatron.integrations.plan_output import pin_note, pinned_recipe
from nest_megatron.integrations.recipe_plan import fields_assumed_harmless
from nest_megatron.layout.diff import Change
from nest_megatron.layout.dims import REPLICA_DEGREES
from nest_megatron.layout.plan import ParallelPlan
from nest_megatron.packages import install_command
from nest_megatron.units import Seconds

_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_CHUNK = "NCCL_P2P_NET_CHUNKSIZE"


class DividedRanks(NamedTuple):
    """What of a layout variables hang on.

    Args:
        splits: ranks share a layer or a sequence.
        pipelined: there are several pipeline ranks.
    """

    splits: bool
    pipelined: bool


def divided_ranks(holder: Any, where: str = "trainer.strategy.") -> DividedRanks:
    """The layout that a recipe states now, or another holder of degrees."""
    sizes = (find(holder, f"{where}{name}") for name in REPLICA_DEGREES)
    tp, cp, pp = (isinstance(size, int) and size > 1 for size in sizes)
    return DividedRanks(splits=tp or cp, pipelined=pp)


def adapt(
    variables: MutableMapping[str, str], before: DividedRanks, plan: ParallelPlan
) -> list[str]:
    """Bring an executor's variables to a plan, in place.

    Args:
        before: the layout that the recipe stated before it was planned.

    Returns:
        What was changed and why, and what another plugin may still undo, one sentence each.
    """
    now = divided_ranks(plan.layout.dims, "")
    old = variables.get(_CONNECTIONS)
    fsdp = plan.layout.uses_megatron_fsdp
    said = []
    if now.splits and not fsdp:  # kernels of a layer in program order, where traffic hides
        wanted = "32" if is_blackwell(plan.cluster.accelerator.name) else "1"
        if old != wanted:
            variables[_CONNECTIONS] = wanted
            was = f" instead of {old}" if old is not None else ""
            said = [f"{_CONNECTIONS}={wanted}{was}: tensor or context parallel work overlaps."]
    elif old is not None and (fsdp or before.splits):
        del variables[_CONNECTIONS]
        why = "Megatron-FSDP needs several" if fsdp else "no layer or sequence is divided any more"
        said = [f"{_CONNECTIONS}={old} is taken out: {why}."]
    if now.splits and fsdp:
        said.append(
            f"PerfEnvPlugin sets {_CONNECTIONS} again, which Megatron-FSDP must not have: put it "
            "before NestPlugin."
        )
    if before.pipelined and not now.pipelined and _CHUNK in variables:
        chunk = variables.pop(_CHUNK)
        said.append(f"{_CHUNK}={chunk} is taken out: there is one pipeline rank.")
    unseen = "TORCH_NCCL_HIGH_PRIORITY" in variables and _CHUNK not in variables  # which it sets
    if now.pipelined and not before.pipelined and unseen:
        said.append(
            "PerfEnvPlugin saw the recipe's one pipeline rank: put it behind NestPlugin if it has "
            "an nccl_pp_comm_chunksize."
        )
    return said


@dataclass(kw_only=True, eq=False)
class TaskOptions:
    """What a user wants of a task's plan; ``UserInputError`` for a mode without what it needs.

    NeMo-Run's command line reads the types of the fields, and does not know ``str | None``.

    Args:
        mode: ``auto`` searches; ``pinned`` takes a reviewed plan and refuses any other task.
        cluster: a name of the catalogue or a file; ``None`` is the GPUs of this host, or for a
            script of the job's.
        plan: the file of a pinned plan.
        overrides, free, keep, vocab_size: as for ``nemo.auto_recipe``; a text is a list of one. A
            script keeps what its own user gave and ``free`` does not name.
        watch: steps whose time and memory the run keeps in the history of its host; ``None`` is
            none of a recipe, and those of ``nest.watch`` of a script.
    """

    mode: str = Mode.AUTO.value
    cluster: Optional[str] = None
    plan: Optional[str] = None
    overrides: list[str] = field(default_factory=list)
    free: Optional[list[str]] = None
    keep: list[str] = field(default_factory=list)
    vocab_size: Optional[int] = None
    watch: Optional[int] = None

    def __post_init__(self) -> None:
        if self.mode not in (Mode.AUTO, Mode.PINNED):
            raise _plugin_error("mode", self.mode, "it is auto or pinned", "Correct it.")
        if self.mode == Mode.PINNED and self.plan is None:
            raise _plugin_error(
                "plan",
                None,
                "mode='pinned' launches a reviewed plan",
                "Name the file that `nest-megatron pin` made.",
            )
        if self.mode == Mode.AUTO and self.plan is not None:
            raise _plugin_error(
                "plan", self.plan, "mode='auto' searches for a plan", "Give mode='pinned'."
            )
        if self.watch is not None and not (isinstance(self.watch, int) and self.watch >= 0):
            raise _plugin_error(
                "watch", self.watch, "it is a whole number of at least 0", "Give a number of steps."
            )


def plan_recipe(
    recipe: Any, options: TaskOptions, size: tuple[int, int] | None
) -> tuple[ParallelPlan, tuple[Change, ...], tuple[str, ...]]:
    """Write a plan into a recipe.

    Args:
        recipe: of NeMo 2.x; changed in place, or not at all.
        size: nodes, and processes on each, that the executor starts; ``None`` if it does not say.

    Returns:
        The plan, the fields that it changes, and notes on what it takes for granted.

    Raises:
        NestError: if there is no plan, or the recipe and the executor are of different sizes.
    """
    if attribute(recipe, "trainer") is ABSENT:
        raise _plugin_error(
            "task",
            type(recipe).__name__,
            "it is no recipe of NeMo 2.x and no script",
            "Plan its configuration: nest_megatron.integrations.megatron_bridge.auto_recipe.",
        )
    settings = parse(_names(options.overrides))
    harmless = fields_assumed_harmless(settings)
    job = read_recipe(recipe, vocab_size=options.vocab_size, assume_harmless=harmless)
    own = (job.num_nodes, job.gpus_per_node)
    if size is not None:
        nodes, per_node = size
        if size != own:
            raise _plugin_error(
                "trainer.num_nodes, trainer.devices",
                "{} x {}".format(*own),
                f"the executor starts {nodes} x {per_node} processes",
                f"Give the recipe num_nodes={nodes} and {per_node} devices, or change the "
                "executor.",
            )
        planned = {"cluster.num_gpus": str(nodes * per_node), "search.use_all_gpus": "true"}
        for each in with_defaults(settings):
            value = str(each.value).strip().lower()
            if planned.get(each.key, value) != value:
                raise _plugin_error(
                    each.key,
                    each.value,
                    f"the executor starts {nodes} x {per_node} processes, all of which take part",
                    "Leave it out, or change the executor and the recipe.",
                )
    if options.mode == Mode.PINNED:
        _refuse_search(options, settings)
        if options.cluster is not None:
            settings = (Setting(key="cluster", value=options.cluster), *settings)
        pinned = pinned_recipe(job, Path(str(options.plan)), settings)
        plan, notes = pinned.plan, (pin_note(pinned.pin), *job.notes)
        changes = apply_plan(recipe, plan, assume_harmless=harmless)
    else:
        plan, changes = auto_recipe(
            recipe,
            cluster=options.cluster,
            overrides=_names(options.overrides),
            free=options.free,
            keep=options.keep or (),
            vocab_size=options.vocab_size,
        )
        notes = plan.notes
    if options.watch:
        watch_recipe(recipe, plan, steps=options.watch)
    return plan, changes, notes


def _refuse_search(options: TaskOptions, settings: Sequence[Setting]) -> None:
    """Refuse what a plan that is written as it was reviewed does not follow."""
    others = [  # that do not say where it runs and what its job is
        each.key
        for each in settings
        if each.key.partition(".")[0] not in ("assume_harmless", "cluster")
    ]
    for name, value in (("free", options.free), ("keep", options.keep), ("overrides", others)):
        if value:
            raise _plugin_error(
                name,
                value,
                "mode='pinned' writes the plan as it was reviewed, and searches nothing",
                "Leave it out, or give mode='auto'.",
            )


def script_words(script: Any, options: TaskOptions) -> list[str]:
    """The words with which a script plans itself, if it takes any and they can say it."""
    if not script.path or "python" not in script.entrypoint:
        raise _plugin_error(
            "task",
            script.path or "inline",
            "only a Python script with a path takes +nest=auto",
            "Give run.Script(path=..., entrypoint='python'), or plan in the script itself.",
        )
    own, _ = split_words(script.args)
    if own:
        raise _plugin_error(
            "task",
            " ".join(own),
            "these words of the script plan it already",
            "Leave them out, or launch it without NestPlugin.",
        )
    if options.keep or options.vocab_size:
        raise _plugin_error(
            "keep, vocab_size",
            options.keep or options.vocab_size,
            "a script keeps what its own words say, and knows its tokenizer",
            "Leave them out; free=[...] names what may change.",
        )
    said = {"cluster": options.cluster, "plan": options.plan}
    words = [f"+nest={options.mode}", *(f"nest.{k}={v}" for k, v in said.items() if v is not None)]
    words += [f"nest.{override}" for override in _names(options.overrides)]
    if options.watch is not None:
        words.append(f"nest.watch={options.watch}")
    if options.free is not None:
        words.append(f"nest.free=[{','.join(_names(options.free))}]")
    read_launch(read_words(words))  # here, and not once the job has waited for its machines
    return words


def _plugin_error(what: str, value: object, limit: str, fix: str) -> UserInputError:
    return UserInputError(f"NestPlugin {what}", value, limit, fix)


def _names(value: Sequence[str] | str | None) -> Sequence[str]:
    return (value,) if isinstance(value, str) else tuple(value or ())


_OPTION = "--launcher-option executor"


def read_executor(source: str) -> Any:
    """An executor by the name of its factory, or from a file that NeMo-Run can load.

    Raises:
        UserInputError: if NeMo-Run is not installed, or knows no such executor.
    """
    try:
        import fiddle
        import nemo_run
        from nemo_run.cli.config import ConfigSerializer
    except ImportError as error:
        raise UserInputError(
            "--launcher",
            "nemo_run",
            f"NeMo-Run cannot be imported ({error})",
            f"{install_command('run')}.",
        ) from error
    try:
        if Path(source).suffix:
            found = ConfigSerializer().load(Path(source))
        else:
            found = nemo_run.cli.resolve_factory(nemo_run.Executor, source)()
        executor = fiddle.build(found)
    except Exception as error:
        raise UserInputError(
            _OPTION,
            source,
            f"NeMo-Run cannot make it: {error}",
            "Name a factory that `run.cli.factory` registered, or a .yaml, .json or .toml file.",
        ) from error
    if not isinstance(executor, nemo_run.Executor):
        raise UserInputError(
            _OPTION,
            source,
            f"it makes a {type(executor).__name__}",
            "Name an executor, such as a SlurmExecutor.",
        )
    return executor


def size_of(executor: Any) -> tuple[int, int] | None:
    """Nodes, and processes on each, that an executor starts; ``None`` if it does not say.

    Slurm starts tasks, unless a launcher such as torchrun starts the processes in one.
    """
    tasks = getattr(executor, "ntasks_per_node", None)
    launcher = getattr(executor, "launcher", None)
    try:
        if isinstance(tasks, int) and (launcher is None or type(launcher).__name__ == "Launcher"):
            return executor.nnodes(), tasks
        return executor.nnodes(), executor.nproc_per_node()
    except NotImplementedError:
        return None


def require_size(executor: Any, num_nodes: int, gpus_per_node: int) -> None:
    """Refuse an executor that starts other processes than a job has ranks.

    Raises:
        UserInputError: naming both.
    """
    size = size_of(executor)
    if size not in (None, (num_nodes, gpus_per_node)):
        raise UserInputError(
            _OPTION,
            " x ".join(map(str, size)),
            f"the job has {num_nodes} x {gpus_per_node} ranks",
            "Change its nodes and its tasks or GPUs on each.",
        )


def run_script(
    executor: Any,
    script: Sequence[str],
    arguments: Sequence[str],
    variables: Mapping[str, str | None],
    timeout_s: Seconds,
    title: str,
) -> tuple[int | None, str]:
    """Run a script under NeMo-Run's torchrun to its end.

    Args:
        script: its path, or ``-m`` and a module.
        variables: to set in its processes, or, where ``None``, not to set by the executor.

    Returns:
        An exit code, ``None`` where time ended it, and what it printed, as far as NeMo-Run has it
        on this host.
    """
    import nemo_run as run

    *module, path = script
    task = run.Script(path=path, m=bool(module), entrypoint="python", args=list(arguments))
    own = executor.clone()
    own.launcher = "torchrun"
    own.retries = 0
    kept = {name: text for name, text in own.env_vars.items() if name not in variables}
    own.env_vars = {**kept, **{n: text for n, text in variables.items() if text is not None}}
    late = threading.Event()
    with contextlib.ExitStack() as stack, run.Experiment(title, executor=own) as experiment:
        job = experiment.add(task, tail_logs=False)
        folder = Path(experiment.jobs[0].executor.job_dir)

        def cancel() -> None:
            late.set()
            experiment.cancel(job)

        timer = threading.Timer(timeout_s, cancel)
        timer.daemon = True
        timer.start()
        stack.callback(timer.cancel)
        try:
            experiment.run(detach=False, tail_logs=False)
        except BaseException:
            experiment.cancel(job)
            raise
    (ended,) = experiment.jobs  # leaving the experiment waits for it
    found = {path.resolve() for kind in ("*.out", "*.log") for path in folder.rglob(kind)}
    logs = filter(Path.is_file, sorted(found))  # a file that another names is read once
    printed = "".join(path.read_text(encoding="utf-8", errors="replace") for path in logs)
    if late.is_set():
        return None, printed
    return int(str(getattr(ended.state, "name", ended.state)) != "SUCCEEDED"), printed
