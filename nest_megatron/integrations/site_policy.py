"""What a policy says of a launch: which plans may be launched, and who has signed them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nest_megatron.config.launch import Mode
from nest_megatron.config.policy import read_policy, require_may_free
from nest_megatron.files import expanded
from nest_megatron.parallel.policy import Policy, PolicyFile, require_allowed
from nest_megatron.planner.pins import PinnedPlan, read_pinned
from nest_megatron.planner.signed import read_signers, verify_pinned


def require_launch(mode: Mode, free: Collection[str] = (), release: str | None = None) -> None:
    """Refuse a launch that a policy forbids, before anything is planned.

    Args:
        free: names that the user frees.
        release: of Megatron-LM, where the job runs on it.

    Raises:
        PolicyError: naming the rule.
    """
    policy = read_policy()
    require_may_free(free, policy)
    if mode is Mode.AUTO:
        _refuse_unpinned("+nest", mode.value, policy)
    for file in policy:
        rules = file.launch
        if release is not None and rules.megatron_lm and release not in rules.megatron_lm:
            limit = f"it is {' or '.join(rules.megatron_lm)}"
            raise file.broken("launch.megatron_lm", "Megatron-LM", release, limit)


def require_may_replace(on_mismatch: str) -> None:
    """Refuse another plan in the place of a pinned one where only pinned plans are launched.

    Raises:
        PolicyError: naming the rule.
    """
    _refuse_unpinned("nest.on_mismatch", on_mismatch, read_policy())


def _refuse_unpinned(what: str, value: str, policy: Policy) -> None:
    for file in policy:
        if file.launch.pinned_only:
            limit = "only pinned plans are launched here"
            raise file.broken("launch.pinned_only", what, value, limit)


def read_launched(path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """A pinned file that is about to be launched.

    Args:
        num_gpus: as of ``read_pinned``.

    Raises:
        UserInputError: if it is not as it was pinned, or a policy does not let it be launched: a
            ``PolicyError``, or a ``SignatureError`` where a signature is asked for.
    """
    path = expanded(path, "nest.plan")
    pinned, policy = None, read_policy()
    for file in policy:
        _require_folder(path, file)
        if file.launch.signers:
            pinned = verify_pinned(
                path, read_signers(file.launch.signers), num_gpus=num_gpus
            ).pinned
    pinned = pinned or read_pinned(path, num_gpus)
    require_allowed(pinned.plan, policy)
    return pinned


def _require_folder(path: Path, file: PolicyFile) -> None:
    folders = [expanded(Path(each), "policy").resolve() for each in file.launch.plan_folders]
    if folders and not any(path.resolve().is_relative_to(folder) for folder in folders):
        limit = f"plans are launched from {' or '.join(map(str, folders))}"
        raise file.broken("launch.plan_folders", "nest.plan", str(path), limit)
