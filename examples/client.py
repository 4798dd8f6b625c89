"""Ask a running server with targets of this request's own, and see whether they were kept.

Usage: python client.py [URL] (default http://127.0.0.1:8000). Standard library alone; any OpenAI client can send the
same field as `extra_body={"vllm_xargs": {...}}`.
"""

import json
import sys
import time
import urllib.error
import urllib.request

TTFT_MS, TBT_MS = 1000, 100


def main() -> None:
    url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {
        "model": model, "prompt": "The tide", "max_tokens": 16, "stream": True,
        "vllm_xargs": {"slo_ttft_ms": TTFT_MS, "slo_tbt_ms": TBT_MS, "slo_class": "chat"},
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=60) as answer:
        times = [time.monotonic() - began for line in answer if line.startswith(b"data: {")]
    late = sum(at > (TTFT_MS + k * TBT_MS) / 1000 for k, at in enumerate(times))
    print(f"{len(times)} chunks, the first after {times[0] * 1000:.0f} ms, {late} late")


if __name__ == "__main__":
    try:
        main()
    except urllib.error.URLError as error:
        sys.exit(f"no answer ({error.reason}): start a server first, or name its address: client.py http://HOST:PORT")
