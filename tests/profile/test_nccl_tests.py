"""The reader of nccl-tests' output: true forms of several releases, and what it refuses."""

from __future__ import annotations

import contextlib
import csv
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nest_megatron.cluster.records import CollectiveKind
from nest_megatron.errors import ProfileError
from nest_megatron.profile.nccl_tests import kind_named, read_log, read_logs
from tests.profile.networks import DATA

LOGS = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.log"))}
A100 = LOGS["all_reduce_a100"]
MEGA = LOGS["all_reduce_a3mega"]
NODE = LOGS["h100_node"]
PUBLISHED = Path(__file__).resolve().parents[1] / "published" / "data" / "comm_collectives.csv"
NAMES = {"alltoall": "all_to_all", "sendrecv": "send_recv"}
HEAD = "# nThread 1 nGpus 4 minBytes 8 maxBytes 8 warmup iters: 5 iters: 20 agg iters: 3"
COLUMNS = "# size count type redop root time algbw busbw #wrong time algbw busbw #wrong"
FOOT = "# Out of bounds values : 0 OK"


def ranks(num: int, hosts: int = 1) -> str:
    return "\n".join(
        f"#  Rank {i:2} Group  0 Pid   {i + 7} on  host{i * hosts // num} device  0 [0x1b] GPU"
        for i in range(num)
    )


def log_of(*rows: str, columns: str = COLUMNS, num: int = 4, hosts: int = 1) -> str:
    return "\n".join([HEAD, ranks(num, hosts), columns, *rows, FOOT])


def row(size: int = 4096, count: int = 1024, tail: str = "20.00 0.20 0.31 0") -> str:
    return f"{size} {count} float sum -1 {tail} {tail}"


def test_kinds_shapes_and_repetitions_of_a_log_of_several_runs() -> None:
    found = read_log(NODE, "h100_node.log")
    assert Counter(each.kind for each in found.samples) == dict.fromkeys(CollectiveKind, 10)
    assert {each.shape for each in found.samples} == {(8, 1)}
    assert {each.repetitions for each in found.samples} == {20}
    assert {each.spread for each in found.samples} == {None}
    assert found.versions == {"nccl-tests": "2.17.8", "nccl": "2.29.2"}


def test_launchers_tags_and_lines_of_nccl_between_rows_are_no_rows() -> None:
    assert "[1,0]<stdout>:node00:40000:40311 [0] NCCL INFO" in LOGS["h100_ten_nodes"]
    found = read_log(LOGS["h100_ten_nodes"], "x")
    assert {each.shape for each in found.samples} == {(8, 10)}
    assert len(found.samples) == 30
    for label in (" 0: ", "[0] ", "[prterun-n1-7@1,0]<stdout>: ", "node0[1,0]<stdout>:"):
        labelled = "\n".join(f"{label}{line}" for line in NODE.splitlines())
        assert len(read_log(labelled, "x").samples) == 50
    errors = NODE.replace("\n", "\n[1,3]<stderr>:1 2 3 failed\n")
    assert len(read_log(errors, "x").samples) == 50


def test_old_releases_name_the_collective_by_the_file_or_by_hand() -> None:
    assert {s.kind for s in read_log(A100, "all_reduce_a100.log").samples} == {"all_reduce"}
    found = read_log(MEGA, "8.log", CollectiveKind.ALL_REDUCE)
    assert {s.shape for s in found.samples} == {(8, 2)}
    assert found.versions == {"nccl": "2.18.5+cuda12.2"}
    with pytest.raises(ProfileError, match="which collective ran is not said; give --kind"):
        read_log(MEGA, "8.log")


