"""Which hosts share a switch, a block or a rack: what programs say, as one record."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import product

from nest_megatron.errors import UserInputError
from nest_megatron.plain import frozen

LEVELS = ("leaf", "spine", "core")
#: Hosts of one range; more is a slip, or nobody's cluster.
_MOST_HOSTS = 100_000
#: Gb/s of one lane, by the names that ``ibnetdiscover`` prints.
_LANES = {
    "SDR": 2.5,
    "DDR": 5.0,
    "QDR": 10.0,
    "FDR10": 10.0,
    "FDR": 14.0,
    "EDR": 25.0,
    "HDR": 50.0,
    "NDR": 100.0,
    "XDR": 200.0,
}


@frozen
class Topology:
    """Groups of hosts, one inside the other.

    Args:
        source: the program that says so.
        level_names: innermost first.
        groups: of each host, one name for each level.
        uplink_shares: of the rate of their hosts, what the uplinks of an innermost group carry (1
            is non-blocking), for groups of which it is seen.
        notes: what is unusual.
    """

    source: str
    level_names: tuple[str, ...]
    groups: Mapping[str, tuple[str, ...]]
    uplink_shares: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def of(self, host: str) -> tuple[str, ...] | None:
        """Groups of a host, by its whole name or the name before the first dot."""
        short = {name.partition(".")[0]: groups for name, groups in self.groups.items()}
        return self.groups.get(host) or short.get(host.partition(".")[0])

    def only(self, names: Collection[str]) -> Topology:
        """The same hosts with some of the levels."""
        kept = [level for level, name in enumerate(self.level_names) if name in names]
        groups = {host: tuple(each[k] for k in kept) for host, each in self.groups.items()}
        level_names = tuple(self.level_names[level] for level in kept)
        return replace(self, level_names=level_names, groups=groups)

    def usual_sizes(self) -> tuple[int, ...]:
        """Hosts of most groups of each level; of two sizes that are as usual, the larger."""
        found = []
        for level in range(len(self.level_names)):
            sizes = Counter(Counter(each[level:] for each in self.groups.values()).values())
            found.append(max(sizes, key=lambda size: (sizes[size], size)))
        return tuple(found)


def hosts_of(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list.

    >>> hosts_of("gpu[003-005,014],login")
    ['gpu003', 'gpu004', 'gpu005', 'gpu014', 'login']
    >>> hosts_of("rack[1-2]gpu[7,9]")
    ['rack1gpu7', 'rack1gpu9', 'rack2gpu7', 'rack2gpu9']
    """
    found = []
    for each in filter(None, re.split(r",(?![^\[]*\])", nodelist)):  # at a comma outside brackets
        parts = re.split(r"\[([^\]]*)\]", each)
        choices = [list(_numbers(p)) if i % 2 else [p] for i, p in enumerate(parts)]
        found += ["".join(chosen) for chosen in product(*choices)]
    return found


