"""Tests on a real engine: a random Llama of some hundred thousand weights, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 2, "vocab_size": 512,
    "max_position_embeddings": 1024, "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny model that exists only as a configuration."""
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(MODEL))
    return path
