"""The Python API: what notebooks and scripts use, and the command line with them.

Its names are those of ``nest_megatron``, which loads them when they are first used. Settings,
results and errors are those of the command line; ``docs/api.md`` is made of the docstrings.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING

from nest_megatron.api.jobs import (
    estimate_job,
    estimate_typed,
    job_of_settings,
    outcome,
    plan_job,
    plan_typed,
    typed_command,
)
from nest_megatron.api.results import Catalogue, Explanation, Plan, PlanTable, Scaling
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import named_cluster, named_model
from nest_megatron.config.compose import Settings
from nest_megatron.config.keywords import (
    Source,
    StrPath,
    compose_keywords,
    path_of,
    require_function,
)
from nest_megatron.config.overrides import Setting
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.attach import with_launch
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import Progress
from nest_megatron.planner.pins import read_plan
from nest_megatron.units import Seconds

if TYPE_CHECKING:
    from nest_megatron.integrations.megatron_lm.node_counts import TableJob
    from nest_megatron.integrations.typed_command import CommandPlan

__all__ = [
    "Explanation",
    "Plan",
    "PlanTable",
    "Scaling",
    "clusters",
    "estimate",
    "estimate_command",
    "load_plan",
    "models",
    "plan",
    "plan_command",
    "plan_for_gpus",
    "plan_table",
    "planned_command",
    "table_job",
]


def models() -> Catalogue[TransformerSpec]:
    """The models of the catalogue by name.

    >>> models()["llama3_8b"].hidden_size
    4096
    """
    from nest_megatron.report.catalogue_tables import models_table

    return Catalogue(
        "model", lambda name: named_model(name)[0], lambda found: models_table(list(found.values()))
    )


def clusters() -> Catalogue[Cluster]:
    """The clusters of the catalogue by name, at the sizes that their files give.

    >>> "dgx_h100" in clusters()
    True
    """
    from nest_megatron.report.catalogue_tables import clusters_table

    return Catalogue("cluster", named_cluster, lambda found: clusters_table(list(found.items())))


def plan(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    shortlist: bool = False,
    config_dir: StrPath | None = None,
    on_progress: Progress | None = None,
    **settings: object,
) -> Plan:
    """Find the fastest layout of a job that is expected to fit in memory.

    Args:
        model: a name of ``models()``, the path of a YAML file or of a Hugging Face
            ``config.json``, a record, or the fields of such a file.
        cluster: a name of ``clusters()``, the path of a YAML file, a record, or its fields.
        num_gpus: size of the job; the cluster's own if not given.
        global_batch_size: sequences of one optimizer step; 512 if not given.
        shortlist: also say which plans could be the fastest.
        config_dir: a folder with ``model/``, ``cluster/`` or ``accelerator/`` files of yours.
        on_progress: called while the search runs, with the number of candidates that are solved,
            the best step so far and the proven bound, both in seconds; ``None`` as the best is none
            yet. What it raises ends the search.
        settings: as ``nest-megatron plan`` takes them: by name where only one section has it
            (``tensor_model_parallel_size=8``, short ``tp=8``; ``max_seconds`` is the search's), by
            section (``search={"max_seconds": 5}``), or typed (``overrides=["train.tokens=1T"]``).

    Raises:
        NothingFitsError: if no plan is predicted to fit in memory; ``error.refusal`` says what
            lacks, and the nearest change that fits.
        SearchEndedError: if time ended the search before it had a plan.
        UserInputError: for a wrong setting, with the error that the command line prints.

    >>> found = plan(model="llama3_8b", cluster="dgx_h100", num_gpus=16, global_batch_size=128)
    >>> found.predicted.fits, found.layout.global_batch_size
    (True, 128)
    """
    return plan_job(
        compose_keywords(model, cluster, settings, config_dir, num_gpus, global_batch_size),
        shortlist=shortlist,
        on_progress=on_progress,
    )


def plan_command(
    command: StrPath | Sequence[str],
    *,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    free: Collection[str] = (),
    megatron_version: str | None = None,
    strict: bool = False,
    shortlist: bool = False,
    config_dir: StrPath | None = None,
    on_progress: Progress | None = None,
    **settings: object,
) -> Plan:
    """Plan a Megatron-LM command of your own: what ``nest-megatron plan --from`` does.

    Args:
        command: the command as a text or as words; the words (``["bash", "train.sh", "8"]``) or the
            ``pathlib.Path`` of a script that launches it, which bash runs with programs that start
            nothing; or one that trains a recipe (``nemo llm pretrain --factory NAME``), where its
            framework is installed.
        cluster: as for ``plan``.
        num_gpus: size of the job; if not given that of the launch, as docs/own_command.md says.
        global_batch_size: the command's own if not given.
        free: flags of the command that may change (``tensor_model_parallel_size``), or ``["all"]``;
            of a recipe all that keep the format of checkpoints, if not given.
        megatron_version: the release whose flags the command uses; if not given that of
            ``target``, else of the checkout that the script lies in, else the newest stable one.
        strict: refuse flags that Megatron-LM does not have, instead of passing them on.
        shortlist: also say which plans could be the fastest.
        config_dir, on_progress: as for ``plan``.
        settings: as for ``plan``; they win over the command, as ``flags=["--vocab-size=131072"]``
            do, and are written into it where one flag says them.

    Returns:
        A plan whose ``to_megatron_args`` are the command's flags, rewritten; of a recipe there are
        none, and ``Plan.apply`` writes it.

    Raises:
        UserInputError: for a command that cannot be read; and the errors of ``plan``.

    >>> words = "torchrun pretrain_gpt.py --num-layers 32 --hidden-size 4096 --bf16 "
    >>> words += "--num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096 "
    >>> words += "--vocab-size 32000 --tokenizer-type NullTokenizer --global-batch-size 128"
    >>> found = plan_command(words, cluster="dgx_h100", num_gpus=16, free=["all"])
    >>> found.layout.dims.data_parallel_size * found.layout.dims.tensor_model_parallel_size
    16
    """
    require_function("on_progress", on_progress)
    typed = typed_command(command, free, megatron_version, strict=strict)
    composed = compose_keywords(None, cluster, settings, config_dir, num_gpus, global_batch_size)
    found = plan_typed(typed, composed, time.monotonic(), on_progress, shortlist=shortlist)
    return planned_command(found, composed)


def planned_command(found: CommandPlan, composed: Settings) -> Plan:
    """The plan of a command beside what it runs today, here and on the command line."""
    from nest_megatron.integrations.typed_command import before_and_after

    today = before_and_after(found, composed)
    return Plan(record=replace(found.plan, today=today))


def estimate(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    config_dir: StrPath | None = None,
    **settings: object,
) -> Plan:
    """Price one layout: as ``plan``, but nothing is searched, and defaults are Megatron's.

    Returns:
        The layout as a plan; ``predicted.fits`` says whether it is predicted to fit in memory.

    Raises:
        UserInputError: for a layout that Megatron refuses, or a wrong setting.

    >>> priced = estimate(
    ...     model="llama3_8b", cluster="dgx_h100", num_gpus=16, tensor_model_parallel_size=2
    ... )
    >>> priced.layout.dims.data_parallel_size
    8
    """
    return estimate_job(
        compose_keywords(model, cluster, settings, config_dir, num_gpus, global_batch_size)
    )


def estimate_command(
    command: StrPath | Sequence[str],
    *,
    cluster: Source | Cluster,
    num_gpus: int | None = None,
    megatron_version: str | None = None,
    strict: bool = False,
    config_dir: StrPath | None = None,
    **settings: object,
) -> Plan:
    """Price a Megatron-LM command as it is typed: what ``nest-megatron estimate --from`` does.

    Args:
        command, cluster, num_gpus, megatron_version, strict, config_dir: as for ``plan_command``.
        settings: as for ``plan``, but for those of the layout, which is the command's.

    Returns:
        What runs today as a plan; ``predicted.fits`` says whether it is predicted to fit in memory.

    Raises:
        UserInputError: for a command that cannot be read, or that Megatron refuses, with its rule.

    >>> words = "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py --num-layers 32 --bf16 "
    >>> words += "--hidden-size 4096 --num-attention-heads 32 --seq-length 4096 "
    >>> words += "--max-position-embeddings 4096 --vocab-size 32000 --global-batch-size 128 "
    >>> words += "--tokenizer-type NullTokenizer --micro-batch-size 1 --use-distributed-optimizer"
    >>> priced = estimate_command(words, cluster="dgx_h100")
    >>> priced.layout.dims.data_parallel_size, priced.arguments["overlap_grad_reduce"]
    (16, False)
    """
    return estimate_typed(
        typed_command(command, version=megatron_version, strict=strict),
        compose_keywords(None, cluster, settings, config_dir, num_gpus),
    )


def plan_table(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    nodes: Iterable[int],
    global_batch_size: int | None = None,
    config_dir: StrPath | None = None,
    **settings: object,
) -> PlanTable:
    """Find a plan for each of several numbers of nodes, which load each other's checkpoints.

    Args:
        nodes: numbers of nodes.

    Raises:
        NothingFitsError, SearchEndedError: if there is no plan for any of them.
        UserInputError: for a wrong setting, or where no layout is legal.

    >>> table = plan_table(
    ...     model="llama3_8b", cluster="dgx_h100", nodes=[2, 3], global_batch_size=96
    ... )
    >>> {number: found.layout.num_gpus for number, found in table.plans().items()}
    {2: 16, 3: 24}
    """
    from nest_megatron.integrations.megatron_lm.node_counts import (
        plan_for_nodes,
        settings_for_nodes,
    )

    counts = tuple(_whole_numbers("nodes", nodes, "range(15, 17)"))
    composed = compose_keywords(model, cluster, settings, config_dir, None, global_batch_size)
    job = table_job(settings_for_nodes(composed, counts))
    return PlanTable(record=plan_for_nodes(job, counts), notes=job.request.notes)


def plan_for_gpus(
    *,
    model: Source | TransformerSpec,
    cluster: Source | Cluster,
    gpus: Iterable[int],
    global_batch_size: int | None = None,
    config_dir: StrPath | None = None,
    **settings: object,
) -> Scaling:
    """Plan one job for each of several numbers of GPUs: what ``plan --for-gpus`` does.

    Args:
        model, cluster, global_batch_size, config_dir, settings: as for ``plan``.
        gpus: numbers of GPUs; one that cannot be planned has the reason in its row.

    Raises:
        UserInputError: if a setting is wrong for all of them, or says the number of GPUs, too.

    >>> found = plan_for_gpus(model="llama3_8b", cluster="dgx_h100", gpus=[8, 12])
    >>> {size: plan.predicted.fits for size, plan in found.plans().items()}
    {8: True}
    """
    from nest_megatron.api.sweep import sweep_row

    def planned(size: int, begun_s: Seconds) -> Plan:
        job = compose_keywords(model, cluster, settings, config_dir, size, global_batch_size)
        return plan_job(job, begun_s=begun_s)

    results = []
    for size in _whole_numbers("gpus", gpus, "range(64, 513, 64)"):
        size_of = Setting(key="cluster.num_gpus", value=str(size))
        results.append((size_of, outcome(partial(planned, size))))
    if all("error" in result for _, result in results):
        raise UserInputError(**results[0][1]["error"])
    rows = (sweep_row(at, [size], found) for at, (size, found) in enumerate(results))
    return Scaling(rows=tuple(rows))


def _whole_numbers(what: str, given: object, example: str) -> Iterator[int]:
    """Numbers that are given one by one; at least one."""
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise _no_numbers(what, given, example)
    number = None
    for number in given if isinstance(given, Iterator) else tuple(given):
        if not isinstance(number, Integral) or int(number) < 1:
            raise _no_numbers(what, number, example)
        yield int(number)
    if number is None:
        raise _no_numbers(what, [], example)


def _no_numbers(what: str, given: object, example: str) -> UserInputError:
    limit = "it holds whole numbers of at least 1"
    return UserInputError(what, given, limit, f"Give for example {example}.")


def table_job(composed: Settings) -> TableJob:
    """A composed job, to be planned for several numbers of nodes."""
    from nest_megatron.integrations.megatron_lm.node_counts import TableJob

    request = job_of_settings(composed)
    return TableJob(request=request, version=request.space.version, finished=with_launch)


def load_plan(path: StrPath) -> Plan:
    """Read a plan file, pinned or not.

    Raises:
        UserInputError: if it cannot be read.
        PlanFileError: if it is no plan file, or was changed by hand.

    >>> load_plan("recipes/mixtral_8x7b_dgx_h100_64.yaml").layout.num_gpus
    64
    """
    record, pin = read_plan(path_of("path", path))
    return Plan(record=record, pin=pin)
