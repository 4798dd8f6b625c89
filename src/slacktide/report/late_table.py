"""The requests that were latest in a run, with the parts of their latency."""

from __future__ import annotations

from html import escape

from slacktide.metrics.late import CLIENT_PARTS, PARTS, Lateness, parts_of, seconds_text, why_late, worst_requests
from slacktide.metrics.log import END_REASONS
from slacktide.metrics.slo import Verdicts
from slacktide.report.source import Run

WORST = 10

_CLASS = {"first token": "queue", "tokens": "decode", "closing": "mixed"}


def worst_table(run: Run, verdict: Verdicts, late: Lateness) -> str:
    """The table, or a sentence where nobody was late; "" for a run without its log."""
    log = run.log
    if log is None:
        return ""
    mode = run.summary.get("slo_mode", "deadline")
    rows = worst_requests(log, verdict, WORST, mode).tolist()
    if not rows:
        return "<p>Every request met its SLO.</p>"
    names: tuple[str, ...] = PARTS if log.token_step is not None else CLIENT_PARTS
    has_slo = bool(verdict.has_slo.any())
    body, longest, exact = "", 0.0, True
    parts = {i: parts_of(log, i, run.decisions) for i in rows}
    longest = max(p.total for p in parts.values())
    names = tuple(name for name in names if any(p.seconds[name] > 0 for p in parts.values()))  # no empty columns
    for i in rows:
        found = parts[i]
        exact = exact and found.exact
        bar = "".join(
            f'<i class="{_CLASS.get(name, name)}" style="width:{100 * value / max(longest, 1e-9):.2f}%" '
            f'title="{name} {seconds_text(value)}"></i>'
            for name, value in found.seconds.items()
            if value > 0
        )
        cells = "".join(
            f'<td data-request="{i}" data-part="{name}" data-value="{found.seconds[name]!r}">'
            f"{seconds_text(found.seconds[name]) if found.seconds[name] > 0 else '-'}</td>"
            for name in names
        )
        tokens = f"{int(log.num_prompt_tokens[i]):,} + {int(log.num_delivered_tokens[i]):,}"
        reason = why_late(log, i, run.decisions, late, mode)
        body += (
            f'<tr><th scope="row">{i}</th><td class="text">{escape(reason)}</td><td><div class="parts">{bar}</div></td>'
            f'<td data-request="{i}" data-part="latency" data-value="{found.total!r}">{seconds_text(found.total)}</td>'
            f"{cells}<td>{tokens}</td><td>{END_REASONS[int(log.end_reason[i])]}</td></tr>"
        )
    heads = "".join(f'<th scope="col"><i class="{_CLASS.get(name, name)}"></i>{name}</th>' for name in names)
    title = (
        f"The {len(rows)} latest requests, and where their time went" if has_slo else "The slowest requests (no SLO)"
    )
    about = (
        "The parts add up to the latency. preemption: from losing KV to the next token; stall: admitted, in no step."
    )
    if not exact:
        about += " This run's decisions were not recorded, so preemption time is estimated."
    if log.token_step is None:
        about = "As the client saw it: the server's queue and prefill are in the first token."
    return (
        f'<h3>{title}</h3><div class="wide" tabindex="0"><table class="worst"><thead><tr><th scope="col">request</th>'
        f'<th scope="col" class="text">why</th><th scope="col">parts</th><th scope="col">latency</th>{heads}'
        '<th scope="col">tokens</th><th scope="col">end</th>'
        f"</tr></thead><tbody>{body}</tbody></table></div><p>{about}</p>"
    )
