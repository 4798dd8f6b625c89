"""What a run writes down: growing arrays for the compiled step, and the RunLog made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from slacktide.core.kv import check_conservation
from slacktide.core.live import (
    ADMISSION_ORDER,
    ARRIVAL,
    INDEX,
    MAX_TOKENS,
    NUM_FLOAT_FIELDS,
    NUM_INT_FIELDS,
    NUM_PROMPT,
    PRIORITY,
    SLO_CLASS,
    SLO_E2E,
    SLO_TBT,
    SLO_TTFT,
    TENANT,
    LiveTable,
)
from slacktide.core.types import FloatArray, IntArray
from slacktide.metrics.log import CUT_OFF, RunLog
from slacktide.sim import steps
from slacktide.sim.arrivals import Arrivals
from slacktide.sim.config import never_fits
from slacktide.sim.prefix import NEXT, REF, PrefixState
from slacktide.workload.requests import Workload

if TYPE_CHECKING:
    from slacktide.sim.config import EngineConfig

_FIRST_STEPS = 8192  # log lines to start with; doubled when full


class RunRecorder:
    """Owns the arrays of a run; only the step log grows."""

    def __init__(self, workload: Workload, config: EngineConfig) -> None:
        n = len(workload)
        self.workload, self.config = workload, config
        self.relegated = np.zeros(n, dtype=np.bool_)
        ints = np.zeros((steps.LOST + 1, n), dtype=np.int64)
        ints[steps.TRUE_OUTPUT] = workload.num_output_tokens
        ints[steps.TOKEN_OFFSET, 1:] = np.cumsum(workload.num_output_tokens)[:-1]
        ints[steps.END_REASON] = steps.OPEN
        ints[steps.ROW] = -1
        ints[steps.STAMP] = -1
        self._scratch: IntArray = np.empty((6, 64), dtype=np.int64)
        self._flight: IntArray = np.empty((2, 64), dtype=np.int64)
        self._entries: tuple[IntArray, FloatArray] | None = None
        self._run = steps.RunArrays(
            counters=np.array([config.num_blocks, 0, 0], dtype=np.int64),
            limits=np.array([config.max_num_batched_tokens, config.max_num_seqs, config.block_size], dtype=np.int64),
            request_ints=ints,
            request_floats=np.full((2, n), np.nan),
            token_step=np.empty(int(workload.num_output_tokens.sum()), dtype=np.int32),
            log_ints=np.empty((8, _FIRST_STEPS), dtype=np.int32),
            log_floats=np.empty((2, _FIRST_STEPS)),
        )

    def arrays(self) -> steps.RunArrays:
        """The arrays as the compiled step takes them; ask again after `reserve`."""
        return self._run

    def reserve(self, count: int) -> int:
        """Make room in the step log for `count` more steps; returns the number of the next step."""
        run, step = self._run, int(self._run.counters[steps.STEPS])
        if step + count > run.log_floats.shape[1]:
            self._run = run._replace(
                log_ints=np.concatenate([run.log_ints, np.empty_like(run.log_ints)], axis=1),
                log_floats=np.concatenate([run.log_floats, np.empty_like(run.log_floats)], axis=1),
            )
        return step

    def scratch(self, n: int) -> IntArray:
        """Work space of compiled runs for n rows: int64[6, >= max(n, block_size)]."""
        if self._scratch.shape[1] < max(n, self.config.block_size):
            self._scratch = np.empty((6, 2 * max(n, self.config.block_size)), dtype=np.int64)
        return self._scratch

    def flight(self, n: int) -> IntArray:
        """Where a compiled run keeps the rows of its step: int64[2, >= n]."""
        if self._flight.shape[1] < n:
            self._flight = np.empty((2, 2 * n), dtype=np.int64)
        return self._flight

    def entry_columns(self) -> tuple[IntArray, FloatArray]:
        """What each request enters the live table with, a column each; index -1 marks one to refuse."""
        if self._entries is None:
            w, n = self.workload, len(self.workload)
            ints = np.zeros((NUM_INT_FIELDS, n), dtype=np.int64)
            ints[INDEX] = np.arange(n)
            ints[NUM_PROMPT], ints[MAX_TOKENS] = w.num_prompt_tokens, w.max_tokens
            ints[PRIORITY], ints[TENANT], ints[SLO_CLASS], ints[ADMISSION_ORDER] = w.priority, w.tenant, w.slo_class, -1
            ints[INDEX, never_fits(w, self.config)] = -1
            floats = np.full((NUM_FLOAT_FIELDS, n), np.nan)
            floats[ARRIVAL], floats[SLO_TTFT], floats[SLO_TBT] = w.arrival_time, w.slo_ttft, w.slo_tbt
            floats[SLO_E2E] = w.slo_e2e
            self._entries = ints, floats
        return self._entries

    def audit(self, table: LiveTable, run: steps.RunArrays, px: PrefixState) -> None:
        """Check the conservation laws (AssertionError)."""
        table.check(self.config.block_size)
        free, live = int(run.counters[steps.FREE]), table.live
        if px.slot_of.size == 0:
            check_conservation(free, live.num_blocks, self.config.num_blocks)
        else:
            held = int((px.slots[REF, :-2] > 0).sum())
            assert free + held == self.config.num_blocks, f"KV blocks leak: {free} free + {held} held"
            assert int(px.slots[REF, :-2].sum()) == int(live.num_blocks.sum()), "holders do not match the tables"
            at, length = px.slots.shape[1] - 2, -1
            while at != px.slots.shape[1] - 1:
                at, length = int(px.slots[NEXT, at]), length + 1
            assert length == free, f"free list of {length}, {free} blocks free"
        rows = run.request_ints[steps.ROW, live.index]
        assert np.array_equal(rows, np.arange(table.n)), "row numbers do not match the table"

    def log(
        self, run: steps.RunArrays, arrivals: Arrivals, now: float, wall_time: float, decision_time: float
    ) -> RunLog:
        """The log so far; requests without a verdict are `cut_off`."""
        workload, ints = self.workload, run.request_ints
        m = int(run.counters[steps.STEPS])
        token_step, delivered = run.token_step, ints[steps.DELIVERED]
        if delivered.sum() < token_step.size:  # close the gaps of requests that did not get all their tokens
            shift = np.repeat(ints[steps.TOKEN_OFFSET] - (np.cumsum(delivered) - delivered), delivered)
            token_step = token_step[np.arange(delivered.sum()) + shift]
        start = run.log_floats[steps.LOG_START, :m]
        return RunLog(
            arrival_time=arrivals.time,
            num_prompt_tokens=workload.num_prompt_tokens,
            num_output_tokens=workload.num_output_tokens,
            end_time=run.request_floats[steps.END_TIME],
            end_reason=np.where(ints[steps.END_REASON] == steps.OPEN, CUT_OFF, ints[steps.END_REASON]).astype(np.int8),
            slo_ttft=workload.slo_ttft,
            slo_tbt=workload.slo_tbt,
            slo_e2e=workload.slo_e2e,
            tenant=workload.tenant,
            slo_class=workload.slo_class,
            abort_time=arrivals.time + (workload.abort_time - workload.arrival_time),
            first_scheduled_time=run.request_floats[steps.FIRST_SCHEDULED],
            relegated=self.relegated,
            num_preemptions=ints[steps.PREEMPTIONS],
            recomputed_tokens=ints[steps.RECOMPUTED],
            cached_tokens=ints[steps.CACHED],
            scheduled_tokens=ints[steps.SCHEDULED],
            token_offsets=np.concatenate([[0], np.cumsum(delivered)]),
            token_step=token_step,
            start=start,
            duration=run.log_floats[steps.LOG_DURATION, :m],
            num_tokens=run.log_ints[steps.LOG_TOKENS, :m],
            num_prefill_tokens=run.log_ints[steps.LOG_PREFILL_TOKENS, :m],
            num_prefills=run.log_ints[steps.LOG_PREFILLS, :m],
            num_decodes=run.log_ints[steps.LOG_DECODES, :m],
            num_running=run.log_ints[steps.LOG_RUNNING, :m],
            num_waiting=run.log_ints[steps.LOG_WAITING, :m],
            num_free_blocks=run.log_ints[steps.LOG_FREE, :m],
            num_preempted=run.log_ints[steps.LOG_PREEMPTED, :m],
            sim_duration=float(np.fmax(now, np.fmax.reduce(run.request_floats[steps.END_TIME]))),
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            wall_time=wall_time,
            decision_time=decision_time,
            tenants=workload.tenants,
            slo_classes=workload.slo_classes,
        )
