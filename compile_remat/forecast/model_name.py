"""Names of models and their sizes, checked without an import of torch or of the user's module."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from compile_remat._util.suggestions import did_you_mean
from compile_remat.errors import ConfigError
from compile_remat.forecast.zoo import BUILDERS


def module_and_function(source: str) -> tuple[str, str]:
    """Returns the module and the function that the name of a model stands for; imports neither.

    Raises:
        ConfigError: It is no name of the zoo and not ``pkg.module:build``, or there is no such module.
    """
    module, colon, function = BUILDERS.get(source, source).partition(":")
    if colon and module.endswith(".py"):
        name = Path(module).with_suffix("").as_posix().removeprefix("/").replace("/", ".")
        raise ConfigError(
            f'{source!r}: a module is imported by its name, not by its file. Did you mean "{name}:{function}"?'
        )
    if not colon or not all(part.isidentifier() for part in module.split(".")):
        raise ConfigError(
            f"{source!r} is no model that can be built. Allowed: {', '.join(BUILDERS)}, or your own as "
            f"pkg.module:build.{did_you_mean(source, BUILDERS)}"
        )
    package = module.partition(".")[0]
    if package not in sys.modules and find_spec(package) is None:
        beside = {path.stem: f"{path.stem}:{function}" for path in Path.cwd().glob("*.py")}
        near = did_you_mean(package, beside)
        raise ConfigError(f"{source!r}: there is no module {package}.{near}")
    return module, function


def check_size(name: str, size: int | None) -> None:
    """Raises ConfigError if a size, such as the batch, is given and below 1."""
    if size is not None and size < 1:
        raise ConfigError(f"{name} = {size}: must be at least 1.")
