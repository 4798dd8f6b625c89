"""The traces that come with Slacktide: names, sources, licences. Files and README.md in `slacktide/data/traces`.

All are changed forms of their sources (columns renamed, rows cut or drawn as described); none holds text or token ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class PackagedTrace:
    """One packaged trace. `timed` False: a table of lengths, to be combined with an arrival process."""

    name: str
    file: str
    source_file: str
    """Name of the file that scripts/build_traces.py takes."""
    rows: int
    timed: bool
    licence: str
    source: str
    attribution: str
    description: str

    def read_bytes(self) -> bytes:
        """The Parquet file. Raises InputError when the installation lacks it."""
        from slacktide.errors import InputError

        try:
            return resources.files("slacktide.data.traces").joinpath(self.file).read_bytes()
        except (OSError, ModuleNotFoundError) as error:
            raise InputError(f"packaged trace {self.name}: file {self.file} is missing; reinstall slacktide") from error


_AZURE = ("CC-BY-4.0", "https://github.com/Azure/AzurePublicDataset (b469a11)",
          "Azure LLM inference trace 2023, (c) Microsoft, CC-BY-4.0; Patel et al., Splitwise, ISCA 2024")  # fmt: skip
_ETALON = ("Apache-2.0", "https://github.com/project-etalon/etalon (d5f18de)", "project-etalon authors")
_SERVEGEN = ("Apache-2.0", "https://github.com/alibaba/ServeGen (f891d11)",
             "drawn from the published per-client distributions of Xiang et al., ServeGen, 2025")  # fmt: skip
_LSS = ("MIT", "https://github.com/casys-kaist/LLMServingSim (5daddb2)", "(c) 2024 CASYS Lab at KAIST")

PACKAGED: tuple[PackagedTrace, ...] = (
    PackagedTrace("azure-conv", "azure-conv.parquet", "azure_2023_conv.parquet", 16495, True, *_AZURE,
                  "conversation service, first 80 % of the time span; 5.9 requests/s, CV of gaps 1.07"),
    PackagedTrace("azure-code", "azure-code.parquet", "azure_2023_code.parquet", 8068, True, *_AZURE,
                  "code completion service, first 80 % of the time span; 3.0 requests/s in trains (CV of gaps 12.6)"),
    PackagedTrace("mooncake-conversation", "mooncake-conversation.parquet", "mooncake_conversation.parquet", 9408, True,
                  "Apache-2.0", "https://github.com/kvcache-ai/Mooncake (3b5a594)", "Qin et al., Mooncake, FAST 2025",
                  "conversation trace with ids of 512-token prefix blocks, first 80 % of the time span; 3 s ticks"),
    PackagedTrace("sharegpt", "sharegpt.parquet", "sharegpt_8k_llama2_lengths.parquet", 30731, False, *_ETALON,
                  "lengths of ShareGPT turns with their history, Llama-2 tokenizer, at most 8k tokens"),
    PackagedTrace("arxiv", "arxiv.parquet", "arxiv_summarization_llama2_lengths.parquet", 28257, False,
                  "Apache-2.0 and MIT", "https://github.com/project-etalon/etalon (d5f18de), https://github.com/microsoft/vidur",
                  "project-etalon authors; (c) Microsoft Corporation",
                  "lengths of arXiv summarisation, Llama-2 tokenizer, at most 4k tokens"),
    PackagedTrace("bwb", "bwb.parquet", "bwb_llama2_lengths.parquet", 33768, False, *_ETALON,
                  "lengths of bilingual web book translation: more output than prompt"),
    PackagedTrace("servegen-m-large", "servegen-m-large.parquet", "servegen_m_large_1h.parquet", 64670, True,
                  *_SERVEGEN,
                  "large general model, one hour, 20 of the published clients (tenant = client); 18.0 requests/s"),
    PackagedTrace("servegen-deepseek-r1", "servegen-deepseek-r1.parquet", "servegen_deepseek_r1_1h.parquet", 39461,
                  True, *_SERVEGEN,
                  "reasoning model, one hour, all 27 active clients (tenant = client); 11.0 requests/s"),
    PackagedTrace("lss-sharegpt-llama31-300", "lss-sharegpt-llama31-300.parquet", "lss_sharegpt_llama31_300.parquet",
                  300, True, *_LSS,
                  "300 ShareGPT requests at 10 sessions/s, Llama-3.1 tokenizer: load of measured vLLM runs"),
    PackagedTrace("lss-sharegpt-qwen3-300", "lss-sharegpt-qwen3-300.parquet", "lss_sharegpt_qwen3_300.parquet", 300,
                  True, *_LSS, "300 ShareGPT requests at 10 sessions/s, Qwen3 tokenizer: load of measured vLLM runs"),
)  # fmt: skip


def list_traces() -> tuple[PackagedTrace, ...]:
    """Every packaged trace with its source, licence and description."""
    return PACKAGED


def find_packaged(name: str) -> PackagedTrace | None:
    """The packaged trace of that exact name, or None."""
    return next((trace for trace in PACKAGED if trace.name == name), None)
