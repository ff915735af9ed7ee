"""A user's own Megatron-LM command as a planning request: what they set stays, the rest is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.compose import Composed
from nest_megatron.config.job import FreeParameters, Job
from nest_megatron.config.request import read_cluster, read_spec, request_for, with_seq_length
from nest_megatron.errors import UserInputError
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.read import read_job
from nest_megatron.integrations.megatron_lm.search_space import job_space
from nest_megatron.integrations.megatron_lm.typed import freed_flags
from nest_megatron.integrations.restore import restored_by_command
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.planner import PlanRequest


def read_request(
    text: str | Sequence[str], composed: Composed, *, free: Collection[str], version: str
) -> tuple[Job, PlanRequest]:
    """Read a command; settings on our own command line win over it.

    Args:
        free: parallel flags of the command that the search may change, or ``all``.

    Raises:
        UserInputError: for a command that cannot be read, or a setting that cannot be kept.
    """
    _refuse_model(composed)
    command = read_command(text, version)
    if not command.argv:
        raise UserInputError(
            "--from",
            value=command.script or text,
            limit="it has no flags, so it says nothing about the model",
            fix="Give the whole command in quotes, or - to read it from standard input.",
        )
    job = _padded(read_job(command))
    cluster = command_cluster(composed, job)
    job = dataclasses.replace(job, free=FreeParameters(names=free))
    restored = restored_by_command(command.values)
    if restored is not None:
        job = dataclasses.replace(
            job,
            required=restored.required(version),
            restored=restored,
            notes=(*job.notes, restored.note()),
        )
    return job, job_request(job, cluster, composed)


def job_request(
    job: Job,
    cluster: Cluster,
    composed: Composed,
    *,
    prefix: str = "",
    versions: Mapping[str, str] | None = None,
) -> PlanRequest:
    """What to plan for a job, wherever it was read from.

    Args:
        prefix: what stands before the names of settings where the user types them.
        versions: of the running job; ``None`` on a laptop, where none are known.

    Raises:
        UserInputError: for a setting that cannot be kept.
    """
    job = dataclasses.replace(job, spec=with_seq_length(job.spec, composed.config.train.seq_length))
    space, offer = job_space(job, composed.config)
    freed = freed_flags(job.free)
    return request_for(
        *(job, cluster, composed, space),
        offer=offer,
        freed=freed,
        prefix=prefix,
        versions=versions,
    )


def read_model(
    composed: Composed, text: str | None, version: str
) -> tuple[TransformerSpec, Mapping[str, Any]]:
    """The model of a composed configuration, or of a command that stands for it.

    Args:
        text: the command; ``None`` where the configuration names the model.

    Returns:
        The model, and the values of the command's flags.

    Raises:
        UserInputError: for both or neither, or a command that cannot be read.
    """
    if text is None:
        return read_spec(composed.config), {}
    _refuse_model(composed)
    command = read_command(text, version)
    return _padded(read_job(command)).spec, command.values


def _padded(job: Job) -> Job:
    """The job with the rows that its own tensor-parallel size pads the embedding to."""
    assert job.command is not None
    tp = job.command.values["tensor_model_parallel_size"]
    return dataclasses.replace(job, spec=job.spec.with_padded_vocab(tp))


def _refuse_model(composed: Composed) -> None:
    if composed.config.model is not None:
        raise UserInputError(
            "model",
            value=composed.config.model.get("name"),
            limit="with --from the model comes from the command",
            fix="Leave model out, or change the command.",
        )


def command_cluster(composed: Composed, job: Job) -> Cluster:
    """The cluster of a command: as large as its launcher says, unless a size is given."""
    given = "cluster.num_gpus" in composed.given
    return read_cluster(composed.config, None if given else job.num_gpus)
