"""What this machine is and what its directories can do: the facts that ``doctor`` shows."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata

from smart_infinity.benchmarks.raw import Bandwidth, measure_bandwidth
from smart_infinity.errors import DeviceBusyError, SmartInfinityError
from smart_infinity.storage.blockfile import direct_io_refusal
from smart_infinity.storage.lock import DeviceLock
from smart_infinity.storage.slots import LOCK, free_nbytes
from smart_infinity.storage.superblock import read_superblock

PACKAGES = ("smart-infinity", "torch", "numpy", "numba", "llvmlite", "xxhash")
# By LLVM's names. "neon" is part of every 64-bit ARM processor.
VECTOR_FEATURES = ("avx2", "fma", "f16c", "avx512f", "avx512bf16", "amx-bf16", "neon", "sve")

STATE_BYTES_PER_PARAMETER = 24  # two places of an fp32 master and Adam's two moments
PROBE_NBYTES = 1 << 30
MIN_FREE_NBYTES = 64 << 20


def versions() -> dict[str, str]:
    """Version by name of package, of Python and of the kernel."""
    found = {"python": platform.python_version()}
    found |= {name: metadata.version(name) for name in PACKAGES}
    return found | {"kernel": f"{platform.system()} {platform.release()}"}


def cpu_facts() -> dict[str, str]:
    """The processor as the kernels are compiled for it, and as torch uses it."""
    import llvmlite.binding as llvm
    import torch

    features = llvm.get_host_cpu_features()
    vectors = [name for name in VECTOR_FEATURES if features.get(name)]
    fast_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return {
        "name": llvm.get_host_cpu_name(),
        "cores": str(len(os.sched_getaffinity(0))),
        "vector features": " ".join(vectors) or "none known",
        "torch": f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads",
        "bf16 arithmetic": "yes" if fast_bf16 else "no: torch emulates it, slowly",
    }


@dataclass(frozen=True, kw_only=True)
class DirectoryFacts:
    """What a usable directory can do."""

    direct_io_refusal: str | None
    holds: str
    bandwidth: Bandwidth
    free_nbytes: int

    @property
    def num_parameters(self) -> int:
        """Parameters whose Adam state fits into the free space."""
        return self.free_nbytes // STATE_BYTES_PER_PARAMETER


class UnusableDirectoryError(SmartInfinityError):
    """A directory cannot serve as a device; the message says why."""


def examine_directory(directory: str) -> DirectoryFacts:
    """Look at a directory and measure it, leaving nothing behind.

    Raises:
        UnusableDirectoryError: it is missing, not writable, full, in use, or fails.
    """
    if not os.path.isdir(directory):
        is_there = os.path.lexists(directory)
        raise UnusableDirectoryError("is not a directory" if is_there else "does not exist")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UnusableDirectoryError("is not writable for this process")
    holds = _contents(directory)
    free = free_nbytes(directory)
    if free < MIN_FREE_NBYTES:
        raise UnusableDirectoryError(f"is full: {free} bytes are free on its file system")
    try:
        refusal = direct_io_refusal(directory)
        bandwidth = measure_bandwidth(
            directory, min(PROBE_NBYTES, free // 2), direct=refusal is None
        )
    except OSError as error:
        raise UnusableDirectoryError(
            f"fails: {os.strerror(error.errno or 0)} (errno {error.errno})"
        ) from error
    return DirectoryFacts(
        direct_io_refusal=refusal, holds=holds, bandwidth=bandwidth, free_nbytes=free
    )


def _contents(directory: str) -> str:
    # Only a lock that exists can be held; taking it would otherwise leave a file behind.
    if os.path.exists(os.path.join(directory, LOCK)):
        try:
            DeviceLock(directory).release()
        except DeviceBusyError as error:
            raise UnusableDirectoryError(
                "is in use: an optimizer, in this or another process, holds its lock"
            ) from error
    superblock = read_superblock(directory)
    if superblock is None:
        return "no state"
    return (
        f"state of {superblock.optimizer}, device {superblock.device_index + 1} of "
        f"{superblock.num_devices}"
    )
