"""Decoders of text, experts and state space models of transformers; x-transformers; adapters of peft."""

from typing import Any

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, tokens
from benchmarks.zoo.encoders import BATCH, HEADS, LAYERS, LENGTH, SIZES, VOCABULARY, WIDTH, configured

GROUPED = {"num_key_value_heads": 2, "head_dim": WIDTH // HEADS}
"""Two query heads read the same keys and values."""


def causal_model(kind: str, **changes: Any) -> Any:
    """A decoder that says the next token."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(configured(kind, {**SIZES, "use_cache": False, **changes}))


def causal(kind: str, *, batch: int = BATCH, length: int = LENGTH, **changes: Any) -> Builder:
    """The same with its loss."""

    def build() -> Built:
        ids = tokens(batch, length, VOCABULARY)
        return WithLoss(causal_model(kind, **changes), ("input_ids", "labels"), "loss"), (ids, ids.clone())

    return build


def x_transformer(*, layers: str = "Decoder", **options: Any) -> Builder:
    """A decoder or an encoder of x-transformers."""

    def build() -> Built:
        import x_transformers

        inner = getattr(x_transformers, layers)(dim=WIDTH, depth=LAYERS, heads=HEADS, **options)
        model = x_transformers.TransformerWrapper(num_tokens=VOCABULARY, max_seq_len=LENGTH, attn_layers=inner)
        if layers == "Encoder":
            return WithLoss(model), (tokens(BATCH, LENGTH, VOCABULARY),)
        return WithLoss(x_transformers.AutoregressiveWrapper(model)), (tokens(BATCH, LENGTH, VOCABULARY),)

    return build


def lora(kind: str, *targets: str, **changes: Any) -> Builder:
    """A decoder whose weights are frozen, but for two small matrices beside each of some."""

    def build() -> Built:
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(r=8, target_modules=list(targets), lora_dropout=0.05, task_type="CAUSAL_LM")
        model = get_peft_model(causal_model(kind, **changes), config)
        ids = tokens(BATCH, LENGTH, VOCABULARY)
        return WithLoss(model, ("input_ids", "labels"), "loss"), (ids, ids.clone())

    return build


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256, **GROUPED}

ENTRIES = (
    *entries(
        "decoder",
        "x-transformers",
        {
            "x_transformer": x_transformer(),
            "x_transformer_modern": x_transformer(
                rotary_pos_emb=True, ff_glu=True, ff_swish=True, use_rmsnorm=True, attn_qk_norm=True, attn_kv_heads=2
            ),
            "x_transformer_encoder": x_transformer(
                layers="Encoder", rel_pos_bias=True, ff_dropout=0.1, attn_dropout=0.1, sandwich_norm=True
            ),
        },
    ),
    *entries(
        "decoder",
        "transformers",
        {
            "gpt2": causal("gpt2"),
            "llama": causal("llama", **GROUPED),
            "mistral": causal("mistral", sliding_window=64, **GROUPED),
            "qwen2": causal("qwen2", **GROUPED),
            "qwen3": causal("qwen3", **GROUPED),
            "gemma": causal("gemma", **GROUPED),
            "gemma2": causal("gemma2", sliding_window=64, query_pre_attn_scalar=32, **GROUPED),
            "phi": causal("phi"),
            "opt": causal("opt", ffn_dim=512, word_embed_proj_dim=WIDTH),
            "bloom": causal("bloom"),
            "falcon": causal("falcon", multi_query=True, new_decoder_architecture=False, parallel_attn=True),
            "gpt_neo": causal("gpt_neo", num_layers=4, attention_types=[[["global", "local"], 2]], window_size=32),
            "gpt_neox": causal("gpt_neox"),
            "gptj": causal("gptj", rotary_dim=16),
            "stablelm": causal("stablelm", **GROUPED),
            "olmo": causal("olmo", **GROUPED),
            "diffllama": causal("diffllama", **GROUPED),
        },
    ),
    *entries(
        "experts",
        "transformers",
        {
            "mixtral": causal("mixtral", num_local_experts=4, **GROUPED),
            "qwen2_moe": causal("qwen2_moe", num_experts=4, shared_expert_intermediate_size=256, **EXPERTS),
            "deepseek_v3": causal(
                "deepseek_v3", n_routed_experts=4, n_group=1, topk_group=1, kv_lora_rank=32, q_lora_rank=64,
                qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=32, first_k_dense_replace=1,
                num_experts_per_tok=2, moe_intermediate_size=256, num_key_value_heads=HEADS,
            ),
        },
    ),
    *entries(
        "state space",
        "transformers",
        {
            "mamba": causal("mamba", state_size=16, batch=4, length=32),
            "mamba2": causal("mamba2", state_size=16, num_heads=8, head_dim=32, n_groups=1, chunk_size=32, length=64),
            "rwkv": causal("rwkv", attention_hidden_size=WIDTH, context_length=64, batch=8, length=32),
            "recurrent_gemma": causal(
                "recurrent_gemma", lru_width=WIDTH, attention_window_size=64, num_key_value_heads=1,
                block_types=["recurrent", "attention"], length=64,
            ),
        },
    ),
    *entries(
        "adapters",
        "peft",
        {
            "lora_llama": lora("llama", "q_proj", "v_proj", **GROUPED),
            "lora_gpt2": lora("gpt2", "c_attn", "c_fc"),
        },
    ),
)  # fmt: skip
