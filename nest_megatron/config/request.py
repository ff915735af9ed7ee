"""A job and a configuration as a planning request."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec

from nest_megatron.cluster.catalogue import cluster_from_mapping
from nest_megatron.cluster.records import Cluster, Precision
from nest_megatron.config.batch import REPLICA_DEGREES, batch_of, batch_schedule_of
from nest_megatron.config.compose import Composed
from nest_megatron.config.defaults import naming_defaults
from nest_megatron.config.given import given_settings
from nest_megatron.config.job import Job
from nest_megatron.config.plausible import require_plausible
from nest_megatron.config.policy import (
    offer_within,
    offers_within,
    policy_notes,
    read_policy,
    settings_within,
    space_within,
)
from nest_megatron.config.schema import PlanConfig
from nest_megatron.config.sequence_data import image_notes, length_notes, read_lengths, with_images
from nest_megatron.config.site import choose_site
from nest_megatron.config.space import read_backend, read_space
from nest_megatron.config.target import (
    adapter_notes,
    beside_frozen_weights,
    choice,
    fields_of,
    fixed_choices,
    read_adapters,
    read_execution,
    read_memory_offers,
    read_numeric_offers,
    read_settings,
    read_target,
    stated_packages,
    stated_recipe,
)
from nest_megatron.cost_model.features import SCANNED
from nest_megatron.cost_model.goodput import Reliability
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import (
    UnplannableModelError,
    UserInputError,
    require_at_least,
    require_seconds,
)
from nest_megatron.model.catalogue import spec_from_mapping
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.parallel.batch_schedule import BatchSchedule
from nest_megatron.parallel.device_rules import device_notes, require_recipe
from nest_megatron.parallel.knobs import (
    KnobConditions,
    Package,
    always_on,
    open_values,
    unknown_packages,
)
from nest_megatron.parallel.objective import Objective
from nest_megatron.parallel.price import Rates
from nest_megatron.planner import PlanRequest
from nest_megatron.planner.headroom import MOST_HEADROOM
from nest_megatron.planner.request import DEFAULT_HEADROOM, Offer
from nest_megatron.profile.choose import Choice, Wanted, choose_times
from nest_megatron.profile.mode import ProfileMode
from nest_megatron.solver.space import SearchSpace

Rest = ParamSpec("Rest")

#: Bandwidth from which activations can wait on the host: above PCIe of the fifth generation
#: (63 GB/s), below NVLink-C2C.
_FAST_LINK = 1e11
_BATCH_DEGREES = ("data_parallel_size", "micro_batch_size")


def catalogue_job(composed: Composed) -> Job:
    """A model of the catalogue as a job that states nothing else."""
    target = read_target(composed.config)
    return Job(
        spec=read_spec(composed.config),
        version=target.megatron_core,
        memory_flags=stated_recipe(composed.config),
        can_state=fields_of(target),
        notes=composed.notes,
    )


def request_of(
    composed: Composed, space: SearchSpace | None = None, *, choose_execution: bool = False
) -> PlanRequest:
    """What to plan for a model and a cluster of the configuration; errors as of ``request_for``.

    Args:
        space: what the search may choose; the configuration says it if not given.
        choose_execution: a plan may choose how layers are carried out (``docs/knobs.md``), and does
            not leave it to the framework.
    """
    job, cluster = catalogue_job(composed), read_cluster(composed.config)
    space = read_space(composed.config) if space is None else space
    return request_for(job, cluster, composed, space, choose_execution=choose_execution)


def _naming_defaults(
    function: Callable[Concatenate[Job, Cluster, Composed, Rest], PlanRequest],
) -> Callable[Concatenate[Job, Cluster, Composed, Rest], PlanRequest]:
    """An error about a default of the site, of the job's configuration, says where it is from."""

    @functools.wraps(function)
    def run(
        job: Job, cluster: Cluster, composed: Composed, /, *args: Rest.args, **kwargs: Rest.kwargs
    ) -> PlanRequest:
        with naming_defaults(composed.defaults):
            return function(job, cluster, composed, *args, **kwargs)

    return run


