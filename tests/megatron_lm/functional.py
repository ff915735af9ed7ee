"""Megatron-LM's own functional tests as jobs: each planned, written, and asked of Megatron."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from nest_megatron.config.compose import compose
from nest_megatron.config.job import ReadCommand
from nest_megatron.config.overrides import parse
from nest_megatron.errors import NestError, UserInputError
from nest_megatron.integrations.megatron_lm.attach import LAUNCHER, with_command
from nest_megatron.integrations.megatron_lm.parser import read_command
from nest_megatron.integrations.megatron_lm.planning import job_request
from nest_megatron.integrations.megatron_lm.read import job_of, read_job
from nest_megatron.integrations.megatron_lm.search_space import kept_flags
from nest_megatron.layout.rulebook.facts import known_release
from nest_megatron.planner import NoPlan, plan
from tests.megatron_lm.ask import ask_megatron

#: Families of tests, as their folders are called; what trains in the first is nearly all planned.
DECODERS = ("gpt", "moe", "mixtral", "hybrid", "nemotron")
FAMILIES = (*DECODERS, "bert", "t5", "multimodal-llava", "mimo")
#: Why a configuration is no job of this survey, by its ``MODE`` or its family.
_APART = {
    "inference": "inference",
    "rl": "reinforcement learning, which generates between its steps",
    "gpt-nemo": "NeMo's own command line, whose recipes have a page of their own",
    "common": "no training",
}
_CASES = Path("tests/functional_tests/test_cases")
_RECIPES = Path("tests/test_utils/recipes")
#: Values of what the tests take from their environment; all others are paths.
_STANDS_FOR = {"--seed": "1", "--tokenizer-type": "TikTokenizer"}
#: Platforms, and what names them in a test that no recipe launches.
_CLUSTERS = {"gb200": "gb200_nvl72", "b200": "b200", "h100": "dgx_h100"}
_NAMED = {"gb_?200": "gb200", "b200": "b200"}
_MAX_SECONDS = 20.0
#: Rows of the vocabulary where they come from a tokenizer's files.
_ROWS = 131_072


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One configuration, as its test runs it."""

    name: str
    script: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    cluster: str
    num_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A job's arguments under a plan, or why there is none.

    Args:
        refused: our own word, where nothing was planned.
    """

    job: Job
    argv: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    command: ReadCommand | None = None
    refused: str = ""

    def case(self) -> dict[str, Any]:
        """As ``ask_megatron`` takes it."""
        return _case(self.argv, self.job, {**self.job.environment, **self.environment})


def as_it_stands(job: Job) -> dict[str, Any]:
    """A job's own arguments, as ``ask_megatron`` takes them."""
    return _case(job.argv, job, job.environment)


def _case(argv: tuple[str, ...], job: Job, environment: Mapping[str, str | None]) -> dict[str, Any]:
    return {
        "script": job.script,
        "argv": list(argv),
        "world_size": job.num_gpus,
        "max_connections": environment.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "architecture": 10 if "b200" in job.cluster else 9,
        "environment": {
            name: value
            for name, value in environment.items()
            if value is not None and name != "CUDA_DEVICE_MAX_CONNECTIONS"
        },
    }


def jobs(home: Path) -> Iterator[Job]:
    """The configurations that train, in a checkout of Megatron-LM."""
    for family, name, fields in _cases(home):
        if not _reason_apart(family, fields):
            yield _job(home, family, name, fields)


def apart(home: Path) -> Mapping[str, int]:
    """How many configurations are no jobs of this survey, by the reason."""
    return Counter(
        reason for family, _, fields in _cases(home) if (reason := _reason_apart(family, fields))
    )


