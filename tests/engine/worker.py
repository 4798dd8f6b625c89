"""One real engine in a fresh process: `python worker.py JOB MODEL DIRECTORY` leaves DIRECTORY/result.json.

A process of its own, because vLLM does not build a second engine in the process of the first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = [[(37 * i + j) % 500 + 3 for j in range(5 + 23 * i)] for i in range(14)]
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def engine(model: str, own: dict[str, Any] | None, directory: Path, **flags: Any) -> Any:
    """A small engine; `own` None is stock vLLM."""
    import vllm

    settings: dict[str, Any] = {}
    if own is not None:
        settings = {
            "scheduler_cls": "slacktide.vllm.SyncScheduler",
            "additional_config": {
                "slacktide": {"state_dir": str(directory / "state"), "max_decision_ms": 10_000} | own
            },
        }
    settings |= {"skip_tokenizer_init": True} | flags
    return vllm.LLM(
        model=model, load_format="dummy", enforce_eager=True, dtype="float32", seed=1, max_num_seqs=8,
        max_model_len=512, max_num_batched_tokens=128, disable_log_stats=True, **settings,
    )  # fmt: skip


def generate(llm: Any, **parameters: Any) -> list[Any]:
    import vllm

    given = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "detokenize": False} | parameters
    return llm.generate([{"prompt_token_ids": p} for p in PROMPTS], vllm.SamplingParams(**given), use_tqdm=False)


def texts(outputs: list[Any]) -> list[list[int]]:
    return [list(one.token_ids) for output in outputs for one in output.outputs]


def host(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.slacktide


def facts(llm: Any) -> dict[str, Any]:
    """What our scheduler counted, flat: `name/label/...` -> value."""
    own = host(llm)
    values = {"/".join([name, *labels]): value for name, labels, value in own.metrics.snapshot()["values"]}
    return {"metrics": values, "samples": own.ledger.belief.num_samples, "mode": own.mode}


def plain(model: str, directory: Path, own: dict[str, Any] | None, **flags: Any) -> dict[str, Any]:
    llm = engine(model, own, directory, **flags)
    found: dict[str, Any] = {"texts": texts(generate(llm)), "long": texts(generate(llm, max_tokens=30))}
    if own is not None:
        found |= facts(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


POLICIES = ("vllm-v1", "sarathi-edf:chunk_size=48", "sliding", "eb-plus", "qoserve", "tide")
"""Whose texts must be stock vLLM's; one that this version has not got is left out."""


def policies(model: str, directory: Path, wanted: tuple[str, ...], **flags: Any) -> dict[str, Any]:
    """One engine, one policy after the other: an engine's start takes longer than all of them."""
    from slacktide.core.policy import names
    from slacktide.vllm.settings import Settings, build_policy, policy_spec

    llm = engine(model, {"policy": "vllm-v1", "slo": "ttft:2000,tbt:200"}, directory, **flags)
    found: dict[str, Any] = {}
    for name in wanted:
        if name.partition(":")[0] not in names():
            continue
        spec = policy_spec(Settings(policy=name), host(llm).scheduler.scheduler_config)
        host(llm).spec, host(llm).policy = spec, build_policy(spec)
        host(llm)._warm_up()  # as at start: compiling is no decision
        found[name] = {"texts": texts(generate(llm)), "long": texts(generate(llm, max_tokens=30))} | facts(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


ALPHABET = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 {}[]:,.-_"\n'
GRAMMARS = {
    "regex": {"regex": "[0-9]{4}-[a-f]{2}"},
    "choice": {"choice": ["yes", "no", "perhaps"]},
    "json": {"json": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99},
                      "b": {"enum": ["x", "y"]}}, "required": ["a", "b"], "additionalProperties": False}},
}  # fmt: skip


def speaking(model: str, directory: Path) -> str:
    """The model with a tokenizer: one token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | {letter: 3 + i for i, letter in enumerate(ALPHABET)}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    path = directory / "speaking"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(path)
    (path / "config.json").write_text((Path(model) / "config.json").read_text())
    return str(path)


def structured(model: str, directory: Path) -> dict[str, Any]:
    """Grammars and free texts side by side, under our policy and then, in the same engine, under vLLM's own."""
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    own = {"policy": "sarathi-edf:chunk_size=16", "slo": "ttft:2000,tbt:200"}
    llm = engine(speaking(model, directory), own, directory, skip_tokenizer_init=False)
    kinds = [*GRAMMARS, ""] * 4
    parameters = [
        vllm.SamplingParams(
            temperature=0.0,
            max_tokens=40,
            structured_outputs=StructuredOutputsParams(**GRAMMARS[kind]) if kind else None,
        )
        for kind in kinds
    ]
    found: dict[str, Any] = {"kinds": kinds}
    for mode in ("active", "stock"):
        host(llm).set_mode(mode)
        outputs = llm.generate([f"prompt {i} " * (1 + i) for i in range(len(kinds))], parameters, use_tqdm=False)
        found[mode] = [output.outputs[0].text for output in outputs]
    found |= facts(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


def features(model: str, directory: Path) -> dict[str, Any]:
    own = {
        "policy": "sarathi-edf:chunk_size=64", "slo": "ttft:1000,tbt:100", "classes": {"gold": "ttft:200,tbt:50"},
        "step_log": str(directory / "steps.jsonl"), "capture": str(directory / "trace.csv"),
        "control_file": str(directory / "mode"),
    }  # fmt: skip
    llm = engine(model, own, directory, enable_prefix_caching=True, scheduling_policy="priority")
    found: dict[str, Any] = {"texts": texts(generate(llm)), "cached": texts(generate(llm))}
    two = generate(llm, n=2, logprobs=3, temperature=1.0)
    found["n"] = [len(output.outputs) for output in two]
    found["logprobs"] = [len(output.outputs[0].logprobs) for output in two]
    generate(llm, extra_args={"slo_ttft_ms": 50, "slo_class": "gold", "tenant": "a"})
    generate(llm, extra_args={"slo_ttft_ms": "soon", "slo_tbt_ms": -3})
    targets = host(llm).mirror.targets
    found |= {"invalid": targets.invalid, "clamped": targets.clamped}
    (directory / "mode").write_text("shadow\n")
    host(llm)._next_control = 0.0
    found["shadow"] = texts(generate(llm))
    found |= facts(llm)
    llm.llm_engine.engine_core.shutdown()
    return found


JOBS: dict[str, Any] = {
    "stock": lambda m, d: plain(m, d, None),
    "policies": lambda m, d: policies(m, d, POLICIES),
    "structured": structured,
    "eb": lambda m, d: plain(m, d, {"policy": "eb:k=3", "step_log": str(d / "steps.jsonl")}),
    "features": features,
    "stock-ngram": lambda m, d: plain(m, d, None, speculative_config=NGRAM),
    "ngram": lambda m, d: policies(m, d, ("sarathi-edf", "sliding:tokens_per_step=0"), speculative_config=NGRAM),
}

if __name__ == "__main__":
    job, model, where = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    (where / "result.json").write_text(json.dumps(JOBS[job](model, where)))
