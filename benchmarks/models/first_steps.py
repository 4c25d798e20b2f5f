"""The models of `benchmarks.first_step`: some of ours, one of them with a graph break, and five of transformers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import models

Step = Callable[[Callable[..., Any]], Tensor]
"""Calls a compiled module, and returns its loss."""
LAYERS, WIDTH, HEADS, TOKENS, BATCH, VOCABULARY = 4, 256, 4, 64, 4, 512


def built(name: str, scale: float) -> tuple[nn.Module, Step]:
    """A module, and a step with it.

    Raises:
        ImportError: The package `transformers` is not installed.
    """
    if name.startswith("transformers "):
        return _of_transformers(name.removeprefix("transformers "))
    case = models.build(name.partition(",")[0], scale=scale)
    module = Halves(case.module) if "graph break" in name else case.module

    def step(compiled: Callable[..., Any]) -> Tensor:
        output: Tensor = compiled(*case.inputs)
        return output if output.ndim == 0 else output.mean()

    return module, step


class Halves(nn.Module):
    """A sequence of blocks with a graph break in its middle.

    Args:
        blocks: An ``nn.Sequential``.
    """

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        parts = list(blocks.children())
        self.first, self.second = nn.Sequential(*parts[: len(parts) // 2]), nn.Sequential(*parts[len(parts) // 2 :])

    def forward(self, x: Tensor) -> Tensor:
        """Both halves."""
        x = self.first(x)
        torch._dynamo.graph_break()
        y: Tensor = self.second(x)
        return y


def _of_transformers(name: str) -> tuple[nn.Module, Step]:
    import transformers as hf

    ids = torch.randint(VOCABULARY, (BATCH, TOKENS))
    text = {"input_ids": ids, "labels": ids}
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    wide = {**sizes, "intermediate_size": 4 * WIDTH}
    module: nn.Module
    if name == "bert":
        module, inputs = hf.BertForMaskedLM(hf.BertConfig(vocab_size=VOCABULARY, **wide)), text
    elif name == "gpt2":
        config = hf.GPT2Config(vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, use_cache=False)
        module, inputs = hf.GPT2LMHeadModel(config), text
    elif name == "llama":
        module, inputs = hf.LlamaForCausalLM(hf.LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **wide)), text
    elif name == "t5":
        small = {"d_model": WIDTH, "d_kv": WIDTH // HEADS, "d_ff": 4 * WIDTH, "num_layers": LAYERS, "num_heads": HEADS}
        t5 = hf.T5Config(vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, **small)
        module, inputs = hf.T5ForConditionalGeneration(t5), text
    else:
        module = hf.ViTForImageClassification(hf.ViTConfig(image_size=64, patch_size=8, num_labels=10, **wide))
        inputs = {"pixel_values": torch.randn(BATCH, 3, 64, 64), "labels": torch.randint(10, (BATCH,))}

    def step(compiled: Callable[..., Any]) -> Tensor:
        loss: Tensor = compiled(**inputs).loss
        return loss

    return module.train(), step
