"""Policies: the operators' files, read before anything is planned, and the space that they leave.

Three places are asked in turn, and each only restricts: ``/etc/nest-megatron/policy.yaml``, the
user's own, and the file that ``NEST_MEGATRON_POLICY`` names.
"""

from __future__ import annotations

import contextlib
import grp
import itertools
import os
import pwd
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from nest_megatron.cluster.records import Cluster
from nest_megatron.config.defaults import read_site_file, site_files
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.errors import UserInputError, require_known
from nest_megatron.files import require_unwritable
from nest_megatron.layout.policy import Policy, PolicyError, PolicyFile
from nest_megatron.layout.recompute import RecomputeGranularity, RecomputeModule
from nest_megatron.plain import Source, from_plain
from nest_megatron.planner.request import NumericOffer
from nest_megatron.solver.space import DEGREES, SearchSpace

#: Names another policy, beside the operators' and the user's own.
VARIABLE: Final = "NEST_MEGATRON_POLICY"
_NAME: Final = "policy.yaml"
#: Largest shares that rules can ask for; of memory, that of ``memory.margin``.
_SHARES: Final = {"least_memory_free": 0.9, "least_mfu": 1.0}
_TYPED: Final = Source(correct="Correct the policy.", add="Add it to the policy.")


def read_policy() -> Policy:
    """The files of rules that hold here, the operators' first.

    Raises:
        UserInputError: for a file that cannot be read or says something unknown: nothing is planned
            under a policy that is not understood.
    """
    return tuple(_read(path) for path in site_files(_NAME, VARIABLE))


def _read(path: Path) -> PolicyFile:
    require_unwritable(path, "policy", {os.geteuid()})
    fix = "Write plan:, launch: or audit: with rules below."
    fields, lines = read_site_file(path, "policy", fix)
    for name in fields:
        require_known(f"{path}: policy", str(name), ("plan", "launch", "audit"))
    stated = {name: section for name, section in fields.items() if section is not None}
    stated |= {"path": str(path), "owners": [path.stat().st_uid], "lines": lines}
    found = from_plain(PolicyFile, stated, f"{path}:", _TYPED)
    for name in found.plan.ranges:
        require_known(f"{path}: plan.ranges", name, DEGREES)
    for what, value, limit, fix in _mistakes(found, stated.get("launch", ())):
        raise UserInputError(f"{path}: {what}", value, limit, fix)
    return found


#: Rules of a launch of which an empty list would be no rule.
_LISTS: Final = ("signers", "plan_folders", "on_mismatch", "megatron_lm")
_PATHS: Final = ("signers", "plan_folders")


def _mistakes(
    found: PolicyFile, launch_fields: Collection[str]
) -> Iterator[tuple[str, object, str, str]]:
    """Rules that cannot be meant: what, value, limit and fix of each.

    Empty lists and words, paths that are another for each job or user, numbers out of range.
    """
    audit, rules = found.audit, found.launch
    if audit is not None and not Path(audit.file).is_absolute():
        yield "audit.file", audit.file, "jobs start in many folders", "Name it from / on."
    if audit is not None and not 0 < audit.mode <= 0o777:
        limit = "it is a file's rights, in octal with a 0 before it"
        yield "audit.mode", audit.mode, limit, "For example 0622."
    for name in _LISTS:
        if name in launch_fields and not getattr(rules, name):
            fix = "Leave it out, or name what is allowed."
            yield f"launch.{name}", "[]", "an empty list is no rule", fix
    from nest_megatron.minisign import is_public_line

    freed = rules.may_free or {}
    words = {name: getattr(rules, name) for name in (*_LISTS, "may_tune")}
    words["may_free"] = (*freed, *itertools.chain.from_iterable(freed.values()))
    for name, each in words.items():
        if not all(word.strip() for word in each):
            yield f"launch.{name}", "", "a word in it is empty", "Correct the policy."
    for name in _PATHS:
        for word in words[name]:
            if not (Path(word).is_absolute() or (name == "signers" and is_public_line(word))):
                limit = "jobs start in many folders, and users have homes of their own"
                yield f"launch.{name}", word, limit, "Name it from / on."
    for name, (least, most) in found.plan.ranges.items():
        if not 1 <= least <= most:
            limit = "a range is [least, most], of at least 1"
            yield name, [least, most], limit, "Correct the policy."
    for name, largest in _SHARES.items():
        if not 0 <= (share := getattr(found.plan, name)) <= largest:
            limit = f"it is a share, from 0 to {largest:g}"
            yield f"plan.{name}", share, limit, "Write 0.3 for 30 %."


