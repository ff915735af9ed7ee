"""The constants of fits that have not seen a source (``calibration/left_out.yaml``).

With them, rows of a source are predicted by what all other sources say, so that no figure profits
from having been fitted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from nest_megatron.catalogue_files import catalogue_root
from nest_megatron.cluster.records import Cluster
from nest_megatron.documents import LOADER
from nest_megatron.files import write_text
from nest_megatron.validation.calibrate import Fit, constants_without
from nest_megatron.validation.calibration import Values, with_values
from nest_megatron.validation.job import RowJob

#: Constants that move by less than this share are left as they are.
_MOVED = 0.003

_HEAD = """\
# Written by `nest-megatron calibrate` (nest_megatron/validation/left_out.py); do not edit.
# By source: the constants that a fit to all other sources has, where they differ from those of
# devices.yaml and frameworks.yaml by more than 0.3 %. `nest-megatron validate --left-out` takes
# them.
"""


@dataclass(frozen=True, slots=True)
class LeftOutConstants:
    """Jobs under the constants of a fit without their source."""

    by_source: Mapping[str, Values]
    _clusters: dict[str, dict[int, Cluster]] = field(default_factory=dict)
    _known: list[Cluster] = field(default_factory=list)  # keeps them, and so their identity

    def applied(self, source: str, job: RowJob) -> RowJob:
        """A job of a source; as it is where the source was not fitted."""
        values = self.by_source.get(source)
        if not values:
            return job
        clusters = self._clusters.setdefault(source, {})
        if id(job.cluster) not in clusters:
            self._known.append(job.cluster)
        return with_values(job, values, clusters)


def shipped_left_out() -> LeftOutConstants:
    """The catalogue's."""
    path = catalogue_root().joinpath("calibration", "left_out.yaml")
    return LeftOutConstants(yaml.load(path.read_text(encoding="utf-8"), Loader=LOADER) or {})


def write_left_out_constants(path: Path, fit: Fit) -> None:
    """Write what moves without each source into a catalogue's ``calibration/``."""
    whole = fit.values
    document = {
        source: {
            key: float(f"{value:.4g}")
            for key, value in sorted(values.items())
            if abs(value - whole[key]) > _MOVED * abs(whole[key])
        }
        for source, values in sorted(constants_without(fit, "source").items())
    }
    kept = {source: values for source, values in document.items() if values}
    text = yaml.safe_dump(kept, sort_keys=False, width=100, default_flow_style=None)
    write_text(path, f"{_HEAD}{text}")
