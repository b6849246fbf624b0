"""GPT-2's tensors by name: every way of naming and tying gives the same model; what is missing, unknown or of another
shape is named."""

import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanokv.backend import NUMPY, Backend
from nanokv.errors import CheckpointError
from nanokv.models.config import GPT2Config
from nanokv.models.gpt2 import GPT2Params
from tests.weights.files import CONFIG, Raw, arrays_of, assert_same, every_array, params_for, stored, write_safetensors
from weights.gpt2 import read_gpt2, tensor_shapes
from weights.tensors import open_safetensors

UNTIED = CONFIG | {"tie_word_embeddings": False}


def read(config: dict[str, Any], tensors: dict[str, Any], dtype: str = "float32", backend: Backend = NUMPY) -> GPT2Params:
    """Writes arrays (or raw tensors) to a file and reads them as a config says."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        write_safetensors(path, {name: stored(a) if isinstance(a, np.ndarray) else a for name, a in tensors.items()})
        return read_gpt2(open_safetensors(path), GPT2Config.from_dict(config), dtype, backend, Path("the model"))


def masks(config: dict[str, Any], prefix: str = "") -> dict[str, np.ndarray]:
    """The buffers that old files carry: [1, 1, positions, positions] and a number, under names that end in "bias"."""
    size = config["n_positions"]
    mask = np.tril(np.ones((1, 1, size, size), np.float32))
    return {
        f"{prefix}h.{layer}.attn.{name}": value
        for layer in range(config["n_layer"])
        for name, value in (("bias", mask), ("masked_bias", np.array(-1e4, np.float32)))
    }


# the same model, however it is stored


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("with_masks", [True, False])
def test_prefixes_heads_and_masks(tied: bool, prefix: str, with_masks: bool) -> None:
    """K04, K05: the combinations of prefix, head and masks are the same weights."""
    config = CONFIG | {"tie_word_embeddings": tied}
    params = params_for(config)
    arrays = arrays_of(params, prefix) | (masks(config, prefix) if with_masks else {})
    loaded = read(config, arrays)
    assert_same(loaded, params)
    assert (loaded.head is loaded.wte) == tied
    assert loaded.config.tied_head == tied


def test_masks_of_any_dtype_are_ignored() -> None:
    params = params_for(CONFIG)
    for dtype in (np.uint8, np.bool_, np.float16):
        arrays = arrays_of(params) | {name: mask.astype(dtype) for name, mask in masks(CONFIG).items() if mask.ndim}
        assert_same(read(CONFIG, arrays), params)


@given(
    st.sampled_from([(2, 2, 8), (4, 2, 8), (4, 1, 12), (1, 1, 6), (3, 3, 6)]),
    st.sampled_from([None, 5, 8, 24, 32]),
    st.integers(1, 3),
    st.sampled_from([np.float16, np.float32, np.float64]),
    st.sampled_from(["float32", "float64"]),
    st.randoms(use_true_random=False),
)
def test_any_shape(heads: tuple[int, int, int], inner: int | None, layers: int, stored_as: type, dtype: str, rng: Any) -> None:
    """K06, K11: square and oblong matrices, grouped heads, n_inner; each tensor in its place, in any order in the file."""
    sizes = {"n_head": heads[0], "num_key_value_heads": heads[1], "n_embd": heads[2], "n_inner": inner, "n_layer": layers}
    params = params_for(CONFIG | sizes, dtype=stored_as)
    arrays = list(arrays_of(params).items())
    rng.shuffle(arrays)
    loaded = read(CONFIG | sizes, dict(arrays), dtype)
    expected = every_array(params)
    for name, array in every_array(loaded).items():
        assert array.dtype == dtype
        assert array.flags.c_contiguous
        assert np.array_equal(array, expected[name].astype(dtype)), name


def test_square_matrices_are_transposed_too() -> None:
    """K06: c_proj is [E, E], and with n_inner = E so are the MLP's: only the numbers tell."""
    config = CONFIG | {"n_inner": 8}
    arrays = arrays_of(params_for(config))
    loaded = read(config, arrays)
    for name, array in (("attn.c_proj", "proj_weight"), ("mlp.c_fc", "fc_weight"), ("mlp.c_proj", "out_weight")):
        in_file = arrays[f"h.1.{name}.weight"]
        assert in_file.shape == (8, 8)
        assert not np.array_equal(in_file, in_file.T)
        assert np.array_equal(getattr(loaded.blocks[1], array), in_file.T)


