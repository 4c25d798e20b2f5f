"""The size of a batch, as a tool hands it to a model: a tensor, or tensors in dicts, lists and tuples."""

from collections.abc import Iterator, Mapping
from typing import Any


def batch_bytes(batch: object) -> int:
    """Returns the bytes of the batch's tensors; 0 if it is None, or of a class whose tensors cannot be found."""
    return sum(tensor.nbytes for _, tensor in _tensors(batch))


def batch_text(batch: object) -> str:
    """Returns the name and shape of the batch's largest tensor, the first of several: "input_ids 8 x 64"; else an empty text."""
    name, largest = max(_tensors(batch), key=lambda found: found[1].nbytes, default=("", None))
    return "" if largest is None else f"{name} {' x '.join(map(str, largest.shape))}".strip()


def _tensors(batch: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the tensors, each under the innermost name that it has in a dict."""
    if isinstance(batch, Mapping):
        for key, value in batch.items():
            yield from _tensors(value, str(key))
    elif isinstance(batch, (list, tuple)):
        for value in batch:
            yield from _tensors(value, name)
    elif hasattr(batch, "nbytes") and hasattr(batch, "shape"):
        yield name, batch
