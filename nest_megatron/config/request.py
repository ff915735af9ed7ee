"""A job and settings as a planning request."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from typing import Any, Final

from nest_megatron.catalogue_files import default_setting
from nest_megatron.cluster.records import Cluster
from nest_megatron.config.catalogue import (
    read_adapters,
    read_cluster,
    read_spec,
    require_plausible,
    with_seq_length,
)
from nest_megatron.config.compose import Settings
from nest_megatron.config.defaults import naming_defaults
from nest_megatron.config.job import (
    CostInputs,
    Job,
    fields_of,
    read_precision,
    read_target,
    recipe_flags,
)
from nest_megatron.config.overrides import choice, value_text
from nest_megatron.config.policy import (
    offers_within,
    policy_notes,
    read_policy,
    settings_within,
    space_within,
)
from nest_megatron.config.schema import stated_values
from nest_megatron.config.space import (
    attention_of,
    buildable_degrees,
    builds_mtp_beside_layer,
    check_quotients,
    limits_for_length,
    read_backend,
    read_recompute,
    read_space,
    require_buildable,
    require_experts,
    space_of_framework,
)
from nest_megatron.config.train import (
    batch_of,
    batch_schedule_of,
    image_notes,
    length_notes,
    read_lengths,
    with_images,
)
from nest_megatron.cost_model.features import SCANNED
from nest_megatron.cost_model.goodput import Reliability
from nest_megatron.cost_model.memory import fp8_copy_bytes
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.cost_model.site import Site
from nest_megatron.cost_model.site_file import find_site
from nest_megatron.cost_model.targets import Target
from nest_megatron.errors import (
    UserInputError,
    require_at_least,
    require_seconds,
    typed_setting,
)
from nest_megatron.layout.batch_schedule import BatchSchedule
from nest_megatron.layout.estimate import Rates
from nest_megatron.layout.knobs import (
    KnobConditions,
    Package,
    always_on,
    open_values,
    unknown_packages,
)
from nest_megatron.layout.numeric_knobs import MEMORY_KNOBS, NUMERIC_KNOBS
from nest_megatron.layout.policy import Policy, PolicyError
from nest_megatron.layout.rulebook.devices import device_notes, require_recipe
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.model.encoder import PeftScheme
from nest_megatron.model.spec import OF_HUGGING_FACE, TransformerSpec
from nest_megatron.planner import Request
from nest_megatron.planner.request import Offer
from nest_megatron.profile.choose import TimedJob, choose_times
from nest_megatron.profile.lookup import LayerTimes
from nest_megatron.profile.records import ProfileMode
from nest_megatron.solver.space import SearchSpace
from nest_megatron.units import Seconds

#: Bandwidth from which activations can wait on the host: above PCIe of the fifth generation
#: (63 GB/s), below NVLink-C2C.
_FAST_LINK = 1e11
#: Settings that no other part of a plan's file says.
_RECORDED: Final = (
    "search.tie_percent",
    "search.keep",
    "search.packages",
    "memory.max_oom_chance",
    "train.rampup_batch_size",
    "train.step_batch_size_schedule",
    "train.train_samples",
    "train.sequence_packing",
    "train.sequence_lengths",
    "train.sequence_length_mean",
    "train.sequence_length_std",
    "train.fp8_recipe",
    "checks.plausibility",
)


def catalogue_job(settings: Settings) -> Job:
    """A model of the catalogue as a job that states nothing else."""
    target = read_target(settings)
    return Job(
        spec=read_spec(settings),
        version=target.megatron_core,
        memory_flags=recipe_flags(settings),
        can_state=fields_of(target),
        notes=settings.notes,
    )


def request_of(
    settings: Settings,
    space: SearchSpace | None = None,
    *,
    choose_execution: bool = False,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
) -> Request:
    """What to plan for a model and a cluster of the settings; errors as of ``request_for``.

    Args:
        space: what the search may choose; the settings say it if not given.
        choose_execution: a plan may choose how layers are executed (``docs/knobs.md``), and does
            not leave it to the framework, which has to be able to build the model.
        begun_s, shortlist: as of ``Request``.
    """
    return request_for(
        catalogue_job(settings),
        read_cluster(settings),
        settings,
        read_space(settings) if space is None else space,
        choose_execution=choose_execution,
        begun_s=begun_s,
        shortlist=shortlist,
    )


def request_for(
    job: Job,
    cluster: Cluster,
    settings: Settings,
    space: SearchSpace,
    *,
    offer: Offer | None = None,
    freed: Collection[str] = (),
    choose_execution: bool = True,
    versions: Mapping[str, str] | None = None,
    begun_s: Seconds | None = None,
    shortlist: bool = False,
) -> Request:
    """What to plan for a job on a cluster.

    Args:
        space: what the search may choose.
        offer: another data-parallel sharding than the job's own.
        freed: Megatron's arguments that the job states and a plan may change.
        choose_execution: a plan may choose how layers are executed.
        versions: of the running job; ``None`` on a laptop, where none are known.
        begun_s, shortlist: as of ``Request``.

    Raises:
        UserInputError: for a setting that is wrong, or if what is fixed cannot be laid over the
            GPUs or the batch.
    """
    with naming_defaults(settings.defaults):
        _require_settings_for(job, settings)
        policy, target = read_policy(), read_target(settings, job.target)
        spec, model_notes = _model_to_train(job, settings, target)
        schedule = batch_schedule_of(settings, job, spec.seq_length)
        batch, batch_notes = batch_of(settings, job, cluster.num_gpus, schedule)
        limits = spec, settings, target, policy, cluster
        space = _allowed_space(space, *limits)
        try:
            offer = offer and replace(offer, space=_allowed_space(offer.space, *limits))
        except PolicyError:
            offer = None  # nothing is left of another sharding
        require_experts(spec, settings.parallel)
        if settings.checks.plausibility:
            require_plausible(spec, cluster, batch, typed=settings.given)
        check_quotients(space, cluster.num_gpus, batch)
        train, device = settings.train, cluster.accelerator
        packed = job.packs if train.sequence_packing is None else train.sequence_packing
        lengths = read_lengths(train, spec.seq_length, packed=packed)
        inputs = CostInputs(settings, job, device.name, spec=spec, lengths=lengths)
        costs = settings_within(inputs.costs(), policy)
        conditions = inputs.knob_conditions(
            freed,
            has_fast_link=device.host_bandwidth_bytes_per_s >= _FAST_LINK,
            is_steady=schedule is None,
        )
        require_recipe(device.name, conditions.fp8_recipe)
        execution, executions = inputs.execution(), space.executions
        if choose_execution:
            execution = always_on(execution, conditions)
            executions = open_values(conditions, execution)
        of_job: dict[str, Any] = {
            "batch_unit": schedule and schedule.batch_unit,
            "execution": execution,
            "executions": executions,
            "version": target.megatron_core,
            "transformer_impl": job.transformer_impl,
            "mtp_beside_layer": builds_mtp_beside_layer(spec, target),
            "cuda_graphs": None if "cuda_graph_impl" in executions else job.graphs,
        }
        if choose_execution and job.target is None:
            require_buildable(spec, target)
            of_job["fixed"] = buildable_degrees(spec, target, space.fixed)
        space = replace(space, **of_job)
        if offer is not None:
            offer = replace(offer, space=replace(offer.space, **of_job))
        times, profile_notes = _layer_times(settings, job, spec, cluster, versions)
        site, site_notes = (
            site_calibration(cluster, versions) if settings.profile.site else (None, ())
        )
        search = settings.search
        require_at_least(
            "search.num_alternatives", search.num_alternatives, 0, "Give the number of runners-up."
        )
        own = {**job.fixed, "micro_batch_size": job.micro_batch_size}
        defaults = tuple(f"{each} from {each.origin}" for each in settings.defaults)
        return Request(
            spec=spec,
            cluster=cluster,
            global_batch_size=batch,
            settings=costs,
            space=space,
            max_seconds=search.max_seconds,
            begun_s=begun_s,
            num_alternatives=search.num_alternatives,
            backend=read_backend(search.backend),
            times=times,
            not_modelled=job.not_modelled,
            offer=offer,
            packages=unknown_packages(conditions) if choose_execution else {},
            numeric_offers=offers_within(inputs.offers(NUMERIC_KNOBS), policy),
            memory_offers=offers_within(inputs.offers(*MEMORY_KNOBS), policy),
            memory_spaces=_other_spaces(space, offer, conditions if choose_execution else None),
            reliability=read_reliability(settings, job.save_interval),
            rates=read_rates(settings, spec.seq_length, schedule),
            max_oom_chance=settings.memory.max_oom_chance,
            tie_percent=search.tie_percent,
            own={name: value for name, value in own.items() if value is not None},
            shortlist=shortlist,
            notes=(
                *batch_notes,
                *model_notes,
                *length_notes(lengths, packed=packed),
                *([f"Defaults of this site: {'; '.join(defaults)}."] if defaults else []),
                *policy_notes(policy),
                *device_notes(device.name, conditions.fp8_recipe, execution),
                *site_notes,
                *_pricing_notes(spec, costs),
                *image_notes(spec),
                *profile_notes,
            ),
            batch_schedule=schedule,
            sequence_lengths=lengths,
            policy=policy,
            defaults=defaults,
            given=recorded_settings(settings),
            site=site,
        )


def _require_settings_for(job: Job, settings: Settings) -> None:
    """Refuse settings of other jobs, and those that would price another job than the one that runs.

    A model of the catalogue has no words of its own.
    """
    if settings.flags is not None and job.command is None and not job.fields:
        raise UserInputError(
            "flags",
            settings.flags,
            "no command of Megatron-LM is there that has flags",
            "Add --from COMMAND.",
        )
    if settings.assume_harmless and not job.fields:
        raise UserInputError(
            "assume_harmless",
            list(settings.assume_harmless),
            "it names fields of a recipe of NeMo or Megatron-Bridge, and this job is none",
            "Leave it out.",
        )
    if job.target is None:
        return
    if read_adapters(settings) is not None:
        raise UserInputError(
            "peft.scheme",
            settings.peft.scheme,
            "the job says itself what it trains",
            "Leave it out.",
        )
    own: dict[str, Any] = {
        "seq_length": job.spec.seq_length,
        "precision": job.precision.value,
        "fp8_recipe": job.memory_flags.get("fp8_recipe"),
    }
    for name, value in own.items():
        asked = getattr(settings.train, name)
        if asked not in (None, value):
            raise UserInputError(
                typed_setting(f"train.{name}"),
                asked,
                f"the job says {value}, and a plan does not change that",
                "Change the job itself.",
            )


def _model_to_train(
    job: Job, settings: Settings, target: Target
) -> tuple[TransformerSpec, list[str]]:
    """The job's model, with the sequences of the settings and the attention of its framework.

    Returns:
        The model, and what was assumed of it.
    """
    seq_length = settings.train.seq_length
    spec = with_images(with_seq_length(job.spec, seq_length), settings.train)
    spec, notes = attention_of(spec, target)
    longest = spec.max_position_embeddings or spec.seq_length  # the catalogue's have a length
    if seq_length is None and spec.source.startswith(OF_HUGGING_FACE) and longest > spec.seq_length:
        notes.append(
            f"train.seq_length is not given; {spec.seq_length} of the model's {longest} tokens are "
            "assumed."
        )
    return spec, notes


def _allowed_space(
    space: SearchSpace,
    spec: TransformerSpec,
    settings: Settings,
    target: Target,
    policy: Policy,
    cluster: Cluster,
) -> SearchSpace:
    """What a policy, and the framework that builds the model, leave of a space."""
    within = space_within(space, policy, cluster)
    if "micro_batch_size" not in space.fixed:
        within["limits"] = limits_for_length(within["limits"], spec.seq_length)
    within |= space_of_framework(
        spec, target, within["zero_stages"], space.recompute or read_recompute(settings.parallel)
    )
    return replace(space, **within)


def _layer_times(
    settings: Settings,
    job: Job,
    spec: TransformerSpec,
    cluster: Cluster,
    versions: Mapping[str, str] | None,
) -> tuple[LayerTimes | None, tuple[str, ...]]:
    """Measured times of the model's layers, and notes; ``versions`` as of ``request_for``."""
    mode = choice(typed_setting("profile.mode"), settings.profile.mode, ProfileMode)
    require_seconds(typed_setting("profile.max_seconds"), settings.profile.max_seconds)
    precision = read_precision(settings, job.precision)
    named = (
        f"model={settings.given.get('model') or spec.name} train.seq_length={spec.seq_length} "
        f"cluster={settings.given.get('cluster') or cluster.name} "
        f"train.precision={precision}"
    )
    timed = TimedJob(
        spec=spec,
        accelerator=cluster.accelerator,
        precision=precision,
        versions=versions or {},
        command=named if settings.model else "--from <your script and its flags>",
        implementation=job.transformer_impl,
    )
    return choose_times(timed, mode, settings.profile.name)


