"""The record of a buffer that is live at a peak; plans store it and errors print it."""

from __future__ import annotations

from dataclasses import dataclass

from compile_remat._util.units import format_bytes


@dataclass(frozen=True)
class LiveBuffer:
    """One buffer that is live at a peak, with the module and the source line that compute it.

    Attributes:
        name: Its node in the joint graph.
        nbytes: Its size.
        shape: Its shape; empty for a scalar, and if it is not known.
        dtype: Name of the dtype without "torch.", as in "bfloat16".
        module_path: The module that computes it, such as ``layers.1``; empty if unknown.
        source_line: The user's line that computes it, as ``file.py:12``; empty if unknown.
        role: Reason why the buffer is live: "saved", "recomputed", "output", "gradient", or the tag that demands it.
    """

    name: str
    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    module_path: str = ""
    source_line: str = ""
    role: str = ""

    def __str__(self) -> str:
        dims = ", ".join(str(d) for d in self.shape)
        name = self.name + f" ({self.role})" * bool(self.role)
        where = " ".join(part for part in (self.module_path, f"({self.source_line})" * bool(self.source_line)) if part)
        return f"{format_bytes(self.nbytes):>10}  {self.dtype}[{dims}]  {name}  {where or '(origin unknown)'}"
