"""What a report is made from: a result of any verb, with its runs' logs and decisions where the files hold them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slacktide.core.types import SLO
from slacktide.errors import InputError
from slacktide.metrics.bench import read_json
from slacktide.metrics.decisions import Decisions
from slacktide.metrics.log import RunLog
from slacktide.report.decisions_file import read_decisions
from slacktide.report.files import SUMMARY, Record
from slacktide.report.load import COMPARE, check_figures, check_texts, load_runs, only_one

GOODPUT, SWEEP, ADVISE, VALIDATE = "goodput.json", "sweep.json", "advise.json", "validation.json"


@dataclass(frozen=True, eq=False)
class Run:
    """One run: its record, and what the files hold beyond it."""

    record: Record
    log: RunLog | None = None
    decisions: Decisions | None = None

    @property
    def name(self) -> str:
        """Its label, marked where the policy sees true output lengths."""
        label = str(self.record.get("label") or self.record.get("policy") or "run")
        return f"{label} (oracle)" if self.record.get("oracle") else label

    @property
    def summary(self) -> dict[str, Any]:
        """The figures of its summary.json."""
        return dict(self.record.get("summary") or {})


@dataclass(frozen=True, eq=False)
class Source:
    """A result. `kind`: runs, goodput, sweep, advise or validate; `data` is the file's JSON for the last four."""

    kind: str
    runs: list[Run] = field(default_factory=list)
    data: dict[str, Any] = field(default_factory=dict)
    title: str = ""


def read_source(
    path: str | os.PathLike[str], slo: SLO | None = None, *, mode: str = "deadline", tolerated_late_share: float = 0.0
) -> Source:
    """The result at `path`, a file or a directory of `--out`. Raises InputError for what is none.

    slo, mode, tolerated_late_share: judge runs anew, as `load_runs` does; other kinds hold no requests to judge.
    """
    place = Path(path)
    file = _searched(place)
    if file is not None:
        data = read_json(file)
        kind = kind_of(data)
        if kind is not None:
            if slo is not None or mode != "deadline" or tolerated_late_share:
                raise InputError(f"{file}: a {kind} holds no requests to judge anew: leave out --slo and its like")
            _check(kind, data, file)
            return Source(kind, [Run(record) for record in data.get("runs") or []], data, place.name)
    loaded = load_runs(path, slo, mode=mode, tolerated_late_share=tolerated_late_share)
    folders = _folders(place)
    runs = []
    for record, log in loaded:
        folder = folders.get(str(record.get("label")))
        decisions = None if folder is None or log is None else read_decisions(folder)
        if decisions is not None and log is not None and decisions.num_steps != log.num_steps:
            raise InputError(f"{folder}: {decisions.num_steps} decisions for {log.num_steps} steps: files of two runs")
        runs.append(Run(record, log, decisions))
    return Source("runs", runs, {}, place.name)


def kind_of(data: dict[str, Any]) -> str | None:
    """goodput, sweep, advise or validate; None for anything else."""
    if "recommendation" in data and "curves" in data:
        return "advise"
    runs = data.get("runs")
    first = runs[0] if isinstance(runs, list) and runs and isinstance(runs[0], dict) else {}
    if "evaluations" in first:
        return "goodput"
    if "varied" in first:
        return "sweep"
    if isinstance(data.get("rows"), list) and "repeats" in data:
        return "validate"
    return None


_RUN_FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "goodput": {"rate": (int, float, type(None)), "rate_low": (int, float, type(None)), "target": (int, float),
                "rate_high": (int, float, type(None)), "num_prompts": (int,), "evaluations": (list,),
                "profile": (str,)},
    "sweep": {"varied": (dict,), "summary": (dict,)},
}  # fmt: skip
_ADVICE_FIELDS: dict[str, tuple[type, ...]] = {
    "simulated": (dict,), "curves": (dict,), "concurrency": (int,), "theta0": (int, float), "profile": (str,),
    "chance_exclusive": (int, float), "decided_by": (str,), "recommendation": (str,), "lead": (int, float),
    "lead_simulated": (int, float), "lead_interval": (list,), "fit_error": (int, float), "n_cross": (int, type(None)),
    "n_cross_interval": (list,),
}  # fmt: skip


