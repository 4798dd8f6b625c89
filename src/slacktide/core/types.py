"""The types that hosts and policies share. Seconds, tokens and KV blocks everywhere.

A host (simulator or vLLM plug-in) shows a policy a `StepView`, gets a `Plan` back, carries it out and reports what
really happened as a `StepResult`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from slacktide.core.latency import LatencyModel

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

# Values of Live.status. A preempted request waits again, with all its computed tokens lost (recompute preemption).
WAITING, RUNNING, PREEMPTED = 0, 1, 2

MAX_SLO_SECONDS = 1e6
"""Longest SLO taken as meant (11.6 days): beyond it a unit was mistaken, or a huge header would overflow a sort key."""


@dataclass(frozen=True, slots=True)
class SLO:
    """A request's latency target, in seconds.

    `ttft`: time to first token. `tbt`: time between tokens (vLLM's TPOT/ITL). `e2e`: end-to-end, optional.
    Infinity means "no such target". Raises ValueError for values that are not positive, or beyond MAX_SLO_SECONDS.
    """

    ttft: float = math.inf
    tbt: float = math.inf
    e2e: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft", "tbt", "e2e"):
            value = getattr(self, name)
            if not value > 0 or (value > MAX_SLO_SECONDS and value != math.inf):
                raise ValueError(f"SLO {name}={value} s: expected a positive time of at most {MAX_SLO_SECONDS:g} s")

    def deadline(self, arrival_time: float, k: int) -> float:
        """When output token k (0 is the first) is due: arrival + ttft + k*tbt (SlidingServe eq. 1)."""
        return float(token_deadline(arrival_time, self.ttft, self.tbt, k))


def token_deadline(arrival: Any, ttft: Any, tbt: Any, k: Any) -> Any:
    """The one definition of a token's deadline, for numbers and arrays: arrival + ttft + k*tbt, k from 0.

    k = 0 with an infinite tbt is due at arrival + ttft, not NaN.
    """
    later = np.where(np.asarray(k) > 0, np.asarray(k, dtype=np.float64), 1.0) * tbt
    return arrival + ttft + np.where(np.asarray(k) > 0, later, 0.0)


@dataclass(frozen=True, slots=True)
class Request:
    """What a scheduler may know of a request when it arrives. The true output length is not in it."""

    id: int
    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    slo: SLO = SLO()
    priority: int = 0
    tenant: int = 0
    slo_class: int = 0


class Live(NamedTuple):
    """One row per live request, in (arrival_time, id) order. Every field is a read-only 1-D array of length n.

    `num_computed_tokens` and `num_blocks` count what is scheduled already, as in vLLM: with pipeline depth 2 they
    include the step in flight, whose outputs (`num_in_flight_tokens`, 0 or 1 a row) are not known yet.
    """

    # Hides tuple.index, which nobody wants of a table.
    index: IntArray  # type: ignore[assignment]  # pyright: ignore[reportIncompatibleMethodOverride]
    """The host's number of the request; stable over its life (rows move when a request retires)."""
    status: IntArray
    """WAITING, RUNNING or PREEMPTED."""
    num_prompt_tokens: IntArray
    max_tokens: IntArray
    """Most output tokens the request may get (the client's limit, not its true length)."""
    num_computed_tokens: IntArray
    """Tokens whose KV is computed (or in flight)."""
    num_output_tokens: IntArray
    """Output tokens known so far."""
    num_in_flight_tokens: IntArray
    """Output tokens of the step in flight, not known yet (vLLM: output placeholders)."""
    num_blocks: IntArray
    """KV blocks held."""
    num_cached_tokens: IntArray
    """Waiting rows: prompt tokens that the prefix cache would supply on admission now. Else 0."""
    num_cached_free_blocks: IntArray
    """Of those, blocks that nobody holds now, so that taking them lowers `num_free_blocks`."""
    priority: IntArray
    """Lower is served first (vLLM's sense)."""
    num_preemptions: IntArray
    admission_order: IntArray
    """Running rows: rank in vLLM's `running` list (order of admission). Waiting rows: -1."""
    tenant: IntArray
    """Whose request it is: code into `StepView.tenants`, written once on arrival."""
    slo_class: IntArray
    relegated: IntArray
    """1 once a plan relegated the row: it is served only from what others leave."""
    num_shared_blocks: IntArray
    """Running rows: of `num_blocks`, those that others hold too, so that a preemption does not free them. Kept up only
    while free blocks are so few that a step could preempt."""
    arrival_time: FloatArray
    slo_ttft: FloatArray
    slo_tbt: FloatArray
    slo_e2e: FloatArray
    first_token_time: FloatArray
    """NaN before the first token."""
    last_token_time: FloatArray
    """NaN before the first token."""
    columns: tuple[IntArray, FloatArray]
    """The whole store behind the fields (integers, floats; field-major, spare columns at the end): for kernels."""

    @property
    def num_tokens_needed(self) -> IntArray:
        """Tokens left to compute until the next output token: known tokens - computed; 1 for a decode."""
        known = self.num_prompt_tokens + self.num_output_tokens + self.num_in_flight_tokens
        return known - self.num_computed_tokens

    @property
    def is_decode(self) -> BoolArray:
        """Rows that need exactly one token to emit the next one and have emitted before (phase, not chunk size)."""
        decode: BoolArray = (self.num_tokens_needed == 1) & (self.num_output_tokens + self.num_in_flight_tokens > 0)
        return decode

    @property
    def is_running(self) -> BoolArray:
        """Rows that hold a seat in the running list."""
        running: BoolArray = self.status == RUNNING
        return running

    @property
    def next_deadline(self) -> FloatArray:
        """When the next output token is due (seconds on the host's clock)."""
        k = self.num_output_tokens + self.num_in_flight_tokens
        return np.asarray(token_deadline(self.arrival_time, self.slo_ttft, self.slo_tbt, k), dtype=np.float64)


class Limits(NamedTuple):
    """What the engine allows in this step."""

    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    num_free_blocks: int
    num_blocks: int
    """Usable KV blocks in all (vLLM's num_gpu_blocks - 1: it keeps one for itself)."""
    watermark_blocks: int = 0
    """Blocks that admission must leave free (vLLM's `watermark` times num_blocks)."""
    max_model_len: int = 2**31 - 1


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the host really did in a step.

    `indices` are request numbers (Live.index), because rows move between steps; `tokens` goes with them.
    `step_time` in seconds is None while the step is still in flight.
    """

    indices: IntArray
    tokens: IntArray
    preempted: IntArray
    finished: IntArray
    step_time: float | None


class StepView(NamedTuple):
    """Everything a policy may look at when it decides a step. Read-only."""

    now: float
    """Seconds on the host's clock."""
    live: Live
    limits: Limits
    latency: LatencyModel
    """The belief: what the policy may assume a step costs. Not the truth."""
    last: StepResult | None = None
    """The newest finished step."""
    tenants: Sequence[str] = ()
    """Names of the codes in `live.tenant`; codes are added, never changed. () where the host tells none apart."""
    busy_until: float = 0.0
    """When the steps in flight are expected to end, by what was predicted of them; in the past where there is none."""

    @property
    def start(self) -> float:
        """When the step that is decided now is expected to start: `now`, or the end of the step in flight."""
        return max(self.now, self.busy_until)


_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_NO_ROWS.flags.writeable = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What a policy wants of the next step. Rows are positions in the view's `live`.

    `rows` in service order with `num_scheduled_tokens` (> 0) each; a waiting row among them is admitted. `preempted`
    rows lose their KV before anything is allocated. `rejected` rows end now. `relegated` rows are marked as served
    only from what others leave. `token_cap` is the most tokens the host may run (it may run fewer).
    `predicted_step_time` in seconds, when the policy predicts. `why` explains the decision.
    """

    rows: IntArray
    num_scheduled_tokens: IntArray
    preempted: IntArray = field(default_factory=lambda: _NO_ROWS)
    rejected: IntArray = field(default_factory=lambda: _NO_ROWS)
    relegated: IntArray = field(default_factory=lambda: _NO_ROWS)
    token_cap: int | None = None
    predicted_step_time: float | None = None
    why: dict[str, Any] | None = None
