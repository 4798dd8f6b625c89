"""What a person wants to know of a server, from readings of its metrics: rates and quantiles over a window of time."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from slacktide.live.scrape import Scrape

WINDOW = 30.0
"""Seconds that rates and quantiles look back: long enough for a few requests to end, short enough to be "now"."""

MODES = ("active", "shadow", "stock", "off")
BATCHES = ("decode", "prefill", "mixed", "empty")


@dataclass(frozen=True)
class ClassFigures:
    """One SLO class since the server started. `attained`: share of ended requests, those a client left not counted."""

    name: str
    ended: float
    attained: float
    late: dict[str, float]
    """Violations by kind: ttft, tbt, e2el."""


@dataclass(frozen=True)
class View:
    """One screen's worth. None: the server does not tell. Seconds, shares 0..1, counts a second."""

    model: str
    ours: bool
    """Slacktide schedules, or watches, this server."""
    engines: int
    span: float
    """Seconds that the figures of now look back; 0: since the server started."""
    mode: str
    num_running: float
    num_waiting: float
    kv_usage: float | None
    prefix_hits: float | None
    num_preemptions: float
    finished_rate: float | None
    prompt_rate: float | None
    output_rate: float | None
    ttft: tuple[float | None, float | None]
    """Median and 99th percentile."""
    tbt: tuple[float | None, float | None]
    predicted_ttft: float | None
    rejected: float
    """By plans, by our middleware, and by vLLM's own limits."""
    relegated: float
    steps_rate: float | None
    batches: dict[str, float]
    """Shares of steps."""
    switches_rate: float | None
    measured_step: float | None
    predicted_step: float | None
    step_error: float | None
    """Mean of |measured - predicted| over the mean measured step."""
    decision: tuple[float | None, float | None]
    """Mean and 99th percentile."""
    fallbacks: dict[str, float]
    deviations: float
    policy_off: float
    belief_samples: float
    shadow: dict[str, float] = field(default_factory=dict)
    """Shadow mode: attainment of the newest requests by schedule: measured, stock and ours (replayed)."""
    classes: list[ClassFigures] = field(default_factory=list)
    step_bins: list[tuple[float, float, float]] = field(default_factory=list)
    """(upper end in seconds, share of measured steps, share of predicted ones)."""
    slack: tuple[float | None, float | None] = (None, None)
    """Time until the next tokens of live requests are due, below 0 late: first percentile and median."""
    slack_late: float | None = None
    """Share of them that are late."""
    slack_bins: list[tuple[float, float]] = field(default_factory=list)
    """(upper end in seconds, share of those next tokens)."""


class History:
    """Readings of one server; those older than WINDOW are forgotten, and all of them when it was started anew."""

    def __init__(self) -> None:
        self._scrapes: deque[Scrape] = deque()

    def add(self, scrape: Scrape) -> View:
        """Take a new reading and tell what it says."""
        if self._scrapes and _restarted(self._scrapes[-1], scrape):
            self._scrapes.clear()
        self._scrapes.append(scrape)
        while len(self._scrapes) > 2 and self._scrapes[1].time <= scrape.time - WINDOW:
            self._scrapes.popleft()
        return view(self._scrapes[0] if len(self._scrapes) > 1 else None, scrape)


def _restarted(before: Scrape, now: Scrape) -> bool:
    """A counter that fell: the process is another one."""
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "slacktide:steps_total")
    return any(now.sum(name) < before.sum(name) for name in names)


