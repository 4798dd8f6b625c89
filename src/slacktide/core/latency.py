"""What a latency model is: seconds of a step as a function of its batch, and the inverse.

Four families share one protocol and one compiled evaluation (`kernels_latency.step_time_packed`): `affine` (here),
`seven-feature` and `roofline` (`latency_families`), `tables` (`latency_tables`). Each has a readable numpy twin,
`reference`, that a test holds equal to the compiled function.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import numpy as np

from slacktide.core import shape as s
from slacktide.core.packing import AFFINE, AFFINE_VALUES, FAMILY, MONOTONE, pack
from slacktide.core.types import BoolArray, FloatArray, IntArray


@runtime_checkable
class LatencyModel(Protocol):
    """Predicts step times. Immutable; equal batches get equal times."""

    @property
    def family(self) -> str:
        """affine, seven-feature, tables or roofline."""
        ...

    @property
    def sources(self) -> Mapping[str, str]:
        """What each part of the model rests on; key `label` is one of measured, composed, fitted, estimate, prior."""
        ...

    @property
    def packed(self) -> FloatArray:
        """All parameters, read-only, for `kernels_latency.step_time_packed`."""
        ...

    def coefficients(self) -> dict[str, float]:
        """The scalar parameters by name, for records and reports (seconds)."""
        ...

    def potential(self, positions: FloatArray) -> FloatArray:
        """V at prompt positions (seconds), for `core.shape.batch_shape`; zeros for a model without."""
        ...

    def step_time(self, tokens: IntArray, contexts: IntArray, phases: BoolArray) -> float:
        """Seconds for one batch: int64[n] tokens of this step, int64[n] computed before, bool[n] True = decode."""
        ...

    def step_times(self, shapes: FloatArray) -> FloatArray:
        """Seconds for every row of float64[m, 12] (`core.shape`)."""
        ...

    def max_tokens(
        self,
        time: float,
        *,
        num_decodes: int,
        decode_context: float,
        decode_max_context: float,
        prefill_remaining: IntArray,
        prefill_computed: IntArray,
        limit: int,
    ) -> int:
        """The most tokens of a step that takes at most `time` seconds: see `core.budget.max_tokens`."""
        ...


class PackedModel(ABC):
    """Everything of the protocol that follows from `packed`; families add parameters and `reference`."""

    sources: Mapping[str, str]

    @property
    @abstractmethod
    def family(self) -> str:
        """Name of the family."""

    @property
    def packed(self) -> FloatArray:
        """Read-only block of all parameters."""
        return self._packed

    @cached_property
    def _packed(self) -> FloatArray:
        return self._pack()

    def __getstate__(self) -> dict[str, Any]:
        """Without the block: a copy builds its own, because unpickled arrays are not read-only any more."""
        return {k: v for k, v in self.__dict__.items() if k != "_packed"}

    @abstractmethod
    def _pack(self) -> FloatArray:
        """Build the block."""

    @abstractmethod
    def coefficients(self) -> dict[str, float]:
        """The scalar parameters by name."""

    @abstractmethod
    def reference(self, shapes: FloatArray) -> FloatArray:
        """Readable numpy twin of the compiled evaluation: float64[m, 12] -> float64[m]."""

    def potential(self, positions: FloatArray) -> FloatArray:
        """V at prompt positions, seconds; zeros, unless a family has one."""
        return np.zeros(np.shape(positions))

    def batch_shape(self, tokens: IntArray, contexts: IntArray, phases: BoolArray) -> FloatArray:
        """`core.shape.batch_shape` with this model's own potential filled in."""
        return s.batch_shape(tokens, contexts, phases, self.potential)

    def step_time(self, tokens: IntArray, contexts: IntArray, phases: BoolArray) -> float:
        """Seconds for one batch."""
        from slacktide.core.kernels_latency import step_time_packed

        return float(step_time_packed(self.packed, self.batch_shape(tokens, contexts, phases)))

    def step_times(self, shapes: FloatArray) -> FloatArray:
        """Seconds for every row of float64[m, 12]. Raises ValueError for another shape."""
        from slacktide.core.kernels_latency import step_times_packed

        rows = np.require(shapes, np.float64, ["C", "W"])  # one compiled signature, whatever the caller's array is
        if rows.ndim != 2 or rows.shape[1] != s.SHAPE_SIZE:
            raise ValueError(f"shapes: expected float64[m, {s.SHAPE_SIZE}], found {rows.shape}")
        out = np.empty(rows.shape[0])
        step_times_packed(self.packed, rows, out)
        return out

    def max_tokens(
        self,
        time: float,
        *,
        num_decodes: int,
        decode_context: float,
        decode_max_context: float,
        prefill_remaining: IntArray,
        prefill_computed: IntArray,
        limit: int,
    ) -> int:
        """The most tokens of a step that takes at most `time` seconds: see `core.budget.max_tokens`."""
        from slacktide.core.budget import max_tokens

        return max_tokens(
            self,
            time,
            num_decodes=num_decodes,
            decode_context=decode_context,
            decode_max_context=decode_max_context,
            prefill_remaining=prefill_remaining,
            prefill_computed=prefill_computed,
            limit=limit,
        )


