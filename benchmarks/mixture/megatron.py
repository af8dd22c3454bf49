"""Part "megatron": our layer beside Megatron-Core's, on two ranks that each hold half the experts.

For information: its fused and grouped kernels need CUDA, and on a CPU it is not what it is made
for. A token goes to the rank of each of its experts, once for each, and nothing is computed while
it travels.
"""

from __future__ import annotations

import torch
from mixture.layer import TOPK, Shape, calling, given, title
from mixture.products import apart
from mixture.ranks import (
    RANKS,
    TOLERANCE,
    Found,
    Half,
    Watches,
    measured_on_ranks,
    on_all_ranks,
    profiles_of,
    sent_by,
    summed,
)
from peers.megatron_moe import MegatronMoE
from tensor_parallel import quartiles
from timing import kinds
from timing.turns import Case, Measured

NAMES = ("penteract", "megatron")


def measure(shape: Shape, rounds: int, profile: bool) -> Found:
    values, watches = given(shape), Watches()
    half = Half(shape, values)
    peer = MegatronMoE(values.router, values.inner, values.down, TOPK)
    ours = half.call("all_to_all", shared=False)
    x, dy = values.x[half.rows], values.dy[half.rows]
    theirs = peer.running(calling(peer.forward, x, dy, peer.layer.zero_grad, peer.gradients))
    cases = [Case(name, call) for name, call in zip(NAMES, (ours, theirs), strict=True)]
    y, dx, *gradients = theirs()
    wanted = summed([y, dx, *peer.stacked(gradients)])
    worst = apart(summed(half.fresh(ours)), wanted)
    del wanted, gradients
    sent = sent_by([ours], half.mesh)
    before = peer.sent.bytes, peer.sent.messages
    theirs()
    counted = (peer.sent.bytes - before[0], peer.sent.messages - before[1])
    sent = torch.cat([sent, torch.tensor([counted], dtype=sent.dtype)])
    profiles = profiles_of(shape, cases) if profile else torch.empty(0)
    agreement = on_all_ranks(worst), TOLERANCE[shape.dtype]
    return Found(Measured.of(cases, agreement, rounds, watches.read), sent, profiles)


def report(shape: Shape, rounds: int, profile: bool) -> bool:
    """Print one case; whether both compute the same."""
    found = measured_on_ranks(measure, shape, rounds, profile)
    first = found[0].measured
    if not first.agrees(title(f"Megatron-Core, ep = {RANKS}", shape)):
        return False
    longest = torch.stack([x.measured.times[..., 0] for x in found]).amax(0)
    sent = torch.stack([x.sent for x in found]).amax(0)
    for i, name in enumerate(first.names):
        what = f"{1e-6 * sent[i, 0]:8.2f} MB sent in {sent[i, 1]:.0f} messages"
        print(f"  {name:<20} {quartiles(1e3 * longest[:, i])} ms  {what}")
    print(f"  {'megatron / penteract':<20} {quartiles(longest[:, 1] / longest[:, 0])}", flush=True)
    if profile:
        kinds.table(first.names, torch.stack([x.profiles for x in found]).mean(0))
    return True
