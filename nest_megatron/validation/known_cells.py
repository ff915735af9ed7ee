"""What the script behind a page says of its rows where the page misprints it or leaves it out."""

from __future__ import annotations

import re

from nest_megatron.cost_model.settings import CostSettings
from nest_megatron.model.sequence_lengths import lengths_from_moments
from nest_megatron.validation.rows import Row

#: ``llama3_finetune_auto_configs`` of NVIDIA/dgxc-benchmarking, llama3/finetuning/
#: llama3_finetune_utils.py @ 8f5cbb3, which the commands of both pages run.
_SCRIPT = "llama3_finetune_utils.py"
#: Page -> (column, as it is printed, as it ran, where that stands).
_CELLS = {
    "llama3/finetuning/README_8b.md": (("pp", "41", "1", _SCRIPT), ("mbs", "", "1", _SCRIPT)),
    "llama3/finetuning/README_70b.md": (("mbs", "", "1", _SCRIPT),),
}
#: Pages whose runs of fine-tuning pack SQuAD: by their script (``performance_mode`` of NeMo's
#: ``finetune_recipe``), or in their own words (NVIDIA/NeMo @ 070a0bb and 9f27fd5).
_PACKED_PAGES = frozenset(
    (
        *_CELLS,
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
    known = [cell for cell in _CELLS.get(_page(row), ()) if row.get(cell[0], "").strip() == cell[1]]
    notes = (f"{column} {ran} ({where})" for column, _, ran, where in known)
    return {**row, **{column: ran for column, _, ran, _ in known}}, tuple(notes)


def with_packs(
    row: Row, settings: CostSettings, seq_length: int
) -> tuple[CostSettings, tuple[str, ...]]:
    """The settings of a row whose sequences are known to be packs of SQuAD, and a note.

    A rate that is printed alone is left as it is: it counts the operations of whole packs.
    """
    timed = row.get("iter_time_s", "").strip() or row.get("tokens_per_s_per_gpu", "").strip()
    tuned = _TUNED.search(f"{row.get('section', '')} {row.get('task', '')}")
    stated = _PACKED_WORDS.search(row.get("ambiguity", ""))
    packed = stated or (tuned and _page(row) in _PACKED_PAGES)
    if not (timed and packed):
        return settings, ()
    found = lengths_from_moments(_SQUAD_TOKENS, _SQUAD_DEVIATION, seq_length, packed=True)
    note = f"packs of SQuAD, {found.mean:.0f} tokens a sequence"
    return settings.on_packs(found), (note,)


def _page(row: Row) -> str:
    return row.get("path", "").partition("#")[0].strip()
