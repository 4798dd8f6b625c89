"""A bare GPU machine has torch and numpy: measuring there must ask for nothing else."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"scipy", "numba", "pyarrow", "rich", "msgspec", "matplotlib", "aiohttp", "vllm"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import slacktide.profiling.torch_stack
from slacktide.profiling.experiments import Envelope, design
from slacktide.profiling.experiments_run import run_design
from slacktide.profiling.kernel_tables import models
assert models()["llama-3-8b"].layers == 32
assert design(Envelope(128, 8, 512, 4096))
"""


def test_measuring_needs_numpy_alone():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
