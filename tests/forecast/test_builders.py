"""Builders: names, sizes, types, and what is said where one is off."""

from __future__ import annotations

import builtins
import importlib
from typing import Any

import pytest
import torch

from compile_remat._torch.fake import fake_tensors
from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.builders import Builder
from compile_remat.forecast.fake_trace import built, model_bytes
from compile_remat.forecast.zoo import BUILDERS
from tests import planned_models

OURS = "tests.planned_models"


def test_the_names_of_the_zoo() -> None:
    names = "bert-large llama-2-7b llama-2-70b t5-large vit-large resnet-50 unet olmoe-7b sd-unet"
    assert " ".join(BUILDERS) == names
    for name in BUILDERS:
        assert callable(Builder(name).function())


def test_sizes_are_the_builders_own_unless_given() -> None:
    assert Builder(f"{OURS}:llama").sizes() == {"batch": 2, "seq": 128}
    assert Builder(planned_models.llama, batch=7, seq=32).sizes() == {"batch": 7, "seq": 32}
    assert Builder("bert-large").sizes() == {"batch": 64, "seq": 512}
    assert Builder("llama-2-7b").sizes() == {"batch": 2, "seq": 4096}  # 8,192 tokens
    assert Builder("llama-2-70b").sizes() == {"batch": 1, "seq": 4096}


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (Builder("bert-larg"), 'Did you mean "bert-large"?'),
        (Builder("no_such_module_at_all:build"), "there is no module no_such_module_at_all"),
        (Builder(f"{OURS}:nothing"), "has no function 'nothing'"),
        (Builder("resnet-50", seq=3), "seq = 3: the builder resnet-50 takes no seq"),
        (Builder(f"{OURS}:llama", batch=0), "batch = 0: must be at least 1"),
        (Builder(f"{OURS}:needs_batch"), "needs a batch"),
    ],
)
def test_what_is_off_is_said(builder: Builder, text: str) -> None:
    with pytest.raises(ConfigError, match=text.replace("?", r"\?")):
        builder.sizes()


def test_a_type_is_checked() -> None:
    with pytest.raises(ConfigError, match="no such type"):
        _ = Builder("resnet-50", dtype="bf15").torch_dtype


def test_a_builder_returns_a_module_and_inputs() -> None:
    with fake_tensors(), pytest.raises(RematError, match="has to return a module and its inputs, not int"):
        Builder(f"{OURS}:no_model").build()


def test_tensors_have_the_type_that_was_asked_for_and_no_data() -> None:
    before = torch.get_default_dtype()
    model, (tokens, _) = built(Builder(f"{OURS}:llama", dtype="bf16"))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} and tokens.dtype is torch.int64
    assert type(next(model.parameters())).__name__ == "FakeTensor" and model.training
    assert torch.get_default_dtype() is before


def test_a_builder_may_ask_for_numbers_and_gets_zero() -> None:
    model, _ = built(Builder(f"{OURS}:truncated"))
    assert model.rate == 0.0 and model.weight.shape == (8, 8)


def test_bytes_of_a_model() -> None:
    layer = 64 * 64 * (3 + 1 + 2 + 2 + 2) + 2 * 64
    parameters = 2 * (2 * layer + 2 * 256 * 64)  # bf16
    assert model_bytes(*built(Builder(f"{OURS}:llama", dtype="bf16"))) == (parameters, parameters, 2 * 2 * 128 * 8)
    kept, trainable, _ = model_bytes(*built(Builder(f"{OURS}:frozen")))
    assert kept == 4 * (64 + 8) and trainable == 0


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            raise ImportError("No module named 'transformers'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", absent)
    with fake_tensors(), pytest.raises(RematError, match=r'pip install "compile-remat\[models\]"'):
        Builder("bert-large").build()


# -- the zoo ------------------------------------------------------------------------------------------------------------

PARAMETERS = {
    "bert-large": 335_174_458,
    "llama-2-7b": 6_738_415_616,
    "llama-2-70b": 68_976_648_192,
    "t5-large": 737_668_096,
    "vit-large": 304_326_632,
    "resnet-50": 25_557_032,
    "unet": 31_038_000,
    "olmoe-7b": 6_919_161_856,
    "sd-unet": 859_520_964,
}
"""Published counts, or for the U-Net, whose convolutions are padded and normalised, about 31 million."""


@pytest.mark.parametrize("name", list(BUILDERS))
def test_models_have_their_published_sizes(name: str) -> None:
    if name not in ("resnet-50", "unet", "sd-unet") and importlib.util.find_spec("transformers") is None:
        pytest.skip("the package transformers is not installed (extra: models)")
    model, _ = built(Builder(name))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=2e-3)
