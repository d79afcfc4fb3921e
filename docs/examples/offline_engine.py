"""JETSPEC without a server: SGLang's offline engine.

    python docs/examples/offline_engine.py
    python docs/examples/offline_engine.py --target Qwen/Qwen3-8B --head JetSpec/jetspec-qwen3-8b

Without arguments it runs the demo pair. Prints one JSON object; decoding is greedy.
"""

import json

import sglang as sgl
import tyro

from sglang_jetspec.tools.model_pair import resolve_pair

PROMPTS = ["Mira the fox lived near", "Ones: 7 plus 5 is 12.", "Count 9 numbers from 7:"]


def main(
    target: str | None = None,
    head: str | None = None,
    dtype: str = "auto",
    context_length: int | None = None,
    max_total_tokens: int | None = None,
    max_tokens: int = 48,
) -> None:
    target, head = resolve_pair(target, head)
    engine = sgl.Engine(
        model_path=target,
        speculative_algorithm="JETSPEC",
        speculative_draft_model_path=head,
        dtype=dtype,
        context_length=context_length,
        max_total_tokens=max_total_tokens,
        log_level="error",
    )
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    answers = engine.generate(PROMPTS, sampling)
    streamed = [piece["text"] for piece in engine.generate(PROMPTS[0], sampling, stream=True)]
    engine.shutdown()
    tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    result = {
        "texts": [answer["text"] for answer in answers],
        "streamed": streamed[-1],
        "acceptance_length": round(tokens / rounds, 2),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    tyro.cli(main)
