"""Dashboard and alert rules name what a server exposes: our registry, and pages that a real vLLM wrote."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest

from slacktide.live.scrape import parse
from slacktide.vllm.metrics import FAMILIES, PREFIX, Metrics, samples

ROOT = Path(__file__).parents[2]
DASHBOARD = json.loads((ROOT / "dashboards/grafana.json").read_text())
ALERTS = (ROOT / "dashboards/alerts.yml").read_text()
PROMETHEUS = {"instance", "job"}
"""Labels that Prometheus adds to whatever it reads."""


def panels() -> list[dict]:
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> list[str]:
    of_panels = [target["expr"] for panel in panels() for target in panel["targets"]]
    return of_panels + re.findall(r"^ +expr: '(.*)'$", ALERTS, re.MULTILINE)


def exposed(page: str) -> dict[str, set[str]]:
    """Sample name -> labels of a page."""
    found: dict[str, set[str]] = {}
    for name, values in parse(page, 0.0).values.items():
        found[name] = {label for labels in values for label, _ in labels}
    return found


def registered() -> dict[str, set[str]]:
    """The same for every metric of ours, touched or not."""
    metrics = Metrics()
    found: dict[str, set[str]] = {
        "slacktide:admission_rejected_total": set(),
        "slacktide:admission_invalid_total": set(),
    }
    for name, (kind, labels, _) in FAMILIES.items():
        if kind == "histogram":
            metrics.observe(name, 1.0)
        else:
            metrics.add(name, *(f"any {label}" for label in labels))
        for sample, given, _ in samples(name, metrics.snapshot()):
            found.setdefault(sample, set()).update({*given, "engine"})
    return found


def complaints(query: str, known: dict[str, set[str]]) -> list[str]:
    """Names and labels of a query that a server does not expose."""
    found, labels = [], set(PROMETHEUS)
    for name, matchers in re.findall(r"((?:vllm|slacktide):\w+)(?:\{([^}]*)\})?", query):
        if name not in known:
            found.append(f"no metric {name}")
            continue
        labels |= known[name]
        used = re.findall(r"(\w+)(?:=~|!=|!~|=)", matchers)
        found += [f"{name} has no label {label}" for label in used if label not in known[name] | PROMETHEUS]
    for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", query):
        found += [f"no label {label}" for label in re.split(r",\s*", group) if label not in labels]
    return found


KNOWN = exposed((ROOT / "tests/cases/metrics_pages/served.txt").read_text()) | registered()


@pytest.mark.parametrize("query", queries())
def test_a_query_names_what_is_exposed(query):
    assert re.search(r"(vllm|slacktide):\w", query)
    assert complaints(query, KNOWN) == []
    assert query.count("(") == query.count(")")
    assert query.count("{") == query.count("}")


@pytest.mark.parametrize(
    "query",
    ["sum(rate(slacktide:step_total[5m]))", 'slacktide:steps_total{batches="x"}', "sum by (class) (slacktide:mode)",
     "vllm:gpu_cache_usage_perc"],
)  # fmt: skip
def test_a_query_that_names_something_else_is_found(query):
    assert complaints(query, KNOWN)


LATE = "0.0"
"""The bucket of slack that holds what is late, as Prometheus reads it."""


def test_a_query_for_a_bucket_names_one_that_is_written():
    asked = re.findall(r'(\w+)_bucket\{[^}]*\ble="([^"]+)"', " ".join(queries()))
    assert asked == [("slack_seconds", LATE)]
    written = {labels.get("le") for _, labels, _ in samples("slack_seconds", Metrics().snapshot())}
    assert LATE in written


def test_only_the_panel_of_slack_goes_below_zero():
    free = [panel["title"] for panel in panels() if "min" not in panel["fieldConfig"]["defaults"]]
    assert free == ["Time to the next deadline"]


def test_every_metric_of_ours_is_on_the_dashboard():
    text = json.dumps(DASHBOARD)
    own = {*FAMILIES, "admission_rejected"} - {"num_running", "num_waiting", "preempted"}  # vLLM's own stand there
    assert {name for name in own if f"{PREFIX}{name}" not in text} == set()


def test_the_dashboard_is_what_its_script_writes():
    spec = importlib.util.spec_from_file_location("build_dashboards", ROOT / "scripts/build_dashboards.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.text() == (ROOT / "dashboards/grafana.json").read_text(), "run scripts/build_dashboards.py"


def test_panels_have_numbers_units_words_and_do_not_overlap():
    taken = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in panels():
        assert panel["title"]
        assert panel["description"].endswith(".")
        assert panel["targets"]


def test_alert_rules_are_whole():
    names = re.findall(r"- alert: (\w+)$", ALERTS, re.MULTILINE)
    assert len(names) == len(set(names)) == len(re.findall(r"^ +expr: ", ALERTS, re.MULTILINE)) >= 8
    for part in ("for: ", "labels: {severity: ", "summary: "):
        assert ALERTS.count(f"        {part}") + ALERTS.count(f"          {part}") >= len(names)
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load(ALERTS)["groups"]
    for rule in group["rules"]:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_every_alert_is_explained_in_the_documents():
    text = (ROOT / "docs/how-to/production.md").read_text()
    assert {name for name in re.findall(r"- alert: (\w+)$", ALERTS, re.MULTILINE) if name not in text} == set()
