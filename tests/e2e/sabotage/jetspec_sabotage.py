"""Negative controls: a plug-in that breaks one step of JETSPEC's round.

Put this folder on a server's PYTHONPATH and name the step in JETSPEC_SABOTAGE.
"""

import os


def causal_mask(original, window_worker, batch, tree, window, plan):
    """Verify with a causal mask where the tree mask belongs."""
    import dataclasses

    causal = tree.ancestors.new_ones(tree.ancestors.shape).tril()
    return original(window_worker, batch, dataclasses.replace(tree, ancestors=causal), window, plan)


def no_move(original, pool, target, source):
    """Leave accepted KV where the verify pass wrote it."""


def no_paths(original, tree, max_depth):
    """Count the committed output alone at every node, as relaxed penalties do."""
    return original(tree, max_depth).fill_(-1)


TARGETS = {
    "causal_mask": ("sglang_jetspec.worker.JetSpecWorker._verify", causal_mask),
    "no_paths": ("sglang_jetspec.verification.path_logits.path_tokens", no_paths),
    "no_move": ("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache", no_move),
}


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path, hook = TARGETS[os.environ["JETSPEC_SABOTAGE"]]
    HookRegistry.register(path, hook, HookType.AROUND)