def test_tensor_shapes() -> None:
    """GPT-2 124M: the 148 tensors and 124,439,808 numbers of the published file, the masks and the tied head apart."""
    config = GPT2Config(50257, 1024, 768, 12, 12, 12, 3072)
    shapes = tensor_shapes(config)
    del shapes["lm_head.weight"]
    assert len(shapes) == 148
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == config.num_parameters == 124_439_808
    assert shapes["h.11.attn.c_attn.weight"] == (768, 2304)
    assert shapes["h.0.mlp.c_proj.weight"] == (3072, 768)


def test_the_backend_gets_every_array() -> None:
    """Each array goes through the backend once, the tied head not a second time."""
    given_to: list[int] = []

    class Recorder(Backend):
        def table(self, array: np.ndarray) -> Any:  # from_numpy() ends here, too
            given_to.append(id(array))
            return array

    loaded = read(CONFIG, arrays_of(params_for(CONFIG)), backend=Recorder("numpy", np))
    assert sorted(given_to) == sorted({id(array) for array in every_array(loaded).values()})


# the head: {tied true, false, absent} x {present, absent}


@pytest.mark.parametrize("config", [CONFIG, CONFIG | {"tie_word_embeddings": True}])
def test_tied_without_a_head(config: dict[str, Any]) -> None:
    """K02."""
    loaded = read(config, arrays_of(params_for(config)))
    assert loaded.head is loaded.wte


@pytest.mark.parametrize("config", [CONFIG, CONFIG | {"tie_word_embeddings": True}])
def test_tied_with_an_equal_head(config: dict[str, Any]) -> None:
    """K02: ignored, in silence; also one that is equal only as numbers, and one with a NaN."""
    params = params_for(config, dtype=np.float16)
    params.wte[0, 0] = np.nan
    for head in (params.wte, params.wte.astype(np.float32)):
        loaded = read(config, arrays_of(params) | {"lm_head.weight": head})
        assert loaded.head is loaded.wte
        assert loaded.config.tied_head


@pytest.mark.parametrize("config", [CONFIG, CONFIG | {"tie_word_embeddings": True}])
def test_tied_with_a_head_of_its_own(config: dict[str, Any]) -> None:
    """K02: a warning, and both are used: what transformers 5 does."""
    params = params_for(CONFIG | {"tie_word_embeddings": False})
    with pytest.warns(UserWarning, match=r"tensor 'lm_head\.weight' differs from the embedding"):
        loaded = read(config, arrays_of(params))
    assert_same(loaded, params)
    assert not loaded.config.tied_head


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_tied_with_only_a_head(prefix: str) -> None:
    """K10: the embedding is the head."""
    params = params_for(CONFIG)
    arrays = arrays_of(params, prefix)
    arrays["lm_head.weight"] = arrays.pop(prefix + "wte.weight")
    loaded = read(CONFIG, arrays)
    assert_same(loaded, params)
    assert loaded.head is loaded.wte


def test_untied_with_a_head() -> None:
    params = params_for(UNTIED)
    loaded = read(UNTIED, arrays_of(params))
    assert_same(loaded, params)


def test_untied_with_a_head_that_equals_the_embedding() -> None:
    arrays = arrays_of(params_for(CONFIG))
    loaded = read(UNTIED, arrays | {"lm_head.weight": arrays["wte.weight"]})
    assert np.array_equal(loaded.head, loaded.wte)
    assert not loaded.config.tied_head


