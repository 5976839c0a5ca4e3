"""What all tests share."""

import torch

# One thread: results repeat exactly, and a shared machine does not make OpenMP's threads spin.
torch.set_num_threads(1)
