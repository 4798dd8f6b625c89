"""One screen of text: lines of (text, style) pieces that fit a width and a height. No library, no clock."""

from __future__ import annotations

import math
from itertools import zip_longest

from slacktide.live.figures import View

Piece = tuple[str, str]
Line = list[Piece]

GOOD, BAD, DIM, HEAD = "green", "bold red", "dim", "bold"
LEAST_WIDTH, LEAST_HEIGHT = 40, 10
LOW_ATTAINMENT, HIGH_KV, LARGE_ERROR = 0.95, 0.95, 0.3
"""Shown in red: below this attainment, above this KV use (preemptions are near), above this error of step times."""
LEAST_BESIDE, SLACK_WIDTH = 76, 30
"""Columns of a screen that holds both histograms side by side, and of the second one."""
SLACK_EDGES = (0.1, 1.0, 0.02, 0.5, 5.0, 0.05, 0.2, 2.0)
"""Seconds to a deadline at which lines part, as many as find room: some steps, a wait that is felt, one step."""


def draw(view: View, *, url: str, clock: str, width: int = 80, height: int = 24, blocks: bool = True) -> list[Line]:
    """The screen. `blocks` False: bars of `#`, for terminals without UTF-8."""
    width, height = max(width, LEAST_WIDTH), max(height, LEAST_HEIGHT)
    full = "█" if blocks else "#"
    span = f"last {view.span:.0f} s" if view.span else "since start"
    lines: list[Line] = [
        [("slacktide top", HEAD), (f"  {url}  {view.model}", ""), (f"  {clock}", DIM)],
        _scheduler(view, span),
        [],
        _requests(view),
        _cache(view, full),
        [(_row("tokens"), DIM), (f"prompt {_rate(view.prompt_rate)}   output {_rate(view.output_rate)}", "")],
        *_latency(view),
    ]
    if view.ours:
        lines += [[], *_steps(view), *_shadow(view), [], *_classes(view, full, room=max(3, height - len(lines) - 11))]
        bins = _histograms(view, width, full, room=height - len(lines) - 2)
        lines += [[], *bins] if bins else []
    return [_cut(line, width) for line in lines[:height]]


def _row(name: str) -> str:
    return f"{name:<11}"


def _scheduler(view: View, span: str) -> Line:
    engines = f"   {view.engines} engines" if view.engines > 1 else ""
    if not view.ours:
        return [("no slacktide here: vLLM's own figures", DIM), (f"{engines}   {span}", DIM)]
    style = GOOD if view.mode == "active" else BAD if "off" in view.mode else ""
    belief = f"   belief of {view.belief_samples:,.0f} steps"
    return [("mode ", DIM), (view.mode, style), (f"{belief}{engines}   {span}", DIM)]


def _requests(view: View) -> Line:
    finished = "" if view.finished_rate is None else f"   finished {view.finished_rate:.1f}/s"
    line: Line = [
        (_row("requests"), DIM),
        (f"running {view.num_running:.0f}   waiting {view.num_waiting:.0f}{finished}", ""),
    ]
    line.append((f"   rejected {view.rejected:.0f}", BAD if view.rejected else ""))
    line.append((f"   preempted {view.num_preemptions:.0f}", BAD if view.num_preemptions else ""))
    return line if not view.relegated else [*line, (f"   relegated {view.relegated:.0f}", "")]


def _cache(view: View, full: str) -> Line:
    if view.kv_usage is None:
        return [(_row("KV cache"), DIM), ("not told", DIM)]
    hits = "" if view.prefix_hits is None else f"   prefix hits {100 * view.prefix_hits:.0f} %"
    style = BAD if view.kv_usage > HIGH_KV else ""
    return [
        (_row("KV cache"), DIM),
        (_bar(view.kv_usage, 20, full), style),
        (f" {100 * view.kv_usage:.0f} %{hits}", style),
    ]


def _latency(view: View) -> list[Line]:
    ahead = "" if view.predicted_ttft is None else f"   predicted for a request now {_time(view.predicted_ttft)}"
    return [
        [(_row("TTFT"), DIM), (f"p50 {_time(view.ttft[0])}  p99 {_time(view.ttft[1])}{ahead}", "")],
        [(_row("TBT"), DIM), (f"p50 {_time(view.tbt[0])}  p99 {_time(view.tbt[1])}", ""), *_slack(view)],
    ]


def _slack(view: View) -> Line:
    """How near the deadlines of the next tokens are."""
    if view.slack_late is None:
        return []
    style = BAD if view.slack_late > 1 - LOW_ATTAINMENT else ""
    least = view.slack_bins[0][0] if view.slack_bins else -math.inf
    first, middle = (("< " if v is not None and v <= least else "") + _time(v) for v in view.slack)
    return [
        ("   slack ", DIM),
        (f"late {100 * view.slack_late:.0f} %", style),
        (f"  p1 {first}  p50 {middle}", ""),
    ]


