"""Small models and random cuts of them."""

from __future__ import annotations

from hypothesis import strategies as st

from nest_megatron.layout.stage_layout import StagePartition
from nest_megatron.model.spec import TransformerSpec


def make_spec(num_layers: int, mtp_num_layers: int | None = None) -> TransformerSpec:
    return TransformerSpec(
        name="toy",
        num_layers=num_layers,
        hidden_size=64,
        ffn_hidden_size=256,
        num_attention_heads=8,
        seq_length=64,
        vocab_size=512,
        mtp_num_layers=mtp_num_layers,
    )


@st.composite
def cut_models(draw: st.DrawFn) -> tuple[TransformerSpec, StagePartition]:
    spec = make_spec(draw(st.integers(1, 90)), draw(st.sampled_from([None, 1, 2, 5])))
    units = len(spec.layer_kinds())
    pp = draw(st.integers(1, min(8, units)))
    vpp = draw(st.integers(1, max(1, min(4, units // pp))))
    inner = draw(
        st.lists(
            st.integers(1, units - 1), min_size=pp * vpp - 1, max_size=pp * vpp - 1, unique=True
        )
    )
    marks = (0, *sorted(inner), units)
    return spec, StagePartition(boundaries=marks, pipeline_model_parallel_size=pp)
