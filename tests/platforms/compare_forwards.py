"""Run by test_forwards.py in a process of its own: one model's forwards, several ways.

Prints one JSON object of largest absolute differences between the logits.
"""

import json
import sys

import torch

from sglang_jetspec.tools.bench_platform import load_runner, prefill, verify_forward

BATCH, CONTEXT, ROWS = 3, 40, 6


def decode(runner, tokens, batch):
    from sglang.benchmark import one_batch

    return one_batch.decode(tokens, batch, runner)[1]


def difference(a, b):
    return float((a - b).abs().max())


def seeded_prefill(runner):
    torch.manual_seed(0)
    return prefill(runner, BATCH, CONTEXT)


def verify_chain(runner, tokens):
    """Logits [B, n, V] of a chain of tokens [B, n] verified in one pass."""
    _, batch = seeded_prefill(runner)
    slots = runner.token_to_kv_pool_allocator.alloc(tokens.numel())
    n = tokens.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril().expand(len(tokens), n, n)
    return verify_forward(runner, batch, tokens, mask, slots).view(*tokens.shape, -1)


def decode_chain(runner, steps):
    """Greedy tokens [B, n] and the logits [B, n, V] that follow each of them."""
    tokens, batch = seeded_prefill(runner)
    chain, logits = [], []
    for _ in range(steps):
        chain.append(tokens.long())
        logits.append(decode(runner, tokens, batch))
        tokens = logits[-1].argmax(-1)
    return torch.stack(chain, 1), torch.stack(logits, 1)


def main(model_path: str) -> None:
    runner = load_runner(model_path, "float32", "jetspec_cpu", slots=2048)
    model, results = runner.model, {}
    body = model.model
    loop = body.__dict__["forward"]
    tokens, decoded = decode_chain(runner, ROWS)
    verified = verify_chain(runner, tokens)
    results["varied"] = len(set(tokens.flatten().tolist()))
    results["verify_against_decode"] = difference(verified, decoded)
    results["same_choices"] = bool(torch.equal(verified.argmax(-1), decoded.argmax(-1)))

    body.layers_to_capture, model.capture_aux_hidden_states = [1, 2], True
    _, batch = seeded_prefill(runner)
    captured = capture(runner, batch, tokens)
    del body.__dict__["forward"]
    results["loop_against_modules"] = difference(verify_chain(runner, tokens), verified)
    _, batch = seeded_prefill(runner)
    stock = capture(runner, batch, tokens)
    results["captured"] = [difference(a, b) for a, b in zip(captured, stock, strict=True)]
    body.forward = loop

    unpack(model)
    results["packed_against_plain"] = difference(verify_chain(runner, tokens), verified)
    print(json.dumps(results))


def capture(runner, batch, tokens):
    """The captured layers' inputs [rows, T * H] of a verify pass, split by layer."""
    seen = {}
    processor = runner.model.logits_processor
    forward = processor.forward

    def record(input_ids, hidden, lm_head, metadata, aux_hidden_states=None, **kwargs):
        seen["aux"] = [state.clone() for state in aux_hidden_states]
        return forward(input_ids, hidden, lm_head, metadata, aux_hidden_states, **kwargs)

    processor.forward = record
    slots = runner.token_to_kv_pool_allocator.alloc(tokens.numel())
    n = tokens.shape[1]
    mask = torch.ones(n, n, dtype=torch.bool).tril().expand(len(tokens), n, n)
    verify_forward(runner, batch, tokens, mask, slots)
    del processor.__dict__["forward"]
    return seen["aux"]


def unpack(model):
    """Run linear layers and norms as SGLang would natively: no packed weight, no plain loop."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    model.model.__dict__.pop("forward")
    for module in model.modules():
        if isinstance(getattr(module, "quant_method", None), UnquantizedLinearMethod):
            module.quant_method = UnquantizedLinearMethod()
        if isinstance(module, (RMSNorm, SiluAndMul, RotaryEmbedding)):
            module._forward_method = module.forward_native


if __name__ == "__main__":
    main(sys.argv[1])
