"""Counter-based random numbers: a number is a function of (seed, stream name, element index).

Philox4x32-10 turns a 128-bit counter and a 64-bit key into four 32-bit words. The key is the seed;
the counter is the block number (64 bits) and a hash of the stream's name (64 bits); element i of a
stream is word i % 4 of block i // 4. There is no generator state, so any rank makes any slice.

Everything after the words is IEEE float64 addition, multiplication and division, whose results do
not depend on the vector width, the tail of a buffer, the threads or the processor, as those of
library logarithms, sines and roots do. So normals are equal to the bit however they are sliced.

Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011), for Philox; Box and
Muller (1958) for normals; Sun's fdlibm for the polynomials of logarithm, sine and cosine.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product

import torch
from torch import Tensor

from penteract.placement import Box, Fragment, Init, Placement, row_strides, whole

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

# log(m) = 2s + s * (L1 z + L2 z^2 + ...) with s = (m - 1) / (m + 1), z = s^2, where m is between
# sqrt(1/2) and sqrt(2).
_LOG = (
    6.666666666666735130e-01,
    3.999999999940941908e-01,
    2.857142874366239149e-01,
    2.222219843214978396e-01,
    1.818357216161805012e-01,
    1.531383769920937332e-01,
    1.479819860511658591e-01,
)
# sin(t) = t + t * (S1 z + S2 z^2 + ...) with z = t^2, |t| <= pi / 4.
_SIN = (
    -1.66666666666666324348e-01,
    8.33333333332248946124e-03,
    -1.98412698298579493134e-04,
    2.75573137070700676789e-06,
    -2.50507602534068634195e-08,
    1.58969099521155010221e-10,
)
# cos(t) = 1 + C1 z + C2 z^2 + ... with z = t^2, |t| <= pi / 4.
_COS = (
    -0.5,
    4.16666666666666019037e-02,
    -1.38888888888741095749e-03,
    2.48015872894767294178e-05,
    -2.75573143513906633035e-07,
    2.08757232129817482790e-09,
    -1.13596475577881948265e-11,
)
_ROOT_BITS = 0x5FE6EB50C7B537A9  # first guess of an inverse root, less half the argument's bits
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD  # float64 sqrt(1/2) read as an integer


def bits(seed: int, stream: str, index: Tensor) -> Tensor:
    """Uniform 32-bit words as int64, in the shape of `index` (int64 element numbers, >= 0).

    Each element computes a whole block: for runs of neighbours `bits_range` is four times faster.
    """
    out = torch.empty_like(index, dtype=torch.int64, memory_format=torch.contiguous_format)
    flat_index, flat_out = index.reshape(-1), out.view(-1)
    step = _chunk(index.device) // 4
    for start in range(0, flat_index.numel(), step):
        part = flat_index[start : start + step]
        words = torch.stack(_philox(seed, stream, part >> 2), -1)  # [n, 4]
        flat_out[start : start + step] = words.gather(-1, (part & 3)[:, None])[:, 0]
    return out


def bits_range(
    seed: int, stream: str, start: int, stop: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Words of the elements [start, stop), int64 [stop - start]; equal to `bits` of the range."""
    out = torch.empty(_checked_range(start, stop), dtype=torch.int64, device=device)
    for a, b in _chunks(start, stop, out.device):
        block = torch.arange(a // 4, -(-b // 4), device=device)
        words = torch.stack(_philox(seed, stream, block), -1).view(-1)
        out[a - start : b - start] = words[a % 4 : a % 4 + b - a]
    return out


def bits_box(
    seed: int, stream: str, *, shape: Sequence[int], box: Box, shift: Tensor
) -> Iterator[tuple[Box, Tensor]]:
    """Words of a box of a logical tensor of `shape`: (a part of the box, int64 of its size) …

    An element's index in the stream is its row-major position in the logical tensor plus `shift`,
    an int64 scalar that is a multiple of 4, on the device where the words are made. Parts are
    counted from the box's corner; they are small, so that little is held at a time.
    """

    def blocks(number: Tensor) -> Tensor:
        return torch.stack(_philox(seed, stream, number), -1)

    for tile in _tiles(box.size, _chunk(shift.device)):
        yield tile, _tile_values(blocks, shape, tile.shifted(box.offset), shift)


def uniform(seed: int, stream: str, index: Tensor) -> Tensor:
    """float64 numbers in (0, 1), never 0 or 1, (word + 1/2) / 2^32, in the shape of `index`."""
    return bits(seed, stream, index).double().add_(0.5).mul_(2.0**-32)


def normal(seed: int, stream: str, index: Tensor) -> Tensor:
    """float64 standard normals, in the shape of `index`; elements 2j and 2j + 1 share two words.

    Each element computes a whole block: for runs of neighbours use `normal_range` or `fill_box`.
    """
    out = torch.empty_like(index, dtype=torch.float64, memory_format=torch.contiguous_format)
    flat_index, flat_out = index.reshape(-1), out.view(-1)
    step = _chunk(index.device) // 4
    for start in range(0, flat_index.numel(), step):
        part = flat_index[start : start + step]
        values = _normal_blocks(seed, stream, part >> 2)  # [n, 4]
        flat_out[start : start + step] = values.gather(-1, (part & 3)[:, None])[:, 0]
    return out


def normal_range(
    seed: int, stream: str, start: int, stop: int, *, device: torch.device | str = "cpu"
) -> Tensor:
    """Standard normals of the elements [start, stop), float64 [stop - start]."""
    size = _checked_range(start, stop)
    out = torch.empty(size, dtype=torch.float64, device=device)
    fill_box(out, seed, stream, shape=(stop,), box=Box((start,), (size,)))
    return out


def keep_mask(seed: int, stream: str, index: Tensor, probability: float) -> Tensor:
    """Bool, True with `probability` (1 - the dropout rate), in the shape of `index`.

    The word is compared with an integer threshold, so every device decides alike. Raises ValueError
    where `probability` is not in [0, 1].
    """
    return bits(seed, stream, index) < _threshold(probability)


def keep_runs(seed: int, stream: str, start: Tensor, length: int, probability: float) -> Tensor:
    """`keep_mask` of `length` neighbours from each element of `start`: [*start.shape, length].

    A row of activations is such a run. It costs a quarter of `keep_mask` of the single indices.
    """
    threshold = _threshold(probability)
    first = start.reshape(-1)
    out = torch.empty((first.numel(), length), dtype=torch.bool, device=start.device)
    step = max(1, _chunk(start.device) // (length + 6))
    for a in range(0, first.numel(), step):
        part = first[a : a + step]
        words = torch.stack(_philox(seed, stream, _run_blocks(part, 3 + length)), -1)
        out[a : a + step] = _take_runs(words.flatten(1), part, length) < threshold
    return out.view(*start.shape, length)


def fill_box(
    out: Tensor, seed: int, stream: str, *, shape: Sequence[int], box: Box, std: float = 1.0
) -> None:
    """Fill `out` with the normals of the box of a logical tensor of `shape`, scaled by `std`.

    An element's index in the stream is its row-major position in the logical tensor. `out` has
    `box.size`, any strides and any floating dtype: a float32 is the rounded float64, a bf16 or fp16
    the rounded float32. Memory besides `out` is a fixed chunk. Long runs are faster.
    """
    if tuple(out.shape) != box.size:
        raise ValueError(f"a tensor of shape {tuple(out.shape)} cannot hold the box {box}")
    if not whole(shape).contains(box):
        raise ValueError(f"the box {box} leaves the shape {tuple(shape)}")
    if not out.is_floating_point():
        raise ValueError(f"normals need a floating dtype, not {out.dtype}")
    shift = torch.zeros((), dtype=torch.int64, device=out.device)
    blocks = partial(_normal_blocks, seed, stream)
    for tile in _tiles(box.size, _chunk(out.device)):
        values = _tile_values(blocks, shape, tile.shifted(box.offset), shift)
        out[tile.slices()] = values.mul_(std)  # torch rounds to bf16 and fp16 by way of float32


@torch.no_grad()
def initialise(parameter: Tensor, placement: Placement, seed: int) -> None:
    """Fill a stored parameter from its placement: each piece's stream is its logical tensor's name.

    So the logical model is the same in every layout. Padding becomes zero. Raises ValueError where
    the parameter does not have the placement's shape.
    """
    if tuple(parameter.shape) != placement.shape:
        raise ValueError(
            f"parameter of shape {tuple(parameter.shape)} does not have its placement's shape "
            f"{placement.shape}"
        )
    if sum(piece.box.numel for piece in placement.pieces) < placement.numel:
        parameter.zero_()
    for fragment in placement.fragments():
        view = parameter[fragment.local.slices()].view(fragment.box.size)
        fill(view, fragment, placement.init, seed)


@torch.no_grad()
def fill(out: Tensor, fragment: Fragment, init: Init, seed: int) -> None:
    """Overwrite `out`, which holds a fragment of a logical tensor, with its start values."""
    if init.kind == "normal":
        fill_box(out, seed, fragment.tensor, shape=fragment.shape, box=fragment.box, std=init.scale)
    else:
        out.fill_({"ones": 1.0, "zeros": 0.0, "constant": init.scale}[init.kind])


def _threshold(probability: float) -> int:
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"probability {probability} of keeping is not in [0, 1]")
    return round(probability * 2**32)


def _checked_range(start: int, stop: int) -> int:
    if not 0 <= start <= stop:
        raise ValueError(f"range [{start}, {stop}) is not one: need 0 <= start <= stop")
    return stop - start


def _chunk(device: torch.device) -> int:
    """Numbers made at a time: as many as keep the temporaries in a core's cache, or fill a GPU."""
    return 2**17 * torch.get_num_threads() if device.type == "cpu" else 2**22


def _chunks(start: int, stop: int, device: torch.device) -> Iterator[tuple[int, int]]:
    step = _chunk(device)
    for a in range(start, stop, step):
        yield a, min(a + step, stop)


def _philox(seed: int, stream: str, block: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of each block, int64 in the shape of `block`."""
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed {seed} is not in [0, 2^64)")
    name = int.from_bytes(hashlib.blake2b(stream.encode(), digest_size=8).digest(), "little")
    counter = (
        block & _WORD,
        block >> 32,
        torch.full_like(block, name & _WORD),
        torch.full_like(block, name >> 32),
    )
    return _philox_rounds(counter, (seed & _WORD, seed >> 32))


def _philox_rounds(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of 32-bit words held in int64; the counter's tensors are overwritten.

    A 32 by 32 bit product needs 64 bits: int64 wraps around with the right bits, and its high half
    is the shifted product, whose sign bits the mask takes off. c1 and c3 stay products (their high
    halves are noise) until they have been combined into a word that is masked.
    """
    c0, c1, c2, c3 = counter
    p0, p1 = torch.empty_like(c0), torch.empty_like(c0)
    for turn in range(10):
        k0, k1 = ((k + turn * step) & _WORD for k, step in zip(key, _KEY_STEPS, strict=True))
        torch.mul(c0, _MULTIPLIERS[0], out=p0)
        torch.mul(c2, _MULTIPLIERS[1], out=p1)
        torch.bitwise_right_shift(p1, 32, out=c0)
        c0.bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_WORD)
        torch.bitwise_right_shift(p0, 32, out=c2)
        c2.bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_WORD)
        c1, p1, c3, p0 = p1, c1, p0, c3
    return c0, c1.bitwise_and_(_WORD), c2, c3.bitwise_and_(_WORD)


