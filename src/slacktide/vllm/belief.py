"""What the plug-in believes of step times: the extended features, refitted on line from measured steps.

The fitting is `profiling.online`'s: refits in a thread of its own, kept only when they are better on steps held out,
drift noticed. What it starts from is a profile the user named, or a made-up prior, printed as such: nobody measured it.
Because a prior may be wrong by a factor that a refitter takes for outliers, the first steps of each scene (decode,
prefill, mixed) scale it as a whole, and so do later ones that are far off in a row. A new model is taken over between
steps, never inside a decision.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from slacktide.core import shape as s
from slacktide.core.latency import AffineModel, LatencyModel
from slacktide.core.latency_extended import ExtendedFeatureModel
from slacktide.core.latency_families import SCENES
from slacktide.core.types import FloatArray
from slacktide.errors import InputError
from slacktide.profiling.fit import fit_extended
from slacktide.profiling.online import OUTLIER, Refitter

PRIOR_MS = {"alpha_p": 10.0, "beta_p": 0.1, "alpha_d": 10.0, "beta_d": 0.05}
"""A server GPU with a model of some 8 billion weights, to the order of magnitude: 10,000 prompt tokens a second."""

PRIOR_SAMPLES = 200
"""Made-up steps per scene behind the first model: some eight per weight."""

ANCHOR_STEPS = 16
"""Steps of a scene whose median scales its prior: within a second of service, and few enough to be warm-up's only once
(`profiling.online` forgets what is wrong with them)."""

KEPT_STEPS = 4000
"""Newest measured steps kept as they are, for the replays of shadow mode: under a megabyte."""

FLOOR = 1e-5
"""Least time of a step in seconds: launching one kernel takes as long, so no engine's step is shorter."""


def prior_model(prior_ms: Mapping[str, float]) -> AffineModel:
    """The affine prior, from milliseconds. Raises ValueError for values that give no positive time."""
    values = {name: value / 1e3 for name, value in (PRIOR_MS | dict(prior_ms)).items()}
    return AffineModel(values["alpha_p"], values["beta_p"], values["alpha_d"], values["beta_d"])


def prior_samples(model: LatencyModel, rng: np.random.Generator) -> tuple[FloatArray, FloatArray]:
    """Made-up steps of every scene, in turn, and what the prior says they take."""
    m = 3 * PRIOR_SAMPLES
    shapes = np.zeros((m, s.SHAPE_SIZE))
    scene = np.arange(m) % 3
    decodes = np.where(scene == 1, 0.0, np.floor(np.exp(rng.uniform(0, np.log(256), m))))
    chunk = np.where(scene == 0, 0.0, np.floor(np.exp(rng.uniform(np.log(16), np.log(4096), m))))
    context = np.floor(rng.uniform(0, 2048, m))
    shapes[:, s.NUM_DECODES], shapes[:, s.PREFILL_TOKENS] = decodes, chunk
    shapes[:, s.NUM_TOKENS] = decodes + chunk
    shapes[:, s.NUM_PREFILLS] = chunk > 0
    shapes[:, s.NUM_SEQUENCES] = decodes + (chunk > 0)
    shapes[:, s.DECODE_CONTEXT] = decodes * (context + 64)
    shapes[:, s.DECODE_MAX_CONTEXT] = np.where(decodes > 0, 2 * context + 64, 0)
    shapes[:, s.PREFILL_WORK] = shapes[:, s.PREFILL_SQUARE] = chunk * chunk
    shapes[:, s.PREFILL_MAX] = chunk
    return shapes, model.step_times(shapes)


def first_model(prior: Mapping[str, float] | str) -> ExtendedFeatureModel:
    """A profile's fitted belief, or the extended features of an affine prior in milliseconds.

    Raises InputError for an unknown profile, ValueError for values that give no positive time.
    """
    if isinstance(prior, str) and prior:
        from slacktide.profiling.profiles import default_belief, load_profile

        found = default_belief(load_profile(prior))
        if not isinstance(found, ExtendedFeatureModel):  # pragma: no cover (its `features` are those of the default)
            raise InputError(f"profile {prior}: its belief has other features than the plug-in refits")
        return replace(found, floor=min(found.floor, FLOOR))
    shapes, times = prior_samples(prior_model(prior if isinstance(prior, Mapping) else {}), np.random.default_rng(0))
    text = "alpha and beta of the settings" if prior else "made up: a server GPU with 8 billion weights"
    return replace(fit_extended(shapes, times), floor=FLOOR, sources={"label": "prior", "latency": text})


