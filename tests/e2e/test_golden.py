"""Captured features and drafts of a real server against transformers and the plain-torch head.

Features of the wrong layer, a wrong causality or a missing anchor embedding change no committed
token: nothing but this shows them.
"""

import pytest
import torch
from harness import FIXTURE, GOLDEN, GOLDEN_FOLDER
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from workloads import prompts

from sglang_jetspec.heads.reference import block_ids, load_reference_head


@pytest.mark.parametrize("server", [GOLDEN], indirect=True, ids=lambda s: s.name)
@torch.no_grad()
def test_features_and_first_drafts_are_the_references(server):
    prompt = list(max(prompts(20, seed=91), key=len))
    server.post("/flush_cache", {})
    (GOLDEN_FOLDER / "armed").touch()
    server.generate(prompt, max_new_tokens=8, ignore_eos=True)
    seen = load_file(GOLDEN_FOLDER / "seen.safetensors")

    target = AutoModelForCausalLM.from_pretrained(FIXTURE / "target", dtype=torch.float32)
    head, _ = load_reference_head(FIXTURE / "head")
    ran = target(torch.tensor([prompt]), output_hidden_states=True)
    taps = torch.cat([ran.hidden_states[i + 1] for i in head.config.target_layer_ids], dim=-1)
    assert seen["positions"].tolist() == list(range(len(prompt)))
    assert (seen["features"] - taps[0]).abs().max() < 1e-3

    bonus = ran.logits[:, -1].argmax(-1, keepdim=True)
    rows = GOLDEN.shape[2] + 1
    embedded = target.get_input_embeddings()(block_ids(bonus, rows, head.config.mask_token_id))
    hidden = head(embedded, torch.tensor([[len(prompt)]]), head.fuse(taps))
    logprobs, tokens = target.lm_head(hidden[:, 1:]).log_softmax(-1).topk(GOLDEN.shape[1])
    assert seen["tokens"].tolist() == tokens.tolist()
    assert (seen["logprobs"] - logprobs).abs().max() < 1e-3
