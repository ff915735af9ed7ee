"""Writes the applications of docs/hydra_apps.md: ``python hydra_apps.py nemo1`` or ``own``.

``nemo1`` has the field names of NeMo 1's megatron_gpt_config.yaml, ``own`` names of its own and the
group file that the page prints. Both print what they train with.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.integrations.hydra_app.apps import GPT, MAIN  # noqa: E402

OWN = """
    arch: {depth: 48, width: 6144, ffn: 16384, heads: 48, groups: 8, glu: true, vocab: 64000}
    data: {tokens: 8192, batch: 64}
    layout: {tp: 1, pp: 1, sequence: false, micro: 1}
"""


def group_file() -> str:
    """The group file of the page."""
    page = (ROOT / "docs" / "hydra_apps.md").read_text(encoding="utf-8")
    found = re.search(r"^```yaml\n# conf/nest/mine.yaml\n(.*?)^```", page, re.M | re.S)
    assert found is not None
    return found[1]


def write(folder: Path, config: str, **groups: str) -> None:
    """An application in a folder."""
    (folder / "conf" / "nest").mkdir(parents=True, exist_ok=True)
    main = textwrap.dedent(MAIN).replace('config_name="app"', 'config_name="train"')
    (folder / "train.py").write_text(main, encoding="utf-8")
    (folder / "conf" / "train.yaml").write_text(textwrap.dedent(config), encoding="utf-8")
    for name, text in groups.items():
        (folder / "conf" / "nest" / f"{name}.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["nemo1"]:
        write(Path("nemo1"), GPT)
    elif sys.argv[1:] == ["own"]:
        write(Path("own"), OWN, mine=group_file())
    else:
        sys.exit(__doc__)