def _cases(home: Path) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Family, name and contents of every configuration."""
    for path in sorted((home / _CASES).glob("*/*/model_config.yaml")):
        name = path.parent
        yield name.parent.name, name.name, yaml.safe_load(path.read_text(encoding="utf-8"))


def _reason_apart(family: str, fields: Mapping[str, Any]) -> str:
    trains = any(name.startswith("--train-") for name in fields.get("MODEL_ARGS") or {})
    named = _APART.get(family) or _APART.get(fields.get("MODE", ""))
    return named or ("" if trains and family in FAMILIES else _APART["common"])


def _job(home: Path, family: str, name: str, fields: Mapping[str, Any]) -> Job:
    named = next((at for word, at in _NAMED.items() if re.search(word, name)), "h100")
    recipe = _recipes(home).get(name)
    own = (fields.get("MODEL_ENV_VARS") or {}).get("MODEL_ARGS") or {}
    gpus = own.get("GPUS_PER_NODE") or (recipe and recipe.num_gpus)
    variables = {
        key: str(value)
        for key, value in (fields.get("ENV_VARS") or {}).items()
        if value is not None
    }
    return Job(
        name=f"{family}/{name}",
        script=recipe.script if recipe else _script(home, family, fields["MODEL_ARGS"]),
        argv=tuple(_argv(fields["MODEL_ARGS"])),
        environment=variables,
        cluster=_CLUSTERS[recipe.platform if recipe else named],
        num_gpus=gpus or _least_gpus(fields["MODEL_ARGS"]),
    )


def _argv(arguments: Mapping[str, Any]) -> Iterator[str]:
    """A mapping of flags as the tests' shell script turns it into words."""
    for flag, value in arguments.items():
        stands_for = _STANDS_FOR.get(flag, "/data")
        text = re.sub(r"\$\{\w+\}", stands_for, str(value))
        text = text.replace("\\", "")  # escapes for the shell
        if value is True or text == "true":
            yield flag
        elif text.startswith("[") and text.endswith("]"):
            yield from (flag, *text[1:-1].replace(",", " ").replace("'", "").split())
        elif "sizes" in flag:
            yield from (flag, *text.split())
        else:
            yield from (flag, text)  # the script quotes what has spaces


