"""A callback for the Trainer of transformers, and for the trainers of TRL, which are its subclasses."""

from collections.abc import Callable
from functools import partial
from typing import Any

from compile_remat.errors import needed
from compile_remat.integrations.memory_report import MemoryReport

with needed("transformers", "transformers"):
    from transformers import TrainerCallback


class MemoryCallback(TrainerCallback):
    """Measures a call of the model with the largest batch, prints its peak, and writes the figures beside each logged loss.

        trainer.add_callback(MemoryCallback(trainer))

    From the measured step on, each row with a loss also has the figures of `MemoryReport.figures`, in
    ``trainer.state.log_history`` and in trackers such as TensorBoard and W&B; the progress bar shows the peak beside the budget.

    Args:
        trainer: The Trainer that the callback is added to.  Trackers run before the callbacks that are added later, and a callback
            is told neither who runs it nor the batch: left out, the figures reach `log_history` and later callbacks, but no tracker
            and no bar, and they are of the third call, whatever its batch.
        arguments: Those of `MemoryReport`.
    """

    def __init__(self, trainer: Any = None, **arguments: Any) -> None:
        self.trainer = trainer
        self.report = MemoryReport(**arguments)
        self._begins = False  # the next call of the model is the first of a step
        self._replaced: Callable[..., Any] | None = None  # another tool's `training_step` of the trainer

    def on_train_begin(self, arguments: Any, *_: Any, model: Any = None, **__: Any) -> None:
        """Training starts: from now on this callback runs before the trackers."""
        if model is not None:
            self.report.accumulates(arguments.gradient_accumulation_steps, model.parameters())
        if self.trainer is not None:
            handler = self.trainer.callback_handler
            handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]
            self._replaced = vars(self.trainer).get("training_step")
            self.trainer.training_step = partial(self._training_step, self.trainer.training_step)

    def _training_step(self, wrapped: Callable[..., Any], model: Any, inputs: Any, *more: Any, **others: Any) -> Any:
        """The trainer's own `training_step`, which gets the batch."""
        if self._begins:
            self._begins = False
            self.report.begin(inputs)
        return wrapped(model, inputs, *more, **others)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Training is over: the trainer has its own method again."""
        if self.trainer is not None:
            vars(self.trainer).pop("training_step", None)
            if self._replaced is not None:
                self.trainer.training_step = self._replaced

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The first forward of a step comes."""
        self._begins = True
        if self.trainer is None:
            self.report.begin()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """A backward has run whose gradients are accumulated."""
        self.report.end()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        """The last backward of a step has run."""
        self.report.end()

    def on_log(
        self, arguments: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **others: Any
    ) -> None:
        """A row is logged: `logs` is what trackers get, and `log_history` has a copy of it already."""
        figures = self.report.figures()
        if logs is None or "loss" not in logs or not figures:
            return
        logs.update(figures)
        state.log_history[-1].update(figures)
        for other in self.trainer.callback_handler.callbacks if self.trainer is not None else ():
            if (bar := getattr(other, "training_bar", None)) is not None:
                bar.set_postfix_str(self.report.postfix())
