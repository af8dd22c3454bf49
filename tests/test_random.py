"""Random numbers are a function: published words, any slice to the bit, any layout the same."""

from __future__ import annotations

import hashlib
import itertools
import math
import struct

import pytest
import torch

from penteract import random
from penteract.placement import Box, Init, Piece, Placement, assemble, split_range, whole
from penteract.random import (
    bits,
    bits_box,
    bits_range,
    fill_box,
    initialise,
    keep_mask,
    keep_runs,
    normal,
    normal_range,
    uniform,
)

# Counter, key and output words of the Random123 library's kat_vectors, philox 4x32 10.
KNOWN = [
    ("0 0 0 0", "0 0", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 in Python integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & (2**32 - 1), (p0 >> 32) ^ c[3] ^ k[1], p0 & (2**32 - 1)]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def word(seed: int, stream: str, index: int) -> int:
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    block = index // 4
    counter = [block % 2**32, block >> 32, name % 2**32, name >> 32]
    return philox(counter, [seed % 2**32, seed >> 32])[index % 4]


def box_muller(w0: int, w1: int) -> tuple[float, float]:
    """The definition in Python floats: the same operations, each rounded once."""

    def polynomial(z: float, coefficients: tuple[float, ...]) -> float:
        out = z * coefficients[-1]
        for c in reversed(coefficients[:-1]):
            out = (out + c) * z
        return out

    m, e = math.frexp(w0 + 0.5)
    if m >= math.sqrt(0.5):
        e -= 32
    else:
        m, e = 2 * m, e - 33
    s = (m - 1) / (m + 1)
    log = e * math.log(2) + (polynomial(s * s, random._LOG) + 2) * s
    x = -2 * log
    (guess,) = struct.unpack("<q", struct.pack("<d", x))
    (y,) = struct.unpack("<d", struct.pack("<q", 0x5FE6EB50C7B537A9 - (guess >> 1)))
    for _ in range(4):
        y *= y * y * (-0.5 * x) + 1.5
    r = y * x * (1 if w1 < 2**31 else -1)
    t = ((w1 % 2**31) - 2**30) * (math.pi * 2.0**-32)
    s = polynomial(t * t, random._SIN) * t + t
    c = polynomial(t * t, random._COS) + 1
    return (1 - 2 * (s * s)) * r, (2 * (s * c)) * r


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("counter", "key", "output"), KNOWN)
def test_published_words(counter, key, output, device):
    counter, key, output = ([int(x, 16) for x in text.split()] for text in (counter, key, output))
    assert philox(counter, key) == output
    state = tuple(torch.tensor([c], device=device) for c in counter)
    assert [int(w) for w in random._philox_rounds(state, tuple(key))] == output


@pytest.mark.parametrize("device", DEVICES)
def test_bits_follow_the_counter_layout(device):
    index = [0, 1, 2, 3, 4, 5, 2**32 - 1, 2**34 + 3, 2**40 + 2, 2**63 - 1]
    for seed, stream in ((0, ""), (2**64 - 1, "layer.3.mlp"), (2**32, "größe")):
        got = bits(seed, stream, torch.tensor(index, device=device).view(2, 5))
        assert got.shape == (2, 5)
        assert got.flatten().tolist() == [word(seed, stream, i) for i in index]


def test_ranges_are_slices_of_bits():
    n = 70000
    full = bits(7, "a", torch.arange(n))
    generator = torch.Generator().manual_seed(0)
    for _ in range(300):
        start = int(torch.randint(n, (), generator=generator))
        stop = min(n, start + int(torch.randint(71, (), generator=generator)))
        assert torch.equal(bits_range(7, "a", start, stop), full[start:stop])
    assert torch.equal(bits_range(7, "a", 1, n), full[1:])
    assert bits_range(7, "a", 5, 5).shape == (0,)
    strided = torch.arange(n).view(100, 700).t()[::3, 1:]
    assert torch.equal(bits(7, "a", strided), full.view(100, 700).t()[::3, 1:])


