"""A result in one sentence, the first thing a report says, and what to know before believing it."""

from __future__ import annotations

import math
from typing import Any

from slacktide.report.source import Run, Source
from slacktide.report.tables import number, percent


def answer(source: Source) -> str:
    """One sentence, sometimes a second one that qualifies it."""
    if source.kind == "goodput":
        return _goodput(source.runs)
    if source.kind == "sweep":
        return _sweep(source.runs)
    if source.kind == "advise":
        return _advise(source.data)
    if source.kind == "validate":
        return _validate(source.data)
    return _runs(source.runs)


def target_text(run: Run) -> str:
    """The SLO in words: "TTFT 500 ms and TBT 50 ms"; "" where there is none in one piece."""
    if run.log is not None:
        import numpy as np

        found = []
        for name, column in (("TTFT", "slo_ttft"), ("TBT", "slo_tbt"), ("E2EL", "slo_e2e")):
            values = np.unique(getattr(run.log, column))
            if values.size > 1:
                return "its requests' own targets"
            if values.size and math.isfinite(values[0]):
                found.append(f"{name} {1e3 * float(values[0]):g} ms")
        return " and ".join(found)
    text = run.record.get("slo")
    if not isinstance(text, str) or not text:
        return ""
    parts = [part.strip().partition(":") for part in text.replace(" ", ",").split(",") if part.strip()]
    names = {"ttft": "TTFT", "tbt": "TBT", "tpot": "TBT", "e2el": "E2EL", "e2e": "E2EL"}
    if all(name in names and value.replace(".", "", 1).isdigit() for name, _, value in parts):
        return " and ".join(f"{names[name]} {value} ms" for name, _, value in parts)
    return f"the target {text}"


def _at(run: Run) -> str:
    target = target_text(run)
    return f"At {target}, " if target else ""


def _where(run: Run) -> str:
    record = run.record
    trace, profile = record.get("trace"), record.get("profile")
    return (f" on {trace}" if trace else "") + (f", {profile}" if profile else "")


def _runs(runs: list[Run]) -> str:
    judged = [(run, run.summary.get("attainment")) for run in runs]
    first = runs[0]
    rate = first.record.get("rate")
    load = f" at {number(rate)} req/s" if isinstance(rate, (int, float)) else ""
    if len(runs) == 1:
        return _one(first, load)
    scored = [(run, float(a)) for run, a in judged if a is not None]
    if not scored:
        fastest = min(runs, key=lambda run: _or(run.summary.get("p99_ttft_ms"), math.inf))
        return (
            f"Without an SLO nobody is late; {fastest.name} has the shortest p99 TTFT, "
            f"{_ms(fastest.summary.get('p99_ttft_ms'))}{load}{_where(first)}."
        )
    rivals = [(run, a) for run, a in scored if not run.record.get("oracle")] or scored
    best = max(a for _, a in rivals)
    tied = [run.name for run, a in rivals if percent(a) == percent(best)]
    others = sorted(((run, a) for run, a in scored if run.name not in tied), key=lambda pair: -pair[1])
    text = (
        f"{_at(first)}{_list(tied)} {'serves' if len(tied) == 1 else 'serve'} {percent(best)} % of the requests in time"
    )
    text += load + _where(first)
    if others:
        text += "; " + ", ".join(f"{run.name} {percent(a)} %" for run, a in others[:3])
        text += f" and {len(others) - 3} more below" if len(others) > 3 else ""
    return text + "."


def _one(run: Run, load: str) -> str:
    s = run.summary
    share = s.get("attainment")
    requests = f"{_or(s.get('num_requests'), _or(s.get('completed'), 0)):,} requests"
    if share is None:
        return (
            f"{run.name} served {requests}{load}{_where(run)}: p99 TTFT {_ms(s.get('p99_ttft_ms'))}, p99 TBT "
            f"{_ms(s.get('p99_itl_ms'))}; there is no SLO to judge by."
        )
    text = f"{_at(run)}{run.name} serves {percent(share)} % of {requests} in time{load}{_where(run)}."
    kinds = s.get("violations") or {}
    names = {"ttft": "the first token came late", "tbt": "later tokens came late", "e2e": "the end came late",
             "unserved": "they were not served"}  # fmt: skip
    worst = max(kinds, key=lambda kind: kinds[kind], default=None)
    if worst is not None and kinds[worst]:
        text += f" Of the missed ones, {kinds[worst]:,} because {names.get(worst, worst)}."
    return text


