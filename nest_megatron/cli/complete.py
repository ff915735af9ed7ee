"""Shell completion of settings: keys, catalogue names and the values of a key."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    ZshComplete,
    add_completion_class,
)

from nest_megatron.catalogue_files import catalogue_names
from nest_megatron.config.schema import section_keys

Complete = Callable[[click.Context, click.Parameter, str], list[str]]

_BOOLEANS = ("true", "false")
_POWERS = tuple(str(2**n) for n in range(7))
_MODEL_KEYS = tuple(
    f"model.{name}"
    for name in ("num_layers", "hidden_size", "seq_length", "vocab_size", "num_experts")
)
_CLUSTER_KEYS = ("cluster.num_gpus", "cluster.oversubscription", "cluster.accelerator")
#: Short texts of the records below, repeated so that completing loads none of them; a test
#: compares them with the records.
VALUES = {
    "train.precision": ("bf16", "fp16", "fp32", "fp8", "nvfp4"),
    "parallel.rank_order": ("tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"),
    "parallel.zero_stage": ("0", "1", "2", "3"),
    "parallel.sequence_parallel": _BOOLEANS,
    "parallel.recompute_granularity": ("none", "selective", "full"),
    "parallel.recompute_method": ("uniform", "block"),
    "profile.mode": ("auto", "measure", "require", "analytic"),
    "search.backend": ("kernel", "reference"),
    "search.use_all_gpus": _BOOLEANS,
    "cluster.num_gpus": tuple(str(8 * 2**n) for n in range(9)),
    "cluster.oversubscription": ("1", "2", "4"),
}


def candidates(incomplete: str) -> list[str]:
    """Settings that begin with what was typed.

    >>> candidates("model=llama3_7")
    ['model=llama3_70b']
    """
    key, equals, value = incomplete.partition("=")
    if equals:
        before, comma, last = value.rpartition(",")
        return [f"{key}={before}{comma}{v}" for v in _values(key) if v.startswith(last)]
    keys = ("model", "cluster", *_CLUSTER_KEYS, *section_keys(), *_MODEL_KEYS)
    return [f"{name}=" for name in keys if name.startswith(incomplete)]


def _values(key: str) -> Iterable[str]:
    if key in ("model", "cluster"):
        return catalogue_names(key)
    if key == "cluster.accelerator":
        return catalogue_names("accelerator")
    if key == "profile.name":
        return profile_names()
    is_size = key.endswith("_size") and key.startswith(("parallel.", "search.max_", "train.micro"))
    return VALUES.get(key, _POWERS if is_size else ())


def complete_override(
    context: click.Context, parameter: click.Parameter, incomplete: str
) -> list[str]:
    """Candidates for a setting; keys that are already set are not offered again."""
    done = {text.partition("=")[0] for text in context.params.get("overrides") or ()}
    return [each for each in candidates(incomplete) if each.partition("=")[0] not in done]


def completing_catalogue(group: str) -> Complete:
    """Candidates among the names of a group of the catalogue."""
    return completing(lambda: catalogue_names(group))


def completing(names: Callable[[], Iterable[str]]) -> Complete:
    """Candidates of which one is to be typed, the last of several with commas between them."""

    def complete(_: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete


def profile_names() -> list[str]:
    """Names of the profiles that are stored here, and shipped."""
    from nest_megatron.profile.store import all_entries

    return [entry.name for entry in all_entries()]


def freed_names() -> tuple[str, ...]:
    """What ``--free`` takes: the flags that a plan sets."""
    from nest_megatron.integrations.megatron_lm.layout_arguments import PARALLEL_ARGUMENTS

    return ("all", *PARALLEL_ARGUMENTS)


class _Bash(BashComplete):
    """Bash cuts words at ``=``, and completes only what follows."""

    source_template = """\
%(complete_func)s() {
    local IFS=$'\\n' item
    COMPREPLY=($(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD \
%(complete_var)s=bash_complete "$1"))
    for item in "${COMPREPLY[@]}"; do
        [[ $item == *= ]] && compopt -o nospace
    done
}
complete -o default -F %(complete_func)s %(prog_name)s
"""

    def get_completion_args(self) -> tuple[list[str], str]:
        """The finished words and the one at the cursor, put together again around ``=``."""
        words = os.environ["COMP_WORDS"].split("\n")
        position = int(os.environ["COMP_CWORD"])
        whole: list[str] = []
        for word in words[: position + 1]:
            joins = whole and (word == "=" or (whole[-1].endswith("=") and "=" in whole[-1][1:]))
            if joins:
                whole[-1] += word
            else:
                whole.append(word)
        return whole[1:-1], whole[-1] if position < len(words) else ""

    def format_completion(self, item: CompletionItem) -> str:
        """The candidate from the last ``=`` on, a closing one apart."""
        value: str = item.value
        _, equals, tail = value.rpartition("=")
        return tail if equals and tail else value


class _Zsh(ZshComplete):
    """Zsh adds a space after a candidate unless told not to."""

    source_template = """\
#compdef %(prog_name)s

%(complete_func)s() {
    local -a found keys values
    (( ! $+commands[%(prog_name)s] )) && return 1
    found=("${(@f)$(env COMP_WORDS="${words[*]}" COMP_CWORD=$((CURRENT-1)) \
%(complete_var)s=zsh_complete %(prog_name)s)}")
    for type value help in $found; do
        if [[ $value == *= ]]; then keys+=($value); else values+=($value); fi
    done
    (( $#keys )) && compadd -S '' -- $keys
    (( $#values )) && compadd -- $values
    [[ $type == file ]] && _path_files -f
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    %(complete_func)s "$@"
else
    compdef %(complete_func)s %(prog_name)s
fi
"""


add_completion_class(_Bash)
add_completion_class(_Zsh)
