"""Small Hydra applications, run as their users run them."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

from tests.cli.runs import Run, environment

#: The names of NeMo 1's megatron_gpt_config.yaml, as far as a plan looks at them.
GPT = """
    name: gpt
    trainer: {devices: 8, num_nodes: 8, precision: bf16-mixed}
    model:
      mcore_gpt: true
      micro_batch_size: 4
      global_batch_size: 256
      rampup_batch_size: null
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 1
      virtual_pipeline_model_parallel_size: null
      encoder_seq_length: 4096
      max_position_embeddings: ${.encoder_seq_length}
      num_layers: 40
      hidden_size: 5120
      ffn_hidden_size: 20480
      num_attention_heads: 40
      num_query_groups: null
      kv_channels: null
      normalization: layernorm1p
      layernorm_epsilon: 1e-5
      bias: true
      activation: gelu
      position_embedding_type: rope
      rotary_percentage: 0.5
      share_embeddings_and_output_weights: false
      make_vocab_size_divisible_by: 128
      hidden_dropout: 0.1
      tokenizer: {library: megatron, type: GPT2BPETokenizer}
      activations_checkpoint_granularity: null
      activations_checkpoint_method: null
      activations_checkpoint_num_layers: null
      fsdp: false
      drop_layers: []
      optim: {name: distributed_fused_adam, lr: 2e-4}
"""
MAIN = """
    import hydra

    @hydra.main(version_base="1.3", config_path="conf", config_name="app")
    def main(cfg):
        model = cfg.model
        print("TRAINS", model.tensor_model_parallel_size, model.pipeline_model_parallel_size,
              model.micro_batch_size, model.get("sequence_parallel"))

    main()
"""
#: The same fields in other nodes: those of the model inside it, the micro batch with the data.
NESTED = textwrap.dedent(GPT).replace("\nmodel:\n", "\nmodel:\n  megatron:\n")
NESTED = "\n".join(
    f"  {line}" if line.startswith("  ") and line != "  megatron:" else line
    for line in NESTED.replace("  micro_batch_size: 4\n", "").splitlines()
)
NESTED += "\ndata: {micro_batch: 4}\n"
NESTED_MAIN = MAIN.replace("model = cfg.model", "model = cfg.model.megatron").replace(
    "model.micro_batch_size", "cfg.data.micro_batch"
)
#: What a user types beside the application.
AUTO = ("+nest=auto", "nest.cluster=dgx_h100")


def make_app(folder: Path, config: str = GPT, main: str = MAIN, **groups: str) -> Path:
    """Write an application: its script, its configuration, and files of its group ``nest``."""
    for name, text in {"app": config, **{f"nest/{name}": t for name, t in groups.items()}}.items():
        path = folder / "conf" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    script = folder / "app.py"
    script.write_text(textwrap.dedent(main), encoding="utf-8")
    return script


def run_app(script: Path, *words: str, **more: str) -> Run:
    """Run an application, its output folder beside it."""
    done = subprocess.run(
        [sys.executable, str(script), *words],
        capture_output=True,
        text=True,
        cwd=script.parent,
        env=environment(**more),
        check=False,
    )
    return Run(done.returncode, done.stdout, done.stderr)


def trained(run: Run) -> list[list[str]]:
    """What each job trained with."""
    return [line.split()[1:] for line in run.out.splitlines() if line.startswith("TRAINS")]
