"""The rotary positions that a config.json asks for."""

from collections.abc import Mapping
from typing import Any

from nanokv.errors import ConfigError
from nanokv.models.fields import flag, number
from nanokv.rope import KINDS, Rope, Scaling, attention_term

MOST = 1e12  # a base or a factor beyond it is a mistake, not a model


def read_rope(raw: Mapping[str, Any], dim: int, num_positions: int) -> Rope:
    """From rope_theta and rope_scaling, or from rope_parameters (transformers 5), whose kind is `rope_type` or, in older
    files, `type`.

    Raises ConfigError for an unknown kind, which would be right at short prompts and wrong at long ones if ignored, and for
    values that are missing or absurd.
    """
    parameters = _parameters(raw)
    theta = number({"rope_theta": raw.get("rope_theta")} | parameters, "rope_theta", 2.0, MOST, 10000.0)
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ConfigError(f"partial_rotary_factor {partial!r} is not supported: whole heads are turned")
    return Rope(dim, theta, scaling=_scaling(_kind(parameters), parameters, num_positions))


def _parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key) or {}
        if not isinstance(value, dict):
            raise ConfigError(f"{key} {value!r:.80} is not an object")
        if value:
            outside = "original_max_position_embeddings"  # where it stands beside the object, transformers reads it there
            return value if raw.get(outside) is None else value | {outside: raw[outside]}
    return {}


def _kind(parameters: Mapping[str, Any]) -> str:
    named = [parameters[key] for key in ("rope_type", "type") if parameters.get(key) is not None]
    if not named and "factor" in parameters:
        raise ConfigError("rope_scaling has a factor but no rope_type")
    kind = named[0] if named else "default"
    if kind not in KINDS:
        raise ConfigError(f"rope_type {kind!r} is not supported: {', '.join(KINDS)} are")
    if named[1:] not in ([], [kind]):
        raise ConfigError(f"rope_type {kind!r} and type {named[1]!r} contradict each other")
    return kind


def _scaling(kind: str, raw: Mapping[str, Any], num_positions: int) -> Scaling:
    if kind == "default":
        return Scaling()
    if kind == "linear":
        return Scaling(kind, number(raw, "factor", 1.0, MOST))
    original = number(raw, "original_max_position_embeddings", 1.0, MOST, float(num_positions))
    if kind == "llama3":
        low, high = (number(raw, f"{name}_freq_factor", 1e-6, MOST) for name in ("low", "high"))
        if low >= high:
            raise ConfigError(f"low_freq_factor {low} is not below high_freq_factor {high}")
        return Scaling(kind, number(raw, "factor", 1.0, MOST), original, low, high)
    factor = number(raw, "factor", 1.0, MOST, max(1.0, num_positions / original))
    slow, fast = number(raw, "beta_slow", 1e-6, MOST, 1.0), number(raw, "beta_fast", 1e-6, MOST, 32.0)
    if slow > fast:
        raise ConfigError(f"beta_slow {slow} is above beta_fast {fast}")
    return Scaling(
        kind, factor, original, beta_slow=slow, beta_fast=fast, truncate=flag(raw, "truncate", True),
        attention_factor=_yarn_attention_factor(raw, factor),
    )  # fmt: skip


def _yarn_attention_factor(raw: Mapping[str, Any], factor: float) -> float:
    """What is given, or the paper's 0.1 ln(factor) + 1 (equation 22); with mscale and mscale_all_dim, as DeepSeek's files
    have them, the ratio of two such terms."""
    mscale, all_dim = (number(raw, key, 0.0, MOST, 0.0) for key in ("mscale", "mscale_all_dim"))
    both = mscale and all_dim
    inferred = attention_term(factor, mscale) / attention_term(factor, all_dim) if both else attention_term(factor)
    return number(raw, "attention_factor", 1e-6, MOST, inferred)
