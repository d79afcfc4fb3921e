"""Every serving option of JETSPEC in one frozen object.

Sources, first one that sets an option wins:

1. SGLang's own flags: ``--speculative-num-draft-tokens`` (tree budget, root included),
   ``--speculative-eagle-topk`` (width), ``--speculative-num-steps`` (depth);
2. the ``jetspec`` block of the head's ``config.json``;
3. the environment: ``SGLANG_JETSPEC_NUM_DRAFT_TOKENS``, ``..._WIDTH``, ``..._DEPTH``, ``..._TREE``,
   ``..._TREE_OPTIONS`` (a JSON object), and for JetSpec++ ``..._PASSES``, ``..._REFRESHES``,
   ``..._OUTCOMES``, ``..._RULE``, ``..._MAX_FORESIGHT_BLOCKS``, ``..._EXECUTOR`` and
   ``..._FORESIGHT_CORES``;
4. defaults that follow the device and the head's block size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_jetspec.foresight.options import ForesightOptions, foresight_options
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.trees import TREE_BUILDERS, TreeBuilder, max_nodes, tree_builder

MAX_NODES = 256
ENVIRONMENT_PREFIX = "SGLANG_JETSPEC_"
# Read elsewhere: where the demo target is kept, and switches of platforms and kernels.
_OTHER_VARIABLES = frozenset({"CACHE", "CAUSAL", "CPU_OPS", "CPU_OVERLAP", "KERNELS"})
_FLAGS = {
    "num_draft_tokens": "--speculative-num-draft-tokens",
    "width": "--speculative-eagle-topk",
    "depth": "--speculative-num-steps",
}


class OptionError(ValueError):
    """An option JETSPEC cannot serve; the message names it, its value and the fix."""


class PartialOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one source sets; ``None`` leaves the option to the next source."""

    num_draft_tokens: int | None = None
    width: int | None = None
    depth: int | None = None
    tree: str | None = None
    tree_options: dict[str, Any] | None = None
    passes: int | None = None
    refreshes: int | None = None
    outcomes: int | None = None
    rule: str | None = None
    max_foresight_blocks: int | None = None
    executor: str | None = None
    foresight_cores: str | None = None


class HeadBlock(PartialOptions, frozen=True, forbid_unknown_fields=True):
    """The ``jetspec`` block of a head's ``config.json``: options and format extensions."""

    draft_vocab_size: int | None = None
    token_input: bool = False
    draft_shift: bool = False


class Options(msgspec.Struct, frozen=True):
    """Resolved options.

    num_draft_tokens: tree budget N, root included, 2..256.
    width: most children a node may have, W >= 1.
    depth: longest root-to-leaf path in edges, D <= what the head drafts and D < N.
    tree: name of the builder in ``sglang_jetspec.trees.TREE_BUILDERS``.
    tree_options: the builder's parameters.
    idle_rows: rows of a draft pass that draft nothing, see ``HeadConfig``.
    block_size: rows of one draft pass, for most heads D + 1 (the anchor and D masks).
    foresight: how JetSpec++ drafts; None where one pass of the head makes the tree.
    """

    num_draft_tokens: int
    width: int
    depth: int
    tree: str
    tree_options: dict[str, Any] = {}
    idle_rows: int = 1
    foresight: ForesightOptions | None = None

    @property
    def block_size(self) -> int:
        return self.depth + self.idle_rows

    def tree_builder(self) -> TreeBuilder:
        return tree_builder(TREE_BUILDERS, self.tree, self.tree_options)


def _decode(source: str, raw: Mapping[str, Any], kind: type[PartialOptions]) -> PartialOptions:
    try:
        return msgspec.convert(dict(raw), kind, strict=False)
    except msgspec.ValidationError as error:
        known = ", ".join(kind.__struct_fields__)
        raise OptionError(f"{source}: {error}. Known keys: {known}.") from None


