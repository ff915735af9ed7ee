"""Draws the pictures of docs/images again: ``python docs/make_images.py`` from the repository root.

It needs the project with its ``megatron`` and ``app`` extras, playwright, and a Chromium
(``chromium`` or ``google-chrome`` on the path) for the pictures of the HTML report and of the app.
``planners_figure*.svg`` are written with their page: ``python docs/refresh.py docs/planners.md``.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

IMAGES = Path(__file__).resolve().parent / "images"
WINDOW = "1240,2700"
LLAMA = "model=llama3_70b cluster=h100_spine_leaf"
#: Run one after another in a folder of their own; IMAGES stands for docs/images.
COMMANDS = (
    f"plan {LLAMA} cluster.num_gpus=1024 train.global_batch_size=4096 out=llama.yaml",
    "explain llama.yaml --html report.html",
    "plan model=deepseek_v3 cluster=dgx_h100 cluster.num_gpus=1024 train.global_batch_size=8192"
    " out=deepseek.yaml",
    "explain deepseek.yaml --timeline IMAGES/timeline.png --force",
    f"compare {LLAMA} cluster.num_gpus=512 --chart IMAGES/planners_llama3_70b.svg --force",
    "extract model=deepseek_v3 parallel.tensor_model_parallel_size=2"
    " parallel.expert_model_parallel_size=8 parallel.expert_tensor_parallel_size=1 --layer moe"
    " --draw IMAGES/extracted_layer.svg --force",
)


def chromium() -> str:
    """The browser that takes the pictures of pages."""
    found = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    return found or sys.exit("Install chromium for the pictures of pages.")


def screenshot(page: Path, target: Path) -> None:
    """A picture of the top of a page."""
    command = [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--disable-background-networking", f"--user-data-dir={page.parent}/profile"]
    command += [f"--window-size={WINDOW}", f"--screenshot={target}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def app_picture(folder: str, target: Path) -> None:
    """The app with the plan of a command."""
    from playwright.sync_api import sync_playwright

    words = [str(Path(sys.executable).with_name("nest-megatron")), "app", "--port", "0"]
    served = subprocess.Popen(
        [*words, "--no-browser"], cwd=folder, stdout=subprocess.PIPE, text=True
    )
    try:
        with sync_playwright() as started:
            browser = started.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1500, "height": 1000})
            page.goto(served.stdout.readline().strip())
            page.get_by_label("GPUs", exact=True).fill("64")
            page.get_by_role("button", name="Plan", exact=True).click()
            page.frame_locator("[title='Report: The plan']").get_by_role("heading").first.wait_for(
                timeout=600_000
            )
            page.screenshot(path=target)
            browser.close()
    finally:
        served.terminate()


def main() -> None:
    """Draw them all."""
    with tempfile.TemporaryDirectory() as folder:
        for words in COMMANDS:
            print(f"nest-megatron {words}", flush=True)
            given = words.replace("IMAGES", str(IMAGES)).split()
            program = [str(Path(sys.executable).with_name("nest-megatron"))]
            subprocess.run([*program, *given], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        screenshot(Path(folder) / "report.html", IMAGES / "report.png")
        app_picture(folder, IMAGES / "app.png")


if __name__ == "__main__":
    main()
