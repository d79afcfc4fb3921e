"""Writes down what a served head reads and drafts.

Put this folder on a server's PYTHONPATH and name a folder in JETSPEC_GOLDEN. Once that holds a file
`armed`, the next prefill's captured features and the draft after it go to `seen.safetensors`.
"""

import os
from pathlib import Path

FOLDER = Path(os.environ["JETSPEC_GOLDEN"])
MODEL = "sglang_jetspec.heads.jetspec.JetSpecDraftModel."
LEAST_ROWS = 12  # a prefill writes more, a round commits fewer
seen = {}


def note_features(result, model, features, positions, slots, pool):
    if len(features) >= LEAST_ROWS and (FOLDER / "armed").exists():
        seen.update(features=features.clone(), positions=positions.clone())


def note_draft(result, model, hidden, width, entropies):
    from safetensors.torch import save_file

    if seen:
        tokens, logprobs, _ = result
        save_file(
            {**seen, "tokens": tokens.contiguous(), "logprobs": logprobs.contiguous()},
            FOLDER / "seen.safetensors",
        )
        seen.clear()
        (FOLDER / "armed").unlink()


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(MODEL + "write_context", note_features, HookType.AFTER)
    HookRegistry.register(MODEL + "propose", note_draft, HookType.AFTER)
