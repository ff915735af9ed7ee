"""The paper's ablation of ZeRO where memory is small (appendix C.3, Table 7).

A stage takes further devices only so that its states are divided over them; without that, no plan
fits. Layers are those of the catalogue: no layer holds the language-model head but the last, what
is saved is what a backward pass needs (the artifact adds up the outputs of all traced operators),
and sums of gradients are priced. A stage takes the first ZeRO setting that fits where it stands;
the artifact takes one that would fit at every position of a pipeline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from nest_megatron.cluster.records import Cluster
from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.spec import TransformerSpec
from nest_megatron.research.nest_artifact.search import NoSolution
from nest_megatron.research.nest_dp.job import (
    Division,
    MemoryRule,
    PaperOptimizer,
    ResearchChoices,
    ResearchJob,
)
from nest_megatron.research.nest_dp.run import ResearchPlan, described
from nest_megatron.research.nest_dp.search import solve
from nest_megatron.units import GIB, Bytes


def research_words(found: ResearchPlan | NoSolution) -> str:
    """Devices, stages, replicas and ZeRO in a line, or why there is no plan."""
    if isinstance(found, NoSolution):
        return f"no plan: {found.reason}"
    degrees = f"{found.pipeline_model_parallel_size}, {found.data_parallel_size}"
    settings = ((stage.zero_stage, stage.zero_degree) for stage in found.stages)
    return f"{found.num_devices} devices, {{{degrees}, 1}}; {zero_stages(settings)}"


def zero_stages(settings: Iterable[tuple[int, int]]) -> str:
    """How many stages have which ZeRO stage and degree, the most frequent first.

    >>> zero_stages([(3, 8), (0, 1), (3, 8)])
    '2 ZeRO-3 over 8, 1 without'
    """
    return ", ".join(
        f"{count} {f'ZeRO-{zero} over {degree}' if degree > 1 else 'without'}"
        for (zero, degree), count in Counter(settings).most_common()
    )


#: Models of Table 7 by their names in the catalogue, and the memory that it gives a device: binary
#: units, in which the artifact takes its option, and with which its sizes come to the table's rows.
TABLE_7: dict[str, Bytes] = {"llama3_70b": 24 * GIB, "bert_large": 120 * GIB // 1024}
#: Devices of the table's cluster (``tpuv4_fat_tree``) and sequences of a step.
NUM_GPUS, GLOBAL_BATCH_SIZE = 1024, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationRow:
    """What is found without ZeRO, and with it."""

    model: str
    memory_bytes: Bytes
    optimizer: PaperOptimizer
    without: ResearchPlan | NoSolution
    with_zero: ResearchPlan | NoSolution


def table7_row(
    spec: TransformerSpec, cluster: Cluster, settings: CostSettings, optimizer: PaperOptimizer
) -> AblationRow:
    """One row: the table's memory, unsharded layers, the paper's account of memory.

    Args:
        cluster: with as many devices as are to be used, of whatever memory.
    """
    memory = TABLE_7[spec.name]
    accelerator = replace(cluster.accelerator, memory_bytes=memory)
    ones = ("tensor_model_parallel_size", "context_parallel_size", "micro_batch_size")
    choices = ResearchChoices(
        memory=MemoryRule.PAPER,
        optimizer=optimizer,
        divide=Division.LOOSELY,
        flash_attention=False,
        fixed=dict.fromkeys(ones, 1),
    )

    def answer(zero: bool) -> ResearchPlan | NoSolution:
        job = ResearchJob(
            spec=spec,
            cluster=replace(cluster, accelerator=accelerator),
            settings=settings,
            global_batch_size=GLOBAL_BATCH_SIZE,
            choices=replace(choices, zero=zero),
        )
        found = solve(job)
        return found if isinstance(found, NoSolution) else described(job, found)

    return AblationRow(
        model=spec.name,
        memory_bytes=memory,
        optimizer=optimizer,
        without=answer(zero=False),
        with_zero=answer(zero=True),
    )
