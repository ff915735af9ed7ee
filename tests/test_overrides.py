"""Values of overrides are those of Hydra's grammar, whoever reads them."""

from __future__ import annotations

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st

from nest_megatron.config.overrides import Setting, typed_value
from nest_megatron.errors import UserInputError

KEYS = ("model.name", "model.num_layers", "search.use_all_gpus", "cluster.levels.0.name")
CHARACTERS = "01289.-_+eEaAnNfFiItTuUlLrRxX'\" ~"


@given(st.sampled_from(KEYS), st.text(CHARACTERS, min_size=1, max_size=8).map(str.strip))
@example("model.name", "NaN")
@example("model.name", "-inf")
@example("model.name", "nullable")
@example("model.num_layers", "1_000")
@example("model.num_layers", "007")
@example("model.num_layers", "1.50")
@example("search.use_all_gpus", "True")
@example("search.use_all_gpus", "NULL")
@example("cluster.levels.0.name", "leaf-1")
@example("model.name", "١")
def test_values_are_read_as_hydra_reads_them(key: str, value: str) -> None:
    try:
        expected = OverridesParser.create().parse_override(f"{key}={value}")
    except Exception:  # noqa: BLE001 - whatever Hydra refuses
        with pytest.raises(UserInputError):
            typed_value(Setting(key=key, value=value), key)
        return
    found = typed_value(Setting(key=key, value=value), key)
    assert repr(found) == repr(expected.value())
    assert type(found) is type(expected.value())
