"""llama.cpp's KV cache under check_cache(), on a trained model of 260K parameters: what docs/oracle.md says it found."""

import numpy as np
import pytest

from nanokv import oracle
from nanokv.backend import NUMPY
from tests.llama_support import cache_for, run
from tests.support import data
from weights.gguf_file import load_gguf

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("llama_cpp", reason="not run: llama.cpp's binding is not installed (pip install '.[llama-cpp]')")
pytest.importorskip("gguf")

ALONE = {"token by token", "prompt, then token by token", "after a truncation", "beside a fork", "in a fork"}


@pytest.fixture(scope="module")
def path():
    return data("models/stories260K/stories260K-f32.gguf")


@pytest.fixture(scope="module")
def exact(path):
    """ids -> logits in float64, and the bound that docs/numerics.md gives for float32 arithmetic."""
    params = load_gguf(path, "stories", "float64", NUMPY).params
    config = params.config
    widest = max(config.width, config.num_heads * config.head_dim, config.inner)

    def recompute(ids):
        return run(params, ids, [len(ids)], cache_for(config, len(ids), np.float64))

    def bound(logits):
        return oracle.logit_bound(config.num_layers, widest, np.abs(logits).max(), sums=3)

    return recompute, bound


def checked(path, kv, flash, **how):
    from examples.oracle.llama_cpp_cache import LlamaCpp, check

    subject = LlamaCpp(path, kv, flash, ubatch=how.pop("ubatch", 512))
    try:
        return check(subject, **how)
    finally:
        subject.close()


def wrong(report):
    return {finding.way for finding in report.findings if not finding.passed}


@pytest.mark.parametrize("ubatch", [512, 4])
def test_a_float32_cache_says_what_recomputing_in_float64_says(path, exact, ubatch):
    recompute, bound = exact
    report = checked(path, "f32", False, ubatch=ubatch, recompute=recompute, bound=bound)
    assert report.passed, str(report)
    assert len(report.findings) == 12


def test_a_step_of_one_token_has_other_bits(path):
    """Steps of two tokens and more give the same bits however they are cut; one of a single token takes another kernel."""
    report = checked(path, "f32", False)
    assert wrong(report) >= ALONE
    assert {"again at once", "chunks of 5", "chunks of 16"}.isdisjoint(wrong(report))  # 2, 9 and 40 tokens: no piece of one
    assert len(report.smallest[1]) == 2
    assert max(finding.error for finding in report.findings) < 4e-5  # twice what test_stories260k allows a float32 program


def test_flash_attention_computes_a_float32_cache_in_half_precision(path, exact):
    recompute, bound = exact
    report = checked(path, "f32", True, recompute=recompute, bound=bound)
    assert len(wrong(report)) == len(report.findings)
    half = checked(path, "f16", True, recompute=recompute, bound=bound)
    assert [finding.error for finding in report.findings] == [finding.error for finding in half.findings]


def test_a_half_precision_cache_stores_other_numbers_when_fed_one_by_one(path):
    """The rounding of a step of one token moves some K and V over an edge of float16: a thousand times its size."""
    single, half = (checked(path, kv, False).findings[1].error for kv in ("f32", "f16"))
    assert half > 20 * single


def test_a_format_that_does_not_fit_is_refused_by_name(path):
    with pytest.raises(RuntimeError, match="takes no q8_0 cache"):  # heads of 8, blocks of 32
        checked(path, "q8_0", True)
