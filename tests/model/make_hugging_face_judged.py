"""Write ``hugging_face_judged.json``: configurations and what transformers builds of them.

Run where transformers is installed: ``python -m tests.model.make_hugging_face_judged``; with
transformers 5 it writes ``hugging_face_judged_5.json``, which has the types that are new there too.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import yaml

from tests.model.hugging_face_configs import NEWER, SPACES, generated
from tests.model.judge_hugging_face import counted

HERE = Path(__file__).parent
_SEEDS = range(6)
#: Transformers 5 gives this family's output layer no bias where the older release does.
_DIFFERS = ("ernie4_5_moe",)


def main() -> None:
    """Judge the published models and a few made-up sizes of every type."""
    import transformers

    text = (HERE / "hugging_face_published.yaml").read_text(encoding="utf-8")
    published = yaml.safe_load(text)
    kinds, seeds, name = list(SPACES), _SEEDS, "hugging_face_judged.json"
    newer = int(transformers.__version__.split(".")[0]) > 4
    if newer:
        kinds = [kind for kind in {**SPACES, **NEWER} if kind not in _DIFFERS]
        seeds, name = range(100, 102), "hugging_face_judged_5.json"
    of_it = NEWER if newer else SPACES
    configs = {
        **{key: each for key, each in published.items() if each["model_type"] in of_it},
        **{f"{kind}-{seed}": generated(kind, seed) for kind in kinds for seed in seeds},
    }
    rows = [json.dumps({"name": name, **counted(each)}) for name, each in configs.items()]
    head = {
        "command": "python -m tests.model.make_hugging_face_judged",
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
    }
    models = ",\n".join(rows)
    written = f'{json.dumps(head)[:-1]}, "models": [\n{models}\n]}}\n'
    (HERE / name).write_text(written, encoding="utf-8")


if __name__ == "__main__":
    main()
