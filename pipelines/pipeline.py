"""The pipeline: which step follows which.

::

    preprocess -> validate --+
                             +-> train -> evaluate -> register        and, whatever happened: release
    provision ---------------+

kfp.local runs one step after the other: preprocess, provision, validate and so on; steps that a failed one is not before still run.

The configuration travels as one JSON text, because kfp.local turns integers inside structures into floats. There are no outputs: kfp
allows none inside an exit handler, so results go to the run's directory and the registry. No task is cached: each writes into the
directory of its run, and ``preprocess`` has its own reuse by content.
"""

from typing import Any

from kfp import dsl

from components import IMAGE
from components.evaluate import evaluate
from components.preprocess import preprocess
from components.provision import provision
from components.register import register
from components.release import release
from components.train import train
from components.validate import validate


def build(image: str = IMAGE) -> Any:
    """The pipeline as kfp's compiler takes it, with every step in one container image."""

    def task(component: Any, **inputs: Any) -> Any:
        return component(**inputs).set_container_image(image).set_caching_options(False)

    @dsl.pipeline(name="satrap", description="Raw events to a registered recommender model.")
    def satrap(config_json: str, run_dir: str, previous: str = "", resume: str = "") -> None:
        run = {"config_json": config_json, "run_dir": run_dir}
        with dsl.ExitHandler(task(release, run_dir=run_dir), name="run"):
            provisioned = task(provision, **run)
            data = task(preprocess, **run).outputs["dataset"]
            validated = task(validate, **run, previous=previous, dataset=data)
            trained = task(train, **run, resume=resume, dataset=data).after(validated, provisioned)
            evaluated = task(evaluate, **run, dataset=data, model=trained.outputs["model"])
            task(register, **run, model=trained.outputs["model"], evaluation=evaluated.outputs["evaluation"])

    return satrap
