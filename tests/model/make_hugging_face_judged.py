"""Write ``hugging_face_judged.json``: configurations and what transformers builds of them.

Run where transformers is installed: ``python -m tests.model.make_hugging_face_judged``; with
transformers 5 it writes ``hugging_face_judged_5.json``, which has the types that are new there too.
With transformers 4 and the folder of ``megatron.bridge.models.bailing`` it writes
``hugging_face_judged_own.json``: types that came with code of their own, which that folder holds.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import sys
import types
from pathlib import Path

import yaml

from tests.model.hugging_face_configs import NEWER, OWN_CODE, SPACES, generated
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
    kinds, seeds, name, of_it = list(SPACES), _SEEDS, "hugging_face_judged.json", set(SPACES)
    newer = int(transformers.__version__.split(".")[0]) > 4
    if newer:
        kinds = [kind for kind in {**SPACES, **NEWER} if kind not in _DIFFERS]
        seeds, name, of_it = range(100, 102), "hugging_face_judged_5.json", set(NEWER)
    code = ""
    if len(sys.argv) > 1:
        _register_bailing(Path(sys.argv[1]))
        kinds, of_it, name = list(OWN_CODE), set(OWN_CODE), "hugging_face_judged_own.json"
        code = " with Megatron-Bridge's copy of Ling's code"
    configs = {
        **{key: each for key, each in published.items() if each["model_type"] in of_it},
        **{f"{kind}-{seed}": generated(kind, seed) for kind in kinds for seed in seeds},
    }
    rows = [json.dumps({"name": name, **counted(each)}) for name, each in configs.items()]
    head = {
        "command": "python -m tests.model.make_hugging_face_judged" + (code and " FOLDER"),
        "transformers": transformers.__version__ + code,
        "date": datetime.date.today().isoformat(),
    }
    models = ",\n".join(rows)
    written = f'{json.dumps(head)[:-1]}, "models": [\n{models}\n]}}\n'
    (HERE / name).write_text(written, encoding="utf-8")


def _register_bailing(folder: Path) -> None:
    """Ling's own code for transformers, without the packages around it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    package = "megatron.bridge.models.bailing"
    for depth in range(1, 5):
        sys.modules.setdefault(
            ".".join(package.split(".")[:depth]), types.ModuleType("stands for a package")
        )
    found = {}
    for name in ("configuration_bailing_moe_v2", "modeling_bailing_moe_v2"):
        spec = importlib.util.spec_from_file_location(f"{package}.{name}", folder / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        found[name] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[name])
    config = found["configuration_bailing_moe_v2"].BailingMoeV2Config
    CONFIG_MAPPING.register("bailing_moe_v2", config)
    model = found["modeling_bailing_moe_v2"].BailingMoeV2ForCausalLM
    AutoModelForCausalLM.register(config, model)


if __name__ == "__main__":
    main()
