"""Keeps a predictor true to the engine while it serves: refits in the background, swaps between decisions.

`Refitter` takes steps (shape, measured time) and owns the current model. Every scene has its normal equations with a
forgetting factor, so a refit costs the same after an hour as after a minute; the model it started from counts as
`PRIOR_STEPS` steps. One step in `HOLDOUT` is kept out of the fit; a refit replaces the model only if it is better
on those. A scene with too few steps keeps its expert. A sudden change (drift) forgets the past faster.

`Calibrating` wraps a policy: it shows it the current model, and learns from what the host reports. The model is read
once per decision, so no swap happens inside one.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import SCENES
from slacktide.core.loading import kernels
from slacktide.core.types import RUNNING, FloatArray, Plan, StepResult, StepView

PRIOR_STEPS = 200
"""Steps that the first model counts as in each scene: a fit to thousands should not bow to a handful."""
LEAST_STEPS = 100
"""Steps of a scene before its expert is refitted: some four per weight."""
REFIT_EVERY = 500
"""Steps between refits: 10 to 30 s of service."""
FORGET = 0.9995
"""Weight of the past per step of a scene: the last 2000 count."""
HOLDOUT = 5
"""One step in five judges."""
KEPT = 200
"""Held-out steps per scene that judge a refit: the newest."""
DRIFT = 0.10
"""Smoothed signed relative error that counts as drift: twice the error a good fit has."""
DRIFT_MEMORY = 0.98
"""Weight of the past in that error: the last 50 steps count."""
OUTLIER = 4.0
"""A step this many times slower or faster than predicted is far off. One now and then (a graph captured, a process
paused) teaches nothing."""
FAR_MEMORY = 0.98
"""Weight of the past in a scene's share of steps that are far off: the last 50 count."""
FAR_SHARE = 0.1
"""From this share on the prediction is wrong, not the steps: they teach, held to OUTLIER times off. Without that, what
a first model never comes near would be left out of every refit. Five hiccups in a row stay below it."""


@dataclass
class _Scene:
    """Normal equations of relative errors: gram = sum of x x'/t^2, right = sum of x/t."""

    gram: FloatArray
    right: FloatArray
    steps: float = 0.0
    seen: int = 0
    drift: float = 0.0
    far: float = 0.0
    quiet_until: int = 0
    due_at: int = -1
    held: deque[tuple[FloatArray, float]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def add(self, x: FloatArray, time: float, forget: float) -> None:
        row = x / time
        self.gram *= forget
        self.right *= forget
        self.steps = self.steps * forget + 1.0
        self.gram += row[:, None] * row
        self.right += row


class Refitter:
    """Owns the current model. `background` refits in a thread (servers); otherwise in `observe`, so that a simulated
    run gives the same result each time."""

    def __init__(
        self, model: ExtendedFeatureModel, *, background: bool = False, refit_every: int = REFIT_EVERY,
        least_steps: int = LEAST_STEPS, forget: float = FORGET,
    ) -> None:  # fmt: skip
        self.model = model
        self.refits, self.rejected, self.drifts, self.outliers = 0, 0, 0, 0
        self._background, self._every, self._least, self._forget = background, refit_every, least_steps, forget
        width = model.weights.shape[1]
        self._scenes = [_Scene(np.zeros((width, width)), np.zeros(width)) for _ in SCENES]
        self._since = 0
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def observe(self, shape: FloatArray, time: float, weight: float = 1.0) -> None:
        """Take one finished step: float64[12], seconds. `weight` < 1 for a step that is less to be trusted."""
        if not (math.isfinite(time) and time > 0 and shape[s.NUM_TOKENS] > 0):
            return
        packed, compiled = self.model.packed, kernels("latency")
        predicted = float(compiled.step_time_packed(packed, shape))
        scene = self._scenes[0 if not shape[s.PREFILL_TOKENS] > 0 else 2 if shape[s.NUM_DECODES] > 0 else 1]
        nearest = min(max(time, predicted / OUTLIER), predicted * OUTLIER)
        scene.far = FAR_MEMORY * scene.far + (1 - FAR_MEMORY) * (time != nearest)
        if time != nearest and scene.far < FAR_SHARE:
            self.outliers += 1
            return
        time, x = nearest, np.empty(self.model.weights.shape[1])
        compiled.extended_features_packed(packed, shape, x)
        with self._lock:
            scene.seen += 1
            scene.drift = DRIFT_MEMORY * scene.drift + (1 - DRIFT_MEMORY) * (time / predicted - 1.0)
            if scene.seen % HOLDOUT == 0:
                scene.held.append((shape.copy(), time))
            else:
                scene.add(x * np.sqrt(weight), time * np.sqrt(weight) if weight != 1.0 else time, self._forget)
            self._since += 1
            due = self._since >= self._every or scene.seen == scene.due_at
            if abs(scene.drift) > DRIFT and scene.seen >= max(self._least, scene.quiet_until):
                # What was true before the change is in the way: a tenth of it stays.
                self.drifts += 1
                scene.gram, scene.right, scene.steps = scene.gram * 0.1, scene.right * 0.1, scene.steps * 0.1
                scene.drift, scene.quiet_until = 0.0, scene.seen + 2 * self._least
                # As soon as there is enough to fit and to judge by, and before the next drift can be noticed: or an
                # error that stays would start the wait anew each time, and nothing would ever be refitted.
                scene.due_at, due = scene.seen + self._least * HOLDOUT // (HOLDOUT - 1), False
                scene.held.clear()
            if due:
                self._since = 0
        if due:
            self._start()

    def _start(self) -> None:
        if not self._background:
            self.refit()
        elif self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self.refit, name="slacktide-refit", daemon=True)
            self._thread.start()

    def refit(self) -> bool:
        """Refit the scenes that have enough steps; True when the model was replaced."""
        old = self.model
        weights, changed = old.weights.copy(), False
        with self._lock:
            states = [(one.gram.copy(), one.right.copy(), one.steps, list(one.held)) for one in self._scenes]
        for i, (gram, right, steps, held) in enumerate(states):
            if steps < self._least or len(held) < self._least // (2 * HOLDOUT):
                continue
            candidate = _solve(gram, right, steps, old.weights[i])
            shapes, times = np.array([shape for shape, _ in held]), np.array([time for _, time in held])
            trial = old.weights.copy()
            trial[i] = candidate
            new = np.abs(replace(old, weights=trial).reference(shapes) / times - 1.0)
            if float(np.mean(new)) < float(np.mean(np.abs(old.reference(shapes) / times - 1.0))):
                weights[i], changed = candidate, True
            else:
                self.rejected += 1
        if changed:
            sources = {"label": "fitted", "latency": f"refitted on line, {self.refits + 1} times"}
            self.model = replace(old, weights=weights, sources=sources)  # one assignment: a reader sees old or new
            self.refits += 1
        return changed


