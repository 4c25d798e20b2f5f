"""Torch's structured log (``TORCH_TRACE``), which tlparse shows.  A private name of ``torch._logging``, same in 2.11 to 2.15."""

from __future__ import annotations

from collections.abc import Callable

from compile_remat._torch.version import private_name

trace_structured = private_name("torch._logging", "trace_structured")


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text to the log of the current compilation; `payload` is called only if the log is written.

    Args:
        name: Name, without suffix, of the file that tlparse writes for the text.
        encoding: ``"json"`` or ``"string"``.
    """
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": encoding}, payload_fn=payload)
