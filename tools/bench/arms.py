"""Arms of a comparison: one name on the command line, one set of server flags.

Grammar of `--arms`: names separated by commas; `jetspec` takes options after a colon, which are
also separated by commas: `ar,jetspec,jetspec:n=16,w=4,d=7,tree=algorithm1`. JetSpec++ is
`jetspec:n=16,j=3,r=3,b=4`: J passes, R refreshes, B outcomes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

BASELINES = ("ar", "ar_torch_native")
KINDS = (*BASELINES, "jetspec")
# Option of a `jetspec` arm -> server flag, or variable of its environment.
_FLAGS = {
    "n": "--speculative-num-draft-tokens",
    "w": "--speculative-eagle-topk",
    "d": "--speculative-num-steps",
}
_VARIABLES = {
    "j": "SGLANG_JETSPEC_PASSES",
    "r": "SGLANG_JETSPEC_REFRESHES",
    "b": "SGLANG_JETSPEC_OUTCOMES",
    "tree": "SGLANG_JETSPEC_TREE",
    "rule": "SGLANG_JETSPEC_RULE",
    "executor": "SGLANG_JETSPEC_EXECUTOR",
    "core": "SGLANG_JETSPEC_FORESIGHT_CORES",
}
_NUMBERS = (*_FLAGS, "j", "r", "b", "core")


@dataclass(frozen=True)
class Arm:
    """`name` as written; `kind` one of KINDS; `options` such as {"n": "16"}."""

    name: str
    kind: str
    options: dict[str, str] = field(default_factory=dict)

    @property
    def is_baseline(self) -> bool:
        return self.kind in BASELINES

    def server_args(self, head: Path | str) -> list[str]:
        """Flags this arm adds to those all arms share."""
        if self.kind == "ar":
            return []
        if self.kind == "ar_torch_native":
            return ["--attention-backend", "torch_native"]
        args = ["--speculative-algorithm", "JETSPEC"]
        args += ["--speculative-draft-model-path", str(head)]
        for key, value in self.options.items():
            if key in _FLAGS:
                args += [_FLAGS[key], value]
        return args

    @property
    def env(self) -> dict[str, str]:
        """Variables this arm adds to the server's environment."""
        return {_VARIABLES[key]: v for key, v in self.options.items() if key in _VARIABLES}


def parse_arms(text: str) -> list[Arm]:
    """Reads `--arms`; raises ValueError naming the arm or option and what is possible."""
    arms: list[Arm] = []
    for item in _split(text):
        kind, _, rest = item.partition(":")
        if kind not in KINDS:
            raise ValueError(f"--arms: {kind!r} is no arm; use {', '.join(KINDS)}")
        pairs = [_option(item, pair) for pair in rest.split(",") if rest]
        options = dict(pairs)
        if len(options) < len(pairs):
            raise ValueError(f"--arms: {item!r} sets an option twice")
        if options and kind != "jetspec":
            raise ValueError(f"--arms: {item!r}: only jetspec takes options")
        arms.append(Arm(item, kind, options))
    names = [arm.name for arm in arms]
    if not names:
        raise ValueError("--arms: name at least one arm, for example ar,jetspec")
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"--arms: {', '.join(sorted(repeated))} is named twice")
    return arms


def _split(text: str) -> list[str]:
    """Splits at commas, but leaves `key=value` parts with the arm before them."""
    items: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if items and "=" in part and ":" not in part:
            items[-1] += f",{part}"
        elif part:
            items.append(part)
    return items


def _option(arm: str, pair: str) -> tuple[str, str]:
    key, equals, value = pair.partition("=")
    known = (*_FLAGS, *_VARIABLES)
    if key not in known or not equals or not value:
        raise ValueError(f"--arms: {arm!r}: {pair!r} is no option; use {'=, '.join(known)}=")
    if key in _NUMBERS and not value.isdecimal():
        raise ValueError(f"--arms: {arm!r}: {key} must be a whole number, got {value!r}")
    return key, value


def baseline_of(tok_per_s: dict[str, float], arms: Sequence[Arm]) -> str | None:
    """The fastest plain-decoding arm: what the others are compared with."""
    names = [arm.name for arm in arms if arm.is_baseline]
    return max(names, key=lambda name: tok_per_s[name], default=None)
