"""Write dashboards/grafana.json. Usage: python scripts/build_dashboards.py

The panels stand below, one line each; everything else of the file is Grafana's form. `$instance` is a variable of the
dashboard: one or several servers, by the label that Prometheus gives each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "dashboards" / "grafana.json"
WIDTH, HEIGHT = 8, 7
"""Of a panel, in Grafana's grid of 24 columns: three in a row."""

I = 'instance=~"$instance"'  # noqa: E741
R = "[$__rate_interval]"


def rate(name: str, by: str = "", more: str = "") -> str:
    """Sum of a counter's rate, by labels."""
    group = f" by ({by})" if by else ""
    return f"sum{group} (rate({name}{{{I}{more}}}{R}))"


def quantile(share: float, name: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{{{I}}}{R})))"


def mean(name: str) -> str:
    return f"{rate(name + '_sum')} / {rate(name + '_count')}"


def gauge(name: str, by: str = "", how: str = "sum", more: str = "") -> str:
    group = f" by ({by})" if by else ""
    return f"{how}{group} ({name}{{{I}{more}}})"


S, V = "slacktide:", "vllm:"
LATE = ',le="0.0"'
SAME = rate(f"{S}shadow_steps_total", more=',same="yes"')
ENDED = rate(f"{S}requests_total", "slo_class", ',end!="aborted"')

ROWS: list[tuple[str, list[tuple[str, str, str, list[tuple[str, str]]]]]] = [
    (
        "What users get",
        [
            (
                "SLO attainment by class",
                "percentunit",
                "Share of ended requests that met all their targets; without those that their client left.",
                [(f"{rate(f'{S}slo_attained_total', 'slo_class')} / {ENDED}", "{{slo_class}}")],
            ),
            (
                "Violations by class and kind",
                "reqps",
                "ttft: first token late; tbt: a later token late; e2el: whole answer late.",
                [(rate(f"{S}slo_violations_total", "slo_class, kind"), "{{slo_class}} {{kind}}")],
            ),
            ("Requests by end", "reqps", "How requests ended.", [(rate(f"{S}requests_total", "end"), "{{end}}")]),
            (
                "Time to first token",
                "s",
                "Measured by vLLM; and what the scheduler predicts for a request that arrives now.",
                [
                    (quantile(0.5, f"{V}time_to_first_token_seconds"), "p50"),
                    (quantile(0.99, f"{V}time_to_first_token_seconds"), "p99"),
                    (gauge(f"{S}predicted_ttft_seconds", how="max"), "predicted now"),
                ],
            ),
            (
                "Time between tokens",
                "s",
                "vLLM's inter-token latency.",
                [
                    (quantile(0.5, f"{V}inter_token_latency_seconds"), "p50"),
                    (quantile(0.99, f"{V}inter_token_latency_seconds"), "p99"),
                ],
            ),
            (
                "Time to the next deadline",
                "s",
                "Slack of the next tokens of live requests, sampled: below 0 they are late. p1 and p10: the nearest.",
                [
                    (quantile(0.01, f"{S}slack_seconds"), "p1"),
                    (quantile(0.1, f"{S}slack_seconds"), "p10"),
                    (quantile(0.5, f"{S}slack_seconds"), "p50"),
                ],
            ),
            (
                "Late now",
                "percentunit",
                "Share of the live requests whose next token is past its deadline, of those that have one.",
                [(f"{rate(f'{S}slack_seconds_bucket', more=LATE)} / {rate(f'{S}slack_seconds_count')}", "late")],
            ),
            (
                "Turned away",
                "reqps",
                "By the policy, our middleware (429, 503), vLLM's limits. Relegated: served from what is left.",
                [
                    (rate(f"{S}rejected_total"), "by the policy"),
                    (rate(f"{S}admission_rejected_total"), "by the middleware"),
                    (rate(f"{V}admission_rejections_total"), "by vLLM"),
                    (rate(f"{S}relegated_total"), "relegated"),
                ],
            ),
        ],
    ),
    (
        "Engine",
        [
            (
                "Requests in the engine",
                "short",
                "Running hold KV blocks and a seat; waiting do not.",
                [(gauge(f"{V}num_requests_running"), "running"), (gauge(f"{V}num_requests_waiting"), "waiting")],
            ),
            (
                "KV cache",
                "percentunit",
                "Share of the blocks in use; near 1 preemptions begin.",
                [(gauge(f"{V}kv_cache_usage_perc", "engine", "max"), "engine {{engine}}")],
            ),
            (
                "Preemptions",
                "ops",
                "A preempted request computes all its tokens again.",
                [(rate(f"{V}num_preemptions_total"), "preemptions")],
            ),
            (
                "Tokens",
                "short",
                "Per second.",
                [(rate(f"{V}prompt_tokens_total"), "prompt"), (rate(f"{V}generation_tokens_total"), "output")],
            ),
            (
                "Steps by batch",
                "ops",
                "decode: no prompt in it; prefill: no decode; mixed: both.",
                [(rate(f"{S}steps_total", "batch"), "{{batch}}")],
            ),
            (
                "Prefix cache",
                "percentunit",
                "Share of prompt tokens that the cache supplied.",
                [(f"{rate(f'{V}prefix_cache_hits_total')} / {rate(f'{V}prefix_cache_queries_total')}", "hits")],
            ),
        ],
    ),
    (
        "Policy",
        [
            (
                "Step time: measured and predicted",
                "s",
                "Means. Where they part, the policy plans with wrong times.",
                [(mean(f"{S}step_seconds"), "measured"), (mean(f"{S}predicted_step_seconds"), "predicted")],
            ),
            (
                "Error of predicted step times",
                "percentunit",
                "Mean of |measured - predicted| over the mean measured step.",
                [(f"{rate(f'{S}prediction_error_seconds_total')} / {rate(f'{S}step_seconds_sum')}", "error")],
            ),
            (
                "Decision",
                "s",
                "What a decision takes: mirror, policy, steering.",
                [(quantile(0.5, f"{S}decision_seconds"), "p50"), (quantile(0.99, f"{S}decision_seconds"), "p99")],
            ),
            (
                "Mode",
                "short",
                "1: the mode in force. off: after failures, vLLM schedules alone for a while.",
                [(gauge(f"{S}mode", "mode", "max"), "{{mode}}")],
            ),
            (
                "Steps that vLLM scheduled alone",
                "ops",
                "By reason; deviations: steps in which vLLM did not run exactly the plan.",
                [
                    (rate(f"{S}fallbacks_total", "reason"), "{{reason}}"),
                    (rate(f"{S}plan_deviations_total"), "deviations"),
                    (rate(f"{S}policy_off_total"), "switched off"),
                ],
            ),
            (
                "Changes of batch and mode",
                "ops",
                "How often the kind of batch changes from step to step.",
                [(rate(f"{S}batch_switches_total"), "batch"), (rate(f"{S}mode_switches_total"), "mode")],
            ),
            (
                "Shadow: equal plans",
                "percentunit",
                "Shadow mode: share of steps in which our plan is vLLM's.",
                [(f"{SAME} / {rate(f'{S}shadow_steps_total')}", "equal")],
            ),
            (
                "Shadow: tokens on time",
                "short",
                "Shadow mode: output tokens a second, by schedule and whether in time.",
                [(rate(f"{S}shadow_tokens_total", "schedule, on_time"), "{{schedule}} on time: {{on_time}}")],
            ),
            (
                "Shadow: attainment",
                "percentunit",
                "Shadow mode: the newest requests, measured, and replayed under vLLM's schedule and ours.",
                [(gauge(f"{S}shadow_attainment", "schedule", "avg"), "{{schedule}}")],
            ),
            (
                "Shadow: replays",
                "short",
                "Shadow mode: requests of the newest replay, and replays a second by result.",
                [
                    (gauge(f"{S}shadow_replay_requests"), "requests"),
                    (rate(f"{S}shadow_replays_total", "result"), "{{result}}"),
                ],
            ),
            (
                "Belief",
                "short",
                "Steps behind the belief of step times; refits, drifts and outliers a second.",
                [
                    (gauge(f"{S}belief_samples"), "steps"),
                    (rate(f"{S}belief_refits_total"), "refits"),
                    (rate(f"{S}belief_drifts_total"), "drifts"),
                    (rate(f"{S}belief_outliers_total"), "outliers"),
                ],
            ),
            (
                "Targets that were mended",
                "reqps",
                "Targets of requests that were unusable, or out of range.",
                [
                    (rate(f"{S}targets_invalid_total"), "unusable"),
                    (rate(f"{S}targets_clamped_total"), "moved to the end of the range"),
                ],
            ),
        ],
    ),
]
"""(row, [(panel, unit, description, [(query, legend)])])."""


