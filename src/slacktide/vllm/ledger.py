"""The facts of each step: what vLLM scheduled, how long it took, which tokens and ends came of it.

Feeds the mirror, the policy's `observe` (as a StepResult), the belief, the metrics, the logs and the front end's
forecast. A step's time runs from its schedule, or from the end of the step before if that came later: with async
scheduling a step is scheduled while its predecessor still runs.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.live import INDEX, NUM_COMPUTED, NUM_OUTPUT
from slacktide.core.types import FloatArray, IntArray, StepResult
from slacktide.vllm import compat, outcome, shadow
from slacktide.vllm.belief import OnlineBelief
from slacktide.vllm.estimate import Publisher
from slacktide.vllm.kernels import note_step
from slacktide.vllm.metrics import Metrics, slack, snapshot_path
from slacktide.vllm.mirror import Mirror
from slacktide.vllm.settings import Settings, state_dir
from slacktide.vllm.steering import Chunks
from slacktide.vllm.steplog import Capture, Listener, StepLine, StepLog, Writer

PUBLISH_EVERY = 0.1
"""Seconds between two forecasts for the front end; one costs about 50 us."""

METRICS_EVERY = 0.5
"""Seconds between two files of metrics, far below any scrape interval; one costs about 0.2 ms. Written at the end of a
step, not in a thread: that would ask for the interpreter's lock at any time and hold up schedule() for it."""

LEARNED_EVERY = 10.0
"""Seconds between two lines of the step log that say what the policy learned; telling costs some 50 us."""

GAP_WEIGHT = 0.1
"""Weight of the newest gap between two finishes: a mean over some ten requests."""

_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class Decision:
    """How a step was decided: filled before vLLM schedules, read after."""

    start: float
    """Seconds on the mirror's clock."""
    mode: str
    seconds: float = 0.0
    fallback: str = ""
    """Why vLLM scheduled alone."""
    plan: Chunks | None = None
    """What our policy wants; None when it was not asked."""
    predicted: float | None = None
    """The policy's own prediction of the step's seconds."""
    first_token: float | None = None
    """The policy's own prediction of the TTFT of a request that arrives now, in seconds."""
    ours: shadow.Ours | None = None
    """Shadow mode: the forecast for our plan."""


@dataclass(slots=True)
class Step:
    """A scheduled step."""

    output: Any
    decision: Decision
    slots: IntArray
    indices: IntArray
    tokens: IntArray
    shape: FloatArray
    preempted: IntArray
    predicted: float
    counts: tuple[int, int, int]
    """Running, waiting, free blocks after it was scheduled."""
    shadow: dict[str, Any] | None


