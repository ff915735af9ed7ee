"""Which modules megatron-core builds a layer from."""

from __future__ import annotations

from nest_megatron.names import Name


class Implementation(Name):
    """Megatron's ``--transformer-impl``."""

    LOCAL = "local"
    TRANSFORMER_ENGINE = "transformer_engine"
