"""Tries an installed nest-megatron that has no torch beside it. Run it away from the checkout."""

import importlib.resources
import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import nest_megatron
import nest_megatron.cost_model._schedule  # the compiled kernels are there and load
import nest_megatron.research.nest_artifact._stage_boundaries
import nest_megatron.solver._stage_dp

for library in ("torch", "numpy", "scipy", "matplotlib"):
    assert importlib.util.find_spec(library) is None, f"{library} came with the installation"

catalogue = importlib.resources.files("nest_megatron.hydra_configs")
for group in ("accelerator", "cluster", "model"):
    entries = [entry.name for entry in catalogue.joinpath(group).iterdir()]
    assert any(name.endswith(".yaml") for name in entries), f"no {group} in {catalogue}"

command = Path(sys.executable).with_name("nest-megatron")
models = subprocess.run([command, "models"], check=True, capture_output=True, text=True).stdout
assert "llama3_70b" in models, models
with tempfile.TemporaryDirectory() as folder:
    job = ["model=bert_large", "cluster=dgx_h100", "cluster.num_gpus=8", "out=plan.yaml"]
    subprocess.run([command, "plan", *job], check=True, capture_output=True, cwd=folder)
    page = ["explain", "plan.yaml", "--html", "plan.html"]
    subprocess.run([command, *page], check=True, capture_output=True, cwd=folder)
    assert "<svg" in Path(folder, "plan.html").read_text(encoding="utf-8")
# The boot line wakes up for +nest alone.
loaded = "import sys; print('nest_megatron.boot' in sys.modules)"
for words, expected in (([], "False"), (["+nest=auto"], "True")):
    said = subprocess.run(
        [sys.executable, "-c", loaded, *words], check=True, capture_output=True, text=True
    )
    assert (said.stdout.strip(), said.stderr) == (expected, ""), (words, said)

# Other people's Hydra applications find the group nest, and load no more than Hydra for it.
find = """
import sys
from hydra import compose, initialize
with initialize(version_base="1.3"):
    composed = compose(overrides=["+nest=auto"])
print(composed.nest.mode, "nest_megatron.planner" in sys.modules)
"""
said = subprocess.run([sys.executable, "-c", find], check=True, capture_output=True, text=True)
assert said.stdout.split() == ["auto", "False"], said

print(f"nest-megatron {nest_megatron.__version__} works without torch")
