"""What the API returns: plain records, with a table as their text and, in a notebook, a table and a figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slacktide.api import html
from slacktide.errors import InputError
from slacktide.metrics.log import RunLog

Record = dict[str, Any]


@dataclass(frozen=True, eq=False, repr=False)
class Run:
    """One simulated or loaded run."""

    record: Record
    """As in summary.json: policy, label, parameters, profile, engine, notes and `summary`."""
    log: RunLog | None
    """Per request and per step, in seconds; None for a result without per-request figures."""

    @property
    def label(self) -> str:
        """The policy with its parameters."""
        return str(self.record.get("label") or self.record.get("policy"))

    @property
    def summary(self) -> dict[str, Any]:
        """The figures; names and units as on the page on metrics."""
        summary: dict[str, Any] = self.record["summary"]
        return summary

    def __repr__(self) -> str:
        return repr(Comparison([self]))

    def _repr_html_(self) -> str:
        return Comparison([self])._repr_html_()


@dataclass(frozen=True, eq=False, repr=False)
class Comparison:
    """Runs of several policies on the same requests. Iterates over its runs; `comparison["vllm-v1"]` is one of them."""

    runs: list[Run]

    @property
    def records(self) -> list[Record]:
        """The runs' records, as in compare.json."""
        return [run.record for run in self.runs]

    def __len__(self) -> int:
        return len(self.runs)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.runs)

    def __getitem__(self, label: str) -> Run:
        """The run of this label. Raises InputError with near labels."""
        for run in self.runs:
            if run.label == label:
                return run
        from slacktide.errors import unknown_name

        raise unknown_name("run", label, [run.label for run in self.runs])

    def __repr__(self) -> str:
        from slacktide.report.tables import comparison_text

        return comparison_text(self.records).rstrip("\n")

    def figure(self, path: str | Path) -> Path:
        """Draw the comparison as a PNG. Raises InputError, also where matplotlib is missing."""
        from slacktide.report.figures import compare_figure

        compare_figure([(run.record, run.log) for run in self.runs], path)
        return Path(path)

    def save(self, directory: str | Path) -> Path:
        """Write what `slacktide compare --out` writes, without the figure. Raises InputError."""
        from slacktide.cli.scenario import COMPARE, directories
        from slacktide.report.files import write_json, write_run

        folder = Path(directory)
        for run, place in zip(self.runs, directories([run.label for run in self.runs]), strict=True):
            if run.log is not None:
                write_run(folder / place, run.record, run.log)
        write_json(folder / COMPARE, {"runs": self.records})
        return folder

    def _repr_html_(self) -> str:
        """Table and figure; without matplotlib the figure's place says how to get it."""
        from slacktide.report.tables import ENGINE, SERVED, footnotes, headline

        parts = [html.lines(headline(self.records))]
        for columns, caption in ((SERVED, "Served (ms)"), (ENGINE, "Engine")):
            used = [c for c in columns if any(c.read(record["summary"]) is not None for record in self.records)]
            if used:
                parts.append(html.table(["policy", *(html.title(c.title) for c in used)], self._rows(used), caption))
        parts += [html.lines(footnotes(self.records)), self._figure()]
        return "".join(parts)

    def _rows(self, columns: list[Any]) -> list[list[str]]:
        rows = []
        for record in self.records:
            values = [column.read(record["summary"]) for column in columns]
            mark = " (oracle)" if record.get("oracle") else ""
            texts = ["-" if v is None else c.show(v) for c, v in zip(columns, values, strict=True)]
            rows.append([f"{record.get('label') or record.get('policy')}{mark}", *texts])
        return rows

    def _figure(self) -> str:
        import tempfile

        try:
            with tempfile.TemporaryDirectory() as folder:
                return html.png(self.figure(Path(folder) / "compare.png").read_bytes(), "comparison of the runs")
        except InputError as error:
            return html.lines([f"no figure: {error}"])


