"""Scale by simulation: measures constants here, simulates the whole gang, runs real tables at capacity, and writes docs/scale.md.

python -m benchmarks.scale                # simulations and the page, from the constants on file
python -m benchmarks.scale measure        # this machine's constants; --large: tables of 1e8 rows, too (10 GiB)
python -m benchmarks.scale calibrate      # the costs of the published system that nobody published
python -m benchmarks.scale id-space       # real tables at capacity; --large: 1e8 rows, too
python -m benchmarks.scale simulate --only sizes
python -m benchmarks.scale report
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ProcessPoolExecutor
from datetime import UTC, datetime

from benchmarks.results import machine
from benchmarks.scale import id_space, measure, published, report, study

WHAT = ("measure", "calibrate", "id-space", "simulate", "report")


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", choices=WHAT, help="one part; simulate and report without")
    parser.add_argument("--large", action="store_true", help="tables of 1e8 rows, too: 10 GiB of memory")
    parser.add_argument("--only", choices=tuple(study.PARTS), action="append", help="of simulate; may stand several times")
    parser.add_argument("--processes", type=int, default=2, help="simulations at a time")
    given = parser.parse_args()
    chosen = (given.what,) if given.what else ("simulate", "report")
    if "measure" in chosen:
        print(f"written: {measure.save(measure.measure(large=given.large))}")
    if "calibrate" in chosen:
        published.main()
    if "id-space" in chosen:
        _id_space(large=given.large)
    if "simulate" in chosen:
        with ProcessPoolExecutor(given.processes) as pool:
            for part in given.only or study.PARTS:
                started = time.monotonic()
                study.keep(part, study.PARTS[part](pool.map))
                print(f"{part}: {time.monotonic() - started:.0f} s", flush=True)
    if "report" in chosen:
        print(f"written: {report.write()}")


def _id_space(*, large: bool) -> None:
    """Three seeds for small tables, fewer turnovers for the largest."""
    runs = [id_space.measure(10**6, seed=seed) for seed in study.SEEDS]
    runs += [id_space.measure(10**7, turnovers=2.0, seed=0)]
    if large:
        runs += [id_space.measure(10**8, turnovers=0.3, seed=0)]
    long = id_space.measure(10**6, turnovers=60.0)
    command = "python -m benchmarks.scale id-space" + (" --large" if large else "")
    made = {"date": datetime.now(UTC).date().isoformat(), "command": command, "machine": machine(), "runs": runs, "long": long}
    study.keep("id-space", made)


if __name__ == "__main__":
    main()
