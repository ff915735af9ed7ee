"""Plan a job that a framework's adapter has read, on a cluster named as on the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from nest_megatron.cluster.discovery import local_gpus
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.cluster_detection import names_cluster, surroundings
from nest_megatron.config.compose import Composed, compose
from nest_megatron.config.overrides import Setting
from nest_megatron.config.request import plan_request, with_times
from nest_megatron.errors import UserInputError, nearest
from nest_megatron.integrations.megatron_lm.checkpoint import Requirement
from nest_megatron.integrations.megatron_lm.command_request import Wishes, job_request
from nest_megatron.integrations.megatron_lm.typed import CHOICES
from nest_megatron.integrations.recipe import Recipe
from nest_megatron.parallel import plan_file
from nest_megatron.parallel.plan import ParallelPlan
from nest_megatron.planner import plan as find_plan
from nest_megatron.planner.pins import Found, read_pinned, require_same_job
from nest_megatron.report.failure import require_plan

#: Runners-up that are ranked unless ``search.num_alternatives`` says otherwise.
_RUNNERS_UP = 3
_NUM_GPUS = "cluster.num_gpus"
_OF_THE_JOB = ("model", "train")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Freedom:
    """What of a recipe's own layout the search may change.

    Args:
        free: choices that may change, a text is one; ``None`` is all of them but those kept and
            ``use_megatron_fsdp``, which changes the format of checkpoints.
        keep: choices held as the recipe states them; a text is one.
        option: how the user frees a choice.

    Raises:
        UserInputError: for a name that is no choice, or one both freed and kept.
    """

    free: Sequence[str] | None = None
    keep: Sequence[str] = ()
    option: str = "free"

    def __post_init__(self) -> None:
        for what, names in (("free", self.free), ("keep", self.keep)):
            if isinstance(names, str):
                object.__setattr__(self, what, (names,))
        for what, names in (("free", self.free or ()), ("keep", self.keep)):
            for name in names:
                if name not in (*CHOICES, "all"):
                    raise UserInputError(
                        what,
                        value=name,
                        limit="it is no choice that a plan makes",
                        fix=nearest(name, (*CHOICES, "all")),
                    )
        both = set(self.free or ()) & set(self.keep)
        if both:
            raise UserInputError(
                "free, keep",
                value=sorted(both),
                limit="a choice is either freed or kept",
                fix="Name it once.",
            )

    def wishes(self) -> Wishes:
        """The same for the planner's door, which keeps what is not freed."""
        kept = tuple(CHOICES) if "all" in self.keep else self.keep
        free = self.free
        if free is None:  # all that leaves the checkpoints' format as it is
            free = tuple(name for name in CHOICES if name != "use_megatron_fsdp")
        elif "all" in free:
            free = tuple(CHOICES)
        return Wishes(free=tuple(name for name in free if name not in kept), option=self.option)


def pinned_recipe(recipe: Recipe, path: Path) -> ParallelPlan:
    """The plan of a pinned file, for the job that it was made for and no other.

    What is not known where it is launched from (a login node has no GPUs) is not compared.

    Raises:
        NestError: if the file is none, or names every difference between the two jobs.
    """
    pinned = read_pinned(path.expanduser())
    found = Found(
        spec=recipe.spec,
        num_gpus=recipe.num_gpus or pinned.plan.placement.num_gpus,
        cluster=None,
        gpus=local_gpus(),
        gpus_per_host=recipe.gpus_per_node,
        global_batch_size=recipe.global_batch_size,
        precision=recipe.precision,
        tensor_model_parallel_size=pinned.plan.parallel.tensor_model_parallel_size,
        megatron_lm=pinned.pin.megatron_lm,  # the frameworks have a megatron-core of their own
        memory_flags=recipe.job.memory_flags,
    )
    require_same_job(pinned, found)
    return pinned.plan


