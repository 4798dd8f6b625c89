"""What our scheduler classes do around vLLM's `schedule()`: view -> policy -> steering, then the facts -> observe.

The host never lets a failure of ours out: whatever goes wrong before vLLM schedules, vLLM schedules that step alone,
it is counted and logged once; a mirror in doubt is built anew from vLLM's own state.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.core import policy as policies
from slacktide.core.kv import blocks_for
from slacktide.core.live import (
    ADMISSION_ORDER,
    FIRST_TOKEN,
    LAST_TOKEN,
    NUM_BLOCKS,
    NUM_COMPUTED,
    NUM_OUTPUT,
    STATUS,
    LiveTable,
)
from slacktide.core.types import RUNNING, SLO, IntArray, Limits, Plan, Request, StepView
from slacktide.errors import InputError
from slacktide.vllm import compat, shadow
from slacktide.vllm.guard import Fuse, TimeLimit, TooSlow
from slacktide.vllm.ledger import Decision, Ledger, write
from slacktide.vllm.mirror import Mirror
from slacktide.vllm.settings import MODES, Settings, build_policy, policy_spec
from slacktide.vllm.steering import Chunks, Steering, chunks
from slacktide.vllm.viewing import Viewer

CONTROL_EVERY = 0.5
"""Seconds between two looks at the control file."""

STALL = 0.05
"""Seconds of empty plans with nothing in flight after which vLLM schedules alone: a policy must not stop the engine."""

REJECT_REASON = "rejected by the scheduling policy: the request's target cannot be met"

_log = logging.getLogger("vllm.slacktide")


class MirrorError(RuntimeError):
    """The mirror's rows are not vLLM's live requests."""


def _example(running: int, waiting: int) -> LiveTable:
    """Made-up rows to warm up with: streams, of few the last still in its prompt, and prompts that wait."""
    table = LiveTable(running + waiting)
    for i in range(running + waiting):
        table.append(Request(i, float(i) / (running + waiting), 64, 64, SLO(4.0, 0.1)))
    table.ints[STATUS, :running] = RUNNING
    table.ints[ADMISSION_ORDER, :running] = range(running)
    table.ints[NUM_COMPUTED, :running], table.ints[NUM_OUTPUT, :running] = 64, 1
    table.floats[FIRST_TOKEN, :running] = table.floats[LAST_TOKEN, :running] = 2.95
    if running < 3:
        table.ints[NUM_COMPUTED, running - 1], table.ints[NUM_OUTPUT, running - 1] = 16, 0
        table.floats[FIRST_TOKEN, running - 1] = table.floats[LAST_TOKEN, running - 1] = np.nan
    table.ints[NUM_BLOCKS, :running] = blocks_for(table.ints[NUM_COMPUTED, :running], 16)
    return table


class Host:
    """One scheduler's brain. `scheduler` is vLLM's, already built."""

    def __init__(self, scheduler: Any, settings: Settings) -> None:
        self.scheduler, self.settings = scheduler, settings
        self.spec = policy_spec(settings, scheduler.scheduler_config)
        self.policy = build_policy(self.spec)
        self.mode = settings.mode
        self.mirror = Mirror(settings.targets(), scheduler.block_size, time.time())
        self.viewer = Viewer(scheduler, self.mirror, settings.prefix_lookups)
        try:
            self.ledger = Ledger(scheduler, self.mirror, settings, self.spec.label)
        except ValueError as error:
            raise InputError(f"slacktide.prior: {error}") from error
        self.metrics = self.ledger.metrics
        self.limit = TimeLimit(settings.max_decision_ms / 1e3)
        self.fuse = Fuse(settings.max_failures, settings.off_steps)
        self.rejected: list[Any] = []
        """Requests that a plan ended and whose clients have still to be told."""
        self.sessions: set[str] = set()
        """Ids of resumable requests (streaming input): vLLM schedules alone while there are any."""
        self._decision = Decision(0.0, self.mode)
        self._logged: set[str] = set()
        self._last_now = self._next_control = 0.0
        self._stalled_since: float | None = None
        self.ledger.learned = self._learned
        self._warm_up()
        self._show_mode()
        self.ledger.write_metrics()
        weakref.finalize(self, self.limit.close).atexit = False  # a scheduler dropped without shutdown()
        _log.info("slacktide: policy %s, mode %s", self.spec.label, self.mode)

    def _warm_up(self) -> None:
        """Compile what the policy uses, on a throw-away instance, before the first request waits for it."""
        limits = Limits(2048, 128, 16, 4096, 8192)
        policy = build_policy(self.spec)
        try:
            # Few rows, many, and a prompt among many streams: policies that batch by phase take other ways there.
            for running, waiting in ((2, 1), (96, 0), (95, 1)):
                mirror = Mirror(self.mirror.targets, 16, 0.0)
                mirror.table = _example(running, waiting)
                n = mirror.table.n
                mirror.ids, mirror.objects = [str(i) for i in range(n)], [None] * n
                mirror.slot_of_row[:n] = mirror.row_of_slot[:n] = range(n)
                live = mirror.table.live
                view = StepView(3.0, live, limits, self.ledger.belief.model, tenants=("", "a"))  # what several need
                wanted = chunks(policy.plan(view), live, limits, None, mirror, speculative=False)
                write(mirror, wanted.slots, wanted.tokens)
        except Exception:
            _log.exception("slacktide: policy %s fails on a small example", self.spec.label)

    def _learned(self) -> dict[str, Any] | None:
        """What the policy learned, where it tells."""
        with contextlib.suppress(Exception):  # a policy of somebody else: the log is not worth a step
            tell = getattr(self.policy, "learned", None)
            found = None if tell is None else tell()
            return found if isinstance(found, dict) else None
        return None

    # ---- clock, mode, failures ---------------------------------------------------------------------------------------

    def now(self) -> float:
        """Seconds since the engine started, on the clock of vLLM's arrival times; never goes back."""
        self._last_now = max(self._last_now, time.time() - self.mirror.epoch)
        return self._last_now

    def set_mode(self, mode: str) -> None:
        """Switch between active, shadow and stock. Raises InputError for another word."""
        if mode not in MODES:
            raise InputError(f"mode {mode!r}: expected one of {', '.join(MODES)}")
        if mode != self.mode:
            _log.info("slacktide: mode %s -> %s", self.mode, mode)
            self.mode = mode
            self.metrics.add("mode_switches")
            self._show_mode()

    def _show_mode(self) -> None:
        now = "off" if self.fuse.resting and self.mode != "stock" else self.mode
        self._shown_off = now == "off"
        for mode in (*MODES, "off"):
            self.metrics.set("mode", float(mode == now), mode)

    def _look_at_control(self) -> None:
        monotonic = time.monotonic()
        if not self.settings.control_file or monotonic < self._next_control:
            return
        self._next_control = monotonic + CONTROL_EVERY
        with contextlib.suppress(OSError, ValueError):  # no file, or no mode in it: as before
            self.set_mode(Path(self.settings.control_file).read_text(encoding="utf-8").strip())

    def _failed(self, reason: str, *, blame_policy: bool = True) -> None:
        """A failure of ours, inside an `except` block: log it once, count it, maybe switch the policy off."""
        self.metrics.add("fallbacks", reason)
        if reason not in self._logged:
            self._logged.add(reason)
            _log.exception("slacktide: %s; vLLM schedules alone (logged once, counted in slacktide:fallbacks)", reason)
        if blame_policy and self.fuse.bad():
            self.metrics.add("policy_off")
            failures, rest = self.settings.max_failures, self.settings.off_steps
            _log.error("slacktide: %d failures in a row, policy off for %d steps", failures, rest)
            self._show_mode()
            with contextlib.suppress(Exception):
                self.policy = build_policy(self.spec)  # a fresh state when it comes back

    # ---- before vLLM schedules ---------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A request came in."""
        try:
            self.mirror.add(request, self.now(), blocked=compat.is_blocked(request))
            if request.resumable:
                self.sessions.add(request.request_id)
        except Exception:
            self._failed("mirror", blame_policy=False)
            self._rebuild()

    def before(self) -> Steering | None:
        """Decide the step; None: vLLM schedules it alone."""
        self._look_at_control()
        decision = self._decision = Decision(self.now(), self.mode)
        began = time.perf_counter()
        steering = None
        try:
            self._retire_finished(decision.start)
            self.ledger.mark_preempted()
            self.mirror.catch_up()
            if not len(self.mirror) == len(self.mirror.slot_of) == len(self.scheduler.requests):
                raise MirrorError(f"{len(self.mirror)} rows for {len(self.scheduler.requests)} requests")
            decision.fallback = self._reason_to_rest()
            if decision.fallback:
                self.metrics.add("fallbacks", decision.fallback)
            elif self.mode != "stock" and self.mirror.table.n:
                steering = self._decide(decision)
        except MirrorError:
            decision.fallback = "mirror"
            self._failed("mirror", blame_policy=False)
            self._rebuild()
        except TooSlow:
            decision.fallback, decision.plan = "slow", None
            self._failed("slow")
        except Exception:
            decision.fallback, decision.plan = "error", None
            self._failed("error")
        decision.seconds = time.perf_counter() - began
        return steering

    def _retire_finished(self, now: float) -> None:
        self.ledger.retire_finished(now, {request.request_id for request in self.rejected})
        if self.sessions:
            self.sessions.intersection_update(self.mirror.slot_of)

    def _reason_to_rest(self) -> str:
        """Why vLLM has to schedule this step alone; empty: it has not."""
        if self.mode == "stock":
            return ""
        if not self.fuse.step():
            return "off"
        if self._shown_off and not self.fuse.resting:
            self._show_mode()  # it just came back
        if self.sessions:
            return "streaming-input"
        return "" if compat.unpaused(self.scheduler) else "paused"

    def _decide(self, decision: Decision) -> Steering | None:
        """Ask the policy; in active mode rearrange vLLM for its plan."""
        with self.limit:
            ledger = self.ledger
            view, shown = self.viewer.view(decision.start, ledger.belief.model, ledger.last, ledger.busy_until)
            if not view.live.index.size:
                return None
            plan = self.policy.plan(view)
            speculative = self.scheduler.num_spec_tokens > 0
            wanted = chunks(plan, view.live, view.limits, shown, self.mirror, speculative=speculative)
            ours = shadow.forecast(self.mirror, view, plan, shown) if self.mode == "shadow" else None
        self.fuse.good()
        decision.predicted = plan.predicted_step_time
        if ours is None and self._stalls(wanted, decision.start):
            decision.fallback = "stalled"
            self.metrics.add("fallbacks", "stalled")
            return None
        decision.plan, decision.ours = wanted, ours
        if ours is not None:
            return None
        told = (plan.why or {}).get("predicted_ttft")
        decision.first_token = told if isinstance(told, float) and told >= 0 else None
        steering = Steering(self.scheduler, wanted)
        try:
            steering.begin()
        except Exception:
            steering.end()
            self.rejected += steering.rejected
            raise
        self._carry_out(plan, shown, steering, decision.start)
        return steering

    def _carry_out(self, plan: Plan, shown: IntArray | None, steering: Steering, now: float) -> None:
        """The parts of a plan that vLLM does not see, or that have happened already."""
        if plan.relegated.size:
            rows = plan.relegated if shown is None else shown[plan.relegated]
            self.metrics.add("relegated", by=int((self.mirror.table.live.relegated[rows] == 0).sum()))
            self.mirror.relegate(rows)
        if steering.rejected:
            self.rejected += steering.rejected
            self.metrics.add("rejected", by=len(steering.rejected))
            self._retire_finished(now)

    def _stalls(self, wanted: Chunks, now: float) -> bool:
        """Whether plans have been empty for too long with nothing in flight."""
        if wanted.ids or wanted.preempted or wanted.rejected or self.ledger.busy:
            self._stalled_since = None
            return False
        if self._stalled_since is None:
            self._stalled_since = now
        return now - self._stalled_since > STALL

    # ---- after vLLM scheduled ----------------------------------------------------------------------------------------

    def after(self, output: Any) -> None:
        """vLLM scheduled a step. Never raises."""
        began = time.perf_counter()
        try:
            self.ledger.note(output, self._decision)
        except Exception:
            self._failed("mirror", blame_policy=False)
            self._rebuild()
        self._decision.seconds += time.perf_counter() - began

    def done(self, output: Any, outputs: dict[int, Any], end: float) -> None:
        """vLLM took in a step's tokens, which were there at `end`. Never raises."""
        try:
            rejected = {request.request_id for request in self.rejected}
            if self.rejected:
                told, self.rejected = self.rejected, []
                compat.tell_rejected(outputs, told, REJECT_REASON)
            result = self.ledger.finish(output, end, rejected)
            self.ledger.publish(self.viewer.seats())
        except Exception:
            self._failed("mirror", blame_policy=False)
            self._rebuild()
            return
        if result is not None:
            try:
                policies.observe(self.policy, result)
            except Exception:
                self._failed("observe")

    def _rebuild(self) -> None:
        """The mirror anew, from vLLM's own state."""
        scheduler, now = self.scheduler, self.now()
        self.mirror.clear()
        self.ledger.steps.clear()
        for request in scheduler.requests.values():
            if not request.is_finished():
                self.mirror.add(request, now, blocked=True)
        running = self.mirror.slots([request.request_id for request in scheduler.running])
        self.mirror.admitted(self.mirror.row_of_slot[running])
        every = np.array(sorted(self.mirror.slot_of.values()), dtype=np.int64)
        self.mirror.refresh(every, self.mirror.row_of_slot[every], outputs=True)

    def close(self) -> None:
        """The engine ends."""
        self.limit.close()
        self.ledger.close()
