"""Trains the model that ships with the project and writes it as a Hugging Face directory.

    pip install torch==2.13.0 'nanokv[train]'          # the CPU build is enough
    python -m weights.train_default --corpora DIR --bpe DIR --out DIR
    python -m weights.train_default --corpora DIR --bpe DIR --out weights/default --start DIR --steps 700 --rate 0.3 \
        --dropout 0.05 --seed 1

`--corpora` holds the texts that weights/corpora.py names; `--bpe` holds GPT-2's vocab.bpe
and encoder.json. The tokenizer is the head of GPT-2's own byte-pair encoding: its 256 bytes, its first 3,839 merges, and
<|endoftext|> last. About 10,000 tokens a second on two cores: some 75 minutes.

Four departures from a plain next-token recipe. A quarter of the batches are 512 tokens long, so that every learned position
is trained though most batches are short and fast. A third of the rows begin where a document begins, since a prompt does too
and GPT-2's convention puts no token before it. The blocks' matrices follow Muon (Jordan et al. 2024, as torch.optim has it),
which after 250 steps was 0.2 nats ahead of AdamW at the same cost. The texts are few and seen often: without dropout the loss
on stories that were trained on fell 0.4 nats below that on stories that were not.
"""

import argparse
import json
import math
import random
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.nn import functional as F

from nanokv.tokenizer import Tokenizer
from weights.corpora import END, documents, held_out

VOCAB, LAYERS, WIDTH, HEADS, POSITIONS = 4096, 6, 192, 6, 512
MATRIX_RATE, RATE = 4e-3, 2e-3  # of the blocks' matrices, by Muon, and of everything else, by AdamW


