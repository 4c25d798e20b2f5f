"""A callback for Lightning's Trainer."""

from typing import Any

from compile_remat.errors import needed
from compile_remat.integrations.memory_report import MemoryReport

with needed("lightning", "lightning"):
    from lightning.pytorch.callbacks import Callback


class MemoryCallback(Callback):
    """Measures a call of the model with the largest batch, prints its peak, and logs it with the module's own metrics.

        lightning.Trainer(callbacks=[MemoryCallback()])

    The figures of `MemoryReport.figures` stand beside the metrics of each later batch; the progress bar shows the measured peak,
    as `peak_mib`.

    Args:
        arguments: Those of `MemoryReport`.
    """

    def __init__(self, **arguments: Any) -> None:
        self.report = MemoryReport(**arguments)

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Training starts."""
        self.report.accumulates(trainer.accumulate_grad_batches, module.parameters())

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        """A forward comes.  Lightning drops the gradients of the last step behind it; here they go before, and are not measured."""
        if index % trainer.accumulate_grad_batches == 0:
            module.zero_grad(set_to_none=True)
        self.report.begin(batch)

    def on_after_backward(self, *_: Any) -> None:
        """A backward has run."""
        self.report.end()

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        """A batch is done, and its metrics go to the loggers next."""
        figures = self.report.figures()
        if figures:
            module.log_dict(figures)
            module.log("peak_mib", figures["remat_measured_mib"], prog_bar=True, logger=False)
