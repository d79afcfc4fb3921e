"""Turn a Llama-architecture GGUF file into Hugging Face tensors and a fast tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL_TOKEN = 3  # gguf.TokenType.CONTROL

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class GgufLlama:
    """Reader of one GGUF file whose architecture is "llama"."""

    def __init__(self, path: Path) -> None:
        self._reader = gguf.GGUFReader(path)
        architecture = self.value("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"general.architecture is {architecture!r} in {path}; expected 'llama'"
            )

    def __len__(self) -> int:
        return len(self._reader.tensors)

    def value(self, key: str) -> Any:
        """Metadata value of `key`; KeyError when the file lacks it."""
        field = self._reader.fields.get(key)
        if field is None:
            raise KeyError(f"GGUF metadata has no {key!r}")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """`config.json` of the same model as a `LlamaForCausalLM`."""
        heads = self.value("llama.attention.head_count")
        hidden = self.value("llama.embedding_length")
        tied = not any(tensor.name == "output.weight" for tensor in self._reader.tensors)
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self.value("llama.feed_forward_length"),
            "num_hidden_layers": self.value("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self.value("llama.attention.head_count_kv"),
            "head_dim": hidden // heads,
            "vocab_size": self.value("llama.vocab_size"),
            "max_position_embeddings": self.value("llama.context_length"),
            "rms_norm_eps": round(self.value("llama.attention.layer_norm_rms_epsilon"), 9),
            "rope_theta": self.value("llama.rope.freq_base"),
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": tied,
            "bos_token_id": self.value("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.value("tokenizer.ggml.eos_token_id"),
            "pad_token_id": self.value("tokenizer.ggml.padding_token_id"),
            "dtype": "bfloat16",
        }

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, fp32 tensor), dequantised one at a time."""
        heads = {
            "attn_q": self.value("llama.attention.head_count"),
            "attn_k": self.value("llama.attention.head_count_kv"),
        }
        for tensor in self._reader.tensors:
            weight = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            stem = tensor.name.removesuffix(".weight")
            kind = stem.rsplit(".", 1)[-1]
            if kind in heads:
                weight = unpermute_rope(weight, heads[kind])
            yield hf_name(stem), torch.from_numpy(np.array(weight, dtype=np.float32))

    def tokenizer(self) -> Tokenizer:
        """Byte-level BPE that splits digits one by one, as the "smollm" pre-tokenizer does.

        The digit split is not part of the GGUF metadata proper, only its name is; without it
        indented numbers tokenise differently from the model's training.
        """
        pre = self.value("tokenizer.ggml.pre")
        if pre != "smollm":
            raise ValueError(f"tokenizer.ggml.pre is {pre!r}; only 'smollm' is supported")
        tokens = self.value("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ", 1)) for merge in self.value("tokenizer.ggml.merges")]
        tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        types = self.value("tokenizer.ggml.token_type")
        control = [
            token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN
        ]
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in control]
        )
        return tokenizer


def hf_name(stem: str) -> str:
    """Hugging Face parameter name of GGUF tensor `stem` (without its ".weight")."""
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    prefix, layer, kind = stem.split(".")
    if prefix != "blk" or kind not in _LAYER_NAMES:
        raise ValueError(f"unknown GGUF tensor {stem!r}")
    return f"model.layers.{layer}.{_LAYER_NAMES[kind]}.weight"


def unpermute_rope(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's interleaved rotary layout: [heads * hd, in] back to half-split rows."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)
