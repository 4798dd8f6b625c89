"""Shadow mode's forecast of attainment: the traffic just served, replayed in the simulator under both schedulers.

Step by step a shadow cannot know where its own schedule would have led. So now and then the requests that have just
been served (times, lengths, targets; no text) go through `slacktide compare`, at step times fitted to the engine's own
steps: once under vLLM's policy, once under ours. What was measured under vLLM stands beside what the replay says of
vLLM: their difference tells how far the replay can be trusted. It starts from an empty engine, and clients that would
have come back sooner do not.

`Window` and `Replays` live in the engine: a thread that writes two files and waits. The work is done by this module as
a program of its own (`python -m slacktide.vllm.replay DIRECTORY`), at the lowest priority.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slacktide.vllm.metrics import Metrics
from slacktide.vllm.steplog import Capture, Served

MAX_REQUESTS = 2000
"""Newest requests of a replay: minutes of a busy server, simulated in seconds."""

MIN_REQUESTS = 50
"""Fewer say nothing: one of them would be 2 %."""

MIN_STEPS = 200
"""Measured steps behind the replay's step times: about as many per scene as their fit has weights, several times."""

TIMEOUT = 600.0
"""Seconds after which a replay is given up: on a machine that is that busy it would only disturb."""

_log = logging.getLogger("vllm.slacktide")


class Window:
    """The newest requests that ended, with their verdicts. Listens to the ledger."""

    def __init__(self, metrics: Metrics, size: int = MAX_REQUESTS) -> None:
        self._metrics = metrics
        self._rows: deque[tuple[Served, bool]] = deque(maxlen=size)
        self._attained: dict[str, float] = {}
        self.complete_from = 0.0
        """Every request that arrived later and has ended is here."""

    def add(self, row: Served) -> None:
        """A request ended and was counted; cheap."""
        name = row.slo_class or "default"
        attained = self._metrics.get("slo_attained", name)
        met = attained > self._attained.get(name, 0.0)
        self._attained[name] = attained
        if len(self._rows) == self._rows.maxlen:
            self.complete_from = max(self.complete_from, self._rows[0][0].arrival)
        self._rows.append((row, met))

    def between(self, start: float, end: float) -> list[tuple[Served, bool]]:
        """Requests that arrived after `start` and the window's own start, before `end`, in order of arrival.

        Those that ended before their first token are left out: nobody knows how long they would have become.
        """
        start = max(start, self.complete_from)
        rows = [row for row in list(self._rows) if start < row[0].arrival < end and row[0].num_output_tokens > 0]
        return sorted(rows, key=lambda row: row[0].arrival)


@dataclass(frozen=True, slots=True)
class Task:
    """What the program needs beside trace and steps: `slacktide compare` with vLLM's policy, then ours."""

    profile: dict[str, Any]
    """Limits of the engine, as a profile file has them; the latency is fitted."""
    policies: tuple[str, str]
    flags: tuple[str, ...]
    hash_block_size: int = 16


def task_of(scheduler: Any, policies: tuple[str, str]) -> Task:
    """The engine's settings for the simulator."""
    config, cache = scheduler.scheduler_config, scheduler.vllm_config.cache_config
    manager = scheduler.kv_cache_manager
    profile = {
        "name": "shadow", "label": "measured", "source": "the engine's own steps",
        "num_gpu_blocks": int(manager.block_pool.num_gpu_blocks), "block_size": int(scheduler.block_size),
        "max_num_batched_tokens": int(scheduler.max_num_scheduled_tokens),
        "max_num_seqs": int(getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs)),
    }  # fmt: skip
    flags = ["--max-model-len", str(scheduler.max_model_len), "--oversized", "drop"]
    flags.append("--enable-prefix-caching" if cache.enable_prefix_caching else "--no-enable-prefix-caching")
    flags += ["--pipeline-depth", "2" if config.async_scheduling else "1"]
    if getattr(config, "watermark", 0.0):
        flags += ["--watermark", str(config.watermark)]
    size = int(scheduler.hash_block_size)
    return Task(profile, policies, (*flags, "--read", f"hash_block_size={size}"), size)


