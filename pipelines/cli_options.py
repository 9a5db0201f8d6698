"""Arguments and options that several commands share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

CONFIG = click.argument("config", type=click.Path(path_type=Path))
SET = click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Override one value of CONFIG, e.g. training.epochs=2. May be repeated."
)
ROOT = click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("satrap-runs"),
    show_default=True,
    help="The output.root of the runs.",
)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """An error of the file system that knows no file, as those of a write do, is told of ``place``."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(place)
        raise
