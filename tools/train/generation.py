"""How a target answers training prompts."""

from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the target answers."""

    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """0 is greedy. Paper: the target's own responses; the temperature is not stated."""
    max_new_tokens: Count = 256
    """Longest answer, in tokens."""
    max_prompt_tokens: Count = 400
    """Longer prompts, earlier turns included, are left out."""
    batch_size: Count = 32
    """Requests that decode together."""
    ignore_eos: bool = False
    """Go on to max_new_tokens whatever the target says."""
    engine: str = "{}"
    """JSON object of further `sglang.Engine` arguments, such as {"tp_size": 2} or a speculative
    algorithm with an earlier head."""
    seed: int = 0
    """Seed of the engine's sampling; batching makes sampled answers differ between runs."""