def test_errors_give_the_numbers():
    with pytest.raises(ValueError, match="seed -1"):
        bits(-1, "a", torch.arange(2))
    with pytest.raises(ValueError, match="seed 18446744073709551616"):
        normal_range(2**64, "a", 0, 2)
    with pytest.raises(ValueError, match=r"\[3, 1\)"):
        bits_range(0, "a", 3, 1)
    with pytest.raises(ValueError, match=r"probability 1\.5"):
        keep_mask(0, "a", torch.arange(2), 1.5)
    with pytest.raises(ValueError, match="probability nan"):
        keep_runs(0, "a", torch.arange(2), 3, math.nan)
    with pytest.raises(ValueError, match="cannot hold the box"):
        fill_box(torch.empty(3), 0, "a", shape=(4,), box=whole((4,)))
    with pytest.raises(ValueError, match="leaves the shape"):
        fill_box(torch.empty(3), 0, "a", shape=(4,), box=Box((2,), (3,)))
    with pytest.raises(ValueError, match="floating dtype"):
        fill_box(torch.empty(4, dtype=torch.int64), 0, "a", shape=(4,), box=whole((4,)))


# Normals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_normals_are_one_rounding_an_operation(device):
    """Equal to the bit to Python's floats: no fused operation, no library function in between."""
    n = 4000
    expected = []
    for pair in range(n // 2):
        expected += box_muller(*(word(3, "w", 2 * pair + j) for j in range(2)))
    assert normal_range(3, "w", 0, n, device=device).tolist() == expected


def test_inverse_roots_are_accurate():
    x = normal_range(0, "x", 0, 50_000).abs()
    error = random._inverse_root(x) * x.sqrt() - 1
    assert error.abs().max() < 1e-15


def test_normals_are_accurate_at_the_ends():
    words = [0, 1, 2**30, 2**31 - 1, 2**31, 2**32 - 1]
    for w0, w1 in itertools.product(words, words):
        got = torch.empty(2, 1, dtype=torch.float64)
        random._box_muller(torch.tensor([w0]), torch.tensor([w1]), got[0], got[1])
        r = math.sqrt(-2 * math.log1p((w0 + 0.5 - 2**32) / 2**32))
        angle = math.pi * (w1 - 2**30) / 2**31
        expected = (r * math.cos(angle), r * math.sin(angle))
        assert got.flatten().tolist() == pytest.approx(expected, rel=1e-14, abs=1e-15 * max(r, 1))


def test_the_stream_does_not_change():
    """A digest of the first numbers: a change here changes every model's start values."""
    digest = hashlib.sha256(normal_range(1234, "embed.weight", 0, 1000).numpy().tobytes())
    assert digest.hexdigest()[:16] == "f58914f749436910"


@pytest.mark.parametrize("threads", [1, 2])
def test_any_slice_is_equal_to_the_bit(threads):
    """Odd offsets, short lengths, strided boxes, tiles above the grain of torch's threads."""
    before = torch.get_num_threads()
    n = 600 * 1001
    full = normal(5, "w", torch.arange(n))  # every element from a block of its own
    try:
        torch.set_num_threads(threads)
        assert torch.equal(normal_range(5, "w", 0, n), full)
        generator = torch.Generator().manual_seed(threads)

        def pick(high: int) -> int:
            return int(torch.randint(high, (), generator=generator))

        for _ in range(1000):
            start = pick(n - 70)
            stop = start + 1 + pick(70)
            assert torch.equal(normal_range(5, "w", start, stop), full[start:stop])
        for length in (2**15 - 1, 2**16 + 3, 2**17 + 1, 2**18 + 5):
            start = pick(n - length)
            assert torch.equal(normal_range(5, "w", start, start + length), full[start:][:length])
        for shape in ((600, 1001), (1001, 600), (77, 13, 600), (300, 2, 1001)):
            for _ in range(40):
                offset = tuple(pick(k) for k in shape)
                size = tuple(1 + pick(k - a) for k, a in zip(shape, offset, strict=True))
                box = Box(offset, size)
                out = torch.empty(size, dtype=torch.float64)
                fill_box(out, 5, "w", shape=shape, box=box)
                assert torch.equal(out, full.view(shape)[box.slices()])
    finally:
        torch.set_num_threads(before)


def test_dtypes_are_one_rounding_of_one_normal():
    shape, box = (9, 40), Box((2, 3), (5, 33))

    def filled(dtype):
        stored = torch.zeros(33, 11, 2, dtype=dtype).transpose(0, 1)[3:8, :, 1]  # strided
        fill_box(stored, 1, "w", shape=shape, box=box, std=0.02)
        return stored

    exact = normal_range(1, "w", 0, 360).view(shape)[box.slices()] * 0.02
    assert torch.equal(filled(torch.float64), exact)
    assert torch.equal(filled(torch.float32), exact.float())
    assert torch.equal(filled(torch.bfloat16), exact.float().bfloat16())
    assert torch.equal(filled(torch.float16), exact.float().half())


def test_tiles_bound_the_memory():
    for size in ((), (0, 3), (5,), (100,), (7, 9), (3, 40), (2, 3, 4, 5), (1, 1, 30), (50, 1)):
        tiles = list(random._tiles(size, 16))
        assert all(0 < tile.numel <= 16 for tile in tiles)
        array = torch.arange(math.prod(size)).view(size)
        parts = [array[tile.slices()].flatten() for tile in tiles]
        got = torch.cat(parts) if parts else array.flatten()
        assert torch.equal(got.sort().values, array.flatten())


# Statistics -------------------------------------------------------------------------------------


def test_normals_look_normal():
    n = 400_000
    x = normal_range(11, "stats", 0, n)
    assert abs(x.mean()) < 4 / math.sqrt(n)
    assert abs(x.var() - 1) < 4 * math.sqrt(2 / n)
    assert abs((x**3).mean()) < 4 * math.sqrt(15 / n)
    assert abs((x**4).mean() - 3) < 4 * math.sqrt(96 / n)
    cumulative = 0.5 * (1 + torch.erf(x.sort().values / math.sqrt(2)))
    distance = (cumulative - (torch.arange(n) + 0.5) / n).abs().max()
    assert distance < 1.95 / math.sqrt(n)  # Kolmogorov-Smirnov at 0.1 %
    assert x.unique().numel() == n


def test_streams_seeds_and_neighbours_are_independent():
    n = 100_000
    base = normal_range(1, "a", 0, n + 5)
    others = [
        normal_range(1, "b", 0, n),
        normal_range(2, "a", 0, n),
        normal_range(2**32, "a", 0, n),
    ]
    others += [base[lag : n + lag] for lag in (1, 2, 3, 4, 5)]
    for other in others:
        assert abs((base[:n] * other).mean()) < 4.5 / math.sqrt(n)
        assert abs(((base[:n] ** 2 - 1) * (other**2 - 1)).mean()) < 4.5 * 2 / math.sqrt(n)


def test_uniforms_fill_the_open_interval():
    n = 100_000
    u = uniform(1, "u", torch.arange(n))
    assert u.dtype == torch.float64
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1
    assert abs(u.mean() - 0.5) < 4 / math.sqrt(12 * n)
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 4 * math.sqrt(126)


# Dropout masks ----------------------------------------------------------------------------------


def test_masks_are_slices_of_one_global_mask():
    t, h = 37, 22
    index = torch.arange(t * h).view(t, h)
    stream = "dropout/step 3/micro-batch 1/layer 2"
    full = keep_mask(9, stream, index, 0.7)
    assert full.dtype == torch.bool
    assert full.shape == (t, h)
    assert not torch.equal(full[:18], full[18:36])  # shards do not repeat one another
    for world in (1, 2, 3, 4):
        for rank in range(world):
            rows, columns = slice(*split_range(t, world, rank)), slice(*split_range(h, world, rank))
            assert torch.equal(keep_mask(9, stream, index[rows], 0.7), full[rows])
            local = keep_mask(9, stream, index[:, columns], 0.7)
            assert torch.equal(local, full[:, columns])
            width = columns.stop - columns.start
            runs = keep_runs(9, stream, index[:, columns.start], width, 0.7)
            assert torch.equal(runs, local)
    shuffled = torch.randperm(t, generator=torch.Generator().manual_seed(0))
    assert torch.equal(keep_runs(9, stream, index[shuffled, 0], h, 0.7), full[shuffled])
    assert keep_runs(9, stream, index[:0, 0], h, 0.7).shape == (0, h)
    assert keep_runs(9, stream, index[:6, 0].view(2, 3), 5, 0.7).shape == (2, 3, 5)


def test_masks_keep_the_asked_share():
    index = torch.arange(200_000)
    for p in (0.1, 0.5, 0.9):
        kept = keep_mask(1, "d", index, p).double().mean()
        assert abs(kept - p) < 4 * math.sqrt(p * (1 - p) / len(index))
    assert keep_mask(1, "d", index, 1.0).all()
    assert not keep_mask(1, "d", index, 0.0).any()
    threshold = bits(1, "d", index) < 2**31
    assert torch.equal(keep_mask(1, "d", index, 0.5), threshold)


# Initialisation ---------------------------------------------------------------------------------


def parameter(shape, pieces, init=Init("normal", 0.5), dtype=torch.float64):  # noqa: B008
    placement = Placement(tuple(shape), tuple(pieces), {}, init, decay=True)
    stored = torch.full(placement.shape, math.nan, dtype=dtype)
    initialise(stored, placement, seed=21)
    return placement, stored


def grouped(rank: int, ep: int, tp: int, etp: int):
    """Experts [e, 2f + pad, h] of gate|up over (ep, etp), each part of both matrices one piece."""
    e0, e1 = split_range(3, ep, rank % ep)
    f0, f1 = split_range(5, etp, tp)
    n = f1 - f0
    pieces = [
        Piece(f"{e}.{part}", (5, 7), Box((f0, 0), (n, 7)), (e - e0, i * n, 0))
        for e in range(e0, e1)
        for i, part in enumerate(("gate", "up"))
    ]
    return (e1 - e0, 2 * n + 1, 7), pieces


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_logical_model_is_the_same_in_every_layout(dtype):
    digests = set()
    for ep, etp in itertools.product((1, 2, 3), (1, 2, 3, 4)):
        parts: dict[str, list] = {}
        for rank, tp in itertools.product(range(ep), range(etp)):
            placement, stored = parameter(*grouped(rank, ep, tp, etp), dtype=dtype)
            assert (stored[:, -1] == 0).all()  # padding
            for f in placement.fragments():
                parts.setdefault(f.tensor, []).append((f, stored[f.local.slices()]))
        model = {name: assemble(name, part) for name, part in sorted(parts.items())}
        assert len({tuple(w.flatten().tolist()) for w in model.values()}) == len(model)
        text = repr([(name, w.tolist()) for name, w in model.items()])
        digests.add(hashlib.sha256(text.encode()).hexdigest())
    assert len(digests) == 1


def test_columns_and_rows_are_slices():
    full = parameter((6, 11), [Piece("w", (6, 11), whole((6, 11)), (0, 0))])[1]
    for world, rank in ((w, r) for w in (2, 3, 4) for r in range(w)):
        a, b = split_range(11, world, rank)
        columns = Piece("w", (6, 11), Box((0, a), (6, b - a)), (0, 0))
        assert torch.equal(parameter((6, b - a), [columns])[1], full[:, a:b])
        a, b = split_range(6, world, rank)
        rows = Piece("w", (6, 11), Box((a, 0), (b - a, 11)), (0, 0))
        assert torch.equal(parameter((b - a, 11), [rows])[1], full[a:b])


def test_other_kinds_of_start_values():
    piece = Piece("w", (5,), whole((5,)), (0,))
    for init, value in ((Init("ones"), 1), (Init("zeros"), 0), (Init("constant", 0.25), 0.25)):
        assert parameter((7,), [piece], init)[1].tolist() == [value] * 5 + [0, 0]
    scalar = Piece("gate", (), Box((), ()), ())
    assert parameter((), [scalar], Init("constant", 3.0))[1].item() == 3
    assert parameter((), [scalar])[1].isfinite()
    empty = Piece("w", (4, 3), Box((4, 0), (0, 3)), (0, 0))
    assert parameter((0, 3), [empty])[1].shape == (0, 3)


def test_initialise_fills_parameters_and_checks_the_shape():
    weight = torch.nn.Parameter(torch.empty(3, 2))
    placement = Placement(
        (3, 2), (Piece("w", (3, 2), whole((3, 2)), (0, 0)),), {}, Init("normal", 1), True
    )
    initialise(weight, placement, 4)
    assert torch.equal(weight.flatten(), normal_range(4, "w", 0, 6).float())
    assert weight.requires_grad
    assert weight.grad_fn is None
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(3, 2\)"):
        initialise(torch.empty(2, 3), placement, 4)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((7, 9), Box((2, 3), (4, 5))),
        ((6, 8), Box((1, 4), (5, 4))),
        ((30,), Box((3,), (20,))),
        ((3, 5, 4), Box((0, 1, 0), (3, 2, 4))),
        ((), Box((), ())),
        ((4, 4), Box((1, 1), (0, 3))),
    ],
)
def test_words_of_a_box_are_those_of_its_elements(
    shape: tuple[int, ...], box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it is cut into parts, and shifted along its stream."""
    numbers = torch.arange(math.prod(shape)).view(shape)[box.slices()]
    for chunk, shift in itertools.product((3, 1 << 10), (0, 5 << 38)):
        monkeypatch.setattr(random, "_chunk", lambda device, chunk=chunk: chunk)
        found = torch.full(box.size, -1)
        for part, words in bits_box(3, "b", shape=shape, box=box, shift=torch.tensor(shift)):
            assert bool((found[part.slices()] == -1).all())
            found[part.slices()] = words
        monkeypatch.undo()
        assert torch.equal(found, bits(3, "b", numbers + shift))
