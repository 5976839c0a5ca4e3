"""Every exception this library raises on purpose.

The set is closed: one class for each kind of fault, and each message says what was seen, what was
expected, and what to do. Faults of the caller also derive from the built-in class that Python or
torch would use for them, so that ``except ValueError`` and ``except OSError`` keep working.
"""

import os


class SmartInfinityError(Exception):
    """Base of all errors raised by smart-infinity."""


class DeviceSpecError(SmartInfinityError, ValueError):
    """The ``devices`` argument names something that cannot serve as a storage device."""


class DeviceBusyError(SmartInfinityError, RuntimeError):
    """Another optimizer, in this or another process, holds the device's lock."""


class DeviceFullError(SmartInfinityError, OSError):
    """The file system cannot hold the state; nothing that was reserved remains."""


class DeviceMemoryError(SmartInfinityError, ValueError):
    """``device_memory`` is too small for the landing zone and the transfer buffers."""


class StateExistsError(SmartInfinityError, RuntimeError):
    """The directories hold a state and ``resume`` does not say what to do with it."""


class StateMismatchError(SmartInfinityError, RuntimeError):
    """The directories hold a state of another model, optimizer, device set or format."""


class CorruptStateError(SmartInfinityError, RuntimeError):
    """Bytes read from a device differ from those that were committed."""


class UnsupportedError(SmartInfinityError, ValueError):
    """The model or the optimizer uses something that cannot be honoured."""


class OffloadedGradientError(SmartInfinityError, RuntimeError):
    """An operation that a gradient on a storage device does not understand."""


class OptimizerFailedError(SmartInfinityError, RuntimeError):
    """An earlier I/O error left weights and state apart; only a resume can join them again."""


class OptimizerClosedError(SmartInfinityError, RuntimeError):
    """The optimizer was closed; its devices are no longer held."""


class ForkedProcessError(SmartInfinityError, RuntimeError):
    """A forked child called into an engine that belongs to its parent."""


class DeviceIOError(SmartInfinityError, OSError):
    """An I/O operation of a device failed.

    Attributes:
        device: the device's directory.
        path: the file.
        operation: ``"read"``, ``"write"``, ``"sync"``, ``"open"`` or ``"reserve"``.
        offset_bytes: where in the file, or None where that has no meaning.
        errno: the system's error number (0 where the system reported none, as for a short read).
    """

    def __init__(
        self,
        device: str,
        path: str,
        operation: str,
        offset_bytes: int | None,
        errno_: int,
        detail: str = "",
    ) -> None:
        where = "" if offset_bytes is None else f" at offset {offset_bytes}"
        what = detail or os.strerror(errno_)
        super().__init__(
            errno_,
            f"device {device}: {operation} of {path}{where} failed: {what} (errno {errno_}). "
            "Mend the device, then call offload(..., resume=True), which continues from the last "
            "step that is whole",
        )
        self.device = device
        self.path = path
        self.operation = operation
        self.offset_bytes = offset_bytes

    def __str__(self) -> str:
        return str(self.args[1])
