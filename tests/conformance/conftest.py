"""Where vLLM is not installed these tests skip with one reason; where it is, its own warnings do not fail."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM's dependencies warn while they are imported
        import headless  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))


@pytest.fixture(scope="session")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tiny model configurations and state files go."""
    return tmp_path_factory.mktemp("headless")
