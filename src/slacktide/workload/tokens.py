"""Token counts of texts: by an installed tokenizer, or by an estimate that says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from slacktide.core.types import IntArray
from slacktide.errors import InputError

TokenCounter = Callable[[Sequence[str]], IntArray]

ASCII_CHARACTERS_PER_TOKEN = 4
"""OpenAI's rule of thumb for English text, https://help.openai.com/en/articles/4936856."""

ESTIMATE = (
    "estimated: one token for every 4 ASCII characters and one for every other character, at least 1"
    " (--read tokenizer=NAME gives exact ones)"
)


def estimate_tokens(texts: Sequence[str]) -> IntArray:
    """i8 token estimates: 4 ASCII characters a token, and one token for each other character (CJK); 0 for no text."""
    totals = np.fromiter((len(text) for text in texts), dtype=np.int64, count=len(texts))
    plain = np.fromiter((len(text.encode("ascii", "ignore")) for text in texts), dtype=np.int64, count=len(texts))
    return -(-plain // ASCII_CHARACTERS_PER_TOKEN) + (totals - plain)


def token_counter(tokenizer: str | None) -> tuple[TokenCounter, str]:
    """(counter, how it counts in words). `tokenizer`: a tokenizer.json file or a model name; None = the estimate.

    Raises InputError when it cannot be loaded, or no tokenizer library is installed.
    """
    if tokenizer is None:
        return estimate_tokens, ESTIMATE
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found,unused-ignore]
    except ImportError:
        raise InputError(
            f"tokenizer {tokenizer}: the package tokenizers is not installed (pip install tokenizers);"
            " leave the tokenizer out for estimated lengths"
        ) from None
    try:
        path = Path(tokenizer)
        path = path / "tokenizer.json" if path.is_dir() else path
        model = Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(tokenizer)
    except Exception as error:  # the library raises bare Exception
        raise InputError(f"tokenizer {tokenizer}: cannot be loaded: {str(error)[:200]}") from None

    def count(texts: Sequence[str]) -> IntArray:
        encoded = model.encode_batch(list(texts), add_special_tokens=False)
        return np.array([len(encoding.ids) for encoding in encoded], dtype=np.int64)

    return count, f"counted by the tokenizer {tokenizer}"
