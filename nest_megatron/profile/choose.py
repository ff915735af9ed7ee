"""Which profiles stand behind a plan: those of the same device, versions and layers, or one named.

A profile of another device or version is used only when it is named, and then counts as imported;
one of other layers, another sequence length or number format is never used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from datetime import datetime

from nest_megatron.cluster.records import Accelerator, Precision
from nest_megatron.errors import ProfileError, UserInputError, typed_setting
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.plain import frozen
from nest_megatron.profile.lookup import NAMES_BETWEEN, LayerTimes
from nest_megatron.profile.records import (
    LayerProfile,
    Machine,
    ProfileMode,
    layer_shape,
    shape_digest,
)
from nest_megatron.profile.store import LAYERS, all_entries, find_entry
from nest_megatron.units import format_gib

MEASURE_COMMAND = "torchrun -m nest_megatron.profile"


@frozen
class TimedJob:
    """A job whose layers a plan needs times of.

    ``versions`` are those of the running job, by the names of ``Machine``; none are known on a
    laptop. ``command`` measures this job, for messages; ``implementation`` is its
    ``--transformer-impl``, where that is known.
    """

    spec: TransformerSpec
    accelerator: Accelerator
    precision: Precision
    versions: Mapping[str, str] = field(default_factory=dict)
    command: str = "model=... cluster=..."
    implementation: str | None = None


#: Times, ``None`` for those of data sheets, and what a user should know of the choice.
_Choice = tuple[LayerTimes | None, tuple[str, ...]]


def choose_times(job: TimedJob, mode: ProfileMode, name: str | None = None) -> _Choice:
    """The times to plan with, and notes; of the profile that is named, whatever machine it is from.

    Raises:
        UserInputError: if the one named cannot be used, or ``require`` finds a block untimed.
    """
    if mode is ProfileMode.MEASURE:
        raise UserInputError(
            typed_setting("profile.mode"),
            mode.value,
            "nothing is launched here that could be measured",
            f"Measure first: {MEASURE_COMMAND} {job.command}; then use auto or require.",
        )
    if mode is ProfileMode.ANALYTIC:
        if name is None:
            return None, ()
        raise UserInputError(
            typed_setting("profile.name"),
            name,
            "profile.mode=analytic uses no profile",
            "Leave one of the two out.",
        )
    times, notes = _matching(job) if name is None else _named(job, name)
    if mode is ProfileMode.REQUIRE:
        _require_all(job, times, notes)
    return times, (*notes, *_other_implementations(job, times))


def _other_implementations(job: TimedJob, times: LayerTimes | None) -> Iterator[str]:
    """A note for each profile of layers that Megatron makes otherwise than those of the job."""
    for profile in () if times is None else times.profiles:
        has = profile.machine.implementation
        if job.implementation not in (None, has):
            yield (
                f"Profile {profile.name} is of the layers of --transformer-impl {has}, and the "
                f"job's are of {job.implementation}: they take other times."
            )


def times_of(provenance: str, spec: TransformerSpec) -> LayerTimes | None:
    """The times that a plan was made with, as it names them (``Provenance.profile``).

    ``None`` for a plan without any, and where a profile of its is not here any more.
    """
    names, _, _ = provenance.rpartition(": ")
    if not names:
        return None
    try:
        profiles = tuple(find_entry(name).read() for name in names.split(NAMES_BETWEEN))
    except UserInputError:
        return None
    return LayerTimes(spec=spec, profiles=profiles)


def layer_differences(profile: LayerProfile, job: TimedJob) -> list[str]:
    """In what a profile's layers are not those of a job: it is not used, even where it is named."""
    has, needs = layer_shape(profile.model), layer_shape(job.spec)
    pairs = {name: (has.get(name), needs.get(name)) for name in {**has, **needs}}
    pairs["precision"] = (profile.precision.value, job.precision.value)
    return [_INSTEAD(name, *pair) for name, pair in pairs.items() if pair[0] != pair[1]]


