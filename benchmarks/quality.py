"""Does asynchrony cost quality? Trains the same configuration in every mode and as a plain PyTorch program, several seeds, same data.

    python -m benchmarks.quality examples/adult/satrap.yaml --seeds 3 --set training.epochs=1

Prints test AUC and log loss, mean and spread over seeds, and the difference to plain PyTorch in pairs of equal seed; writes JSON with -o.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path

import click
import numpy as np

from benchmarks.plain_pytorch import train_plain
from training.config import Config
from training.config_file import load_config
from training.data.preprocess import preprocess
from training.data.shards import ShardReader
from training.events import EventLog
from training.launcher import train
from training.metrics import binary_metrics
from training.scorer import Scorer

MODES = ("hybrid", "sync", "async")


def train_satrap(config: Config, data_dir: Path, output_dir: Path) -> dict[str, float]:
    """Train with real processes and return test metrics."""
    with EventLog(output_dir / "events.jsonl") as events:
        result = train(config, data_dir, output_dir / "out", events=events)
    with ShardReader.open(data_dir, "test") as reader, Scorer.load(result.checkpoint) as scorer:
        batch = reader.read(0, reader.rows)
        return binary_metrics(scorer.score(batch), batch.label)


def measure(path: Path, overrides: Iterable[str], seeds: int, modes: Iterable[str]) -> dict[str, list[dict[str, float]]]:
    """Metrics per program and seed."""
    overrides = list(overrides)
    results: dict[str, list[dict[str, float]]] = {"plain PyTorch": [], **{mode: [] for mode in modes}}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with EventLog(root / "events.jsonl") as events:
            preprocess(load_config(path, overrides), root / "data", events=events)
        for seed in range(seeds):
            config = load_config(path, [*overrides, f"training.seed={seed}"])
            results["plain PyTorch"].append(train_plain(config, root / "data"))
            for mode in modes:
                config = load_config(path, [*overrides, f"training.seed={seed}", f"training.mode={mode}"])
                results[mode].append(train_satrap(config, root / "data", root / f"{mode}-{seed}"))
    return results


@click.command()
@click.argument("config", type=click.Path(path_type=Path, exists=True))
@click.option("--set", "overrides", multiple=True, help="Override a setting: path=value.")
@click.option("--seeds", default=3, show_default=True)
@click.option("--modes", default=",".join(MODES), show_default=True)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write every figure as JSON.")
def main(config: Path, overrides: tuple[str, ...], seeds: int, modes: str, output: Path | None) -> None:
    """Compare the modes with plain PyTorch."""
    results = measure(config, overrides, seeds, modes.split(","))
    plain = results["plain PyTorch"]
    print(f"{'':14} {'AUC':>18} {'log loss':>18} {'AUC - plain, pairs':>20}")
    for name, runs in results.items():
        auc, loss = (np.array([run[metric] for run in runs]) for metric in ("auc", "log_loss"))
        difference = auc - np.array([run["auc"] for run in plain])
        figures = " ".join(f"{values.mean():9.5f} +-{values.std():7.5f}" for values in (auc, loss))
        print(f"{name:14} {figures} {difference.mean():+11.5f} +-{difference.std():7.5f}")
    if output:
        output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
