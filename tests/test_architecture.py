"""ARCHITECTURE.md stays true: every module is in it, and it names none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("dflash_core", "pipelines", "jobs", "dashboards", "benchmarks")


def test_every_module_has_its_line_and_every_line_its_module() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for package in PACKAGES:
        section = re.search(rf"^## {package}/.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section is not None, f"no section on {package}/"
        named = {
            f"{package}/{name}" for name in re.findall(r"^\| `([^`]+\.py)` \|", section[0], re.MULTILINE)
        }
        there = {
            str(path.relative_to(ROOT))
            for path in (ROOT / package).rglob("*.py")
            if path.name != "__init__.py"
        }
        assert named == there
