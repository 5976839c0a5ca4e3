"""What takes a trainer seconds to load. Importing this loads it, in the process that all trainers
of the crash campaign are forked from: their starts then take as long as `offload()` does.
"""

from __future__ import annotations

import torch

from smart_infinity import kernels
from smart_infinity.benchmarks import crash_child
from smart_infinity.offloading import offload

torch.set_num_threads(1)  # a pool of threads would not survive the fork
for _name in crash_child.OPTIMIZERS:
    crash_child.make_optimizer(_name, torch.nn.Linear(1, 1))  # the first one loads half of torch
    kernels.prepare(_name)

__all__ = ["offload"]