def read_environment(environ: Mapping[str, str] = os.environ) -> PartialOptions:
    """Options set by ``SGLANG_JETSPEC_*`` variables; an unknown one is refused."""
    raw = {
        name[len(ENVIRONMENT_PREFIX) :]: value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    values: dict[str, Any] = {n.lower(): v for n, v in raw.items() if n not in _OTHER_VARIABLES}
    if (text := values.get("tree_options")) is not None:
        try:
            values["tree_options"] = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise OptionError(
                f"{ENVIRONMENT_PREFIX}TREE_OPTIONS={text!r}: {error}; use a JSON object."
            ) from None
    return _decode(f"environment {ENVIRONMENT_PREFIX}*", values, PartialOptions)


def causality_override(environ: Mapping[str, str] = os.environ) -> bool | None:
    """``SGLANG_JETSPEC_CAUSAL`` (0 or 1): overrides what the checkpoint says of its causality."""
    value = environ.get(ENVIRONMENT_PREFIX + "CAUSAL")
    if value is None:
        return None
    if value not in ("0", "1"):
        raise OptionError(f"SGLANG_JETSPEC_CAUSAL={value!r}: use 0 or 1.")
    return value == "1"


def _named(name: str, value: Any) -> str:
    return f"{_FLAGS.get(name, name)}={value!r}"


def resolve_options(
    head: HeadConfig,
    *,
    on_cpu: bool,
    flags: PartialOptions | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Options:
    """Merge the sources for ``head`` and check the result.

    On a CPU a verified row costs real time, so the default budget is 8 nodes; on a GPU the
    verify pass of 64 nodes costs about as much as one of a single token.
    """
    block = _decode("the head's config.json, block jetspec", head.jetspec, HeadBlock)
    sources = (flags or PartialOptions(), block, read_environment(environ))

    def first(name: str) -> Any:
        return next((v for s in sources if (v := getattr(s, name)) is not None), None)

    nodes, width, depth = first("num_draft_tokens"), first("width"), first("depth")
    name = first("tree") or "best_first"
    options = next((s.tree_options for s in sources if s.tree_options is not None), {})
    try:
        builder = tree_builder(TREE_BUILDERS, name, options)
    except ValueError as error:
        raise OptionError(str(error)) from None
    longest = head.max_depth
    foresight = _foresight(
        head, {key: first(key) for key in ForesightOptions.__struct_fields__}, name
    )
    width = _width(head, builder, name, 1 if foresight and width is None else width, on_cpu)
    if foresight is not None and width != 1:
        raise OptionError(
            f"{_named('width', width)}: refined and foreseen blocks are chains; use "
            "--speculative-eagle-topk 1, or leave SGLANG_JETSPEC_PASSES and _OUTCOMES at 0."
        )
    if nodes is None:
        nodes = min(8 if on_cpu else 64, 1 + longest if width == 1 else MAX_NODES)
    if not 2 <= nodes <= MAX_NODES:
        raise OptionError(
            f"{_named('num_draft_tokens', nodes)}: the tree budget counts the root, "
            f"use 2 to {MAX_NODES}."
        )
    if depth is None:
        depth = min(longest, nodes - 1)
    if not 1 <= depth <= longest:
        raise OptionError(
            f"{_named('depth', depth)}: the head drafts blocks of {head.block_size}, "
            f"use a depth of 1 to {longest}."
        )
    depth = min(depth, nodes - 1)
    return Options(
        num_draft_tokens=min(nodes, max_nodes(width, depth)),
        width=width,
        depth=depth,
        tree=name,
        tree_options=options,
        idle_rows=head.idle_rows,
        foresight=foresight,
    )


def _foresight(head: HeadConfig, given: dict[str, Any], tree: str) -> ForesightOptions | None:
    """JetSpec++'s options, or None where it is off; refuses what does not go together."""
    try:
        options = foresight_options(given)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if options is None:
        return None
    if options.passes and not head.token_input:
        raise OptionError(
            f"passes={options.passes}: this head reads masks (jetspec.token_input is not true in "
            "its config.json) and cannot read its own guesses. Use 0, or a head trained with "
            "`jetspec train --token-input`."
        )
    if not head.causal or head.correction is not None or tree not in ("best_first", "chain"):
        raise OptionError(
            f"passes={options.passes}, outcomes={options.outcomes}: JetSpec++ drafts chains with "
            f"causal JetSpec heads, this is tree={tree!r} with a {head.kind} head. Leave both at 0."
        )
    return options


def _width(
    head: HeadConfig, builder: TreeBuilder, tree: str, width: int | None, on_cpu: bool
) -> int:
    """The width asked for, or the default of the head's kind; refuses what does not go together."""
    corrected = head.correction is not None
    if corrected and tree not in ("best_first", "chain"):
        raise OptionError(
            f"tree={tree!r}: the rows of a {head.kind} head depend on the tokens before them; use "
            "best_first (exact for such heads) or chain."
        )
    if builder.max_width is not None and width is None:
        width = builder.max_width
    if width is None:
        branches = (head.causal and not corrected) or builder.any_head
        width = (4 if on_cpu else 7) if branches else 1
    vocabulary = head.ranked
    if width < 1 or (vocabulary is not None and width > vocabulary):
        raise OptionError(f"{_named('width', width)}: use 1 to the draft vocabulary's size.")
    if builder.max_width is not None and width > builder.max_width:
        raise OptionError(
            f"{_named('width', width)}: tree={tree!r} has a width of {builder.max_width}; leave "
            "the width out, or use tree=best_first."
        )
    if width > 1 and not (head.causal or corrected or builder.any_head):
        raise OptionError(
            f"{_named('width', width)}: this head drafts its block bidirectionally "
            "(dflash_config.causal_head is not true), so the branches of a tree would not be "
            "consistent. Use --speculative-eagle-topk 1, or SGLANG_JETSPEC_CAUSAL=1 if the "
            "checkpoint was trained causally, or tree=ddtree (SGLANG_JETSPEC_TREE) to branch all "
            "the same."
        )
    return width
