"""Train models larger than memory: optimizer states on storage, the optimizer run there.

```python
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
model, optimizer = smart_infinity.offload(model, optimizer, ["/mnt/nvme0", "/mnt/nvme1"])
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from smart_infinity import errors
from smart_infinity.errors import SmartInfinityError

if TYPE_CHECKING:
    from smart_infinity.gradients import OffloadedGradient
    from smart_infinity.link import HostLink, Traffic
    from smart_infinity.offloading import offload
    from smart_infinity.optimizer import OffloadedOptimizer
    from smart_infinity.tools.torch_state import load_export, save_export

__version__ = "0.1.0"

__all__ = [
    "HostLink",
    "OffloadedGradient",
    "OffloadedOptimizer",
    "SmartInfinityError",
    "Traffic",
    "errors",
    "load_export",
    "offload",
    "save_export",
]

# Imported on first use: the devices' half of the package runs where torch is not installed, and
# the command line's help should not wait for it.
_HOME = {
    "HostLink": "link",
    "OffloadedGradient": "gradients",
    "OffloadedOptimizer": "optimizer",
    "Traffic": "link",
    "load_export": "tools.torch_state",
    "offload": "offloading",
    "save_export": "tools.torch_state",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
