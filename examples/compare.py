"""Which scheduler serves this trace best on this GPU? Prints a table; writes a figure where matplotlib is there."""

from pathlib import Path

import slacktide


def main() -> None:
    result = slacktide.compare(
        ["vllm-v1", "sarathi:chunk_size=2048", "sliding"],
        trace="azure-conv", profile="h100/llama-3-8b", slo="ttft:1000,tbt:50", rate=19, num_prompts=1000,
    )  # fmt: skip
    print(result)
    best = max(result, key=lambda run: run.summary["attainment"])
    print(f"\nmost users in time: {best.label}")
    try:
        print(f"figure: {result.figure(Path('compare.png'))}")
    except slacktide.InputError as error:
        print(f"no figure: {error}")


if __name__ == "__main__":
    main()
