"""Fixes the order in which the server without speculation applies several penalties.

Under the synchronous schedule SGLang applies them in the order of a Python set of classes, which
differs from one process to the next; the overlap schedule adds before it scales. With frequency or
presence and repetition penalties together the output depends on that order, so the reference
server scales last as well.
"""


def scale_last(original, orchestrator, logits, repeat=None):
    ordered = sorted(orchestrator.penalizers.items(), key=lambda item: item[0].is_multiplicative)
    orchestrator.penalizers = dict(ordered)
    return original(orchestrator, logits, repeat)


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    path = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"
    HookRegistry.register(path, scale_last, HookType.AROUND)
