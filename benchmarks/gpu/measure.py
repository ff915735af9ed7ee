"""Times layers and trains jobs on the GPU of this machine, one after the other, until time ends.

Each entry of ``jobs.yaml`` is a process of its own with a limit; what it took is added to
``results.jsonl`` as soon as it ends, so that nothing is lost when time ends. ``runs.jsonl`` is what
the recorder of ``+nest=auto`` keeps of each job (docs/history.md); profiles are exported beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from nest_megatron.history import store as history
from nest_megatron.profile import store as profiles

#: Seconds after which a process is ended, and those that must be left for one to begin.
_JOB_S, _START_S = 90.0, 25.0
#: What the job's plan may not touch: it runs as its flags say.
_AS_TYPED = ("+nest=auto", "nest.keep=[all]", "nest.watch=8", "nest.search.max_seconds=10")


def main() -> int:
    """Do what there is time for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--jobs", type=Path, default=Path(__file__).with_name("jobs.yaml"))
    parser.add_argument("--engine", action="store_true", help="only what Transformer Engine runs")
    parser.add_argument("--facts", action="store_true", help="print the machine's facts, and end")
    options = parser.parse_args()
    if options.facts:
        print(json.dumps(facts()))
        return 0
    session = Session(options.out, time.monotonic() + options.seconds, options.jobs)
    return session.run(engine_only=options.engine)