def _numbers(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        is_range = first.isdecimal() and last.isdecimal()
        if is_range and int(last) - int(first) < _MOST_HOSTS:
            yield from (f"{n:0{len(first)}d}" for n in range(int(first), int(last) + 1))
        else:
            yield part


def tasks_per_node(text: str) -> tuple[int, ...]:
    """Tasks of each node, as ``SLURM_TASKS_PER_NODE`` says it; nothing of another text.

    >>> tasks_per_node("8(x3),4")
    (8, 8, 8, 4)
    """
    found = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            return ()
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def groups_of_task(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Switches above the node of a Slurm task, innermost first; nothing where Slurm knows none.

    >>> groups_of_task({"SLURM_TOPOLOGY_ADDR": "sh04.sh04-isw-16.sh04-16n05",
    ...                 "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
    ('sh04-isw-16', 'sh04')
    """
    kinds = environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    names = environment.get("SLURM_TOPOLOGY_ADDR", "").split(".", maxsplit=len(kinds) - 1)
    return tuple(reversed(names[:-1])) if len(names) == len(kinds) else ()


def parse_slurm_topology(text: str) -> Topology:
    """``scontrol show topology``: switches of the tree plugin, or blocks of the block plugin.

    Raises:
        UserInputError: for a text that names neither.
    """
    source = "scontrol show topology"
    lines = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]
    blocks = {
        host: (line["BlockName"],)
        for line in lines
        if "BlockName" in line
        for host in hosts_of(line.get("Nodes", ""))
    }
    if blocks:
        return Topology(source=source, level_names=("block",), groups=blocks)
    switches = [line for line in lines if "SwitchName" in line]
    above = {
        child: line["SwitchName"]
        for line in switches
        for child in hosts_of(line.get("Switches", ""))
    }
    paths = {
        host: tuple(_path(line["SwitchName"], above))
        for line in switches
        if line.get("Level", "0") == "0"
        for host in hosts_of(line.get("Nodes", ""))
    }
    if not paths:
        raise unreadable(
            source,
            "it names no switch and no block with nodes",
            "The topology plugin of this Slurm may be the flat one.",
        )
    depth = min(map(len, paths.values()))
    groups = {host: path[:depth] for host, path in paths.items()}
    return Topology(source=source, level_names=level_names(depth), groups=groups)


def _path(switch: str, above: Mapping[str, str]) -> Iterator[str]:
    passed = set()
    while switch and switch not in passed:
        passed.add(switch)
        yield switch
        switch = above.get(switch, "")


def level_names(depth: int) -> tuple[str, ...]:
    """What so many levels of a network are called, innermost first."""
    return tuple(LEVELS[i] if i < len(LEVELS) else f"level_{i + 1}" for i in range(depth))


def parse_ibnetdiscover(text: str) -> Topology:
    """``ibnetdiscover``: hosts that share a leaf switch, with rails or without, are a group.

    Raises:
        UserInputError: for a text in which no switch has a host.
    """
    source = "ibnetdiscover"
    links = list(_ib_links(text))
    leaves: dict[str, set[str]] = defaultdict(set)
    unnamed = 0
    for link in links:
        if link.is_of_host and re.match(r"MT\d+ ", link.peer_name):  # the adapter's, not a host's
            unnamed += 1
        elif link.is_of_host:
            leaves[link.switch].add(link.peer_name.split()[0])
    if not leaves:
        raise unreadable(source, "no switch has a host", "Run it where the whole fabric is seen.")
    # hosts of sets that overlap, directly or through others, under the name of their first
    group_of: dict[str, set[str]] = {}
    for members in leaves.values():
        whole = set(members).union(*(group_of[host] for host in members if host in group_of))
        group_of.update(dict.fromkeys(whole, whole))
    groups = {host: (f"leaf_of_{min(group)}",) for host, group in group_of.items()}
    notes = list(_slow_links([link for link in links if link.switch in leaves]))
    if unnamed:
        notes.append(f"ports of hosts that tell no host's name, in no group: {unnamed}")
    return Topology(
        source=source,
        level_names=level_names(1),
        groups=groups,
        uplink_shares=_uplink_shares(links, leaves, groups),
        notes=tuple(notes),
    )


@frozen
class _Link:
    """A port of a switch and what it leads to."""

    switch: str
    peer: str
    peer_name: str
    rate_bits_per_s: float

    @property
    def is_of_host(self) -> bool:
        """Whether it leads to a host, and not to a switch or to SHARP's port of the switch."""
        return self.peer.startswith("H-") and "Aggregation Node" not in self.peer_name


def _slow_links(links: Sequence[_Link]) -> Iterator[str]:
    for is_of_host, what in ((False, "uplinks"), (True, "links of hosts")):
        rates = Counter(x.rate_bits_per_s for x in links if x.is_of_host == is_of_host)
        for rate, count in sorted(rates.items()):
            if rate < max(rates):
                others = f"the others at {max(rates) / 1e9:g}"
                yield f"{count} of the {what} run at {rate / 1e9:g} Gb/s, {others}"


def _uplink_shares(
    links: Iterable[_Link], leaves: Mapping[str, set[str]], groups: Mapping[str, tuple[str, ...]]
) -> dict[str, float]:
    """Of each group, the rate of its uplinks over that of its hosts; nothing of a single group."""
    up: Counter[str] = Counter()
    down: Counter[str] = Counter()
    group_of = {switch: groups[min(hosts)][0] for switch, hosts in leaves.items()}
    for link in links:
        if link.switch in group_of:
            counted = down if link.is_of_host else up
            if link.is_of_host or link.peer.startswith("S-"):
                counted[group_of[link.switch]] += int(link.rate_bits_per_s)
    if len(down) < 2:
        return {}
    return {group: min(1.0, up[group] / rate) for group, rate in down.items() if up[group]}


def _ib_links(text: str) -> Iterator[_Link]:
    switch = ""
    for line in text.splitlines():
        if found := re.match(r'(Switch|Ca|Rt)\s+\d+\s+"([^"]+)"', line):
            switch = found[2] if found[1] == "Switch" else ""
        elif switch and (
            port := re.match(r'\[\d+\]\s+"([^"]+)"\[\d+\].*# "([^"]+)" lid \d+ (\d+)x(\w+)', line)
        ):
            lane = _LANES.get(port[4])
            if lane is None:
                raise unreadable("ibnetdiscover", f"the rate {port[3]}x{port[4]} is not known")
            rate = int(port[3]) * lane * 1e9
            yield _Link(switch=switch, peer=port[1], peer_name=port[2], rate_bits_per_s=rate)


def parse_host_file(text: str) -> Topology:
    """Lines of ``HOST GROUP...``: a host and its groups (rack, row, ...), innermost first.

    Raises:
        UserInputError: for a word with = (slots=8 of MPI's host files), a host twice, lines of
            unlike length, or a file without a host.
    """
    filled = filter(None, (line.partition("#")[0].split() for line in text.splitlines()))
    rows = [(host, *names) for some, *names in filled for host in hosts_of(some)]
    groups = {host: tuple(names) for host, *names in rows}
    limit = ""
    if set_words := [word for row in rows for word in row if "=" in word]:
        limit = f"{set_words[0]} is no host and no group"
    elif not rows:
        limit = "it names no host"
    elif len(groups) < len(rows):
        twice = Counter(host for host, *_ in rows).most_common(1)[0][0]
        limit = f"it names {twice} twice"
    elif len({len(row) for row in rows}) > 1:
        limit = "its lines have unlike numbers of groups"
    if limit:
        raise unreadable("host file", limit, "Write HOST GROUP... with a line for each host.")
    return Topology(source="host file", level_names=level_names(len(rows[0]) - 1), groups=groups)


def host_file(topology: Topology, hosts: Sequence[str]) -> str:
    """The lines that ``parse_host_file`` reads."""
    words = {
        host: [re.sub(r"\s+", "_", name) for name in topology.of(host) or ()] for host in hosts
    }
    lines = [" ".join((host, *groups)) for host, groups in words.items()]
    return "".join(f"{line}\n" for line in (f"# host {' '.join(topology.level_names)}", *lines))


def unreadable(
    what: str, limit: str, fix: str = "Save the program's output again."
) -> UserInputError:
    """The error for a program's output that cannot be read."""
    return UserInputError(what, None, limit, fix)
