"""Stops inside an accepted run, found where plain decoding finds them.

SGLang looks for a request's stop strings, stop patterns and stop tokens in the whole run a round
accepted, kind by kind: of two stops in one run the one it looks for first wins, not the one that
comes first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def finish_token_by_token(
    original: Callable[..., None], req: Any, new_accepted_len: int = 1
) -> None:
    """Hook around SGLang's finish check of a request whose output has just grown by a run.

    Requests with stop strings or patterns are checked after every token, as without speculation.
    What the run holds past the stop stays in the output; ``finished_len`` leaves it out.
    """
    params = req.sampling_params
    texts = params.stop_strs or params.stop_regex_strs
    if new_accepted_len <= 1 or not texts or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    run = req.output_ids[-new_accepted_len:]
    del req.output_ids[-new_accepted_len:]
    # The grammar already stands behind the whole run, whose last token alone can end it.
    grammar, req.grammar = req.grammar, None
    done = 0
    while done < len(run) - 1 and not req.finished():
        req.output_ids.append(run[done])
        done += 1
        original(req, 1)
    req.grammar = grammar
    req.output_ids.extend(run[done:])
    if not req.finished():
        original(req, 1)