def space_within(space: SearchSpace, policy: Policy, cluster: Cluster) -> dict[str, Any]:
    """What a policy changes of a search space, by its fields.

    Raises:
        PolicyError: for a fixed value that a rule does not allow, or where nothing is left.
    """
    limits, least = {**space.limits}, {**space.least}
    found: dict[str, Any] = {"limits": limits, "least": least, "zero_stages": space.zero_stages}
    inside_node = "plan.tensor_parallel_inside_node", "tensor_model_parallel_size"
    for file in policy:
        rules = file.plan
        ranges = [(f"plan.ranges.{name}", name, both) for name, both in rules.ranges.items()]
        if rules.tensor_parallel_inside_node:
            ranges.append((*inside_node, (1, cluster.gpus_per_node)))
        for rule, name, (low, high) in ranges:
            words, fixed = f"it is {low} to {high}", space.fixed.get(name)
            if fixed is None:
                least[name] = max(low, least.get(name, 1))
                limits[name] = min(high, limits.get(name, high))
                if least[name] > limits[name]:
                    words = f"no size is left: with other limits it is at least {least[name]}"
                    raise file.broken(rule, f"search.max_{name}", limits[name], words)
            elif not low <= fixed <= high:
                raise file.broken(rule, name, fixed, words)
        recompute, rule = rules.forbidden_recompute, "plan.forbidden_recompute"
        if space.recompute is not None and space.recompute.granularity in recompute:
            value = space.recompute.granularity.value
            raise file.broken(rule, "recompute_granularity", value, "it is forbidden")
        if RecomputeGranularity.SELECTIVE in recompute:
            found["without_modules"] = frozenset(RecomputeModule)
        if RecomputeGranularity.FULL in recompute:
            found["full_recompute"] = False
        kinds = {stage: space.sharding or stage.sharding for stage in found["zero_stages"]}
        left = tuple(each for each in kinds if kinds[each] not in rules.forbidden_sharding)
        if not left:
            value = ", ".join(sorted({kind.value for kind in kinds.values()}))
            raise file.broken("plan.forbidden_sharding", "sharding", value, "it is forbidden")
        found["zero_stages"] = left
    return found


def settings_within(settings: CostSettings, policy: Policy) -> CostSettings:
    """Settings whose plans leave as much memory free as a policy demands.

    Raises:
        PolicyError: for a number format that a rule forbids.
    """
    for file in policy:
        if settings.precision in file.plan.forbidden_precision:
            value, rule = settings.precision.value, "plan.forbidden_precision"
            raise file.broken(rule, "precision", value, "it is forbidden")
        margin = max(settings.memory_margin, file.plan.least_memory_free)
        settings = replace(settings, memory_margin=margin)
    return settings


def offers_within(offers: Iterable[NumericOffer], policy: Policy) -> tuple[NumericOffer, ...]:
    """Choices that change numbers, without those that a policy forbids."""
    left = []
    for offer in offers:
        with contextlib.suppress(PolicyError):
            settings = settings_within(offer.settings, policy)
            left.append(replace(offer, settings=settings))
    return tuple(left)


def may_tune(file: PolicyFile) -> bool:
    """Whether a file lets this user launch short runs of ``tune`` with plans of their own."""
    return not {*file.launch.may_tune}.isdisjoint(identities())


def identities() -> Iterator[str]:
    """This user, by the account (not by what the environment says), their groups, and everybody."""
    yield "*"
    try:
        user = pwd.getpwuid(os.getuid())
    except KeyError:  # a container without a user database
        return
    yield user.pw_name
    for number in os.getgrouplist(user.pw_name, user.pw_gid):
        try:
            yield f"@{grp.getgrgid(number).gr_name}"
        except KeyError:
            continue


def policy_notes(policy: Policy) -> tuple[str, ...]:
    """What a plan says of the policy that it was made under."""
    if not policy:
        return ()
    files = ", ".join(file.path for file in policy)
    return (f"Searched within the policy of {files}: what it forbids is not part of the space.",)
