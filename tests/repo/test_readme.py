"""What the README shows works as it stands there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_policy_of_the_readme_runs(tmp_path: Path) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(code) == 1
    (tmp_path / "readme_policy.py").write_text(code[0], encoding="utf-8")
    arguments = [
        "simulate", "--trace", "azure-conv", "--num-prompts", "40", "--profile", "h100/llama-3-8b", "--rate", "5",
        "--policy", "readme_policy:LeastSlack:decode_bonus=2", "--slo", "ttft:1000,tbt:50",
    ]  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "slacktide", *arguments], env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "readme_policy:LeastSlack" in done.stdout


def test_generated_tables_are_there() -> None:
    table = README.partition("<!-- goodput -->")[2].partition("<!-- /goodput -->")[0]
    assert table.count("\n|") >= 5, "run benchmarks/baselines/run.py"


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
