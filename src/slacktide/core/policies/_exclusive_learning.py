"""What eb-adaptive and eb-plus learn online: lengths, step costs, and the costs of both modes. Used with `observe`.

A row of one token counts as a decode, of more tokens as a prompt chunk: true but for one-token chunks, and needs no
knowledge of the request, which may have retired or moved on by the time its result arrives (async scheduling).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from slacktide.core.exclusive import Costs, Load
from slacktide.core.exclusive_hazard import costs_of
from slacktide.core.exclusive_memory import mean_residual_age
from slacktide.core.policies._exclusive import output_prior
from slacktide.core.types import RUNNING, WAITING, IntArray, Plan, StepResult, StepView

MIN_SAMPLES = 30
"""Completions before the estimates count (authors' code)."""
_NONE: IntArray = np.empty(0, dtype=np.int64)


@dataclass
class Lengths:
    """Recent prompt and output lengths: windows W_L (admitted requests) and W_O (finished ones)."""

    window: int
    outputs: deque[int] = field(init=False)
    prompts: deque[int] = field(init=False)
    completions: int = 0
    """Requests finished so far."""
    _index: IntArray = field(default_factory=lambda: _NONE, init=False)
    _tokens: IntArray = field(default_factory=lambda: _NONE, init=False)

    def __post_init__(self) -> None:
        """Empty windows."""
        self.outputs, self.prompts = deque(maxlen=self.window), deque(maxlen=self.window)

    def planned(self, view: StepView, plan: Plan) -> None:
        """Note the prompts that a plan admits, and how far every request is."""
        live = view.live
        admitted = plan.rows[live.status[plan.rows] == WAITING]
        if admitted.size:
            self.prompts.extend(live.num_prompt_tokens[admitted].tolist())
        self._index, self._tokens = live.index.copy(), live.num_output_tokens + 1

    def finished(self, indices: IntArray) -> int:
        """Note the outputs of finished requests; returns how many ended."""
        if indices.size and self._index.size:
            order = np.argsort(self._index, kind="stable")
            at = np.minimum(np.searchsorted(self._index[order], indices), self._index.size - 1)
            rows = order[at]
            known = self._index[rows] == indices
            self.outputs.extend(self._tokens[rows[known]].tolist())
        self.completions += int(indices.size)
        return int(indices.size)

    def load(self, view: StepView) -> Load:
        """Means of the windows; before MIN_SAMPLES completions the prior of `output_prior`."""
        prompt = float(_array(self.prompts).mean()) if self.prompts else float(view.live.num_prompt_tokens.mean())
        output = float(_array(self.outputs).mean()) if len(self.outputs) >= MIN_SAMPLES else output_prior(view)
        return Load(max(prompt, 1.0), max(output, 1.0))

    def age(self) -> float | None:
        """Mean residual age of the outputs seen; None before MIN_SAMPLES completions."""
        if len(self.outputs) < MIN_SAMPLES:
            return None
        return mean_residual_age(_array(self.outputs))

    def prompt_variance(self) -> float:
        """Variance of the prompts in the window."""
        return float(_array(self.prompts).var()) if len(self.prompts) > 1 else 0.0


def _array(window: deque[int]) -> IntArray:
    """A window as an array; numpy's own conversion of a deque takes three times as long."""
    return np.fromiter(window, dtype=np.int64, count=len(window))


@dataclass
class Account:
    """Time and tokens of the steps since the last reset, by kind."""

    prompt_time: float = 0.0
    prompt_tokens: float = 0.0
    decode_time: float = 0.0
    decode_tokens: float = 0.0
    mixed_time: float = 0.0
    mixed_prompt_tokens: float = 0.0
    mixed_decode_tokens: float = 0.0
    recomputed_tokens: float = 0.0
    """Of the prompt tokens, those of preempted requests."""
    decode_steps: int = 0

    def add(self, tokens: IntArray, seconds: float) -> tuple[int, int]:
        """Book one step; returns its (prompt tokens, decodes)."""
        total = int(tokens.sum())
        decodes = int((tokens == 1).sum())
        prompt = total - decodes
        if prompt == 0:
            self.decode_time += seconds
            self.decode_tokens += decodes
            self.decode_steps += 1
        elif decodes == 0:
            self.prompt_time += seconds
            self.prompt_tokens += prompt
        else:
            self.mixed_time += seconds
            self.mixed_prompt_tokens += prompt
            self.mixed_decode_tokens += decodes
        return prompt, decodes

    @property
    def time(self) -> float:
        """Seconds of all steps."""
        return self.prompt_time + self.decode_time + self.mixed_time

    def exclusive_cost(self, load: Load) -> float | None:
        """Seconds that a request of this load took: its prompt in prompt-only steps, its output in decode-only ones.

        A ratio of sums for each kind, so that a window that holds more of one phase than of the other is not biased.
        What was computed again is left out: it comes from too many slots, which the controller takes away, while in
        mixed mode nothing does. None when a kind of step is missing.
        """
        if self.prompt_tokens <= 0 or self.decode_tokens <= 0:
            return None
        return load.prompt * self.prompt_time / self.prompt_tokens + load.output * self.decode_time / self.decode_tokens

    def overall_cost(self, load: Load, prompt_weight: float, decode_weight: float) -> float | None:
        """Seconds that a request of this load took, whatever steps ran: all time over all useful work.

        Work is prompt_weight * prompt tokens + decode_weight * output tokens (seconds per token of each kind), so that
        a window with more prompts than its share is set right to first order. None when nothing useful ran.
        """
        prompt = max(self.prompt_tokens + self.mixed_prompt_tokens - self.recomputed_tokens, 0.0)
        decodes = self.decode_tokens + self.mixed_decode_tokens
        if decodes <= 0:
            return None
        work = prompt_weight * prompt + decode_weight * decodes
        return self.time * (prompt_weight * load.prompt + decode_weight * load.output) / work


def recomputed(view: StepView, plan: Plan) -> int:
    """Tokens of a plan that compute again what preemptions lost."""
    live, rows = view.live, plan.rows
    if not live.num_preemptions.any():
        return 0
    again = (live.num_preemptions[rows] > 0) & (live.num_tokens_needed[rows] > 1)
    return int(plan.num_scheduled_tokens[again].sum())


class MixedFit:
    """alpha_mb and kappa from the mixed steps that run: least squares with forgetting, the belief as a prior.

    T - n ((1-r) beta_p + r beta_d) = alpha_mb + kappa n r (1-r). The prior weighs PRIOR steps, so that one odd step, or
    steps that are all alike (which say nothing about the slope), cannot turn the line.
    """

    PRIOR = 20.0
    MEMORY = 2000.0
    """Steps that count: about half a minute of mixed batching."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)  # 1, x, x^2, y, x y

    def add(self, prompt: int, decodes: int, seconds: float, costs: Costs) -> None:
        """Take a measured mixed step in."""
        x = prompt * decodes / (prompt + decodes)
        y = seconds - prompt * costs.beta_p - decodes * costs.beta_d
        self._sums *= 1.0 - 1.0 / self.MEMORY
        self._sums += (1.0, x, x * x, y, x * y)

    @property
    def steps(self) -> float:
        """Measured steps that count now."""
        return float(self._sums[0])

    def values(self, prior: Costs) -> tuple[float, float]:
        """(alpha_mb, kappa), both at least 0; those of `prior` when nothing was measured."""
        count, x, xx, y, xy = self._sums.tolist()
        if count <= 0:
            return prior.alpha_mb, prior.kappa
        # The prior is PRIOR steps spread around the measured mean of x, lying on the believed line.
        mean, spread = x / count, max(xx / count - (x / count) ** 2, (0.1 * x / count) ** 2)
        w = self.PRIOR
        believed = prior.alpha_mb + prior.kappa * mean
        total = count + w
        mean_y = (y + w * believed) / total
        slope = (xy - mean * y + w * prior.kappa * spread) / (xx - count * mean * mean + w * spread)
        slope = max(float(slope), 0.0)
        return max(float(mean_y - slope * mean), 0.0), slope


def running_and_waiting(view: StepView) -> tuple[int, int]:
    """(running, waiting) requests of a view."""
    running = int((view.live.status == RUNNING).sum())
    return running, view.live.index.size - running


def believed_costs(view: StepView, load: Load, n: float) -> Costs:
    """Affine costs of the belief around n running requests of this load, at the mean context of those that decode now.

    The mean of a steady state would do later on, but the first generation grows old together.
    """
    contexts = view.live.num_computed_tokens[view.live.is_decode]
    context = float(contexts.mean()) if contexts.size else None
    return costs_of(view.latency, load, n, view.limits.max_num_batched_tokens, context=context)


def step_seconds(result: StepResult) -> float | None:
    """The measured time of a step that ran something, or None."""
    return result.step_time if result.step_time and result.tokens.size else None