def _goodput(runs: list[Run]) -> str:
    first = runs[0]
    target = percent(first.record["target"])
    rivals = [run for run in runs if not run.record.get("oracle")] or runs
    free = [run.name for run in rivals if run.record["rate"] is None]
    if free:
        return f"{_at(first)}{_list(free)} meets the target for {target} % at any rate{_where(first)}: make it harder."
    ranked = sorted(rivals, key=lambda run: -run.record["rate"])
    best = ranked[0]
    text = f"{_at(first)}{best.name} serves {number(best.record['rate'])} req/s with {target} % in time{_where(first)}"
    if len(ranked) > 1:
        text += "; " + ", ".join(f"{run.name} {number(run.record['rate'])}" for run in ranked[1:4])
    text += "."
    if len(ranked) > 1 and _or(ranked[1].record["rate_high"], 0) >= _or(best.record["rate_low"], 0):
        text += f" The intervals of {best.name} and {ranked[1].name} overlap: their order may be chance."
    return text


def _sweep(runs: list[Run]) -> str:
    good = [run for run in runs if run.record.get("error") is None]
    if not good:
        return f"All {len(runs)} runs failed."
    failed = f" {len(runs) - len(good)} of {len(runs)} runs failed." if len(good) < len(runs) else ""
    key, what = ("request_goodput", "req/s in time")
    scored = [run for run in good if run.summary.get(key) is not None and not run.record.get("oracle")]
    if not scored:
        key, what = ("request_throughput", "req/s")
        scored = [run for run in good if run.summary.get(key) is not None]
    if not scored:
        return f"{len(good)} runs, none with a figure to rank by.{failed}"
    groups: dict[str, list[Run]] = {}
    for run in scored:
        groups.setdefault(_setting(run), []).append(run)
    best = max(_mean(same, key) for same in groups.values())
    tied = [name for name, same in groups.items() if number(_mean(same, key)) == number(best)]
    names = _list(tied) if len(tied) <= MOST_NAMED else f"{tied[0]} and {len(tied) - 1} others alike"
    same = groups[tied[0]]
    known = [run for run in same if run.summary.get("attainment") is not None]
    share = f" ({percent(_mean(known, 'attainment'))} % of all)" if known else ""
    seeds = f", the mean of {len(same)} seeds" if len(same) > 1 else ""
    return (
        f"{_at(same[0])}the most requests are served by {names}: {number(best)} {what}{share}{seeds}, "
        f"the best of {len(groups)} settings{_where(same[0])}.{failed}"
    )


MOST_NAMED = 3
"""Settings of a tie that are all named."""


def _setting(run: Run) -> str:
    """A cell of a sweep without its seed."""
    varied = run.record["varied"]
    if "seed" not in varied:
        return run.name
    rest = [f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in varied.items() if name != "seed"]  # fmt: skip
    return " ".join([str(run.record.get("policy_label") or run.record.get("policy")), *rest])


def _mean(runs: list[Run], key: str) -> float:
    return math.fsum(run.summary[key] for run in runs) / len(runs)


def _advise(data: dict[str, Any]) -> str:
    mode = data["recommendation"]
    other = "mixed" if mode == "exclusive" else "exclusive"
    mine, its = (data["simulated"][m]["request_throughput"] for m in (mode, other))
    chance = data["chance_exclusive"] if mode == "exclusive" else 1 - data["chance_exclusive"]
    met, rival = (data["simulated"][m].get("attainment") for m in (mode, other))
    by = data["decided_by"]
    if by == "attainment" and met is not None and rival is not None:
        by += f", {percent(met)} against {percent(rival)} %"
    return (
        f"Use {mode} batching for {data['profile']} at {data['concurrency']:,} requests in the system: simulated "
        f"{number(mine)} req/s, {other} {number(its)} (decided by {by}; chance that {mode} is faster by the closed "
        f"forms {percent(chance)} %)."
    )


def _validate(data: dict[str, Any]) -> str:
    judged = [row for row in data["rows"] if row["met"] is not None]
    missed = sum(row["met"] is False for row in judged)
    by_spread = sum(verdict_of(row) == WITHIN_SPREAD for row in judged)
    verdict = "every judged figure is within its bar"
    if missed:
        verdict = f"{missed} of {len(judged)} figures miss their bar"
    elif by_spread:
        verdict = f"no figure misses, but {by_spread} of {len(judged)} only because the real runs differ that much"
    elif not judged:
        verdict = "no figure could be judged"
    return f"Simulated against measured, {verdict}: {data['text']}."


WITHIN_SPREAD = "within the spread"


def verdict_of(row: dict[str, Any]) -> str:
    """A validated figure's verdict. Beyond its bar it is met where the real runs differ among themselves by more."""
    if row["met"] is None:
        return "not judged"
    if not row["met"]:
        return "MISSED"
    return "within" if abs(_or(row["error"], 0.0)) <= _or(row["bar"], 0.0) + 1e-12 else WITHIN_SPREAD


def _list(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _or(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None else value


def _ms(value: float | None) -> str:
    return "unknown" if value is None else f"{number(value)} ms"
