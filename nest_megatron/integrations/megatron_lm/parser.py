"""Read a training command without Megatron, whose parser is rebuilt from recorded data.

``arguments_data/arguments.json`` lists every option of ``megatron/training/arguments.py`` and the
releases that have it (``tools/release.py`` adds one), so a command can be read on a laptop, in
milliseconds, with no torch. What the user's own script adds is kept
untouched.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

from nest_megatron.config.job import LaunchedRanks, Option, ReadCommand
from nest_megatron.cost_model.memory_flags import may_change_model
from nest_megatron.documents import packaged
from nest_megatron.errors import UnplannableModelError, UserInputError, nearest
from nest_megatron.layout.rulebook.facts import DEFAULT_VERSION, RELEASES, is_within, release_number
from nest_megatron.model.layer_pattern import read_frequency
from nest_megatron.plain import frozen

if TYPE_CHECKING:
    from nest_megatron.integrations.launchers import LaunchPlace

#: A command of the shell, as one text or as its words.
CommandText = str | Sequence[str]
#: Of which forks have more values than Megatron-LM; nothing is priced by it.
_OF_FORKS = "tokenizer_type"
_NEST_TOKEN = re.compile(r"^\+?\+?nest[.=]")


@frozen
class Argument:
    """One option of Megatron's parser, as recorded."""

    flags: tuple[str, ...]
    dest: str
    action: str = "store"
    type: str = "str"
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    default: Any = None


def read_command(
    command: CommandText,
    version: str = DEFAULT_VERSION,
    place: LaunchPlace | None = None,
    replaced: str = "",
) -> ReadCommand:
    """Take a training command apart.

    Args:
        command: a shell command or its tokens: ``torchrun``, ``python``, ``srun``, environment
            assignments, or bare flags.
        place: where it is launched.
        replaced: flags whose values in the command do not count.

    Raises:
        UserInputError: for an unknown release, an unexpanded shell variable, or a value that
            Megatron's parser refuses.
    """
    return _read(split_command(command, place), version, shlex.split(replaced))


def read_argv(
    script: str, argv: Sequence[str], version: str, *, world_size: int | None = None
) -> ReadCommand:
    """As ``read_command``, for the arguments of a script that runs already."""
    ranks = LaunchedRanks(num_ranks=world_size)
    return _read(SplitCommand(script=script, argv=tuple(argv), ranks=ranks), version)


def _read(split: SplitCommand, version: str, replaced: Sequence[str] = ()) -> ReadCommand:
    argv = tuple(token for token in split.argv if not _NEST_TOKEN.match(token))
    if "--deepspeed" in argv:
        raise UnplannableModelError(
            "--deepspeed",
            "given",
            "Megatron-DeepSpeed has stages and shards of its own, which are not planned",
            "Launch this job without nest.",
        )
    options = options_of(argv, version)
    others = {option.dest for option in options_of(replaced, version)} - {None}
    counting = (option.tokens for option in options if option.dest not in others)
    given, unknown = parse_words([*itertools.chain.from_iterable(counting)], version)
    loose = [token for token in (split.script, *unknown) if token.startswith("$")]
    if loose:
        raise UserInputError(
            "command",
            loose[0],
            "the shell has not expanded it, so its flags cannot be read",
            "Paste the expanded command (bash -x prints it).",
        )
    values = defaults_of(version)
    if sees_images(split.script):  # options that it adds and a plan reads (add_vlm_extra_args)
        parser = _Parser(allow_abbrev=False, add_help=False)
        for flag in ("--freeze-LM", "--freeze-ViT", "--disable-vision-class-token"):
            parser.add_argument(flag, action="store_true")
        parser.add_argument("--dataloader-seq-length", type=int)
        own, rest = parser.parse_known_args(unknown)
        values, unknown = {**values, **vars(own)}, tuple(rest)
    for flag, value in itertools.pairwise(unknown):
        if flag.endswith("-tokenizer-type"):  # of a fork, for a tokenizer of its own
            values = {**values, _OF_FORKS: value}
    return ReadCommand(
        version=version,
        environment=dict(split.environment),
        launcher=split.launcher,
        script=split.script,
        options=options,
        values={**values, **given},
        explicit=frozenset(given),
        unknown=unknown,
        notes=(*split.ranks.notes, *_notes(options, unknown, version)),
        ranks=split.ranks,
    )


def name_words(script: str) -> list[str]:
    """What a script's name says; that of ``mimo/train.py`` or ``tasks/main.py`` is its folder's."""
    path = PurePath(script)
    return (path.parent.name if path.stem in ("train", "main") else path.stem).split("_")


def sees_images(script: str) -> bool:
    """Whether it is ``pretrain_vlm.py``."""
    return "vlm" in name_words(script)


