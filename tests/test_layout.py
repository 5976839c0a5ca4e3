"""The plan: every element in exactly one place, evenly spread, the same for the same model."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smart_infinity.layout import (
    BLOCK_ELEMENTS,
    PAGE_BYTES,
    RECORD_ELEMENTS,
    UNIT_MIN_ELEMENTS,
    DevicePlan,
    Layout,
    ParameterSpec,
    plan_layout,
    plan_units,
    unit_name,
)

MOMENTS = ("exp_avg", "exp_avg_sq")

sizes = st.one_of(
    st.sampled_from([0, 1, 7, 4095, 4096, 4097, 8192, 65535, 65536, 65537, 200_000]),
    st.integers(0, 30_000),
)
shapes = st.one_of(
    sizes.map(lambda n: (n,)),
    st.just(()),
    st.tuples(st.integers(0, 40), st.integers(1, 500)),
    st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(1, 700)),
)
modules = st.sampled_from(["embed", "h.0.attn", "h.0.mlp", "h.1", "h.10.mlp", "norm", "head"])


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[ParameterSpec]:
    return [
        ParameterSpec(f"{draw(modules)}.w{index}", draw(shapes), draw(st.sampled_from(DTYPES)))
        for index in range(draw(st.integers(0, 14)))
    ]


DTYPES = ["float32", "bfloat16", "float16"]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return plan_layout(
        draw(parameter_lists()),
        "adamw",
        MOMENTS,
        num_devices=draw(st.integers(1, 16)),
        record_elements=draw(st.sampled_from([97, 1000, 4096, 5000, 65536])),
    )


def specs(*numels: int) -> list[ParameterSpec]:
    return [ParameterSpec(f"h.{i}.w", (n,), "float32") for i, n in enumerate(numels)]


def plan(parameters: list[ParameterSpec], num_devices: int = 1, record_elements: int = 5000):
    return plan_layout(parameters, "adamw", MOMENTS, num_devices, record_elements)


def assert_covered_once(parameters: tuple[ParameterSpec, ...], stretches) -> None:
    """``stretches`` is (parameter, start, length) in any order."""
    found: list[list[tuple[int, int]]] = [[] for _ in parameters]
    for parameter, start, length in stretches:
        found[parameter].append((start, length))
    for spec, own in zip(parameters, found, strict=True):
        end = 0
        for start, length in sorted(own):
            assert length > 0, spec
            assert start == end, f"{spec}: gap or overlap at {end}"
            end = start + length
        assert end == spec.numel, spec


def blocks_of_unit(layout: Layout, device: DevicePlan, unit: int) -> int:
    members = set(layout.units[unit].parameters)
    return sum(run.num_blocks for run in device.runs if run.parameter in members)


# --- every element exactly once ----------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_every_element_is_in_one_run_and_in_one_piece(layout: Layout) -> None:
    assert_covered_once(
        layout.parameters,
        ((r.parameter, r.start, r.length) for device in layout.devices for r in device.runs),
    )
    assert_covered_once(
        layout.parameters,
        (
            (piece.parameter, piece.start, piece.length)
            for device in layout.devices
            for record in device.records
            for piece in record.pieces
        ),
    )


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_runs_are_cut_at_blocks_and_fill_the_element_space(layout: Layout) -> None:
    for device in layout.devices:
        elements = blocks = 0
        for run in device.runs:
            spec = layout.parameters[run.parameter]
            assert run.start % BLOCK_ELEMENTS == 0
            end = run.start + run.length
            assert end % BLOCK_ELEMENTS == 0 or end == spec.numel
            assert (run.device_offset, run.first_block) == (elements, blocks)
            elements += run.length
            blocks += run.num_blocks
        assert (device.num_elements, device.num_blocks) == (elements, blocks)
        order = [run.parameter for run in device.runs]
        assert order == sorted(order), "a device's runs are in forward order"
        assert len(set(order)) == len(order), "one run per parameter and device"


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_records_are_full_but_the_last_and_pieces_are_contiguous(layout: Layout) -> None:
    for device in layout.devices:
        assert [record.index for record in device.records] == list(range(len(device.records)))
        for record in device.records[:-1]:
            assert record.length == layout.record_elements
        for record in device.records[-1:]:
            assert 0 < record.length <= layout.record_elements
        position = 0
        for record in device.records:
            filled = 0
            for piece in record.pieces:
                run = device.runs[piece.run]
                assert piece.parameter == run.parameter
                assert piece.record_offset == filled
                # A piece's place in the element space follows from its run's.
                assert run.device_offset + piece.start - run.start == position
                assert run.start <= piece.start
                assert piece.start + piece.length <= run.start + run.length
                filled += piece.length
                position += piece.length
            assert filled == record.length
        assert position == device.num_elements


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_runs_of_finds_a_parameters_runs_in_order(layout: Layout) -> None:
    for index, spec in enumerate(layout.parameters):
        end = 0
        for device, number in layout.runs_of[index]:
            run = layout.devices[device].runs[number]
            assert (run.parameter, run.start) == (index, end)
            end += run.length
        assert end == spec.numel


# --- evenly spread -----------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_each_unit_and_the_whole_are_spread_within_one_block(layout: Layout) -> None:
    for unit in range(len(layout.units)):
        counts = [blocks_of_unit(layout, device, unit) for device in layout.devices]
        assert max(counts) - min(counts) <= 1
    totals = [device.num_blocks for device in layout.devices]
    assert max(totals) - min(totals) <= 1, "the remainder rotates from unit to unit"


@pytest.mark.parametrize("num_devices", [2, 3, 5, 7, 16])
def test_many_units_with_a_remainder_of_one_are_balanced(num_devices: int) -> None:
    unit = num_devices * 17 * BLOCK_ELEMENTS + 1
    layout = plan(specs(*[unit] * 100), num_devices, RECORD_ELEMENTS)
    assert len(layout.units) == 100
    totals = [device.num_blocks for device in layout.devices]
    assert sum(totals) == 100 * (num_devices * 17 + 1)
    assert max(totals) - min(totals) <= 1


# --- units -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "unit"),
    [
        ("transformer.h.3.attn.weight", "transformer.h.3"),
        ("transformer.h.12.mlp.experts.7.w", "transformer.h.12"),
        ("0.weight", "0"),
        ("layers.0", "layers"),
        ("lm_head.weight", "lm_head"),
        ("model.norm2.weight", "model.norm2"),
        ("scale", "scale"),
    ],
)
def test_a_unit_is_named_after_the_block_that_owns_the_parameter(parameter: str, unit: str) -> None:
    assert unit_name(parameter) == unit


@settings(max_examples=150, deadline=None)
@given(parameter_lists())
def test_units_keep_the_order_and_none_is_small(parameters: list[ParameterSpec]) -> None:
    units = plan_units(parameters)
    assert [i for unit in units for i in unit.parameters] == list(range(len(parameters)))
    if len(units) > 1:
        for unit in units:
            size = sum(parameters[i].numel for i in unit.parameters)
            assert size >= UNIT_MIN_ELEMENTS, unit


def test_small_neighbours_join_the_larger_one() -> None:
    big = UNIT_MIN_ELEMENTS
    parameters = [
        ParameterSpec("pre.w", (10,), "float32"),
        ParameterSpec("h.0.w", (big,), "float32"),
        ParameterSpec("h.1.a", (big - 1,), "float32"),
        ParameterSpec("h.1.b", (1,), "float32"),
        ParameterSpec("norm.w", (big - 1,), "float32"),
    ]
    units = plan_units(parameters)
    assert [(u.name, u.parameters) for u in units] == [("h.0", (0, 1)), ("h.1", (2, 3, 4))]


# --- extremes ----------------------------------------------------------------------------------


def test_scalar_and_empty_parameters() -> None:
    parameters = [
        ParameterSpec("a", (), "float32"),
        ParameterSpec("b", (0,), "float32"),
        ParameterSpec("c", (3, 0, 5), "bfloat16"),
        ParameterSpec("d", (1,), "float16"),
    ]
    layout = plan(parameters, num_devices=3)
    assert [len(runs) for runs in layout.runs_of] == [1, 0, 0, 1]
    assert [device.num_elements for device in layout.devices] == [1, 1, 0]
    assert [layout.state_nbytes(i) for i in range(3)] == [PAGE_BYTES, PAGE_BYTES, 0]


def test_nothing_at_all() -> None:
    for parameters in ([], specs(0, 0)):
        layout = plan(parameters, num_devices=2)
        assert layout.num_elements == 0
        assert all(device.records == () for device in layout.devices)


@pytest.mark.parametrize("numel", [1, 7, 15])
def test_fewer_elements_than_devices(numel: int) -> None:
    layout = plan(specs(numel), num_devices=16)
    assert sorted(device.num_elements for device in layout.devices) == [0] * 15 + [numel]


def test_a_parameter_larger_than_many_records() -> None:
    layout = plan(specs(1_000_003), num_devices=3, record_elements=4096)
    assert sum(len(device.records) for device in layout.devices) >= 1_000_003 // 4096
    assert_covered_once(
        layout.parameters,
        (
            (p.parameter, p.start, p.length)
            for d in layout.devices
            for r in d.records
            for p in r.pieces
        ),
    )


def test_tens_of_thousands_of_parameters() -> None:
    # Quadratic planning would take many minutes here.
    parameters = [ParameterSpec(f"h.{i}.w", (1 + i % 3,), "float32") for i in range(60_000)]
    layout = plan(parameters, num_devices=16, record_elements=1000)
    assert_covered_once(
        layout.parameters,
        ((r.parameter, r.start, r.length) for device in layout.devices for r in device.runs),
    )
    totals = [device.num_blocks for device in layout.devices]
    assert max(totals) - min(totals) <= 1


# --- bytes -------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(layouts())
def test_state_files_are_as_long_as_their_records(layout: Layout) -> None:
    assert layout.num_elements == sum(device.num_elements for device in layout.devices)
    for device in layout.devices:
        end = 0
        for record in device.records:
            assert record.index * layout.record_stride == end
            nbytes = layout.record_nbytes(record.length)
            assert nbytes % PAGE_BYTES == 0
            assert 0 <= nbytes - record.length * 4 * layout.num_state_tensors < PAGE_BYTES
            end += nbytes
        assert layout.state_nbytes(device.index) == end


def test_bytes_follow_the_number_of_moments() -> None:
    layout = plan_layout(specs(4096), "sgd", (), 1)
    assert (layout.num_state_tensors, layout.state_nbytes(0)) == (1, 4 * 4096)
    assert plan(specs(4096)).state_nbytes(0) == 12 * 4096


# --- identity ----------------------------------------------------------------------------------

BASE = (
    ParameterSpec("h.0.w", (70_000,), "bfloat16"),
    ParameterSpec("h.1.w", (300, 300), "bfloat16"),
)


def test_the_hash_is_a_function_of_the_plan_alone() -> None:
    once = plan_layout(BASE, "adamw", MOMENTS, 2)
    again = plan_layout(iter(list(BASE)), "adamw", list(MOMENTS), 2)
    assert once == again
    assert once.hash() == again.hash()
    assert json.loads(json.dumps(once.to_json())) == once.to_json()


def test_the_hash_of_version_two_is_frozen() -> None:
    # States on disk carry it: a change here means that old states no longer resume.
    assert plan_layout(BASE, "adamw", MOMENTS, 2).hash() == FROZEN_HASH


FROZEN_HASH = "01c2e0eb3ddcda4d6a754e42291ae074dd9639cd6bd9c63b19dce9ef17ea2df4"


@pytest.mark.parametrize(
    "other",
    [
        plan_layout((ParameterSpec("h.0.v", (70_000,), "bfloat16"), BASE[1]), "adamw", MOMENTS, 2),
        plan_layout((ParameterSpec("h.0.w", (70_001,), "bfloat16"), BASE[1]), "adamw", MOMENTS, 2),
        plan_layout((BASE[0], ParameterSpec("h.1.w", (90_000,), "bfloat16")), "adamw", MOMENTS, 2),
        plan_layout((BASE[0], ParameterSpec("h.1.w", (300, 300), "float16")), "adamw", MOMENTS, 2),
        plan_layout(BASE[::-1], "adamw", MOMENTS, 2),
        plan_layout(BASE[:1], "adamw", MOMENTS, 2),
        plan_layout(BASE, "adam", MOMENTS, 2),
        plan_layout(BASE, "adamw", MOMENTS[:1], 2),
        plan_layout(BASE, "adamw", MOMENTS, 3),
        plan_layout(BASE, "adamw", MOMENTS, 2, record_elements=4096),
    ],
    ids=[
        "name",
        "size",
        "shape",
        "dtype",
        "order",
        "fewer",
        "optimizer",
        "moments",
        "devices",
        "records",
    ],
)
def test_the_hash_tells_plans_apart(other: Layout) -> None:
    assert other.hash() != plan_layout(BASE, "adamw", MOMENTS, 2).hash()
