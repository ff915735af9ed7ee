"""A job that loses a node and gets it back: torchrun starts it anew, with the plan of each size.

Agents of one rank each stand for nodes. Rank 0's agent outlives the others: it hosts the
rendezvous, as one node of every elastic job does.
"""

from __future__ import annotations

import pytest

from tests.megatron_lm.training import HOME

pytestmark = [
    pytest.mark.megatron_lm,
    pytest.mark.slow,
    pytest.mark.skipif(not HOME, reason="MEGATRON_LM_HOME is not set to a Megatron-LM checkout"),
]

#: A node of one GPU, so that an agent of one rank is a node.
CLUSTER = """\
name: single
num_gpus: 4
levels:
  - {name: node, num_devices: 1, bandwidth_bytes_per_s: 4.5e11, latency_s: 1.0e-6}
  - {name: fabric, num_devices: null, bandwidth_bytes_per_s: 5.0e10, latency_s: 3.0e-6}
defaults:
  - /accelerator@accelerator: h100_sxm_80gb
"""
STEPS = 200
TRAINING = f"""
--train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 --lr-decay-iters {STEPS} --mock-data --bf16
--tokenizer-type NullTokenizer --vocab-size 127 --eval-interval 1000 --eval-iters 0
--log-interval 1 --hidden-dropout 0 --attention-dropout 0 --save-interval 2
--use-distributed-optimizer
""".split()
