"""A stand-in for CuPy on a machine without a GPU: the same functions and keywords, and the same refusals.

A DeviceArray turns into a host array by `get()` only; it mixes with its own kind and with scalars, never with host
arrays; host functions do not accept it. What the runtime may call is listed in FUNCTIONS: anything else is an
AttributeError, as it may be in CuPy. An index outside its axis wraps round, as on a GPU.
"""

from types import ModuleType
from typing import Any

import numpy as np

SCALARS = (bool, int, float, np.generic)


def host(value: Any) -> Any:
    """What a device function computes with; a host array is refused as CuPy refuses it."""
    if isinstance(value, DeviceArray):
        return value.data
    if value is None or isinstance(value, SCALARS):
        return value
    raise TypeError(f"Unsupported type {type(value)}")


class DeviceArray:
    __array_ufunc__ = None  # a host scalar on the left leaves the operation to us
    __hash__ = None

    def __init__(self, data: np.ndarray):
        self.data = data

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed. Please use `.get()`")

    def __iter__(self):
        raise TypeError("a device array was iterated over: one transfer an element")

    def __float__(self) -> float:
        raise TypeError("a device value was read by the host without get()")

    __int__ = __bool__ = __index__ = __float__

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        if name in ("shape", "dtype", "ndim", "size", "itemsize", "nbytes", "strides", "flags"):
            return getattr(self.data, name)
        raise AttributeError(f"the stand-in has no {name}: is it in CuPy?")

    @property
    def T(self) -> "DeviceArray":  # noqa: N802
        return DeviceArray(self.data.T)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.data.__array_interface__

    def get(self) -> np.ndarray:
        return self.data.copy()

    def set(self, values: np.ndarray) -> None:
        self.data[...] = values

    def view(self, dtype: Any) -> "DeviceArray":
        return DeviceArray(self.data.view(dtype))

    def copy(self) -> "DeviceArray":
        return DeviceArray(self.data.copy())

    def reshape(self, *shape: Any) -> "DeviceArray":
        return DeviceArray(self.data.reshape(*shape))

    def transpose(self, *axes: Any) -> "DeviceArray":
        return DeviceArray(self.data.transpose(*axes))

    def astype(self, dtype: Any, copy: bool = True) -> "DeviceArray":
        return DeviceArray(self.data.astype(dtype, copy=copy))

    def max(self, axis: Any = None, keepdims: bool = False) -> "DeviceArray":
        return DeviceArray(np.asarray(self.data.max(axis=axis, keepdims=keepdims)))

    def min(self, axis: Any = None, keepdims: bool = False) -> "DeviceArray":
        return DeviceArray(np.asarray(self.data.min(axis=axis, keepdims=keepdims)))

    def __getitem__(self, key: Any) -> "DeviceArray":
        return DeviceArray(np.asarray(self.data[self._index(key)]))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[self._index(key)] = host(value)

    def _index(self, key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(self._index(part) for part in key)
        if isinstance(key, DeviceArray):
            return key.data % len(self.data) if key.data.dtype != bool else key.data
        if key is None or key is Ellipsis or isinstance(key, int | np.integer | slice):
            return key
        raise TypeError(f"a device array was indexed with {type(key)}")


def _operator(name: str) -> Any:
    def apply(self: DeviceArray, other: Any) -> DeviceArray:
        return DeviceArray(np.asarray(getattr(self.data, name)(host(other))))

    return apply


def _in_place(name: str) -> Any:
    def apply(self: DeviceArray, other: Any) -> DeviceArray:
        getattr(self.data, name)(host(other))
        return self

    return apply


for _name in "add sub mul truediv matmul and or lshift rshift".split():
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))
    setattr(DeviceArray, f"__r{_name}__", _operator(f"__r{_name}__"))
    setattr(DeviceArray, f"__i{_name}__", _in_place(f"__i{_name}__"))
for _name in "lt le gt ge eq ne".split():
    setattr(DeviceArray, f"__{_name}__", _operator(f"__{_name}__"))
DeviceArray.__neg__ = lambda self: DeviceArray(-self.data)

# name: keywords that the runtime uses; tests/test_backend.py holds both against CuPy itself and against the sources
FUNCTIONS: dict[str, tuple[str, ...]] = {
    "abs": (), "clip": (), "divide": ("out",), "minimum": (), "exp": ("out",), "maximum": (), "sign": (), "sqrt": (),
    "tanh": ("out",), "where": (),
    "matmul": ("out",), "repeat": ("axis",), "sum": ("axis", "keepdims"), "copyto": ("where",), "empty": ("dtype",),
    "concatenate": ("axis",), "stack": ("axis",), "take": ("axis",), "rint": (), "asarray": (), "zeros": ("dtype",),
    "is_available": (),
}  # fmt: skip


def _function(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not set(kwargs) <= set(FUNCTIONS[name]):
            raise TypeError(f"{name}() got keywords {sorted(kwargs)}; the list for CuPy has {FUNCTIONS[name]}")
        out = kwargs.pop("out", None)
        if name == "copyto":
            return np.copyto(host(args[0]), host(args[1]), where=host(kwargs["where"]))
        if name in ("empty", "zeros"):
            return DeviceArray(getattr(np, name)(*args, **kwargs))
        if name in ("concatenate", "stack"):
            return DeviceArray(getattr(np, name)([host(part) for part in args[0]], **kwargs))
        if name == "asarray":
            return args[0] if isinstance(args[0], DeviceArray) else DeviceArray(np.array(args[0]))
        if out is not None:
            kwargs["out"] = host(out)
        result = getattr(np, name)(*(host(arg) for arg in args), **kwargs)
        return out if out is not None else DeviceArray(np.asarray(result))

    return call


def module() -> ModuleType:
    """A module to put in the place of cupy."""
    cupy = ModuleType("cupy")
    for name in FUNCTIONS:
        setattr(cupy, name, _function(name))
    cupy.ndarray = DeviceArray
    cupy.is_available = lambda: True
    return cupy
