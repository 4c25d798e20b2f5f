"""Passes of the user: callables that change a graph, each with an identity for caches."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


def _unpickled(graph: Any) -> None:
    raise RuntimeError("a pass of joint_passes that was unpickled has its name and uuid alone and cannot run")


@dataclass(frozen=True)
class UserPass:
    """One pass.

    Attributes:
        run: Changes the graph that it is called with.
        name: The name of its function or class.
        uuid: Hash of the identity that `uuid()` of the pass returned; None without such an identity.
    """

    run: Callable[[Any], object] = field(compare=False)
    name: str
    uuid: str | None = None

    @staticmethod
    def of(given: Callable[[Any], object]) -> UserPass:
        """Returns a callable as a pass.

        Raises:
            Exception: Any error of its `uuid()`, or of pickling the identity.
        """
        name = getattr(given, "__qualname__", type(given).__qualname__)
        identify = getattr(given, "uuid", None)
        identity = identify() if callable(identify) else None
        uuid = None if identity is None else hashlib.sha256(pickle.dumps(identity, protocol=4)).hexdigest()
        return UserPass(given, name, uuid)

    def __reduce__(self) -> tuple[Any, ...]:
        """Returns the pass without its function: torch pickles it as a part of cache keys, and its state is no part of them."""
        return UserPass, (_unpickled, self.name, self.uuid)

    def __deepcopy__(self, memo: dict[int, Any]) -> UserPass:
        """Returns this object: Inductor copies its options, and the user's pass may hold a state."""
        return self
