"""Applications whose configuration is a dataclass: only its own keys can be composed."""

from __future__ import annotations

from pathlib import Path

from tests.integrations.hydra_app.apps import make_app, run_app, trained

TYPED = """
    from dataclasses import dataclass, field
    from typing import Any, Optional

    import hydra
    from hydra.core.config_store import ConfigStore

    @dataclass
    class Model:
        num_layers: int = 32
        hidden_size: int = 4096
        num_attention_heads: int = 32
        seq_length: int = 4096
        vocab_size: int = 32000
        global_batch_size: int = 64
        micro_batch_size: int = 1
        tensor_model_parallel_size: int = 1
        pipeline_model_parallel_size: int = 1
        sequence_parallel: bool = False
        bf16: bool = True

    @dataclass
    class App:
        model: Model = field(default_factory=Model)
        NEST

    ConfigStore.instance().store(name="typed", node=App)

    @hydra.main(version_base="1.3", config_path="conf", config_name="typed")
    def main(cfg):
        print("TRAINS", cfg.model.tensor_model_parallel_size, cfg.model.sequence_parallel)

    main()
"""
#: What such an application has in its own conf/nest/typed.yaml.
GROUP = """\
    # @package _global_
    defaults:
      - settings
      - _self_
    model:
      micro_batch_size: ${nest:micro_batch_size}
      tensor_model_parallel_size: ${nest:tensor_model_parallel_size}
      pipeline_model_parallel_size: ${nest:pipeline_model_parallel_size}
      sequence_parallel: ${nest:sequence_parallel}
"""
WORDS = ("nest.cluster=dgx_h100", "nest.num_gpus=8")


def test_one_line_in_the_schema_makes_room(tmp_path: Path) -> None:
    main = TYPED.replace("NEST", "nest: Any = None")
    run = run_app(make_app(tmp_path, main=main, typed=GROUP), "+nest=typed", *WORDS)
    assert run.code == 0, run.err
    ((tensor, sequence),) = trained(run)
    assert (int(tensor) > 1) is (sequence == "True")


def test_without_it_the_composition_fails(tmp_path: Path) -> None:
    script = make_app(tmp_path, main=TYPED.replace("NEST", ""), typed=GROUP)
    run = run_app(script, "+nest=typed", *WORDS)
    assert run.code == 1
    assert "Key 'nest' not in 'App'" in run.err
    assert not trained(run)


def test_keys_that_it_does_not_have_fail(tmp_path: Path) -> None:
    main = TYPED.replace("NEST", "nest: Any = None")
    run = run_app(make_app(tmp_path, main=main), "+nest=auto", *WORDS)
    assert run.code == 1
    assert "not in 'Model'" in run.err
    assert not trained(run)
