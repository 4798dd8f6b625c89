"""How many GPUs for this traffic? The goodput of one engine, and what 40 requests per second then take.

1,000 requests and one replay, to be quick. The whole trace has worse bursts, so its goodput is lower: leave out
`num_prompts`, `seeds` and `resolution` before you order hardware.
"""

import math

import slacktide

WANTED = 40.0  # requests per second


def main() -> None:
    for profile in ("rtx-pro-6000/llama-3-8b", "h100/llama-3-8b"):
        found = slacktide.goodput(
            ["vllm-v1", "sliding"], trace="azure-conv", profile=profile, slo="ttft:1000,tbt:50",
            num_prompts=1000, seeds=1, resolution=0.1,
        )  # fmt: skip
        print(f"{profile}\n{found}")
        for label, rate in found.rates.items():
            engines = "1" if rate is None else str(math.ceil(WANTED / rate)) if rate > 0 else "no number of"
            print(f"  {label}: {engines} engines for {WANTED:g} requests/s")


if __name__ == "__main__":
    main()
