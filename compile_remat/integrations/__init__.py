"""Callbacks that write memory figures into the logs of other tools: a module for each tool, and what they share.

`compile_remat.integrations.transformers` and `compile_remat.integrations.lightning` import their library; nothing else of this
package does.
"""

from compile_remat.integrations.memory_report import MemoryReport

__all__ = ["MemoryReport"]
