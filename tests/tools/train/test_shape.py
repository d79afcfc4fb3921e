import pytest
from transformers import AutoTokenizer, PretrainedConfig

from sglang_jetspec.tools.train.shape import resolve, spare_token_id


def test_what_is_left_open_is_filled_in(train_config):
    config, head = resolve(train_config(draft_layers=None, block_size=None))
    assert (config.draft_layers, config.block_size) == (2, 8)
    assert (head.num_hidden_layers, head.block_size) == (2, 8)
    assert resolve(config)[0] == config
    with pytest.raises(ValueError, match=r"target_layer_ids is \[1, 1, 1"):
        resolve(train_config(target_layer_ids=None))  # four layers have no five to tap


def test_a_mask_of_id_0_is_taken_as_given(train_config, monkeypatch):
    def spare(*_):
        raise AssertionError("no other token is looked for")

    monkeypatch.setattr("sglang_jetspec.tools.train.shape.spare_token_id", spare)
    assert resolve(train_config(mask_token_id=0))[1].mask_token_id == 0


def test_the_mask_is_the_tokenizers_or_an_id_it_does_not_use(corpus, tmp_path):
    plain = str(corpus / "target")
    tokenizer = AutoTokenizer.from_pretrained(plain)
    used = len(tokenizer)
    assert spare_token_id(plain, PretrainedConfig(vocab_size=used + 8)) == used
    with pytest.raises(ValueError, match=rf"uses all {used} ids; give --mask-token-id"):
        spare_token_id(plain, PretrainedConfig(vocab_size=used))
    tokenizer.mask_token = "<|mask|>"
    tokenizer.save_pretrained(tmp_path)
    found = spare_token_id(str(tmp_path), PretrainedConfig(vocab_size=used))
    assert found == tokenizer.convert_tokens_to_ids("<|mask|>")
