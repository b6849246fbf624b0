"""Values of a config.json, each checked as it is read: ConfigError names the key and what it holds."""

import math
from collections.abc import Mapping
from typing import Any

from nanokv.errors import ConfigError

Raw = Mapping[str, Any]


def integer(raw: Raw, key: str, most: int, default: int | None = None, least: int = 1) -> int:
    """A whole number from `least` to `most`; `default` where the key is absent or null, an error if that is None."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"there is no {key!r}")
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ConfigError(f"{key} {value!r} is not a whole number between {least} and {most}")
    return value


def number(raw: Raw, key: str, least: float, most: float, default: float | None = None) -> float:
    """A finite number from `least` to `most`; `default` as in integer()."""
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"there is no {key!r}")
        return default
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or not least <= value <= most:
        raise ConfigError(f"{key} {value!r} is not a number between {least} and {most}")
    return float(value)


def flag(raw: Raw, key: str, default: bool) -> bool:
    """true or false; `default` where the key is absent."""
    value = raw.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{key} {value!r} is not true or false")
    return value
