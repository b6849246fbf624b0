"""The algorithms, by name. Each is a Schedule (base.py): loops over load, fold and store, and their closed form."""

from collections.abc import Callable, Mapping
from typing import Any

from nanokv.errors import UsageError
from sim.schedules.base import OnChip, Outputs, Schedule
from sim.schedules.decode import Decode, DecodePerHead
from sim.schedules.flash1 import FlashAttention1, FlashAttention1Backward
from sim.schedules.flash2 import FlashAttention2, FlashAttention2Backward
from sim.schedules.naive import Naive
from sim.schedules.naive_backward import NaiveBackward
from sim.schedules.paged import PagedDecode
from sim.schedules.split_kv import SplitKV

SCHEDULES: Mapping[str, Callable[..., Schedule]] = {
    each.name: each
    for each in (
        Naive, FlashAttention1, FlashAttention2, NaiveBackward, FlashAttention1Backward, FlashAttention2Backward,
        Decode, DecodePerHead, SplitKV, PagedDecode,
    )
}  # fmt: skip
PREFILL = ("naive", "flash1", "flash2")
BACKWARD = ("naive-backward", "flash1-backward", "flash2-backward")
DECODE = ("naive", "decode-per-head", "decode", "split-kv", "paged")


def get_schedule(name: str, **options: Any) -> Schedule:
    """The algorithm of this name with those of `options` that it has; UsageError when there is none of the name."""
    if name not in SCHEDULES:
        raise UsageError(f"unknown algorithm {name!r}: choose from {', '.join(SCHEDULES)}")
    kind = SCHEDULES[name]
    known = getattr(kind, "__dataclass_fields__", {})
    return kind(**{key: value for key, value in options.items() if key in known})


__all__ = ["BACKWARD", "DECODE", "PREFILL", "SCHEDULES", "OnChip", "Outputs", "Schedule", "get_schedule"]
