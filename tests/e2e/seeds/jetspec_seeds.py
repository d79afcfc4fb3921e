"""Lets a server without speculation draw by seeds on a CPU.

SGLang does so under --enable-deterministic-inference only, which needs a GPU's attention backend
and a hash kernel that its PyPI wheel has for GPUs. Here its own sampler gets the seeds as that flag
would hand them over, and the hash in numpy. TORCHDYNAMO_DISABLE=1: the sampler is compiled.
"""

import numpy as np
import torch


def rotate(word, bits):
    return (word << np.uint32(bits)) | (word >> np.uint32(32 - bits))


def murmur3(words):
    """MurmurHash3_x86_32 with seed 0 over uint32 words of equal shape."""
    state = np.zeros_like(words[0])
    for word in words:
        word = rotate(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        state = rotate(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state ^= np.uint32(4 * len(words))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ (state >> np.uint32(shift))) * np.uint32(factor)
    return state ^ (state >> np.uint32(16))


def hash_on_cpu(seed, positions, col_indices):
    seed = seed.view(torch.int64).numpy().view(np.uint64)[:, None]
    position, column = positions.numpy()[:, None], col_indices.numpy()[None]
    words = (seed.astype(np.uint32), (seed >> np.uint64(32)).astype(np.uint32), position, column)
    hashed = murmur3([word.astype(np.uint32) for word in np.broadcast_arrays(*words)])
    return torch.from_numpy(hashed.astype(np.int64))


def hand_over_seeds(info, cls, batch, vocab_size):
    """After SamplingBatchInfo.from_schedule_batch; 42 is SGLang's seed of requests without one."""
    seeds = [req.sampling_params.sampling_seed for req in batch.reqs]
    info.sampling_seed = torch.tensor([42 if seed is None else seed for seed in seeds])
    return info


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        hand_over_seeds,
        HookType.AFTER,
    )
    HookRegistry.register("sglang.srt.layers.sampler.murmur_hash32", hash_on_cpu, HookType.REPLACE)
