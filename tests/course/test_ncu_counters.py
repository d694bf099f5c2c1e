"""Comparison of the simulator's counters with those of Nsight Compute: parser and verdicts, on hand-written output."""

import ncu_counters
import pytest
from ncu_counters import EXACT, INSTRUCTIONS, KERNELS, METRICS, compare, parse_csv

from moe_numba import simulator
from moe_numba.course.bench import records

RESULTS = records.repository(None) / "docs" / "results"
LONG = """\
==PROF== Connected to process 4242 (/usr/bin/python3.11)
==PROF== Profiling "copy": 0%....50%....100% - 2 passes
a line of the program
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"Section Name","Metric Name","Metric Unit","Metric Value"
"0","4242","python3.11","127.0.0.1","ncu_counters::copy(float *, float *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","","64"
"0","4242","python3.11","127.0.0.1","ncu_counters::copy(float *, float *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0",\
"Command line profiler metrics","smsp__inst_executed.sum","inst","1,024"
"1","4242","python3.11","127.0.0.1","ncu_counters::transpose(float *, float *)","1","7","(1024, 1, 1)","(1, 1, 1)","0",\
"9.0","Command line profiler metrics","smsp__inst_executed.sum","inst","n/a"
"""
RAW = """\
==PROF== Disconnected from process 4242
"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",\
"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum","smsp__inst_executed.sum"
"","","","","","","","block","","","","","inst"
"0","4242","python3.11","127.0.0.1","ncu_counters::copy(float *, float *)","1","7","(256, 1, 1)","(8, 1, 1)","0","9.0",\
"64","1,024"
"1","4242","python3.11","127.0.0.1","ncu_counters::transpose(float *, float *)","1","7","(1024, 1, 1)","(1, 1, 1)","0",\
"9.0","","n/a"
"""
SIMULATED = {
    "copy": dict.fromkeys(EXACT, 4) | {INSTRUCTIONS: 100, "reason": ""},
    "transpose": dict.fromkeys(EXACT, 8) | {INSTRUCTIONS: None, "reason": "no nvdisasm"},
}


def measured(copy_instructions=105, **changes):
    """Return what the parser gives for counters equal to `SIMULATED`, with `changes` to those of copy."""
    values = {
        metric: (4 + changes.get(name, 0)) / len(metrics) for name, metrics in EXACT.items() for metric in metrics
    }
    second = {metric: 8 / len(metrics) for metrics in EXACT.values() for metric in metrics}
    return [("k::copy(float *)", values | {INSTRUCTIONS: copy_instructions}), ("k::transpose(float *)", second)]


@pytest.mark.parametrize(
    "text, missing", [(LONG, {}), (RAW, {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": None})]
)
def test_both_forms_of_the_table_are_parsed(text, missing):
    (first, counters), (second, more) = parse_csv(text)
    assert (first, second) == ("ncu_counters::copy(float *, float *)", "ncu_counters::transpose(float *, float *)")
    assert counters == {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 64, INSTRUCTIONS: 1024}
    assert more == {INSTRUCTIONS: None} | missing


def test_output_without_a_table_is_refused():
    with pytest.raises(ValueError, match="printed no table; it ends with '==ERROR=="):
        parse_csv("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM")


def test_equal_counters_pass():
    verdicts = {row[-1] for row in compare(SIMULATED, measured())}
    assert verdicts == {"equal", "within 10 %", "not compared: no nvdisasm"}


@pytest.mark.parametrize("change", [{"global_load_sectors": 1}, {"bank_conflicts": -2}, {"copy_instructions": 112}])
def test_a_different_counter_is_reported(change):
    different = [row for row in compare(SIMULATED, measured(**change)) if row[-1] == "DIFFERS"]
    assert [row[:2] for row in different] == [("copy", next(iter(change)).replace("copy_instructions", INSTRUCTIONS))]


def test_launches_that_do_not_fit_the_kernels_are_refused():
    with pytest.raises(ValueError, match="1 launches of 2 kernels"):
        compare(SIMULATED, measured()[:1])
    with pytest.raises(ValueError, match="where kernel 'copy' was expected"):
        compare(SIMULATED, measured()[::-1])


@pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")
def test_the_kernels_run_and_have_known_counters():
    with simulator.profile() as profile:
        ncu_counters.launch_all("cpu", lambda kernel: simulator.seed(0))
    assert [kernel.name for kernel in profile.kernels] == [kernel.__name__ for kernel, *_ in KERNELS]
    assert profile["transpose"].total.bank_conflicts == 32 * 31
    assert profile["broadcast_float4"].total.global_load_sectors == 64
    assert profile["shared_float4"].total.shared_load_wavefronts == 16
    assert len(METRICS) == len(set(METRICS)) == 9


@pytest.mark.parametrize("recorded", sorted(RESULTS.glob("*/ncu_counters.csv")), ids=lambda path: path.parent.name)
def test_the_simulator_counts_what_ncu_measured(recorded, monkeypatch, capsys):
    """`docs/results/<gpu>/ncu_counters.csv` is what ``ncu_counters.py --save`` wrote on a GPU."""
    monkeypatch.setattr("sys.argv", ["ncu_counters.py", "--csv", str(recorded)])
    with pytest.raises(SystemExit) as ended:
        ncu_counters.main()
    assert ended.value.code == 0, capsys.readouterr().out
