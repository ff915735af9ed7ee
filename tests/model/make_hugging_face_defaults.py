"""Write ``hugging_face_defaults.json``: what transformers takes where a config.json is silent.

Run where transformers is installed: ``python -m tests.model.make_hugging_face_defaults``.
"""

from __future__ import annotations

import datetime
import inspect
import json
from pathlib import Path
from typing import Any

from tests.model.hugging_face_configs import SPACES

WRITTEN = Path(__file__).parents[2] / "nest_megatron" / "model" / "hugging_face_defaults.json"
_OWN = ("bert",)
_NO_SHAPE = ("self", "kwargs", "use_cache", "initializer_range", "init_std", "return_dict")


def defaults(model_type: str) -> dict[str, dict[str, Any]]:
    """The defaults of a configuration class, and its second names for a field."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    signature = inspect.signature(kind.__init__).parameters
    values = {
        name: parameter.default
        for name, parameter in signature.items()
        if isinstance(parameter.default, bool | int | float | str) and name not in _NO_SHAPE
        if not name.endswith("_token_id") and "dropout" not in name and "pdrop" not in name
    }
    return {
        "defaults": {**values, "tie_word_embeddings": values.get("tie_word_embeddings", True)},
        "second_names": dict(kind.attribute_map),
    }


def main() -> None:
    """Write the table that the readers load."""
    import transformers

    types = {name: defaults(name) for name in sorted({*SPACES, *_OWN})}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in types.items())
    head = {
        "command": "python -m tests.model.make_hugging_face_defaults",
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    text = f'{json.dumps(head)[:-1]}, "types": {{\n{rows}\n}}}}\n'
    WRITTEN.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