def check_seconds(owner: str, values: Mapping[str, float], *, negative: tuple[str, ...] = ()) -> None:
    """Raise ValueError for a NaN, an infinity, or a negative value of a name not in `negative`."""
    for name, value in values.items():
        if not math.isfinite(value) or (value < 0 and name not in negative):
            expected = "a finite number" if name in negative else "a finite number >= 0"
            raise ValueError(f"{owner}: {name} = {value}: expected {expected}")


@dataclass(frozen=True)
class AffineModel(PackedModel):
    """alpha + beta n per scene; n = tokens of the batch, r = decode share of them (EB paper, section 3).

    pure prefill alpha_p + beta_p n; pure decode alpha_d + beta_d n; mixed
    alpha_mb + n ((1-r) beta_p + r beta_d + kappa r (1-r)). Seconds, seconds per token. It does not see contexts.
    `alpha_mb` None means max(alpha_p, alpha_d): a mixed step reads the weights too, so it costs no less than either.
    `kappa` > 0 is prefill-decode interference. alpha_p may be negative (a least-squares line under a curve); a time is
    never below 0 then only where the caller stays in the fitted range, so negative results are refused at n = 1.
    """

    alpha_p: float
    beta_p: float
    alpha_d: float
    beta_d: float
    alpha_mb: float | None = None
    kappa: float = 0.0
    sources: Mapping[str, str] = field(default_factory=lambda: {"label": "prior"})

    def __post_init__(self) -> None:
        """Raise ValueError for parameters that would give a time that is not positive."""
        check_seconds("affine model", self.coefficients(), negative=("alpha_p", "alpha_d", "alpha_mb", "kappa"))
        for alpha, beta in (("alpha_p", "beta_p"), ("alpha_d", "beta_d"), ("alpha_mb", "beta_p")):
            values = self.coefficients()
            if not values[alpha] + values[beta] > 0:
                raise ValueError(f"affine model: {alpha} + {beta} = {values[alpha] + values[beta]}: expected > 0")
        if self.kappa < 0 and self.beta_p + self.beta_d + self.kappa < 0:
            raise ValueError(f"affine model: kappa = {self.kappa}: would make mixed steps cost less with more tokens")

    @property
    def family(self) -> str:
        """Always affine."""
        return "affine"

    def coefficients(self) -> dict[str, float]:
        """The six parameters, seconds and seconds per token."""
        alpha_mb = max(self.alpha_p, self.alpha_d) if self.alpha_mb is None else self.alpha_mb
        return {
            "alpha_p": self.alpha_p,
            "beta_p": self.beta_p,
            "alpha_d": self.alpha_d,
            "beta_d": self.beta_d,
            "alpha_mb": alpha_mb,
            "kappa": self.kappa,
        }

    def _pack(self) -> FloatArray:
        header = {AFFINE_VALUES + i: value for i, value in enumerate(self.coefficients().values())}
        return pack(header | {FAMILY: AFFINE, MONOTONE: float(self.kappa >= 0)}, [])

    def reference(self, shapes: FloatArray) -> FloatArray:
        """Numpy twin."""
        n, prefill, decodes = shapes[:, s.NUM_TOKENS], shapes[:, s.PREFILL_TOKENS], shapes[:, s.NUM_DECODES]
        r = decodes / np.maximum(n, 1)
        c = self.coefficients()
        mixed = c["alpha_mb"] + n * ((1 - r) * self.beta_p + r * self.beta_d + self.kappa * r * (1 - r))
        pure_decode = self.alpha_d + self.beta_d * n
        pure_prefill = self.alpha_p + self.beta_p * n
        time = np.where(prefill == 0, pure_decode, np.where(decodes == 0, pure_prefill, mixed))
        return np.where(n > 0, time, 0.0)