def _least_gpus(arguments: Mapping[str, Any]) -> int:
    """GPUs of a test that no recipe launches: whole nodes that its degrees divide."""

    def size(name: str) -> int:
        return int(arguments.get(f"--{name}-size", 1))

    tp, pp = size("tensor-model-parallel"), size("pipeline-model-parallel")
    etp = int(arguments.get("--expert-tensor-parallel-size", tp))
    experts = etp * size("expert-model-parallel") * pp
    return math.lcm(8, tp * pp * size("context-parallel"), experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recipe:
    """What launches a test."""

    family: str
    platform: str
    num_gpus: int
    script: str


@cache
def _recipes(home: Path) -> Mapping[str, _Recipe]:
    """The recipe of each test that trains; of two platforms the H100."""
    found: dict[str, _Recipe] = {}
    for platform, folder in (("gb200", "gb200"), ("h100", "h100"), ("h100", "")):  # 0.15 has none
        for path in sorted((home / _RECIPES / folder).glob("*.yaml")):
            fields = yaml.safe_load(path.read_text(encoding="utf-8"))
            spec = fields["spec"]
            if "model" not in spec:  # it builds a package
                continue
            script = re.search(r"TRAINING_SCRIPT_PATH=(\S+\.py)", spec.get("script", ""))
            recipe = _Recipe(
                family=spec["model"],
                platform=platform,
                num_gpus=int(spec.get("nodes", 1)) * int(spec.get("gpus", 8)),
                script=script[1] if script else "",
            )
            cases = (product.get("test_case") or () for product in fields.get("products") or ())
            found |= dict.fromkeys((name for names in cases for name in names), recipe)
    return found


def _script(home: Path, family: str, arguments: Mapping[str, Any]) -> str:
    """What trains a test that no recipe launches: the script of its family's others."""
    if any(name.startswith("--hybrid-") for name in arguments):
        scripts = ("pretrain_hybrid.py", "pretrain_mamba.py")
        return next(name for name in scripts if (home / name).exists())
    others = Counter(
        each.script
        for each in _recipes(home).values()
        if each.family == family and "inference" not in each.script and "rl" not in each.script
    )
    return others.most_common(1)[0][0] if others else "pretrain_gpt.py"


def written(job: Job, version: str) -> Written:
    """Plan a job with nothing freed, and write its arguments."""
    settings = [f"cluster={job.cluster}", f"search.max_seconds={_MAX_SECONDS}"]
    composed = compose(parse([*settings, "search.num_alternatives=0"]))
    launcher = ["torchrun", "--nproc-per-node", str(job.num_gpus)]
    try:
        command = read_command([*launcher, job.script, *job.argv], version)
        try:
            read = read_job(command)
        except UserInputError as error:
            if error.what != "--vocab-size":
                raise
            sized = {"tokenizer_type": "TikTokenizer", "vocab_size": _ROWS}
            read = job_of(command, {**command.values, **sized})
        cluster = _cluster(composed, job)
        tp = command.values["tensor_model_parallel_size"]
        read = dataclasses.replace(read, spec=read.spec.with_padded_vocab(tp))
        request = job_request(read, cluster, composed)
        found = plan(request)
        if isinstance(found, NoPlan):
            return Written(job=job, command=command, refused="nothing fits")
        kept = kept_flags(read, request, composed)
        launch = with_command(found, command, kept=kept)[0].launch[LAUNCHER]
    except NestError as error:
        return Written(job=job, refused=" ".join(str(error).split()))
    return Written(job=job, argv=launch.argv, environment=launch.environment, command=command)


def _cluster(composed: Any, job: Job) -> Any:
    from nest_megatron.config.catalogue import read_cluster

    return read_cluster(composed, job.num_gpus)


def home() -> Path | None:
    """The checkout that ``MEGATRON_LM_HOME`` names."""
    named = os.environ.get("MEGATRON_LM_HOME")
    return Path(named) if named else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What became of every job of a checkout.

    Args:
        written: jobs that were planned.
        not_planned: our own refusals, by job.
        refused: Megatron's word on arguments that we wrote, by job.
        refused_as_they_stand: its word on a job's own arguments.
        faults: our own errors, by job; a user's mistake is none.
        apart: configurations that are no jobs, by the reason.
    """

    version: str
    written: tuple[str, ...]
    not_planned: Mapping[str, str]
    refused: Mapping[str, str]
    refused_as_they_stand: Mapping[str, str]
    faults: Mapping[str, str]
    apart: Mapping[str, int]

    def possible(self, families: Collection[str]) -> tuple[str, ...]:
        """Jobs of some families that Megatron accepts as they stand."""
        names = (*self.written, *self.not_planned)
        return tuple(
            name
            for name in names
            if name not in self.refused_as_they_stand and name.partition("/")[0] in families
        )

    @property
    def accepted(self) -> frozenset[str]:
        """Jobs that were planned and that Megatron accepts so."""
        return frozenset(self.written) - frozenset(self.refused)


def survey(checkout: Path) -> Survey:
    """Plan every job of a checkout, and ask its Megatron about each before and after."""
    version = known_release(_release(checkout))
    outcomes = [written(job, version) for job in jobs(checkout)]
    planned = [each for each in outcomes if not each.refused]
    answered = ask_megatron(
        [*(each.case() for each in planned), *(as_it_stands(each.job) for each in outcomes)]
    )
    answers = answered["answers"]
    after = zip((each.job.name for each in planned), answers, strict=False)
    before = zip((each.job.name for each in outcomes), answers[len(planned) :], strict=True)
    return Survey(
        version=answered["version"],
        written=tuple(each.job.name for each in planned),
        not_planned={each.job.name: each.refused for each in outcomes if each.refused},
        refused={name: said["refused"] for name, said in after if "refused" in said},
        refused_as_they_stand={name: said["refused"] for name, said in before if "refused" in said},
        faults={each.job.name: each.refused for each in outcomes if "bug of nest" in each.refused},
        apart=apart(checkout),
    )


def _release(checkout: Path) -> str:
    """The release of a checkout, from the file that states it."""
    text = (checkout / "megatron/core/package_info.py").read_text(encoding="utf-8")
    numbers = (re.search(rf"^{name} = (\d+)", text, re.M) for name in ("MAJOR", "MINOR", "PATCH"))
    return ".".join(number[1] for number in numbers if number)
