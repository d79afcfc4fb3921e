"""A batch's sampling settings, as SGLang keeps them, for the draws of `verification`.

B requests, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_jetspec.request_state import sent
from sglang_jetspec.verification import Sampling
from sglang_jetspec.verification.sampling import draw_mixed
from sglang_jetspec.verification.seeds import Seeds

# Where a prefill's seeds travel on SGLang's SamplingBatchInfo, whose own field for them its
# samplers either refuse or hash with a kernel that the PyPI wheel lacks on the CPU.
_SEEDS = "jetspec_seeds"


def batch_seeds(batch: Any, positions: Tensor) -> Seeds | None:
    """The batch's seeds, None where no request has one. positions: [B], of the last tokens."""
    values = [req.sampling_params.sampling_seed for req in batch.reqs]
    if all(value is None for value in values):
        return None
    device = positions.device
    given = sent([value is not None for value in values], device)
    return Seeds(sent([value or 0 for value in values], device), given, positions)


def batch_sampling(info: Any, seeds: Seeds | None) -> Sampling:
    """The settings of a batch's requests. info: SGLang's SamplingBatchInfo."""
    return Sampling(
        temperatures=info.temperatures.view(-1),
        top_ks=info.top_ks,
        top_ps=info.top_ps,
        min_ps=info.min_ps if info.need_min_p_sampling else None,
        # SGLang stores temperature 0 as top_k 1.
        greedy=info.top_ks == 1,
        all_greedy=info.is_all_greedy,
        seeds=seeds,
    )


def seed_prefill(batch: Any) -> None:
    """Let the token that a prefill samples follow its request's seed, too."""
    setattr(batch.sampling_info, _SEEDS, batch_seeds(batch, batch.seq_lens - 1))


def sample_prefill(
    original: Callable[..., Any], sampler: Any, probs: Tensor, info: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Any]:
    """Hook around SGLang's draw from [B, V] probabilities: seeded rows are drawn by their seeds."""
    seeds = getattr(info, _SEEDS, None)
    if seeds is None:
        return original(sampler, probs, info, *args, **kwargs)
    weights = probs.clone()
    tokens, mask = original(sampler, probs, info, *args, **kwargs)
    return draw_mixed(weights, batch_sampling(info, seeds), lambda: tokens), mask