def parse_words(words: Sequence[str], version: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What words set, by destination, and those that Megatron does not know."""
    namespace, rest = build_parser(version).parse_known_args(list(words))
    return vars(namespace), tuple(rest)


@cache
def load_arguments(version: str) -> tuple[Argument, ...]:
    """Every option of one Megatron release; one that is not known is refused."""
    if version not in RELEASES:
        raise UserInputError(
            "Megatron-LM version",
            version,
            "its options are not recorded",
            nearest(version, RELEASES),
        )
    return tuple(
        Argument(**{**row, **{name: tuple(row.get(name, ())) for name in ("flags", "choices")}})
        for row in rows_of(version)
    )


def defaults_of(version: str) -> dict[str, Any]:
    """The defaults of one Megatron release, by destination."""
    return {argument.dest: argument.default for argument in load_arguments(version)}


def rows_of(version: str) -> Iterator[dict[str, Any]]:
    """What ``arguments.json`` says of each option of a release."""
    for row in _rows():
        fields = dict(row)
        if is_within(version, fields.pop("since", ""), fields.pop("until", "")):
            yield fields


@cache
def _rows() -> tuple[Mapping[str, Any], ...]:
    return tuple(packaged(__package__, "arguments_data/arguments.json")["arguments"])


def newest_flags(argv: Iterable[str], given: Iterable[str] = ()) -> str:
    """The first release of Megatron-LM that has all flags of a command, in words.

    Args:
        given: arguments whose flags are there already.

    >>> newest_flags(["--bf16", "--hybrid-layer-pattern", "M*|M*"])
    'No release of Megatron-LM before 0.17 has --hybrid-layer-pattern.'
    >>> newest_flags(["--bf16"])
    ''
    """
    flags, known = ({word.partition("=")[0] for word in words} for words in (argv, given))
    first: dict[str, str] = {}
    for row in _rows():  # in the order of the releases where they begin
        for flag in (flags - known).intersection(row["flags"]):
            first.setdefault(flag, row.get("since", RELEASES[0]))
    newest = max(first.values(), key=release_number, default=RELEASES[0])
    if newest == RELEASES[0]:
        return ""
    new = sorted(flag for flag, release in first.items() if release == newest)
    return f"No release of Megatron-LM before {newest} has {', '.join(new)}."


def options_of(argv: Sequence[str], version: str) -> tuple[Option, ...]:
    """An argument vector as options; a word of an unknown flag has no destination."""
    table = {flag: a for a in load_arguments(version) for flag in a.flags}
    options: list[Option] = []
    at = 0
    while at < len(argv):
        flag, equals, _ = argv[at].partition("=")
        argument = table.get(flag)
        count = 1 if equals or not argument else 1 + _num_values(argument, argv[at + 1 :])
        options.append(Option(argument.dest if argument else None, tuple(argv[at : at + count])))
        at += count
    return tuple(options)


def _num_values(argument: Argument, rest: Sequence[str]) -> int:
    if argument.action != "store":
        return 0
    nargs = argument.nargs
    if nargs is None:
        return int(not (rest and rest[0].startswith("--")))
    if isinstance(nargs, int):
        return nargs
    until = next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))
    return min(until, 1) if nargs == "?" else until


def words_for(values: Mapping[str, Any], version: str) -> dict[str, tuple[str, ...]]:
    """Flags that give arguments these values; ``None`` and what a release lacks have none."""
    table = {argument.dest: argument for argument in reversed(load_arguments(version))}
    found = {}
    for dest, value in values.items():
        argument = table.get(dest)
        if argument is None or value is None or value is (argument.action == "store_false"):
            continue
        words = [] if isinstance(value, bool) else value if isinstance(value, list) else [value]
        found[dest] = (argument.flags[0], *map(str, words))
    return found


def argv_for(values: Mapping[str, Any], version: str) -> list[str]:
    """The words of ``words_for``, one after another."""
    return [*itertools.chain.from_iterable(words_for(values, version).values())]


def namespace_values(
    values: Mapping[str, Any], names: Iterable[str], version: str
) -> dict[str, Any]:
    """Arguments as Megatron's parser has them; of those without a value the defaults."""
    found = {}
    for argument in load_arguments(version):
        if (name := argument.dest) in names:
            value = values.get(name)
            if value is None:
                value = argument.default
            elif argument.nargs is not None and not isinstance(value, list):
                value = [value]
            found[name] = value
    return found


def known_flags(version: str) -> frozenset[str]:
    """Every flag of one Megatron release."""
    return frozenset(flag for argument in load_arguments(version) for flag in argument.flags)


@cache
def build_parser(version: str) -> argparse.ArgumentParser:
    """A parser with Megatron's options and no defaults (what was not given stays absent)."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    for argument in load_arguments(version):
        flags, options = argument.flags, dict[str, Any](action=argument.action)
        if argument.action == "store":
            options["nargs"] = argument.nargs
            if argument.dest != _OF_FORKS:
                options["choices"] = argument.choices or None
            options["type"] = _CONVERTERS[argument.type]
        elif argument.action == "boolean_optional":
            flags, options = flags[:1], {"action": argparse.BooleanOptionalAction}
        parser.add_argument(*flags, dest=argument.dest, default=argparse.SUPPRESS, **options)
    return parser


class _Parser(argparse.ArgumentParser):
    """Raises our own error instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise UserInputError(
            "Megatron-LM command",
            message,
            "Megatron's own parser refuses it",
            "Correct that flag, or replace it (--set '--flag=value').",
        )


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "name": str,
    "int": int,
    "float": float,
    "bool": bool,
    "pattern": read_frequency,
    "tuple": lambda text: tuple(int(part) for part in text.strip("()").split(",")),
}


