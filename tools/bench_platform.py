"""Milliseconds of a decode step and of a verify pass on this machine's CPU, without a server.

One process holds SGLang's model runner and times forward pass and greedy choice: the part of a
step that the CPU platform decides. The last line on stdout is one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tyro
from tqdm import tqdm

WARM_UP = 3
# Settings that only mean something together: SGLang's stock CPU path against this platform's.
ARMS = {
    "stock": {"SGLANG_JETSPEC_CPU_OPS": "native", "attention_backend": "torch_native"},
    "jetspec_cpu": {"SGLANG_JETSPEC_CPU_OPS": "fast", "attention_backend": "jetspec_cpu"},
}


@dataclass(frozen=True)
class PlatformBenchConfig:
    """Time one arm; start the command once per arm and dtype."""

    model_path: str
    """Folder or hub id of a dense model."""
    arm: str = "jetspec_cpu"
    """`jetspec_cpu` (this platform), or `stock` (SGLang's plain-torch operators and its
    torch_native attention, which cannot verify)."""
    dtype: str = "bfloat16"
    """Weights' and activations' dtype."""
    batches: tuple[int, ...] = (1, 4, 8)
    """Requests per decode step."""
    verify_batches: tuple[int, ...] = (1, 4)
    """Requests per verify pass."""
    rows: tuple[int, ...] = (8, 16)
    """Tree nodes per request in a verify pass."""
    context: int = 256
    """Tokens of every request before the timed steps."""
    steps: int = 40
    """Timed steps per figure."""

    def __post_init__(self) -> None:
        if self.arm not in ARMS:
            raise ValueError(f"--arm is {self.arm!r}; use one of {sorted(ARMS)}")


def load_runner(model_path: str, dtype: str, attention_backend: str, slots: int) -> Any:
    """SGLang's model runner in this process, with `slots` KV rows. Once per process."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.benchmark import one_batch
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import PortArgs, ServerArgs

    args = ServerArgs(
        model_path=model_path,
        dtype=dtype,
        device="cpu",
        attention_backend=attention_backend,
        max_total_tokens=slots,
        max_running_requests=32,
        skip_tokenizer_init=True,
        log_level="error",
    )
    args.resolve_once()
    ports = PortArgs.init_new(args)
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    one_batch._init_process_global_configs()
    model_config = one_batch.ModelConfig.from_server_args(args)
    one_batch.bootstrap.init_parallel_runtime(
        server_args=args, device="cpu", dist_port=ports.nccl_port
    )
    one_batch.bootstrap.init_layer_runtime(model_config=model_config)
    runner = one_batch.ModelRunner(
        model_config=model_config,
        mem_fraction_static=0.8,
        gpu_id=0,
        nccl_port=ports.nccl_port,
        server_args=args,
    )
    runner.alloc_memory_pool()
    runner.init_attention_backends()
    runner.init_cuda_graphs()
    return runner


def prefill(runner: Any, batch_size: int, context: int) -> tuple[torch.Tensor, Any]:
    """A fresh batch of random prompts: its first new tokens [B] and SGLang's batch."""
    from sglang.benchmark import one_batch

    runner.req_to_token_pool.clear()
    runner.token_to_kv_pool_allocator.clear()
    requests = one_batch.prepare_synthetic_inputs_for_latency_test(batch_size, context)
    for request in requests:
        vocabulary = runner.model_config.vocab_size
        ids = torch.randint(0, vocabulary, (context,)).tolist()
        request.origin_input_ids[:] = type(request.origin_input_ids)("q", ids)
    tokens, _, batch = one_batch.extend(requests, runner)
    return tokens, batch


def verify_forward(
    runner: Any, batch: Any, tokens: torch.Tensor, mask: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Logits [B*n, V] of n rows per request behind a prefilled batch, under a tree mask.

    tokens: [B, n]; mask: [B, n, n] bool, ancestors and self; slots: [B*n] KV slots.
    """
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
    )

    from sglang_jetspec.spec_inputs import JetSpecVerifyInput

    lengths = batch.seq_lens
    positions = (lengths.unsqueeze(1) + mask.sum(-1) - 1).flatten()
    spec_info = JetSpecVerifyInput.from_trees(
        tokens, positions, mask, depth=tokens.shape[1], seq_lens_cpu=lengths, plan=None
    )
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(lengths),
        input_ids=tokens.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=slots,
        positions=positions,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    with torch.no_grad():
        return runner.forward(forward_batch).logits_output.next_token_logits


def time_decode(runner: Any, config: PlatformBenchConfig, batch_size: int) -> dict[str, float]:
    from sglang.benchmark import one_batch

    tokens, batch = prefill(runner, batch_size, config.context)

    def step() -> None:
        nonlocal tokens
        tokens, _ = one_batch.decode(tokens, batch, runner)

    return timed(step, config.steps, f"decode, batch {batch_size}")


def time_verify(runner: Any, config: PlatformBenchConfig, batch: int, n: int) -> dict[str, float]:
    _, prefilled = prefill(runner, batch, config.context)
    slots = runner.token_to_kv_pool_allocator.alloc(batch * n)
    tokens = torch.randint(0, runner.model_config.vocab_size, (batch, n))
    mask = torch.ones(n, n, dtype=torch.bool).tril().expand(batch, n, n).clone()
    mask[:, n // 2 :, 1 : n // 2] = False  # two branches below the root

    def step() -> None:
        verify_forward(runner, prefilled, tokens, mask, slots).argmax(-1)

    return timed(step, config.steps, f"verify, batch {batch}, {n} rows")


def timed(step: Callable[[], None], steps: int, name: str) -> dict[str, float]:
    """Median and least milliseconds of a step."""
    for _ in range(WARM_UP):
        step()
    samples = []
    for _ in tqdm(range(steps), desc=name, leave=False, disable=None):
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e3)
    return {"median_ms": round(statistics.median(samples), 2), "min_ms": round(min(samples), 2)}


def main() -> None:
    config = tyro.cli(PlatformBenchConfig, prog="bench_platform")
    arm = ARMS[config.arm]
    os.environ["SGLANG_JETSPEC_CPU_OPS"] = arm["SGLANG_JETSPEC_CPU_OPS"]
    largest = max(*config.batches, *config.verify_batches)
    slots = largest * (config.context + config.steps + max(config.rows) + 64)
    runner = load_runner(config.model_path, config.dtype, arm["attention_backend"], slots)
    figures = {f"decode_b{b}": time_decode(runner, config, b) for b in config.batches}
    if config.arm != "stock":
        for batch in config.verify_batches:
            for n in config.rows:
                figures[f"verify_b{batch}_n{n}"] = time_verify(runner, config, batch, n)
    setting = {
        "arm": config.arm,
        "model": config.model_path,
        "dtype": config.dtype,
        "context": config.context,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(setting | figures))


if __name__ == "__main__":
    main()
