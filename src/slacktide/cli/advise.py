"""Exclusive or mixed batching for a GPU, a model and a load, and with which settings.

The load is a trace (also a `vllm bench serve --save-detailed` result), or means. A step log of your own engine
replaces the profile's step times: the plug-in's JSONL, or CSV or Parquet (as steps.parquet of a run here) with columns
duration_ms (or duration, step_time in seconds), num_prefill_tokens and num_decodes. With --slo and --max-concurrency
(or --rate) the mode that meets the SLO more often is advised, else the one with more throughput. Where the plug-in's
log says what its policy learned (tide: margins, output lengths, targets seen, tenants' shares), that is shown too.
With --out also advise.json and the figure advise.png.

example:
  slacktide advise --profile rtx-pro-6000/qwen3-8b --mean-prompt 512 --mean-output 256 --max-concurrency 512
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slacktide.cli import options
from slacktide.cli.output import emit, progress
from slacktide.errors import InputError

if TYPE_CHECKING:
    from slacktide.search.advise import Steps

DEFAULT_REQUESTS = 2000
"""Requests of a simulated run: enough for a steady state at a concurrency of some hundreds, within a second."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    from slacktide.cli.scenario import add_scenario

    add_scenario(parser)
    for action in parser._actions:
        if action.dest == "trace":
            action.required = False  # means will do
    group = parser.add_argument_group("what is known of the load and the engine")
    group.add_argument("--mean-prompt", type=options.tokens, metavar="N", help="mean prompt tokens, without a trace")
    group.add_argument("--mean-output", type=options.tokens, metavar="N", help="mean output tokens, without a trace")
    group.add_argument("--step-log", type=Path, metavar="FILE", help="measured steps of your engine (CSV or Parquet)")


def run(args: argparse.Namespace) -> int:
    """Do it. Raises InputError."""
    from slacktide.cli.scenario import scenario_of, writable
    from slacktide.report.learned import last_learned
    from slacktide.search.advise import MODES, STOCK_RUNS, advise

    _fill_load(args)
    learned = None
    if args.step_log is not None and args.step_log.suffix == ".jsonl":
        learned = last_learned(args.step_log)
    steps = None if args.step_log is None else read_steps(args.step_log)
    directory = writable(args)
    with progress(args, len(MODES) + STOCK_RUNS, "simulating") as advance:
        advice = advise(scenario_of(args), steps=steps, on_done=advance)
    advice["command"], advice["learned"] = args.command, learned
    told = []
    if directory is not None:
        from slacktide.report.advise_figure import advise_figure

        try:
            advise_figure(advice, directory / "advise.png")
            told.append(f"wrote {directory} (figure: {directory / 'advise.png'})")
        except InputError as error:
            told.append(f"wrote {directory}, without a figure: {error}")
    emit(args, "advise", advice, lambda: _show(advice, told))
    return 0


def _fill_load(args: argparse.Namespace) -> None:
    """Means become a synthetic trace; a load without a rate comes all at once, as many as the concurrency lets in."""
    means = args.mean_prompt is not None or args.mean_output is not None
    if args.trace is not None and means:
        raise InputError("--trace and --mean-prompt/--mean-output both describe the lengths: leave one out")
    if args.trace is None:
        if args.mean_prompt is None or args.mean_output is None:
            raise InputError("what load? expected --trace, or --mean-prompt and --mean-output")
        prompt, output = (_spread(mean) for mean in (args.mean_prompt, args.mean_output))
        args.trace = f"synthetic:prompt={prompt},output={output}"
    if args.num_prompts is None:
        args.num_prompts = DEFAULT_REQUESTS if means else None
    saturated = args.rate is None and args.arrival == "trace" and args.burstiness is None
    if saturated and (means or args.max_concurrency is not None):
        args.rate = float("inf")


def _spread(mean: float) -> str:
    """A uniform distribution of +-50 % around a mean."""
    return f"uniform:{max(round(mean / 2), 1)}:{max(round(mean * 1.5), 1)}"


