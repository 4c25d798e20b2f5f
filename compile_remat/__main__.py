"""`python -m compile_remat` is the command `compile-remat`."""

from compile_remat.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
