"""How many ranks a launch has: by its launcher's words, by Slurm, by the environment.

A launch is the words before the training script. Each program among them that starts others is a
row of ``LAUNCHERS``; the innermost one says how many ranks there are, and those around it on how
many nodes, where it does not say so itself.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

from nest_megatron.cluster.topology import hosts_of, tasks_per_node
from nest_megatron.config.job import LaunchedRanks
from nest_megatron.documents import packaged
from nest_megatron.errors import UserInputError
from nest_megatron.files import read_text
from nest_megatron.plain import frozen

_COUNT = r"0*[1-9][0-9]{0,8}"
#: A count of processes that is the number of GPUs of a node (``torchrun --nproc-per-node=gpu``).
_EACH_GPU = ("gpu", "auto")


@frozen
class Launcher:
    """A program that starts others.

    Args:
        names: of the program, or of the module behind ``python -m``.
        options: its options, by what each says; a long one may be shortened, and ``_`` is ``-``.
        variables: those that stand for options that are not typed.
        nodes: what a number of nodes may be, a range among it.
    """

    names: str
    options: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    nodes: str = _COUNT

    def quantity(self, flag: str) -> str | None:
        """What an option says, or ``None``."""
        name = flag.replace("_", "-") if flag.startswith("--") else flag
        if name in self.options or len(name) < len("--n__"):
            return self.options.get(name)
        meant = {said for known, said in self.options.items() if known.startswith(name)}
        return meant.pop() if len(meant) == 1 else None


def _launcher(row: Mapping[str, Any]) -> Launcher:
    """A launcher by its row, in which a quantity has all its spellings."""
    options, variables = (
        {name: quantity for quantity, names in row.get(kind, {}).items() for name in names.split()}
        for kind in ("options", "variables")
    )
    nodes = row.get("nodes", "N").replace("N", _COUNT)
    return Launcher(names=row["names"], options=options, variables=variables, nodes=nodes)


_ROWS = packaged(__package__, "launchers.toml")
_TORCHRUN, _SLURM, _MPI, _DEEPSPEED, _ACCELERATE, _WRAPPER, _CONTAINER = map(
    _launcher, _ROWS.values()
)
#: Slurm's options of a job or step with the variables that say them inside of one.
SLURM_VARIABLES = {
    _ROWS["slurm"]["options"][quantity].split()[0]: names.split()
    for quantity, names in _ROWS["slurm"]["variables"].items()
}
#: An ``--export`` of ``srun`` that does not name all variables.
_EXPORTS_SOME = re.compile(r"--export[= ](?!\S*\bALL\b)\S")
#: Names of torchrun, and of what has its options.
TORCHRUN = _TORCHRUN.names.split()
LAUNCHERS = (_TORCHRUN, _SLURM, _MPI, _DEEPSPEED, _ACCELERATE)
#: Names of launchers that start each rank themselves, with one environment for all.
START_EACH_RANK = frozenset((*_SLURM.names.split(), *_MPI.names.split()))
_BY_NAME = {name: row for row in (*LAUNCHERS, _WRAPPER, _CONTAINER) for name in row.names.split()}
#: What they start, by the beginning of its name.
_STARTED = (*TORCHRUN, *_ACCELERATE.names.split(), *_DEEPSPEED.names.split(), "python")
#: Variables that hold the number of all ranks.
_WORLD = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE")

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL | re.ASCII)
#: A variable, a command or a sum of the shell.
_FILLED_IN = re.compile(r"[$`]")
_TIMES = {"k": 1_000, "m": 1_000_000}  # Slurm's suffixes of numbers of nodes


@frozen
class LaunchPlace:
    """Where a launch runs.

    Args:
        environment: its variables.
        header: options of the ``#SBATCH`` lines of its script (``header_options``).
        gpus_per_node: of the cluster.
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    header: tuple[str, ...] = ()
    gpus_per_node: int | None = None


#: Names of variables that should be in no log.
_SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$", re.IGNORECASE)


def is_secret(variable: str) -> bool:
    """Whether a variable's name says that its value is no one else's business.

    >>> is_secret("WANDB_API_KEY"), is_secret("NCCL_DEBUG")
    (True, False)
    """
    return _SECRET.search(variable) is not None


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of a launch that a plan's file may hold."""
    return {name: text for name, text in environment.items() if not is_secret(name)}


