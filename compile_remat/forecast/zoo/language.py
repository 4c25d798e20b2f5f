"""Language models, by the configuration classes of `transformers` with the published sizes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from compile_remat.forecast.zoo.joining import CAUSAL, Loss, tokens, transformers
from compile_remat.forecast.zoo.tensor_parallel import spread_over

Built = tuple[Loss, tuple[Tensor, Tensor]]


def bert_large(batch: int = 64, seq: int = 512, mesh: Any = None) -> Built:
    """BERT-large, masked tokens: 24 layers of width 1024, 16 heads, dropout 0.1 (Devlin and others, 2018)."""
    with transformers() as package:
        config = package.BertConfig(
            vocab_size=30522,
            hidden_size=1024,
            num_hidden_layers=24,
            num_attention_heads=16,
            intermediate_size=4096,
            max_position_embeddings=max(512, seq),
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            attn_implementation="sdpa",
        )
        model = package.BertForMaskedLM(config)
        spread_over(model, mesh, heads=16)
        return Loss(model), (tokens(batch, seq), tokens(batch, seq))


def llama_2_7b(batch: int = 2, seq: int = 4096, mesh: Any = None) -> Built:
    """Llama 2 of 7 billion parameters: 32 layers of width 4096, 32 heads (Touvron and others, 2023)."""
    return _llama(batch, seq, mesh, layers=32, width=4096, inner=11008, heads=32, key_heads=32)


def llama_2_70b(batch: int = 1, seq: int = 4096, mesh: Any = None) -> Built:
    """Llama 2 of 70 billion parameters: 80 layers of width 8192, 64 heads, 8 of them for keys and values."""
    return _llama(batch, seq, mesh, layers=80, width=8192, inner=28672, heads=64, key_heads=8)


def _llama(
    batch: int, seq: int, mesh: Any, *, layers: int, width: int, inner: int, heads: int, key_heads: int
) -> Built:
    with transformers() as package:
        config = package.LlamaConfig(
            vocab_size=32000,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            max_position_embeddings=seq,
            rms_norm_eps=1e-5,
            use_cache=False,
            attn_implementation=CAUSAL,
        )
        model = package.LlamaForCausalLM(config)
        spread_over(model, mesh, heads=key_heads, vocabulary=True)
        return Loss(model), (tokens(batch, seq), tokens(batch, seq))


def olmoe_7b(batch: int = 8, seq: int = 4096) -> Built:
    """OLMoE-1B-7B: 16 layers of width 2048, 16 heads, 64 experts of which each token takes 8 (Muennighoff and others, 2024).

    The load-balancing loss of the experts is left out: `transformers` takes a lock for it, which breaks the graph.
    """
    with transformers() as package:
        config = package.OlmoeConfig(
            vocab_size=50304,
            hidden_size=2048,
            intermediate_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            max_position_embeddings=seq,
            rms_norm_eps=1e-5,
            use_cache=False,
            attn_implementation=CAUSAL,
            experts_implementation="grouped_mm",
        )
        return Loss(package.OlmoeForCausalLM(config)), (tokens(batch, seq), tokens(batch, seq))


def t5_large(batch: int = 16, seq: int = 512, mesh: Any = None) -> Built:
    """T5-large: 24 + 24 layers of width 1024, 16 heads of 64, position biases (Raffel and others, 2020)."""
    with transformers() as package:
        config = package.T5Config(
            vocab_size=32128,
            d_model=1024,
            d_kv=64,
            d_ff=4096,
            num_layers=24,
            num_decoder_layers=24,
            num_heads=16,
            dropout_rate=0.1,
            use_cache=False,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        model = package.T5ForConditionalGeneration(config)
        spread_over(model, mesh, heads=16)
        return Loss(model), (tokens(batch, seq), tokens(batch, seq))
