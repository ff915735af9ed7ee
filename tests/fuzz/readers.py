"""The readers, each with sound documents to start from."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import pickle
import shlex
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from tests.fuzz.mutate import EDGES, as_text, characters, tree

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
CATALOGUE = ROOT / "hydra_configs"
JOB = (
    "torchrun --nproc-per-node 8 --nnodes 4 pretrain_gpt.py --num-layers 8 --hidden-size 1024 "
    "--num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 --vocab-size 32000 "
    "--bf16 --global-batch-size 64 --micro-batch-size 1 --tensor-model-parallel-size 2 "
    "--pipeline-model-parallel-size 2 --num-experts 8 --moe-layer-freq ([0]*2+[1]*6) "
    "--recompute-granularity selective --recompute-modules core_attn --swiglu "
    "--use-distributed-optimizer --fp8-format hybrid --num-layers-per-virtual-pipeline-stage 2"
)
SETTINGS = (
    *("model=llama3_8b", "cluster=dgx_h100", "cluster.num_gpus=8", "train.global_batch_size=64"),
    *("train.precision=bf16", "parallel.tensor_model_parallel_size=2", "parallel.zero_stage=1"),
    *("parallel.recompute_modules=[mlp,layernorm]", "search.max_seconds=1", "memory.margin=0.04"),
    *(
        "cluster.levels.0.latency_s=1e-6",
        "model.num_layers=4",
        "~model.source",
        "cost.dp_overlap=1",
    ),
    *("cluster.oversubscription=1,2", "train.seq_length=range(1,5)", "out='x y.yaml'"),
    *("checks.plausibility=off", "cluster.accelerator=h100_sxm_80gb", "search.num_alternatives=0"),
)
HUGGING_FACE = (
    {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5}
    | {"rope_theta": 500000.0, "tie_word_embeddings": False, "architectures": ["LlamaForCausalLM"]}
    | {"rope_scaling": {"factor": 8.0, "rope_type": "llama3"}, "attention_bias": False},
    {"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 32000}
    | {"num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8}
    | {"max_position_embeddings": 32768, "hidden_act": "silu", "num_local_experts": 8}
    | {"num_experts_per_tok": 2, "sliding_window": None, "tie_word_embeddings": False},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A function that reads what somebody else wrote.

    Args:
        read: takes a text; its only errors are ``NestError``.
        seeds: sound texts, made when they are needed.
        kind: ``json`` or ``yaml`` where values of the parsed tree are changed as well.
        share: of all cases of a run.
    """

    name: str
    read: Callable[[str], object]
    seeds: Callable[[], tuple[str, ...]]
    kind: str | None = None
    share: float = 1.0
    trees: list[Any] = field(default_factory=list)

    def case(self, random: Random, seeds: tuple[str, ...]) -> str:
        """A broken text."""
        text = random.choice(seeds)
        if self.kind is not None and random.random() < 0.6:
            if not self.trees:
                load = json.loads if self.kind == "json" else _yaml
                self.trees.extend(load(seed) for seed in seeds)
            text = as_text(tree(random.choice(self.trees), random), self.kind)
            if random.random() < 0.8:
                return text
        return characters(text, random.choice(seeds), random)


def _yaml(text: str) -> Any:
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


@functools.cache
def _scratch() -> Path:
    import os
    import tempfile

    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else None))


def _file(text: str, name: str) -> Path:
    path = _scratch() / name
    path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
    return path


@functools.cache
def _plans() -> tuple[str, ...]:
    from nest_megatron.cli import main

    path = _scratch() / "seed.yaml"
    small = ("cluster=dgx_h100", "cluster.num_gpus=8", "search.num_alternatives=1")
    texts = []
    for model in ("llama3_8b", "mixtral_8x1b"):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            main(["plan", f"model={model}", *small, f"out={path}"])
        texts.append(path.read_text(encoding="utf-8"))
    return tuple(texts)


def _plan(text: str) -> object:
    from nest_megatron.layout import plan_file
    from nest_megatron.layout.plan import ParallelPlan
    from nest_megatron.plain import from_plain

    fields = plan_file.parse(text, "plan")
    origin = fields.get("provenance")
    if isinstance(origin, dict):
        origin = {key: value for key, value in origin.items() if key != "checksum"}
    with contextlib.suppress(ValueError):
        # what an attacker does: a plan of other contents with the checksum that belongs to them
        plan_file.load(plan_file.dump(from_plain(ParallelPlan, {**fields, "provenance": origin})))
    return plan_file.from_fields(fields, "plan")