def dashboard() -> dict[str, Any]:
    """The whole file."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        for i, (name, unit, description, queries) in enumerate(row):
            at = {"x": i % 3 * WIDTH, "y": y + i // 3 * HEIGHT, "w": WIDTH, "h": HEIGHT}
            panels.append(panel(len(panels) + 1, name, unit, description, queries, at))
        y += (len(row) + 2) // 3 * HEIGHT
    variables = [
        {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
        {"name": "instance", "label": "Server", "type": "query", "datasource": SOURCE, "includeAll": True,
         "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "refresh": 2,
         "query": f"label_values({V}num_requests_running, instance)"},
    ]  # fmt: skip
    return {
        "uid": "slacktide", "title": "Slacktide", "tags": ["vllm", "slacktide"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "timezone": "browser",
        "templating": {"list": variables}, "annotations": {"list": []}, "panels": panels,
    }  # fmt: skip


SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def panel(
    number: int, name: str, unit: str, description: str, queries: list[tuple[str, str]], at: dict[str, int]
) -> dict[str, Any]:
    most = {"min": 0, "max": 1} if unit == "percentunit" and "rror" not in name else {"min": 0}
    most = {} if name == "Time to the next deadline" else most  # below 0: late
    return {
        "id": number, "type": "timeseries", "title": name, "description": description, "datasource": SOURCE,
        "gridPos": at,
        "fieldConfig": {
            "defaults": {"unit": unit, **most, "custom": {"lineWidth": 1, "fillOpacity": 0}}, "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": query, "legendFormat": legend, "range": True}
            for i, (query, legend) in enumerate(queries)
        ],
    }  # fmt: skip


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(Path.cwd()) if TARGET.is_relative_to(Path.cwd()) else TARGET}")
