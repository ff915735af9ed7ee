"""Ask a Megatron-LM checkout what its own parser, validation and groups say to our flags."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

from nest_megatron.integrations.megatron_lm.write import environment, model_argv, parallel_argv
from nest_megatron.layout.rulebook.facts import LaunchRequest, known_release
from nest_megatron.layout.rulebook.schedule import decoder_layers, mtp_chunk
from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.model.spec import TransformerSpec
from tests.contract.hand_models import null_tokenizer

TRAINING = ["--train-iters", "2", "--lr", "1e-3", "--min-lr", "1e-4", "--mock-data"]
TRAINING += ["--no-rope-fusion"]  # it needs Transformer Engine


def megatron_case(request: LaunchRequest) -> dict[str, Any]:
    """A request as the flags and the environment that launch it."""
    variables = environment(request)
    return {
        "argv": [
            *model_argv(request.spec, version=request.version),
            *null_tokenizer(request.spec, request.version),
            *parallel_argv(request),
            *TRAINING,
            *_job_argv(request),
        ],
        "world_size": request.dims.world_size,
        "max_connections": variables.get("CUDA_DEVICE_MAX_CONNECTIONS"),
        "environment": {
            name: text
            for name, text in variables.items()
            if text is not None and name != "CUDA_DEVICE_MAX_CONNECTIONS"
        },
    }


def planned_stages(spec: TransformerSpec, partition: StagePartition) -> list[list[int]]:
    """First layer, number of layers and MTP layers of each virtual stage, as Megatron answers."""
    layers, mtp = decoder_layers(spec, partition), mtp_chunk(spec, partition)
    return [
        [first, count, spec.num_mtp_layers * (chunk == mtp)]
        for chunk, (first, count) in enumerate(
            zip(accumulate(layers, initial=0), layers, strict=False)
        )
    ]


def checkout_version() -> str:
    """The recorded release whose flags the checkout reads."""
    text = Path(os.environ["MEGATRON_LM_HOME"], "megatron/core/package_info.py").read_text()
    major, minor = (re.search(rf"^{name} = (\d+)", text, re.MULTILINE) for name in _PARTS)
    assert major is not None
    assert minor is not None
    return known_release(f"{major[1]}.{minor[1]}.0")


_PARTS = ("MAJOR", "MINOR")


def _job_argv(request: LaunchRequest) -> list[str]:
    """The user's own flags that a rule looks at."""
    return [] if request.optimizer == "adam" else ["--optimizer", request.optimizer]


def ask_megatron(cases: list[dict[str, Any]]) -> Any:
    """Megatron's version, and its answer to each case, from a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("real_arguments.py"))],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=False,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