def _pins() -> tuple[str, ...]:
    from nest_megatron.layout import plan_file
    from nest_megatron.planner.pins import Pin, PinnedPlan, pinned_text

    pin = Pin(
        created="2026-01-01", by="ada", note="", nest_megatron_version="1", megatron_lm="0.20"
    )
    return tuple(pinned_text(PinnedPlan(pin=pin, plan=plan_file.load(t))) for t in _plans())


def _pin(text: str) -> object:
    from nest_megatron.planner import pins as pinning

    body = text.partition("\n")[2]
    sealed = f"{pinning._HEAD}{pinning._sum(body)}\n{body}"  # as an attacker would
    path = _file(sealed, "pin.yaml")
    return pinning.read_pinned(path), pinning.read_plan(_file(text, "pin.yaml"))


def _entries(group: str, count: int) -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted((CATALOGUE / group).glob("*.yaml"))[:count])


def _model(text: str) -> object:
    from nest_megatron.config.catalogue import require_plausible
    from nest_megatron.config.compose import read_mapping
    from nest_megatron.model.catalogue import spec_from_mapping
    from nest_megatron.model.parameters import total_parameters

    found: Any = read_mapping("model", _file(text, "model.yaml"))
    spec = spec_from_mapping(found)
    require_plausible(spec, None)
    return total_parameters(spec)


@functools.cache
def _cluster_seeds() -> tuple[str, ...]:
    seeds = []
    for path in sorted((CATALOGUE / "cluster").glob("*.yaml"))[:6]:
        fields = _yaml(path.read_text())
        for choice in fields.pop("defaults", ()):
            if isinstance(choice, dict):
                device = CATALOGUE / "accelerator" / f"{next(iter(choice.values()))}.yaml"
                fields["accelerator"] = _yaml(device.read_text())
        seeds.append(yaml.safe_dump(fields))
    return tuple(seeds)


def _cluster(text: str) -> object:
    from nest_megatron.cluster.records import cluster_from_mapping
    from nest_megatron.config.catalogue import require_plausible
    from nest_megatron.config.compose import read_mapping

    found: Any = read_mapping("cluster", _file(text, "cluster.yaml"))
    cluster = cluster_from_mapping(found)
    require_plausible(None, cluster)
    return cluster.describe()


def _hugging_face(text: str) -> object:
    from nest_megatron.config.compose import _model_file

    return _model_file(_file(text, "config.json"), [])


def _instance_seeds() -> tuple[str, ...]:
    return ((TESTS / "research/nest_artifact/data/bertlarge_128.json").read_text(),)


def _instance(text: str) -> object:
    from nest_megatron.research.nest_artifact.files import read_instance

    return read_instance(_file(text, "instance.json"))


def _table_seeds() -> tuple[str, ...]:
    files = [*(TESTS / "validation/data").glob("*.csv"), *(TESTS / "published/data").glob("*.csv")]
    return tuple("".join(p.read_text().splitlines(keepends=True)[:6]) for p in sorted(files))


@functools.cache
def _book() -> Any:
    from nest_megatron.validation.models import ModelBook

    return ModelBook.load()


def _table(text: str) -> object:
    from nest_megatron.validation.models import mapping_of, read_table
    from nest_megatron.validation.rows import read_rows

    path = _file(text, "table.csv")
    with contextlib.suppress(ValueError):
        for row in read_table(path):
            mapping_of(row, None)
    return read_rows(path)


def _log_seeds() -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted((TESTS / "profile/data").glob("*.log")))


def _log(text: str) -> object:
    from nest_megatron.cluster.records import CollectiveKind
    from nest_megatron.profile.nccl_tests import read_logs

    return read_logs([("log", text)], CollectiveKind.ALL_REDUCE)


def _profile_seeds() -> tuple[str, ...]:
    from nest_megatron.profile import network, store
    from tests.profile.networks import profile_of, samples
    from tests.profile.profiles import profile, timing

    return store.dump(profile([timing()])), network.dump(profile_of(samples()[:6]))


def _profile(text: str) -> object:
    from nest_megatron.profile import network, store

    with contextlib.suppress(ValueError):
        network.load(text)
    return store.load(text, "profile")


def _command(text: str) -> object:
    from nest_megatron.integrations.megatron_lm.parser import read_command
    from nest_megatron.integrations.megatron_lm.read import read_job

    return read_job(read_command(text, "0.16"))


