"""Why our columns of the paper's experiments differ from the printed ones."""

from __future__ import annotations

from collections.abc import Sequence

from nest_megatron.report.words import TERM_WORDS
from nest_megatron.research.paper.outcome import Gain, Report
from nest_megatron.research.paper.published import RULES

_NAMES = {
    "manual": "Manual",
    "mcmc": "MCMC",
    "alpa_e": "Alpa-E",
    "mist": "Mist",
    "phaze": "Phaze",
    "aceso": "Aceso",
    "autoconfigurator": "AutoConfigurator",
}
#: What holds for every experiment.
_COMMON = (
    "All planners are priced by one rule here: the cost model of `nest-megatron plan`, every "
    "network term in seconds where the traffic runs, memory with the optimizer's states in "
    "float32, stages cut as well as each method allows itself. In the artifact, links weigh a "
    "thousandth of the layers (seconds are added to milliseconds), the optimizer keeps no states, "
    "and a baseline's stages are priced last to first.",
    "The models are the published ones. The artifact traces the output projection into every "
    "layer, so that its Llama-3-70B has 152 billion parameters and wants more stages.",
    "Ours searches the micro batch, context, expert and virtual-stage degrees, ZeRO and "
    "recomputation as well; in the artifact they are inputs. All plans are such as Megatron "
    "launches: every replica has equally many stages, and every GPU works.",
)


_NOTE_2 = (
    "Ours is written as in Megatron (degrees of 1 left out, PP 4x7 with 7 virtual stages, MBS the "
    "micro batch), the other two as stages, replicas, tensor degree, sequence-parallel width, "
    "and for Mixtral expert and context width; Alpa's is its number of stages."
)
_NOTE_4 = (
    "Ours is the search alone, with its proof, on 1,024 GPUs; the paper gives minutes, profiling "
    "included, and the size is not among the published files. Mist stands here for its space "
    "(ZeRO, recomputation, micro batch, uneven stages on a flat network) searched exactly by our "
    "solver: its own time is that of a mixed-integer program."
)
_NOTE_7 = (
    "Research mode: the paper's recurrence and its account of memory, ZeRO on and off, GB read as "
    "GiB. A stage that needs ZeRO takes as many more devices as its degree, and they carry no "
    "samples of their own, as the paper has it. The catalogue's Llama-3-70B has 80 layers of 856 "
    "million parameters, and with SGD they fit without ZeRO; in the artifact each has the output "
    "projection as well, 1,906 million. With the artifact's own layers nothing fits without ZeRO, "
    "and with it 230 and 600 devices are enough, because each stage takes the first setting that "
    "fits where it stands (docs/recurrence.md, python benchmarks/recurrence.py)."
)


def notes(report: Report) -> Sequence[str]:
    """What explains a report's differences, one paragraph each."""
    if report.gains:
        return (*map(about_gain, report.gains), *_COMMON)
    return {"table2": (_NOTE_2, *_COMMON), "table4": (_NOTE_4,), "table7": (_NOTE_7,)}[report.name]


def about_gain(gain: Gain) -> str:
    """One paragraph on one baseline: here, in the artifact, in the paper, and why."""
    name = _NAMES.get(gain.planner, gain.planner)
    if gain.ours is None:
        return f"{name}: no job of this run has both plans."
    told = [f"{name}: {gain.ours:.2f}x here over {_jobs(gain.jobs)}{_paper(gain)}."]
    if gain.only_ours:
        told.append(f"It has no plan for {gain.only_ours} more.")
    if gain.artifact:
        shipped, one, best = (gain.artifact[rule] for rule in RULES)
        told.append(
            f"On the {gain.instances} recorded instances the artifact's plan gains {shipped:.2f}x "
            f"as shipped, {one:.2f}x when the baseline's stages are priced in the order of any "
            f"other plan, and {best:.2f}x when its degrees get the cuts that suit them best."
        )
    if gain.worst_terms:
        term, times = next(iter(gain.worst_terms.items()))
        told.append(f"Here it loses most in {TERM_WORDS.get(term, term)}, in {times} of them.")
    return " ".join(told)


def _paper(gain: Gain) -> str:
    return "" if gain.paper is None else f", {gain.paper:.2f}x in the paper"


def _jobs(number: int) -> str:
    return "1 job" if number == 1 else f"{number} jobs"
