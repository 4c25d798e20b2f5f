"""TRL's SFTTrainer inside a memory budget.

    python examples/stacks/trl_sft.py --budget 0.5
    python examples/stacks/trl_sft.py --budget 0.6 --own-loss    # the model's own loss, inside the graph
    python examples/stacks/trl_sft.py --plain

`SFTConfig` turns gradient checkpointing on by default; a plan would obey it, and a fraction would be one of the checkpointed peak.

SFTTrainer computes logits and loss outside of the compiled graphs, in a buffer of its own of 32,768 columns, a row for each token
(4,096 rows at most).  With `--own-loss` the model computes them, and the plan has them; entropy and accuracy are not logged then.
"""

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from datasets import Dataset
from hf_trainer import llama, losses, sequences
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Trainer
from trl import SFTConfig, SFTTrainer

from compile_remat.integrations.transformers import MemoryCallback


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of 256 words: SFTTrainer takes its padding and end from one, also where the data are tokens already."""
    words = {"<pad>": 0, "<eos>": 1, **{f"w{number}": number for number in range(2, 256)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


class OwnLossTrainer(SFTTrainer):
    """An SFTTrainer that takes the loss from the model, as Trainer does, so that logits and loss are inside the graph."""

    def compute_loss(self, *arguments: Any, **more: Any) -> Any:
        """The loss of a batch."""
        return Trainer.compute_loss(self, *arguments, **more)


def trainer(budget: str | float | None, *, own_loss: bool = False, **arguments: Any) -> SFTTrainer:
    """The SFTTrainer of a toy Llama, compiled inside the budget or, where that is None, plainly.

    Args:
        own_loss: Take the loss from the model.
        arguments: Of `SFTConfig`.
    """
    model = llama()
    if budget is None:
        model.compile()
    else:
        model.compile(backend="remat", options={"memory_budget": budget})  # the one line that is new
    given = {
        "output_dir": tempfile.mkdtemp(),
        "gradient_checkpointing": False,  # the plan says what is recomputed
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
        **arguments,
    }
    data = Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in sequences()])
    kind = OwnLossTrainer if own_loss else SFTTrainer
    return kind(model, SFTConfig(**given), train_dataset=data, processing_class=tokenizer())


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train, and print the losses and the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="0.5", help='such as "20GiB", "0.5", "min" (default 0.5)')
    parser.add_argument("--plain", action="store_true", help="plain torch.compile, without a budget")
    parser.add_argument("--own-loss", action="store_true", help="take the loss from the model: logits inside the graph")
    arguments = parser.parse_args(argv)
    run = trainer(None if arguments.plain else arguments.budget, own_loss=arguments.own_loss)
    run.add_callback(MemoryCallback(run))
    run.train()
    print("losses", " ".join(f"{loss:.5f}" for loss in losses(run)))
    return losses(run)


if __name__ == "__main__":
    main()
