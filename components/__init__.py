"""One file = one step of the pipeline: a signature, a docstring, one call into the module that does the work, and metadata.

Bodies are copied into the compiled pipeline and run in a bare module, so they import all they use. No annotations from ``__future__``:
kfp reads the signatures as objects.
"""

from collections.abc import Callable
from typing import Any

from kfp import dsl

IMAGE = "satrap-python:0.1.0"
"""Container image of every step unless ``satrap compile --image`` names another: this project installed into a Python image."""


def component(function: Callable[..., Any]) -> Any:
    """Make a lightweight component that installs nothing when it runs: the image, or here the environment, holds the project."""
    return dsl.component(function, base_image=IMAGE, install_kfp_package=False)
