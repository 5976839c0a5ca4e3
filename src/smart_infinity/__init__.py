"""Train models larger than memory: optimizer states on storage, the optimizer run there.

```python
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
model, optimizer = smart_infinity.offload(model, optimizer, ["/mnt/nvme0", "/mnt/nvme1"])
```
"""

from smart_infinity import errors
from smart_infinity.engine import offload
from smart_infinity.errors import SmartInfinityError
from smart_infinity.gradients import OffloadedGradient
from smart_infinity.link import HostLink, Traffic
from smart_infinity.optimizer import OffloadedOptimizer

__version__ = "0.1.0"

__all__ = [
    "HostLink",
    "OffloadedGradient",
    "OffloadedOptimizer",
    "SmartInfinityError",
    "Traffic",
    "errors",
    "offload",
]
