"""A stack of transformer layers with random weights, for a GPU without vLLM: torch alone, a named model's dimensions.

What a step of a Llama-like model computes: embedding, per layer two norms, QKV, KV written to its slots, attention,
output projection, gated MLP; at the end the logits of each sequence's last token and their maximum. Attention is SDPA,
one call for each group of rows with equal length, so a mixed step pays for its parts one after the other. Each row's KV
lies in one piece, other than vLLM's pages. No rotary embedding, no sampling, no host work of an engine: times are a
lower bound of an engine's, and the profile says so.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from slacktide.core.types import FloatArray
from slacktide.errors import InputError, unknown_name
from slacktide.profiling.experiments import DECODE_ROOM, Envelope, Point
from slacktide.profiling.kernel_tables import Model, models

MEMORY_SHARE = 0.9
"""Of the memory that is free once the weights are there: KV; the rest is for activations and logits."""
ACTIVATION_RESERVE = 2 * 2**30
"""Bytes kept for activations, logits and workspaces."""
BLOCK_SIZE = 16
"""vLLM's default on GPUs; here it only names the KV capacity."""
GRAPH_TOKENS = 512
"""Steps of up to so many tokens run as a CUDA graph, as vLLM's default does: launches would dominate them."""
MAX_MODEL_LEN = 32_768
"""Longest context: beyond, one row fills a GPU's KV by itself."""
LARGE_MEMORY = 70 * 2**30
"""From here on vLLM's defaults for server GPUs hold (capacity.engine_defaults)."""


@dataclass(slots=True)
class Timed:
    """One step. Seconds; `turn` None: there is no host around it."""

    shape: FloatArray
    duration: float
    turn: float | None = None


class TorchStack:
    """The stack. `layers`: how many are really run; the time of one counts for the others. Raises InputError."""

    kind = "torch layer stack, random weights"

    def __init__(
        self, model: Model, *, layers: int | None = None, device: str | None = None, seed: int = 0,
        max_num_batched_tokens: int | None = None, max_num_seqs: int | None = None, kv_tokens: int | None = None,
        max_model_len: int = MAX_MODEL_LEN,
    ) -> None:  # fmt: skip
        try:
            import torch
        except ImportError as error:
            raise InputError(f"--torch-stack needs torch in this environment ({error})") from None
        self._torch, self.model = torch, model
        self.device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._on_gpu = self.device.startswith("cuda")
        self._dtype = torch.bfloat16
        self.layers = min(layers or model.layers, model.layers)
        torch.manual_seed(seed)
        self._weights = [self._layer() for _ in range(self.layers)]
        self._embedding = self._random(model.vocab, model.hidden)
        self._head = self._random(model.vocab, model.hidden)
        large = self._on_gpu and torch.cuda.get_device_properties(0).total_memory >= LARGE_MEMORY
        self._budget = max_num_batched_tokens or (8192 if large else 2048)
        self._seqs = max_num_seqs or (1024 if large else 256)
        self._max_model_len = max_model_len
        self._kv_tokens = kv_tokens or self._room()
        shape = (self.layers, 2, model.kv_heads, self._kv_tokens, model.head_dim)
        self._kv = torch.randn(shape, dtype=self._dtype, device=self.device)

    @classmethod
    def named(cls, name: str, **more: Any) -> TorchStack:
        """The stack of a packaged model. Raises InputError for an unknown name."""
        known = models()
        if name not in known:
            raise unknown_name("model", name, known)
        return cls(known[name], **more)

    def _random(self, *shape: int) -> Any:
        made = self._torch.randn(shape, dtype=self._dtype, device=self.device)
        return made.mul_(1.0 / math.sqrt(shape[-1]))

    def _layer(self) -> dict[str, Any]:
        return {name: self._random(*shape) for name, shape in self.model.gemms(1).items()}

    def _room(self) -> int:
        """KV tokens that the free memory holds."""
        per_token = 2 * self.model.kv_heads * self.model.head_dim * 2 * self.layers
        if not self._on_gpu:
            return 65_536
        free, _ = self._torch.cuda.mem_get_info()
        tokens = int(MEMORY_SHARE * (free - ACTIVATION_RESERVE) // per_token)
        if tokens < 4 * BLOCK_SIZE:
            raise InputError(f"{self.model.name}: does not fit into this GPU's memory; give --layers, or another model")
        return tokens

    @property
    def envelope(self) -> Envelope:
        """What it can run."""
        longest = min(self._max_model_len, self._kv_tokens // 2)
        return Envelope(self._budget, self._seqs, longest, self._kv_tokens, BLOCK_SIZE)

    def facts(self) -> dict[str, Any]:
        """What was measured, on what."""
        from slacktide.profiling.machine import hardware, versions

        # The KV of a whole model: measured layers alone would leave room for more.
        blocks = self._kv_tokens * self.layers // self.model.layers // BLOCK_SIZE
        return {
            "engine": {
                "kind": self.kind,
                "model": self.model.name,
                "dtype": "bfloat16",
                "layers_measured": self.layers,
                "layers": self.model.layers,
                "device": self.device,
                "max_model_len": self.envelope.max_model_len,
                "max_num_batched_tokens": self._budget,
                "max_num_seqs": self._seqs,
                "num_gpu_blocks": blocks + 1,
                "block_size": BLOCK_SIZE,
                "async_scheduling": False,
                "tensor_parallel": 1,
            },
            "versions": versions(),
            "hardware": hardware(),
        }

    def measure(self, point: Point, samples: int) -> list[Timed]:
        """Time the point's step; decode contexts stay the same from sample to sample."""
        whole = self._runner(point, self.layers)
        bare = self._runner(point, 0) if self.layers < self.model.layers else None
        found = []
        for _ in range(samples):
            seconds = self._time(whole)
            if bare is not None:
                outside = self._time(bare)
                seconds = outside + max(seconds - outside, 0.0) * self.model.layers / self.layers
            found.append(Timed(point.shape, seconds))
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._weights, self._kv = [], None
        if self._on_gpu:
            self._torch.cuda.empty_cache()

    def _time(self, step: Callable[[], Any]) -> float:
        if not self._on_gpu:
            began = time.perf_counter()
            step()
            return time.perf_counter() - began
        start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e-3

    def _runner(self, point: Point, layers: int) -> Callable[[], Any]:
        """The step as a function; a CUDA graph where vLLM would use one."""
        torch = self._torch
        groups, last = self._groups(point)
        tokens = sum(c for c, _ in point.chunks) + len(point.decodes)
        ids = torch.randint(0, self.model.vocab, (tokens,), device=self.device)
        rows = torch.tensor(last, device=self.device)

        def step() -> Any:
            with torch.inference_mode():
                return self._forward(ids, rows, groups, layers)

        step()
        if not self._on_gpu or tokens > GRAPH_TOKENS:
            return step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        return graph.replay  # type: ignore[no-any-return]

    def _groups(self, point: Point) -> tuple[list[tuple[int, int, int, int, int]], list[int]]:
        """Rows of equal length together: (first token of the step, rows, new tokens, cached tokens, first KV slot),
        and the position of each row's last token."""
        rows = [*point.chunks, *((1, u) for u in sorted(point.decodes))]
        groups, last, at, slot = [], [], 0, 0
        for (c, u), same in itertools.groupby(rows):
            n = len(list(same))
            groups.append((at, n, c, u, slot))
            last += [at + c * (i + 1) - 1 for i in range(n)]
            at += n * c
            slot += n * (c + u)
        if slot > self._kv_tokens:
            raise InputError(f"point {point.key}: {slot} KV tokens, the stack holds {self._kv_tokens}")
        return groups, last

    def _forward(self, ids: Any, rows: Any, groups: list[tuple[int, int, int, int, int]], layers: int) -> Any:
        torch, model = self._torch, self.model
        functional = torch.nn.functional
        x = self._embedding[ids]
        heads, kv_heads, d = model.heads, model.kv_heads, model.head_dim
        for layer in range(layers):
            w = self._weights[layer]
            h = functional.rms_norm(x, (model.hidden,))
            q, k, v = (h @ w["qkv_proj"].t()).split([heads * d, kv_heads * d, kv_heads * d], dim=-1)
            out = torch.empty_like(q)
            for at, n, c, u, slot in groups:
                part = slice(at, at + n * c)
                cache = self._kv[layer, :, :, slot : slot + n * (c + u)].view(2, kv_heads, n, c + u, d)
                cache[0, :, :, u:].copy_(k[part].view(n, c, kv_heads, d).permute(2, 0, 1, 3))
                cache[1, :, :, u:].copy_(v[part].view(n, c, kv_heads, d).permute(2, 0, 1, 3))
                found = self._attention(q[part].view(n, c, heads, d).transpose(1, 2), cache, u)
                out[part] = found.transpose(1, 2).reshape(n * c, heads * d)
            x = x + out @ w["o_proj"].t()
            h = functional.rms_norm(x, (model.hidden,))
            gate, up = (h @ w["gate_up_proj"].t()).chunk(2, dim=-1)
            x = x + (functional.silu(gate) * up) @ w["down_proj"].t()
        final = functional.rms_norm(x[rows], (model.hidden,))
        return (final @ self._head.t()).argmax(dim=-1)

    def _attention(self, q: Any, cache: Any, cached: int) -> Any:
        """n rows with c new tokens after `cached` ones: q [n, heads, c, d], cache [2, kv_heads, n, c + cached, d]."""
        functional = self._torch.nn.functional
        keys, values = cache[0].transpose(0, 1), cache[1].transpose(0, 1)
        c = q.shape[2]
        gqa = self.model.heads != self.model.kv_heads
        if c == 1 or cached == 0:
            return functional.scaled_dot_product_attention(q, keys, values, is_causal=c > 1, enable_gqa=gqa)
        from torch.nn.attention.bias import causal_lower_right

        if gqa:  # the biased kernels take no grouped heads
            repeat = self.model.heads // self.model.kv_heads
            keys, values = (t.repeat_interleave(repeat, dim=1) for t in (keys, values))
        mask = causal_lower_right(c, c + cached)
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def tiny(**more: Any) -> TorchStack:
    """A stack that a CPU runs in milliseconds a step, for tests."""
    import torch

    torch.set_num_threads(1)  # threads would only wait for one another
    model = Model(
        name="tiny", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=128, vocab=256, qk_norm=False,
        linear_parameters=2.0 * (64 * 128 + 64 * 64 + 3 * 64 * 128), weight_bytes=2.0 * 131_072, kv_bytes_per_token=256,
    )  # fmt: skip
    small: dict[str, Any] = {
        "max_num_batched_tokens": 128, "max_num_seqs": 8, "kv_tokens": 4096 + 64 * DECODE_ROOM, "max_model_len": 512,
        "device": "cpu",
    }  # fmt: skip
    return TorchStack(model, **(small | more))
