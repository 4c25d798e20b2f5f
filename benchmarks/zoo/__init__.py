"""Architectures that we did not write, of the libraries that people use, at toy width and real depth, with random weights.

pip install -e '.[zoo]'
python -m benchmarks.zoo --help
"""

from benchmarks.zoo import decoders, dense, diffusion, encoders, flows, graphs, pairs, vision, written
from benchmarks.zoo.building import Entry

_BY_LIBRARY = (encoders, decoders, pairs, vision, dense, diffusion, graphs, written, flows)


def _mixed() -> tuple[Entry, ...]:
    """All entries, one of each module in turn, so that a run that was ended has seen all families."""
    left = [list(module.ENTRIES) for module in _BY_LIBRARY]
    found: list[Entry] = []
    while any(left):
        found += [entries.pop(0) for entries in left if entries]
    return tuple(found)


ENTRIES = _mixed()

SAMPLE = (
    ("bert", "min"),
    ("x_transformer", "0.4"),
    ("t5", "min"),
    ("efficientnet_b0", "max"),
    ("yolos", "0.6"),
    ("dit", "max"),
    ("gin", "min"),
    ("pinn_burgers", "min"),
    ("gradient_penalty", "min"),
    ("gpt2", "0.6"),
    ("mixtral", "min"),
    ("mamba", "min"),
    ("wav2vec2", "max"),
    ("resnet18", "min"),
    ("swin", "min"),
    ("conv_lstm", "min"),
)
"""Sixteen rows for every change: a model and a setting each, of all families, together at most a quarter of an hour."""


def entry_of(name: str) -> Entry:
    """The entry of that name.

    Raises:
        KeyError: There is none.
    """
    found = next((entry for entry in ENTRIES if entry.name == name), None)
    if found is None:
        raise KeyError(f"no architecture {name!r} in the zoo; there are: {', '.join(entry.name for entry in ENTRIES)}")
    return found
