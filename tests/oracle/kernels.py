"""Kernels as people write them, right and wrong: float32, an online softmax over pieces of 16 keys, one row and head at a
time, on the arrays of a call. Nothing of them is nanokv's, so that the catalogue is tried on strangers."""

import numpy as np

from nanokv.oracle.formats import dtype_of

PIECE = 16


def kernel(fault: str = ""):
    """The kernel with the fault called `fault` planted; "" is right."""

    def run(call):
        return Written(call, fault).run()

    run.__name__ = fault or "right"
    return run


class Written:
    def __init__(self, call, fault):
        self.call, self.fault = call, fault
        self.half = dtype_of("bfloat16" if call.dtype == "bfloat16" else "float16")

    # K and V of a sequence, by its tables

    def starts(self):
        call = self.call
        return call.qo_indptr if call.layout.startswith("flashinfer") else call.query_start_loc

    def length(self, i):
        call = self.call
        if not call.layout.startswith("flashinfer"):
            return int(call.seq_lens[i])
        pages = int(call.kv_indptr[i + 1] - call.kv_indptr[i])
        return (pages - 1) * call.block_size + int(call.kv_last_page_len[i]) if pages else 0

    def table(self, i):
        call = self.call
        if call.layout == "vllm":
            return call.block_tables[i]
        if call.layout == "contiguous":
            return np.array([i])
        return call.kv_indices[call.kv_indptr[i] : call.kv_indptr[i + 1]]

    def block(self, block, which):
        """[N, Hkv, D] float32"""
        call = self.call
        if call.layout == "vllm":
            page = (call.k_cache, call.v_cache)[which][block]
        elif call.layout == "contiguous":
            page = (call.k, call.v)[which][block]
        else:
            page = call.paged_kv_cache[block, which]
        hnd = call.layout == "flashinfer-hnd"
        if self.fault == "heads_and_tokens_swapped":
            shape = (call.num_kv_heads, call.block_size, call.head_dim)
            page = page.reshape(shape[1], shape[0], shape[2]) if hnd else page.reshape(shape).transpose(1, 0, 2)
        elif hnd:
            page = page.transpose(1, 0, 2)
        return self.restored(page.astype(np.float32), which, block, hnd)

    def restored(self, page, which, block, hnd):
        name = "k_scale" if which == 0 else "v_scale"
        if self.fault == "kv_scales_swapped":
            name = "v_scale" if which == 0 else "k_scale"
        scale = self.call.arrays.get(name)
        if scale is None or self.fault == "kv_scale_missing":
            return page
        if scale.ndim > 1:
            scale = scale[block]  # [N, Hkv], or [Hkv, N]
            if self.fault == "heads_and_tokens_swapped":
                scale = scale.reshape(scale.shape[::-1])
                hnd = not hnd
            scale = scale.T if hnd else scale
        else:
            scale = np.broadcast_to(scale, page.shape[:2])
        if self.fault == "kv_scale_of_head_0":
            scale = scale[:, :1]
        return page * scale[..., None]

    def keys(self, i):
        """k, v [S, Hkv, D], and how many of them every query sees in any case."""
        call, length, table = self.call, self.length(i), self.table(i)
        size = call.k.shape[1] if call.layout == "contiguous" else call.block_size
        count = -(-length // size)
        if self.fault == "neighbour_batch":
            length, table = min(length, self.length(0)), self.table(0)
            count = -(-length // size)
        stop, extra = length, 0
        if self.fault == "last_block_dropped":
            stop = length // size * size
        if self.fault == "last_block_in_full":
            stop = count * size
        if self.fault == "stale_table_entry":
            count += 1
        blocks = table[:count]
        if self.fault == "physical_block_order":
            blocks = np.sort(blocks)
        shape = (0, call.num_kv_heads, call.head_dim)
        found = []
        for which in (0, 1):
            pages = [self.block(b, which) for b in blocks]
            tokens = np.concatenate(pages) if pages else np.zeros(shape, np.float32)
            if self.fault == "stale_table_entry":
                tokens = np.concatenate([tokens[:length], tokens[(count - 1) * size :]])
                extra = size
            else:
                tokens = tokens[:stop]
            found.append(tokens)
        k, v = found
        if self.fault == "neighbour_token" and i > 0 and self.length(i - 1) and length:
            before = Written(call, "").keys(i - 1)
            k, v = (np.concatenate([b[-1:], own[:-1]]) for b, own in zip(before[:2], (k, v), strict=True))
        if self.fault == "k_and_v_swapped":
            k, v = v, k
        return k, v, max(extra, stop - length if self.fault == "last_block_in_full" else 0)

    # heads and masks

    def kv_head(self, head):
        heads, kv_heads = self.call.num_heads, self.call.num_kv_heads
        if self.fault == "kv_heads_tiled":
            return head % kv_heads
        if self.fault == "kv_heads_divided_wrongly":
            return min(head // kv_heads, kv_heads - 1)
        if self.fault == "kv_head_0_for_all":
            return 0
        return head // (heads // kv_heads)

    def seen(self, token, position, length, past):
        """[S] bool: what query `token` of its sequence, at `position`, sees of keys 0 .. length - 1 (past: seen by all)."""
        call, keys = self.call, np.arange(length + past)
        at = token if self.fault == "causal_top_left" else position
        window = call.window
        if window and self.fault in ("window_one_more", "window_one_less"):
            window += 1 if self.fault == "window_one_more" else -1
        if not call.causal or self.fault == "mask_missing":
            seen = np.ones(len(keys), bool)
        elif self.fault == "mask_on_columns":
            seen = keys >= position
        else:
            seen = keys <= at + (self.fault == "mask_one_late") - (self.fault == "mask_one_early")
            if call.window and self.fault != "window_ignored":
                near = at - keys < window
                seen &= near if self.fault == "sinks_dropped" else near | (keys < call.sinks)
        if self.fault == "first_token_missing":
            seen &= keys != 0
        if self.fault == "last_token_missing":
            seen &= keys != length - 1
        seen[length:] = True
        return seen

    def scale(self):
        call = self.call
        return np.float32(
            {
                "scale_missing": 1.0,
                "scale_twice": call.scale**2,
                "scale_of_the_wrong_width": (call.num_heads * call.head_dim) ** -0.5,
                "scale_argument_ignored": call.head_dim**-0.5,
            }.get(self.fault, call.scale)
        )

    def turned(self, x, positions):
        """Rope, x [n, D]."""
        call = self.call
        pairs = (call.rope == "pairs") != (self.fault == "rope_pairs_for_halves")
        half = call.head_dim // 2
        angles = np.asarray(positions, float)[:, None] * call.rope_theta ** (-2 * np.arange(half) / call.head_dim)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        first, second = (slice(0, None, 2), slice(1, None, 2)) if pairs else (slice(0, half), slice(half, None))
        out = np.empty_like(x)
        out[:, first] = x[:, first] * cos - x[:, second] * sin
        out[:, second] = x[:, second] * cos + x[:, first] * sin
        return out

    def bias(self, head, position, keys):
        call = self.call
        if "alibi_slopes" not in call.arrays or self.fault == "alibi_ignored":
            return np.zeros(len(keys), np.float32)
        if self.fault == "alibi_slopes_of_kv_heads":
            head = self.kv_head(head)
        distance = position - keys
        if call.streaming and self.fault != "sinks_at_absolute_positions":
            inside = min(position, call.sinks + call.window - 1) - keys
            distance = np.where(keys < call.sinks, inside, distance)
        return -call.alibi_slopes[head] * distance.astype(np.float32)

    # one row of one head

    def run(self):
        call, starts = self.call, self.starts()
        out = np.zeros(call.q.shape, np.float32)
        with np.errstate(all="ignore"):
            for i in range(len(starts) - 1):
                rows = range(int(starts[i]), int(starts[i + 1]))
                length = self.length(i)
                k, v, past = self.keys(i)
                own = len(k) - past
                for token, row in enumerate(rows):
                    position = length - len(rows) + token
                    seen = self.seen(token, position, length, past)[: len(k)] if own else np.ones(len(k), bool)
                    for head in range(call.num_heads):
                        out[row, head] = self.row(call.q[row, head].astype(np.float32), head, token, position, k, v, seen)
        return out.astype(call.q.dtype)

    def row(self, q, head, token, position, k, v, seen):
        call = self.call
        k, v = k[:, self.kv_head(head)], v[:, self.kv_head(head)]
        keys = np.arange(len(k))
        if self.fault == "empty_row_is_a_mean" and not seen.any():
            return v.mean(axis=0) if len(v) else np.zeros(call.head_dim)
        if call.rope and len(k):
            shift = self.fault == "rope_one_late"
            q = self.turned(q[None], [token if self.fault == "rope_from_zero" else position + shift])[0]
            k = self.turned(k, keys)
        scores = (k @ q) * self.scale()
        if call.softcap and self.fault != "softcap_ignored":
            scores = np.float32(call.softcap) * np.tanh(scores / np.float32(call.softcap))
        scores = scores + self.bias(head, position, keys)
        if self.fault == "half_precision_scores":
            scores = scores.astype(self.half).astype(np.float32)
        scores, v = scores[seen], v[seen]
        padding = -len(k) % call.block_size if self.fault == "padded_keys_counted" else 0
        return self.softmax(scores, v, padding)

    def softmax(self, scores, v, padding):
        if padding:
            scores = np.concatenate([scores, np.zeros(padding, np.float32)])
            v = np.concatenate([v, np.zeros((padding, v.shape[1]), np.float32)])
        if not len(scores):
            return np.zeros(v.shape[1], np.float32)
        if self.fault == "softmax_without_maximum":
            p = np.exp(scores)
            return (p @ v) / p.sum()
        if self.fault == "half_precision_sums":
            p = np.exp(scores - scores.max()).astype(self.half)
            total = self.half.type(0)
            for each in p:
                total = self.half.type(total + each)
            return (p.astype(np.float32) @ v) / np.float32(total)
        m, l, o = np.float32(-np.inf), np.float32(0), np.zeros(v.shape[1], np.float32)  # noqa: E741
        for start in range(0, len(scores), PIECE):
            s, w = scores[start : start + PIECE], v[start : start + PIECE]
            new = max(m, s.max())
            p = np.exp(s - new)
            old = np.exp(m - new)
            l, o, m = l * old + p.sum(), o * old + p @ w, new  # noqa: E741
        return o / l
