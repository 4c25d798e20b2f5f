"""A graph of varying sizes that the budget refused at its first call: each later call is planned for by its own sizes.

Dynamo keeps what it gets for a graph and calls it at all sizes that its guards let in.  The error of the first call says
nothing of them: at smaller sizes there may be a plan, and at others the lowest reachable peak is another one.  Dynamo cannot
be asked to trace the graph again, so that is done here, and so is what Dynamo would do with the guards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from compile_remat._torch.ambient import compiling_as_dynamo_does
from compile_remat._torch.tensor_arguments import has_fake
from compile_remat._util.size_range import Sizes
from compile_remat.errors import BudgetError, RematError, find_error, without_traceback
from compile_remat.planning.request import Request
from compile_remat.runtime.refusals import Refusals
from compile_remat.runtime.region import CompiledRegion


@dataclass(frozen=True)
class Variant:
    """The graph compiled as if certain sizes had been seen first.

    Attributes:
        serves: Whether what was assumed of the sizes then holds at these.
    """

    region: CompiledRegion
    serves: Callable[[Sizes], bool]


class RefusedRegion:
    """Raises the error of its sizes for a call that has no plan; any other call runs a variant of the graph.

    Args:
        positions: Where the arguments of the graph have its symbols, by name.
        request: What to ask for now.
        begin: Compiles a variant for these sizes; None where that cannot be.
        refused: The request of the first call and its sizes.
        error: What it was refused with.
    """

    def __init__(
        self,
        positions: Sequence[tuple[str, int]],
        request: Callable[[], Request],
        begin: Callable[[Request, Sizes], Variant | None],
        refused: tuple[Request, Sizes],
        error: BudgetError,
    ) -> None:
        self._positions, self._request, self._begin = positions, request, begin
        self._refusals = Refusals()
        self._refusals.add(*refused, error)
        self._first, self._first_sizes = without_traceback(error), refused[1]
        self._variants: list[Variant] = []

    def __call__(self, *args: Any) -> Any:
        """Run the graph.

        Raises:
            BudgetError: No plan keeps the budget at these sizes.
        """
        if has_fake(args):  # torch's own call, while it compiles
            raise without_traceback(self._first)
        sizes = tuple((name, args[k]) for name, k in self._positions)
        found = self._known(sizes)
        if found is None:
            with compiling_as_dynamo_does():
                found = self._known(sizes) or self._compiled(sizes)
        return found.region(*args)

    def _known(self, sizes: Sizes) -> Variant | None:
        return next((variant for variant in self._variants if variant.serves(sizes)), None)

    def _compiled(self, sizes: Sizes) -> Variant:
        request = self._request()
        self._refusals.check(request, sizes)
        try:
            found = self._begin(request, sizes)
        except Exception as error:
            refused = find_error(error, BudgetError)
            if refused is None:
                raise find_error(error, RematError) or error from None
            self._refusals.add(request, sizes, refused)
            raise without_traceback(refused) from None
        if found is None:
            other = without_traceback(self._first)
            other.add_note(f"These are the figures of {_text(self._first_sizes)}; no plan was made for {_text(sizes)}.")
            raise other
        self._variants.append(found)
        return found


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes)
