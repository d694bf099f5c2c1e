"""The table of two compilers, the comparison of their times, and what a record says of them; nothing is compiled."""

import json

import pytest

from moe_numba.course.bench import compare_compilers, records
from moe_numba.course.bench.records import compilers as table
from moe_numba.runtime import compilers


def entry(kernel, old, new):
    fields = ("registers", "instructions", "stack_bytes", "spilled_bytes", "seconds")
    made = lambda values: dict(zip(fields, values, strict=True)) if isinstance(values, tuple) else {"error": values}
    return {"kernel": kernel, "ast": "a", "launch": "b", "numba-cuda": made(old), "mlir": made(new)}


def test_the_page():
    entries = {
        "gate: 1": entry("route", (40, 100, 0, 0, 1.0), (50, 150, 24, 8, 3.0)),
        "gate: 2": entry("route", (40, 100, 0, 0, 1.0), (30, 90, 0, 0, 1.0)),
        "align: 1": entry("align", (10, 10, 0, 0, 1.0), "TypeError: no lowering"),
    }
    text = table.page({"arch": "sm_90a", "versions": {"numba": "1"}, "cases": 7, "kernels": entries})
    assert "3 of 7 cases" in text and "and 2 of these with numba-cuda-mlir" in text
    assert "| gate | route | 2 | 2 | 1.00 | 1.20 | 2.00 | 0 | 1 |" in text
    assert "- align: 1: TypeError: no lowering" in text
    assert "| gate: 1 | 40 / 100 | 50 / 150 24+8 | 1.0 / 3.0 |" in text
    assert "| align: 1 | 10 / 10 | TypeError | 1.0 /  |" in text


def test_the_stored_page_is_made_of_the_stored_table():
    stored = table.read()
    assert (table.path().parents[1] / table.PAGE).read_text() == table.page(stored)


def test_times_are_compared_row_by_row(tmp_path):
    def write(compiler, number, times):
        rows = [
            {"step": step, "size": {"tokens": 1}, "kernel_us": {"median": time}, "kernels": kernels}
            for step, time, kernels in times
        ]
        folder = tmp_path / f"{compiler}-{number}" / "h200"
        folder.mkdir(parents=True)
        (folder / "gate.json").write_text(json.dumps({"topic": "gate", "rows": rows}))

    ours, peer = [{"name": "route"}], []
    write("numba-cuda", 0, [("final", 2.0, ours), ("peer:x", 1.0, peer), ("first", 4.0, ours)])
    write("numba-cuda", 1, [("final", 4.0, ours), ("first", 4.0, ours)])
    write("mlir", 0, [("final", 6.0, ours), ("peer:x", 9.0, peer), ("first", 2.0, ours)])
    lines = compare_compilers.compare(tmp_path, rounds=2)
    assert [(line["step"], line["ratio"]) for line in lines] == [("final", 2.0), ("first", 0.5)]


@pytest.mark.parametrize("compiler", compilers.DISTRIBUTIONS)
def test_a_record_names_the_compiler(monkeypatch, compiler):
    monkeypatch.setenv(compilers.VARIABLE, compiler)
    assert ("numba-cuda-mlir" in records.versions()) == (compiler == "mlir")