class Ledger:
    """Keeps the books of one scheduler."""

    def __init__(self, scheduler: Any, mirror: Mirror, settings: Settings, label: str) -> None:
        self.scheduler, self.mirror, self.label = scheduler, mirror, label
        self.belief = OnlineBelief(settings.prior)
        self.metrics = Metrics()
        self.steps: deque[Step] = deque()
        self.last: StepResult | None = None
        self._last_end = self._next_publish = self._next_metrics = self._last_finish = self._finish_gap = 0.0
        self._last_batch = ""
        self.forecast: float | None = None
        """The policy's prediction of a TTFT, with the newest step that it decided."""
        self.learned: Callable[[], dict[str, Any] | None] = lambda: None
        """What the policy learned so far; set by the host."""
        self._next_learned = 0.0
        config = scheduler.vllm_config
        rank = int(getattr(config.parallel_config, "data_parallel_index", 0) or 0)
        suffix = f"-{rank}" if int(getattr(config.parallel_config, "data_parallel_size", 1) or 1) > 1 else ""
        directory = state_dir(settings, str(config.instance_id))
        self.writer = Writer()
        self._metrics_path = snapshot_path(directory, rank)
        self._publisher = Publisher(settings.estimate_dir or directory, rank)
        self._step_log = None
        self.listeners: list[Listener] = []
        """Told of every request that ended."""
        if settings.step_log:
            self._step_log = StepLog(self.writer, _suffixed(settings.step_log, suffix), settings.step_log_mb)
        if settings.capture:
            size = int(scheduler.hash_block_size)
            self.listeners.append(Capture(self.writer, _suffixed(settings.capture, suffix), size))

    @property
    def busy(self) -> bool:
        """Whether a step with tokens is in flight."""
        return any(step.tokens.size for step in self.steps)

    @property
    def busy_until(self) -> float:
        """When the steps in flight are expected to end, seconds on the host's clock; in the past without one."""
        until = self._last_end
        for step in self.steps:
            if step.tokens.size:
                until = max(until, step.decision.start) + step.predicted
        return until

    def note(self, output: Any, decision: Decision) -> None:
        """vLLM scheduled a step."""
        mirror = self.mirror
        ints = mirror.table.ints
        preempted = _NONE
        if output.preempted_req_ids:
            preempted = ints[INDEX, mirror.preempted(sorted(output.preempted_req_ids))]
            self.metrics.add("preempted", by=preempted.size)
        scheduled: dict[str, int] = output.num_scheduled_tokens
        wanted, ours = decision.plan, decision.ours
        self.forecast = decision.first_token
        if wanted is not None and ours is None and wanted.matches(scheduled):
            slots, tokens, fresh = wanted.slots, wanted.tokens, wanted.admitted
        else:
            slots = np.array([mirror.slot_of[i] for i in scheduled], dtype=np.int64)
            tokens = np.fromiter(scheduled.values(), dtype=np.int64, count=len(scheduled))
            fresh = [mirror.objects[slot] for slot in slots.tolist()]
            if wanted is not None and ours is None:
                self.metrics.add("plan_deviations")
        if fresh:  # what they had computed before the step: prefix hits may be other than believed
            rows = mirror.row_of_slot[[mirror.slot_of[request.request_id] for request in fresh]]
            ints[NUM_COMPUTED, rows] = [r.num_computed_tokens - scheduled[r.request_id] for r in fresh]
        due = self._due(slots, tokens) if ours is not None else None
        shape, indices = write(mirror, slots, tokens)
        predicted = self.belief.predict(shape) if slots.size else 0.0
        beside = None
        if ours is not None and due is not None and wanted is not None:
            plan = dict(zip(wanted.ids, wanted.tokens.tolist(), strict=True))
            beside = shadow.compare(self.metrics, plan, ours, scheduled, due, decision.start + predicted)
        running = len(self.scheduler.running)
        counts = (running, mirror.table.n - running, compat.num_free_blocks(self.scheduler))
        self.steps.append(Step(output, decision, slots, indices, tokens, shape, preempted, predicted, counts, beside))

    def _due(self, slots: IntArray, tokens: IntArray) -> FloatArray:
        """When the output tokens of a step are due that is about to be noted."""
        rows = self.mirror.row_of_slot[slots]
        found = shadow.yielding(self.mirror, rows, tokens, self.mirror.table.ints[NUM_COMPUTED, rows])
        return self.mirror.table.live.next_deadline[found]

    def mark_preempted(self) -> None:
        """Requests preempted between steps (vLLM resets its prefix cache that way)."""
        if self.scheduler.reset_preempted_req_ids:
            self.mirror.preempted(sorted(self.scheduler.reset_preempted_req_ids))

    def finish(self, output: Any, end: float, rejected: set[str]) -> StepResult | None:
        """vLLM took in a step's tokens, which were there at `end`. Returns what to tell the policy, if anything."""
        step = self._take(output)
        if step is None:
            self.retire_finished(end, rejected)
            return None
        mirror = self.mirror
        duration = end - max(step.decision.start, self._last_end)
        self._last_end = end
        rows = mirror.row_of_slot[step.slots]
        here = (rows >= 0) & (mirror.table.ints[INDEX, np.maximum(rows, 0)] == step.indices)
        mirror.stale[step.slots[here]] = True
        slots, rows = mirror.stale_rows()  # those of later steps, too: the next decision then finds nothing to read
        before = mirror.table.ints[NUM_OUTPUT, rows]
        mirror.refresh(slots, rows, outputs=True)
        got = mirror.table.ints[NUM_OUTPUT, rows] > before
        outcome.tokens_out(mirror, slots[got], rows[got], before[got], end)
        finished = self.retire_finished(end, rejected)
        if step.tokens.size:
            self.last = StepResult(step.indices, step.tokens, step.preempted, finished, duration)
            self._measure(step, duration)
            return self.last
        if step.preempted.size or finished.size:
            return StepResult(_NONE, _NONE, step.preempted, finished, None)
        return None

    def _take(self, output: Any) -> Step | None:
        """The step whose output this is; older ones that never came back are dropped."""
        if not any(step.output is output for step in self.steps):
            return None
        while self.steps[0].output is not output:
            self.steps.popleft()
        return self.steps.popleft()

    def _measure(self, step: Step, duration: float) -> None:
        """Feed the belief, the metrics and the log."""
        metrics, shape, decision = self.metrics, step.shape, step.decision
        if self.belief.observe(shape, duration):
            self.belief.refit()
        batch = "mixed" if shape[s.NUM_DECODES] and shape[s.NUM_PREFILLS] else "decode"
        if not shape[s.NUM_DECODES]:
            batch = "prefill"
        metrics.add("steps", batch)
        if self._last_batch not in ("", batch):
            metrics.add("batch_switches")
        self._last_batch = batch
        metrics.observe("step_seconds", duration)
        metrics.observe("predicted_step_seconds", step.predicted)
        metrics.add("prediction_error_seconds", by=abs(step.predicted - duration))
        metrics.observe("decision_seconds", decision.seconds)
        if self._step_log is not None:
            running, waiting, free = step.counts
            learned, monotonic = None, time.monotonic()
            if monotonic >= self._next_learned:
                self._next_learned, learned = monotonic + LEARNED_EVERY, self.learned()
            self._step_log.add(
                StepLine(
                    self.mirror.epoch + decision.start, duration, step.predicted, decision.seconds, decision.mode,
                    tuple(shape.tolist()), running, waiting, free, int(step.preempted.size), decision.fallback,
                    step.shadow, learned, float(slack(self.mirror.table, self._last_end).min(initial=np.inf)),
                )
            )  # fmt: skip

    def retire_finished(self, now: float, rejected: set[str]) -> IntArray:
        """Take requests that vLLM ended since the last look out of the mirror; returns their numbers."""
        mirror = self.mirror
        ids = [i for i in sorted(self.scheduler.finished_req_ids) if i in mirror.slot_of]
        if not ids:
            return _NONE
        numbers: IntArray = mirror.table.ints[INDEX, mirror.row_of_slot[mirror.slots(ids)]].copy()
        for request_id in ids:
            outcome.ended(mirror, self.metrics, self.listeners, request_id, request_id in rejected, now)
        mirror.retire(ids)
        self._finish_gap += GAP_WEIGHT * ((now - self._last_finish) / len(ids) - self._finish_gap)
        self._last_finish = now
        return numbers

    def publish(self, seats: int) -> None:
        """Forecast for the front end, and gauges; now and then, and always when the engine runs out of work."""
        monotonic, n = time.monotonic(), self.mirror.table.n
        if monotonic < self._next_publish and n:
            return
        self._next_publish = monotonic + PUBLISH_EVERY
        budget = int(self.scheduler.max_num_scheduled_tokens)
        if n and self.forecast is not None:
            ttft = self.forecast
        else:
            ttft = outcome.predicted_ttft(self.mirror, self.belief.model.step_times, budget, seats, self._finish_gap)
        running = len(self.scheduler.running)
        self._publisher.publish(ttft, running, n - running, self.label, force=not n)
        targets = self.mirror.targets
        self.metrics.observe_slack(self.mirror.table, time.time() - self.mirror.epoch)
        self.metrics.set("num_running", running)
        self.metrics.set("num_waiting", n - running)
        self.metrics.set("predicted_ttft_seconds", ttft)
        self.metrics.set("belief_samples", self.belief.num_samples)
        self.metrics.set("belief_refits", self.belief.num_refits)
        self.metrics.set("belief_drifts", self.belief.num_drifts)
        self.metrics.set("belief_outliers", self.belief.num_outliers)
        self.metrics.set("targets_invalid", targets.invalid)
        self.metrics.set("targets_clamped", targets.clamped)
        if monotonic >= self._next_metrics or not n:
            self._next_metrics = monotonic + METRICS_EVERY
            self.write_metrics()

    def write_metrics(self) -> None:
        """Leave the metrics where the front end finds them; a full disk does not end serving."""
        with contextlib.suppress(OSError):
            self.metrics.write(self._metrics_path)

    def close(self) -> None:
        """Write what is left, take away what the front end reads."""
        self.writer.close()
        self._publisher.remove()
        with contextlib.suppress(OSError):  # another engine's files may be in the directory
            self._metrics_path.unlink(missing_ok=True)
            self._metrics_path.parent.rmdir()


def write(mirror: Mirror, slots: IntArray, tokens: IntArray) -> tuple[FloatArray, IntArray]:
    """Write a scheduled step into the mirror, where NUM_COMPUTED is what each row had before it: (shape, numbers)."""
    shape, indices = np.zeros(s.SHAPE_SIZE), np.empty(slots.size, dtype=np.int64)
    before = mirror.next_admission
    mirror.next_admission = note_step(
        mirror.table.ints, slots, tokens, mirror.row_of_slot, before, mirror.block_size, mirror.stale, indices, shape
    )
    if mirror.blocked and mirror.next_admission > before:
        mirror.blocked.difference_update(slots.tolist())
    return shape, indices


def _suffixed(path: str, suffix: str) -> str:
    """A file's name with an engine's number before its extension."""
    found = Path(path)
    return str(found.with_name(f"{found.stem}{suffix}{found.suffix}"))