def read_steps(path: Path) -> Steps:
    """The steps of a log: CSV with a header, Parquet, or the plug-in's JSONL. Raises InputError naming the place."""
    import numpy as np

    from slacktide.search.advise import Steps

    columns = _columns(path)
    times = [(name, scale) for name, scale in TIME_COLUMNS.items() if name in columns]
    missing = [name for name in ("num_prefill_tokens", "num_decodes") if name not in columns]
    if missing or not times:
        wanted = " or ".join(TIME_COLUMNS) if not times else missing[0]
        raise InputError(f"{path}: no column {wanted}; found {', '.join(columns) or 'none'}")
    if len(times) > 1:
        raise InputError(f"{path}: columns {' and '.join(each for each, _ in times)} both tell a step's time; keep one")
    name, scale = times[0]
    values = {}
    for column in (name, "num_prefill_tokens", "num_decodes"):
        try:
            values[column] = np.asarray(columns[column], dtype=np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputError(f"{path}: column {column}: expected numbers ({error})") from error
        if values[column].ndim != 1:
            raise InputError(f"{path}: column {column}: expected numbers, found lists of them")
    seconds, prompt, decodes = values[name] * scale, values["num_prefill_tokens"], values["num_decodes"]
    good = (seconds > 0) & (seconds < MAX_STEP) & (prompt >= 0) & (decodes >= 0)
    good &= (prompt + decodes > 0) & (prompt + decodes < MAX_TOKENS)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise InputError(
            f"{path}: row {row + 1}: {name}={values[name][row]:g}, num_prefill_tokens={prompt[row]:g}, "
            f"num_decodes={decodes[row]:g}: expected a time above 0 and at least one token; take such rows out"
        )
    if seconds.size < MIN_STEPS:
        raise InputError(f"{path}: {seconds.size} steps: expected at least {MIN_STEPS} for a fit")
    return Steps(prompt, decodes, seconds, f"{seconds.size} steps of {path.name}")


TIME_COLUMNS = {"duration_ms": 1e-3, "step_time_ms": 1e-3, "duration": 1.0, "step_time": 1.0}
"""Columns that may hold a step's time, and their unit in seconds."""
MIN_STEPS = 20
MAX_STEP, MAX_TOKENS = 1e4, 1e9
"""Seconds, and tokens, of a step: beyond, a unit was mistaken (milliseconds for seconds)."""


def _columns(path: Path) -> dict[str, list[Any]]:
    if path.suffix == ".jsonl":
        return _plug_in_columns(path)
    import csv

    try:
        if path.suffix == ".parquet":
            import pyarrow as pa
            import pyarrow.parquet as pq

            try:
                with path.open("rb") as file:
                    return dict(pq.read_table(file).to_pydict())
            except (pa.ArrowException, ValueError) as error:
                raise InputError(f"{path}: not a Parquet file ({error})") from error
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    if not rows:
        raise InputError(f"{path}: empty; expected a header and one step a row")
    header = [name.strip() for name in rows[0]]
    twice = next((name for name in header if header.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{path}: two columns are called {twice!r}; keep one")
    for i, row in enumerate(rows[1:], 1):
        if len(row) != len(header):
            raise InputError(f"{path}: row {i}: {len(row)} values, expected {len(header)} as in the header")
    return {name: [row[i] for row in rows[1:]] for i, name in enumerate(header)}


def _plug_in_columns(path: Path) -> dict[str, list[Any]]:
    """The plug-in's log, in the names of the other logs; steps without tokens cost what they cost and tell nothing."""
    from slacktide.report.steplog import read_step_log

    names = {"duration_s": "duration", "prefill_tokens": "num_prefill_tokens", "num_decodes": "num_decodes"}
    columns: dict[str, list[Any]] = {name: [] for name in names.values()}
    for number, line in enumerate(read_step_log(path), 1):
        missing = [name for name in names if name not in line]
        if missing:
            raise InputError(f"{path}, line {number}: no {missing[0]}; expected a line of the plug-in's step log")
        if line["prefill_tokens"] or line["num_decodes"]:
            for name, column in names.items():
                columns[column].append(line[name])
    return columns


def _show(advice: dict[str, Any], told: list[str]) -> None:
    from slacktide.cli.output import table
    from slacktide.report.learned import learned_text
    from slacktide.report.tables import number, profile_line

    lead, (low, high) = advice["lead"], advice["lead_interval"]
    print(profile_line(advice))
    print(f"advice: {advice['recommendation']} batching (by {advice['decided_by']})")
    print(f"load: {advice['load']['prompt']:.0f} prompt and {advice['load']['output']:.0f} output tokens on average, "
          f"{advice['concurrency']:,} requests in the system, {advice['profile']}")  # fmt: skip
    print(
        f"closed forms: exclusive {100 * lead:+.1f} % (95 % {100 * low:+.1f} to {100 * high:+.1f}; simulated "
        f"{100 * advice['lead_simulated']:+.1f}), chance that it is better {100 * advice['chance_exclusive']:.0f} %"
    )
    first, last = (_crossing(n) for n in advice["n_cross_interval"])
    print(f"exclusive wins {_crossing(advice['n_cross'])} (95 % interval: {first} ... {last})")
    print(
        f"theta {advice['theta0']:.3f}, k {advice['k']}, N {advice['slots']:,} (memory-safe {advice['n_safe']:,}), "
        f"token budget {advice['token_budget']:,}"
    )
    rows = []
    for mode, figures in advice["simulated"].items():
        share = figures["attainment"]
        rows.append([
            mode, number(figures["request_throughput"]), number(figures["total_token_throughput"]),
            number(figures["mean_ttft_ms"]), number(figures["mean_tpot_ms"]), number(figures["p99_itl_ms"]),
            "-" if share is None else f"{100 * share:.1f} %",
        ])  # fmt: skip
    header = ("mode (simulated)", "req/s", "tok/s", "mean TTFT ms", "mean TPOT ms", "p99 ITL ms", "attainment")
    table(header, rows, right=range(1, 7))
    print(f"step costs: lines through {advice['costs_source']}; median error {100 * advice['fit_error']:.1f} %")
    for name in advice["costs_not_measured"]:
        print(f"note: {name} is not told by these steps: taken from the profile (kappa: 0 where the fit is below)")
    print(learned_text(advice["learned"], "the policy of the step log, newest entry"), end="")
    stock = advice["stock_vllm"]
    share = "" if stock["attainment"] is None else f", attainment {100 * stock['attainment']:.1f} %"
    print(f"stock vLLM: {stock['command']}")
    print(f"  predicted {number(stock['request_throughput'])} req/s{share}")
    for note in (*advice["notes"], *told):
        print(f"note: {note}" if note in advice["notes"] else note)


def _crossing(n: int | None) -> str:
    return "never" if n is None else "always" if n == 0 else f"from {n:,} requests on"
