"""``compile``: the pipeline as YAML that Kubeflow, Vertex AI and kfp.local run. Equal code gives equal bytes."""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

from kfp import compiler

from components import IMAGE
from pipelines.pipeline import build


def compile_pipeline(image: str = IMAGE) -> str:
    """The compiled pipeline (IR YAML). ``image`` is the container image of all steps."""
    with tempfile.TemporaryDirectory(prefix="satrap-compile-") as folder:
        path = Path(folder) / "pipeline.yaml"
        compiler.Compiler().compile(build(image), str(path))
        return path.read_text(encoding="utf-8")


def ir_digest(text: str) -> str:
    """Hex sha256 of a compiled pipeline: equal digests ran the same steps."""
    return hashlib.sha256(text.encode()).hexdigest()