class Replays:
    """Replays the window every `every` seconds while `shadow()` is true. One daemon thread; never raises."""

    def __init__(
        self, metrics: Metrics, window: Window, task: Task, directory: Path, *, every: float,
        shadow: Callable[[], bool], now: Callable[[], float], oldest_live: Callable[[], float],
        steps: Callable[[], Sequence[tuple[Any, float]]],
    ) -> None:  # fmt: skip
        """`directory` is this object's own, and removed at the end; `now`: seconds on the rows' clock; `oldest_live`:
        arrival of the oldest request that has not ended, infinity without one; `steps`: measured (shape, seconds)."""
        self._metrics, self._window, self._task, self._directory = metrics, window, task, directory
        self._every, self._shadow, self._now, self._oldest_live, self._steps = every, shadow, now, oldest_live, steps
        self._since = 0.0 if shadow() else np.inf
        self._stop = threading.Event()
        self._child: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._loop, name="slacktide-replay", daemon=True)
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop.wait(self._every):
            if not self._shadow():
                self._since = np.inf
                continue
            if np.isinf(self._since):
                self._since = self._now()  # what ran before was not vLLM's schedule
                continue
            try:
                self._count(self.once())
            except Exception:
                if not self._stop.is_set():
                    self._count("failed")
                    _log.exception("slacktide: the replay of shadow mode failed")

    def _count(self, result: str) -> None:
        self._metrics.add("shadow_replays", result)

    def once(self) -> str:
        """One replay: `done`, or `skipped` when there is too little to replay. Raises whatever goes wrong."""
        rows = self._window.between(self._since, self._oldest_live())
        steps = list(self._steps())
        if len(rows) < MIN_REQUESTS or len(steps) < MIN_STEPS:
            return "skipped"
        self._directory.mkdir(parents=True, exist_ok=True)
        trace = Capture(None, str(self._directory / "trace.csv"), self._task.hash_block_size)
        for row, _ in rows:
            trace.add(row)
        trace.flush()
        np.savez(self._directory / "steps.npz", shapes=np.array([s for s, _ in steps]), times=[t for _, t in steps])
        (self._directory / "task.json").write_text(json.dumps(asdict(self._task)), encoding="utf-8")
        stock, ours = self._run()
        measured = sum(met for _, met in rows) / len(rows)
        for schedule, value in (("measured", measured), ("stock", stock), ("ours", ours)):
            self._metrics.set("shadow_attainment", value, schedule)
        self._metrics.set("shadow_replay_requests", len(rows))
        _log.info(
            "slacktide: shadow: %.1f %% of %d requests met their targets; replayed in the simulator: %.1f %% under "
            "vLLM's schedule, %.1f %% under ours", 100 * measured, len(rows), 100 * stock, 100 * ours,
        )  # fmt: skip
        return "done"

    def _run(self) -> tuple[float, float]:
        """The program's answer: attainment under vLLM's policy and under ours."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-m", "slacktide.vllm.replay", str(self._directory)]
        self._child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, err = self._child.communicate(timeout=TIMEOUT)
        finally:
            self._child.kill()
        if self._child.returncode:
            raise RuntimeError(err.strip()[-500:])
        stock, ours = json.loads(out)
        return float(stock), float(ours)

    def close(self) -> None:
        """The engine ends: stop the program, remove its files."""
        self._stop.set()
        child = self._child
        if child is not None:
            child.kill()
        self._thread.join(timeout=5.0)
        shutil.rmtree(self._directory, ignore_errors=True)


def main(directory: Path) -> list[float]:
    """Fit the steps, simulate both policies; their attainments. Raises CalledProcessError with what went wrong."""
    from slacktide.core.latency_families import SCENES, WEIGHTS, SevenFeatureModel

    task = json.loads((directory / "task.json").read_text(encoding="utf-8"))
    steps = np.load(directory / "steps.npz")
    model = SevenFeatureModel.fit(steps["shapes"], steps["times"], relative=True)
    latency: dict[str, Any] = {"family": "seven-feature", "floor_ms": model.floor * 1e3}
    for scene, weights in zip(SCENES, model.weights, strict=True):
        latency[scene] = {name: float(w) * 1e3 for name, w in zip(WEIGHTS, weights, strict=True)}
    profile = directory / "profile.json"
    profile.write_text(json.dumps(task["profile"] | {"latency": latency}), encoding="utf-8")
    command = [sys.executable, "-m", "slacktide", "compare", "--trace", str(directory / "trace.csv")]
    command += ["--profile", str(profile), "--json", "--quiet", *task["flags"]]
    found = []
    for policy in task["policies"]:  # one at a time: the same one may be asked for twice
        run = subprocess.run([*command, "--policy", policy], capture_output=True, text=True, check=False)
        if run.returncode:
            raise RuntimeError(f"{policy}: {run.stderr.strip()}")
        found.append(float(json.loads(run.stdout)["runs"][0]["summary"]["attainment"]))
    return found


if __name__ == "__main__":
    with contextlib.suppress(OSError):
        os.nice(19)
    try:
        print(json.dumps(main(Path(sys.argv[1]))))
    except Exception as failure:
        sys.exit(f"{type(failure).__name__}: {failure}")
