"""What Megatron and Transformer Engine run on a device, and what a plan for it leaves alone.

A device is known by its accelerator's name; of one that no row names nothing is said.
``docs/cost_model.md`` shows the table; a test keeps it true.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from nest_megatron.cluster.records import Cluster
from nest_megatron.documents import packaged
from nest_megatron.layout.plan import MEGATRON_LM
from nest_megatron.layout.rulebook.facts import Facts, Rule, release_number, violations
from nest_megatron.layout.zero import DataParallelSharding, ZeroStage
from nest_megatron.model.execution import PLAIN, Execution
from nest_megatron.model.spec import ModelFamily, TransformerSpec


@dataclass(frozen=True, slots=True)
class DeviceRules:
    """Limits of the devices of one kind.

    Args:
        devices: pattern that the accelerator's name begins with.
        words: how a message calls them.
        recipes: scalings of fp8 (``--fp8-recipe``) and NVFP4 that Transformer Engine trains in.
        source: file, pull request or issue that says so.
        refused: others of which more is to be said than that it has none.
        notes: what a job's own choice needs there, by scaling or by field of ``Execution``.
        closed: fields of ``Execution`` that a plan leaves as the job has them.
    """

    devices: str
    words: str
    recipes: Sequence[str]
    source: str
    _: KW_ONLY
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    closed: Sequence[str] = ()


DEVICES = tuple(DeviceRules(**row) for row in packaged(__package__, "devices.json"))


@functools.cache
def device_rules(accelerator: str) -> DeviceRules | None:
    """The limits of an accelerator by its name, or ``None`` where none are known.

    >>> device_rules("MI325X-256GB").recipes, device_rules("chip")
    (['delayed', 'tensorwise'], None)
    """
    return next((row for row in DEVICES if re.match(row.devices, accelerator, re.IGNORECASE)), None)


def closed_on(accelerator: str) -> frozenset[str]:
    """Fields of ``Execution`` that a plan for such a device leaves as the job has them."""
    return frozenset(found.closed if (found := device_rules(accelerator)) else ())


def _limits(accelerator: str, recipe: str) -> str:
    found = device_rules(accelerator)
    assert found is not None  # else it would train
    return found.refused.get(recipe, f"Transformer Engine has no GEMMs of it on {found.words}")


def _recipes(accelerator: str) -> Sequence[str]:
    return found.recipes if (found := device_rules(accelerator)) else ()


DEVICE_RULES = (
    Rule(
        "device_recipe",
        "Transformer Engine quantization.py (``DEVICES``)",
        lambda accelerator, recipe: (
            recipe in (None, "custom", *_recipes(accelerator)) or not _recipes(accelerator)
        ),
        "{field}",
        "{limit}",
        "Use {others} or 16 bits.",
        value="recipe",
        words={
            "field": lambda recipe: "fp4_recipe" if recipe == "nvfp4" else "fp8_recipe",
            "limit": _limits,
            "others": lambda accelerator, recipe: (
                ("fp8 by " if recipe == "nvfp4" else "") + ", ".join(_recipes(accelerator))
            ),
        },
    ),
)


def require_recipe(accelerator: str, recipe: str | None) -> None:
    """Refuse a scaling that Transformer Engine does not train in on such a device.

    Args:
        recipe: as ``--fp8-recipe`` and ``--fp4-recipe`` name it; ``None`` of 16-bit jobs. One of
            the user's own (``custom``) passes.

    Raises:
        UserInputError: naming those that it has there.
    """
    for _, broken in violations(Facts(accelerator=accelerator, recipe=recipe), DEVICE_RULES):
        raise broken


def has_multicast(cluster: Cluster) -> bool:
    """Whether GPUs of a node can write to all at once: Hopper and later behind NVLink switches.

    Source: ``CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED``, which Transformer Engine's user buffers ask
    for (``initialize_ub``).
    """
    name, mesh = cluster.accelerator.name.upper(), bool(cluster.levels[0].ring_shares)
    bridged = re.search(r"PCIE|NVL(?!\d)", name) is not None
    return not (mesh or bridged) and re.match(r"G?[HB]\d", name) is not None


def device_notes(accelerator: str, recipe: str | None, execution: Execution) -> Iterator[str]:
    """What the user must know of the choices that a job has on such a device."""
    found = device_rules(accelerator)
    if found is None:
        return
    for name, note in found.notes.items():
        if name == recipe or getattr(execution, name, None) != getattr(PLAIN, name, None):
            yield f"{accelerator}: {note}"


_STRATEGY = "data_parallel_sharding_strategy"
#: Optimizers that keep state by element; Muon, SOAP and Lion are Megatron's emerging ones.
ELEMENTWISE_OPTIMIZERS = ("adam", "sgd")


#: The option of the optimizer that others need.
AWARE = "use_precision_aware_optimizer"


def initializes_on_meta_device(spec: TransformerSpec) -> bool:
    """``--init-model-with-meta-device`` gives every weight the values that the model requests.

    ``reset_parameters`` of ``torch.nn.Embedding`` (learned positions, BERT's token types) draws
    with a deviation of 1 instead: on gloo, a first step's gradient norm fell from 1.636 to 0.343.
    """
    return spec.position_embedding_type != "learned_absolute" and spec.family is ModelFamily.GPT


def overlaps_gradients(optimizer: str, version: str) -> bool:
    """Muon reduces gradients after the backward pass: in 0.17 ``muon`` alone, before that all.

    Source: 0.16.1 args:1181, 0.17 args:1487; since 0.18 none.
    """
    since = (0, 17) if optimizer == "dist_muon" else (0, 18)
    return "muon" not in optimizer or release_number(version) >= since


def allows_optimizer(
    optimizer: str, zero: ZeroStage, version: str, sharding: DataParallelSharding | None
) -> bool:
    """Emerging optimizers take whole matrices: no FSDP, before 0.18 no distributed optimizer.

    Nor has SGD one: ``DistributedOptimizer`` asserts the states of Adam as it is made, which
    validation lets pass. Source: 0.16.1 args:1184-1186, distrib_optimizer.py:514; 0.20 args:1144,
    :1739, distrib_optimizer.py:688.
    """
    if optimizer == "adam" or (optimizer, sharding) == ("sgd", DataParallelSharding.TORCH_FSDP2):
        return True
    before = optimizer == "sgd" or release_number(version) < (0, 18)
    return zero < (ZeroStage.OPTIMIZER if before else ZeroStage.GRADIENTS)


SHARDING_RULES = (
    Rule(
        "encoder_zero",
        "fsdp units are TransformerLayers; an encoder's are not planned",
        lambda spec, is_fsdp: not is_fsdp or spec.vision is None,
        _STRATEGY,
        "a model with an encoder of images is not planned with FSDP",
        "Use the distributed optimizer.",
        value="zero_name",
    ),
    Rule(
        "fsdp_no_pipeline",
        "mcore_fsdp_adapter.py:369 (run), args:606",
        lambda is_fsdp, sharding, pp: (
            pp == 1 or not (is_fsdp or sharding not in (None, DataParallelSharding.DDP))
        ),
        _STRATEGY,
        "the device mesh of FSDP has no pipeline dimension",
        "Use pipeline_model_parallel_size 1, or the distributed optimizer.",
        value="zero_name",
    ),
    Rule(
        "torch_fsdp_experts",
        "args:610",
        lambda uses_torch_fsdp2, ep: not uses_torch_fsdp2 or ep == 1,
        "expert_model_parallel_size",
        "--use-torch-fsdp2 has no expert parallelism",
        "Use 1, or another data-parallel sharding.",
    ),
    Rule(
        "fsdp_experts",
        "0.15 megatron_fsdp.py:238 (run)",
        lambda is_fsdp, uses_torch_fsdp2, ep: not is_fsdp or uses_torch_fsdp2 or ep == 1,
        _STRATEGY,
        "Megatron-FSDP of 0.15 asks for a group of experts that it does not have",
        "Use expert_model_parallel_size 1, the distributed optimizer, or Megatron-LM 0.16.",
        value="zero_name",
        until="0.15",
    ),
    Rule(
        "fsdp_gradients_in_bf16",
        "0.15 param_and_grad_buffer.py:2895 (run)",
        lambda is_fsdp, uses_torch_fsdp2, gradient_bytes: (
            not is_fsdp or uses_torch_fsdp2 or gradient_bytes > 2
        ),
        _STRATEGY,
        "Megatron-FSDP of 0.15 scales 16-bit gradients in another buffer than it reduces: losses "
        "are wrong, without a word",
        "Leave grad_reduce_in_bf16 out, use the distributed optimizer, or Megatron-LM 0.16.",
        value="zero_name",
        until="0.15",
    ),
    Rule(
        "fsdp_meta_device",
        "training.py:1258, param_and_grad_buffer.py:2221 (run)",
        lambda spec, is_fsdp, sharding: (
            not is_fsdp or sharding is not None or initializes_on_meta_device(spec)
        ),
        _STRATEGY,
        "Megatron-FSDP needs --init-model-with-meta-device, or every GPU first holds the whole "
        "model; learned positions and token types would then start with a deviation of 1",
        "Use parallel.zero_stage=1; for a GPT model, rotary positions (rope) do as well.",
        value="zero_name",
    ),
    Rule(
        "optimizer_zero",
        "args:1184-1186",
        allows_optimizer,
        "optimizer",
        "{core} does not divide its state (ZeRO-{zero:d})",
        "Use parallel.zero_stage=0, or adam.",
    ),
)

OPTIMIZER_RULES = (
    Rule(
        "optimizer_overlap",
        "args:1181 (0.17 :1487)",
        lambda options, version: (
            not options.get("overlap_grad_reduce")
            or overlaps_gradients(str(options.get("optimizer")), version)
        ),
        "overlap_grad_reduce",
        "Megatron-LM {version} reduces the gradients of {optimizer} after the backward pass",
        "Drop it, or use --optimizer adam.",
        value=lambda options: options["overlap_grad_reduce"],
        words={"optimizer": lambda options: options["optimizer"]},
        framework=MEGATRON_LM,
        until="0.17",
    ),
)