def _other_spaces(
    space: SearchSpace, offer: Offer | None, choices: KnobConditions | None
) -> Mapping[tuple[str, ...], SearchSpace]:
    """Spaces in which a job could need less memory, by what the user sets.

    Args:
        choices: ``None`` where a plan leaves it to the framework how layers are executed.
    """
    spaces = {} if offer is None else {offer.words: offer.space}
    name = "offload_modules"
    if choices is None or name in space.executions or space.execution.offload_modules:
        return spaces
    everywhere = replace(
        choices, has_fast_link=True, packages=choices.packages | {Package.ENGINE_2_9}
    )
    if values := open_values(everywhere).get(name):
        modules = " ".join(values[0])
        words = f"--fine-grained-activation-offloading --offload-modules {modules}"
        executions = {**space.executions, name: values}
        spaces[(words,)] = replace(space, executions=executions)
    return spaces


def recorded_defaults() -> dict[str, str]:
    """Settings that no other part of a plan's file says, as typed where nobody says another."""
    return {key: value_text(default_setting(key)) for key in _RECORDED}


def recorded_settings(settings: Settings) -> tuple[str, ...]:
    """Those of them that settings have otherwise, for the plan's file."""
    return tuple(
        f"{key}={value}"
        for key, usual in recorded_defaults().items()
        if (value := value_text(attrgetter(key)(settings))) != usual
    )


