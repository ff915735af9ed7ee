"""What recipes and scripts behind rows say that rows leave out or misprint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.documents import packaged
from nest_megatron.model.encoder import Adapters
from nest_megatron.model.sequence_lengths import lengths_from_moments
from nest_megatron.plain import frozen
from nest_megatron.validation.rows import Row

_RECIPES = packaged(__package__, "finetuning.toml")["recipes"]
_PAGES = packaged(__package__, "known_cells.toml")["pages"]
_LORA = re.compile(r"lora|peft", re.IGNORECASE)


@frozen
class FineTuning:
    """What a row's recipe says of fine-tuning.

    Args:
        adapters: ``None`` where all weights are trained.
        columns: what the row leaves out, as it would say it.
        own, words: flags by Megatron's names; a plan keeps the former and chooses the latter.
        assumption: where no recipe is known.
    """

    adapters: Adapters | None = None
    columns: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    words: Mapping[str, Any] = field(default_factory=dict)
    assumption: str = ""


def trains_adapters(row: Row) -> bool:
    """Whether a row names LoRA or PEFT."""
    return _LORA.search(f"{row.get('task', '')} {row.get('model', '')}") is not None


def fine_tuning(row: Row) -> FineTuning:
    """What is known of a row's adapters; the frameworks' defaults where nothing is."""
    if not trains_adapters(row):
        return FineTuning()
    found = next(recipe for recipe in _RECIPES if _holds(recipe["where"], row))
    fields = dict(found["adapters"])
    fields["target_modules"] = tuple(fields.get("target_modules", ()))
    adapters = Adapters(**fields)
    columns = found.get("columns", {})
    return FineTuning(
        adapters=adapters,
        columns={name: text for name, text in columns.items() if not row.get(name, "").strip()},
        own=found.get("own", {}),
        words=found.get("words", {}),
        assumption="" if found["file"] else f"{adapters.words()} assumed",
    )


def _holds(where: Mapping[str, str], row: Row) -> bool:
    return all(re.search(pattern, row.get(column, "")) for column, pattern in where.items())


#: Ends of pages, and starts of the commits that rows were read at -> what is compiled in their
#: runs, but for those that their section calls eager. torchtitan: heads of tables, and the command
#: of the third page (pytorch/torchtitan @ b5bcd76); the loss was not yet in 2024 (``train.py`` @
#: 9dec370, ``components/loss.py`` @ 820504e). NeMo AutoModel: ``enable_compile`` came with
#: 2013a4dd6.
_COMPILED = {
    ("benchmarks/llama3_h100_202412_torchtitan.md", ""): "compiled layers",
    ("benchmarks/asyncTP_llama3_h100_2025-06_torchtitan.md", ""): "torch.compile",
    ("benchmarks/llama3-8b_h200_202506_trainy-whitefiber.md", ""): "torch.compile",
    ("performance-summary.mdx", "507bfb75"): "eager",
    ("performance-summary.mdx", "c0e4fe1b"): "eager",
}
#: Pages whose runs of fine-tuning pack SQuAD: by their script (``performance_mode`` of NeMo's
#: ``finetune_recipe``), or as they say (NVIDIA/NeMo @ 070a0bb and 9f27fd5).
_PACKED_PAGES = frozenset(
    (
        "llama3/finetuning/README_8b.md",
        "llama3/finetuning/README_70b.md",
        "docs/source/performance/performance_summary.md",
        "docs/source/performance_benchmarks.md",
    )
)
_PACKED_WORDS = re.compile(r"squad packed", re.IGNORECASE)
_TUNED = re.compile("tun", re.IGNORECASE)
#: Tokens of a sequence of SQuAD: 79,346,108 bytes are 87,599 examples (dataset card of
#: rajpurkar/squad), of which 24 are an identifier, at 3.94 bytes a token (arXiv:2407.21783, section
#: 3.2). Whatever their deviation is, attention within them is a twentieth of that within a pack.
_SQUAD_TOKENS, _SQUAD_DEVIATION = (79_346_108 / 87_599 - 24) / 3.94, 100.0


def with_known_cells(row: Row) -> tuple[Row, tuple[str, ...]]:
    """A row with what its page misprints or leaves out, and a note for each such cell."""
    known = {}
    notes = []
    for page in _PAGES:
        printed, models = page.get("printed", {}), page.get("models")
        of_model = {} if models is None else models.get(row.get("model", ""))
        if page["path"] != _page(row) or of_model is None:
            continue
        if any(row.get(column, "").strip() != text for column, text in printed.items()):
            continue
        for column, ran in {**page["cells"], **of_model}.items():
            if column in printed or not row.get(column, "").strip():
                known[column] = ran
                notes.append(f"{column} {ran} ({page['source']})")
    where, commit = _page(row), row.get("commit", "")
    for (path, start), words in _COMPILED.items():
        found = where.endswith(path) and commit.startswith(start)
        if found and "eager" not in row.get("section", ""):
            known["framework"] = f"{row.get('framework', '')}, {words}"
            notes.append(f"framework {known['framework']} ({where})")
    return {**row, **known}, tuple(notes)


def with_packs(
    row: Row, settings: CostSettings, seq_length: int
) -> tuple[CostSettings, tuple[str, ...]]:
    """The settings of a row whose sequences are known to be packs of SQuAD, and a note.

    A rate that is printed alone is left as it is: it counts the operations of whole packs.
    """
    timed = row.get("iter_time_s", "").strip() or row.get("tokens_per_s_per_gpu", "").strip()
    tuned = _TUNED.search(f"{row.get('section', '')} {row.get('task', '')}")
    said = _PACKED_WORDS.search(row.get("ambiguity", ""))
    packed = said or (tuned and _page(row) in _PACKED_PAGES)
    if not (timed and packed):
        return settings, ()
    found = lengths_from_moments(_SQUAD_TOKENS, _SQUAD_DEVIATION, seq_length, packed=True)
    note = f"packs of SQuAD, {found.mean:.0f} tokens a sequence"
    return settings.on_packs(found), (note,)


def _page(row: Row) -> str:
    return row.get("path", "").partition("#")[0].strip()