def test_untied_without_a_head() -> None:
    with pytest.raises(
        CheckpointError, match=r"holds no lm_head\.weight, and its configuration says that head and embedding are not tied"
    ):
        read(UNTIED, arrays_of(params_for(CONFIG)))


def test_untied_without_an_embedding() -> None:
    arrays = arrays_of(params_for(UNTIED))
    del arrays["wte.weight"]
    with pytest.raises(CheckpointError, match=r"lacks tensors that its configuration asks for: wte\.weight$"):
        read(UNTIED, arrays)


# what is wrong is named


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


QKV = "h.0.attn.c_attn.weight"
OF_LAYERS = ["h.0.ln_1.bias", "h.1.ln_1.bias", "h.1.ln_2.bias"]
WRONG: dict[str, tuple[dict[str, np.ndarray | Raw | None], str]] = {  # tensors replaced, added or (None) taken out
    "missing": ({"h.1.mlp.c_fc.bias": None}, "lacks tensors that its configuration asks for: h.1.mlp.c_fc.bias"),
    "missing, many": (
        dict.fromkeys([*OF_LAYERS, "ln_f.bias", "ln_f.weight", "wpe.weight"]),
        "asks for: wpe.weight, ln_f.weight, ln_f.bias, h.0.ln_1.bias and 2 more",
    ),
    "unknown": ({"h.0.attn.q_norm.weight": zeros(8)}, "does not have: h.0.attn.q_norm.weight"),
    "unknown, many": ({f"x.{i}": zeros(1) for i in range(6)}, "does not have: x.0, x.1, x.2, x.3 and 2 more"),
    "mask of a layer that is not there": ({"h.2.attn.bias": zeros(8)}, "does not have: h.2.attn.bias"),
    "name that only looks like a mask": ({"h.0.attn.bias.x": zeros(8)}, "does not have: h.0.attn.bias.x"),
    "a layer too many": ({"h.2.ln_1.bias": zeros(8)}, "does not have: h.2.ln_1.bias"),
    "two prefixes": ({"transformer.transformer.ln_f.bias": zeros(8)}, "does not have: transformer.ln_f.bias"),
    "with and without": ({"transformer.ln_f.bias": zeros(8)}, "tensor 'transformer.ln_f.bias' is there twice"),
    "shape": ({QKV: zeros(24, 8)}, f"tensor {QKV!r} has shape [24, 8], but config.json makes it [8, 24]"),
    "rank": ({"ln_f.bias": zeros(1, 8)}, "'ln_f.bias' has shape [1, 8], but config.json makes it [8]"),
    "positions": ({"wpe.weight": zeros(11, 8)}, "'wpe.weight' has shape [11, 8], but config.json makes it [12, 8]"),
    "head": ({"lm_head.weight": zeros(8, 8)}, "'lm_head.weight' has shape [8, 8], but config.json makes it [262, 8]"),
    "whole numbers": ({"ln_f.bias": ("I64", (8,), b"\0" * 64)}, "'ln_f.bias' holds I64: weights must be one of F64, F32, F16"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_named(name: str) -> None:
    changes, message = WRONG[name]
    tensors = {key: value for key, value in (arrays_of(params_for(CONFIG)) | changes).items() if value is not None}
    with pytest.raises(CheckpointError) as caught:
        read(CONFIG, tensors)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tensors_at_all() -> None:
    """K08: a file of metadata only."""
    with pytest.raises(CheckpointError, match=r"the model lacks tensors .*: wte\.weight, .* and 25 more"):
        read(CONFIG, {})


def test_everything_is_checked_before_anything_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tensor is wrong: no other has been read by then."""
    monkeypatch.setattr("weights.tensors.StoredTensor.read", lambda *_: pytest.fail("read before all was checked"))
    with pytest.raises(CheckpointError, match=r"ln_f\.bias"):
        read(CONFIG, arrays_of(params_for(CONFIG)) | {"ln_f.bias": zeros(9)})


def test_no_warning_for_a_plain_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(CONFIG, arrays_of(params_for(CONFIG)) | masks(CONFIG))
