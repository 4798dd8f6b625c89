"""Prometheus' text format, as vLLM's `/metrics` writes it: fetch and parse."""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field

from slacktide.errors import InputError

TIMEOUT = 5.0
"""Seconds to wait for an answer: a server that works answers in milliseconds, and the screen must not hang."""
MAX_BYTES = 16 * 2**20
"""Most bytes read; vLLM's page has about 70 kB, a hundred engines' some MB."""

Labels = tuple[tuple[str, str], ...]

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_SAMPLE = re.compile(rf"^({_NAME})(?:\{{(.*)\}})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(rf'\s*({_NAME})="((?:[^"\\]|\\.)*)"\s*,?')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Scrape:
    """One reading: values by name and labels. `time` in seconds on the reader's own clock."""

    time: float
    values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def items(self, name: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """Samples of a name whose labels include those given."""
        wanted = set(labels.items())
        for found, value in self.values.get(name, {}).items():
            if wanted <= set(found):
                yield dict(found), value

    def has(self, name: str) -> bool:
        """Whether the server exposes it."""
        return name in self.values

    def sum(self, name: str, **labels: str) -> float:
        """Sum over engines and all other labels; 0 where there is none."""
        return math.fsum(value for _, value in self.items(name, **labels) if math.isfinite(value))


def parse(text: str, time: float) -> Scrape:
    """The samples of a page. Lines that are no samples are left out: half a page is worth more than none."""
    values: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.match(line.strip())
        labels = None if match is None else _labels(match[2] or "")
        if match is None or labels is None:
            continue
        try:
            values.setdefault(match[1], {})[labels] = float(match[3])
        except ValueError:
            continue
    return Scrape(time, values)


def _labels(text: str) -> Labels | None:
    """Sorted labels; None when they are not written as they should."""
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        found.append((match[1], re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), match[2])))
        at = match.end()
    return tuple(sorted(found))


def metrics_url(url: str) -> str:
    """The address of the metrics of a server's address. Raises InputError for what is no http address."""
    whole = url if "://" in url else f"http://{url}"
    if not re.match(r"https?://[^/\s]+", whole):
        raise InputError(f"URL {url!r}: expected an address such as http://127.0.0.1:8000")
    whole = whole.rstrip("/")
    return whole if whole.endswith("/metrics") else f"{whole}/metrics"


def fetch(url: str, time: float, timeout: float = TIMEOUT) -> Scrape:
    """Read a server's metrics once. Raises InputError: no answer, no metrics, or none of vLLM's."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            text = answer.read(MAX_BYTES).decode("utf-8", "replace")
    except urllib.error.HTTPError as error:
        error.close()
        raise InputError(f"{url}: status {error.code}; expected the metrics of a vLLM server") from None
    except (OSError, ValueError) as error:  # ValueError: an address that http.client refuses
        reason = getattr(error, "reason", None) or error
        raise InputError(f"{url}: no answer ({reason}); is the server up, and is this its address?") from None
    except Exception as error:
        # http.client's own errors for a server that talks something else
        raise InputError(f"{url}: no HTTP ({type(error).__name__}); expected a vLLM server") from None
    scrape = parse(text, time)
    if not any(name.startswith(("vllm:", "slacktide:")) for name in scrape.values):
        shown = " ".join(text.split())[:60]
        raise InputError(f"{url}: no metrics of vLLM there, found {shown!r}; expected a vLLM server's address")
    return scrape
