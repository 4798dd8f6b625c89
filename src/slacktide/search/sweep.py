"""A grid of runs: every combination of varied settings and policies, one record each.

Order of the grid, and of the results: the first axis varies slowest, the policies (with varied parameters of theirs)
fastest. A policy that lacks a varied parameter has one cell where others have one per value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from slacktide.core.spec import PolicySpec, parameters_of
from slacktide.errors import InputError
from slacktide.search.pool import Store, key_of, run_tasks
from slacktide.search.scenario import Scenario, prepare, run_policy
from slacktide.sim.engine import PlanError

MAX_CELLS = 100_000
"""More runs than a day holds, even at a second each: a typing error."""

SUMMARY_KEYS = (
    "attainment", "token_attainment", "request_goodput", "request_throughput", "output_throughput",
    "total_token_throughput", "token_goodput", "mean_ttft_ms", "median_ttft_ms", "p90_ttft_ms", "p99_ttft_ms",
    "mean_itl_ms", "median_itl_ms", "p90_itl_ms", "p99_itl_ms", "max_gap_ms", "mean_tpot_ms", "p99_tpot_ms",
    "mean_e2el_ms", "p99_e2el_ms", "p99_queue_ms", "mean_slowdown", "completed", "failed", "num_steps",
    "num_preemptions", "preemption_tax", "mean_running", "busy_share", "mean_decision_ms", "sim_duration", "wall_time",
)  # fmt: skip
"""Figures of a summary that stand in the flat tables; the records have all of them."""

Kind = Literal["load", "engine", "policy"]


@dataclass(frozen=True, slots=True)
class Axis:
    """One varied setting: a field of `Scenario`, a setting of the engine, or a parameter of policies."""

    name: str
    kind: Kind
    values: tuple[Any, ...]
    policy: str | None = None
    """Only the policy of this name or label; for the kind `policy`."""

    @property
    def title(self) -> str:
        """The name as the user wrote it."""
        return self.name if self.policy is None else f"{self.policy}.{self.name}"

    def applies(self, spec: PolicySpec) -> bool:
        """True when the axis changes runs of this policy."""
        if self.kind != "policy":
            return True
        if self.policy is not None:
            return self.policy in (spec.name, spec.label)
        return self.name in _parameters(spec.cls)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of the grid. `varied`: value by the title of each axis, None where it does not apply."""

    scenario: Scenario
    spec: PolicySpec
    base: str
    """The policy's label without what is varied."""
    varied: dict[str, Any]


def grid(scenario: Scenario, specs: Sequence[PolicySpec], axes: Sequence[Axis]) -> list[Cell]:
    """All cells in order. Raises InputError for an axis that would change nothing, and for a grid that is too large."""
    for axis in axes:
        _check(axis, specs)
    outer = [axis for axis in axes if axis.kind != "policy"]
    inner = [
        (spec, values)
        for spec in specs
        for values in _combinations([axis for axis in axes if axis.kind == "policy" and axis.applies(spec)])
    ]
    total = len(inner)
    for axis in outer:
        total *= len(axis.values)
    if total > MAX_CELLS:
        raise InputError(f"a grid of {total:,} runs: expected at most {MAX_CELLS:,}; vary less")
    titles = [axis.title for axis in axes]
    return [
        _cell(scenario, spec, common + own, titles)
        for common in _combinations(outer)
        for spec, own in inner
    ]  # fmt: skip


@lru_cache(maxsize=256)
def _parameters(policy: type) -> frozenset[str]:
    """Names of a policy's parameters; reading them off its source takes milliseconds, and a grid has many cells."""
    return frozenset(parameter.name for parameter in parameters_of(policy))