def with_variables(
    words: Sequence[str], variables: Mapping[str, str], chosen: Mapping[str, str]
) -> tuple[list[str], dict[str, str]]:
    """A command whose program has variables: those that stand in it, and those before it.

    Args:
        variables: those of the script, which its launcher had too.
        chosen: those of a plan. Open MPI passes none on to other hosts, and ``srun`` only those
            that its ``--export`` names.

    >>> with_variables(["docker", "run", "image", "torchrun", "t.py"], {}, {"A": "1"})
    (['docker', 'run', 'image', 'env', 'A=1', 'torchrun', 't.py'], {})
    >>> with_variables(["mpirun", "-np", "8", "python", "t.py"], {"B": "2"}, {"A": "1"})
    (['mpirun', '-np', '8', 'env', 'A=1', 'python', 't.py'], {'B': '2'})
    >>> with_variables(["torchrun", "t.py"], {}, {"A": "1"})
    (['torchrun', 't.py'], {'A': '1'})
    """
    names = [Path(word).name for word in words]
    started = [
        at
        for at, name in enumerate(names)
        if name.startswith(_STARTED) and words[max(at - 1, 0)] != "-m"
    ]
    start = max(started, default=0)
    around = [_BY_NAME.get(name) for name in names[:start]]
    behind: dict[str, str] = {}
    if _CONTAINER in around:
        behind = {**variables, **chosen}
    elif _MPI in around or _EXPORTS_SOME.search(" ".join(words[:start])):
        behind = {**chosen}
    before = {k: v for k, v in {**variables, **chosen}.items() if k not in behind}
    if not behind:
        return [*words], before
    pairs = (f"{name}={value}" for name, value in behind.items())
    return [*words[:start], "env", *pairs, *words[start:]], before


def with_num_nodes(words: Sequence[str], num_nodes: int) -> list[str]:
    """A ``torchrun`` of another number of nodes; other launchers take it from elsewhere too.

    >>> with_num_nodes(["torchrun", "--nnodes=4", "--nproc-per-node", "8"], 2)
    ['torchrun', '--nnodes=2', '--nproc-per-node', '8']
    """
    found = [*words]
    for at, word in enumerate(words if words and Path(words[0]).name == "torchrun" else ()):
        if word == "--nnodes":
            found[at + 1] = str(num_nodes)
        elif word.startswith("--nnodes="):
            found[at] = f"--nnodes={num_nodes}"
    return found


def launched_ranks(words: Sequence[str], place: LaunchPlace | None = None) -> LaunchedRanks:
    """How many ranks a launch has.

    Args:
        words: all before the training script, ``NAME=value`` among them.

    Raises:
        UserInputError: for an option whose value is no number.

    >>> found = launched_ranks("srun -N 2 torchrun --nnodes=1:2 --nproc_per_node 8".split())
    >>> found.num_ranks, found.num_nodes, found.notes
    (16, 2, ('--nnodes 1:2 is a range; its largest, 2 nodes, is planned.',))
    """
    return _Launch(words, place or LaunchPlace()).read()


def header_options(script: str) -> tuple[str, ...]:
    r"""The options on the ``#SBATCH`` lines of a script, which end where its commands begin.

    >>> header_options("#!/bin/bash\n#SBATCH -N 4  # nodes\necho\n#SBATCH -N 8")
    ('-N', '4')
    """
    lines = takewhile(lambda line: not line.strip() or line.startswith("#"), script.splitlines())
    return tuple(
        word
        for line in lines
        if line.startswith("#SBATCH")
        for word in line.removeprefix("#SBATCH").partition("#")[0].split()
    )


def slurm_options(words: Sequence[str]) -> dict[str, str]:
    """The sizes among options of Slurm, by the long names of those of ``SLURM_VARIABLES``.

    >>> slurm_options(["-N4", "--ntasks-per-node=8", "--gres=gpu:h100:8"])
    {'--nodes': '4', '--ntasks-per-node': '8', '--gpus-per-node': '8'}
    """
    said = _option_values(_SLURM, words)
    return {
        name: said[_SLURM.options[name]].text
        for name in SLURM_VARIABLES
        if _SLURM.options[name] in said
    }


def is_launcher(word: str) -> bool:
    """Whether a word names a program that starts ranks, or the nodes of ranks."""
    return _BY_NAME.get(word.rpartition("/")[2]) in LAUNCHERS


def assignment(word: str) -> tuple[str, str] | None:
    """The name and the value of ``NAME=value``; ``None`` for another word.

    >>> assignment("A=1=2"), assignment("--lr=1")
    (('A', '1=2'), None)
    """
    found = _ASSIGNMENT.fullmatch(word)
    return (found[1], found[2]) if found else None


