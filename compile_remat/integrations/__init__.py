"""What the tools that people train with say about memory: a module for each tool, imported by name, and what they share.

`compile_remat.integrations.transformers` and `compile_remat.integrations.lightning` import their library; nothing else of this
package does.
"""

from compile_remat.integrations.memory_report import MemoryReport

__all__ = ["MemoryReport"]
