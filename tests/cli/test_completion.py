"""What the shells offer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nest_megatron.cli.complete import VALUES, candidates
from nest_megatron.cluster.records import Precision
from nest_megatron.config.overrides import parse
from nest_megatron.layout.dims import RankOrder
from nest_megatron.layout.recompute import RecomputeGranularity, RecomputeMethod
from nest_megatron.layout.zero import ZeroStage
from nest_megatron.solver.backend import Backend
from nest_megatron.solver.space import DEGREES
from tests.cli.runs import environment, run

OFFERED = {
    "pl": "plan",
    "plan mod": "model=",
    "plan model = llama3_7": "llama3_70b",
    "plan model =": "deepseek_v3",
    "plan model = llama3_8b cluster = dgx_h": "dgx_h100",
    "plan parallel.tensor": "parallel.tensor_model_parallel_size=",
    "plan parallel.tensor_model_parallel_size =": "8",
    "plan search.max_exp": "search.max_expert_model_parallel_size=",
    "plan train.precision = f": "fp8",
    "plan profile.mode = req": "require",
    "profiles ver": "verify",
    "plan --fr": "--from",
    "plan --free recompute_g": "recompute_granularity",
    "models qwen3_3": "qwen3_30b_a3b",
    "completion z": "zsh",
}


def test_bash_offers(tmp_path: Path) -> None:
    """With bash itself, which cuts words at ``=``."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash on this machine")
    program = tmp_path / "nest-megatron"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m nest_megatron "$@"\n')
    program.chmod(0o755)
    script = tmp_path / "try.sh"
    tries = (
        f"COMP_WORDS=(nest-megatron {line})\nCOMP_CWORD=$((${{#COMP_WORDS[@]}}-1))\n"
        f'_nest_megatron_completion {program} 2>/dev/null\necho "${{COMPREPLY[*]}}"\n'
        for line in OFFERED
    )
    script.write_text(f'eval "$({program} completion bash)"\n{"".join(tries)}')
    done = subprocess.run(
        [bash, str(script)], capture_output=True, text=True, env=environment(), check=True
    )
    for (line, offered), said in zip(OFFERED.items(), done.stdout.splitlines(), strict=True):
        assert offered in said.split(), line


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_a_script(shell: str) -> None:
    done = run("completion", shell)
    assert done.code == 0
    assert "_NEST_MEGATRON_COMPLETE" in done.out


def test_offered_keys_are_accepted() -> None:
    keys = candidates("")
    parse(f"{key}null" for key in keys)
    assert all(f"search.max_{name}=" in keys for name in DEGREES)


def test_offered_values_are_those_of_the_records() -> None:
    kinds = {
        "train.precision": Precision,
        "parallel.rank_order": RankOrder,
        "parallel.zero_stage": ZeroStage,
        "parallel.recompute_granularity": RecomputeGranularity,
        "parallel.recompute_method": RecomputeMethod,
        "search.backend": Backend,
    }
    for key, kind in kinds.items():
        assert set(VALUES[key]) == {str(member.value) for member in kind}, key