def plan_recipe(
    recipe: Recipe,
    *,
    cluster: str | Cluster | None,
    overrides: Sequence[Setting],
    freedom: Freedom,
    choose: int = 0,
    packages: tuple[str, ...] = (),
) -> ParallelPlan:
    """Find the fastest plan for a job that was read.

    Args:
        cluster: a name of the catalogue or a file, taken with the job's number of GPUs; a record;
            or ``None`` for the GPUs of this host.
        overrides: settings as ``nest-megatron plan`` takes them, the model and the batch apart.
        choose: take this runner-up instead of the best (0).
        packages: those of a choice that were found where the job runs.

    Raises:
        NothingFitsError: if no plan fits in memory, naming the missing bytes.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a wish that cannot be kept, or an unknown setting.
    """
    settings = _settings(recipe, cluster, overrides)
    place, composed, notes = _place(recipe, cluster, settings)
    wishes = dataclasses.replace(
        freedom.wishes(),
        required=_required(recipe),
        packages=packages,
        can_state=recipe.can_state,
    )
    job = recipe.job_on(place.accelerator.name)
    inputs, space, _ = job_request((recipe.spec, job), place, composed, wishes)
    inputs = dataclasses.replace(inputs, notes=(*inputs.notes, *notes))
    wanted = plan_request(composed.config, with_times(inputs, composed), space)
    if "search.num_alternatives" not in composed.given:
        wanted = dataclasses.replace(wanted, num_alternatives=max(_RUNNERS_UP, choose))
    found = require_plan(find_plan(wanted, choose=choose), inputs.notes)
    if recipe.restored is not None:
        recipe.restored.check(found, recipe.job.version)
    by_words = freedom.option == "nest.free"  # only Megatron-Bridge's scripts take them
    framework = "Megatron-Bridge" if by_words else "NeMo or Megatron-Bridge"
    return plan_file.made_for(found, framework, None, "+nest=auto" if by_words else "auto_recipe")


def _required(recipe: Recipe) -> dict[str, Requirement]:
    """What the job's data and the checkpoint that it restores fix of a layout."""
    restored = recipe.restored
    return {
        **({} if restored is None else restored.required(recipe.job.version)),
        **recipe.required,
    }


def _settings(
    recipe: Recipe, cluster: str | Cluster | None, overrides: Sequence[Setting]
) -> tuple[Setting, ...]:
    settings = tuple(overrides)
    for setting in settings:
        if setting.key.partition(".")[0] in _OF_THE_JOB:
            raise UserInputError(
                setting.key,
                value=setting.value,
                limit="the model and the batch are the recipe's own",
                fix="Change the recipe.",
            )
    if isinstance(cluster, str):
        settings = (Setting(key="cluster", value=cluster), *settings)
    if isinstance(cluster, Cluster) or any(setting.key == _NUM_GPUS for setting in settings):
        return settings
    if recipe.num_gpus is None:
        raise UserInputError(
            _NUM_GPUS,
            value=None,
            limit="the number of ranks is the launcher's, and this process has none",
            fix="Give overrides=['cluster.num_gpus=64'].",
        )
    return (*settings, Setting(key=_NUM_GPUS, value=str(recipe.num_gpus)))


def _place(
    recipe: Recipe, cluster: str | Cluster | None, settings: Sequence[Setting]
) -> tuple[Cluster, Composed, tuple[str, ...]]:
    """The cluster at the job's size, with the settings and what was assumed."""
    if isinstance(cluster, Cluster):
        size = recipe.num_gpus or cluster.num_gpus
        return cluster.resized(size), compose(settings), ()
    if not names_cluster(settings) and local_gpus() is None:
        raise UserInputError(
            "cluster",
            value=None,
            limit="none is given, and this host shows no NVIDIA GPU",
            fix="Give for example cluster='dgx_h100' (`nest-megatron clusters` lists them).",
        )
    place = surroundings(settings, recipe.num_gpus or 0, {}, dry_run=True)
    return place.cluster, place.composed, place.notes
