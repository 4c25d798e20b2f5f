"""Encoder-decoders, models of speech, of series and of pictures with words, of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.building import Built
from benchmarks.zoo.building import Builder, WithLoss, entries, images, tokens
from benchmarks.zoo.encoders import HEADS, LAYERS, SIZES, VOCABULARY, WIDTH, configured

DEPTH = 3
"""Layers of an encoder, and of a decoder."""
BART = {
    "d_model": WIDTH, "encoder_layers": DEPTH, "decoder_layers": DEPTH, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "decoder_start_token_id": 2,
    "num_hidden_layers": DEPTH, "hidden_size": None, "num_attention_heads": None, "forced_eos_token_id": None,
}  # fmt: skip
T5 = {
    "d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 512, "num_layers": DEPTH, "num_decoder_layers": DEPTH,
    "num_heads": HEADS, "decoder_start_token_id": 0, "hidden_size": None, "num_hidden_layers": None,
    "num_attention_heads": None,
}  # fmt: skip


def translating(kind: str, *, batch: int = 8, length: int = 96, **changes: Any) -> Builder:
    """A sequence into another one."""

    def build() -> Built:
        from transformers import AutoModelForSeq2SeqLM

        config = configured(kind, {**SIZES, "use_cache": False, **changes})
        model = AutoModelForSeq2SeqLM.from_config(config)
        names = ("input_ids", "decoder_input_ids", "labels")
        ids = [tokens(batch, length, VOCABULARY) for _ in names]
        return WithLoss(model, names, "loss"), tuple(ids)

    return build


def of_class(
    name: str, config: str, inputs: Callable[[], dict[str, Tensor]], field: str | int = "loss", **changes: Any
) -> Builder:
    """A model of transformers by the names of its class and of its configuration.

    Args:
        inputs: Makes the inputs, by name.
        field: Attribute of the output: the loss, or the tensor that the loss is made of.
    """

    def build() -> Built:
        import transformers

        model = getattr(transformers, name)(getattr(transformers, config)(**changes))
        given = inputs()
        return WithLoss(model, tuple(given), field), tuple(given.values())

    return build


def sound(batch: int = 2, samples: int = 16000) -> dict[str, Tensor]:
    """Float [B, samples]."""
    return {"input_values": torch.randn(batch, samples)}


def frames(batch: int, length: int, bands: int) -> dict[str, Tensor]:
    """Float [B, T, bands], and what is said."""
    return {"input_features": torch.randn(batch, length, bands), "labels": tokens(batch, 48, VOCABULARY)}


FLAT = {
    "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 512,
}  # fmt: skip
WAVES = {
    **FLAT, "conv_dim": (64,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "layerdrop": 0.0,
    "apply_spec_augment": False, "vocab_size": 32,
}  # fmt: skip
SERIES = {"prediction_length": 32, "context_length": 96, "d_model": WIDTH, "num_attention_heads": HEADS, "ffn_dim": 512}
FORECAST = {
    "prediction_length": 32, "context_length": 96, "d_model": 64, "encoder_layers": DEPTH, "decoder_layers": DEPTH,
    "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": 256, "decoder_ffn_dim": 256,
    "num_time_features": 2, "lags_sequence": [1, 2, 3, 7],
}  # fmt: skip


def series() -> dict[str, Tensor]:
    """Past and future values of 16 series, and what is known of their times."""
    past, future, batch = 96 + 7, 32, 16
    return {
        "past_values": torch.randn(batch, past),
        "past_time_features": torch.randn(batch, past, 2),
        "past_observed_mask": torch.ones(batch, past),
        "future_values": torch.randn(batch, future),
        "future_time_features": torch.randn(batch, future, 2),
    }


def pictures_and_words() -> dict[str, Tensor]:
    """Eight pictures with a sentence each."""
    return {"input_ids": tokens(8, 32, VOCABULARY), "pixel_values": images(8, 64)}


TEXT = {**FLAT, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
SIGHT = {**FLAT, "image_size": 64, "patch_size": 8}

ENTRIES = (
    *entries(
        "encoder-decoder",
        "transformers",
        {
            "t5": translating("t5", **T5),
            "bart": translating("bart", **BART),
            "pegasus": translating("pegasus", **BART),
            "marian": translating("marian", **BART, decoder_vocab_size=VOCABULARY),
            "led": translating("led", **BART, attention_window=[32] * DEPTH, max_encoder_position_embeddings=256),
            "prophetnet": translating(
                "prophetnet", num_encoder_layers=DEPTH, num_decoder_layers=DEPTH, num_encoder_attention_heads=HEADS,
                num_decoder_attention_heads=HEADS, encoder_ffn_dim=512, decoder_ffn_dim=512, ngram=2,
                num_hidden_layers=None, num_attention_heads=None, decoder_start_token_id=0, length=64, batch=4,
            ),
        },
    ),
    *entries(
        "experts",
        "transformers",
        {
            "switch": translating(
                "switch_transformers", **T5, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
            ),
        },
    ),
    *entries(
        "speech",
        "transformers",
        {
            "wav2vec2": of_class("Wav2Vec2Model", "Wav2Vec2Config", sound, "last_hidden_state", **WAVES),
            "hubert": of_class("HubertModel", "HubertConfig", sound, "last_hidden_state", **WAVES),
            "conformer": of_class(
                "Wav2Vec2ConformerModel", "Wav2Vec2ConformerConfig", sound, "last_hidden_state",
                **WAVES, conv_depthwise_kernel_size=15,
            ),
            "whisper": of_class(
                "WhisperForConditionalGeneration", "WhisperConfig", lambda: frames(4, 80, 256), vocab_size=VOCABULARY,
                num_mel_bins=80, d_model=WIDTH, encoder_layers=DEPTH, decoder_layers=DEPTH, use_cache=False,
                encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=512, decoder_ffn_dim=512,
                max_source_positions=128, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
            ),
            "audio_spectrogram": of_class(
                "ASTModel", "ASTConfig", lambda: {"input_values": torch.randn(4, 128, 64)}, "last_hidden_state", **FLAT,
                max_length=128, num_mel_bins=64, frequency_stride=8, time_stride=8, patch_size=8,
            ),
            "encodec": of_class(
                "EncodecModel", "EncodecConfig", lambda: {"input_values": torch.randn(2, 1, 4800)}, "audio_values",
                num_filters=8, hidden_size=64, codebook_dim=64, upsampling_ratios=[4, 3, 2], num_lstm_layers=1,
                codebook_size=64,
            ),
            "dac": of_class(
                "DacModel", "DacConfig", lambda: {"input_values": torch.randn(2, 1, 4096)}, "loss",
                encoder_hidden_size=16, decoder_hidden_size=128, downsampling_ratios=[2, 4, 4],
                upsampling_ratios=[4, 4, 2], n_codebooks=2, codebook_size=64, codebook_dim=8,
            ),
        },
    ),
    *entries(
        "series",
        "transformers",
        {
            "autoformer": of_class("AutoformerForPrediction", "AutoformerConfig", series, **FORECAST),
            "patchtst": of_class(
                "PatchTSTForPrediction", "PatchTSTConfig",
                lambda: {"past_values": torch.randn(8, 96, 6), "future_values": torch.randn(8, 32, 6)},
                **SERIES, num_input_channels=6, num_hidden_layers=LAYERS, patch_length=8, patch_stride=8,
            ),
        },
    ),
    *entries(
        "pictures and words",
        "transformers",
        {
            "clip": of_class(
                "CLIPModel", "CLIPConfig", pictures_and_words, "logits_per_image", text_config={**TEXT, "eos_token_id": 2},
                vision_config=SIGHT, projection_dim=64,
            ),
            "timesformer": of_class(
                "TimesformerModel", "TimesformerConfig", lambda: {"pixel_values": torch.randn(2, 4, 3, 64, 64)},
                "last_hidden_state", **SIGHT, num_frames=4,
            ),
            "perceiver": of_class(
                "PerceiverForMaskedLM", "PerceiverConfig",
                lambda: {"inputs": tokens(4, 128, VOCABULARY), "labels": tokens(4, 128, VOCABULARY)},
                vocab_size=VOCABULARY, d_model=WIDTH, d_latents=WIDTH, num_latents=64, num_self_attends_per_block=4,
                num_self_attention_heads=4, num_cross_attention_heads=4, max_position_embeddings=128,
                qk_channels=WIDTH, v_channels=WIDTH,
            ),
        },
    ),
)  # fmt: skip