def _assignments(
    words: Sequence[str],
) -> Iterator[tuple[str, str, str, tuple[str, str] | None]]:
    """Each word of a launch: the one before it, itself, the option in it, and what it assigns."""
    for before, word in pairwise(["", *words]):
        option = "--env=" if word.startswith("--env=") else ""
        yield before, word, option, assignment(word.removeprefix(option))


def typed_variables(words: Sequence[str]) -> dict[str, str]:
    """The variables that the words of a launch set.

    >>> typed_variables(["A=1", "docker", "run", "-e", "B=2", "--env=C=3", "--ulimit", "stack=4"])
    {'A': '1', 'B': '2', 'C': '3'}
    """
    return dict(
        pair
        for before, _, _, pair in _assignments(words)
        if pair is not None and (not before.startswith("--") or before in ("--", "--env"))
    )


def without_secret_values(words: Sequence[str]) -> list[str]:
    """The words of a launch that a plan's file may hold: an option then passes a variable on.

    >>> without_secret_values(["env", "A_KEY=1", "docker", "run", "-e", "HF_TOKEN=x", "image"])
    ['env', 'docker', 'run', '-e', 'HF_TOKEN', 'image']
    """
    found = list[str]()
    for before, word, option, pair in _assignments(words):
        if pair is None or not is_secret(pair[0]):
            found.append(word)
        elif option or before.startswith("-"):
            found.append(option + pair[0])
    return found


class _Value(NamedTuple):
    """What an option or a variable says, its name, and the pattern of a count."""

    text: str
    name: str
    pattern: str = _COUNT


#: What options or variables say, by what it is about.
_Said = Mapping[str, _Value]
#: Numbers of nodes and ranks.
_Sizes = tuple[int | None, int | None]


def _option_values(launcher: Launcher, words: Sequence[str]) -> _Said:
    """What the options of a launcher say; the last of several holds."""
    found = dict[str, _Value]()
    for word, following in zip(words, (*words[1:], ""), strict=False):
        name, equals, value = word.partition("=")
        if word[:2] in launcher.options and word[2:3].isdigit():  # -N4
            name, equals, value = word[:2], "=", word[2:]
        quantity = launcher.quantity(name)
        if quantity is None:
            continue
        text = value if equals else "" if following.startswith("--") else following
        if launcher is _SLURM and quantity in ("gpus", "gpus_per_node", "gpus_per_rank"):
            counted = re.fullmatch(
                r"(?:gres/)?(?:gpu\b)?[:=]?(?:[^:,]*[A-Za-z][^:,]*:)?(\d+).*", text
            )
            if counted is None and not _FILLED_IN.search(text):
                continue  # --gres=gpu, or of something else
            text = counted[1] if counted else text
        if launcher is _MPI and quantity == "mapping":
            per_node = re.match(r"ppr:(\d+):node", text)
            if per_node is None:
                continue
            quantity, text = "per_node", per_node[1]
        found[quantity] = _Value(text, name, launcher.nodes if quantity == "nodes" else _COUNT)
    return found


