"""Would a flag of stock vLLM do? Token budget and seats over two rates, as a table that a data frame takes as it is."""

import slacktide


def main() -> None:
    grid = slacktide.sweep(
        "vllm-v1", {"rate": [15, 19], "max_num_batched_tokens": [2048, 8192], "max_num_seqs": [256]},
        trace="azure-conv", profile="h100/llama-3-8b", slo="ttft:1000,tbt:50", num_prompts=1000,
    )  # fmt: skip
    print(grid)
    columns = grid.columns()
    best = max(range(len(columns["label"])), key=lambda i: (columns["rate"][i], columns["attainment"][i]))
    print(f"\nbest at the highest rate: --max-num-batched-tokens {columns['max_num_batched_tokens'][best]}")


if __name__ == "__main__":
    main()
