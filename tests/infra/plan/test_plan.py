"""The whole way of ``satrap plan``: from a configuration to text, JSON and page, and what it refuses."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from infra.gang import gang_of
from infra.plan import plan as plan_module
from infra.plan.html import plan_html
from infra.plan.plan import PRESETS, machine_for, make_plan, preset_config
from infra.plan.text import plan_text
from training.errors import CapacityError, ConfigError

GIB = 1024.0**3


def planned(preset, *overrides, machine=None, **options):
    config = preset_config(preset, overrides)
    return make_plan(config, machine=machine_for(config, machine, preset=preset), **options)


@pytest.fixture
def satrap(tmp_path):
    def run(*arguments):
        command = [sys.executable, "-m", "pipelines.cli", "plan", *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)

    return run


def refused(result, status=2):
    """The one line of a refusal."""
    assert result.returncode == status, result.stdout + result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    return line


# ---- the seed's cluster


def test_the_published_cluster_is_what_the_preset_comes_to():
    found = planned("hundred_trillion").estimate
    pools = {pool.role: (pool.processes, pool.machines, pool.machine.name) for pool in found.shape.pools}
    assert pools["parameter_server"] == (30, 30, "m2-ultramem-416")
    assert pools["nn_worker"] == (64, 8, "a2-highgpu-8g")
    assert sum(pools[role][1] for role in ("embedding_worker", "data_loader")) * 30 == 3000
    assert found.shape.machines == 138
    assert sum(table.parameters for table in found.tables) == 10**14
    assert found.shape.usd_per_hour == pytest.approx(30 * 84.22 + 8 * 29.3871 + 100 * 1.5661)


def test_a_hundred_trillion_parameters_fit_as_float16_from_width_32_on_and_never_as_float32():
    widths = planned("hundred_trillion").alternatives.widths
    fits = {(one.row_dtype, one.dim): one.fits_as_is for one in widths}
    assert {dim for (row_dtype, dim), fit in fits.items() if row_dtype == "float16" and fit} == {32, 64, 128, 256}
    assert not any(fit for (row_dtype, _), fit in fits.items() if row_dtype == "float32")
    assert all(one.optimizer == "rowwise_adagrad" for one in widths)


def test_optimizers_with_state_per_value_do_not_fit_there_and_the_servers_that_would_are_named():
    formats = {(one.row_dtype, one.optimizer): one for one in planned("hundred_trillion").alternatives.formats}
    assert {key for key, one in formats.items() if one.fits_as_is} == {("float16", "sgd"), ("float16", "rowwise_adagrad")}
    assert formats["float32", "rowwise_adagrad"].servers > 30
    for one in formats.values():
        again = planned("hundred_trillion", f"embedding.row_dtype={one.row_dtype}", f"embedding.optimizer.name={one.optimizer}")
        enough = planned(
            "hundred_trillion",
            f"embedding.row_dtype={one.row_dtype}",
            f"embedding.optimizer.name={one.optimizer}",
            f"training.roles.parameter_server={one.servers}",
        )
        short = planned(
            "hundred_trillion",
            f"embedding.row_dtype={one.row_dtype}",
            f"embedding.optimizer.name={one.optimizer}",
            f"training.roles.parameter_server={one.servers - 1}",
        )
        assert again.estimate.fits == one.fits_as_is
        assert enough.estimate.fits
        assert not short.estimate.fits
        assert enough.estimate.shape.usd_per_hour == pytest.approx(one.usd_per_hour)


def test_the_preset_is_planned_within_two_seconds_and_without_heavy_imports(satrap):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    shown = satrap("--preset", "hundred_trillion")
    assert shown.returncode == 0, shown.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2.0
    assert "138 machines" in shown.stdout
    assert re.search(r"^ +32 +[\d.]+ +[\d.]+ TB +yes +[\d.]+ +[\d.]+ TB +no$", shown.stdout, re.MULTILINE)
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom pipelines.cli import cli\n"
        "assert CliRunner().invoke(cli, ['plan', '--preset', 'hundred_trillion']).exit_code == 0\n"
        "print(sorted({'torch', 'numba', 'kfp', 'pandas', 'matplotlib', 'grpc', 'google.api_core', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# ---- presets and configurations take one way


def test_the_presets_are_the_files_and_those_that_help_names(satrap):
    files = {path.stem for path in Path(plan_module.__file__).with_name("presets").iterdir()}
    assert set(PRESETS) == files
    assert all(name in satrap("--help").stdout for name in files)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_a_configuration_that_fits_and_can_be_shown(preset):
    plan = planned(preset, machine=None if preset != "laptop" else "c2-standard-8")
    assert plan.problem is None
    assert preset_config(preset).name == preset
    text, page, record = plan_text(plan), plan_html(plan), json.loads(plan.to_json())
    assert max(map(len, text.splitlines())) < 260
    assert record["fits"]
    assert record["samples_per_second"] > 0
    assert page.count("<figure>") == (4 if preset in ("gke_small", "hundred_trillion") else 1)
    assert not re.search(r"<script|href=\"http|src=", page)
    if preset_config(preset).cluster.pools:
        from datetime import UTC, datetime

        gang = gang_of(preset_config(preset), "x", now=datetime(2026, 12, 1, tzinfo=UTC))
        assert sum(role.pods for role in gang.roles) == plan.estimate.shape.machines


def test_a_preset_written_to_a_file_gives_the_same_plan(satrap, tmp_path):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(preset_config("gke_small").to_dict()))
    mine, preset = satrap("mine.yaml", "--json", "mine.json"), satrap("--preset", "gke_small", "--json", "preset.json", "--html", "p.html")
    assert mine.returncode == preset.returncode == 0, mine.stderr + preset.stderr
    assert json.loads((tmp_path / "mine.json").read_text()) == json.loads((tmp_path / "preset.json").read_text())
    assert mine.stdout.replace("mine.json", "preset.json\np.html") == preset.stdout
    assert (tmp_path / "p.html").read_text().startswith("<!doctype html>")


def test_a_value_set_on_the_command_line_is_planned_with():
    assert planned("gke_small", "embedding.dim=128", "model.hidden=[8]").estimate.tables[0].dim == 128


# ---- length and price of a run


def test_a_run_costs_its_hours_times_the_price_of_its_machines():
    plan = planned("gke_small", "training.max_steps=null", "training.epochs=3", records=10_000_000)
    run, found = plan.estimate.run, plan.estimate
    assert run.steps == 3 * -(-10_000_000 // (2 * 4096))
    assert run.checkpoints == 1
    seconds = run.steps * found.throughput.step_seconds + found.checkpoint_seconds
    assert run.hours == pytest.approx(seconds / 3600)
    assert run.usd == pytest.approx(run.hours * found.shape.usd_per_hour)


def test_checkpoints_on_the_way_are_paid_for():
    every = planned("gke_small", "training.checkpoint_every_steps=1000").estimate
    last = planned("gke_small").estimate
    assert every.run.checkpoints == 101
    assert (every.run.hours - last.run.hours) * 3600 == pytest.approx(100 * last.checkpoint_seconds)


def test_a_run_of_unknown_length_has_its_ceiling_named():
    text = plan_text(planned("gke_small", "training.max_steps=null"))
    assert re.search(r"^run +length unknown: give --data.*at most 12 h, 163\.\d\d USD", text, re.MULTILINE)


def test_a_run_that_outlives_its_label_is_told_so():
    assert "longer than cluster.max_run_hours (0.5)" in plan_text(planned("gke_small", "cluster.max_run_hours=0.5"))


# ---- refusals


def test_what_does_not_fit_is_shown_and_refused_with_what_would(satrap):
    result = satrap("--preset", "hundred_trillion", "--set", "embedding.row_dtype=float32")
    line = refused(result, status=1)
    assert "DOES NOT FIT" in result.stdout
    match = re.search(r"raise training.roles.parameter_server from 30 to (\d+), or lower embedding.capacity_rows.* to ([\d,]+)", line)
    assert match, line
    more = planned("hundred_trillion", "embedding.row_dtype=float32", f"training.roles.parameter_server={match[1]}")
    fewer = planned("hundred_trillion", "embedding.row_dtype=float32", f"embedding.capacity_rows={match[2].replace(',', '')}")
    more.check()
    fewer.check()
    assert "float16" in line
    assert "which fits" in line


def test_one_machine_that_is_too_small_is_refused_without_servers_to_add():
    plan = planned("laptop", "embedding.capacity_rows=2000000000", machine="c2-standard-4")
    with pytest.raises(CapacityError, match=r"c2-standard-4.*lower embedding\.capacity_rows"):
        plan.check()
    assert "parameter_server from" not in plan.problem


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give either a CONFIG or --preset"),
        (["x.yaml", "--preset", "laptop"], "give either a CONFIG or --preset"),
        (["--preset", "huge"], "--preset huge: no such preset; choose from laptop, one_gpu, gke_small, hundred_trillion"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        (["broken.yaml"], "broken.yaml: not valid YAML"),
        (["--preset", "laptop", "--set", "embedding.dimension=3"], "embedding.dimension: unknown key"),
        (["--preset", "laptop", "--machine", "m2-ultramem-417"], "--machine: 'm2-ultramem-417' is not in the catalogue"),
        (["--preset", "gke_small", "--machine", "m2-ultramem-416"], "--machine m2-ultramem-416: only for a run on one machine"),
        (
            ["--preset", "gke_small", "--set", "cluster.pools.parameter_server.machine_type=m9-huge-1"],
            "cluster.pools.parameter_server.machine_type: 'm9-huge-1' is not in the catalogue",
        ),
        (
            ["--preset", "gke_small", "--set", "cluster.pools.parameter_server.tier_1=true"],
            "cluster.pools.parameter_server.tier_1: the catalogue knows no Tier_1 networking of c4-highmem-32",
        ),
        (
            ["--preset", "hundred_trillion", "--set", "cluster.pools.nn_worker.processes_per_machine=9"],
            "cluster.pools.nn_worker.processes_per_machine: 9, but a2-highgpu-8g has 8 GPUs",
        ),
    ],
)
def test_wrong_input_is_one_line_and_status_2(satrap, tmp_path, arguments, told):
    (tmp_path / "broken.yaml").write_text("a: [1")
    assert told in refused(satrap(*arguments))


def test_a_data_directory_without_manifest_is_one_line(satrap, tmp_path):
    assert "no manifest.json" in refused(satrap("--preset", "laptop", "--data", str(tmp_path)), status=1)


def test_a_file_that_cannot_be_written_is_one_line(satrap, tmp_path):
    assert str(tmp_path / "no" / "x.json") in refused(
        satrap("--preset", "laptop", "--machine", "c2-standard-8", "--json", str(tmp_path / "no" / "x.json")), status=1
    )


def test_a_preset_with_a_machine_of_its_own_can_be_planned_for_another():
    assert planned("one_gpu").estimate.servers.machine.name == "a2-highgpu-1g"
    assert planned("one_gpu", machine="a3-highgpu-8g").estimate.servers.machine.name == "a3-highgpu-8g"
    with pytest.raises(ConfigError, match="--machine"):
        machine_for(preset_config("gke_small"), "c2-standard-8")
