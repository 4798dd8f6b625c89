"""What is measured: pieces of work that finish in under a minute, each one line of a results file."""

from __future__ import annotations

import hashlib
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cells import HERE, PROFILES, TEST, TUNING, Cell, Task, settings, task
from policies import variants, version

from slacktide.core.pack import as_policy
from slacktide.core.spec import PolicySpec, parse_policies
from slacktide.metrics.log import RunLog
from slacktide.metrics.slo import judge
from slacktide.search.evaluate import certainly_missed
from slacktide.search.scenario import Scenario, Setup, build_policy, prepare
from slacktide.sim.engine import PlanError, simulate

TARGET = 0.99
RATIO = 1.02
"""Rates searched are powers of this: an answer does not depend on where its search began."""
FIRST_STEP, HINTED_STEP = 16, 3
"""Steps of a search's first leap: 37 % from a guess, 6 % from another seed's or variant's answer."""
LOWEST = 2.0**-6
"""Share of the one-by-one rate below which a policy's goodput counts as 0."""
OVERLOADS = (1.5, 2.0)
THROUGHPUT_LOADS = ((512, 256), (1024, 128), (128, 1024))
THROUGHPUT_PROFILES = ("rtx-pro-6000", "h100-1.0", "h100-1.3", "rtx-4090")
THROUGHPUT_REQUESTS = 800
ENGINE = ("max_num_batched_tokens", "max_num_seqs")


@dataclass(frozen=True)
class Piece:
    """One piece: its kind, cell and family, and what earlier pieces found (`given`)."""

    kind: str
    cell: Cell
    family: str
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def grid(self) -> tuple[str, ...]:
        """The settings that are tried."""
        return variants(self.family, self.cell.mode) if self.family != "bound" else ()

    @property
    def key(self) -> str:
        """Names the piece and digests what decides its figures: settings, grid, and the challenger's source."""
        return self.key_with(self.grid)

    def key_with(self, grid: tuple[str, ...]) -> str:
        """The key that it had with another grid."""
        # Where a search begins, and what an earlier one found, do not decide its answer.
        given = [item for item in self.given if item[0] not in ("start", "earlier")]
        decides = [*settings(self.cell), *grid, version(self.family), repr(given), f"{TARGET}"]
        digest = hashlib.sha256("\n".join(decides).encode()).hexdigest()[:10]
        return f"{self.kind}|{self.cell.name}|{self.family}|{digest}"


def run(piece: Piece) -> dict[str, Any]:
    """Measure a piece; its row without the key."""
    work: dict[str, Callable[[Piece], dict[str, Any]]] = {
        "goodput": goodput, "biased": biased, "overload": overload, "throughput": throughput, "bound": bound,
    }  # fmt: skip
    cell = piece.cell
    row = {"kind": piece.kind, "cell": cell.name, "profile": cell.profile, "load": cell.load, "form": cell.form,
           "family": piece.family, "version": version(piece.family), "commit": commit()}  # fmt: skip
    return row | work[piece.kind](piece)


