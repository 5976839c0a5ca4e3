"""Tables of a device's plan, made once: what kernels read, and where to look things up."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from smart_infinity.kernels.formats import FORMAT_OF_DTYPE
from smart_infinity.kernels.frame import (
    P_GRAD16,
    P_GRAD32,
    P_LENGTH,
    P_OFFSET,
    PIECE_COLUMNS,
)
from smart_infinity.layout import DevicePlan, Layout, Record


def piece_tables(layout: Layout, plan: DevicePlan) -> list[npt.NDArray[np.int64]]:
    """By record, the rows that the kernels read; see ``kernels.frame``."""
    tables = []
    for record in plan.records:
        rows = np.empty((len(record.pieces), PIECE_COLUMNS), np.int64)
        for index, piece in enumerate(record.pieces):
            run = plan.runs[piece.run]
            within = piece.start - run.start
            rows[index] = (
                piece.parameter,
                piece.run,
                piece.length,
                piece.record_offset,
                2 * run.device_offset + within,
                run.device_offset + within,
                FORMAT_OF_DTYPE[layout.parameters[piece.parameter].dtype],
            )
        tables.append(rows)
    return tables


# Elements that an update visits at once: with both moments they stay in the last cache between
# hashing what was read, computing, and hashing what is written.
HASHED_ELEMENTS = 1 << 16

Blocks = list[tuple[int, int, npt.NDArray[np.int64]]]


def block_tables(tables: list[npt.NDArray[np.int64]], plan: DevicePlan) -> list[Blocks]:
    """By record, its blocks: where each begins and ends, and the rows for what lies in it."""
    found = []
    for record, rows in zip(plan.records, tables, strict=True):
        blocks: Blocks = []
        for begin in range(0, record.length, HASHED_ELEMENTS):
            end = min(begin + HASHED_ELEMENTS, record.length)
            ends = rows[:, P_OFFSET] + rows[:, P_LENGTH]
            inside = (rows[:, P_OFFSET] < end) & (ends > begin)
            own = rows[inside].copy()
            starts = np.maximum(own[:, P_OFFSET], begin)
            skipped = starts - own[:, P_OFFSET]
            own[:, P_LENGTH] = np.minimum(ends[inside], end) - starts
            own[:, P_OFFSET] = starts
            own[:, P_GRAD16] += skipped
            own[:, P_GRAD32] += skipped
            blocks.append((begin, end, own))
        found.append(blocks)
    return found


def records_of_runs(plan: DevicePlan) -> list[list[int]]:
    """By run, the indices of the records that hold it."""
    found: list[list[int]] = [[] for _ in plan.runs]
    for record in plan.records:
        for piece in record.pieces:
            found[piece.run].append(record.index)
    return found


def records_of_parameters(layout: Layout, plan: DevicePlan) -> list[list[int]]:
    """By parameter, the indices of the records that hold some of it."""
    found: list[list[int]] = [[] for _ in layout.parameters]
    for record in plan.records:
        for parameter in {piece.parameter for piece in record.pieces}:
            found[parameter].append(record.index)
    return found


def touched_records(
    plan: DevicePlan, active: npt.NDArray[np.bool_], edited: Container[int]
) -> list[Record]:
    """The records that hold some of an active parameter, or edits; in forward order."""
    return [
        record
        for record in plan.records
        if record.index in edited or any(active[piece.parameter] for piece in record.pieces)
    ]
