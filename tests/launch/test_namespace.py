"""From Megatron's Namespace to a plan and back, for every catalogue model and both releases."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from nest_megatron.errors import NestError, UnplannableModelError, UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, WRITABLE, launch_request
from nest_megatron.integrations.megatron_lm.launch import apply
from nest_megatron.integrations.megatron_lm.parser import read_argv
from nest_megatron.integrations.megatron_lm.planning import (
    Decision,
    command_of,
    costs,
    require_planned,
)
from nest_megatron.layout.rulebook import check
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.layout.rulebook.options import has_activation_flag
from nest_megatron.layout.stage_layout import expand_layout
from nest_megatron.model.parameters import total_parameters
from nest_megatron.model.spec import ModelFamily
from nest_megatron.plain import from_plain, to_plain
from tests import catalogue
from tests.launch.jobs import decided, job_argv, namespace, pad_like_megatron, running

#: GPUs and batch with which a model has a plan, and the flags that its script sets already.
LARGE = {"gpt3_175b", "llama3_1_405b", "deepseek_v3", "nemotron4_340b", "qwen3_235b_a22b"}
#: Models that differ from a smaller one in their sizes alone.
ALIKE = {"llama3_70b", "mixtral_8x22b", "mixtral_scaled"}
MODELS = [
    name
    for name in catalogue.CORE
    if has_activation_flag(catalogue.model(name))
    and catalogue.model(name).family is ModelFamily.GPT
]
SMALL = job_argv(catalogue.model("llama3_8b"), "--global-batch-size", "128")


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    pad_like_megatron(monkeypatch)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def jobs() -> Iterator[ParameterSet]:
    """Every model under every release; of the models of experts, by default one under both."""
    for name, version in itertools.product(MODELS, ("0.16", "0.20")):
        is_doubled = catalogue.model(name).is_moe and name != "mixtral_8x7b" and version == "0.20"
        is_slow = name in LARGE | ALIKE or is_doubled
        yield pytest.param(name, version, marks=pytest.mark.slow if is_slow else ())


@pytest.mark.parametrize(("name", "version"), [*jobs()])
def test_every_model_comes_back_as_planned(name: str, version: str) -> None:
    spec = catalogue.model(name)
    gpus = 1024 if name in LARGE else 64
    argv = job_argv(spec, "--global-batch-size", str(2 * gpus), "--tensor-model-parallel-size", "4")
    args, job, outcome = decided(argv, "all", version=version, world_size=gpus)
    decision, plan = outcome.decision, outcome.decision.plan

    assert job.spec.layer_kinds() == spec.layer_kinds()
    rows = spec.padded_vocab_size(4)
    assert (job.spec.vocab_size, job.spec.vocab_is_padded) == (rows, True)
    whole = dataclasses.replace(spec, vocab_size=rows, vocab_is_padded=True)
    assert total_parameters(job.spec) == total_parameters(whole)
    assert not tuple(check(launch_request(plan, job.command)))

    before = vars(copy.copy(args))
    again = from_plain(Decision, json.loads(json.dumps(to_plain(decision))))
    assert again == decision
    apply(args, again)
    written = read_argv("pretrain_gpt.py", plan.launch[LAUNCHER].argv, version).values
    assert {name: getattr(args, name) for name in written} == written
    changed = {name for name, value in vars(args).items() if before[name] != value}
    assert changed <= WRITABLE
    validated(args, plan.layout.dims.data_parallel_size, plan.layout.num_gpus)
    require_planned(args, plan)
    tp = plan.layout.dims.tensor_model_parallel_size
    assert (args.padded_vocab_size == rows) or (args.padded_vocab_size is None and tp == 4)


def validated(args: Namespace, dp: int, world_size: int) -> None:
    """What Megatron derives in its validation from the arguments that a plan writes."""
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    args.data_parallel_size = world_size // (tp * pp * args.context_parallel_size)
    assert args.data_parallel_size == dp
    layout = args.pipeline_model_parallel_layout
    virtual = args.num_virtual_stages_per_pipeline_rank
    if layout is not None:
        virtual = len(expand_layout(layout)) // pp
    args.virtual_pipeline_model_parallel_size = virtual if virtual != 1 else None


def test_what_was_typed_stays() -> None:
    words = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2")
    _, _, outcome = decided([*SMALL, *words])
    chosen = outcome.decision.plan.arguments
    assert (chosen["tensor_model_parallel_size"], chosen["pipeline_model_parallel_size"]) == (2, 2)
    assert outcome.searched is not None
    kept = {"tensor_model_parallel_size", "pipeline_model_parallel_size", "micro_batch_size"}
    assert kept == set(outcome.searched.kept)


def test_freed_flags_may_change() -> None:
    words = ("--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "8")
    _, _, held = decided([*SMALL, *words])
    _, _, freed = decided([*SMALL, *words], "all")
    times = [o.decision.plan.predicted.iteration_time_s for o in (held, freed)]
    assert times[1] < times[0]
    assert any(change.field == "--tensor-model-parallel-size" for change in freed.changes)


def test_a_user_s_own_cut_stays() -> None:
    words = ("--pipeline-model-parallel-size", "4", "--decoder-first-pipeline-num-layers", "5")
    _, _, outcome = decided([*SMALL, *words])
    assert outcome.decision.plan.layout.partition.boundaries == (0, 6, 15, 24, 34)
    with pytest.raises(UserInputError, match="stage_layout"):
        decided([*SMALL, *words], "pipeline_model_parallel_size")


def test_the_cost_of_virtual_stages_is_that_of_stages_that_are_free_as_well() -> None:
    words = ["--pipeline-model-parallel-size", "4", "--num-virtual-stages-per-pipeline-rank", "2"]
    _, _, outcome = decided([*SMALL, *words, "--decoder-first-pipeline-num-layers", "8"])
    assert outcome.searched is not None
    choices = [choice for choice, _ in costs(outcome.searched)]
    assert choices == [*outcome.searched.kept, "all"]
    assert "virtual_pipeline_model_parallel_size" in choices


def test_values_from_a_checkpoint_count_as_the_user_s() -> None:
    """They differ from the defaults without being typed."""
    args = namespace(SMALL)
    args.tensor_model_parallel_size = 4
    job = running(args, SMALL)
    assert job.fixed["tensor_model_parallel_size"] == 4


def test_the_batch_without_a_flag_is_megatron_s_own() -> None:
    """One micro batch on each replica of the user's own layout, whatever the plan's."""
    argv = job_argv(catalogue.model("llama3_8b"), "--tensor-model-parallel-size", "2")
    _, _, outcome = decided(argv, "all")
    assert outcome.decision.plan.layout.global_batch_size == 32
    assert outcome.decision.values["global_batch_size"] == 32


def test_variables_that_go_with_a_plan() -> None:
    _, _, outcome = decided([*SMALL, "--tensor-model-parallel-size", "2"])
    found = outcome.decision.plan.launch[LAUNCHER].environment
    assert found == {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    fsdp = ["--use-megatron-fsdp", "--data-parallel-sharding-strategy", "optim_grads_params"]
    args, _, outcome = decided([*SMALL, *fsdp])
    apply(args, outcome.decision)
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert (args.use_distributed_optimizer, args.ckpt_format) == (True, "fsdp_dtensor")


def test_options_without_room_are_dropped_with_a_reason() -> None:
    words = ("--tp-comm-overlap", "--defer-embedding-wgrad-compute", "--sequence-parallel")
    sizes = ("--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1")
    args, _, outcome = decided([*SMALL, *words, *sizes], "sequence_parallel")
    chosen = outcome.decision.plan.arguments
    assert (chosen["tensor_model_parallel_size"], chosen["pipeline_model_parallel_size"]) == (1, 1)
    apply(args, outcome.decision)
    assert not args.tp_comm_overlap
    assert not args.defer_embedding_wgrad_compute
    reasons = {change.field: change.reason for change in outcome.changes}
    assert reasons["--tp-comm-overlap"] == "it needs sequence parallelism"
    assert reasons["--defer-embedding-wgrad-compute"] == "the layout has no pipeline"


@pytest.mark.parametrize(
    "words",
    [
        ("--hybrid-override-pattern", "M-M*"),
        ("--heterogeneous-layers-config-encoded-json", "{}"),
        ("--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
    ],
)
def test_models_that_cannot_be_planned_are_refused_by_name(words: tuple[str, ...]) -> None:
    with pytest.raises(UnplannableModelError, match=r"--[a-z-]+|mamba"):
        decided([*SMALL, *words])


def test_a_tokenizer_that_cannot_be_built_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from nest_megatron.integrations.megatron_lm import planning as arguments

    def broken() -> object:
        raise FileNotFoundError("vocab.json")

    monkeypatch.setattr(arguments, "_build_tokenizer", lambda: lambda _: broken())
    with pytest.raises(UserInputError, match=r"NullTokenizer.*vocab\.json"):
        decided(SMALL)


def test_a_value_that_megatron_changed_is_noticed() -> None:
    args, _, outcome = decided([*SMALL, "--tensor-model-parallel-size", "2"])
    apply(args, outcome.decision)
    plan = outcome.decision.plan
    validated(args, plan.layout.dims.data_parallel_size, 64)
    args.sequence_parallel = False
    with pytest.raises(NestError, match="sequence_parallel is False"):
        require_planned(args, plan)


def test_new_releases_are_read_as_the_newest_known() -> None:
    releases = ("0.15.3", "0.16", "0.17.0rc1", "0.19.2", "0.20.0", "0.31", "1.0", "9")
    known = ["0.15", "0.16", "0.17", "0.19", "0.20", "0.20", "0.20", "0.20"]
    assert [known_release(release) for release in releases] == known
    for older in ("0.14.0", "0"):
        with pytest.raises(UserInputError, match=r"0\.15 is the oldest release"):
            known_release(older)
    for text in ("main", "9x", "-1", ""):
        with pytest.raises(UserInputError, match=r"a number such as 0\.19. Use one of 0\.15, "):
            known_release(text)


def test_script_defaults_fill_what_is_not_given() -> None:
    args = namespace(SMALL)
    args.tokenizer_type = None
    defaults = {"tokenizer_type": "GPT2BPETokenizer"}
    command = command_of(args, SMALL, "pretrain_gpt.py", "0.16", defaults)
    assert command.values["tokenizer_type"] == "GPT2BPETokenizer"


def test_the_table_of_writable_arguments_is_frozen() -> None:
    """A plan touches nothing else; a new entry is a decision, so it is written here as well."""
    recorded = Path(__file__).with_name("writable.txt").read_text(encoding="utf-8").split()
    assert sorted(WRITABLE) == recorded