def machine_differences(machine: Machine, job: TimedJob) -> list[str]:
    """In what a profile's machine is not the one of a job."""
    from nest_megatron.cluster.discovery import LocalGpus, is_same_device

    device = LocalGpus(device_name=machine.device_name, memory_bytes=machine.memory_bytes, count=1)
    accelerator, found = job.accelerator, []
    if machine.is_cpu or not is_same_device(accelerator, device):
        needed = f"{accelerator.name} ({format_gib(accelerator.memory_bytes)})"
        found.append(_INSTEAD("device", machine.describe(), needed))
    for name, version in job.versions.items():
        has = getattr(machine, name)
        if has is None or _public(has) != _public(version):
            found.append(_INSTEAD(name, has, version))
    return found


_INSTEAD = "{} {} instead of {}".format


def _public(version: str) -> str:
    """A version without its local part, which a wheel's metadata may leave out.

    >>> _public("2.6.0+cu124")
    '2.6.0'
    """
    return version.partition("+")[0]


def _named(job: TimedJob, name: str) -> _Choice:
    try:
        entry = find_entry(name)
    except UserInputError as error:
        raise UserInputError(typed_setting("profile.name"), name, error.limit, error.fix) from error
    profile = entry.read()
    if decisive := layer_differences(profile, job):
        raise ProfileError(
            typed_setting("profile.name"),
            name,
            f"it is not of this job's layers: {', '.join(decisive)}",
            f"Name another, or measure these: {MEASURE_COMMAND} {job.command}.",
        )
    if not (found := machine_differences(profile.machine, job)):
        return LayerTimes(spec=job.spec, profiles=(profile,)), ()
    note = f"Profile {name} is used as requested, although it is of another machine: "
    foreign = dataclasses.replace(profile, imported=True)
    times = LayerTimes(spec=job.spec, profiles=(foreign,))
    return times, (f"{note}{', '.join(found)}.",)


def _matching(job: TimedJob) -> _Choice:
    here: list[LayerProfile] = []
    foreign: list[LayerProfile] = []
    shipped: list[LayerProfile] = []
    broken, unused = [], []
    layers = shape_digest(job.spec, job.precision)
    for entry in all_entries():
        try:
            if entry.line(LAYERS) not in (None, layers):
                continue  # of other layers, as it says itself: it need not be read whole
            profile = entry.read()
        except ProfileError as error:
            broken.append(f"A profile cannot be used: {error}")
            continue
        found = [
            *layer_differences(profile, job),
            *machine_differences(profile.machine, job),
        ]
        if found:
            fix = f"{typed_setting('profile.name')}={profile.name} uses it all the same"
            unused.append(f"Profile {profile.name} is not used: {', '.join(found)}; {fix}.")
        else:
            (shipped if entry.shipped else foreign if profile.imported else here).append(profile)
    chosen = (*_newest(here), *(_newest(foreign) or _newest(shipped)))
    if not chosen:
        return None, (*broken, *unused)
    return LayerTimes(spec=job.spec, profiles=chosen), tuple(broken)


def _newest(profiles: Iterable[LayerProfile]) -> tuple[LayerProfile, ...]:
    ordered = sorted(profiles, key=lambda p: (datetime.fromisoformat(p.created), p.name))
    return tuple(ordered[-1:])


def _require_all(job: TimedJob, times: LayerTimes | None, notes: tuple[str, ...]) -> None:
    timed = frozenset() if times is None else times.blocks()
    untimed = [block.value for block in job.spec.blocks if block not in timed]
    if not untimed:
        return
    unused = f" ({' '.join(notes)})" if notes else ""
    raise UserInputError(
        typed_setting("profile.mode"),
        ProfileMode.REQUIRE.value,
        f"no profile has times of {', '.join(untimed)} on {job.accelerator.name}{unused}",
        f"Measure them: {MEASURE_COMMAND} {job.command}",
    )
