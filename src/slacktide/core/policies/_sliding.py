"""Whom SlidingServe serves first, and whom not any more: orders of prompts, ageing, relegation, eviction."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from slacktide.core.bounded import Step
from slacktide.core.constructor import can_hold
from slacktide.core.kinds import IDLE
from slacktide.core.loading import kernels
from slacktide.core.priority import HOPELESS, classes, edf_feasible, hybrid_key, paper_order
from slacktide.core.types import RUNNING, FloatArray, IntArray, Plan

Order = Literal["mlps", "paper", "edf", "srpf", "hybrid", "fcfs"]

_NO_ROWS: IntArray = np.empty(0, dtype=np.int64)
_LOW, _HIGH = 0.001, 0.008
"""QoServe's alpha, seconds a token: while prompts by deadline would all be on time (paper), and beyond (its code)."""


class Look(NamedTuple):
    """What the rows ask of a step."""

    bounds: FloatArray
    """Seconds from now within which this step and the next ones must end."""
    late: int
    """Decodes that are late."""
    order: IntArray
    """Prompts in service order."""
    hopeless: IntArray
    """Those of them that are hopeless or relegated."""
    rho: float
    """Pace of prefills, tokens per second."""
    aged: int
    """The prompt that is overdue for too long, or -1."""
    least: float
    """Seconds of the shortest step."""


def service_order(
    step: Step, order: Order, rho: float, least: float, alpha: float, beta: float, *, relegation: bool
) -> tuple[IntArray, IntArray]:
    """(prompts in service order, those of them that are hopeless or relegated).

    `rho`: tokens of prompt per second. `least`: seconds of the shortest step. `alpha`, `beta`: urgencies from which a
    prompt is urgent, hopeless. With `relegation`, orders other than MLPS serve hopeless prompts last too.
    """
    live, found, rows = step.view.live, step.survey, step.prefills
    if order == "mlps":
        ordered, hopeless = kernels("orders").mlps(
            live.columns[0], rows, found.slack, found.remaining, rho, float(alpha), float(beta), least
        )
        return ordered, hopeless
    slack, remaining = found.slack[rows], found.remaining[rows]
    protected = (live.priority[rows] < 0) | (live.num_output_tokens[rows] > 0)
    if order == "paper":
        return rows[paper_order(remaining, slack, rho, protected, alpha)], _NO_ROWS
    relegated = live.relegated[rows] != 0
    kinds = classes(remaining, slack, rho, protected, relegated, alpha=alpha, beta=beta, least=least)
    lost = kinds >= HOPELESS
    if order == "edf":
        key = slack
    elif order == "srpf":
        key = remaining.astype(np.float64)
    elif order == "fcfs":
        key = np.zeros(rows.size)
    else:
        low = edf_feasible(slack, remaining, rho)
        key = hybrid_key(np.minimum(slack, 1e9), remaining, _LOW if low else _HIGH)
    if relegation:
        key = np.where(relegated | lost, np.inf, key)
    return rows[np.argsort(key, kind="stable")], rows[lost]


def overdue(step: Step, ageing: float) -> int:
    """The oldest prompt, if its first token is overdue by more than `ageing` seconds; -1 without one."""
    live, row = step.view.live, int(step.prefills[0])
    target = float(live.slo_ttft[row])
    late = step.view.start - float(live.arrival_time[row]) - (target if target < np.inf else 0.0)
    return row if late > ageing else -1


def with_aged(step: Step, order: IntArray, aged: int, tokens: int) -> tuple[IntArray, IntArray | None]:
    """The order with the aged prompt in front, held to `tokens`; caps int64[n] for the packer, None without need."""
    if aged < 0 or int(order[0]) == aged:
        return order, None
    caps = np.full(step.view.live.index.size, 1 << 40, dtype=np.int64)
    caps[aged] = tokens
    return np.concatenate(([aged], order[order != aged])), caps


def newly_relegated(step: Step, hopeless: IntArray) -> IntArray:
    """Hopeless prompts that wait and were not relegated before."""
    live = step.view.live
    rows: IntArray = hopeless[(live.status[hopeless] != RUNNING) & (live.relegated[hopeless] == 0)]
    return rows


def eviction_victim(step: Step, order: IntArray, hopeless: IntArray) -> int:
    """A running request that has missed, was never evicted, holds most blocks; -1 if blocks are not the need."""
    live, found = step.view.live, step.survey
    wanted = order[~np.isin(order, hopeless)]
    wanted = wanted[(live.status[wanted] != RUNNING) & (found.slack[wanted] > 0)]
    if not wanted.size or bool(can_hold(step, wanted).all()):
        return -1
    missed = found.slack < 0
    missed[hopeless] = True
    holders = np.flatnonzero((live.status == RUNNING) & missed & (live.num_preemptions == 0) & (found.kind != IDLE))
    return int(holders[np.argmax(live.num_blocks[holders])]) if holders.size else -1


def evicting(step: Step, victim: int, why: dict[str, Any]) -> Plan:
    """The other running requests go on; nobody is admitted in a step that evicts."""
    plan = step.packed(_NO_ROWS)
    keep = plan.rows != victim
    preempted = np.unique(np.append(plan.preempted, victim))
    return Plan(plan.rows[keep], plan.num_scheduled_tokens[keep], preempted, why=why)
