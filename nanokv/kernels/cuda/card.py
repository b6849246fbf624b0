"""A CUDA card through CuPy: kernels compiled when they are first needed, and launched on the current stream."""

from collections.abc import Sequence
from typing import Any

from nanokv.backend import Array, address_of, is_out_of_memory
from nanokv.errors import BackendError
from nanokv.kernels.cuda.program import FILES, OPTIONS, first_error, source

OLDEST = 75  # compute capability 7.5, Turing: the oldest for which the kernels are compiled in the tests


class Card:
    """A Device (launches.py). CuPy keeps machine code on disk by source and options, so that a second start loads it.

    Raises BackendError for a card that is too old, where NVRTC is missing, and where a source does not compile.
    """

    def __init__(self, cupy: Any):
        self._cupy = cupy
        self._functions: dict[str, Any] = {}
        device = cupy.cuda.Device()
        if int(device.compute_capability) < OLDEST:
            name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
            found, needed = int(device.compute_capability) / 10, OLDEST / 10
            raise BackendError(
                f"the kernels need compute capability {needed} or later, and {name} has {found}: use --numerics fast"
            )

    def launch(
        self, kernel: str, grid: Sequence[int], block: Sequence[int], shared_bytes: int, arguments: Sequence[Any]
    ) -> None:
        if 0 not in grid:
            function = self._functions.get(kernel) or self._load(kernel)
            function(tuple(grid), tuple(block), tuple(arguments), shared_mem=shared_bytes)

    def address(self, array: Array) -> int:
        return address_of(array)

    def _load(self, kernel: str) -> Any:
        file = FILES[kernel]
        try:
            module = self._cupy.RawModule(code=source(file), options=OPTIONS, name_expressions=(kernel,))
            self._functions[kernel] = module.get_function(kernel)
        except Exception as error:  # CuPy promises no type: a compiler's log, a missing library, a driver's refusal
            if is_out_of_memory(error):
                raise
            reason = first_error(str(error) or type(error).__name__)
            advice = "install CUDA's NVRTC, or use --backend numpy" if "libnvrtc" in reason else "use --numerics fast"
            raise BackendError(f"kernel {kernel} of {file} cannot be made ready: {reason}; {advice}") from error
        return self._functions[kernel]