def _pricing_notes(spec: TransformerSpec, costs: CostSettings) -> Iterator[str]:
    """What a plan says of adapters, layers that are seldom measured, routing and memory for fp8."""
    if spec.adapters is not None:
        yield f"All weights but those of adapters are frozen: {spec.adapters.words()}."
        if spec.adapters.scheme is not PeftScheme.LORA:
            yield f"No measured run trains {spec.adapters.scheme}: it is priced from its code."
    if spec.experimental_attention_variant == "dsa":
        yield (
            "Sparse attention (dsa) is priced from the source of Megatron-LM 0.20 without fused "
            "kernels (dsa_kernel_backend none): every score is worked out, then masked. No run of "
            "it is known."
        )
    elif not SCANNED.isdisjoint(spec.blocks):
        yield (
            "The scan of Mamba layers and gated delta nets is priced by its arithmetic and its "
            "memory traffic, times a share that is fitted to whole steps of hybrid models on "
            "Hopper and Blackwell (docs/hybrid.md); no public measurement of its kernels is known."
        )
    if spec.is_moe and costs.expert_imbalance == 1 and not costs.traits.pads_to_capacity:
        yield (
            "Tokens are taken as spread evenly over the ranks of EP; where routing is uneven, the "
            "busiest rank needs more time and memory (cost.expert_imbalance=1.2 prices a fifth "
            "more tokens there)."
        )
    beside = fp8_copy_bytes(ZeroStage.NONE, costs) if costs.precision.is_quantized else 0
    if beside and not costs.traits.fp8_weights:
        words = costs.precision.value
        yield (
            f"GEMMs in {words} keep {beside:g} B of copies of each weight beside its "
            f"{costs.traits.params_bytes} B, so weights take more memory than in bf16; "
            f"{words.removeprefix('nv')[:3]}_param_gather keeps the copies alone."
        )