def _steps(view: View) -> list[Line]:
    shares = "   ".join(
        f"{batch} {100 * share:.0f} %" for batch, share in view.batches.items() if batch != "empty" or share
    )
    error = "" if view.step_error is None else f"error {100 * view.step_error:.0f} %"
    off = view.step_error is not None and view.step_error > LARGE_ERROR
    wrong = f"fallbacks {sum(view.fallbacks.values()):.0f}"
    if view.fallbacks:
        wrong += f" ({', '.join(f'{reason} {count:.0f}' for reason, count in view.fallbacks.items())})"
    times = f"measured {_time(view.measured_step)}   predicted {_time(view.predicted_step)}   "
    return [
        [(_row("steps"), DIM), (f"{_rate(view.steps_rate)}   {shares}   switches {_rate(view.switches_rate)}", "")],
        [(_row("step time"), DIM), (times, ""), (error, BAD if off else "")],
        [(_row("decision"), DIM), (f"mean {_time(view.decision[0])}  p99 {_time(view.decision[1])}", "")],
        [(_row("trouble"), DIM), (wrong, BAD if view.fallbacks else ""), (f"   deviations {view.deviations:.0f}", ""),
         (f"   switched off {view.policy_off:.0f}", BAD if view.policy_off else "")],
    ]  # fmt: skip


def _shadow(view: View) -> list[Line]:
    """Attainment of the newest requests as it was, and as replayed under each schedule."""
    if not view.shadow:
        return []
    shares = "   ".join(f"{schedule} {100 * share:.1f} %" for schedule, share in view.shadow.items())
    return [[(_row("shadow"), DIM), (f"attainment: {shares}", "")]]


def _classes(view: View, full: str, room: int) -> list[Line]:
    """Attainment per class since the start; `room` lines in all."""
    lines: list[Line] = [[("class       met SLO since start           ended    late: ttft     tbt    e2el", DIM)]]
    if not view.classes:
        return [*lines, [("no request has ended yet", DIM)]]
    shown = view.classes if len(view.classes) <= room - 1 else view.classes[: room - 2]
    for each in shown:
        name = each.name if len(each.name) <= 11 else f"{each.name[:9]}.."
        style = BAD if each.attained < LOW_ATTAINMENT else GOOD
        late = "".join(f"{_count(each.late[kind]):>8}" for kind in ("ttft", "tbt", "e2el"))
        percent = "100" if each.attained >= 1 else f"{100 * min(each.attained, 0.9994):.1f}"
        lines.append([
            (f"{name:<12}", ""), (_bar(each.attained, 14, full), style), (f" {percent:>5} %", style),
            (f"{_count(each.ended):>9}     {late}", ""),
        ])  # fmt: skip
    if len(shown) < len(view.classes):
        lines.append([(f"and {len(view.classes) - len(shown)} more classes", DIM)])
    return lines


def _histograms(view: View, width: int, full: str, room: int) -> list[Line]:
    """Step times, measured beside predicted, and how near the next deadlines are; one line a bin, `room` lines in all.

    Where lines are few, the shortest step times are put together. Deadlines have the same lines from look to look.
    """
    steps = [each for each in view.step_bins if each[1] or each[2]]
    if room < 3 or not steps:
        return []
    head, steps = steps[: -(room - 1)], steps[-(room - 1) :]
    together = [*head, steps[0]]
    steps[0] = (steps[0][0], math.fsum(each[1] for each in together), math.fsum(each[2] for each in together))
    rows = [(_upto(bound), [measured, predicted]) for bound, measured, predicted in steps]
    beside = view.slack_late is not None and width >= LEAST_BESIDE
    left = width - SLACK_WIDTH - 2 if beside else width
    lines = _panel("step time", ["measured", "predicted"], rows, left, full)
    if not beside:
        return lines
    rows, low = [], -math.inf
    for edge in sorted([0.0, math.inf, *SLACK_EDGES[: room - 3]]):
        rows.append((_upto(edge) if edge else "late", [math.fsum(s for b, s in view.slack_bins if low < b <= edge)]))
        low = edge
    right = _panel("due in", ["of next tokens"], rows, SLACK_WIDTH, full)
    none: Line = []
    return [_beside(a, b, left + 2) for a, b in zip_longest(lines, right, fillvalue=none)]


def _upto(bound: float) -> str:
    return "longer" if math.isinf(bound) else f"<= {_time(bound)}"


def _panel(head: str, names: list[str], rows: list[tuple[str, list[float]]], width: int, full: str) -> list[Line]:
    """Bars beside their labels, a column a name, all to one scale."""
    scale, most = (width - 12) // len(names) - 7, max(max(shares) for _, shares in rows) or 1.0
    lines: list[Line] = [[(f"{head:<12}" + "".join(f"{name:<{scale + 7}}" for name in names), DIM)]]
    for label, shares in rows:
        bars = "".join(f"{full * round(share / most * scale):<{scale}}{100 * share:4.0f} % " for share in shares)
        lines.append([(f"{label:<12}", DIM), (bars, "")])
    return lines


def _beside(left: Line, right: Line, at: int) -> Line:
    used = sum(len(text) for text, _ in left)
    return [*left, (" " * (at - used), ""), *right] if right else left


def _bar(share: float, size: int, full: str) -> str:
    filled = round(min(max(share, 0.0), 1.0) * size)
    return f"[{full * filled}{'.' * (size - filled)}]"


def _time(seconds: float | None) -> str:
    """Three digits: 0.31 ms, 52.1 ms, 1.24 s."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{seconds * 1e3:.3g} ms"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}/s" if value >= 10 else f"{value:.1f}/s"


def _count(value: float) -> str:
    return f"{value:,.0f}" if value < 100_000 else f"{value / 1000:,.0f}k"


def _cut(line: Line, width: int) -> Line:
    """The line's pieces up to the width; control characters of names a server chose are made visible."""
    kept: Line = []
    left = width
    for text, style in line:
        plain = "".join(c if c.isprintable() else "?" for c in text)
        if left > 0 and plain:
            kept.append((plain[:left], style))
        left -= len(plain)
    return kept
