"""The Hugging Face Trainer inside a memory budget, with a callback that reports what a step takes.

    python examples/stacks/hf_trainer.py --budget 0.5              # model.compile before the Trainer
    python examples/stacks/hf_trainer.py --budget 0.5 --install    # the Trainer compiles: TrainingArguments(torch_compile=True)
    python examples/stacks/hf_trainer.py --plain                   # plain torch.compile
    python examples/stacks/hf_trainer.py --budget 0.5 --lora       # PEFT's LoRA adapters, the other parameters frozen
    python examples/stacks/hf_trainer.py --budget min --slices auto  # the graph returns the loss alone: logits in slices

`TrainingArguments(torch_compile_backend="remat")` is a ValueError of Accelerate, which has a fixed list of backends.
"""

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import compile_remat
from compile_remat.integrations.transformers import MemoryCallback


class LossAlone(torch.nn.Module):
    """A model of transformers that returns its loss and no logits, which could not be computed in slices otherwise."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        """The loss, under the name by which the Trainer looks for it."""
        return {"loss": self.model(**batch).loss}


class LossTrainer(Trainer):
    """A Trainer whose training steps run a compiled `LossAlone`; evaluation, which asks for logits, runs the model as it is.

    The model stays the Trainer's own: checkpoints have the names that they always have.
    """

    def __init__(self, *arguments: Any, options: dict[str, Any], **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.options = options
        self.compiled: Any = None

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        """The loss of a batch, and what the model returns where that is asked for."""
        if return_outputs:
            return super().compute_loss(model, inputs, return_outputs, **more)
        if self.compiled is None:  # each size of a batch gets code of its own: rows of dynamic sizes are not sliced
            self.compiled = torch.compile(LossAlone(model), backend="remat", dynamic=False, options=self.options)
        return super().compute_loss(self.compiled, inputs, **more)


def llama() -> PreTrainedModel:
    """Two layers of width 64; the loss is computed inside the model, and so inside the graph."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def with_lora(model: PreTrainedModel) -> Any:
    """The model with adapters of rank 4 on its attention, and nothing else to train."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def sequences(number: int = 20, length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Random tokens: with batches of 8, the last batch of an epoch has 4."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (number, length), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(
    model: Any, budget: str | float | None, *, install: bool = False, slices: str = "off", **arguments: Any
) -> Trainer:
    """The Trainer of a model that is compiled inside the budget, or plainly where that is None.

    Args:
        install: Leave the compilation to the Trainer, which accepts no backend but Inductor.
        slices: With another value than `off`, training steps return the loss alone.
        arguments: Of `TrainingArguments`.
    """
    if install:
        compile_remat.install(memory_budget=budget)
        arguments |= {"torch_compile": True}
    elif slices != "off":
        options = {"memory_budget": budget, "slices": slices}
    elif budget is None:
        model.compile()
    else:
        model.compile(backend="remat", options={"memory_budget": budget})  # the one line that is new
    given = {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": not torch.cuda.is_available(),
        **arguments,
    }
    data = sequences()
    kind: Any = Trainer if slices == "off" else partial(LossTrainer, options=options)
    return kind(model, TrainingArguments(**given), train_dataset=data, eval_dataset=data[:8])


def losses(run: Trainer) -> list[float]:
    """What the Trainer logged for its steps and evaluations, in order."""
    rows = run.state.log_history
    return [row[name] for row in rows for name in ("loss", "eval_loss") if name in row]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    parser.add_argument("--install", action="store_true", help="compile_remat.install, and let the Trainer compile")
    parser.add_argument("--lora", action="store_true", help="train LoRA adapters alone")
    parser.add_argument(
        "--slices", default="off", help='rows of the logits in slices: "auto" or a number (default off)'
    )
    parser.add_argument("--bf16", action="store_true", help="the Trainer's bf16: autocast")
    arguments = parser.parse_args(argv)
    model = with_lora(llama()) if arguments.lora else llama()
    budget = None if arguments.plain else arguments.budget
    run = trainer(model, budget, install=arguments.install, slices=arguments.slices, bf16=arguments.bf16)
    run.add_callback(MemoryCallback(run))
    run.train()
    print("losses", " ".join(f"{loss:.5f}" for loss in losses(run)))
    return losses(run)


if __name__ == "__main__":
    main()