def _solve(gram: FloatArray, right: FloatArray, steps: float, old: FloatArray) -> FloatArray:
    """min w'Gw - 2 r'w + prior |w - old|^2 over w >= 0, each weight's prior in units of its own feature's square.

    A feature that never occurred keeps its weight.
    """
    from scipy.optimize import nnls

    diagonal = np.diag(gram).copy()
    used = diagonal > 1e-12 * diagonal.max()
    scale = np.sqrt(diagonal[used])
    prior = PRIOR_STEPS / steps
    g = gram[np.ix_(used, used)] / scale[:, None] / scale + prior * np.eye(int(used.sum()))
    # What the unused features contribute is not there: their products with the used ones are zero.
    r = right[used] / scale + prior * old[used] * scale
    lower = np.linalg.cholesky(g)
    found, _ = nnls(lower.T, np.linalg.solve(lower, r), maxiter=100 * len(r))
    result = old.copy()
    result[used] = found / scale
    return result


class Calibrating:
    """A policy whose belief is the refitter's current model, whatever the host's view says."""

    def __init__(self, policy: Any, refitter: Refitter) -> None:
        self.policy, self.refitter = policy, refitter
        self.name = getattr(policy, "name", type(policy).__name__)
        self.steerable = getattr(policy, "steerable", True)
        self._pending: deque[tuple[int, FloatArray]] = deque(maxlen=8)

    def plan(self, view: StepView) -> Plan:
        """The policy's plan under the current model."""
        model = self.refitter.model
        plan: Plan = self.policy.plan(view._replace(latency=model))
        live, rows, c = view.live, plan.rows, plan.num_scheduled_tokens
        computed = np.where(live.status == RUNNING, live.num_computed_tokens, live.num_cached_tokens)[rows]
        self._pending.append((rows.size, model.batch_shape(c, computed, live.is_decode[rows])))
        return plan

    def observe(self, result: StepResult) -> None:
        """Match the outcome with the oldest plan of as many rows (a host may have run another one: nobody learns)."""
        method = getattr(self.policy, "observe", None)
        if method is not None:
            method(result)
        if result.step_time is None:
            return
        while self._pending:
            rows, shape = self._pending.popleft()
            if rows == result.indices.size:
                self.refitter.observe(shape, result.step_time)
                return
