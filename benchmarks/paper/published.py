"""What the paper printed, and what the authors' solver answers on its recorded instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from nest_megatron.documents import packaged

#: The planners of the paper, in its order, ours last.
PLANNERS = ("manual", "mcmc", "alpa_e", "mist", "phaze", "nest")
#: How the artifact's baselines are priced: its own way, in the order of any other plan, best cut.
RULES = ("as_shipped", "one_rule", "best_cuts")


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class PaperJob:
    """What a cell of a figure is about; some experiments fix the micro batch."""

    model: str
    cluster: str
    num_gpus: int
    micro_batch_size: int | None = None

    @property
    def key(self) -> tuple[str, int, int]:
        """What tells the jobs of a cluster apart; without a micro batch, 1 was printed."""
        return self.model, self.num_gpus, self.micro_batch_size or 1


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

    def throughput(self, planner: str, rule: str = "as_shipped") -> float | None:
        """A planner's throughput as the artifact prices it."""
        return self.nest if planner == "nest" else self.baselines.get(planner, {}).get(rule)

    def gain(self, planner: str, rule: str) -> float | None:
        """Throughput of the artifact's plan over a baseline's."""
        return over(self.nest, self.throughput(planner, rule))


def over(value: float | None, other: float | None) -> float | None:
    """A ratio, where both are there."""
    return None if value is None or other is None else value / other


def figure(name: str, cluster: str) -> dict[PaperJob, Mapping[str, float | None]]:
    """Printed throughputs by job and planner, relative to the figure's base; ``None``: no plan.

    Args:
        name: ``figure5``, ``figure6``, or ``figure7``, of which the authors print three jobs.
    """
    cells = _load("claims")["h100"] if name == "figure7" else _load(name)["cells"]
    return {
        _job(cell, cluster): {planner: cell[planner] for planner in PLANNERS if planner in cell}
        for cell in cells
    }


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
    found = {}
    for cell in _load("artifact")["cells"]:
        job, (stages, replicas, tensor) = _job(cell, cell["cluster"]), cell["degrees"]
        found[job] = ArtifactCell(
            job=job,
            degrees=(stages, replicas, tensor),
            nest=cell["nest"],
            baselines={name: cell[name] for name in PLANNERS[:-1] if name in cell},
        )
    return found


def _job(cell: Mapping[str, Any], cluster: str) -> PaperJob:
    size = cell.get("micro_batch_size")
    model, num_gpus = cell["model"], cell["num_gpus"]
    return PaperJob(model=model, cluster=cluster, num_gpus=num_gpus, micro_batch_size=size)


@cache
def _load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = packaged(__package__, f"data/{name}.yaml")
    return loaded
