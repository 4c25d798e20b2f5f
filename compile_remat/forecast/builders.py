"""Models to plan for: by a name of `zoo`, by ``pkg.module:build``, or as a function.

A builder takes `batch` and, for models of sequences, `seq`, both with defaults, and returns a module and the tuple of its inputs.
It runs under fake tensors, so it must not read values of tensors, and it downloads nothing.  Each output of the module gets a
gradient: a module that returns its loss gives the plan of a training step.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from compile_remat._util.suggestions import did_you_mean
from compile_remat.errors import ConfigError, RematError
from compile_remat.forecast.causes import cause_text
from compile_remat.forecast.model_name import check_size, module_and_function
from compile_remat.forecast.zoo import BUILDERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Values of the option `--dtype`."""


@dataclass(frozen=True)
class Builder:
    """A model to be built, with its sizes.

    Attributes:
        name: Name as the user wrote it.
        source: A name of the zoo, ``pkg.module:build`` or the function itself.
        batch: Samples in a batch; None for the builder's default.
        seq: Tokens of a sequence; None for the builder's default.
        mesh: The device mesh for which the model is built, with the dimensions ``dp`` and ``tp``; a function that takes `mesh`
            gets it, and applies tensor parallelism itself.
        dtype: One of `DTYPES`: torch's default dtype while the model is built.  Tensors with an explicit dtype keep theirs.  None
            leaves torch's default as it is; models of the zoo are then bf16.
    """

    source: str | Callable[..., Any]
    batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    mesh: Any = None

    @property
    def name(self) -> str:
        """The builder's name in messages and tables."""
        return self.source if isinstance(self.source, str) else getattr(self.source, "__name__", repr(self.source))

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Dtype of floating-point parameters and inputs; None if the builder sets it.

        Raises:
            ConfigError: `dtype` is none of `DTYPES`.
        """
        name = self.dtype or ("bf16" if self._is_ours else None)
        if name is not None and name not in DTYPES:
            raise ConfigError(
                f"dtype = {name!r}: no such type. Allowed: {', '.join(DTYPES)}.{did_you_mean(name, DTYPES)}"
            )
        return None if name is None else DTYPES[name]

    @property
    def dtype_name(self) -> str:
        """The dtype's name in messages and tables."""
        return self.dtype or ("bf16" if self._is_ours else "as built")

    @property
    def _is_ours(self) -> bool:
        return isinstance(self.source, str) and self.source in BUILDERS

    def sizes(self) -> dict[str, int]:
        """Returns the sizes that the function is called with, its defaults included.

        Raises:
            ConfigError: The function does not take a size, needs one that is missing, or a size is below 1.
        """
        parameters = inspect.signature(self.function()).parameters
        found: dict[str, int] = {}
        for name, value in (("batch", self.batch), ("seq", self.seq)):
            if name not in parameters:
                if value is not None:
                    raise ConfigError(f"{name} = {value}: the builder {self.name} takes no {name}.")
                continue
            default = parameters[name].default
            size = value if value is not None else default
            if size is inspect.Parameter.empty:
                raise ConfigError(f"the builder {self.name} needs a {name}.")
            check_size(name, size)
            found |= {} if size is None else {name: int(size)}
        return found

    def function(self) -> Callable[..., Any]:
        """Returns the function that builds the model.

        Raises:
            ConfigError: There is no such builder.
            RematError: Its module cannot be imported.
        """
        if not isinstance(self.source, str):
            return self.source
        module_name, attribute = module_and_function(self.source)
        try:
            module = importlib.import_module(module_name)
        except RematError:
            raise
        except Exception as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else None
            if missing is not None and f"{module_name}.".startswith(f"{missing}."):
                raise ConfigError(f"{self.source!r}: there is no module {missing}.") from None
            raise RematError(
                f"{self.source!r}: the module {module_name} cannot be imported: {cause_text(error)}"
            ) from error
        function = getattr(module, attribute, None)
        if not callable(function):
            near = did_you_mean(attribute, [name for name, each in vars(module).items() if inspect.isfunction(each)])
            raise ConfigError(f"{self.source!r}: the module {module_name} has no function {attribute!r}.{near}")
        return function  # type: ignore[no-any-return]

    def build(self) -> tuple[nn.Module, tuple[Any, ...]]:
        """Returns the model, in training mode, and its inputs.  Call it under fake tensors, with `torch_dtype` as the default.

        Raises:
            RematError: A function that is given by its name fails, or it returns something other than a module and its inputs.
        """
        function = self.function()
        takes_mesh = self.mesh is not None and "mesh" in inspect.signature(function).parameters
        keywords = {**self.sizes(), **({"mesh": self.mesh} if takes_mesh else {})}
        try:
            built = function(**keywords)
        except RematError:
            raise
        except Exception as error:
            if not isinstance(self.source, str):
                raise  # a function of the caller's program, which knows its own errors
            given = ", ".join(f"{name}={value}" for name, value in self.sizes().items())
            raise RematError(f"the builder {self.name}({given}) failed: {cause_text(error)}") from error
        if not (isinstance(built, Sequence) and len(built) == 2 and isinstance(built[0], nn.Module)):
            raise RematError(f"the builder {self.name} has to return a module and its inputs, not {_kind_of(built)}.")
        model, inputs = built
        inputs = inputs if isinstance(inputs, tuple | list) else (inputs,)
        return model.train(), tuple(inputs)


def _kind_of(value: object) -> str:
    """Returns the name of a value's type; of a tuple or list also the types of its items."""
    inside = f" of {', '.join(type(item).__name__ for item in value)}" if isinstance(value, list | tuple) else ""
    return type(value).__name__ + inside
