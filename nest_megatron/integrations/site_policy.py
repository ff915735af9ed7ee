"""What a policy says of a launch: which plans may be launched, and who has signed them."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path

from nest_megatron.config.launch import Mode
from nest_megatron.config.policy import may_tune, read_policy, require_may_free
from nest_megatron.files import expanded, read_opened
from nest_megatron.integrations.plan_output import user_name
from nest_megatron.layout.policy import (
    OnMismatch,
    Policy,
    PolicyError,
    PolicyFile,
    require_allowed,
)
from nest_megatron.planner.pins import TUNE, PinnedPlan, parse_pinned
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
    for file in policy:
        rules = file.launch
        if mode is Mode.AUTO and rules.pinned_only:
            raise file.broken(
                "launch.pinned_only", "+nest", mode.value, "only pinned plans are launched here"
            )
        if release is not None and rules.megatron_lm and release not in rules.megatron_lm:
            raise file.broken(
                "launch.megatron_lm",
                "Megatron-LM",
                release,
                f"it is {' or '.join(rules.megatron_lm)}",
            )


def allowed_on_mismatch(asked: str | None) -> tuple[OnMismatch, ...]:
    """Values of ``nest.on_mismatch`` that a policy allows, the one that holds for the job first.

    Args:
        asked: the job's own value, if it has one.

    Raises:
        PolicyError: naming the rule that does not allow it, or leaves none.
    """
    left = tuple(OnMismatch)
    for file in read_policy():
        rules = file.launch
        for rule, allowed in (
            ("launch.pinned_only", (OnMismatch.REFUSE,) if rules.pinned_only else ()),
            ("launch.on_mismatch", rules.on_mismatch),
        ):
            words, before = " or ".join(allowed), left
            left = tuple(each for each in allowed or left if each in left)
            if not left:
                raise file.broken(
                    rule,
                    "nest.on_mismatch",
                    words,
                    f"other rules allow {' or '.join(before)} alone",
                )
            if asked is not None and asked not in left:
                raise file.broken(rule, "nest.on_mismatch", asked, f"it is {words}")
    return tuple(sorted(left, key=lambda each: each != asked))


def require_tune(folder: Path) -> None:
    """Refuse to tune where the plans of its runs, which nobody reviews, are not launched.

    Args:
        folder: of the runs.

    Raises:
        PolicyError: naming the rule, and what the operators may write to allow it.
    """
    for file in read_policy():
        if may_tune(file):
            continue
        rules = file.launch
        rule = "pinned_only" if rules.pinned_only else "signers" if rules.signers else None
        if rule is None and not _is_outside(folder.resolve(), file):
            continue
        limit = "its runs launch plans that nobody has reviewed"
        fix = (
            "--dry-run shows the runs and starts none; the operators of the cluster may allow them "
            f"with launch.may_tune: [{user_name()}] in {file.path}."
        )
        where = file.where(f"launch.{rule or 'plan_folders'}")
        raise PolicyError("tune", value=None, limit=f"{limit} ({where})", fix=fix)


def read_launched(path: Path, num_gpus: int | None = None) -> PinnedPlan:
    """A pinned file that is about to be launched.

    Args:
        num_gpus: as of ``read_pinned``.

    Raises:
        UserInputError: if it is not as it was pinned, or a policy does not let it be launched: a
            ``PolicyError``, or a ``SignatureError`` where a signature is asked for.
    """
    path = expanded(path, "nest.plan")
    content, place = read_opened(path, "nest.plan")  # once: what is judged is what is launched
    found, policy = parse_pinned(content, path, num_gpus), read_policy()
    for file in _asking_for_review(policy, found):
        if _is_outside(place, file):
            raise file.broken(
                "launch.plan_folders",
                "nest.plan",
                str(path),
                f"plans are launched from {' or '.join(file.launch.plan_folders)}",
            )
        if file.launch.signers:
            signers = read_signers(file.launch.signers, file.owners)
            signed = verify_pinned(path, signers, num_gpus=num_gpus, content=content)
            found = dataclasses.replace(signed.pinned, signer=signed.signer.key_name)
    require_allowed(found.plan, policy)
    return found


def _asking_for_review(policy: Policy, pinned: PinnedPlan) -> Policy:
    """The files whose signers and folders a plan needs: of a run of ``tune`` not all."""
    is_trial = pinned.pin.by == TUNE
    return tuple(file for file in policy if not (is_trial and may_tune(file)))


def _is_outside(place: Path, file: PolicyFile) -> bool:
    """Whether a place, links followed, is in none of the folders that plans are launched from."""
    folders = [Path(each).resolve() for each in file.launch.plan_folders]
    return bool(folders) and not any(place.is_relative_to(each) for each in folders)
