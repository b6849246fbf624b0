"""What transformers saves, loaded here, computes what transformers computes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanokv.kv.contiguous import ContiguousCache
from nanokv.models.gpt2 import GPT2Params, forward
from tests.weights.files import VOCAB, write_tokenizer
from weights import load

pytestmark = pytest.mark.peer
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": VOCAB,
    "n_positions": 24,
    "n_embd": 24,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 257,
    "eos_token_id": 257,
}
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 20)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n_inner": {"n_inner": 36},
    "square MLP": {"n_inner": 24},
    "gelu": {"activation_function": "gelu"},
    "scaled by layer": {"scale_attn_by_inverse_layer_idx": True},
    "not scaled": {"scale_attn_weights": False},
    "epsilon": {"layer_norm_epsilon": 1e-2},
    "untied": {"tie_word_embeddings": False},
}
# The same products in another order: sums of at most K = 96 terms, one after the other in 2 L + 1 = 7 sublayers, and logits
# below 5 in size. K * 7 * 5 units of roundoff are 2e-4 in float32 and 4e-13 in float64, where 1e-9 is asked for.
BOUND = {"float64": 1e-9, "float32": 2e-4}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(seed: int = 0, **options: Any) -> Any:
    """A random GPT2LMHeadModel in which every bias and norm counts."""
    torch.manual_seed(seed)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**(SIZES | options))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2 if "weight" in name else 0.5)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    write_tokenizer(directory)
    return directory


def their_logits(model: Any, dtype: str) -> np.ndarray:
    with torch.no_grad():
        return model.to(getattr(torch, dtype))(torch.from_numpy(TOKENS)[None]).logits[0].numpy()


def our_logits(params: GPT2Params) -> np.ndarray:
    config = params.config
    return forward(
        params, TOKENS, ContiguousCache(config.num_layers, config.num_kv_heads, config.head_dim, 24, params.wte.dtype)
    )


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits(tmp_path: Path, name: str, dtype: str) -> None:
    model = make(**VARIANTS[name])
    checkpoint = load(save(model, tmp_path), dtype=dtype)
    theirs, ours = their_logits(model, dtype), our_logits(checkpoint.params)
    assert ours.dtype == theirs.dtype == dtype
    assert np.abs(ours - theirs).max() < BOUND[dtype]
    assert theirs.std() > 0.5  # random logits, not a flat line that anything would match
    assert checkpoint.eos_token_ids == {257}


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_stored_dtypes_and_shards(tmp_path: Path, stored: str, shard_size: str) -> None:
    """The arithmetic is float64 on both sides; what is compared is what came out of the file."""
    model = make().to(getattr(torch, stored))
    save(model, tmp_path, max_shard_size=shard_size)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_size == "20KB")
    assert np.abs(our_logits(load(tmp_path, dtype="float64").params) - their_logits(model, "float64")).max() < BOUND["float64"]


def test_the_base_model_has_no_prefix(tmp_path: Path) -> None:
    """GPT2Model, without a head, saves names without "transformer."."""
    model = make()
    model.transformer.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    assert np.abs(our_logits(load(tmp_path, dtype="float64").params) - their_logits(model, "float64")).max() < BOUND["float64"]


@pytest.mark.parametrize("only_head", [False, True])
def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path, only_head: bool) -> None:
    """Both stored and different: both are used, here and there. Only the head stored: it is the embedding, too."""
    save_file, load_file = (getattr(pytest.importorskip("safetensors.torch"), name) for name in ("save_file", "load_file"))
    file = save(make(), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = torch.randn(VOCAB, 24)
    if only_head:
        del tensors["transformer.wte.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    if only_head:
        params = load(tmp_path, dtype="float64").params
    else:
        with pytest.warns(UserWarning, match="differs from the embedding"):
            params = load(tmp_path, dtype="float64").params
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert np.abs(our_logits(params) - their_logits(theirs, "float64")).max() < BOUND["float64"]