def _combinations(axes: Sequence[Axis]) -> list[list[tuple[Axis, Any]]]:
    return [list(zip(axes, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]


def _check(axis: Axis, specs: Sequence[PolicySpec]) -> None:
    for i, value in enumerate(axis.values):
        if value in axis.values[:i]:
            raise InputError(f"--vary {axis.title}: {value} is given twice")
    for spec in specs:
        given = spec.engine if axis.kind == "engine" else spec.parameters if axis.kind == "policy" else {}
        if axis.applies(spec) and axis.name in given:
            raise InputError(
                f"--vary {axis.title}: policy {spec.label} sets {axis.name} itself, so it cannot vary; leave one out"
            )


def _cell(scenario: Scenario, spec: PolicySpec, chosen: list[tuple[Axis, Any]], titles: list[str]) -> Cell:
    varied: dict[str, Any] = dict.fromkeys(titles)
    label = spec.label
    for axis, value in chosen:
        varied[axis.title] = value
        label += f" {axis.name}={_text(value)}"
        if axis.kind == "load":
            scenario = replace(scenario, **{axis.name: value})
        elif axis.kind == "engine":
            scenario = replace(scenario, engine=scenario.engine | {axis.name: value})
        else:
            engine = spec.engine if axis.name in _parameters(spec.cls) else spec.engine | {axis.name: value}
            spec = replace(spec, parameters=spec.parameters | {axis.name: value}, engine=engine)
    return Cell(scenario, replace(spec, label=label), spec.label, varied)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def run_cell(cell: Cell) -> dict[str, Any]:
    """The record of one run, with `varied`, and `error`: what failed, or None. A failed run has an empty summary."""
    try:
        cell.spec.build()  # a value that the policy refuses
        record, _ = run_policy(prepare(cell.scenario, cell.spec.engine), cell.spec)
        error = None
    except (InputError, PlanError) as failure:  # the second is a defect of the policy: its cell fails, not the others
        error = str(failure)
        record = {
            "policy": cell.spec.name, "label": cell.spec.label, "oracle": bool(getattr(cell.spec.cls, "oracle", False)),
            "parameters": cell.spec.all_parameters(), "profile": cell.scenario.profile, "seed": cell.scenario.seed,
            "trace": cell.scenario.trace, "notes": [], "summary": {},
        }  # fmt: skip
    return record | {"policy_label": cell.base, "varied": cell.varied, "error": error}


def run_grid(
    cells: Sequence[Cell], *, jobs: int = 1, store: Store | None = None, on_done: Callable[[int], None] | None = None
) -> list[dict[str, Any]]:
    """Records of all cells, in their order, for any number of `jobs`. What `store` knows is not run again.

    A cell that fails is recorded (`run_cell`), and tried again next time. `on_done` is told how many cells ended.
    """
    known = Store() if store is None else store
    records: dict[int, dict[str, Any]] = {}

    def done(index: int, record: dict[str, Any]) -> Iterator[tuple[int, Cell]]:
        # The record's own words come from the cell: another grid may have named the same run otherwise.
        cell = cells[index]
        records[index] = record | {"label": cell.spec.label, "policy_label": cell.base, "varied": cell.varied}
        if on_done is not None:
            on_done(1)
        yield from ()

    def then(index: int, record: dict[str, Any]) -> Iterator[tuple[int, Cell]]:
        if record["error"] is None:
            known.put(keys[index], record)
        return done(index, record)

    keys = [key_of(cell.scenario, cell.spec, search="sweep") for cell in cells]
    tasks = []
    for index, cell in enumerate(cells):
        stored = known.get(keys[index])
        if stored is None:
            tasks.append((index, cell))
        else:
            list(done(index, stored))
    run_tasks(run_cell, tasks, then, max(1, min(jobs, len(tasks))))
    return [records[index] for index in range(len(cells))]


def flat(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns for CSV and Parquet: label, policy, what is varied, the figures of SUMMARY_KEYS, error."""
    titles = list(records[0]["varied"]) if records else []
    columns: dict[str, list[Any]] = {
        "label": [record["label"] for record in records],
        "policy": [record["policy_label"] for record in records],
    }
    for title in titles:
        name = title if title not in columns and title not in SUMMARY_KEYS else f"varied_{title}"
        columns[name] = [record["varied"][title] for record in records]
    for key in SUMMARY_KEYS:
        columns[key] = [record["summary"].get(key) for record in records]
    columns["error"] = [record["error"] for record in records]
    return columns
