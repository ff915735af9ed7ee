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
from nest_megatron.integrations.megatron_lm.search_space import freed_flags, job_space
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
    job = _read(composed, text, version)
    command = job.command
    assert command is not None
    cluster = command_cluster(composed, job)
    job = dataclasses.replace(job, free=FreeParameters(names=free))
    restored = restored_by_command(command.values)
    if restored is not None:
        required, notes = restored.required(version), (*job.notes, restored.note())
        job = dataclasses.replace(job, required=required, restored=restored, notes=notes)
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
    return request_for(
        *(job, cluster, composed, space),
        offer=offer,
        freed=freed_flags(job.free),
        prefix=prefix,
        versions=versions,
    )


def read_model(
    composed: Composed, text: str | None, version: str
) -> tuple[TransformerSpec, Mapping[str, Any]]:
    """The model, and the values of the command's flags.

    Args:
        text: a command that stands for the model; ``None`` where the configuration names it.

    Raises:
        UserInputError: for both or neither, or a command that cannot be read.
    """
    if text is None:
        return read_spec(composed.config), {}
    job = _read(composed, text, version)
    assert job.command is not None
    return job.spec, job.command.values


def _read(composed: Composed, text: str | Sequence[str], version: str) -> Job:
    """The job of a command, its embedding padded by its own tensor-parallel size."""
    model = composed.config.model
    if model is not None:
        limit = "with --from the model comes from the command"
        fix = "Leave model out, or change the command."
        raise UserInputError("model", value=model.get("name"), limit=limit, fix=fix)
    command = read_command(text, version)
    if not command.argv:
        limit = "it has no flags, so it says nothing about the model"
        fix = "Give the whole command in quotes, or - to read it from standard input."
        raise UserInputError("--from", value=command.script or text, limit=limit, fix=fix)
    job = read_job(command)
    tp = command.values["tensor_model_parallel_size"]
    return dataclasses.replace(job, spec=job.spec.with_padded_vocab(tp))


def command_cluster(composed: Composed, job: Job) -> Cluster:
    """The cluster of a command: as large as its launcher says, unless a size is given."""
    given = "cluster.num_gpus" in composed.given
    return read_cluster(composed.config, None if given else job.num_gpus)
