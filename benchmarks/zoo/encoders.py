"""Encoders and decoders of text, experts and state space models of transformers, x-transformers and peft."""

from typing import Any

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, tokens

VOCABULARY, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 512, 128, 8, 128, 4, 4
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
    "max_position_embeddings": 2 * LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def configured(kind: str, sizes: dict[str, Any]) -> Any:
    """A configuration of transformers; sizes that it does not know become attributes that nothing reads, None leaves one out."""
    from transformers import AutoConfig

    return AutoConfig.for_model(kind, **{name: size for name, size in sizes.items() if size is not None})


def masked(kind: str, *, batch: int = BATCH, length: int = LENGTH, **changes: Any) -> Builder:
    """An encoder that fills masked tokens."""

    def build() -> Built:
        from transformers import AutoModelForMaskedLM

        model = AutoModelForMaskedLM.from_config(configured(kind, {**SIZES, **changes}))
        ids = tokens(batch, length, VOCABULARY)
        return WithLoss(model, ("input_ids", "labels"), "loss"), (ids, ids.clone())

    return build


ENTRIES = entries(
    "encoder",
    "transformers",
    {
        "bert": masked("bert"),
        "roberta": masked("roberta"),
        "albert": masked("albert", embedding_size=64),
        "electra": masked("electra", embedding_size=64),
        "distilbert": masked("distilbert", dim=WIDTH, n_layers=LAYERS, n_heads=HEADS, hidden_dim=4 * WIDTH),
        "mpnet": masked("mpnet"),
        "deberta": masked("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=64),
        "deberta_v2": masked(
            "deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=32, share_att_key=True
        ),
        "funnel": masked(
            "funnel", num_hidden_layers=None, d_model=WIDTH, n_head=HEADS, d_head=32, d_inner=512, block_sizes=[2, 2, 2]
        ),
        "longformer": masked("longformer", attention_window=32, batch=4),
        "big_bird": masked("big_bird", attention_type="block_sparse", block_size=8, num_random_blocks=2),
        "nystromformer": masked(
            "nystromformer", num_landmarks=16, segment_means_seq_len=LENGTH, max_position_embeddings=LENGTH
        ),
        "fnet": masked("fnet"),
        "mobilebert": masked(
            "mobilebert", embedding_size=64, intra_bottleneck_size=64, true_hidden_size=64, intermediate_size=256
        ),
        "convbert": masked("convbert", embedding_size=WIDTH),
        "modernbert": masked(
            "modernbert", global_attn_every_n_layers=2, local_attention=64, cls_token_id=1, sep_token_id=2
        ),
    },
)
