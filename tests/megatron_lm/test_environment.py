"""``.ci/megatron_lm``: what stands in the environment that it runs the tests in."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / ".ci" / "megatron_lm"


def test_the_index_helper_is_named_for_the_python_that_runs_the_jobs(tmp_path: Path) -> None:
    """Megatron's Makefile asks the first ``python3-config``, here one of another Python."""
    venv, machine = tmp_path / "venv", tmp_path / "machine"
    asks = 'case $* in "-m pytest"*) python3-config --extension-suffix ;; "-m pip"*) ;;'
    write(venv / "bin/python", f'{asks} *) exec {sys.executable} "$@" ;; esac')
    write(machine / "python3-config", "echo .of-another-python.so")
    (venv / "complete").touch()
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path)],
        env={
            **os.environ,
            "MEGATRON_LM_VENV": str(venv),
            "PATH": f"{machine}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == sysconfig.get_config_var("EXT_SUFFIX")


def write(path: Path, commands: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{commands}\n", encoding="utf-8")
    path.chmod(0o755)
