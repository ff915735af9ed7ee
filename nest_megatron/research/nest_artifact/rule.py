"""What is peculiar to the artifact's cost formula, each point under a switch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from nest_megatron.errors import UserInputError


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactRule:
    """How a plan is priced; as it stands, exactly as the artifact prices it.

    Args:
        seconds_added_to_milliseconds: links are priced in seconds and added to layers in
            milliseconds. Off: links are in milliseconds as well, 1,000 times heavier.
        recomputed_forward_costs_backward: a recomputed forward pass is charged the time of the
            backward pass. Off: that of the forward pass.
        sync_first_stage_only: the gradients of the first stage alone are summed over replicas.
            Off: those of the stage with the most weights.
        sync_counts_lower_levels_again: from the third network level up, what lower levels took is
            added once more. Off: each level counts once.
        pipeline_bandwidth_never_rises: between stages no level is faster than the one below it.
            Off: the bandwidths as given, which the sum over replicas always uses.
        baselines_last_stage_first: the stages of a baseline are costed in reversed order, so that
            the last one recomputes, stashes most and is the one whose weights are summed. Off: in
            the order of any other plan.
        baseline_cuts_count_embedding: the cuts of a baseline count the embedding as its first
            layer, so that the last stage has one layer more. Off: the embedding comes on top.
        links_from_printed_placement: where a solver's output holds a placement, links between
            stages are looked up there although its cuts may be others. Off: stages stand packed,
            the last one first, as they are listed.
    """

    seconds_added_to_milliseconds: bool = True
    recomputed_forward_costs_backward: bool = True
    sync_first_stage_only: bool = True
    sync_counts_lower_levels_again: bool = True
    pipeline_bandwidth_never_rises: bool = True
    baselines_last_stage_first: bool = True
    baseline_cuts_count_embedding: bool = True
    links_from_printed_placement: bool = True


AS_ARTIFACT = ArtifactRule()
SWITCHES = tuple(field.name for field in dataclasses.fields(ArtifactRule))


def rule_without(switches: Iterable[str]) -> ArtifactRule:
    """The artifact's rule with some of its peculiarities off; ``all`` turns every one off.

    Raises:
        UserInputError: for a name that is no switch.

    >>> rule_without(["sync_first_stage_only"]).sync_first_stage_only
    False
    """
    off: dict[str, bool] = {}
    for name in switches:
        if name == "all":
            off.update(dict.fromkeys(SWITCHES, False))
        elif name in SWITCHES:
            off[name] = False
        else:
            raise UserInputError(
                "--without",
                value=name,
                limit="the formula has no such switch",
                fix=f"Known: {', '.join((*SWITCHES, 'all'))}.",
            )
    return ArtifactRule(**off)
