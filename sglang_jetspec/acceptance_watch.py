"""Notices a head whose drafts are not accepted.

A head of another target, features of the wrong layers or a wrong causality change no output: the
server is only slower than without speculation, and nothing else says so.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

ROUNDS = 200
LEAST = 1.1


class AcceptanceWatch:
    """Looks at the first ``ROUNDS`` rounds of requests, once."""

    def __init__(self) -> None:
        self.rounds = 0
        self.drafts = 0

    def count(self, accepted: list[int]) -> None:
        """accepted: drafts accepted by each request of a round (without the bonus token)."""
        if self.rounds >= ROUNDS:
            return
        self.rounds += len(accepted)
        self.drafts += sum(accepted)
        length = 1 + self.drafts / max(self.rounds, 1)
        if self.rounds >= ROUNDS and length < LEAST:
            logger.warning(
                "The head's drafts are hardly ever accepted: %.2f tokens a round over the first %d "
                "rounds. Check that it was trained for this target (--model-path and "
                "--speculative-draft-model-path) and that its config.json is the checkpoint's own.",
                length,
                self.rounds,
            )
