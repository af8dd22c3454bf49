"""How tokens reach their experts and their results come back: one interface, several ways.

A token goes to a rank once, however many of its experts are there, with its weight for each of
them; the rank sums what its experts make of the token, so that one row comes back. With experts
that are cut over etp a token goes to all ranks that hold parts of them, and their partial sums are
added where it came from. Bytes that leave a rank, of t of the T tokens of its group "etp-ep" of g
ranks, of h numbers and k experts each; e bytes a number of the stream, w a weight:

    tokens, weights, experts' numbers   8·(g-1) + u·(h·e + k·(w+8))
    results                             v·h·e
    gradients of both                   u·h·e + v·(h·e + k·w)

| dispatcher   | u                                 | v                                     |
|--------------|-----------------------------------|---------------------------------------|
| `all_gather` | (g-1)·t                           | T-t                                   |
| `all_to_all` | pairs of a token of this rank and | rows that come of other ranks' tokens |
|              | another rank that it goes to      |                                       |
| `fused`      | what the library sends, which is not counted                              |

| messages     | there         | back             | gradients                       |
|--------------|---------------|------------------|---------------------------------|
| `all_gather` | 4 all-gathers | 1 reduce-scatter | 1 all-gather, 2 reduce-scatters |
| `all_to_all` | 4 all-to-alls | 1 all-to-all     | 3 all-to-alls                   |

The first message says how many rows every rank has, or gets. `all_gather` costs least where nearly
every token goes to nearly every rank; `all_to_all` sends each token only where it is needed. What
is recomputed sends tokens there once more, and results back where losses of the router or dropout
follow, with `all_to_all` always, since their places are needed to take them apart.

What must hold: every rank of the group calls the same operations in one order, with no tokens too.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Arrived(NamedTuple):
    """Tokens that have an expert here, perhaps among others that have none."""

    x: Tensor  # [r, h]
    weights: Tensor  # [r, k]
    experts: Tensor  # [r, k] int64: numbers among this rank's experts; −1 for one elsewhere


class Visit(Protocol):
    """Tokens on their way to their experts, and back."""

    def arrive(self) -> Arrived:
        """Wait for the tokens that come here."""

    def leave(self, y: Tensor) -> Tensor:
        """What experts here made of each row that came, [r, h] → the sum for each token, [t, h]."""


class Dispatcher(Protocol):
    """A way there and back."""

    def send(self, x: Tensor, weights: Tensor, experts: Tensor) -> Visit:
        """Begin: tokens [t, h], and of each k weights [t, k] and experts [t, k], −1 for none."""