def _notes(options: Iterable[Option], unknown: tuple[str, ...], version: str) -> Iterable[str]:
    flags = known_flags(version)
    behind = ""
    choices = next(a.choices for a in load_arguments(version) if a.dest == _OF_FORKS)
    for option in options:
        name = option.flag
        if option.dest or option.tokens[0] not in unknown:
            behind = name
            value = option.tokens[-1].rpartition("=")[2]
            if option.dest == _OF_FORKS and value not in choices:
                yield f"Megatron {version} has no {name} {value}; it is passed on as it is."
            continue
        if not name.startswith("-"):  # a value of an unknown flag, or of one that has none
            if behind:
                yield f"Megatron {version} ends at {name}, a word that {behind} does not take."
            continue
        behind = ""
        others = [v for v in RELEASES if v != version and name in known_flags(v)]
        close = difflib.get_close_matches(name.replace("_", "-"), flags, n=1, cutoff=0.92)
        if others:
            yield f"{name} belongs to Megatron {others[-1]}, not to {version}."
        elif close:
            yield f"Megatron {version} has no flag {name}. Did you mean {close[0]}?"
        else:
            more = ", and what it changes of the model is not priced"
            more = more if may_change_model(name) else ""
            yield f"Megatron {version} has no flag {name}; it is passed on as it is{more}."


@frozen
class SplitCommand:
    """A command in its parts; see ``ReadCommand`` for the fields."""

    environment: tuple[tuple[str, str], ...] = ()
    launcher: tuple[str, ...] = ()
    script: str
    argv: tuple[str, ...]
    ranks: LaunchedRanks


def split_command(command: CommandText, place: LaunchPlace | None = None) -> SplitCommand:
    """Split a training command into environment, launcher, script and script arguments.

    >>> parts = split_command("A=1 torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --bf16")
    >>> parts.script, parts.argv, parts.ranks.num_ranks
    ('pretrain_gpt.py', ('--bf16',), 32)
    """
    from nest_megatron.integrations.launchers import assignment, launched_ranks, typed_variables

    words = tokens(command)
    for at, (shell, flags, text) in enumerate(zip(words, words[1:], words[2:], strict=False)):
        if shell.rpartition("/")[2] in ("bash", "sh") and re.fullmatch(r"-[a-z]*c", flags):
            words = [*words[:at], *tokens(text)]  # srun ... bash -c "python x.py ..."
            break
    leading = list(
        itertools.takewhile(lambda w: assignment(w) or w in ("env", "export", "exec"), words)
    )
    launcher, script, argv = _at_script(words[len(leading) :])
    before = (*leading, *launcher)
    return SplitCommand(
        environment=tuple(typed_variables(before).items()),
        launcher=tuple(launcher),
        script=script,
        argv=tuple(argv),
        ranks=launched_ranks(before, place),
    )


def tokens(command: CommandText) -> list[str]:
    """The words of a command of the shell; ``UserInputError`` for an open quote."""
    if not isinstance(command, str):
        return list(command)
    try:
        return shlex.split(re.sub(r"\\\r?\n", " ", command), comments=True)
    except ValueError as error:
        raise UserInputError("command", command, str(error), "Close the quotes.") from error


def _at_script(words: list[str]) -> tuple[list[str], str, list[str]]:
    """What stands before a script, the script (``-m module`` has two words), and what follows."""
    from nest_megatron.integrations.launchers import is_launcher

    for at, word in enumerate(words):
        if word.endswith(".py") and not word.startswith("-"):
            return words[:at], word, words[at + 1 :]
        module = words[at + 1] if word in ("-m", "--module") and at + 1 < len(words) else ""
        if module[:1].isalpha() and not is_launcher(module):  # numactl -m 0 is no module
            return words[:at], module, words[at + 2 :]
    if words and words[0].startswith("-"):
        return [], "", words
    raise UserInputError(
        "command",
        " ".join(words[:4]),
        "it names no training script (a file ending in .py) and does not begin with a flag",
        "Give the whole command, or the script's flags alone.",
    )
