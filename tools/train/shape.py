"""What a run leaves open about its head, filled in from the target or the head it continues."""

from msgspec.structs import replace
from transformers import AutoConfig, AutoTokenizer, PretrainedConfig

from sglang_jetspec.heads.format import (
    HeadConfig,
    default_target_layer_ids,
    load_head_config,
    parse_head_config,
    resolve_head,
)
from sglang_jetspec.tools.train.config import TrainConfig
from sglang_jetspec.tools.train.export import raw_config
from sglang_jetspec.tools.train.target import check_imported, head_config

TAPS, DRAFT_LAYERS, BLOCK_SIZE = 5, 2, 8


def resolve(config: TrainConfig) -> tuple[TrainConfig, HeadConfig]:
    """`config` with nothing left open, and the head's settings.

    Refuses before the first forward pass what a loader would refuse after the last: raises
    HeadError by field, and ValueError when the target has no token to spare for the mask.
    """
    target = AutoConfig.from_pretrained(config.target)
    if config.init_from is None:
        mask = config.mask_token_id
        config = _fill(
            config,
            draft_layers=DRAFT_LAYERS,
            block_size=BLOCK_SIZE,
            target_layer_ids=default_target_layer_ids(TAPS, target.num_hidden_layers),
            mask_token_id=spare_token_id(config.target, target) if mask is None else mask,
        )
        head = head_config(config, target, config.draft_vocab_size)
        return config, parse_head_config(raw_config(head))
    head = load_head_config(resolve_head(config.init_from))
    config = _fill(
        config,
        draft_layers=head.num_hidden_layers,
        block_size=head.block_size,
        target_layer_ids=head.target_layer_ids,
        mask_token_id=head.mask_token_id,
    )
    check_imported(head, config, target)
    return config, head


def _fill(config: TrainConfig, **values: object) -> TrainConfig:
    open_values = {name: value for name, value in values.items() if getattr(config, name) is None}
    return replace(config, **open_values)


def spare_token_id(name: str, target: PretrainedConfig) -> int:
    """The target's mask token, or an id that its embedding has and its tokenizer does not."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.mask_token_id is not None:
        return int(tokenizer.mask_token_id)
    used = max(tokenizer.get_vocab().values()) + 1
    if used < target.vocab_size:
        return used
    raise ValueError(
        f"mask_token_id is not given and the tokenizer of {name} uses all {target.vocab_size} ids; "
        f"give --mask-token-id of a special token that does not occur in text"
    )
