"""Makes the folders of `tests/` importable (`reference`, `parity`) and keeps torch on one thread.

Ranks are forked, which is safe only while torch has started no other thread.
"""

import torch

torch.set_num_threads(1)
