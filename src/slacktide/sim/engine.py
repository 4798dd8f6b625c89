"""The step loop: a virtual clock, arrivals, the policy, and the truth about how long a step takes.

One turn of the loop: let due requests in, show the policy a StepView, carry its Plan out, end the step, retire what is
done. The heavy half of each is compiled (`steps.py`, `fast_forward.py`). Longer than most files: all of it shares the
state of one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np

from slacktide.core.latency import LatencyModel
from slacktide.core.live import (
    ARRIVAL,
    INDEX,
    NUM_FLOAT_FIELDS,
    NUM_INT_FIELDS,
    NUM_OUTPUT,
    RELEGATED,
    STATUS,
    LiveTable,
)
from slacktide.core.pack import WalkArguments
from slacktide.core.policy import Policy
from slacktide.core.types import FloatArray, IntArray, Limits, Plan, StepResult, StepView
from slacktide.metrics.log import ABORTED, REJECTED, RunLog
from slacktide.sim import fast_forward as compiled_runs
from slacktide.sim import prefix, steps
from slacktide.sim.arrivals import Arrivals
from slacktide.sim.config import EngineConfig, never_fits
from slacktide.sim.record import RunRecorder
from slacktide.workload.requests import Workload

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_NO_COLUMNS = (np.empty((NUM_INT_FIELDS, 0), dtype=np.int64), np.empty((NUM_FLOAT_FIELDS, 0)))
# Steps run in one compiled call at most: keeps the progress bar and Ctrl-C alive (a call takes some 10 ms).
_MAX_RUN = 4096

# Steps without a single token after which a policy is taken to thrash for ever; four times the longest prompt if that
# is more, because a budget of one token a step is legal.
_PATIENCE = 1 << 16
_CHECKPOINTS = (0.125, 0.25, 0.5, 1.0)  # doubling: all checks together cost less than one look at the whole run

_PLAN_ERRORS = {
    steps.BAD_ROW: "schedules a row that does not exist",
    steps.TWICE: "schedules a row twice",
    steps.BAD_TOKENS: "gives a row no token, or more than it needs",
    steps.OVER_BUDGET: "schedules more tokens than max_num_batched_tokens",
    steps.OVER_SEQS: "runs more requests than max_num_seqs",
    steps.NO_BLOCKS: "schedules a row that lacks KV blocks",
    steps.BAD_VICTIM: "preempts a row that does not run",
}


class PlanError(RuntimeError):
    """A policy asked for a step that no engine could run: a defect of the policy, not of the input."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """Outcome of a run: the log, the real seconds of each decision, and whether `stop` ended it early."""

    log: RunLog
    decision_times: FloatArray
    stopped: bool = False


def simulate(
    workload: Workload,
    policy: Policy,
    truth: LatencyModel,
    config: EngineConfig,
    *,
    belief: LatencyModel | None = None,
    fast_forward: bool = True,
    check: bool = False,
    progress: Callable[[int, float], None] | None = None,
    on_step: Callable[[StepView, Plan], None] | None = None,
    max_concurrency: int | None = None,
    stop: Callable[[RunLog], bool] | None = None,
) -> RunResult:
    """Run all requests to their end and return what happened.

    truth: what a step really takes. belief: what the policy is told (default: the truth itself; hosts pass a fit).
    fast_forward: advance in compiled code, without asking the policy, where it allows that (`decode_runs`,
        `walk_arguments`); the result is the same, only faster. Off when `on_step` wants to see every decision.
    check: audit all invariants after every step (slow; for tests).
    progress: called now and then with (requests ended, simulated seconds).
    on_step: called with every view and plan that the policy decided.
    max_concurrency: most requests in the system; later ones wait at the client, and that wait counts.
    stop: asked at 1/8, 1/4, 1/2 and the end of the arrivals' span with the log so far (open requests are `cut_off`);
        True ends the run there. For searches that need to know only whether too many requests miss.

    A request that can never fit is refused on arrival (end reason `rejected`). Raises PlanError when the policy asks
    for the impossible, or leaves work undone for ever.
    """
    return _Run(workload, policy, truth, belief or truth, config, check, max_concurrency).loop(
        fast_forward, progress, on_step, stop
    )


class Flight(NamedTuple):
    """A step that runs."""

    step: int
    """Its line in the log."""
    num_rows: int
    """Rows that have tokens in it."""
    rows: IntArray
    """int64[2, >= num_rows]: requests and their tokens, as `steps.launch` left them."""
    preempted: IntArray
    """Requests that it preempted."""
    decided: float
    """When it was decided."""
    predicted: float
    """Seconds that its policy expected; 0 where it predicts none."""


class _Run:
    """State of one run."""

    def __init__(
        self,
        workload: Workload,
        policy: Policy,
        truth: LatencyModel,
        belief: LatencyModel,
        config: EngineConfig,
        check: bool,
        max_concurrency: int | None,
    ) -> None:
        self.workload, self.policy, self.belief, self.config, self.check = workload, policy, belief, config, check
        self.latency: FloatArray = truth.packed
        self.table = LiveTable()
        self.arrivals = Arrivals(workload, max_concurrency)
        self.recorder = RunRecorder(workload, config)
        self.run = self.recorder.arrays()
        self.px = prefix.empty_state()
        if config.enable_prefix_caching:
            self.px = prefix.make_state(
                config.num_blocks, config.block_size, workload.num_prompt_tokens, workload.num_output_tokens,
                workload.hash_ids, workload.hash_block_size,
            )  # fmt: skip
        self.now = 0.0
        self.free_at = 0.0  # when the last scheduled step ends: the next one starts then
        self.in_flight: list[Flight] = []  # oldest first
        self.last_end = 0.0  # of the newest step that ended
        self.last: StepResult | None = None
        self.observe: Callable[[StepResult], None] | None = getattr(policy, "observe", None)
        self.finished = np.empty(config.max_num_seqs + 1, dtype=np.int64)
        self.watermark_blocks = int(config.watermark * (config.num_blocks + 1))  # vLLM counts its null block in
        self.decision_times: list[float] = []
        self.walk: IntArray | None = None  # constant arguments of a policy that is nothing but `walk`
        self.checkpoint = math.inf  # when `stop` is to be asked next
        self.delivered = -1  # output tokens at the last look

    def loop(
        self,
        fast_forward: bool,
        progress: Callable[[int, float], None] | None,
        on_step: Callable[[StepView, Plan], None] | None,
        stop: Callable[[RunLog], bool] | None,
    ) -> RunResult:
        began = perf_counter()
        span = float(self.workload.arrival_time[-1])
        checkpoints = [span * share for share in _CHECKPOINTS] if stop is not None and span > 0 else []
        self.checkpoint = checkpoints[0] if checkpoints else math.inf
        stopped = False
        skips = self._may_skip() if fast_forward and on_step is None else False
        turns, patience = 0, max(_PATIENCE, 4 * int(self.workload.num_prompt_tokens.max()))
        while True:
            while self.arrivals.next_event <= self.now:  # who leaves at once may make room for the next
                self._let_in()
            if checkpoints and self.now >= checkpoints[0]:
                checkpoints = [time for time in checkpoints if time > self.now]
                self.checkpoint = checkpoints[0] if checkpoints else math.inf
                if stop is not None and stop(self._log(began)):
                    stopped = True
                    break
            turns += 1
            if progress is not None and (self.walk is not None or turns % 512 == 0):
                progress(self.arrivals.ended, self.now)
            if turns % patience == 0:
                self._expect_tokens(patience)
            if skips and (self.table.n or self.walk is not None) and self._fast_forward():
                continue
            if self.arrivals.next_event <= self.now:
                continue  # compiled code met a request that only Python can let in, or refuse
            if self.table.n and self._schedule(on_step) and len(self.in_flight) < self.config.pipeline_depth:
                continue
            if self.in_flight:
                self._end_oldest()
            elif self.arrivals.next_event < math.inf:
                self.now = max(self.now, self.arrivals.next_event)
            elif self.table.n:
                raise PlanError(f"policy {self._name} schedules nothing, with {self.table.n} requests live")
            else:
                break
        if progress is not None:
            progress(self.arrivals.ended, self.now)
        return RunResult(self._log(began), np.array(self.decision_times), stopped)

    def _log(self, began: float) -> RunLog:
        live = self.table.live
        self.run.request_ints[steps.DELIVERED, live.index] = live.num_output_tokens
        wall_time, decision_time = perf_counter() - began, math.fsum(self.decision_times)
        return self.recorder.log(self.run, self.arrivals, self.now, wall_time, decision_time)

    def _expect_tokens(self, patience: int) -> None:
        """Raise PlanError when no token came out since the last call: preempted work chases its own tail."""
        live = self.table.live
        self.run.request_ints[steps.DELIVERED, live.index] = live.num_output_tokens
        delivered = int(self.run.request_ints[steps.DELIVERED].sum())
        if delivered == self.delivered and self.table.n:
            raise PlanError(
                f"policy {self._name} delivered no token in {patience} steps, with {self.table.n} requests live"
            )
        self.delivered = delivered

    def _may_skip(self) -> bool:
        """Whether stretches may run without asking the policy; finds the arguments of one that is only `walk`."""
        if self.config.pipeline_depth != 1:
            return False
        offer = getattr(self.policy, "walk_arguments", None)
        if offer is not None and self.observe is None:
            given: WalkArguments | None = offer(self._view().limits)
            if given is not None:
                self.walk = np.array([*given, self.config.max_model_len], dtype=np.int64)
        return self.walk is not None or bool(getattr(self.policy, "decode_runs", False))

    @property
    def _name(self) -> str:
        return str(getattr(self.policy, "name", type(self.policy).__qualname__))

    def _let_in(self) -> None:
        """Append all requests that are due, and drop those whose client has given up."""
        table = self.table
        ints, floats = self.recorder.entry_columns()
        for index in self.arrivals.due(self.now):
            sent = self.arrivals.sent(index)
            if ints[INDEX, index] < 0:
                self._end(index, REJECTED, sent)
                continue
            self.run.request_ints[steps.ROW, index] = table.n
            table.append_row(ints[:, index], floats[:, index])
            table.floats[ARRIVAL, table.n - 1] = sent
        self._give_up()

    def _give_up(self) -> None:
        """Drop the requests whose clients have left by now."""
        gone = [index for index in self.arrivals.given_up(self.now) if self.run.request_ints[steps.ROW, index] >= 0]
        if gone:
            self._drop(self.run.request_ints[steps.ROW, gone].copy(), ABORTED, self.arrivals.abort_times(gone))

    def _end(self, index: int, reason: int, time: float) -> None:
        """Give a request its verdict; in a closed loop its user thinks, then sends the next one."""
        self.run.request_ints[steps.END_REASON, index] = reason
        self.run.request_ints[steps.ROW, index] = -1
        self.run.request_floats[steps.END_TIME, index] = time
        self.arrivals.end(time)

    def _drop(self, rows: IntArray, reason: int, times: list[float] | None = None) -> None:
        """End live rows that the engine does not finish, at `times` (default: now)."""
        table = self.table
        for row, time in zip(rows.tolist(), times or [self.now] * rows.size, strict=True):
            index = int(table.ints[INDEX, row])
            steps.drop(table.ints, row, self.run, self.px)
            self.run.request_ints[steps.DELIVERED, index] = table.ints[NUM_OUTPUT, row]
            self._end(index, reason, time)
            table.ints[STATUS, row] = -1
        table.resized(int(steps.close_gaps(table.ints, table.floats, table.n, self.run)))

    def _fast_forward(self) -> bool:
        """Advance in compiled code as far as that goes; False when this step needs Python."""
        before = self.recorder.reserve(_MAX_RUN)
        self.run = self.recorder.arrays()
        if self.walk is not None:
            return self._run_walk(self.walk)
        if self.table.n > self.config.max_num_seqs:
            return False
        table, scratch = self.table, self.recorder.scratch(self.table.n)
        left, num_finished, self.now = compiled_runs.decode_run(
            table.ints, table.floats, table.n, self.latency, self.now, self.arrivals.next_event,
            self.arrivals.next_abort, _MAX_RUN, self.finished, scratch, *self.run, *self.px,
        )  # fmt: skip
        if int(self.run.counters[steps.STEPS]) == before:
            return False
        self._after(int(left), int(num_finished), None)
        return True

    def _run_walk(self, arguments: IntArray) -> bool:
        """Run a policy that is nothing but `walk`."""
        table, arrivals = self.table, self.arrivals
        position = arrivals.position
        capacity = table.ints.shape[1]
        scratch = self.recorder.scratch(capacity)
        if self.finished.size < 2 * capacity + _MAX_RUN:
            self.finished = np.empty(2 * capacity + _MAX_RUN, dtype=np.int64)
        rows, targets = self.recorder.entry_columns() if position is not None else _NO_COLUMNS
        until = arrivals.next_event if position is None else self.checkpoint
        before = (int(self.run.counters[steps.STEPS]), position)
        flight = self.recorder.flight(capacity)
        why, left, at, ended, row, now = compiled_runs.walk_run(
            table.ints, table.floats, table.n, self.latency, self.now, position or 0, until, arrivals.next_abort,
            _MAX_RUN, position is None, arguments, rows, targets, flight, self.finished, scratch, *self.run, *self.px,
        )  # fmt: skip
        if why == compiled_runs.FAILED:
            self._refuse(ended, row)
        self.now = now
        table.resized(left)
        if position is None:
            for _ in range(ended):
                arrivals.end(now)
        else:
            arrivals.advance(at, ended)
        if self.check:
            self.recorder.audit(table, self.run, self.px)
        if why == compiled_runs.LAUNCHED:  # `row` counts the rows of the step
            step = int(self.run.counters[steps.STEPS]) - 1
            self.in_flight.append(Flight(step, row, flight[:, :row].copy(), _NO_ROWS, now, 0.0))
            self._end_oldest()
            return True
        return why == compiled_runs.PAUSED and (int(self.run.counters[steps.STEPS]), arrivals.position) != before

    def _view(self) -> StepView:
        config = self.config
        if config.enable_prefix_caching:
            free, n = int(self.run.counters[steps.FREE]), self.table.n
            short = prefix.is_short(n, free, config.max_num_batched_tokens, config.block_size)
            prefix.refresh_hits(self.table.ints, n, self.px, config.block_size, short)
        limits = Limits(
            config.max_num_batched_tokens, config.max_num_seqs, config.block_size,
            int(self.run.counters[steps.FREE]), config.num_blocks, self.watermark_blocks, config.max_model_len,
        )  # fmt: skip
        busy_until = self.last_end
        for flight in self.in_flight:
            busy_until = max(busy_until, flight.decided) + flight.predicted
        return StepView(self.now, self.table.live, limits, self.belief, self.last, self.workload.tenants, busy_until)

    def _schedule(self, on_step: Callable[[StepView, Plan], None] | None) -> bool:
        """Ask the policy for a step and launch it; False when it gives none."""
        view = self._view()
        began = perf_counter()
        plan = self.policy.plan(view)
        self.decision_times.append(perf_counter() - began)
        if on_step is not None:
            on_step(view, plan)
        predicted = plan.predicted_step_time
        if plan.relegated.size or plan.rejected.size:
            plan = self._relegate_and_reject(plan)
        if not plan.rows.size and not plan.preempted.size:
            return False
        step = self.recorder.reserve(1)
        self.run = self.recorder.arrays()
        table, start = self.table, max(self.now, self.free_at)
        flight = np.empty((2, plan.rows.size), dtype=np.int64)
        preempted = table.ints[INDEX, plan.preempted] if plan.preempted.size else _NO_ROWS
        if self.config.pipeline_depth == 1 and self.arrivals.next_abort == math.inf:
            error, row, count, left, num_finished, end = steps.step_once(
                table.ints, table.floats, table.n, plan.rows, plan.num_scheduled_tokens, plan.preempted, self.latency,
                start, flight, self.finished, *self.run, *self.px,
            )  # fmt: skip
            if error:
                self._refuse(error, row)
            self.now = end
            self._after(left, num_finished, (step, flight[:, :count], preempted))
            return bool(count) or bool(plan.preempted.size)
        error, row, count = steps.launch(
            table.ints, table.n, plan.rows, plan.num_scheduled_tokens, plan.preempted, self.run, self.px, self.latency,
            start, flight,
        )  # fmt: skip
        if error:
            self._refuse(error, row)
        if count:
            self.free_at = start + float(self.run.log_floats[steps.LOG_DURATION, step])
            self.in_flight.append(Flight(step, count, flight, preempted, view.now, predicted or 0.0))
        elif preempted.size:
            self._after(table.n, 0, (step, flight[:, :0], preempted))
        # A step of preemptions alone: their tokens in flight must arrive before anyone is admitted again.
        return bool(count) or (bool(plan.preempted.size) and not self.in_flight)

    def _refuse(self, error: int, row: int) -> None:
        index = self.table.ints[INDEX, row] if 0 <= row < self.table.n else None
        where = "" if index is None else f" (row {row}, request {index})"
        raise PlanError(f"policy {self._name} {_PLAN_ERRORS[int(error)]}{where} at {self.now:.6f} s")

    def _relegate_and_reject(self, plan: Plan) -> Plan:
        """Mark relegated rows, end rejected ones, and renumber the rest of the plan."""
        table = self.table
        table.ints[RELEGATED, plan.relegated] = 1
        self.recorder.relegated[table.ints[INDEX, plan.relegated]] = True
        if not plan.rejected.size:
            return plan
        moved = np.ones(table.n, dtype=np.int64)
        moved[plan.rejected] = 0
        moved = np.cumsum(moved) - 1
        self._drop(plan.rejected, REJECTED)
        return Plan(moved[plan.rows], plan.num_scheduled_tokens, moved[plan.preempted])

    def _end_oldest(self) -> None:
        """Wait for the oldest step in flight. As in vLLM, who left while it ran gets none of its tokens."""
        step, count, flight, preempted, _, _ = self.in_flight.pop(0)
        table = self.table
        self.now = float(self.run.log_floats[steps.LOG_START, step] + self.run.log_floats[steps.LOG_DURATION, step])
        self.last_end = self.now
        if self.arrivals.next_abort <= self.now:
            self._give_up()
        left, num_finished = steps.complete_and_close(
            table.ints, table.floats, table.n, self.run, self.px, flight, count, step, self.finished
        )
        self._after(int(left), int(num_finished), (step, flight[:, :count], preempted))

    def _after(self, left: int, num_finished: int, done: tuple[int, IntArray, IntArray] | None) -> None:
        """What follows a step: retired rows leave the arrivals' books, the policy learns the outcome."""
        if num_finished:
            self.table.resized(left)
            for _ in range(num_finished):
                self.arrivals.end(self.now)
        if done is not None and self.observe is not None:
            step, flight, preempted = done
            duration = float(self.run.log_floats[steps.LOG_DURATION, step]) if flight.shape[1] else None
            finished = self.finished[:num_finished].copy()
            self.last = StepResult(flight[0], np.abs(flight[1]), preempted, finished, duration)
            self.observe(self.last)
        if self.check:
            self.recorder.audit(self.table, self.run, self.px)


__all__ = ["EngineConfig", "PlanError", "RunResult", "never_fits", "simulate"]