def _overrides(text: str) -> object:
    from nest_megatron.config.launch import read_launch, read_words
    from nest_megatron.config.overrides import parse, split_launcher, swept, typed_value

    words = text.split("\n")
    with contextlib.suppress(ValueError):
        read_launch(read_words([f"nest.{word}" for word in words]))
    own, _ = split_launcher(words)
    settings = parse(own)
    several = swept(settings)
    return several, [typed_value(each, each.key) for each in settings if each.key not in several]


def _policies() -> tuple[str, ...]:
    shipped = (ROOT / "recipes" / "slurm" / "policy.yaml").read_text(encoding="utf-8")
    return (shipped, json.dumps(yaml.safe_load(shipped)))


def _policy(text: str) -> object:
    from nest_megatron.config.policy import VARIABLE, read_policy

    path = _file(text, "policy.yaml")
    path.chmod(0o600)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(VARIABLE, str(path))
        return read_policy()


def _states() -> tuple[str, ...]:
    """Pickles of what is not sharded, a character for a byte."""
    args = Namespace(num_layers=2, hidden_size=64, tensor_model_parallel_size=2, swiglu=True)
    state = {"args": args, "content_metadata": {"a": ["b"]}, "optimizer": {0: {}}, "at": (1, 2.0)}
    return tuple(pickle.dumps(state, protocol=p).decode("latin-1") for p in (0, 2, 4))


def _state(text: str) -> object:
    from nest_megatron.integrations.megatron_lm.checkpoint import read_checkpoint

    folder = _scratch() / "checkpoint" / "iter_0000001"
    folder.mkdir(parents=True, exist_ok=True)
    _file("1", "checkpoint/latest_checkpointed_iteration.txt")
    _file('{"sharded_backend": "torch_dist"}', "checkpoint/iter_0000001/metadata.json")
    with zipfile.ZipFile(folder / "common.pt", "w") as archive:
        archive.writestr("x/data.pkl", text.encode("latin-1", errors="replace"))
    return read_checkpoint({"load": str(folder.parent)})


def _whole(text: str) -> object:
    """The program from its words: composed, searched, printed."""
    from nest_megatron.cli import main

    words = [word for word in text.split("\n") if word and not word.startswith("out")]
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = main([*words, "search.max_seconds=1", "cluster.num_gpus=8"])
    if code not in (0, 1, 2, 3):
        raise AssertionError(f"exit code {code}: {err.getvalue()}")
    return code


def _whole_seeds() -> tuple[str, ...]:
    job = "\n".join(["model=mixtral_8x1b", "cluster=dgx_h100"])
    command = shlex.join(shlex.split(JOB.partition("torchrun ")[2].partition("pretrain")[2]))
    return (
        f"plan\n{job}\n" + "\n".join(SETTINGS[3:13]),
        f"estimate\n{job}\nparallel.tensor_model_parallel_size=2\ntrain.micro_batch_size=1",
        f"plan\n--from\npretrain{command}\ncluster=dgx_h100\n--free\nall",
        f"plan\n--json\n{job}\ncluster.levels.0.bandwidth_bytes_per_s=25e9\nmodel.num_layers=4",
    )


READERS = (
    Reader(name="plan file", read=_plan, seeds=_plans, kind="yaml", share=0.15),
    Reader(name="pinned plan", read=_pin, seeds=_pins, share=0.1),
    Reader(name="model", read=_model, seeds=lambda: _entries("model", 40), kind="yaml", share=0.3),
    Reader(name="cluster", read=_cluster, seeds=_cluster_seeds, kind="yaml", share=0.15),
    Reader(
        name="Hugging Face config.json",
        read=_hugging_face,
        seeds=lambda: tuple(map(json.dumps, HUGGING_FACE)),
        kind="json",
        share=4.0,
    ),
    Reader(name="artifact instance", read=_instance, seeds=_instance_seeds, kind="json", share=0.1),
    Reader(name="CSV tables", read=_table, seeds=_table_seeds, share=4.0),
    Reader(name="nccl-tests log", read=_log, seeds=_log_seeds, share=1.5),
    Reader(name="profile", read=_profile, seeds=_profile_seeds, share=0.1),
    Reader(name="policy", read=_policy, seeds=_policies, kind="yaml", share=0.2),
    Reader(name="checkpoint", read=_state, seeds=_states, share=1.0),
    Reader(name="training command", read=_command, seeds=lambda: (JOB,), share=0.2),
    Reader(
        name="settings",
        read=_overrides,
        seeds=lambda: (*SETTINGS, "\n".join(SETTINGS), *EDGES),
        share=1.0,
    ),
    Reader(name="whole program", read=_whole, seeds=_whole_seeds, share=0.002),
)
