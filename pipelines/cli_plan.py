"""``satrap plan``: what a configuration needs and costs, before anything is made."""

from __future__ import annotations

from pathlib import Path

import click

from pipelines.cli_options import SET, writing
from training.errors import ConfigError


@click.command()
@click.argument("config", type=click.Path(path_type=Path), required=False)
@SET
@click.option("--preset", help="Instead of CONFIG: laptop, one_gpu, gke_small or hundred_trillion.")
@click.option("--data", type=click.Path(path_type=Path), help="Preprocessed data directory, for the records and ids of its manifest.")
@click.option("--records", type=click.IntRange(min=1), help="Records of the train split, where there is no data directory yet.")
@click.option("--machine", metavar="TYPE", help="For a run on one machine: plan for this type of the catalogue instead of this machine.")
@click.option(
    "--write-config",
    "config_file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the configuration that was planned, as YAML, to start from.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the whole plan as JSON.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Also write it as a page with plots.")
def plan(
    config: Path | None,
    overrides: tuple[str, ...],
    preset: str | None,
    data: Path | None,
    records: int | None,
    machine: str | None,
    **files: Path | None,
) -> None:
    """Work out memory, machines, speed and cost of a configuration, beside alternatives; nothing is started or asked."""
    if (config is None) == (preset is None):
        raise ConfigError(["satrap plan: give either a CONFIG or --preset NAME"])
    from infra.plan.plan import machine_for, make_plan, preset_config
    from infra.plan.text import plan_text
    from training.config_file import load_config

    loaded = preset_config(preset, overrides) if preset is not None else load_config(config, overrides)  # type: ignore[arg-type]
    made = make_plan(loaded, data=data, records=records, machine=machine_for(loaded, machine, preset=preset))
    click.echo(plan_text(made))
    if config_file := files["config_file"]:
        import yaml

        _write(config_file, yaml.safe_dump(loaded.to_dict(), sort_keys=False, allow_unicode=True))
    if json_file := files["json_file"]:
        _write(json_file, made.to_json())
    if html_file := files["html_file"]:
        from infra.plan.html import plan_html

        _write(html_file, plan_html(made))
    made.check()


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.write_text(text, encoding="utf-8")
    click.echo(str(path))
