"""Whether a manifest is one: core kinds by Kubernetes' own schemas, JobSet and Kueue by the small ones that come with this package.

Strict: a field that no schema knows is a problem, because a cluster may drop it without a word. Needs the packages of the ``dev`` extra.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

from infra.kube.pods import Manifest

KUBERNETES = "1.37"
_FILES = {"jobset.x-k8s.io/v1alpha2": "jobset.yaml", "kueue.x-k8s.io/v1beta2": "kueue.yaml"}


def problems_of(manifest: Manifest) -> list[str]:
    """What is wrong with a manifest, one line per fault with its place; empty if nothing is."""
    api, kind = str(manifest.get("apiVersion")), str(manifest.get("kind"))
    if api not in _FILES:
        return _core_problems(manifest, f"{kind}")
    tree = _schemas(api)
    if kind not in tree["kinds"]:
        return [f"{kind}: {api} has no such kind among {', '.join(tree['kinds'])}"]
    validator = jsonschema.Draft7Validator({"$defs": tree["$defs"], **tree["kinds"][kind]})
    found = [f"{kind}{error.json_path[1:]}: {error.message}" for error in validator.iter_errors(manifest)]
    if kind == "JobSet" and not found:
        for job in manifest["spec"]["replicatedJobs"]:
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}, "spec": job["template"]["spec"]}
            found += _core_problems(whole, f"JobSet.spec.replicatedJobs[{job['name']}].template")
    return found


def _core_problems(manifest: Manifest, where: str) -> list[str]:
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{where}: {error.message}"]
    except jsonschema.ValidationError as error:
        return [f"{where}{error.json_path[1:]}: {error.message}"]
    return []


@cache
def _schemas(api: str) -> dict[str, Any]:
    text = files("infra.kube").joinpath("schemas", _FILES[api]).read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree
