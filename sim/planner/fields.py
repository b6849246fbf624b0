"""Reading one level of a config.json by the names its family uses, and remembering what was read.

The rule that keeps the planner from guessing: whatever a file says about the shape of a cache must have been read by the
family that the file belongs to. A key of `SHAPING` that is set and that nobody read is refused by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nanokv.errors import ConfigError

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads"),
    "width": ("hidden_size", "n_embd", "n_embed", "d_model"),
    "head_dim": ("head_dim", "kv_channels", "attention_head_dim"),
    "window": ("sliding_window", "sliding_window_size"),
    "experts": ("num_experts", "num_local_experts"),
    "positions": (
        "max_position_embeddings",
        "n_positions",
        "max_seq_len",
        "seq_length",
        "max_sequence_length",
        "model_max_length",
    ),
}

LIMITS: Mapping[str, int] = {  # beyond these a value is a mistake, not a model
    "layers": 1 << 12,
    "heads": 1 << 12,
    "kv_heads": 1 << 12,
    "width": 1 << 20,
    "positions": 1 << 31,
    "window": 1 << 31,
}

# Keys that change what a layer caches, in any family. `SPELLINGS` adds the many names of the key-value heads.
SHAPING: tuple[str, ...] = (
    "head_dim", "kv_channels", "attention_head_dim", "v_head_dim", "use_mla", "kv_lora_rank", "q_lora_rank", "qk_rope_head_dim",
    "qk_nope_head_dim", "compress_ratios", "compress_rates", "compress_rate_csa", "compress_rate_hca", "index_head_dim",
    "index_n_heads", "index_topk", "indexer_types", "indexer_head_dim", "sparse_attention_config", "sliding_window",
    "sliding_window_size", "interleaved_sliding_window", "sliding_window_pattern", "sliding_window_layers",
    "use_sliding_window", "attention_chunk_size", "layer_types", "layers_block_type", "hybrid_override_pattern",
    "hybrid_layer_pattern", "block_configs", "attn_type_list", "attention_types", "window_size", "attn_layer_period",
    "attn_layer_indices", "full_attn_idxs", "full_attention_interval", "linear_num_key_heads", "linear_num_value_heads",
    "linear_attn_config", "mamba_d_state", "mamba_expand", "ssm_state_size", "mb_per_layer", "conv_L_cache",
    "cross_attention_layers", "add_cross_attention", "num_kv_shared_layers", "kv_source_layers", "use_cla", "cla_share_factor",
    "num_global_key_value_heads", "global_head_dim", "swa_num_key_value_heads", "swa_head_dim", "swa_v_head_dim",
    "num_key_value_heads_per_layer", "multi_query", "multi_query_attention", "multi_query_group_num", "attn_config",
    "per_layer_config", "new_decoder_architecture",
)  # fmt: skip


class Fields:
    """One object of a config.json with its family's class defaults.

    `defaults` uses the names of SPELLINGS or the file's own; `source` says whose defaults they are. A key that is absent
    takes the default, with a note; a key that is null means what the caller says null means.
    """

    def __init__(self, raw: Mapping[str, Any], defaults: Mapping[str, Any], source: str, expand_latent: bool = False) -> None:
        self.raw = raw
        self.defaults = defaults
        self.source = source
        self.expand_latent = expand_latent
        self.notes: list[str] = []
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """True where the file sets `name`, under any spelling, to something other than null."""
        return any(self.raw.get(key) is not None for key in SPELLINGS.get(name, (name,)))

    def key(self, name: str) -> str:
        """The spelling of `name` that this file uses, or the first one; what an error message should call it."""
        return next((key for key in SPELLINGS.get(name, (name,)) if key in self.raw), SPELLINGS.get(name, (name,))[0])

    def value(self, name: str, default: Any = None) -> Any:
        """Whatever the file holds under `name`. Two spellings that disagree are a ConfigError."""
        spellings = SPELLINGS.get(name, (name,))
        self._read.update(spellings)
        found = {key: self.raw[key] for key in spellings if key in self.raw}
        given = {key: value for key, value in found.items() if value is not None}
        if len({repr(value) for value in given.values()}) > 1:
            raise ConfigError(f"{' and '.join(f'{key} {value!r}' for key, value in given.items())} contradict each other")
        if given:
            return next(iter(given.values()))
        if found:
            return None
        if name in self.defaults:
            value = self.defaults[name]
            if value is not None:
                self.notes.append(f"{spellings[0]} is not in the file: {value} is the default of {self.source}")
            return value
        return default

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number. Absent without any default, null, or out of range: ConfigError."""
        value = self.optional_integer(name, default, least)
        if value is None:
            raise ConfigError(f"config.json has no {self.key(name)!r}, and its family sets no default")
        return value

    def optional_integer(self, name: str, default: int | None = None, least: int = 1) -> int | None:
        """As integer(), but null (and absent without a default) gives None."""
        value = self.value(name, default)
        if value is None:
            return default
        return self.check_integer(self.key(name), value, least, LIMITS.get(name, 1 << 24))

    def check_integer(self, key: str, value: Any, least: int = 1, most: int = 1 << 24) -> int:
        """`value`, if it is a whole number between `least` and `most`."""
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise ConfigError(f"{key} {value!r} is not a whole number between {least} and {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.value(name, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.key(name)} {value!r} is not true or false")
        return value

    def one_per_layer(self, name: str, layers: int) -> list[Any] | None:
        """A list with one entry for each layer, or None where the file has none; another length is a ConfigError."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise ConfigError(f"{name} {value!r} is not a list with one entry a layer")
        if len(value) != layers:
            raise ConfigError(f"{name} has {len(value)} entries, but {self.key('layers')} is {layers}")
        return list(value)

    def positions(self) -> int | None:
        """The model's longest context, under the first spelling that the file sets. Others beside it are no contradiction:
        Qwen's files have the length of its training data as seq_length.
        """
        spellings = SPELLINGS["positions"]
        self.ignore("positions")
        key = next((key for key in spellings if self.raw.get(key) is not None), None)
        if key is None:
            return self.defaults.get("positions")
        return self.check_integer(key, self.raw[key], 1, LIMITS["positions"])

    def child(self, name: str, defaults: Mapping[str, Any] | None = None) -> "Fields | None":
        """The object under `name` as Fields of its own, or None; whoever asks for it answers for all its keys."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} {value!r} is not an object")
        inner = Fields(value, defaults or {}, self.source, self.expand_latent)
        inner.notes = self.notes
        return inner

    def ignore(self, *names: str) -> None:
        """Marks keys as understood: they are known not to change what this family caches."""
        for name in names:
            self._read.update(SPELLINGS.get(name, (name,)))

    def refuse_unread(self, family: str) -> None:
        """ConfigError if the file sets a key that shapes caches and that `family` is not known to have."""
        switched_off = SPELLINGS["window"] if self.raw.get("use_sliding_window") is False else ()
        for key in (*SHAPING, *SPELLINGS["kv_heads"]):
            if key not in self._read and key not in switched_off and not _says_nothing(self.raw.get(key)):
                raise ConfigError(
                    f"{key} {_short(self.raw[key])} changes what a layer caches, and {family!r} is not known to have it: "
                    "unknown attention family"
                )


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def pattern(names: Iterable[Any], meaning: Mapping[Any, Any], key: str) -> list[Any]:
    """Each entry of a per-layer list through `meaning`; an entry that is not in it is a ConfigError naming its layer."""
    out = []
    for layer, name in enumerate(names):
        if not isinstance(name, str | int) or name not in meaning:
            known = ", ".join(repr(known) for known in meaning)
            raise ConfigError(f"{key}[{layer}] is {name!r}: this family has {known}")
        out.append(meaning[name])
    return out
