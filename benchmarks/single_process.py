"""One process beside Hugging Face transformers: a training step of a 28-million-parameter Llama.

    python benchmarks/single_process.py [--rounds 7]

Both train the same shape (hidden 512, 8 layers, 8 heads, 4 key/value heads, feed-forward 1408,
vocabulary 8192, tied, 2 x 512 tokens) with fused AdamW and clipping on one thread, in turn, step by
step, after a warm-up. Printed are the median step, the spread, the ratio theirs / ours, and the
share of the matmul peak: model FLOPs a second over what one large matmul of the same type reaches
in the same run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from penteract.config import Config, DataConfig, ModelConfig, OptimConfig, TrainConfig, resolve
from penteract.families import model_spec
from penteract.grid import Grid
from penteract.mesh import create_mesh
from penteract.nn.flops import training_flops
from penteract.train.language_model import synthetic_task
from penteract.train.run import Run

SEQ, BATCH, VOCAB = 512, 2, 8192
Step = Callable[[], None]


def ours(dtype: str) -> tuple[Step, float]:
    """Our step, and its model FLOPs."""
    config = resolve(
        Config(
            model=ModelConfig(
                layers=8, hidden=512, ffn=1408, heads=8, kv_heads=4, vocab=VOCAB, tied=True
            ),
            data=DataConfig(seq=SEQ),
            optim=OptimConfig(schedule="constant"),
            train=TrainConfig(steps=1000, global_batch=BATCH, micro_batch=BATCH, dtype=dtype),
        )
    )
    mesh, device = create_mesh(Grid(1), 0), torch.device("cpu")
    run = Run(synthetic_task(config, mesh, device), config, mesh, device)
    flops = training_flops(model_spec(config), [SEQ] * BATCH)
    return lambda: run.update() and None, flops


def theirs(dtype: str) -> Step:
    """The same step as a user of transformers writes it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=1408,
        vocab_size=VOCAB,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).to(getattr(torch, dtype))
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ))

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def matmul_peak(dtype: str) -> float:
    """FLOPs a second of the best of several large square products."""
    n = 2048
    a, b = (torch.randn(n, n).to(getattr(torch, dtype)) for _ in range(2))
    times = [_seconds(lambda: a @ b) for _ in range(5)]
    return 2 * n**3 / min(times)


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def compare(dtype: str, rounds: int) -> None:
    our_step, flops = ours(dtype)
    steps: dict[str, Step] = {"penteract": our_step, "transformers": theirs(dtype)}
    for step in steps.values():
        step(), step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    peaks = []
    for i in range(rounds):
        order = list(steps)[:: 1 if i % 2 else -1]
        for name in order:
            times[name].append(_seconds(steps[name]))
        peaks.append(matmul_peak(dtype))
    peak = statistics.median(peaks)
    print(f"\n{dtype}: matmul peak {peak / 1e9:.0f} GFLOP/s (median of {rounds})")
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(
            f"  {name:<13} {median * 1e3:7.0f} ms a step  ({min(seconds) * 1e3:.0f} .. "
            f"{max(seconds) * 1e3:.0f})  {flops / median / 1e9:5.1f} GFLOP/s  "
            f"{flops / median / peak:.0%} of peak"
        )
    ratios = [b / a for a, b in zip(*times.values(), strict=True)]
    print(
        f"  ratio theirs / ours: {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f} .. {max(ratios):.2f}), round by round"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds (7)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"one thread, torch {torch.__version__}, {BATCH} x {SEQ} tokens, ours and theirs in turn")
    for dtype in arguments.dtypes:
        compare(dtype, arguments.rounds)


if __name__ == "__main__":
    main()