@_naming_defaults
def request_for(
    job: Job,
    cluster: Cluster,
    composed: Composed,
    space: SearchSpace,
    *,
    offer: Offer | None = None,
    freed: Collection[str] = (),
    choose_execution: bool = True,
    prefix: str = "",
    versions: Mapping[str, str] | None = None,
) -> PlanRequest:
    """What to plan for a job on a cluster.

    Args:
        space: what the search may choose.
        offer: another data-parallel sharding than the job's own.
        freed: Megatron's arguments that the job states and a plan may change.
        choose_execution: a plan may choose how layers are carried out.
        prefix: what stands before the names of settings where the user types them.
        versions: of the running job; ``None`` on a laptop, where none are known.

    Raises:
        UserInputError: for a setting that is wrong, or if what is fixed cannot be laid over the
            GPUs or the batch.
    """
    config = composed.config
    if config.flags is not None and job.command is None:
        limit, fix = "no command of Megatron-LM is there that has flags", "Add --from COMMAND."
        raise UserInputError("flags", value=config.flags, limit=limit, fix=fix)
    if job.target is not None:
        _require_own_words(config, job, prefix)
    spec = with_images(with_seq_length(job.spec, config.train.seq_length), config.train)
    job = dataclasses.replace(job, spec=spec)
    schedule = batch_schedule_of(config, job)
    batch, notes = batch_of(config, job, cluster.num_gpus, schedule)
    space = dataclasses.replace(space, batch_unit=schedule.batch_unit if schedule else None)
    job = dataclasses.replace(job, capturable=job.capturable and schedule is None)
    policy = read_policy()
    space, offer = space_within(space, policy, cluster), offer_within(offer, policy, cluster)
    space = beside_frozen_weights(config, space, spec, read_target(config, job.target))
    if config.checks.plausibility:
        require_plausible(spec, cluster, batch)
    check_quotients(space, cluster.num_gpus, batch)
    name, target = cluster.accelerator.name, read_target(config, job.target)
    lengths = read_lengths(config.train, spec.seq_length, packed=job.packs)
    notes += length_notes(config.train, lengths, packed=job.packs)
    settings = read_settings(config, job, name, lengths)
    settings = settings_within(settings, policy)
    if spec.vision is not None and settings.precision.is_quantized:
        value, limit = settings.precision.value, "an encoder of images is priced in 16 bits"
        raise UnplannableModelError("train.precision", value=value, limit=limit, fix="Use bf16.")
    recipe = settings.traits.fp8_recipe.value if settings.precision.is_quantized else None
    require_recipe(name, recipe)
    choices = KnobConditions(
        spec=spec,
        accelerator=name,
        fp8_recipe=recipe if settings.precision is Precision.FP8 else None,
        packages=stated_packages(config, job.packages),
        fixed=fixed_choices(config, job.fixed, freed),
        has_engine=job.transformer_impl != "local",
        capturable=job.capturable,
        has_fast_link=cluster.accelerator.host_bandwidth_bytes_per_s >= _FAST_LINK,
        counts_on_host=job.counts_on_host,
        can_state=job.can_state,
        closed=job.closed,
    )
    execution = read_execution(config, job, name)
    space = dataclasses.replace(
        space,
        execution=execution,
        version=target.megatron_core,
        transformer_impl=job.transformer_impl,
        cuda_graphs=job.graphs,
    )
    if choose_execution:
        space = dataclasses.replace(
            space, execution=always_on(execution, choices), executions=open_values(choices)
        )
    if "cuda_graph_impl" in space.executions:
        space = dataclasses.replace(space, cuda_graphs=None)
    if offer is not None:
        names = ["batch_unit", "execution", "executions", "version", "transformer_impl"]
        names.append("cuda_graphs")
        same: dict[str, Any] = {name: getattr(space, name) for name in names}
        offer = dataclasses.replace(offer, space=dataclasses.replace(offer.space, **same))
    defaults = tuple(f"{each} from {each.origin}" for each in composed.defaults)
    if defaults:
        notes = [*notes, f"Defaults of this site: {'; '.join(defaults)}."]
    notes = [*notes, *policy_notes(policy), *device_notes(name, recipe, space.execution)]
    times = _times(config, job, cluster, settings, prefix=prefix, versions=versions)
    site, site_notes = choose_site(config, cluster, versions)
    notes = [*notes, *site_notes]
    search = config.search
    require_at_least("search.num_alternatives", search.num_alternatives, 0, "Give the runners-up.")
    own = {**job.fixed, "micro_batch_size": job.micro_batch_size}
    headroom = DEFAULT_HEADROOM if config.memory.margin is None else config.memory.margin
    return PlanRequest(
        spec=spec,
        cluster=cluster,
        global_batch_size=batch,
        settings=settings,
        space=space,
        max_seconds=search.max_seconds,
        num_alternatives=search.num_alternatives,
        backend=read_backend(search.backend),
        times=times.times,
        not_modelled=job.not_modelled,
        offer=offer,
        packages=unknown_packages(choices) if choose_execution else {},
        numeric_offers=offers_within(read_numeric_offers(config, job, name, lengths), policy),
        memory_offers=offers_within(
            read_memory_offers(
                config, job, name, lengths, _other_spaces(space, offer, choices, choose_execution)
            ),
            policy,
        ),
        reliability=read_reliability(config, job.save_interval),
        rates=read_rates(config, spec.seq_length, schedule),
        objective=choice("search.objective", search.objective, Objective),
        tie_percent=search.tie_percent,
        max_out_of_memory_percent=search.max_out_of_memory_percent,
        failed_start_percent=search.failed_start_percent,
        own={name: value for name, value in own.items() if value is not None},
        headroom=headroom,
        priced_headroom=read_priced_headroom(config, headroom),
        notes=(*notes, *adapter_notes(spec), *_scan_notes(spec), *image_notes(spec), *times.notes),
        profile_notes=times.notes,
        batch_schedule=schedule,
        sequence_lengths=lengths,
        policy=policy,
        defaults=defaults,
        given=given_settings(config),
        site=site,
    )


