"""What the paper printed, and what the authors' solver answers on its recorded instances."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

#: The planners of the paper, in its order, ours last.
PLANNERS = ("manual", "mcmc", "alpa_e", "mist", "phaze", "nest")
#: How the artifact's baselines are priced: its own way, in the order of any other plan, best cut.
RULES = ("as_shipped", "one_rule", "best_cuts")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PaperJob:
    """What a cell of a figure is about.

    Args:
        micro_batch_size: where an experiment fixes it.
    """

    model: str
    cluster: str
    num_gpus: int
    micro_batch_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A job and the throughput of each planner; ``None`` where it found no plan.

    Args:
        throughputs: relative to the figure's base, or in the artifact's own unit.
        seconds: that the authors' solver took.
    """

    job: PaperJob
    throughputs: Mapping[str, float | None]
    seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactCell:
    """What the artifact's formula says of a job.

    Args:
        degrees: of its own plan: pipeline stages, replicas, tensor degree.
        nest: its throughput, in samples per unit of the instance's time.
        baselines: by planner and rule.
    """

    job: PaperJob
    degrees: tuple[int, int, int]
    nest: float
    baselines: Mapping[str, Mapping[str, float | None]]

    def gain(self, planner: str, rule: str) -> float | None:
        """Throughput of the artifact's plan over a baseline's."""
        other = self.baselines.get(planner, {}).get(rule)
        return None if other is None else self.nest / other


def figure(name: str, cluster: str) -> tuple[Cell, ...]:
    """The cells of ``figure5`` or ``figure6`` as printed."""
    return tuple(_cells(_load(name)["cells"], cluster))


def h100_ratios() -> tuple[Cell, ...]:
    """The ratios to Manual that the authors print for the H100 cluster."""
    return tuple(_cells(_load("claims")["h100"], "h100_spine_leaf"))


def gains(cluster: str) -> Mapping[str, float]:
    """The paper's geometric-mean gain over each baseline."""
    found: Mapping[str, float] = _load("claims")["gains"][cluster]
    return found


def rows(name: str) -> tuple[Mapping[str, Any], ...]:
    """The rows of ``table2``, or of the claims: ``minutes`` is Table 4, ``zero`` Table 7."""
    document = _load("table2")["cells"] if name == "table2" else _load("claims")[name]
    return tuple(document)


@cache
def artifact() -> Mapping[PaperJob, ArtifactCell]:
    """What the artifact's formula says of its recorded instances, by job."""
    return {cell.job: cell for cell in map(_artifact_cell, _load("artifact")["cells"])}


def _artifact_cell(fields: Mapping[str, Any]) -> ArtifactCell:
    stages, replicas, width = fields["degrees"]
    return ArtifactCell(
        job=_job(fields, fields["cluster"]),
        degrees=(stages, replicas, width),
        nest=fields["nest"],
        baselines={name: fields[name] for name in PLANNERS if name in fields and name != "nest"},
    )


def _cells(entries: list[dict[str, Any]], cluster: str) -> Iterator[Cell]:
    for fields in entries:
        throughputs = {name: fields[name] for name in PLANNERS if name in fields}
        yield Cell(
            job=_job(fields, cluster), throughputs=throughputs, seconds=fields.get("seconds")
        )


def _job(fields: Mapping[str, Any], cluster: str) -> PaperJob:
    return PaperJob(
        model=fields["model"],
        cluster=cluster,
        num_gpus=fields["num_gpus"],
        micro_batch_size=fields.get("micro_batch_size"),
    )


@cache
def _load(name: str) -> dict[str, Any]:
    files = importlib.resources.files("nest_megatron.research.paper")
    text = files.joinpath("data", f"{name}.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return loaded