class _Launch:
    """A launch that is read; what was assumed and what is not said is collected on the way."""

    def __init__(self, words: Sequence[str], place: LaunchPlace) -> None:
        self._typed = typed_variables(words)
        self._environment = {**place.environment, **self._typed}
        self._gpus_per_node = place.gpus_per_node
        self._notes: list[str] = []
        self._unsaid: list[str] = []
        self._first = next((w for w in words if assignment(w) is None), "")
        #: Launchers among the words, innermost first, with what their own options say.
        self._parts: list[tuple[Launcher, _Said]] = []
        end = len(words)
        for at in reversed(range(end)):
            if (launcher := _BY_NAME.get(words[at].rpartition("/")[2])) is not None:
                if launcher in LAUNCHERS:
                    said = _option_values(launcher, words[at + 1 : end])
                    self._parts.append((launcher, said))
                end = at
        of_slurm = [said for launcher, said in self._parts if launcher is _SLURM]
        #: Options and variables of Slurm, the nearest words first.
        self._slurm = [*of_slurm, _option_values(_SLURM, place.header), self._variables(_SLURM)]

    def read(self) -> LaunchedRanks:
        """The number of ranks, or why it is not known."""
        launcher, said = self._parts[0] if self._parts else (_WRAPPER, {})
        said = {**self._variables(launcher), **said}
        if launcher in (_TORCHRUN, _DEEPSPEED):
            nodes, ranks = self._agent_ranks(launcher, said)
        elif launcher is _MPI:
            nodes, ranks = self._mpi_ranks(said)
        elif launcher is _ACCELERATE:
            if "ranks" not in said:
                self._unsaid.append("accelerate is not told --num_processes")
            nodes, ranks = self._count(said, "nodes"), self._count(said, "ranks")
        else:
            nodes, ranks = self._slurm_tasks()
            if ranks == 1 and launcher is not _SLURM:
                ranks = None  # a process of a step of one task may stand for those that it starts
        if ranks is None:
            ranks = self._world_size(self._typed)
        if ranks is None and launcher not in (_TORCHRUN, _DEEPSPEED, _ACCELERATE):
            nodes, ranks = self._ranks_by_gpus(nodes)
        if ranks is None and launcher is not _TORCHRUN:
            ranks = self._world_size(self._environment)
        if ranks is None and not self._unsaid:
            what = "neither a launcher nor Slurm nor WORLD_SIZE says it"
            if self._first and self._first.rpartition("/")[2] not in _BY_NAME:
                what = f"{self._first} is no launcher that is known, and nothing else says it"
            self._unsaid.append(what)
        return LaunchedRanks(
            num_ranks=ranks,
            num_nodes=nodes,
            notes=tuple(dict.fromkeys(self._notes)) if ranks else (),
            unsaid="" if ranks else self._unsaid[0],
        )

    def _agent_ranks(self, launcher: Launcher, said: _Said) -> _Sizes:
        """Of an agent on each node, which starts that node's ranks."""
        nodes, per_node = self._count(said, "nodes"), self._count(said, "per_node")
        chosen = said.get("selected_gpus")
        if chosen is not None and (":" in chosen.text or "exclude" in chosen.name):
            self._unsaid.append(f"{chosen.name} names some GPUs of some nodes")
            return nodes, None
        if launcher is _DEEPSPEED:
            slots = self._slots(said)
            if chosen is not None:  # whole nodes
                nodes = len(chosen.text.split("@"))
            if slots is not None:
                nodes = nodes or len(slots)
                per_node = per_node or max(slots.values()) or None
            elif "host_file" in said and nodes is None:
                return None, None
            per_node = per_node or (self._node_gpus() if "per_node" not in said else None)
        if nodes is None:
            nodes = 1 if "nodes" not in said else self._slurm_tasks()[0]
        if per_node is None and launcher is _TORCHRUN:
            per_node = 1 if "per_node" not in said else self._slurm_count("gpus_per_node")
        return nodes, nodes * per_node if nodes and per_node else None

    def _mpi_ranks(self, said: _Said) -> _Sizes:
        slots = self._slots(said)
        nodes, tasks = self._slurm_tasks()
        nodes = len(slots) if slots else nodes
        per_node = self._count(said, "per_node")
        if ranks := self._count(said, "ranks"):
            return (ranks // per_node if per_node else nodes), ranks
        if "per_node" in said:
            return nodes, nodes * per_node if nodes and per_node else None
        if slots:
            return nodes, sum(slots.values()) if all(slots.values()) else None
        return nodes, tasks

    def _slurm_tasks(self) -> _Sizes:
        """Nodes and tasks, by the nearest words for Slurm that say them."""
        known = dict[str, _Value]()
        nodes = tasks = None
        for said in self._slurm:
            known = {**said, **known}
            nodes, tasks = self._nodes(known), self._count(known, "ranks")
            per_node = self._count(known, "per_node")
            gpus = self._gpus(known, nodes)
            if tasks is None and per_node:
                tasks = (nodes or 1) * per_node
            if tasks is None and gpus and (each := self._count(known, "ranks_per_gpu")):
                tasks = gpus * each
            if tasks is None and gpus and (each := self._count(known, "gpus_per_rank")):
                tasks = gpus // each
            if tasks is not None:
                break
        return nodes, tasks

    def _ranks_by_gpus(self, nodes: int | None) -> _Sizes:
        """A rank on each GPU of Slurm's options, where they have no number of tasks."""
        known = {name: value for said in reversed(self._slurm) for name, value in said.items()}
        nodes = self._nodes(known) or nodes
        gpus = self._gpus(known, nodes)
        if gpus is None:
            if nodes is not None:
                self._unsaid.append(f"Slurm is told {nodes} nodes, and neither tasks nor GPUs")
            return nodes, None
        self._notes.append(f"Slurm is told {gpus} GPUs and no tasks; a rank on each is assumed.")
        return nodes, gpus

    def _world_size(self, environment: Mapping[str, str]) -> int | None:
        name = next((name for name in _WORLD if name in environment), None)
        return self._count({"ranks": _Value(environment[name], name)} if name else {}, "ranks")

    def _variables(self, launcher: Launcher) -> _Said:
        """What variables of the environment say in the place of a launcher's options."""
        found = dict[str, _Value]()
        for name, quantity in launcher.variables.items():
            if (text := self._environment.get(name)) is None:
                continue
            if quantity == "per_node" and (each := tasks_per_node(text)):
                text = str(max(each))
            found.setdefault(
                quantity, _Value(text, name, launcher.nodes if quantity == "nodes" else _COUNT)
            )
        return found

    def _nodes(self, said: _Said) -> int | None:
        hosts = said.get("hosts")
        named = len(hosts_of(hosts.text)) if hosts and not _FILLED_IN.search(hosts.text) else None
        return self._count(said, "nodes") or named

    def _gpus(self, said: _Said, nodes: int | None) -> int | None:
        gpus, per_node = self._count(said, "gpus"), self._count(said, "gpus_per_node")
        return gpus or (per_node and per_node * (nodes or 1))

    def _slurm_count(self, quantity: str) -> int | None:
        return next((n for said in self._slurm if (n := self._count(said, quantity))), None)

    def _node_gpus(self) -> int | None:
        """GPUs of a node: those that are visible, that Slurm gives, or all of the cluster's."""
        if visible := self._typed.get("CUDA_VISIBLE_DEVICES"):
            return len(visible.split(","))
        nodes, gpus = self._slurm_count("nodes"), self._slurm_count("gpus")
        of_slurm = self._slurm_count("gpus_per_node") or (nodes and gpus and gpus // nodes)
        found = of_slurm or self._gpus_per_node
        if found is None:
            self._unsaid.append("no cluster says how many GPUs a node has")
        return found

    def _slots(self, said: _Said) -> dict[str, int] | None:
        """Ranks that each host takes, 0 if not said, by a list of hosts or a file of them."""
        slots = Counter[str]()
        if hosts := said.get("hosts"):
            for part in hosts.text.split(","):
                host, _, count = part.partition(":")
                slots[host] += int(count) if count.isdigit() else 1
            return slots
        if (file := said.get("host_file")) is None:
            return None
        path = Path(file.text)
        if not path.is_file():
            self._unsaid.append(f"{file.name} {file.text} is not on this host")
            return None
        for line in read_text(path, file.name).splitlines():
            said_of_host = line.partition("#")[0].strip()
            if host := re.split(r"[\s:]", said_of_host, maxsplit=1)[0]:
                counted = re.search(r"(?:slots\s*=\s*|:)(\d+)", said_of_host)
                slots[host] += int(counted[1]) if counted else 0
        if not all(slots.values()) and said.keys().isdisjoint(("per_node", "ranks")):
            self._unsaid.append(f"{file.name} {file.text} has hosts without slots=")
        return slots or None

    def _count(self, said: _Said, quantity: str) -> int | None:
        """A count; the most of a range; what a shell fills in is not known."""
        if (value := said.get(quantity)) is None:
            return None
        text, name = value.text, value.name
        if quantity == "per_node" and text in _EACH_GPU:
            return self._node_gpus()
        if _FILLED_IN.search(text) or text in ("cpu", "xpu"):
            self._unsaid.append(f"{name} {text} is no number")
            return None
        given = name in self._environment and name not in self._typed
        if not re.fullmatch(value.pattern, text):
            if given:
                return None
            example = "" if value.pattern == _COUNT else ", or a range such as 2:4"
            raise UserInputError(
                name.replace("_", "-"),
                text,
                f"it must be a whole number of at least 1{example}",
                "Correct the launcher's option, or leave the launcher out.",
            )
        listed = text.partition(":")[0] if "-" in text else text  # 2-10:2 is every second
        counts = {
            int(part.rstrip("kKmM")) * _TIMES.get(part[-1].lower(), 1)
            for part in re.split("[-:,]", listed)
        }
        if len(counts) > 1:
            most = max(counts)
            self._notes.append(f"{name} {text} is a range; its largest, {most} nodes, is planned.")
        if given:
            self._notes.append(f"{name}={text} of the environment is taken.")
        return max(counts)
