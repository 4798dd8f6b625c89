"""A trace from a log of one's own: rows into a CSV of three columns and more, then two SLO classes over it."""

import csv
import random
from pathlib import Path

import slacktide


def write(path: Path) -> None:
    """Two kinds of traffic: short chats all the time, long batch jobs in a burst."""
    random.seed(7)
    rows = [(random.uniform(0, 60), random.randint(20, 800), random.randint(20, 300), "chat") for _ in range(200)]
    rows += [(random.uniform(20, 25), random.randint(2000, 6000), 100, "batch") for _ in range(20)]
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["arrival_s", "prompt_tokens", "output_tokens", "slo_class"])
        writer.writerows(sorted(rows))


def main() -> None:
    path = Path("mine.csv")
    write(path)
    targets = "chat=ttft:500,tbt:50;batch=e2el:120000"
    for run in slacktide.compare(["vllm-v1", "sliding"], trace=path, profile="rtx-4090/llama-3-8b", slo=targets):
        shares = {name: figures["attainment"] for name, figures in run.summary["classes"].items()}
        print(run.label, {name: f"{100 * share:.1f} %" for name, share in shares.items()})


if __name__ == "__main__":
    main()