@dataclass(frozen=True, eq=False, repr=False)
class Goodput:
    """Highest rates at which policies meet the SLO, with their 95 % intervals."""

    records: list[Record]
    """As in goodput.json: `label`, `rate` (None: not limited by the rate), `rate_low`, `rate_high`, ..."""

    @property
    def rates(self) -> dict[str, float | None]:
        """Requests per second by label."""
        return {record["label"]: record["rate"] for record in self.records}

    def __repr__(self) -> str:
        return html.text_table(_GOODPUT, self._rows())

    def _rows(self) -> list[list[str]]:
        def shown(value: float | None) -> str:
            return "unlimited" if value is None else f"{value:.2f}"

        return [
            [r["label"], shown(r["rate"]), "-" if r["rate"] is None else f"{r['rate_low']:.2f} to {r['rate_high']:.2f}"]
            for r in self.records
        ]

    def _repr_html_(self) -> str:
        first = self.records[0]
        head = [
            f"profile: {first['profile']} [{first['profile_label']}]",
            f"highest rate at which {100 * first['target']:g} % of all arrivals meet {first['slo']}",
        ]
        found = [(r["label"], r["rate"], r["rate_low"], r["rate_high"]) for r in self.records if r["rate"] is not None]
        notes = list(dict.fromkeys(note for record in self.records for note in record["notes"]))
        return html.lines(head) + html.table(_GOODPUT, self._rows()) + html.bars(found, "req/s") + html.lines(notes)


_GOODPUT = ["policy", "goodput req/s", "95 % interval"]


@dataclass(frozen=True, eq=False, repr=False)
class Sweep:
    """A grid of runs."""

    records: list[Record]
    """As in sweep.json: each with `varied` (value by name), `policy_label`, `summary` and `error`."""

    def columns(self) -> dict[str, list[Any]]:
        """The grid as flat columns, as in sweep.csv: ready for a data frame."""
        from slacktide.search.sweep import flat

        return flat(self.records)

    def _table(self) -> tuple[list[str], list[list[str]]]:
        titles = list(self.records[0]["varied"])
        keys = ("attainment", "request_goodput", "p99_ttft_ms", "p99_itl_ms", "request_throughput")
        rows = []
        for record in self.records:
            figures = [record["summary"].get(key) for key in keys]
            varied = ["-" if v is None else str(v) for v in (record["varied"][title] for title in titles)]
            shown = ["-" if figure is None else f"{figure:.4g}" for figure in figures]
            rows.append(
                [*varied, record["policy_label"], *(shown if record["error"] is None else ["failed"] * len(keys))]
            )
        return [*titles, "policy", *keys], rows

    def __repr__(self) -> str:
        return html.text_table(*self._table())

    def _repr_html_(self) -> str:
        met = [
            (record["label"], record["summary"]["attainment"], None, None)
            for record in self.records
            if record["summary"].get("attainment") is not None
        ]
        return html.table(*self._table()) + (html.bars(met, "attainment") if len(met) <= MAX_BARS else "")


MAX_BARS = 40
"""Bars of a sweep that still fit on a screen."""


@dataclass(frozen=True, eq=False, repr=False)
class Advice:
    """Exclusive or mixed batching."""

    record: Record
    """As in advise.json: `recommendation`, `n_cross`, `theta0`, `k`, `n_safe`, `token_budget`, `simulated`, ..."""

    @property
    def recommendation(self) -> str:
        """`exclusive` or `mixed`."""
        return str(self.record["recommendation"])

    def _table(self) -> tuple[list[str], list[list[str]]]:
        keys = (
            "request_throughput",
            "total_token_throughput",
            "mean_ttft_ms",
            "mean_tpot_ms",
            "p99_itl_ms",
            "attainment",
        )
        rows = [
            [mode, *("-" if figures[key] is None else f"{figures[key]:.4g}" for key in keys)]
            for mode, figures in self.record["simulated"].items()
        ]
        return ["mode", *keys], rows

    def _headline(self) -> str:
        n = self.record["n_cross"]
        wins = "never wins" if n is None else "always wins" if n == 0 else f"wins from {n:,} requests in the system on"
        return f"advice: {self.recommendation} batching (by {self.record['decided_by']}); exclusive {wins}"

    def __repr__(self) -> str:
        return f"{self._headline()}\n{html.text_table(*self._table())}"

    def _repr_html_(self) -> str:
        rates = [(mode, f["request_throughput"], None, None) for mode, f in self.record["simulated"].items()]
        return html.lines([self._headline()]) + html.table(*self._table()) + html.bars(rates, "req/s")
