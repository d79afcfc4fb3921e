"""A plug-in under which a server dies when a round waits for the device.

Put this folder on a server's PYTHONPATH.
"""


def refuse_waiting(original, worker, batch, *args):
    """The first rounds may still build constants; from the tenth on nothing may synchronise."""
    import torch

    worker.rounds_seen = getattr(worker, "rounds_seen", 0) + 1
    mode = "error" if worker.rounds_seen > 10 else "default"
    torch.cuda.set_sync_debug_mode(mode)
    try:
        return original(worker, batch, *args)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang_jetspec.worker.JetSpecWorker._round", refuse_waiting, HookType.AROUND
    )