def _normal_blocks(seed: int, stream: str, block: Tensor) -> Tensor:
    """Box-Muller on words (0, 1) and (2, 3) of each block: float64 [*block.shape, 4]."""
    words = _philox(seed, stream, block)
    out = torch.empty((*block.shape, 4), dtype=torch.float64, device=block.device)
    for j in (0, 2):
        _box_muller(words[j], words[j + 1], out[..., j], out[..., j + 1])
    return out


def _box_muller(radial: Tensor, angular: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """r cos(a) and r sin(a): r^2 = -2 log((radial + 1/2) / 2^32), a = 2 pi angular / 2^32 - pi / 2.

    The top bit of `angular` turns by pi, that is, changes the sign of r.
    """
    square = _minus_two_log(radial)
    r = _inverse_root(square).mul_(square)
    r.view(torch.int64).bitwise_xor_((angular >> 31) << 63)
    # Half of the angle left lies in [-pi/4, pi/4), where the polynomials hold.
    t = angular.bitwise_and(0x7FFFFFFF).sub_(2**30).double().mul_(math.pi * 2.0**-32)
    z = t * t
    s = _polynomial(z, _SIN).mul_(t).add_(t)
    c = _polynomial(z, _COS).add_(1.0)
    torch.mul(torch.mul(s, s, out=z).mul_(-2.0).add_(1.0), r, out=cosine)  # cos(2t) = 1 - 2 sin^2 t
    torch.mul(s.mul_(c).mul_(2.0), r, out=sine)  # sin(2t) = 2 sin t cos t


def _minus_two_log(word: Tensor) -> Tensor:
    """-2 log((word + 1/2) / 2^32), float64; at most 45.75 since the argument is at least 2^-33."""
    x = word.double().add_(0.5)  # exact
    exponent = (x.view(torch.int64) - _SQRT_HALF_BITS) >> 52
    m = (x.view(torch.int64) - (exponent << 52)).view(torch.float64)
    s = (m - 1.0).div_(m.add_(1.0))
    logarithm = _polynomial(s * s, _LOG).add_(2.0).mul_(s)
    e = exponent.double().sub_(32.0)
    return e.mul_(math.log(2.0)).add_(logarithm).mul_(-2.0)


def _inverse_root(x: Tensor) -> Tensor:
    """1 / sqrt(x), float64: a first guess from the exponent, then Newton's y (3 - x y^2) / 2.

    torch's own root is a vector library's on some processors, and not rounded the same everywhere.
    """
    y = (_ROOT_BITS - (x.view(torch.int64) >> 1)).view(torch.float64)  # within 3.5 %
    minus_half = x * -0.5
    for _ in range(4):
        y.mul_((y * y).mul_(minus_half).add_(1.5))
    return y


def _polynomial(z: Tensor, coefficients: Sequence[float]) -> Tensor:
    """c0 z + c1 z^2 + ... with one rounding per operation (no fused multiply-add)."""
    *rest, last = coefficients
    out = z * last
    for coefficient in reversed(rest):
        out.add_(coefficient).mul_(z)
    return out


def _tiles(size: Sequence[int], limit: int) -> Iterator[Box]:
    """Boxes of at most `limit` elements that cover an array of this size, in row-major order."""
    if math.prod(size) == 0:
        return
    dim, inner = len(size), 1  # dims from `dim` on are whole, they hold `inner` elements
    while dim and inner * size[dim - 1] <= limit:
        dim, inner = dim - 1, inner * size[dim - 1]
    if dim == 0:
        yield Box((0,) * len(size), tuple(size))
        return
    rows = max(1, limit // inner)
    for row in product(*(range(n) for n in size[: dim - 1])):
        for start in range(0, size[dim - 1], rows):
            length = min(rows, size[dim - 1] - start)
            offset = (*row, start) + (0,) * (len(size) - dim)
            yield Box(offset, (1,) * (dim - 1) + (length, *size[dim:]))


def _tile_values(
    blocks: Callable[[Tensor], Tensor], shape: Sequence[int], tile: Box, shift: Tensor
) -> Tensor:
    """A box of a logical tensor, in its size; `blocks` makes the four values of numbered blocks.

    The box is `outer` runs of `length` neighbours; of each run all touched blocks are computed.
    """
    strides = row_strides(shape)
    dim = max(len(shape) - 1, 0)
    while dim and tile.size[dim] == shape[dim]:  # rows of whole length follow each other
        dim -= 1
    length = math.prod(tile.size[dim:])
    first = sum(a * b for a, b in zip(tile.offset, strides, strict=True))
    start = (shift + first).view(1)  # [outer]
    for n, stride in zip(tile.size[:dim], strides[:dim], strict=True):
        start = (start[:, None] + torch.arange(n, device=start.device) * stride).flatten()
    # Where all runs begin equally far into their first block, that lag is known without a gather.
    outer = zip(tile.size[:dim], strides[:dim], strict=True)
    aligned = all(n == 1 or stride % 4 == 0 for n, stride in outer)
    lag = first % 4 if aligned else 3
    values = blocks(_run_blocks(start, lag + length)).flatten(1)
    values = values[:, lag : lag + length] if aligned else _take_runs(values, start, length)
    return values.reshape(tile.size)


def _run_blocks(start: Tensor, reach: int) -> Tensor:
    """Numbers of the blocks that hold `reach` elements from the first block of each run."""
    return (start >> 2)[:, None] + torch.arange(-(-reach // 4), device=start.device)


def _take_runs(values: Tensor, start: Tensor, length: int) -> Tensor:
    """The runs [n, length] out of whole blocks [n, 4 * blocks]."""
    return values.gather(1, (start & 3)[:, None] + torch.arange(length, device=start.device))