def test_figures_are_those_of_the_rows_that_the_logs_name() -> None:
    with PUBLISHED.open(encoding="utf-8") as stream:
        published = {r["row_id"]: r for r in csv.DictReader(stream)}
    for name, text in LOGS.items():
        first, last = re.findall(r"cc(\d{4})", text)[:2]
        named = [published.get(f"cc{i:04}") for i in range(int(first), int(last) + 1)]
        known = {
            (
                NAMES.get(r["collective"], r["collective"]),
                int(float(r["size_bytes"])),
                r["n_ranks"],
            ): r
            for r in named
            if r is not None
        }
        for sample in read_log(text, f"{name}.log").samples:
            found = known.get((sample.kind.value, sample.message_bytes, str(sample.num_ranks)))
            if found is not None:
                assert sample.seconds == pytest.approx(float(found["time_us"]) * 1e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "count", "bus"),
    [
        (CollectiveKind.ALL_REDUCE, 2**20, 1.5),
        (CollectiveKind.ALL_GATHER, 2**18, 0.75),
        (CollectiveKind.REDUCE_SCATTER, 2**18, 0.75),
        (CollectiveKind.ALL_TO_ALL, 2**18, 0.75),
        (CollectiveKind.SEND_RECV, 2**20, 1.0),
    ],
)
def test_sizes_are_of_the_whole_tensor_and_counts_are_checked(
    kind: CollectiveKind, count: int, bus: float
) -> None:
    """Of four ranks: gathers, scatters and exchanges print the elements of one rank's part."""
    tail = f"100.0 41.94 {41.94 * bus:.2f} N/A"
    sample = read_log(log_of(row(2**22, count, tail)), "x", kind).samples[0]
    assert (sample.message_bytes, sample.num_ranks, sample.repetitions) == (2**22, 4, 60)
    assert sample.seconds == pytest.approx(1e-4)
    with pytest.raises(ProfileError, match="bytes, not"):
        read_log(log_of(row(2**22, count // 2, tail)), "x", kind)


def test_a_table_of_single_iterations_tells_their_spread() -> None:
    per_iteration = "i_min i_max i_p99 i_cv%"
    body = f"time algbw busbw #wrong {per_iteration}"
    columns = f"# size count type redop root {body} {body} timestamp"
    tail = "20.00 0.20 0.31 0 18.0 23.0 22.0 4.00"
    text = log_of(f"{row(tail=tail)} 2026-01-02 03:04:05", columns=columns)
    sample = read_log(text, "all_reduce").samples[0]
    assert sample.spread == pytest.approx(0.054)


def test_rows_of_no_bytes_are_counted() -> None:
    """``all_gather_perf -b 8`` on 8 ranks has nothing to gather."""
    empty = row(0, 0, "0.12 0.00 0.00 0")
    found = read_log(log_of(empty, row(64, 4, "12.00 0.01 0.00 0")), "all_gather.log")
    assert len(found.samples) == 1
    assert found.notes == ("all_gather.log: 1 rows of no bytes tell nothing and are left out.",)


def test_only_the_group_of_rank_0_is_timed_where_the_job_was_split() -> None:
    lines = [
        f"#  Rank {i} Group {i % 2} Pid 7 on host{i // 4} device 0 [0x1b] GPU" for i in range(8)
    ]
    text = log_of(row()).replace(ranks(4), "\n".join(lines))
    assert read_log(text, "all_reduce").samples[0].shape == (2, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no table of nccl-tests"),
        ("hello\nworld", "no table of nccl-tests"),
        (row(), "a row without the head"),
        (log_of(), "it has no rows"),
        (log_of(row()).removesuffix(FOOT), "cut short"),
        (log_of(row()).replace("0 OK", "3 FAILED"), "came out wrong"),
        (log_of(row(tail="20.00 0.20 0.31 2")), "#wrong"),
        (log_of(row()[:-8]), "13 columns"),
        (log_of(row() + " 1"), "13 columns"),
        (log_of("something else"), "13 columns"),
        (log_of(row(tail="fast 0.20 0.31 0")), "time is a number"),
        (log_of(row(tail="nan 0.20 0.31 0")), "time is a number"),
        (log_of(row(tail="0.00 0.20 0.31 0")), "a time is above 0"),
        (log_of(row(tail="20.00 0.40 0.60 0")), "not algbw"),
        (log_of(row(tail="20.00 0.20 0.20 0")), "busbw = 1.500 algbw"),
        (log_of(row().replace("float", "quad")), "a type is one of"),
        (log_of(row().replace("4096", "4k")), "size is a whole number"),
        (log_of(row()).replace(ranks(4), ""), "which ranks ran"),
        (log_of(row(), num=1), "one rank alone"),
        (log_of(row(), num=3, hosts=2), "different numbers of ranks"),
        (log_of(row(), columns=COLUMNS.replace("time", "cputime")), "CPU times"),
        (log_of(row(), columns="# size count type latency"), "a head reads"),
        (f"# Collective test starting: broadcast_perf\n{log_of(row())}", "none of all_reduce"),
        (f"{FOOT}\n", "no table is above it"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProfileError) as caught:
        read_log(text, "all_reduce.log")
    assert words in str(caught.value)
    where = f"{caught.value.what} {caught.value.value}"
    assert re.match(r"all_reduce\.log, line [1-9]|measurements all_reduce\.log$", where)


def test_a_log_that_was_cut_short_is_refused_wherever_a_table_is_open() -> None:
    lines = A100.splitlines()
    head = next(i for i, line in enumerate(lines) if " size " in line)
    foot = next(i for i, line in enumerate(lines) if "Out of bounds" in line)
    for end in range(head + 1, foot):
        with pytest.raises(ProfileError, match="cut short"):
            read_log("\n".join(lines[:end]), "all_reduce")


def test_the_file_and_the_line_of_a_mistake_are_named() -> None:
    broken = MEGA.replace("1059.90   31.66", "1059.90   51.66", 1)
    at = next(i for i, line in enumerate(broken.splitlines(), 1) if "51.66" in line)
    with pytest.raises(ProfileError, match=rf"all_reduce_b\.log, line {at}"):
        read_logs([("all_reduce_a.log", MEGA), ("all_reduce_b.log", broken)])


@settings(max_examples=200, deadline=None)
@given(
    garbage=st.text(max_size=80),
    at=st.integers(0, 40),
    source=st.sampled_from(["all_reduce_a100", "all_reduce_a3mega"]),
)
@example(
    garbage="# Out of bounds values : 99999999999999999999999", at=25, source="all_reduce_a100"
)
@example(garbage="#  Rank ٣ Group ٣ Pid ٣ on h device ٣", at=14, source="all_reduce_a100")
@example(garbage="٣ ٣ float sum 1 1 1 0 1 1 1 0", at=20, source="all_reduce_a100")
@example(garbage="8 2 float sum 1e-400 1 1 0 1 1 1 0", at=20, source="all_reduce_a100")
def test_a_line_of_garbage_is_read_past_or_refused(garbage: str, at: int, source: str) -> None:
    """Between a table's head and foot a line is a row, a comment or an error."""
    lines = LOGS[source].splitlines()
    with contextlib.suppress(ProfileError):
        found = read_log("\n".join([*lines[:at], garbage, *lines[at:]]), "all_reduce.log")
        assert len(found.samples) >= 20


@given(text=st.text(max_size=300))
def test_any_text_is_read_or_refused(text: str) -> None:
    with pytest.raises(ProfileError):
        read_log(text, "all_reduce.log")


def test_names_that_say_nothing_or_two_things() -> None:
    assert kind_named("sendrecv_perf_mpi") is CollectiveKind.SEND_RECV
    assert kind_named("all_gather-and-all_reduce.log") is None
