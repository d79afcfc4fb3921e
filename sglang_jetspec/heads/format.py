"""Draft-head checkpoints on disk: `config.json` and `*.safetensors` in the published formats.

All kinds share the DFlash layout. JetSpec and DFlash heads have nothing else, and causality alone
tells them apart; `CORRECTIONS` lists the kinds that add a sequential part.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

from sglang_jetspec.heads.correction import Correction, CorrectionConfig, ReadCorrection
from sglang_jetspec.heads.domino import read_domino
from sglang_jetspec.heads.dspark import read_dspark
from sglang_jetspec.heads.fields import (
    HeadError,
    boolean,
    optional_positive_int,
    positive_int,
    positive_number,
    section,
)

CONFIG_NAME = "config.json"
WEIGHTS_PATTERN = "*.safetensors"
DRAFT_TOKEN_IDS = "draft_token_ids"
CORRECTIONS: tuple[ReadCorrection, ...] = (read_domino, read_dspark)
KINDS = ("jetspec", "dflash", "dspark", "domino")
# Released DSpark checkpoints carry copies of the target's own; the target's are used.
TARGET_COPIES = ("embed_tokens.weight", "lm_head.weight")

# Keys of `dflash_config` that change the forward pass in ways this format does not describe.
_UNSUPPORTED = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "output_multiplier",
    "final_logit_softcapping",
    "attention_sink_bias",
    "attention_value_scale",
)


@dataclass(frozen=True)
class HeadConfig:
    """What a draft head needs to run.

    `target_layer_ids` follow Hugging Face: id l is the state after layer l, counted from 0.
    `draft_vocab_size` is an extension: the head ranks only the target ids listed in its
    `draft_token_ids` tensor [draft_vocab_size] int32. `correction` is the sequential part of DSpark
    and Domino heads.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    vocab_size: int | None
    num_target_layers: int | None
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    causal: bool
    draft_vocab_size: int | None
    jetspec: dict[str, Any]
    correction: CorrectionConfig | None = None

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        if self.correction is not None:
            return self.correction.kind
        return "jetspec" if self.causal else "dflash"

    @property
    def first_row(self) -> int:
        """The block row that drafts the first token: 0 is the anchor's, 1 the first mask's."""
        if self.correction is not None:
            return self.correction.first_row
        return 0 if self.draft_shift else 1

    @property
    def idle_rows(self) -> int:
        """Rows of a block that draft nothing: a pass of `idle_rows + D` rows drafts D tokens."""
        return self.first_row if self.correction is None else self.correction.idle_rows

    @property
    def max_depth(self) -> int:
        """The most tokens a block drafts. DSpark's `block_size` counts drafts, others' rows."""
        return self.block_size - (self.kind != "dspark")

    @property
    def ranked(self) -> int | None:
        """Tokens that the head drafts from: the draft vocabulary's, else the target's."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def token_input(self) -> bool:
        """Block rows hold tokens (noise, then guesses) instead of masks: a JetSpec++ head."""
        return boolean(self.jetspec, "token_input", False, "jetspec.")

    @property
    def draft_shift(self) -> bool:
        """Row i predicts the token after its own position instead of the token at it."""
        return boolean(self.jetspec, "draft_shift", False, "jetspec.")


def load_head_config(folder: Path, causal: bool | None = None) -> HeadConfig:
    """Parse `folder/config.json`; `causal` overrides what the file says."""
    path = Path(folder) / CONFIG_NAME
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise HeadError(f"{path} does not exist; give the folder of a draft head") from error
    except ValueError as error:  # of the text's encoding or of JSON
        raise HeadError(f"{path} is not valid JSON ({error}); download the head again") from error
    if not isinstance(raw, dict):
        raise HeadError(f"{path} holds no JSON object; download the head again")
    return parse_head_config(raw, causal)


def parse_head_config(raw: dict[str, Any], causal: bool | None = None) -> HeadConfig:
    """Read a head's config object; raises HeadError on the first field that does not fit."""
    top = {**section(raw, "text_config"), **raw}
    dflash, jetspec = section(raw, "dflash_config"), section(raw, "jetspec")
    _refuse_unsupported(top, dflash)
    heads = positive_int(top, "num_attention_heads")
    hidden = positive_int(top, "hidden_size")
    layers = positive_int(top, "num_hidden_layers")
    target_layers = optional_positive_int(top, "num_target_layers")
    vocab = optional_positive_int(top, "vocab_size")
    target_hidden = dflash.get("target_hidden_size", hidden)
    if target_hidden != hidden:
        raise HeadError(
            f"dflash_config.target_hidden_size is {target_hidden}, hidden_size is {hidden}; heads "
            f"of another width than their target are not supported, use one trained for it"
        )
    config = HeadConfig(
        hidden_size=hidden,
        intermediate_size=positive_int(top, "intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=optional_positive_int(top, "num_key_value_heads") or heads,
        head_dim=optional_positive_int(top, "head_dim") or hidden // heads,
        rms_norm_eps=positive_number(top, "rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(top),
        max_position_embeddings=positive_int(top, "max_position_embeddings"),
        vocab_size=vocab,
        num_target_layers=target_layers,
        block_size=positive_int({**top, **dflash}, "block_size"),
        mask_token_id=_mask_token_id(top, dflash, vocab),
        target_layer_ids=_target_layer_ids(top, dflash, layers, target_layers),
        causal=_causal(top, dflash, causal),
        draft_vocab_size=optional_positive_int(jetspec, "draft_vocab_size", "jetspec."),
        jetspec=dict(jetspec),
        correction=_correction(top, dflash),
    )
    _check_sizes(config)
    return config


def expected_tensors(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Published name -> shape of every tensor that the head must have."""
    h, inter, hd = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(config.target_layer_ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for i in range(config.num_hidden_layers):
        layer = {
            "input_layernorm": (h,),
            "post_attention_layernorm": (h,),
            "self_attn.q_proj": (q, h),
            "self_attn.k_proj": (kv, h),
            "self_attn.v_proj": (kv, h),
            "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (hd,),
            "self_attn.k_norm": (hd,),
            "mlp.gate_proj": (inter, h),
            "mlp.up_proj": (inter, h),
            "mlp.down_proj": (h, inter),
        }
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in layer.items()})
    if config.draft_vocab_size is not None:
        shapes[DRAFT_TOKEN_IDS] = (config.draft_vocab_size,)
    if config.correction is not None and config.vocab_size and config.ranked:
        shapes |= config.correction.tensors(h, config.vocab_size, config.ranked)
    return shapes


def make_correction(config: HeadConfig) -> Correction | None:
    """The sequential part of a head, its weights yet to be loaded; None for heads without."""
    if config.correction is None or config.vocab_size is None or config.ranked is None:
        return None
    return config.correction.build(config.hidden_size, config.vocab_size, config.ranked)


def check_tensors(folder: Path, config: HeadConfig) -> None:
    """Compare names and shapes in all safetensors headers with what `config` needs."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob(WEIGHTS_PATTERN)):
        try:
            with safe_open(path, framework="pt") as weights:
                found |= {n: tuple(weights.get_slice(n).get_shape()) for n in weights.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise HeadError(f"{path} is unreadable ({error}); download it again") from error
    if not found:
        raise HeadError(f"{folder} holds no {WEIGHTS_PATTERN}; download the head again")
    expected = expected_tensors(config)
    if config.kind == "dspark":
        found = {name: shape for name, shape in found.items() if name not in TARGET_COPIES}
    problems = [f"missing {name} {shape}" for name, shape in expected.items() if name not in found]
    problems += [f"unknown {name} {shape}" for name, shape in found.items() if name not in expected]
    problems += [
        f"{name} has shape {found[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        listed = "; ".join(problems[:8]) + ("; ..." if len(problems) > 8 else "")
        raise HeadError(
            f"tensors in {folder} do not fit its config.json ({len(problems)}) as a {config.kind} "
            f"head: {listed}. Use a head whose weights and config.json belong together"
        )


def resolve_head(path_or_hub_id: str, revision: str | None = None) -> Path:
    """Local folder as is; otherwise a hub repository, config and safetensors only (no pickle).

    Raises HeadError when `path_or_hub_id` is neither, or the hub does not give it.
    """
    local = Path(path_or_hub_id).expanduser()
    if local.is_dir():
        return local
    try:
        return Path(
            snapshot_download(
                path_or_hub_id, revision=revision, allow_patterns=[CONFIG_NAME, WEIGHTS_PATTERN]
            )
        )
    except GatedRepoError as error:
        raise HeadError(
            f"draft head {path_or_hub_id!r} is gated: accept its terms on the hub and log in "
            "(hf auth login)"
        ) from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise HeadError(
            f"draft head {path_or_hub_id!r} (revision {revision!r}) is no local folder, the hub "
            "cannot be reached and its cache holds no copy; give the folder that holds its "
            "config.json"
        ) from error
    except (HFValidationError, RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise HeadError(
            f"draft head {path_or_hub_id!r} (revision {revision!r}) is neither a local folder nor "
            f"a hub repository; give the folder that holds its config.json"
        ) from error


def _refuse_unsupported(top: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    used = [key for key in _UNSUPPORTED if dflash.get(key) is not None]
    if used:
        raise HeadError(
            f"dflash_config.{used[0]} is {dflash[used[0]]!r}; only plain blocks are supported, "
            f"serve this head with the algorithm it was trained for"
        )
    for name, served in (("hidden_act", "silu"), ("partial_rotary_factor", 1)):
        if (value := top.get(name)) not in (None, served):
            raise HeadError(f"{name} is {value!r}; heads are served with {served!r} only")
    kinds = set(top.get("layer_types") or ()) - {"full_attention"}
    if kinds:
        raise HeadError(
            f"layer_types contains {sorted(kinds)}; use a head with full_attention layers only"
        )


def _rope_theta(top: Mapping[str, Any]) -> float:
    parameters = section(top, "rope_parameters")
    scaling = parameters.get("rope_type", "default")
    if scaling != "default" or top.get("rope_scaling"):
        raise HeadError(
            f"rope scaling is {top.get('rope_scaling') or scaling!r}; only default rotary "
            f"embeddings are supported"
        )
    return positive_number(top, "rope_theta", positive_number(parameters, "rope_theta", 10000.0))


def _mask_token_id(top: Mapping[str, Any], dflash: Mapping[str, Any], vocab: int | None) -> int:
    value = dflash.get("mask_token_id", top.get("mask_token_id"))
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HeadError(
            f"dflash_config.mask_token_id is {value!r}; set the id of the mask token the head was "
            f"trained with"
        )
    if vocab is not None and value >= vocab:
        raise HeadError(f"dflash_config.mask_token_id is {value}; it must be below {vocab=}")
    return value


def _target_layer_ids(
    top: Mapping[str, Any], dflash: Mapping[str, Any], layers: int, target_layers: int | None
) -> tuple[int, ...]:
    ids = dflash.get("target_layer_ids", top.get("target_layer_ids"))
    if ids is None:
        if target_layers is None:
            raise HeadError(
                "dflash_config.target_layer_ids and num_target_layers are both missing; add the "
                "ids of the target layers the head reads"
            )
        ids = default_target_layer_ids(layers, target_layers)
    bound = "" if target_layers is None else f" below {target_layers - 1}, the last target layer"
    fits = isinstance(ids, list | tuple) and bool(ids)
    fits = fits and all(type(i) is int and i >= 0 for i in ids)
    fits = fits and all(a < b for a, b in pairwise(ids))
    # The runtime captures the state on entry to layer l + 1, so l cannot be the last layer.
    if not fits or (target_layers is not None and ids[-1] >= target_layers - 1):
        raise HeadError(
            f"dflash_config.target_layer_ids is {ids!r}; give ascending layer ids{bound}"
        )
    return tuple(ids)


def default_target_layer_ids(layers: int, target_layers: int) -> tuple[int, ...]:
    """Taps of a head whose config lists none: one a draft layer, from 1 to the third last."""
    if layers == 1:
        return (target_layers // 2,)
    span = target_layers - 4
    return tuple(round(1 + i * span / (layers - 1)) for i in range(layers))


def _correction(top: Mapping[str, Any], dflash: Mapping[str, Any]) -> CorrectionConfig | None:
    for read in CORRECTIONS:
        if (correction := read(top, dflash)) is not None:
            return correction
    projector = dflash.get("projector_type", top.get("projector_type"))
    if projector is not None:
        raise HeadError(
            f"dflash_config.projector_type is {projector!r}; the kinds served are "
            f"{', '.join(KINDS)}"
        )
    return None


def _causal(top: Mapping[str, Any], dflash: Mapping[str, Any], override: bool | None) -> bool:
    if override is not None:
        return override
    for fields, name, prefix in (
        (dflash, "causal_head", "dflash_config."),
        (dflash, "causal", "dflash_config."),
        (top, "is_causal", ""),
    ):
        if fields.get(name) is not None:
            return boolean(fields, name, False, prefix)
    return False


def _check_sizes(config: HeadConfig) -> None:
    if config.max_depth < 1:
        raise HeadError(f"block_size is {config.block_size}; it must hold the anchor and a mask")
    if config.num_attention_heads % config.num_key_value_heads:
        raise HeadError(
            f"num_attention_heads is {config.num_attention_heads}; it must be a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    draft, vocab = config.draft_vocab_size, config.vocab_size
    from_tokens = config.token_input, config.draft_shift
    if config.correction is not None and any(from_tokens):
        raise HeadError(
            f"jetspec.token_input or jetspec.draft_shift is set for a {config.kind} head; only "
            "plain JetSpec heads draft from tokens, leave both out"
        )
    if config.correction is not None and vocab is None:
        raise HeadError(
            f"vocab_size is {vocab}; the sequential part of a {config.kind} head covers the "
            "target's vocabulary, set its size"
        )
    if draft is not None and vocab is not None and draft > vocab:
        raise HeadError(f"jetspec.draft_vocab_size is {draft}; it must not exceed {vocab=}")
