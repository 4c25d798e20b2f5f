"""A callback for the Trainer of transformers, and for the trainers of TRL, which are its subclasses."""

from typing import Any

from compile_remat.errors import needed
from compile_remat.integrations.memory_report import MemoryReport

with needed("transformers", "transformers"):
    from transformers import TrainerCallback


class MemoryCallback(TrainerCallback):
    """Measures one call of the model, prints its peak, and writes the figures beside each logged loss.

        trainer.add_callback(MemoryCallback(trainer))

    From the measured step on, each row with a loss also has the figures of `MemoryReport.figures`, in
    ``trainer.state.log_history`` and in trackers such as TensorBoard and W&B; the progress bar shows the peak beside the budget.

    Args:
        trainer: The Trainer that the callback is added to.  Trackers run before the callbacks that are added later, and a callback
            is not told who runs it: left out, the figures reach `log_history` and later callbacks, but no tracker and no bar.
        arguments: Those of `MemoryReport`.
    """

    def __init__(self, trainer: Any = None, **arguments: Any) -> None:
        self.trainer = trainer
        self.report = MemoryReport(**arguments)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Training starts: from now on this callback runs before the trackers."""
        if self.trainer is not None:
            handler = self.trainer.callback_handler
            handler.callbacks = [self, *(other for other in handler.callbacks if other is not self)]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """The first forward of a step comes."""
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
