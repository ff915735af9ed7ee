"""Pages of the site that a program writes whole, each with what writes it.

Pages of the reference stand in the navigation where they are looked up. Pages of results stand in
its last section, are left out of the site's search, and have their long tables folded
(docs/site_hooks.py). All others are written by hand; tests/architecture/test_site.py bounds them.
"""

from __future__ import annotations

REFERENCE = {
    "api.md": "docs/make_api.py",
    "commands.md": "docs/make_reference.py",
    "plan_file.md": "docs/make_reference.py",
    "settings.md": "docs/make_reference.py",
}
RESULTS = {
    "accuracy.md": "nest-megatron validate",
    "accuracy/cpu_end_to_end.md": "benchmarks/cpu_end_to_end.py",
    "expert_layouts.md": "benchmarks/expert_layouts.py",
    "extraction.md": "benchmarks/extraction.py",
    "functional_tests.md": "benchmarks/functional_tests.py",
    "gpu.md": "benchmarks/gpu/run.sh",
    "hugging_face.md": "docs/make_hugging_face.py",
    "nest_artifact.md": "benchmarks/nest_artifact.py",
    "peft_recipes.md": "benchmarks/peft_recipes.py",
    "planners.md": "benchmarks/planners.py",
    "published_choices.md": "benchmarks/choice.py",
    "recipes.md": "benchmarks/recipes.py",
    "recurrence.md": "benchmarks/recurrence.py",
    "rules.md": "docs/make_reference.py",
    "tuning_published.md": "benchmarks/tuning.py",
}
GENERATED = {**REFERENCE, **RESULTS}
