"""Draws the pictures of docs/images again: ``python docs/make_images.py`` from the repository root.

It needs the project with its ``report`` extra, and a Chromium (``chromium`` or ``google-chrome`` on
the path) for the picture of the HTML report.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
sys.path.insert(0, str(ROOT))

from nest_megatron.launchers.megatron_lm.attach import with_launch  # noqa: E402
from nest_megatron.parallel.plan import ParallelPlan  # noqa: E402
from nest_megatron.planner import PlanRequest, plan  # noqa: E402
from nest_megatron.report.html import html_report  # noqa: E402
from nest_megatron.report.timeline import draw_timeline  # noqa: E402
from tests import catalogue  # noqa: E402

WINDOW = "1240,1890"


def planned(model: str, cluster: str, num_gpus: int, global_batch_size: int) -> ParallelPlan:
    """A plan for entries of the catalogue."""
    request = PlanRequest(
        spec=catalogue.model(model),
        cluster=catalogue.cluster(cluster, num_gpus),
        global_batch_size=global_batch_size,
    )
    found = plan(request)
    assert isinstance(found, ParallelPlan)
    return with_launch(found)


def screenshot(page: str, target: Path) -> None:
    """A picture of the top of a page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        sys.exit("Install chromium for the picture of the report.")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "report.html"
        source.write_text(page, encoding="utf-8")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += ["--disable-background-networking", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WINDOW}", f"--screenshot={target}", source.as_uri()]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Draw them all."""
    IMAGES.mkdir(exist_ok=True)
    llama = planned("llama3_70b", "h100_spine_leaf", 1024, 4096)
    screenshot(html_report(llama), IMAGES / "report.png")
    draw_timeline(planned("deepseek_v3", "dgx_h100", 1024, 8192), IMAGES / "timeline.png")


if __name__ == "__main__":
    main()