def _check(kind: str, data: dict[str, Any], file: Path) -> None:
    """What the page reads of a file must be there, and of its kind. Raises InputError naming the field."""
    _check_numbers(data, str(file))
    if kind in _RUN_FIELDS:
        for i, run in enumerate(data["runs"]):
            where = f"{file}: runs[{i}]"
            _check_fields(run, _RUN_FIELDS[kind], where)
            check_texts(run, where)
            if kind == "sweep":
                check_figures(run["summary"], where)
            for j, each in enumerate(run.get("evaluations", ())):
                wanted = {"rate": (int, float, str, type(None)), "attainment": (int, float), "stopped": (bool,)}
                _check_fields(each, wanted, f"{where}: evaluations[{j}]")
                if not 0 <= each["attainment"] <= 1:
                    raise InputError(
                        f"{where}: evaluations[{j}]: attainment: expected a share, found {each['attainment']}"
                    )
    if kind == "advise":
        _check_fields(data, _ADVICE_FIELDS, str(file))
        for name, kinds in (("lead_interval", (int, float)), ("n_cross_interval", (int, type(None)))):
            if len(data[name]) != 2 or not all(type(end) in kinds for end in data[name]):
                raise InputError(f"{file}: {name}: expected two numbers, found {str(data[name])[:40]}")
        modes = {"request_throughput": (int, float), "attainment": (int, float, type(None))}
        for mode in ("exclusive", "mixed"):
            _check_fields(data["simulated"].get(mode), modes, f"{file}: simulated.{mode}")
        for name in ("concurrency", "exclusive", "mixed", "theta", "exclusive_over_theta", "mixed_at_concurrency"):
            values = data["curves"].get(name)
            if not isinstance(values, list) or not values or not all(type(v) in (int, float) for v in values):
                raise InputError(f"{file}: curves.{name}: expected an array of numbers, found {str(values)[:40]}")

    if kind == "validate":
        _check_fields(data, {"simulated": (dict,), "measured": (list,), "ok": (bool,), "text": (str,)}, str(file))
        for i, row in enumerate(data["rows"]):
            numbers = dict.fromkeys(("measured", "simulated", "spread", "error", "bar"), (int, float, type(None)))
            _check_fields(row, {"figure": (str,), "met": (bool, type(None)), **numbers}, f"{file}: rows[{i}]")
        for i, summary in enumerate(data["measured"]):
            _check_fields(summary, {}, f"{file}: measured[{i}]")


def _check_numbers(found: Any, where: str) -> None:
    """Raise InputError for a number that float64 does not hold, at any depth; infinity is written as text."""
    if isinstance(found, (dict, list)):
        for key, value in found.items() if isinstance(found, dict) else enumerate(found):
            if isinstance(value, (dict, list, int, float)):
                _check_numbers(value, f"{where}: {key}")
    elif not abs(found) <= sys.float_info.max:
        raise InputError(f"{where}: expected a number, found {str(found)[:40]}")


def _check_fields(found: Any, fields: Mapping[str, tuple[type, ...]], where: str) -> None:
    if not isinstance(found, dict):
        raise InputError(f"{where}: expected an object, found {str(found)[:40]}")
    for name, kinds in fields.items():
        if name not in found or type(found[name]) not in kinds:
            wanted = " or ".join(kind.__name__.replace("NoneType", "null") for kind in kinds)
            raise InputError(f"{where}: {name}: expected {wanted}, found {str(found.get(name))[:40]}")


def _searched(place: Path) -> Path | None:
    """The JSON file of a goodput search, a sweep, an advice or a validation; None where there are runs."""
    if place.is_file():
        return place if place.suffix == ".json" else None
    only_one(place)
    if (place / SUMMARY).is_file() or (place / COMPARE).is_file():
        return None
    return next((place / name for name in (GOODPUT, SWEEP, ADVISE, VALIDATE) if (place / name).is_file()), None)


def _folders(place: Path) -> dict[str, Path]:
    """Directories of runs by label."""
    if place.is_file():
        place = place.parent
    found = {}
    for folder in [place, *sorted(child for child in place.iterdir() if child.is_dir())]:
        if (folder / SUMMARY).is_file():
            found[str(read_json(folder / SUMMARY).get("label"))] = folder
    return found