def _other_spaces(
    space: SearchSpace, offer: Offer | None, choices: KnobConditions, choose_execution: bool
) -> Mapping[tuple[str, ...], SearchSpace]:
    """The space of a job, and those in which it could need less memory, by what the user sets."""
    spaces: dict[tuple[str, ...], SearchSpace] = {(): space}
    if offer is not None:
        spaces[offer.words] = offer.space
    everywhere = dataclasses.replace(
        choices, has_fast_link=True, packages=choices.packages | {Package.ENGINE_2_9}
    )
    name = "offload_modules"
    values = open_values(everywhere).get(name, ()) if choose_execution else ()
    if values and name not in space.executions and not space.execution.offload_modules:
        modules = " ".join(values[0])
        words = f"--fine-grained-activation-offloading --offload-modules {modules}"
        executions = {**space.executions, name: values}
        spaces[(words,)] = dataclasses.replace(space, executions=executions)
    return spaces


def _require_own_words(config: PlanConfig, job: Job, prefix: str) -> None:
    """Refuse settings that would price another job than the one that runs."""
    if read_adapters(config) is not None:
        limit, fix = "the job says itself what it trains", "Leave it out."
        raise UserInputError("peft.scheme", value=config.peft.scheme, limit=limit, fix=fix)
    own: dict[str, Any] = {
        "seq_length": job.spec.seq_length,
        "precision": job.precision.value,
        "fp8_recipe": job.memory_flags.get("fp8_recipe"),
    }
    for name, value in own.items():
        asked = getattr(config.train, name)
        if asked not in (None, value):
            limit = f"the job itself says {value}, and would run so"
            raise UserInputError(
                f"{prefix}train.{name}", value=asked, limit=limit, fix="Change the job."
            )


def _scan_notes(spec: TransformerSpec) -> tuple[str, ...]:
    """What is known of layers whose kernels nobody has published a measurement of."""
    if spec.experimental_attention_variant == "dsa":
        return (
            "Sparse attention (dsa) is priced from the source of Megatron-LM 0.20 without fused "
            "kernels (dsa_kernel_backend none): every score is worked out, then masked. No run of "
            "it is known.",
        )
    if SCANNED.isdisjoint(spec.blocks):
        return ()
    return (
        "The scan of Mamba layers and gated delta nets is priced by its arithmetic and its memory "
        "traffic, times a share that is fitted to whole steps of hybrid models on Hopper and "
        "Blackwell (docs/hybrid.md); no public measurement of its kernels is known.",
    )


def _times(
    config: PlanConfig,
    job: Job,
    cluster: Cluster,
    settings: CostSettings,
    *,
    prefix: str,
    versions: Mapping[str, str] | None,
) -> Choice:
    asked, own = config.profile, f"model={job.spec.name} cluster={cluster.name}"
    wanted = Wanted(
        spec=job.spec,
        accelerator=cluster.accelerator,
        precision=settings.precision,
        versions=versions or {},
        prefix=prefix,
        command="--from <your script and its flags>" if prefix else own,
        implementation=job.transformer_impl,
    )
    mode = choice(f"{prefix}profile.mode", asked.mode, ProfileMode)
    require_seconds(f"{prefix}profile.max_seconds", asked.max_seconds)
    return choose_times(wanted, mode, asked.name)


