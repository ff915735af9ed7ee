"""The columns that files of measurements have, for people who write such files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nest_megatron.validation.rows import RowKind


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or several that are read alike.

    Args:
        names: as in the head of the file, separated by commas.
        unit: of a cell; "" for text.
        meaning: what a cell says, and what an empty one means.
    """

    names: str
    unit: str
    meaning: str


_MACHINE = (
    Column("row_id, source", "", "name of the row, and who published it; for the tables only"),
    Column("model", "", "a name of `nest-megatron models`, or one whose shape the row states"),
    Column(
        "layers, hidden, ffn, heads, kv_heads, vocab",
        "",
        "shape; empty: as in the catalogue, or as the family usually has it",
    ),
    Column("params_b", "10⁹ parameters", "size, where the name does not say; checks the shape"),
    Column("gpu", "", "V100, A100-40GB, H100, GB200...; needed"),
    Column("n_gpus", "GPUs", "of the whole job; needed"),
    Column("gpus_per_node", "GPUs", "of one node; empty: as such machines have it"),
    Column("network", "", "free text (`NVSwitch + 4x200 Gb/s HDR per node`); empty: the usual"),
)
_LAYOUT = (
    Column("precision", "", "bf16, fp16, fp8 in any spelling, nvfp4; empty: bf16; mxfp4: refused"),
    Column("seq", "tokens", "of one sequence; empty: as in the catalogue"),
    Column("gbs", "sequences", "of one step; or `ga`"),
    Column("mbs", "sequences", "of one micro batch; empty: the fastest of 1, 2, 4, 8 that fits"),
    Column("ga", "micro batches", "of one replica in one step"),
    Column("tp, pp", "", "tensor and pipeline sizes; needed"),
    Column("vp", "", "virtual stages of a rank; empty: 1, or as the framework's recipes have it"),
    Column("cp, ep, etp", "", "context, expert, expert-tensor sizes; empty: 1 (etp: see targets)"),
    Column("zero, fsdp", "", "ZeRO stage 0 to 3; whether weights are sharded; empty: see targets"),
    Column("seq_parallel", "0 or 1", "empty: see targets"),
    Column(
        "recompute",
        "",
        "none, full, selective or names of modules; empty: the fastest setting that fits",
    ),
    Column("optimizer", "", "`BF16 states` or `BF16 moments`: Adam's moments in 16 bits"),
    Column("framework", "", "with its release; what it does unasked is in the list of targets"),
    Column("task", "", "pretrain, sft, lora...; lora trains no weights"),
)
_TIME = (
    Column(
        "iter_time_s",
        "s",
        "of one step; where empty, one of the next three, in this order, is read",
    ),
    Column("tokens_per_s_per_gpu", "tokens/s", "of one GPU"),
    Column(
        "tflops_per_gpu, tflops_kind",
        "10¹² FLOP/s",
        "of one GPU; kind: `model`, `hardware` (recomputation counted) or `8*N*tokens`",
    ),
    Column("mfu_pct", "%", "model FLOP/s over the peak of the number format"),
)
_MEMORY = (
    Column("peak_mem", "see next", "of one GPU"),
    Column("peak_mem_unit", "", "B, MiB, GiB or GB; `nvidia-smi` in it counts the whole process"),
    Column(
        "peak_mem_scope", "", "`rank-0` is the first stage; all else the GPU with the highest peak"
    ),
    Column("outcome", "", "`oom` for a run that ended for want of memory"),
)
_GOLDEN = (
    Column("test_case, family", "", "name of the functional test; gpt, bert, moe, t5..."),
    Column("layers, hidden, ffn, heads, kv_groups, vocab, seq", "", "shape of the test's model"),
    Column("experts, topk, moe_ffn, moe_layer_freq, mla, mtp_layers", "", "its mixture of experts"),
    Column("gpu, n_gpus, gpus_per_node", "", "machine; empty `n_gpus`: 8 (release tests: 256)"),
    Column("tp, pp, vp, pp_layout, cp, ep, etp, mbs, gbs", "", "layout, as Megatron's flags say"),
    Column("recompute, precision, fp8, attention_backend, deterministic", "", "as its flags say"),
    Column("extra_args", "", "further flags as `name=value`"),
    Column("mem_max_allocated_gib", "GiB", "what PyTorch's allocator gave out on the last stage"),
)
_COLLECTIVES = (
    Column("row_id, source", "", "name of the row, and who published it; for the tables only"),
    Column(
        "collective", "", "all_reduce, all_gather, reduce_scatter, alltoall, sendrecv; any spelling"
    ),
    Column("gpu", "", "as above"),
    Column("n_ranks, nodes, gpus_per_node_used", "", "members of the group, and where they are"),
    Column("size_bytes", "B", "as nccl-tests counts: the whole buffer of one rank's result"),
    Column("intra_fabric, inter_fabric", "", "free text; needed between nodes"),
    Column("algo", "", "`SHARP`, `NVLS off`; else as NCCL chooses"),
    Column("time_us", "µs", "of one call; where empty, one of the next two is read"),
    Column("algbw_GBps, busbw_GBps", "10⁹ B/s", "as nccl-tests prints them"),
)

#: What each kind of file holds.
COLUMNS: Mapping[RowKind, tuple[Column, ...]] = {
    RowKind.THROUGHPUT: (*_MACHINE, *_LAYOUT, *_TIME, *_MEMORY),
    RowKind.MEMORY_PEAK: (
        Column("throughput_row", "", "`row_id` of the same run in a file of throughput, if any"),
        Column("(all columns of throughput)", "", "read alike; no time is needed"),
        *_MEMORY,
    ),
    RowKind.MEMORY_GOLDEN: _GOLDEN,
    RowKind.COLLECTIVES: _COLLECTIVES,
}
