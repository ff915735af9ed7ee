"""Write ``hugging_face_judged.json``: configurations and what transformers builds of them.

Run where transformers is installed: ``python -m tests.model.make_hugging_face_judged``.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import yaml

from tests.model.hugging_face_configs import SPACES, generated
from tests.model.judge_hugging_face import counted

HERE = Path(__file__).parent
_SEEDS = range(6)


def main() -> None:
    """Judge the published models and a few made-up sizes of every type."""
    import transformers

    text = (HERE / "hugging_face_published.yaml").read_text(encoding="utf-8")
    configs = {
        **yaml.safe_load(text),
        **{f"{kind}-{seed}": generated(kind, seed) for kind in SPACES for seed in _SEEDS},
    }
    rows = [json.dumps({"name": name, **counted(each)}) for name, each in configs.items()]
    head = {
        "command": "python -m tests.model.make_hugging_face_judged",
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    models = ",\n".join(rows)
    written = f'{json.dumps(head)[:-1]}, "models": [\n{models}\n]}}\n'
    (HERE / "hugging_face_judged.json").write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
