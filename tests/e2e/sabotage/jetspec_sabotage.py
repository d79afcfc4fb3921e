"""Negative controls: a plug-in that breaks one step of JETSPEC's round.

Put this folder on a server's PYTHONPATH and name a file in JETSPEC_SABOTAGE; the step that the file
names is broken until it names another, or none.
"""

import functools
import os
from pathlib import Path


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


def while_named(step, broken):
    """A hook that breaks the step only while the file names it."""
    file = Path(os.environ["JETSPEC_SABOTAGE"])

    @functools.wraps(broken)
    def hook(original, *args, **kwargs):
        if file.read_text() == step:
            return broken(original, *args, **kwargs)
        return original(*args, **kwargs)

    return hook


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for step, (path, broken) in TARGETS.items():
        HookRegistry.register(path, while_named(step, broken), HookType.AROUND)
