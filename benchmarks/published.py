"""Results of the literature on planning memory, rebuilt, with our plan beside them under our cost model of the same device.

    python -m benchmarks.published [--source monet] [--network U-Net] [--toy] [--json OUT] [--pictures FOLDER]
    python -m benchmarks.published --show benchmarks/results/published.json [--pictures docs/images]

Nothing is compiled and nothing runs.  A row is a point of a source, its peak and its time over the same source's training
without a plan, and beside it the time of our plan within that peak, and the lowest peak of ours that takes no longer.
`benchmarks/literature/sources.py` and the text above the tables of docs/results.md say what each source counts, where its figures
stand, and what could not be found or rebuilt.  Rows are stored in the file of `--json` as each network is done; the next run
skips the networks that are stored.  `--show` plans nothing and prints a stored file; `--pictures` draws the frontiers of
three networks.  The exit status is 1 if ours is worse on a row that can be compared.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from benchmarks.common import harness
from benchmarks.literature import layer_plans, pictures, random_graphs, traced
from benchmarks.literature.rows import Row, Store, row_of, stored
from benchmarks.literature.sources import SOURCES
from benchmarks.literature.tables import misses, summary, tables
from benchmarks.models.layered import DRAWINGS

Job = Callable[[], Iterator[Row]]

TOY_JOBS = {("checkmate", "VGG19"), ("chen", "16 equal layers"), ("moccasin", "G1, one order")}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(argv)
    if arguments.show is not None:
        rows = [row_of(fields) for fields in stored(arguments.show)]
    else:
        head = harness.header(arguments.device)
        harness.print_header(head)
        rows = _planned(arguments, Store(arguments.json, head))
    for source in SOURCES:
        of_source = [row for row in rows if row.source == source]
        for table in tables(of_source):
            print(f"{SOURCES[source].title}\n\n{harness.ascii_table(*table)}\n")
        if of_source:
            print(f"{summary(of_source)}\n")
    if arguments.pictures is not None:
        harness.progress(f"wrote {', '.join(map(str, pictures.draw(rows, arguments.pictures)))}")
    return int(bool(misses(rows)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = harness.parser("the published record beside ours")
    parser.add_argument("--source", action="append", choices=list(SOURCES), help="may be repeated; default all")
    parser.add_argument("--network", action="append", help="as the rows name it; may be repeated; default all")
    parser.add_argument("--show", type=Path, metavar="JSON", help="print a stored file, plan nothing")
    parser.add_argument(
        "--pictures", type=Path, metavar="FOLDER", help="draw frontiers, PNG and SVG (needs matplotlib)"
    )
    return parser.parse_args(argv)


def _planned(arguments: argparse.Namespace, store: Store) -> list[Row]:
    for (source, network), job in jobs(arguments.seed).items():
        is_asked = source in (arguments.source or SOURCES) and network in (arguments.network or [network])
        if not is_asked or store.has(source, network) or (arguments.toy and (source, network) not in TOY_JOBS):
            continue
        harness.progress(f"{source}, {network}: planning")
        store.put(job())
    return store.rows


def jobs(seed: int) -> dict[tuple[str, str], Job]:
    """Functions that plan each network, by the names of source and network in the rows, in the order of the sources."""
    found: dict[tuple[str, str], Job] = {}
    for name, record in traced.MONET.items():
        found["monet", name] = partial(traced.record_rows, "monet", name, record)
    for name, batch in layer_plans.BATCHES.items():
        found["checkmate", name] = partial(layer_plans.batch_rows, name, batch)
    for name, batch in layer_plans.FIGURE_BATCHES.items():
        found["checkmate", f"{name}, batch {batch}"] = partial(layer_plans.figure_rows, name)
    for name, drawing in DRAWINGS.items():
        if drawing.nodes <= random_graphs.MOST_NODES:
            found["moccasin", f"{name}, one order"] = partial(random_graphs.order_rows, name, seed)
        found["moccasin", f"{name}, training"] = partial(random_graphs.training_rows, name, seed)
    for source, claim in traced.CLAIMS.items():
        for name in claim.networks:
            found[source, name] = partial(traced.claim_rows, claim, name)
    for count in layer_plans.CHAINS:
        found["chen", f"{count} equal layers"] = partial(layer_plans.chain_rows, count)
    return found


if __name__ == "__main__":
    sys.exit(main())
