"""Train a small GPT through NeMo's own strategy and trainer, on the CPU: ``train.py plan.yaml``.

The recorder's clock is one of known times: each forward pass takes a tenth of a second, each step
of the optimizer half a second, nothing else any. Every replacement says why.
"""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

from tests.training import cpu_megatron

FORWARD_S, OPTIMIZER_S = 0.125, 0.5  # exact as binary fractions
SEQ_LENGTH, VOCAB_SIZE, NUM_STEPS, WATCHED = 32, 512, 6, 4


def _known_clock() -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from nest_megatron.profile.clock import HostClock

    now = [0.0]

    def takes(owner: Any, name: str, seconds: float) -> None:
        real = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            now[0] += seconds
            return real(*args, **kwargs)

        setattr(owner, name, run)

    takes(GPTModel, "forward", FORWARD_S)
    takes(FP32Optimizer, "step_with_ready_grads", OPTIMIZER_S)
    HostClock.mark = lambda _: now[0]  # type: ignore[method-assign]


def _as_megatron_core_0_16() -> None:
    """NeMo 2.7.3 passes conditions on weight decay that 0.16.1 has no parameters for."""
    from megatron.core import optimizer

    real = optimizer.get_megatron_optimizer
    known = inspect.signature(real).parameters

    def made(*args: Any, **kwargs: Any) -> Any:
        return real(*args, **{name: value for name, value in kwargs.items() if name in known})

    optimizer.get_megatron_optimizer = made


def _with_mask() -> None:
    """NeMo's mock data takes the wish for an attention mask for its seed."""
    from nemo.collections.llm.gpt.data import mock

    real = mock._MockGPTDataset
    mock._MockGPTDataset = lambda *args: real(*args[:4], create_attention_mask=True)


def _model() -> Any:
    from megatron.core.optimizer import OptimizerConfig
    from nemo import lightning as nl
    from nemo.collections import llm
    from nemo.collections.llm.gpt.model.base import local_layer_spec

    no_kernels = dict.fromkeys(
        (
            *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion"),
            *("apply_rope_fusion", "gradient_accumulation_fusion", "persist_layer_norm"),
            "cross_entropy_loss_fusion",
        ),
        False,
    )
    config = llm.GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        seq_length=SEQ_LENGTH,
        vocab_size=VOCAB_SIZE,
        transformer_layer_spec=local_layer_spec,
        use_cpu_initialization=True,
        **no_kernels,
    )
    adam = OptimizerConfig(optimizer="adam", lr=1e-4, use_distributed_optimizer=False)
    return llm.GPTModel(config, optim=nl.MegatronOptimizerModule(config=adam))


def train(plan: str) -> None:
    """Six steps, of which the plan's record watches four."""
    cpu_megatron.install()
    _as_megatron_core_0_16()
    _with_mask()
    _known_clock()

    import lightning.pytorch as pl
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from nemo import lightning as nl
    from nemo.collections import llm

    from nest_megatron.integrations.lightning import WatchCallback

    class Seed(pl.Callback):
        """NeMo seeds Megatron's random state where it counts GPUs."""

        def on_train_start(self, *_: Any) -> None:
            model_parallel_cuda_manual_seed(1)

    data = llm.MockDataModule(
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
        global_batch_size=2,
        tokenizer=SimpleNamespace(vocab_size=VOCAB_SIZE),
        num_train_samples=100,
        num_workers=0,
        pin_memory=False,
    )
    trainer = nl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=NUM_STEPS,
        strategy=nl.MegatronStrategy(process_group_backend="gloo", ckpt_async_save=False),
        callbacks=[Seed(), WatchCallback(plan, steps=WATCHED)],
        logger=False,
        enable_checkpointing=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    trainer.fit(_model(), data)


if __name__ == "__main__":
    train(sys.argv[1])
