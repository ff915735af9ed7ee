"""The reference of ``docs/`` is what the schemas say, and plan files keep to their JSON Schema."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from nest_megatron.layout import plan_file
from tests.architecture.imports import ROOT
from tests.cli.runs import SMALL, environment, run

SCHEMA = ROOT / "docs" / "plan.schema.json"
PLANS = sorted((ROOT / "recipes").glob("**/*.yaml"))


def schema_errors(fields: Any) -> list[str]:
    validator = pytest.importorskip("jsonschema").Draft202012Validator
    return [
        error.message for error in validator(json.loads(SCHEMA.read_text())).iter_errors(fields)
    ]


def test_the_pages_are_written_from_the_schemas() -> None:
    command = [sys.executable, ROOT / "docs" / "make_reference.py", "--check"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"run python docs/make_reference.py: {done.stdout}{done.stderr}"


def test_check_jsonschema_takes_the_plans_that_ship() -> None:
    """It reads YAML 1.2, where ``1e-05`` without quotes is a number."""
    pytest.importorskip("check_jsonschema")
    plans = [path for path in PLANS if path.read_text(encoding="utf-8").startswith("schema:")]
    assert len(plans) >= 3
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", SCHEMA, *plans]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_new_plan_keeps_to_the_schema(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run("plan", *SMALL, f"out={path}").code == 0
    fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert schema_errors(fields) == []
    assert schema_errors({**fields, "steps": 1})
    assert schema_errors({**fields, "predicted": {**fields["predicted"], "mfu": "high"}})


def test_texts_that_look_like_numbers_are_quoted() -> None:
    written = plan_file.written({"argv": ["1e-05", "-3E5", "1.0e-05", "e5"], "value": 1e-05})
    assert written.splitlines()[1:] == [
        *("- '1e-05'", "- '-3E5'", "- '1.0e-05'", "- e5"),
        "value: 1.0e-05",
    ]