def read_spec(config: PlanConfig) -> TransformerSpec:
    """The model, at the sequence length that was asked for; ``UserInputError`` if there is none."""
    if config.model is None and config.flags is not None:
        limit = f"no model is given that has {config.flags}"
        fix = "Name one: model=NAME, or add --from with your command."
        raise UserInputError("model", value=None, limit=limit, fix=fix)
    if config.model is None:
        raise UserInputError(
            "model",
            value=None,
            limit="no model is given",
            fix="Add for example model=llama3_70b (`nest-megatron models` lists them), or "
            "--from with your command.",
        )
    spec = with_seq_length(spec_from_mapping(config.model), config.train.seq_length)
    spec = dataclasses.replace(spec, adapters=read_adapters(config) or spec.adapters)
    if config.checks.plausibility:
        require_plausible(spec, None)
    return spec


def with_seq_length(spec: TransformerSpec, seq_length: int | None) -> TransformerSpec:
    """The model on sequences of another length; rotary positions reach as far as is needed."""
    if seq_length is None:
        return spec
    require_at_least("train.seq_length", seq_length, 1, "Give tokens.")
    longest = spec.max_position_embeddings
    if longest is not None and spec.position_embedding_type == "rope":
        longest = max(longest, seq_length)
    return dataclasses.replace(spec, seq_length=seq_length, max_position_embeddings=longest)


def read_cluster(config: PlanConfig, num_gpus: int | None = None) -> Cluster:
    """The cluster, at the size of the job or its own; ``UserInputError`` if there is none."""
    if config.cluster is None:
        raise UserInputError(
            "cluster",
            value=None,
            limit="no cluster is given",
            fix="Add for example cluster=dgx_h100 cluster.num_gpus=64 (`nest-megatron clusters` "
            "lists them).",
        )
    cluster = cluster_from_mapping(config.cluster, num_gpus=num_gpus)
    if config.checks.plausibility:
        require_plausible(None, cluster, config.train.global_batch_size)
    return cluster


def read_reliability(config: PlanConfig, save_interval: int | None = None) -> Reliability | None:
    """How often the job fails, where the configuration gives the mean time between failures."""
    given = dataclasses.asdict(config.reliability)
    said = {name: value for name, value in given.items() if value is not None}
    if config.reliability.mtbf_hours is None:
        for name, value in said.items():
            limit = "it needs the mean time between failures"
            fix = "Add for example reliability.mtbf_hours=50000, of one GPU."
            raise UserInputError(f"reliability.{name}", value=value, limit=limit, fix=fix)
        return None
    if save_interval is not None:
        said.setdefault("save_interval", save_interval)
    return Reliability(**said)


def read_rates(
    config: PlanConfig, seq_length: int, schedule: BatchSchedule | None = None
) -> Rates | None:
    """What a GPU costs and how long the run is, where the configuration says one of them."""
    cost, train = config.cost, config.train
    tokens = train.tokens
    if tokens is not None and (schedule is not None or train.train_samples is not None):
        limit, fix = "the run's samples say how long it is", "Give train.train_samples alone."
        raise UserInputError("train.tokens", value=tokens, limit=limit, fix=fix)
    if train.train_samples is not None:
        tokens = train.train_samples * seq_length
    if (cost.gpu_hour, cost.gpu_watts, train.tokens) == (None, None, None):
        return None
    return Rates(gpu_hour=cost.gpu_hour, gpu_watts=cost.gpu_watts, tokens=tokens)


def read_priced_headroom(config: PlanConfig, headroom: float) -> float | None:
    """A larger share whose price is searched; less, or all of a device, is an error."""
    priced = config.memory.priced_margin
    if priced is None or headroom < priced <= MOST_HEADROOM:
        return priced
    limit = f"it lies above what plans leave free, {headroom:g}, and up to {MOST_HEADROOM:g}"
    fix = f"For example memory.priced_margin={min(MOST_HEADROOM, headroom + 0.1):g}."
    raise UserInputError("memory.priced_margin", value=priced, limit=limit, fix=fix)


def check_quotients(space: SearchSpace, gpus: int, batch: int) -> None:
    """Say it at once where fixed degrees and the GPUs, or the batch, have no whole quotient."""
    if space.use_all_gpus:
        degrees = (*REPLICA_DEGREES, "data_parallel_size")
        _check_divides(space, degrees, gpus, f"the {gpus} GPUs, which all take part")
    if batch > 0:
        _check_divides(space, _BATCH_DEGREES, batch, f"the global batch of {batch} sequences")


def _check_divides(space: SearchSpace, names: Iterable[str], whole: int, words: str) -> None:
    fixed = {name: space.fixed[name] for name in names if name in space.fixed}
    product = math.prod(fixed.values())
    if whole % product:
        limit = f"it must divide {words}"
        fix = "Change it, or leave it out to have it searched."
        if len(fixed) > 1:
            fix = "Change one of them or more, or leave out what may be searched."
        raise UserInputError(" * ".join(fixed), value=product, limit=limit, fix=fix)
