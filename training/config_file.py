"""Reading the YAML file of a run: overrides, path resolution, and errors a person can act on."""

from __future__ import annotations

import difflib
import json
import re
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from training.config import Config
from training.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Read a YAML file, apply ``a.b=value`` overrides, validate.

    Data paths are resolved against the file's directory. Raises ``ConfigError`` listing every problem at once.
    """
    path = Path(path)
    tree = _load_yaml(path)
    for override in overrides:
        _apply(tree, override)
    data = tree.get("data")
    if isinstance(data, dict) and isinstance(data.get("paths"), list):
        data["paths"] = [_resolved(p, path.parent) if isinstance(p, str) else p for p in data["paths"]]
    return _validated(tree)


def parse_config(text: str) -> Config:
    """Inverse of ``Config.to_json``; raises ``ConfigError``."""
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError([f"the configuration is not valid JSON: {error}"]) from None
    return _validated(tree)


def _validated(tree: Any) -> Config:
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        problems: list[str] = []
        for details in error.errors():
            problems.extend(_explain(details))
        raise ConfigError(problems) from None


def _load_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([f"{path}: no such file; give the path of a YAML file such as examples/adult/satrap.yaml"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{path}: is not text; give a YAML file such as examples/adult/satrap.yaml"]) from None
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror or error}"]) from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError([f"{path}: not valid YAML: {' '.join(str(error).split())}"]) from None
    if not isinstance(tree, dict):
        raise ConfigError(
            [f"{path}: holds {'nothing' if tree is None else type(tree).__name__}; expected sections {sorted(_keys(Config))}"]
        )
    return tree


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key given twice and reads 1e-5 as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-5 for text because it has no dot; people write it all the time.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError([f"--set {override}: expected path=value, for example training.batch_size=1024"])
    try:
        value = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError:
        raise ConfigError([f"--set {override}: the value is not valid YAML"]) from None
    node: Any = tree
    for i, key in enumerate(keys[:-1]):
        node = _child(node, key, keys[: i + 1], override)
    if isinstance(node, list):
        node[_index(node, keys[-1], override)] = value
    else:
        node[keys[-1]] = value


def _child(node: Any, key: str, path: list[str], override: str) -> Any:
    if isinstance(node, list):
        return node[_index(node, key, override)]
    child = node.setdefault(key, {})
    if child is None:
        child = node[key] = {}
    if not isinstance(child, dict | list):
        raise ConfigError([f"--set {override}: {'.'.join(path)} is the value {child!r}, not a section"])
    return child


def _index(node: list[Any], key: str, override: str) -> int:
    if key.isdigit() and int(key) < len(node):
        return int(key)
    raise ConfigError([f"--set {override}: {key!r} is not an index of a list of {len(node)}; use 0 to {len(node) - 1}"])


def _resolved(pattern: str, folder: Path) -> str:
    if "://" in pattern:
        return pattern
    return str((folder / pattern).absolute()) if not Path(pattern).is_absolute() else pattern


def _explain(details: ErrorDetails) -> list[str]:
    kind, raw = details["type"], details["input"]
    path = ".".join(str(part) for part in details["loc"] if not _is_branch(str(part)))
    if kind == "value_error":
        text = str(details["ctx"]["error"])
        return [f"{path}.{line}" if path else line for line in text.split("\n")]
    if kind == "extra_forbidden":
        legal = _legal_keys(details["loc"][:-1])
        near = difflib.get_close_matches(str(details["loc"][-1]), legal, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return [f"{path}: unknown key; {hint}legal here: {', '.join(sorted(legal))}"]
    if kind == "missing":
        return [f"{path}: required but not given"]
    if kind == "literal_error":
        return [f"{path}: {raw!r} is not one of {details['ctx']['expected']}"]
    if kind == "list_type":
        return [f"{path}: got {raw!r}, expected a list: write [{raw}]"]
    message = details["msg"][0].lower() + details["msg"][1:]
    return [f"{path}: got {raw!r}, {message}"]


def _is_branch(part: str) -> bool:
    """Whether a location part is pydantic's name of a union branch, not a key of the file."""
    return part in ("float", "int", "str") or part.startswith(("literal[", "constrained-"))


def _keys(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def _legal_keys(path: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for part in path:
        for name, field in model.model_fields.items():
            if part in (name, field.alias) and (found := _section_of(field.annotation)):
                model = found
                break
    return _keys(model)


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The section class inside an annotation such as ``list[X]``, ``dict[str, X]`` or ``X | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in typing.get_args(annotation):
        if found := _section_of(inner):
            return found
    return None