def write_tokenizer(bpe: Path, out: Path) -> Tokenizer:
    """vocab.json and merges.txt, the first lines of GPT-2's own, and the tokenizer that they make."""
    lines = (bpe / "vocab.bpe").read_text(encoding="utf-8").splitlines()
    vocab = json.loads((bpe / "encoder.json").read_text(encoding="utf-8"))
    head = {token: index for token, index in vocab.items() if index < VOCAB - 1} | {END: VOCAB - 1}
    (out / "merges.txt").write_text("\n".join(lines[: 1 + VOCAB - 1 - 256]) + "\n", encoding="utf-8")
    (out / "vocab.json").write_text(json.dumps(head, ensure_ascii=False), encoding="utf-8")
    return Tokenizer.from_vocab_and_merges(out / "vocab.json", out / "merges.txt")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.c_fc, self.c_out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (a.view(b, t, HEADS, -1).transpose(1, 2) for a in self.c_attn(self.ln_1(x)).split(WIDTH, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.c_proj(mixed.transpose(1, 2).reshape(b, t, WIDTH)))
        return x + self.drop(self.c_out(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh")))


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.h = nn.ModuleList(Block(dropout) for _ in range(LAYERS))
        self.ln_f, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("c_proj.weight", "c_out.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * LAYERS) if residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1])))
        for block in self.h:
            x = block(x)
        return F.linear(self.ln_f(x), self.wte.weight)


def loss_of(model: Model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def validate(model: Model, stream: torch.Tensor) -> float:
    """Mean nats a token over the held-out stream, in float32, in windows of all positions that do not overlap."""
    model.eval()
    windows = stream[: (len(stream) - 1) // POSITIONS * POSITIONS + 1].unfold(0, POSITIONS + 1, POSITIONS)
    losses = [F.cross_entropy(model(w[:, :-1]).flatten(0, 1), w[:, 1:].flatten()) * len(w) for w in windows.split(16)]
    model.train()
    return float(sum(losses)) / len(windows)


@torch.no_grad()
def sample(model: Model, tokenizer: Tokenizer, prompt: str, count: int = 60) -> str:
    model.eval()
    tokens = tokenizer.encode(prompt)
    while len(tokens) < count and tokens[-1] != VOCAB - 1:
        tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
    model.train()
    return tokenizer.decode(tokens)


def published(name: str) -> tuple[str, bool]:
    """GPT-2's name of a parameter, and whether it stands there in Conv1D's order, [in, out]."""
    for ours, theirs in {"c_attn": "attn.c_attn", "c_proj": "attn.c_proj", "c_fc": "mlp.c_fc", "c_out": "mlp.c_proj"}.items():
        if f".{ours}." in name:
            return name.replace(ours, theirs), True
    return name, False


def export(model: Model) -> dict[str, np.ndarray]:
    """The parameters by GPT-2's names, in float16."""
    tensors = {}
    for name, value in model.state_dict().items():
        theirs, turned = published(name)
        array = value.numpy().astype(np.float16)
        tensors[theirs] = np.ascontiguousarray(array.T if turned else array)
    return tensors


def restore(model: Model, tensors: dict[str, np.ndarray]) -> None:
    """The inverse of export()."""
    state = {}
    for name in model.state_dict():
        theirs, turned = published(name)
        array = tensors[theirs].astype(np.float32)
        state[name] = torch.from_numpy(np.ascontiguousarray(array.T if turned else array))
    model.load_state_dict(state)


CONFIG = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": VOCAB, "n_layer": LAYERS, "n_embd": WIDTH,
    "n_head": HEADS, "n_positions": POSITIONS, "n_ctx": POSITIONS, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "bos_token_id": VOCAB - 1, "eos_token_id": VOCAB - 1, "tie_word_embeddings": True,
    "torch_dtype": "float16",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpora", type=Path, required=True)
    parser.add_argument("--bpe", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="go on from the model in this directory")
    parser.add_argument("--rate", type=float, default=1.0, help="share of the learning rates")
    parser.add_argument("--dropout", type=float, default=0.1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)

    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = write_tokenizer(args.bpe, args.out)
    texts = documents(args.corpora)
    random.Random(args.seed).shuffle(texts)
    ids = [tokenizer.encode(text) for text, _ in texts]
    streams: dict[bool, list[np.ndarray]] = {True: [], False: []}
    for (text, times), tokens in zip(texts, ids, strict=True):
        streams[held_out(text)] += [np.array([*tokens, VOCAB - 1], np.int64)] * times
    order = rng.permutation(len(streams[False]))
    train = torch.from_numpy(np.concatenate([streams[False][i] for i in order]))
    starts = np.cumsum([0] + [len(streams[False][i]) for i in order[:-1]])
    valid = torch.from_numpy(np.concatenate(streams[True]))
    print(f"{len(texts):,} documents, {len(train):,} training tokens, {len(valid):,} held out", flush=True)

    model = Model(args.dropout)
    if args.start:
        restore(model, load_file(args.start / "model.safetensors"))
    matrices = [p for p in model.h.parameters() if p.ndim == 2]
    groups = [
        {"params": [model.wte.weight, model.wpe.weight], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizers = [
        torch.optim.Muon(matrices, lr=MATRIX_RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True),
    ]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    begin, seen = time.time(), 0
    for step in range(args.steps):
        share = args.rate * min(1, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / args.steps)))
        for optimizer, rate in zip(optimizers, (MATRIX_RATE, RATE), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        rows, length = (12, POSITIONS) if rng.random() < 0.25 else (32, 192)
        at = rng.integers(0, len(train) - length - 1, rows)
        aligned = rng.choice(starts[starts < len(train) - length - 1], rows)
        at = np.where(rng.random(rows) < 1 / 3, aligned, at)
        loss = loss_of(model, torch.stack([train[a : a + length + 1] for a in at]))
        model.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        seen += rows * length
        if step % 50 == 0:
            print(f"step {step:5} loss {loss.item():.3f} {seen / (time.time() - begin):.0f} tokens/s", flush=True)
        if step % 1000 == 999:
            print(
                f"step {step:5} held-out {validate(model, valid):.4f} | {sample(model, tokenizer, 'Hello, how')!r}", flush=True
            )

    for parameter in model.parameters():
        parameter.data = parameter.data.half().float()  # what is measured below is what is written
    tensors = export(model)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n", encoding="utf-8")
    minutes = (time.time() - begin) / 60
    print(f"held-out loss {validate(model, valid):.4f} nats a token, {seen:,} tokens seen, {minutes:.0f} minutes")
    for prompt in ("Hello, how", "Once upon a time"):
        print(repr(sample(model, tokenizer, prompt, 90)))


if __name__ == "__main__":
    main()