def site_calibration(
    cluster: Cluster, versions: Mapping[str, str] | None = None
) -> tuple[Site | None, tuple[str, ...]]:
    """The calibration of the site, and what to say where it cannot be used."""
    try:
        found = find_site(cluster)
    except UserInputError as error:
        return None, (f"No calibration of the site is used: {error.value}: {error.limit}.",)
    if found is None:
        return None, ()
    from nest_megatron.cluster.discovery import is_same_device, known_gpus
    from nest_megatron.profile.installed import installed_versions, nccl_version

    path, calibration = found
    if versions is None:  # those of this machine, if it has the cluster's GPUs
        gpus = known_gpus()
        if gpus is not None and is_same_device(cluster.accelerator, gpus):
            versions = installed_versions()
    known = None if versions is None else {**versions, **nccl_version()}
    return Site(calibration, path.stem, known), ()


def read_reliability(settings: Settings, save_interval: int | None) -> Reliability | None:
    """How often the job fails, where the configuration gives the mean time between failures."""
    said = stated_values(settings.reliability)
    if settings.reliability.mtbf_hours is None:
        for name, value in said.items():
            raise UserInputError(
                f"reliability.{name}",
                value,
                "it needs the mean time between failures",
                "Add for example reliability.mtbf_hours=50000, of one GPU.",
            )
        return None
    if save_interval is not None:
        said.setdefault("save_interval", save_interval)
    return Reliability(**said)


def read_rates(settings: Settings, seq_length: int, schedule: BatchSchedule | None) -> Rates | None:
    """What a GPU costs and how long the run is, where the configuration says one of them."""
    cost, train = settings.cost, settings.train
    tokens = train.tokens
    if tokens is not None and (schedule is not None or train.train_samples is not None):
        raise UserInputError(
            "train.tokens",
            tokens,
            "the run's samples say how long it is",
            "Give train.train_samples alone.",
        )
    if (samples := train.train_samples) is not None:
        require_at_least("train.train_samples", samples, 1, "Give the sequences of the whole run.")
        tokens = samples * seq_length
    if (cost.gpu_hour, cost.gpu_watts, tokens) == (None, None, None):
        return None
    return Rates(gpu_hour=cost.gpu_hour, gpu_watts=cost.gpu_watts, tokens=tokens)