@lru_cache(maxsize=1)
def commit() -> str:
    """The commit that the code stands on."""
    done = subprocess.run(
        ["git", "-C", HERE, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


# ---- goodput ---------------------------------------------------------------------------------------------------------


def rate_of(step: int) -> float:
    """The rate of a step of the search's grid."""
    return float(RATIO**step)


def step_of(rate: float) -> int:
    """The highest step whose rate is at most `rate`."""
    return math.floor(math.log(rate) / math.log(RATIO) + 1e-9)


def highest(meets: Callable[[int], bool], start: int, leap: int, lowest: int) -> int | None:
    """The highest step that meets the target, by leaps that double and then bisection; None below `lowest`.

    Attainment is taken to fall with the rate, as everywhere in goodput searches.
    """
    if meets(start):
        low, high = start, start + leap
        while meets(high):
            leap *= 2
            low, high = high, high + leap
    else:
        low, high = start - leap, start
        while not meets(low):
            if low <= lowest:
                return None
            leap *= 2
            low, high = max(low - leap, lowest), low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if meets(middle) else (low, middle)
    return low


@dataclass
class Search:
    """The search of one variant on one seed."""

    task: Task
    text: str
    mode: str
    runs: int = 0

    def meets(self, step: int) -> bool:
        """Whether the target is met at a step's rate."""
        self.runs += 1
        return attainment(self.task, self.text, rate_of(step), self.mode, stop=True) >= TARGET

    def find(self, start: int, leap: int) -> int | None:
        """The highest step from there."""
        return highest(self.meets, start, leap, step_of(self.task.one_by_one * LOWEST))


def attainment(of: Task, text: str, rate: float, mode: str, *, stop: bool) -> float:
    """Share of the requests in time at `rate`; an upper bound below the target when `stop` ended the run early.

    0 where the policy does not get on at all (thrashes for ever): the benchmark goes on, and says so in its log.
    """
    spec = spec_of(text)
    setup, n, best = of.setup, len(of.workload), 1.0

    def hopeless(log: RunLog) -> bool:
        nonlocal best
        best = (n - int(certainly_missed(log, mode).sum())) / n
        return best < TARGET

    load = of.workload.with_arrivals(of.workload.arrival_time / rate)
    try:
        found = simulate(
            load, build_policy(spec, {}), setup.profile.latency, config_of(setup, spec), belief=setup.belief,
            stop=hopeless if stop else None,
        )  # fmt: skip
    except PlanError as error:
        print(f"{text} at {rate:g} requests/s: {error}", flush=True)
        return 0.0
    return best if found.stopped else float(judge(found.log, mode).attainment() or 0.0)


@lru_cache(maxsize=64)
def spec_of(text: str) -> PolicySpec:
    """A variant's text, engine settings told from parameters."""
    (spec,) = parse_policies([text], dict.fromkeys(ENGINE, int))
    return spec


def config_of(setup: Setup, spec: PolicySpec) -> Any:
    """The engine with the settings that the variant overrides."""
    return replace(setup.config, **{k: v for k, v in spec.engine.items() if k in ENGINE})


def goodput(piece: Piece) -> dict[str, Any]:
    """Tune on the tuning seed, judge on the others.

    Tuning: the first variant is searched; each other one must meet the target one step above the best so far, and is
    searched on from there. Its answer is the best variant of the grid, in about one run for each that is not. A grid
    that has grown at its end is gone on with: the variants come in order, so the answer is that of the whole.
    """
    cell, texts = piece.cell, piece.grid
    best, found, runs = texts[0], None, 0
    given = dict(piece.given)
    start, earlier = given.get("start"), given.get("earlier")
    if earlier is not None and earlier["tuned_rate"]:
        best, found = earlier["variant"], round(math.log(earlier["tuned_rate"]) / math.log(RATIO))
        texts = texts[earlier["grid"] :]
    if len(piece.grid) > 1:
        of = task(cell, TUNING)
        first = start if start is not None else step_of(4 * of.one_by_one)
        for text in texts:
            search = Search(of, text, cell.mode)
            if found is None:
                step = search.find(first, FIRST_STEP)
                best, found = (text, step) if step is not None else (best, None)
            elif search.meets(found + 1):
                best, found = text, search.find(found + 1, HINTED_STEP)
            runs += search.runs
        if found is None:
            return {"variant": best, "tuned_rate": 0.0, "rates": [0.0] * len(TEST), "runs": runs,
                    "grid": len(piece.grid)}  # fmt: skip
        if earlier is not None and best == earlier["variant"]:
            return {"variant": best, "tuned_rate": earlier["tuned_rate"], "rates": earlier["rates"],
                    "runs": earlier["runs"] + runs, "grid": len(piece.grid)}  # fmt: skip
    rates, more = judged(cell, best, found if found is not None else start)
    return {"variant": best, "tuned_rate": None if found is None else round(rate_of(found), 4), "rates": rates,
            "runs": runs + more, "grid": len(piece.grid)}  # fmt: skip


def judged(cell: Cell, text: str, hint: int | None, seeds: tuple[int, ...] = TEST) -> tuple[list[float], int]:
    """Goodput of a variant on each test seed (each starts at the answer before it), and the runs that took."""
    rates, runs = [], 0
    for seed in seeds:
        of = task(cell, seed)
        search = Search(of, text, cell.mode)
        start, leap = (hint, HINTED_STEP) if hint is not None else (step_of(4 * of.one_by_one), FIRST_STEP)
        step = search.find(start, leap)
        rates.append(0.0 if step is None else round(rate_of(step), 4))
        hint, runs = step if step is not None else hint, runs + search.runs
    return rates, runs


def biased(piece: Piece) -> dict[str, Any]:
    """Goodput on the first test seed with a belief that is off; no tuning: nobody knows that it is."""
    text = variants(piece.family, piece.cell.mode)[0]
    rates, runs = judged(piece.cell, text, dict(piece.given).get("start"), TEST[:1])
    return {"variant": text, "rates": rates, "runs": runs}


# ---- overload, throughput, bound -------------------------------------------------------------------------------------


def overload(piece: Piece) -> dict[str, Any]:
    """Attainment on the first test seed at 1.5 and 2 times the goodput of the cell's best baseline there."""
    given = dict(piece.given)
    of = task(piece.cell, TEST[0])
    shares = [attainment(of, given["variant"], f * given["rate"], piece.cell.mode, stop=False) for f in OVERLOADS]
    return {"variant": given["variant"], "rate": given["rate"], "attainment": [round(x, 5) for x in shares]}


def throughput(piece: Piece) -> dict[str, Any]:
    """Requests per second with all of them there at once and no SLO; the best variant of the family."""
    profile, factor = PROFILES[piece.cell.profile]
    prompt, output = (int(x) for x in piece.cell.load.split("/"))
    lengths = ",".join(f"{w}=uniform:{n // 2}:{3 * n // 2}" for w, n in (("prompt", prompt), ("output", output)))
    setup = prepare(Scenario(trace=f"synthetic:{lengths}", profile=profile, interference=factor, rate=math.inf,
                             num_prompts=THROUGHPUT_REQUESTS, seed=TEST[0]))  # fmt: skip
    found = {}
    for text in variants(piece.family):
        spec = spec_of(text)
        log = simulate(setup.workload, as_policy(spec.build()) if not spec.engine else build_policy(spec, {}),
                       setup.profile.latency, config_of(setup, spec), belief=setup.belief).log  # fmt: skip
        found[text] = round(log.n / log.sim_duration, 4)
    best = max(found, key=lambda text: found[text])
    return {"variant": best, "rate": found[best], "all": found}


def bound(piece: Piece) -> dict[str, Any]:
    """What no policy can pass on the test seeds, and what none can sustain."""
    from slacktide.search.bounds import capacity_bound

    rows = [capacity_bound(of.workload, of.setup, mode=piece.cell.mode, target=TARGET)
            for of in (task(piece.cell, seed) for seed in TEST)]  # fmt: skip
    return {
        name: [None if row[name] is None else round(row[name], 4) for row in rows] for name in ("bound", "sustained")
    }
