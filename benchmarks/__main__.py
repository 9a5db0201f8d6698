"""Runs the benchmarks, keeps their figures in benchmarks/results, and writes docs/performance.md.

python -m benchmarks                  # rows and end to end, then the page
python -m benchmarks --full           # with 1e8 rows: 20 GiB of memory, half an hour
python -m benchmarks --only report    # the page alone, from the figures there are
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from benchmarks import end_to_end, report, rows
from benchmarks.results import Result

WHAT = ("rows", *end_to_end.PARTS_IN_ORDER, "report")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_const", dest="size", const="quick", help="tiny: shows only that everything runs; no page")
    sizes.add_argument("--full", action="store_const", dest="size", const="full", help="adds 1e8 rows")
    parser.add_argument("--only", choices=WHAT, action="append", help="run these alone; may stand several times")
    given = parser.parse_args()
    size, chosen = given.size or "default", given.only or WHAT
    if "rows" in chosen:
        _run("rows", lambda: rows.measure(size), size)
    for part in end_to_end.PARTS_IN_ORDER:
        if part in chosen:
            _run(part, lambda part=part: end_to_end.measure(end_to_end.SIZES[size], part), size)  # type: ignore[misc]
    if "report" in chosen and size != "quick":
        print(f"written: {report.write()}")


def _run(name: str, measure: Callable[[], Result], size: str) -> None:
    """Measure, print, and keep the figures unless they are of the tiny size."""
    started = time.monotonic()
    result = measure()
    for row in result.rows:
        verdict = {None: "", True: f"  (goal {row.goal})", False: f"  (goal {row.goal}: falls short)"}[row.reached]
        print(f"{row.ratio.median:8.2f}  {row.what}  |  {row.against}{verdict}")
    for missing, why in result.missing.items():
        print(f"without {missing}: {why}")
    print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    if size != "quick":
        result.save()


if __name__ == "__main__":
    main()