class OnlineBelief:
    """The current model, and what it learns from."""

    def __init__(self, prior: Mapping[str, float] | str | None = None, *, background: bool = True) -> None:
        """`prior` as in the settings; `background`: refit in a thread. Raises InputError, ValueError (first_model)."""
        from slacktide.core.kernels_latency import step_time_packed

        self._step_time, self._background = step_time_packed, background
        self.model = first_model(prior or {})
        self._anchored = [isinstance(prior, str) and bool(prior)] * len(SCENES)
        self._ratios: list[deque[float]] = [deque(maxlen=ANCHOR_STEPS) for _ in SCENES]
        self._refitter = Refitter(self.model, background=background)
        self._earlier = np.zeros(3, dtype=np.int64)
        self.num_samples = self.anchors = 0
        self.steps: deque[tuple[FloatArray, float]] = deque(maxlen=KEPT_STEPS)
        """Newest steps: shape, seconds."""

    @property
    def num_refits(self) -> int:
        """Refits that were better than the model before."""
        return int(self._earlier[0]) + self._refitter.refits

    @property
    def num_drifts(self) -> int:
        """Sudden changes noticed: the past was mostly forgotten."""
        return int(self._earlier[1]) + self._refitter.drifts

    @property
    def num_outliers(self) -> int:
        """Steps too far off to learn from."""
        return int(self._earlier[2]) + self._refitter.outliers

    def predict(self, shape: FloatArray) -> float:
        """Seconds of a step (float64[12]) by the current model."""
        return float(self._step_time(self.model.packed, shape))

    def alone(self, num_prompt_tokens: int, max_num_batched_tokens: int) -> float:
        """Seconds that a prompt takes alone on the engine, in chunks of the token budget."""
        done = np.arange(0, num_prompt_tokens, max_num_batched_tokens, dtype=np.float64)
        chunk = np.minimum(num_prompt_tokens - done, max_num_batched_tokens)
        shapes = np.zeros((done.size, s.SHAPE_SIZE))
        shapes[:, s.NUM_TOKENS] = shapes[:, s.PREFILL_TOKENS] = shapes[:, s.PREFILL_MAX] = chunk
        shapes[:, s.NUM_SEQUENCES] = shapes[:, s.NUM_PREFILLS] = 1
        shapes[:, s.PREFILL_WORK], shapes[:, s.PREFILL_SQUARE] = chunk * (done + chunk), chunk * chunk
        shapes[:, s.PREFILL_CONTEXT] = done
        return float(self.model.step_times(shapes).sum())

    def observe(self, shape: FloatArray, time: float) -> bool:
        """A measured step: its shape (float64[12]) and its seconds. True when the caller has to refit: never."""
        if not 0 < time < 1e6 or shape[s.NUM_TOKENS] <= 0:
            return False
        scene = 0 if not shape[s.PREFILL_TOKENS] > 0 else 2 if shape[s.NUM_DECODES] > 0 else 1
        self.num_samples += 1
        self.steps.append((shape, time))
        ratios = self._ratios[scene]
        ratios.append(time / self.predict(shape))
        if len(ratios) == ANCHOR_STEPS:
            median = sorted(ratios)[ANCHOR_STEPS // 2]
            if not self._anchored[scene] or not 1 / OUTLIER <= median <= OUTLIER:
                self._anchor(scene, median)
        self._refitter.observe(shape, time)
        self._take_over()
        return False

    def refit(self) -> None:
        """Refit now, in this thread. Servers do it by themselves, in another."""
        self._refitter.refit()
        self._take_over()

    def _take_over(self) -> None:
        """Use the refitter's model; its packed form is built here, so that no decision pays for it."""
        new = self._refitter.model
        if new is not self.model and new.packed.size:
            self.model = new

    def _anchor(self, scene: int, factor: float) -> None:
        """Scale a scene's expert as a whole, and learn anew from there."""
        weights = self.model.weights.copy()
        weights[scene] *= factor
        self._anchored[scene] = True
        self._ratios[scene].clear()
        self.anchors += 1
        old = self._refitter
        self._earlier += (old.refits, old.drifts, old.outliers)
        label = "fitted" if self.num_refits else "prior"
        text = (
            f"{self.model.sources['latency'].partition(';')[0]}; scaled to {ANCHOR_STEPS} steps, {self.anchors} times"
        )
        self.model = replace(self.model, weights=weights, sources={"label": label, "latency": text})
        self._refitter = Refitter(self.model, background=self._background)
