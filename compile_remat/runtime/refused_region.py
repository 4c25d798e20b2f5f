"""A graph with dynamic sizes for which no plan kept the budget at its first call: each later call is planned by its own sizes.

Dynamo keeps the callable that it gets for a graph and calls it at all sizes that its guards admit.  The error of the first call
does not hold for other sizes: at smaller ones there may be a plan, and the lowest reachable peak differs.  Dynamo cannot be
asked to trace the graph again, so this module compiles variants of the graph and checks their guards, as Dynamo would.
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
    """The graph, compiled as if its first call had had certain sizes.

    Attributes:
        serves: Returns True if the guards of this compilation hold at the given sizes.
    """

    region: CompiledRegion
    serves: Callable[[Sizes], bool]


class RefusedRegion:
    """Runs a variant of the graph for each call that has a plan at its sizes; for any other call raises the error of its sizes.

    Args:
        positions: The graph's symbols by name, each with its position among the arguments.
        request: Returns the current request.
        begin: Compiles a variant for these sizes; returns None if that is not possible.
        refused: The request of the first call and its sizes.
        error: The error of the first call.

    Attributes:
        error: The same, without frames.
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
        self.error, self._first_sizes = without_traceback(error), refused[1]
        self._variants: list[Variant] = []

    def __call__(self, *args: Any) -> Any:
        """Run the variant of the graph for these sizes; compiles one if there is none.

        Raises:
            BudgetError: No plan keeps the budget at these sizes.
        """
        if has_fake(args):  # torch itself calls with fake tensors while it compiles
            raise without_traceback(self.error)
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
            other = without_traceback(self.error)
            other.add_note(f"These are the figures of {_text(self._first_sizes)}; no plan was made for {_text(sizes)}.")
            raise other
        self._variants.append(found)
        return found


def _text(sizes: Sizes) -> str:
    return ", ".join(f"{name} = {size}" for name, size in sizes)
