"""Write docs/hugging_face.md from the readers and their judge: python docs/make_hugging_face.py."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nest_megatron.model.hugging_face import (
    FAMILIES,
    OTHER_NAMES,
    REFUSED,
    read_hf_model,
)

PAGE = Path(__file__).with_name("hugging_face.md")
_MADE_UP = re.compile(r"^[a-z0-9_]+-\d+$")
JUDGED = Path(__file__).parents[1] / "tests" / "model"
HEAD = """\
<!-- Written by `python docs/make_hugging_face.py`. -->
# Hugging Face configurations

`nest-megatron models config.json` shows how a `config.json` (or its folder) is read, and
`plan model=config.json` plans it. Every type has, to the last parameter, what the modules of
transformers have on the meta device: for published models and for sizes that a generator makes up,
every switch that adds or drops a weight in both positions
(`tests/model/test_hugging_face_judged.py`; the marked tests draw 40 more of each type where
transformers is installed).

* `parameters` counts the vocabulary as published and no MTP layers. Megatron pads the vocabulary
  (`--make-vocab-size-divisible-by`) and builds them, so a plan's memory is that of a larger model.
* A field that the file does not have is the default of transformers' configuration class, with a
  note; `null` is none.
* Of a model of text and images (`text_config`, or the flat files of Qwen 2 and 2.5 VL) the text
  model is read, with a note; of Qwen2.5-VL and Qwen3-VL the encoder (`vision_config`) too.
* A key that by its name describes a part of the model and is not read is refused. Every other key
  that is set and not read is named by `models` and `plan`: those that no weight and no work depends
  on (multipliers, rotary scaling, router scaling, dropout), and those that are not known.
* A list with the same number for each layer (`"moe_topk": [8, 8]`) is that number; layers that
  differ are refused. `num_experts` of 0 is a dense model.
* MTP layers are read from `num_nextn_predict_layers`, `num_mtp_modules`, `mtp_num_hidden_layers`;
  those of `nemotron_h` are refused until the file says 0, and those of `ernie4_5_moe`, which
  transformers does not build, are left out with a note.
* A type that is not known is never taken for another: where `architectures` names a class of a
  known family, or all fields are Llama's, the refusal says which `model_type` to set.
* `bailing_moe_v2` is no type of transformers: its own code, of which Megatron-Bridge has a copy, is
  the judge.
* "Not Megatron-LM's" are parts of published models that its command line cannot build. `models` and
  `estimate` take them; `plan` refuses them by name for a framework that does not build them. NeMo
  and Megatron-Bridge build those of Gemma, Megatron-Bridge those of OLMoE.
* A layer of Bamba and of Granite 4 is two of Megatron's `hybrid_layer_pattern`.
* Of the longest sequence (`max_position_embeddings`) at most 8,192 tokens are planned, with a note,
  unless `train.seq_length` says more.
* Llama 4 attends in chunks in NeMo alone, without context parallelism; elsewhere its layers attend
  to whole sequences, and are priced so, with a note.
* The bias that balances experts of `ernie4_5_moe` is a parameter there and a buffer in Megatron.
  transformers 5 drops the bias of its output layer with `use_bias`, which no published model has;
  the count is that of 4.57.
* `chatglm` is no type of transformers: its own code builds it, and the count is in closed form.
* `bert` is built with Megatron's own heads, which transformers does not have.

"""
REFUSED_HEAD = (
    "## Not read",
    "",
    "A type in whose name one of these patterns is found is refused with the reason.",
    "",
    "| Patterns | Why |",
    "|---|---|",
)


def page() -> str:
    """The whole page."""
    names = ("", "_5", "_own")
    files = [_judged(f"hugging_face_judged{name}.json") for name in names]
    judges = (f"transformers {each['transformers']} on {each['date']}" for each in files)
    rows = [_row(name, files) for name in sorted(FAMILIES)]
    head = (
        "| `model_type` | What is read | Judged | By transformers | Not Megatron-LM's |",
        "|---|---|--:|---|---|",
    )
    counts = f"{len(rows)} types; the judges: {', '.join(judges)}.\n"
    refused = [f"| {' '.join(f'`{word}`' for word in w.split())} | {why} |" for w, why in REFUSED]
    return "\n".join((HEAD + counts, *head, *rows, "", *_others(), *REFUSED_HEAD, *refused, ""))


def _others() -> list[str]:
    """The paragraph of types that are read as another."""
    names: dict[str, list[str]] = {}
    for other, name in sorted(OTHER_NAMES.items()):
        names.setdefault(name, []).append(f"`{other}`")
    told = (f"{', '.join(others)} as `{name}`" for name, others in sorted(names.items()))
    return [*textwrap.wrap(f"Types that are read as another: {'; '.join(told)}.", 100), ""]


def _judged(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((JUDGED / name).read_text(encoding="utf-8"))
    return found


def _row(name: str, files: list[dict[str, Any]]) -> str:
    configs = {
        each["transformers"]: [
            m["config"] for m in each["models"] if m["config"]["model_type"] == name
        ]
        for each in files
    }
    known = (m for each in files for m in each["models"] if not _MADE_UP.search(m["name"]))
    published = [m["config"] for m in known if m["config"]["model_type"] == name]
    parts = {part: None for each in published for part in _parts(each)}
    total, by = (
        sum(map(len, configs.values())),
        ", ".join(v for v, of_one in configs.items() if of_one),
    )
    lacking = ", ".join(f"`{part}`" for part in parts)
    return f"| `{name}` | {FAMILIES[name][0]} | {total or ''} | {by or 'not judged'} | {lacking} |"


def _parts(config: dict[str, Any]) -> Iterator[str]:
    spec = read_hf_model(config, "x").spec
    yield from spec.variant.differences()
    if spec.position_embedding_type == "alibi":
        yield "alibi"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