def view(before: Scrape | None, now: Scrape) -> View:
    """Figures between two readings; with one, since the server started, and no rates."""
    seconds = 0.0 if before is None else max(now.time - before.time, 1e-9)

    def grown(name: str, **labels: str) -> float:
        return max(0.0, now.sum(name, **labels) - (0.0 if before is None else before.sum(name, **labels)))

    def rate(name: str, **labels: str) -> float | None:
        return grown(name, **labels) / seconds if seconds and now.has(name) else None

    def mean(name: str) -> float | None:
        count = grown(f"{name}_count")
        return grown(f"{name}_sum") / count if count else None

    def quantiles(name: str) -> tuple[float | None, float | None]:
        bins = _bins(before, now, name)
        return quantile(bins, 0.5), quantile(bins, 0.99)

    queries, steps = grown("vllm:prefix_cache_queries_total"), grown("slacktide:steps_total")
    usage = [v for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc") for _, v in now.items(name)]
    measured, error_count = mean("slacktide:step_seconds"), grown("slacktide:step_seconds_count")
    error = grown("slacktide:prediction_error_seconds_total") / error_count if error_count else None
    slack = _bins(before, now, "slacktide:slack_seconds")
    samples = math.fsum(count for _, count in slack)
    forecast = [value for _, value in now.items("slacktide:predicted_ttft_seconds")]
    return View(
        model=next((labels.get("model_name", "") for labels, _ in now.items("vllm:num_requests_running")), ""),
        ours=now.has("slacktide:mode"),
        engines=len({labels.get("engine", "") for labels, _ in now.items("vllm:num_requests_running")}),
        span=seconds,
        mode=_mode(now),
        num_running=now.sum("vllm:num_requests_running"),
        num_waiting=now.sum("vllm:num_requests_waiting"),
        kv_usage=max(usage, default=None),
        prefix_hits=grown("vllm:prefix_cache_hits_total") / queries if queries else None,
        num_preemptions=grown("vllm:num_preemptions_total"),
        finished_rate=rate("vllm:request_success_total"),
        prompt_rate=rate("vllm:prompt_tokens_total"),
        output_rate=rate("vllm:generation_tokens_total"),
        ttft=quantiles("vllm:time_to_first_token_seconds"),
        tbt=quantiles("vllm:inter_token_latency_seconds"),
        predicted_ttft=max(forecast, default=None),
        rejected=grown("slacktide:rejected_total") + grown("slacktide:admission_rejected_total")
        + grown("vllm:admission_rejections_total"),
        relegated=grown("slacktide:relegated_total"),
        steps_rate=rate("slacktide:steps_total"),
        batches={batch: grown("slacktide:steps_total", batch=batch) / steps for batch in BATCHES} if steps else {},
        switches_rate=rate("slacktide:batch_switches_total"),
        measured_step=measured,
        predicted_step=mean("slacktide:predicted_step_seconds"),
        step_error=error / measured if error is not None and measured else None,
        decision=(mean("slacktide:decision_seconds"), quantiles("slacktide:decision_seconds")[1]),
        fallbacks={
            labels.get("reason", "?"): value for labels, value in now.items("slacktide:fallbacks_total") if value
        },
        deviations=now.sum("slacktide:plan_deviations_total"),
        policy_off=now.sum("slacktide:policy_off_total"),
        belief_samples=now.sum("slacktide:belief_samples"),
        shadow={
            labels.get("schedule", "?"): value
            for labels, value in now.items("slacktide:shadow_attainment")
            if math.isfinite(value)
        },
        classes=_classes(now),
        step_bins=_step_bins(before, now),
        slack=(quantile(slack, 0.01), quantile(slack, 0.5)),
        slack_late=math.fsum(count for bound, count in slack if bound <= 0) / samples if samples else None,
        slack_bins=[(bound, count / samples) for bound, count in slack] if samples else [],
    )  # fmt: skip


def _mode(now: Scrape) -> str:
    """The mode in force; several where engines differ."""
    found = {labels.get("mode", "?") for labels, value in now.items("slacktide:mode") if value == 1}
    return "/".join(sorted(found)) or "none"


def _classes(now: Scrape) -> list[ClassFigures]:
    """Classes by the requests they had, most first."""
    ended: dict[str, float] = {}
    for labels, value in now.items("slacktide:requests_total"):
        if labels.get("end") != "aborted":
            name = labels.get("slo_class", "?")
            ended[name] = ended.get(name, 0.0) + value
    found = []
    for name, count in sorted(ended.items(), key=lambda item: (-item[1], item[0])):
        late = {kind: now.sum("slacktide:slo_violations_total", slo_class=name, kind=kind)
                for kind in ("ttft", "tbt", "e2el")}  # fmt: skip
        attained = now.sum("slacktide:slo_attained_total", slo_class=name) / count if count else 0.0
        found.append(ClassFigures(name, count, attained, late))
    return found


Bins = list[tuple[float, float]]
"""(upper end, count of observations in this bin)."""


def _bins(before: Scrape | None, now: Scrape, name: str) -> Bins:
    """A histogram's observations between two readings, over all engines."""
    upto: dict[float, float] = {}
    for scrape, sign in ((now, 1.0), (before, -1.0)):
        for labels, value in () if scrape is None else scrape.items(f"{name}_bucket"):
            try:
                bound = float(labels.get("le", "nan"))
            except ValueError:
                continue
            if not math.isnan(bound):
                upto[bound] = upto.get(bound, 0.0) + sign * value
    bins, last = [], 0.0
    for bound in sorted(upto):
        bins.append((bound, max(0.0, upto[bound] - last)))
        last = max(last, upto[bound])
    return bins


def quantile(bins: Bins, share: float) -> float | None:
    """Linear within a bin, as Prometheus' histogram_quantile; beyond the outermost finite bounds, those bounds."""
    total = math.fsum(count for _, count in bins)
    if total <= 0:
        return None
    wanted, below, lower = share * total, 0.0, min(bins[0][0], 0.0)
    for bound, count in bins:
        if below + count >= wanted and count > 0:
            return lower if math.isinf(bound) else lower + (bound - lower) * (wanted - below) / count
        below, lower = below + count, lower if math.isinf(bound) else bound
    return lower


def _step_bins(before: Scrape | None, now: Scrape) -> list[tuple[float, float, float]]:
    measured = _bins(before, now, "slacktide:step_seconds")
    predicted = dict(_bins(before, now, "slacktide:predicted_step_seconds"))
    totals = sum(count for _, count in measured), sum(predicted.values())
    if not all(totals):
        return []
    return [(bound, count / totals[0], predicted.get(bound, 0.0) / totals[1]) for bound, count in measured]
