"""Write ``hugging_face_defaults.json``: what transformers takes where a config.json is silent.

Run where transformers is installed: ``python -m tests.model.make_hugging_face_defaults``; with
transformers 5 it writes ``hugging_face_defaults_5.json``, of the types that are new there.
"""

from __future__ import annotations

import datetime
import inspect
import json
from pathlib import Path
from typing import Any

from tests.model.hugging_face_configs import NEWER, SPACES

FOLDER = Path(__file__).parents[2] / "nest_megatron" / "model"
WRITTEN = FOLDER / "hugging_face_defaults.json"
WRITTEN_5 = FOLDER / "hugging_face_defaults_5.json"
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

    newer = int(transformers.__version__.split(".")[0]) > 4
    kinds = sorted(NEWER if newer else {*SPACES, *_OWN})
    types = {name: defaults(name) for name in kinds}
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in types.items())
    head = {
        "command": "python -m tests.model.make_hugging_face_defaults",
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    text = f'{json.dumps(head)[:-1]}, "types": {{\n{rows}\n}}}}\n'
    (WRITTEN_5 if newer else WRITTEN).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
