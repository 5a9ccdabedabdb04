"""A StoreConfig as JSON and back, exactly.  (C5.2)

    {"geometry": {"type": "KVGeometry", "layers": 1, ...}, "profile": "bf16", "max_context": 256, ...}

Every field of the dataclasses by its own name, so a field that is added is written at once; what is absent takes its
default, and what is not known is refused.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from pagedkv.errors import ConfigError
from pagedkv.values.config import AutoCapacity, DraftFullBackend, ExplicitCapacity, KVGeometry, MTPBackend, StoreConfig
from pagedkv.values.profiles import Profile

_TYPES: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (KVGeometry, ExplicitCapacity, AutoCapacity, MTPBackend, DraftFullBackend)
}


def config_as_json(config: StoreConfig) -> dict[str, object]:
    """Return what `config_from_json` makes the same configuration of: plain dicts, strings, numbers and None."""
    return {field.name: _as_json(getattr(config, field.name)) for field in fields(config)}


def config_from_json(given: object) -> StoreConfig:
    """Return the configuration that `config_as_json` wrote.

    Raises:
        ConfigError: no such object, a field that is not known, or a value that the configuration refuses.
    """
    if not isinstance(given, dict):
        raise _refusal("an object with the fields of a StoreConfig", given)
    config: StoreConfig = _build(StoreConfig, {name: _from_json(value) for name, value in given.items()})
    return config


def _as_json(value: object) -> object:
    if isinstance(value, Profile):
        return value.name
    if is_dataclass(value):
        return {"type": type(value).__name__,
                **{field.name: _as_json(getattr(value, field.name)) for field in fields(value)}}
    return value


def _from_json(value: object) -> object:
    if not isinstance(value, dict):
        return value
    kind = _TYPES.get(str(value.get("type")))
    if kind is None:
        raise _refusal(f"a type of {sorted(_TYPES)}", value.get("type"))
    return _build(kind, {name: _from_json(part) for name, part in value.items() if name != "type"})


def _build(kind: type[Any], values: dict[str, object]) -> Any:
    known = {field.name for field in fields(kind)}
    if unknown := sorted(values.keys() - known):
        raise _refusal(f"the fields {sorted(known)}", unknown)
    try:
        return kind(**values)
    except TypeError as error:  # a field without a default is absent
        raise _refusal(f"every field of a {kind.__name__} that has no default", str(error)) from error


def _refusal(expected: str, got: object) -> ConfigError:
    return ConfigError("a configuration in JSON", expected=expected, got=repr(got),
                       remedy="take what config_as_json wrote, with the same version of the library", clause="C5.2")