class Session:
    """The entries of a file of jobs, and where their results go.

    Args:
        ends: moment (``time.monotonic``) after which nothing may run.
    """

    def __init__(self, out: Path, ends: float, jobs: Path) -> None:
        self.out, self.ends = out, ends
        self.jobs = yaml.safe_load(jobs.read_text(encoding="utf-8"))
        self.engine = importlib.util.find_spec("transformer_engine") is not None
        self.runs = set[str]()  # of the history, each told of with its entry
        out.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            history.VARIABLE: str(out / "runs.jsonl"),
            profiles.FOLDER_VARIABLE: str(out.resolve() / ".profiles"),
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def run(self, *, engine_only: bool) -> int:
        """All entries; the exit code says whether every one that began came to its end."""
        codes = [self.read_facts()]
        for entry in self.jobs["work"]:
            if engine_only and not entry.get("transformer_engine"):
                continue
            if entry.get("transformer_engine") and not self.engine:
                self.keep({**entry, "skipped": "transformer_engine is not installed"})
            elif self.ends - time.monotonic() < entry.get("seconds", _START_S):
                self.keep({**entry, "skipped": "too little time is left"})
            else:
                codes.append(self.profile(entry) if "profile" in entry else self.train(entry))
        return int(any(codes))

    def read_facts(self) -> int:
        """What the machine is, in a process that leaves nothing on the device."""
        code, text, seconds = self.process([sys.executable, __file__, "--facts", "--out", "."])
        found = json.loads(text.splitlines()[-1]) if code == 0 else {"error": text[-2000:]}
        self.keep({"facts": found, "took_s": seconds, "code": code})
        return code

    def profile(self, entry: Mapping[str, Any]) -> int:
        """Time the blocks of a model, and export the profile."""
        kind = "transformer_engine" if entry.get("transformer_engine") else "local"
        words = [f"model={entry['profile']}", *entry["settings"], "--implementation", kind]
        command = [sys.executable, "-m", "nest_megatron", "profile", *words, "--json"]
        limit = min(float(entry["seconds"]), self.ends - time.monotonic() - _START_S / 2)
        command += ["--max-seconds", f"{limit:.0f}"]
        code, text, seconds = self.process(command, limit_s=limit + _JOB_S)
        found: dict[str, Any] = {**entry, "took_s": seconds, "code": code}
        if code == 0:
            told = json.loads(text[text.index("{") :])
            found["file"] = f"{told['profile']}-{kind}.yaml"
            found |= {name: told[name] for name in ("seconds", "skipped", "not_begun")}
            export = ["profiles", "export", told["profile"], "--out", str(self.out / found["file"])]
            code, text, _ = self.process(
                [sys.executable, "-m", "nest_megatron", *export, "--force"]
            )
        if code:
            found["error"] = text[-2000:]
        self.keep(found)
        return code

    def train(self, entry: Mapping[str, Any]) -> int:
        """Train a job under the recorder, in the layout that its flags say."""
        words = command_words(self.jobs, entry)
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        nest = [*_AS_TYPED, *self.jobs.get("nest", [])]
        if "--recompute-granularity" not in words:
            nest.append("nest.parallel.recompute_granularity=none")
        code, text, seconds = self.process(
            [sys.executable, "-m", "nest_megatron", *words, *nest],
            cwd=os.environ["MEGATRON_LM_HOME"],
            variables={**alone, "MASTER_PORT": "29431"},
        )
        found = {**entry, "command": shlex.join(words), "took_s": seconds, "code": code}
        new = [run.id for run in history.read(self.out / "runs.jsonl") if run.id not in self.runs]
        self.runs.update(new)
        found["runs"] = new
        if code:
            found["error"] = text[-2000:]
        self.keep(found)
        return code

    def process(
        self,
        command: Sequence[str],
        *,
        limit_s: float = _JOB_S,
        cwd: str | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, str, float]:
        """Run a process to its end or its limit; its code, what it printed, and its seconds."""
        begun = time.monotonic()
        limit_s = max(1.0, min(limit_s, self.ends - begun))
        with subprocess.Popen(
            command,
            cwd=cwd,
            env={**self.environment, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as child:
            try:
                text, _ = child.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)
                text, _ = child.communicate()
                text += f"\nended after {limit_s:.0f} s"
        with (self.out / "log.txt").open("a", encoding="utf-8") as log:
            log.write(f"$ {shlex.join(command)}\n{text}\n")
        return child.returncode, text, time.monotonic() - begun

    def keep(self, found: Mapping[str, Any]) -> None:
        """Add a result to the file, and say it."""
        line = json.dumps(found)
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as results:
            results.write(f"{line}\n")
        print(line[:400], flush=True)


def command_words(jobs: Mapping[str, Any], entry: Mapping[str, Any]) -> list[str]:
    """The job of an entry as it would be typed behind ``python``."""
    flags = [jobs["flags"], jobs["models"][entry["model"]], entry["flags"]]
    if not entry.get("transformer_engine"):
        flags.append(jobs["local"])
    return ["pretrain_gpt.py", "--num-layers", str(entry["layers"]), *shlex.split(" ".join(flags))]


def facts() -> dict[str, Any]:
    """The machine, and bytes of its device that are taken before a job has any tensor.

    ``context`` is CUDA's own, ``matrix_product`` what a first product of matrices adds (kernels and
    cuBLAS's workspace, which is ``workspace`` in the allocator), ``nccl`` a group and a first sum.
    """
    import torch
    import torch.distributed as dist

    from nest_megatron.megatron_core.stage import Where
    from nest_megatron.model.execution import Implementation
    from nest_megatron.plain import to_plain
    from nest_megatron.profile.session import this_machine, with_clocks

    def taken() -> int:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    found = {"others": _used_by_others()}
    torch.cuda.init()
    before = taken()
    found["context"] = before - found["others"]
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
    held = torch.cuda.memory_reserved()
    product = matrix @ matrix
    found["workspace"] = torch.cuda.memory_reserved() - held - product.nbytes
    found["matrix_product"] = taken() - before - torch.cuda.memory_reserved()
    before = taken()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(product)
    found["nccl"] = taken() - before
    dist.destroy_process_group()
    machine = with_clocks(this_machine(Where.GPU, Implementation.LOCAL))
    return {"machine": to_plain(machine), "bytes": found, "python": sys.version.split()[0]}


def _used_by_others() -> int:
    """Bytes of the device in use before this process has touched it, the driver's own apart."""
    import pynvml

    pynvml.nvmlInit()
    device, version = pynvml.nvmlDeviceGetHandleByIndex(0), pynvml.nvmlMemory_v2
    used = pynvml.nvmlDeviceGetMemoryInfo(device, version=version).used
    pynvml.nvmlShutdown()
    return int(used)


if __name__ == "__main__":
    sys.exit(main())
