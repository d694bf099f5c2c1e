"""Records, the command line that writes and draws them, and the records in docs/results."""

import functools
import io
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from bench_topics import ENVIRONMENT
from rich.console import Console

import moe_numba
from moe_numba import __main__ as cli
from moe_numba import simulator
from moe_numba.course import bench
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.figures import plots, tables
from moe_numba.course.bench.records import code_hash, kernel_hash, progress
from moe_numba.course.bench.timing.dist import load_files, peer_files
from moe_numba.course.pages import readme, topics
from moe_numba.runtime.recording import Launched

# isort: split
from numba import cuda

ROOT = Path(__file__).resolve().parents[2]
RECORDS = sorted((ROOT / "docs" / "results").glob("*/*.json"))
NOTEBOOK = """# ---
# jupyter:
#   jupytext: {}
# ---

# %% [markdown]
# Prose.

# %% tags=["gpu"]
x = 1

# %%
y = 2
"""


OFFSET = 3  # of `scale`


@functools.cache
def make_scale(factor):
    @cuda.jit
    def scale(x):
        x[cuda.threadIdx.x] = x[cuda.threadIdx.x] * factor + OFFSET

    return scale


def name(path):
    return f"{path.parent.name}/{path.stem}"


@pytest.fixture
def repository(tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "01_gate_prompt.py").write_text(NOTEBOOK)
    return tmp_path


def rows():
    config = {"num_experts": 256}
    return [
        records.row(
            "final",
            config=config,
            size={"tokens": tokens},
            dtype=dtype,
            bytes=64 * tokens,
            kernel=Stats(1.23456 * tokens, tokens, 2 * tokens),
            floor_us=0.5,
        )
        for tokens in (64, 1)
        for dtype in ("float32", "bfloat16")
    ] + [records.row("peer:triton", size={"tokens": 64}, dtype="float32", call=Stats(3.0, 2.0, 4.0))]


def write(root, **more):
    return records.write("gate", rows(), root, env=ENVIRONMENT, **more)


def test_a_record_is_read_as_it_was_written(repository):
    path = write(repository)
    assert path == repository / "docs" / "results" / "h200" / "gate.json"
    record = records.read("gate", root=repository)
    assert record["rows"] == rows() and record["gpu"] == "NVIDIA H200" and not records.invalid(record)
    assert list(record) == [*records.FIELDS[:-1], "functions", "rows"]
    text = path.read_text()
    assert text.endswith("}\n")
    assert sum('"step"' in line for line in text.splitlines()) == len(rows()), "one line per row"
    assert record["rows"][0]["kernel_us"] == {"median": 79.012, "p10": 64, "p90": 128}
    assert "flops" not in record["rows"][0] and "dtype" in record["rows"][-1]


def test_the_results_folder_can_be_changed(repository, tmp_path):
    assert write(repository, results=tmp_path / "out") == tmp_path / "out" / "h200" / "gate.json"


def test_rows_are_found_by_step_config_and_size(repository):
    write(repository)
    record = records.read("gate", root=repository)
    assert records.find(record, step="final", size={"tokens": 1}, dtype="bfloat16")["bytes"] == 64
    assert records.find(record, step="final", config={"num_experts": 128}) is None
    assert records.find(record, step="final", operation="dispatch") is None
    assert len(records.select(record, step="final")) == 4
    line = records.series(record, step="final", dtype="float32")
    assert list(line) == [1, 64] and line[64]["p90"] == 128
    assert records.series(record, step="peer:triton") == {}, "rows without the value are left out"


def timed_row(factor=2, **more):
    """Return a row of a kernel that was timed, without its machine code."""
    return records.row("final", call=Stats(2.0, 1.0, 3.0, (Launched(make_scale(factor), None, {}),)), **more)


def test_a_row_keeps_the_kernels_that_it_timed(repository):
    kernel = make_scale(2)
    path = records.write("gate", [timed_row(), *rows()], repository, env=ENVIRONMENT)
    record = records.read("gate", root=repository)
    assert record["rows"][0]["kernels"] == [{"name": "scale", "ast": kernel_hash.ast_hash(kernel)}]
    assert all("kernels" not in row for row in record["rows"][1:]) and not records.invalid(record)
    assert record["functions"] == {"scale": kernel_hash.functions(kernel)}
    assert sum('"scale"' in line for line in path.read_text().splitlines()) == 2, "one line for its functions"


def test_code_cells_leave_out_prose():
    assert code_hash.code_cells(NOTEBOOK) == ["x = 1", "y = 2"]
    assert code_hash.code_cells("import a\n# %% [md]\n# b\n# %%\n\nc\n\n") == ["import a", "c"]


def test_invalid_writes_and_reads_are_refused(repository, tmp_path):
    with pytest.raises(ValueError, match="without a GPU"):
        records.write("gate", rows(), repository, env=ENVIRONMENT | {"gpu": records.SIMULATOR})
    with pytest.raises(FileNotFoundError, match="moe_numba bench"):
        records.read("align", root=repository)
    with pytest.raises(FileNotFoundError, match="clone"):
        records.read("gate", root=tmp_path / "moe_numba")
    assert list((repository / "docs" / "results").rglob("*.json")) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": [records.row("final")]}, "either a time"),
        ({"rows": [records.row("final", call=Stats(1, 1, 1), refused="wrong")]}, "either a time"),
        ({"rows": [records.row("final", call=Stats(1.0, 2.0, 3.0))]}, "in order"),
        ({"rows": [records.row("final", call=Stats(0.0, 0.0, 0.0))]}, "above zero"),
        ({"rows": [records.row(None, call=Stats(1, 1, 1))]}, "a name"),
        ({"rows": [records.row("final", call=Stats(1, 1, 1), measured={"date": "2026-11-20"})]}, "a commit and a date"),
        ({"rows": [timed_row()]}, "a kernel is name, code and ast"),
        ({"rows": [records.row("final", call=Stats(1, 1, 1), kernels=[{"name": "unknown"}])]}, "has functions"),
    ],
)
def test_invalid_records_are_refused(change, message):
    good = {"topic": "gate", **ENVIRONMENT, "rows": rows()}
    assert records.invalid(good) == []
    assert message in records.invalid(good | change)[0]
    assert "missing" in records.invalid({name: value for name, value in good.items() if name != "commit"})[0]


def test_environment_has_the_versions():
    environment = records.environment()
    assert set(environment) == {"gpu", "driver", "versions", "commit", "date"}
    assert {"python", "torch", "numba", "numba-cuda", "numpy"} <= set(environment["versions"])


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA GH200 480GB", "gh200-480gb")],
)
def test_folder_of_a_gpu(gpu, folder):
    assert records.folder(gpu) == folder


# The command line


@pytest.fixture
def toy_topic(repository, monkeypatch):
    """A topic in a temporary repository, with a simulated GPU."""
    module = types.SimpleNamespace(
        measure=lambda peers, quick: (
            rows()[: 1 if quick else None] + [records.row(f"peer:{peer.NAME}", call=Stats(1, 1, 1)) for peer in peers]
        ),
        figures=lambda record: {"ladder": plots.ladder_figure(record["rows"], caption=plots.caption(record))},
        readme_table=lambda record: f"| {record['gpu']} |",
    )
    monkeypatch.setattr(bench, "topic", lambda name: module)
    monkeypatch.setattr(bench, "topic_names", lambda: ["toy"])
    monkeypatch.setattr(records, "repository", lambda root=None: repository)
    monkeypatch.setattr(records, "environment", lambda: dict(ENVIRONMENT))
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return repository


@pytest.mark.parametrize("command", ["bench", "plot"])
def test_an_unknown_topic_is_refused_before_torch_is_imported(command):
    code = f"import sys; from moe_numba.__main__ import main; main(['{command}', 'gat']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.startswith(
        "moe_numba: there is no topic 'gat' (did you mean gate?); there are align, call_time, "
    )
    assert done.stderr.count("\n") == 1 and done.stdout == "False\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("bnech gate", "there is no command 'bnech' (did you mean bench?); there are bench, doctor, plot, readme, "),
        ("plot gate --tabel", "there is no option '--tabel' (did you mean --table?); there are --gpu, --help, "),
        ("bench gate --secnods=3", "there is no option '--secnods' (did you mean --seconds?); there are --help, "),
        ("--vresion", "there is no option '--vresion' (did you mean --version?); there are --help, --version"),
        ("plot gate h200", "'h200' is one argument too many; see `"),
        ("plot", "the following arguments are required: TOPIC; see `"),
        ("bench gate --seconds x", "argument --seconds: invalid int value: 'x'; see `"),
    ],
)
def test_a_wrong_command_line_is_refused_in_one_line(arguments, message, capsys):
    assert cli.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"moe_numba: {message}") and error.count("\n") == 1


def test_bench_says_what_it_has_measured(toy_topic, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", 0)
    assert cli.main(["bench", "toy"]) == 0
    assert ", 1 times: num_experts=256 tokens=64 dtype=float32 ...\n" in capsys.readouterr().err


@pytest.mark.parametrize("seconds, enabled, said", [(0, True, 2), (60, True, 0), (0, False, 0)])
def test_a_row_is_said_if_the_last_one_was_long_ago(seconds, enabled, said, monkeypatch, capsys):
    monkeypatch.setattr(progress, "SECONDS", seconds)
    with progress.said(enabled):
        records.row("final", config={"topk": 8}, size={"tokens": 64}, dtype="float32")
        records.row("import")
    records.row("after")
    lines = [" 1 times: topk=8 tokens=64 dtype=float32 ...", " 2 times: import ..."]
    assert [line.partition(",")[2] for line in capsys.readouterr().err.splitlines()] == lines[:said]


def test_the_help_describes_every_topic(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--help"])
    printed = capsys.readouterr().out
    assert set(re.findall(r"^  (\w+)  +\S", printed.partition("positional")[0], re.M)) == set(bench.topic_names())


def test_a_record_that_does_not_exist_is_refused_with_those_that_do(repository):
    write(repository)
    with pytest.raises(FileNotFoundError, match=r"no GPU 'h20' \(did you mean h200\?\); there is h200 in "):
        records.read("gate", "h20", repository)
    with pytest.raises(FileNotFoundError, match=r"no record 'align'; there is gate in .*moe_numba bench` writes"):
        records.read("align", root=repository)


@pytest.mark.parametrize(
    "name, meant", [("h100", " (did you mean h100-80gb?)"), ("h20", " (did you mean h200?)"), ("t4", "")]
)
def test_the_closest_name_is_suggested(name, meant):
    assert (
        records.unknown("GPU", name, ["h200", "h100-80gb"])
        == f"there is no GPU '{name}'{meant}; there are h100-80gb, h200"
    )


def test_an_installed_package_reads_its_own_copy_of_the_records(repository, monkeypatch, tmp_path):
    """And writes new ones to the current folder."""
    write(repository)
    monkeypatch.setattr(records, "PACKAGED", repository / "docs" / "results")
    monkeypatch.setattr(records, "repository", lambda root=None: pytest.fail("there is no repository"))
    monkeypatch.chdir(tmp_path)
    assert records.read("gate")["rows"] == rows()
    assert records.write("other", rows(), env=ENVIRONMENT) == Path("results/h200/other.json")
    assert (tmp_path / "results" / "h200" / "other.json").is_file() and not records.recorded("other")


@pytest.mark.parametrize(("simulated", "cuda"), [(True, True), (True, False), (False, False)])
def test_bench_needs_a_gpu(toy_topic, monkeypatch, capsys, simulated, cuda):
    monkeypatch.setattr(simulator, "ENABLED", simulated)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert cli.main(["bench", "toy"]) == 2
    assert "bench needs a GPU" in capsys.readouterr().err


def test_bench_keeps_rows_that_need_more_gpus(toy_topic, monkeypatch):
    bench.topic("toy").measure = lambda peers, quick: [row for row in rows() if not row["step"].startswith("peer:")]
    assert cli.main(["bench", "toy"]) == 0
    first = records.recorded("toy", root=toy_topic)
    toy = bench.topic("toy")
    toy.measure, toy.out_of_reach = lambda peers, quick: rows()[:1], lambda row: row["dtype"] == "bfloat16"
    monkeypatch.setattr(records, "environment", lambda: ENVIRONMENT | {"commit": "later"})
    assert cli.main(["bench", "toy"]) == 0
    second = records.recorded("toy", root=toy_topic)
    measured = {"measured": {"commit": first["commit"], "date": first["date"]}}
    kept = [measured | row for row in first["rows"] if row["dtype"] == "bfloat16"]
    assert second["commit"] == "later" and second["rows"] == [*rows()[:1], *kept] and len(kept) == 2


def test_rows_that_are_kept_keep_the_hashes_of_present_kernels(toy_topic, monkeypatch):
    own = timed_row(dtype="bfloat16")
    bench.topic("toy").measure = lambda peers, quick: [own, *rows()[:1]]
    assert cli.main(["bench", "toy"]) == 0
    first = records.recorded("toy", root=toy_topic)
    toy = bench.topic("toy")
    toy.measure, toy.out_of_reach = lambda peers, quick: rows()[:1], lambda row: row["dtype"] == "bfloat16"
    monkeypatch.setattr(records, "environment", lambda: ENVIRONMENT | {"commit": "later"})
    assert cli.main(["bench", "toy"]) == 0
    second = records.recorded("toy", root=toy_topic)
    assert second["rows"][1]["kernels"] == first["rows"][0]["kernels"] and second["functions"] == first["functions"]
    first["functions"]["scale"].append("gone 00000000")  # the kernel has changed
    (row,) = records.carried_over(first, toy.out_of_reach, ENVIRONMENT)
    assert "kernels" not in row
    (sentence,) = records.stale(second | {"functions": {}, "rows": [row, *rows()]})
    assert "1 of 6 rows were measured at commit 1a2b3c4 with other kernels" in sentence


def test_times_of_an_older_path_are_recorded_apart(toy_topic, monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_ARCH", "80")
    assert cli.main(["bench", "toy"]) == 0
    assert [path.name for path in (toy_topic / "docs" / "results").iterdir()] == ["h200-sm80"]


def test_bench_keeps_a_record_with_peers(toy_topic, capsys):
    peers = toy_topic / "peers"
    peers.mkdir()
    (peers / "triton.py").write_text("NAME, VERSION = 'triton', '1'\n")
    assert cli.main(["bench", "toy", "--peers", str(peers)]) == 0
    first = records.recorded("toy", root=toy_topic)
    assert cli.main(["bench", "toy"]) == 2
    assert "has times of triton" in capsys.readouterr().err
    assert records.recorded("toy", root=toy_topic) == first
    assert cli.main(["bench", "toy", "--out", str(toy_topic / "out")]) == 0


def test_bench_plot_and_readme_commands(toy_topic, capsys):
    peers = toy_topic / "peers"
    assert cli.main(["bench", "toy", "--peers", str(peers)]) == 2, "no such folder"
    peers.mkdir()
    (peers / "good.py").write_text("NAME, VERSION = 'triton', '1'\n")
    (peers / "absent.py").write_text("import a_package_that_is_not_there\n")
    assert cli.main(["plot", "toy"]) == 2, "nothing is recorded yet"
    capsys.readouterr()
    assert cli.main(["bench", "toy", "--peers", str(peers)]) == 0
    out, error = capsys.readouterr()
    assert "absent.py is left out" in error and "peer:triton" in out and "h200/toy.json" in out
    assert cli.main(["bench", "toy", "--quick", "--out", str(toy_topic / "out")]) == 0
    assert len(json.loads((toy_topic / "out" / "h200" / "toy.json").read_text())["rows"]) == 1

    assert cli.main(["plot", "toy", "--out", str(toy_topic / "figures")]) == 0
    for command in ("plot", "bench"):
        (toy_topic / "file").write_text("")
        assert cli.main([command, "toy", "--out", str(toy_topic / "file")]) == 2
        assert f"nothing can be written to {toy_topic / 'file'}: " in capsys.readouterr().err
    assert sorted(path.name for path in (toy_topic / "figures").iterdir()) == ["toy-ladder.png", "toy-ladder.svg"]
    (toy_topic / "folders" / "toy-ladder.png").mkdir(parents=True)
    assert cli.main(["plot", "toy", "--out", str(toy_topic / "folders")]) == 2
    assert "toy-ladder.png cannot be written: Is a directory" in capsys.readouterr().err

    capsys.readouterr()
    assert cli.main(["plot", "toy", "--table"]) == 0
    assert capsys.readouterr().out == "| NVIDIA H200 |\n"
    assert cli.main(["plot", "toy", "--table", "--out", str(toy_topic / "tables")]) == 0
    assert (toy_topic / "tables" / "toy.md").read_text() == "| NVIDIA H200 |\n"
    (toy_topic / "folders" / "toy.md").mkdir()
    assert cli.main(["plot", "toy", "--table", "--out", str(toy_topic / "folders")]) == 2
    assert "toy.md cannot be written: Is a directory" in capsys.readouterr().err
    file = toy_topic / "docs" / "results" / "h200" / "toy.json"
    record = json.loads(file.read_text())
    file.write_text(records.dump({name: value for name, value in record.items() if name != "functions"}))
    assert cli.main(["plot", "toy", "--table"]) == 0
    assert "out of date: toy: measured at commit 1a2b3c4, before kernels" in capsys.readouterr().err


def test_a_peer_without_a_name_is_refused(tmp_path):
    (tmp_path / "nameless.py").write_text("VERSION = '1'\n")
    with pytest.raises(ValueError, match="lacks NAME"):
        bench.load_peers(tmp_path)


def test_ranks_import_only_the_peers_of_their_topic(tmp_path):
    for name, body in (("one", "def plan(): pass\n"), ("two", ""), ("three", "raise AssertionError\n")):
        (tmp_path / f"{name}.py").write_text(f"NAME, VERSION = '{name}', '1'\n{body}")
    peers = bench.load_peers(tmp_path, ["one.py", "two.py"])
    assert [peer.NAME for peer in peers] == ["one", "two"]
    assert [peer.NAME for peer in load_files(peer_files(peers, "plan"))] == ["one"]


def test_table_shows_times_and_lower_bound():
    row = records.row(
        "final",
        config={"topk": 8},
        size={"tokens": 64},
        dtype="float32",
        kernel=Stats(3.0, 2.5, 3.5),
        call=Stats(12.0, 11, 13),
        floor_us=1.5,
    )
    console = Console(file=io.StringIO(), width=160)
    cli.print_table([row, *rows()], "gate", console)
    (line,) = [line for line in console.file.getvalue().splitlines() if "topk=8" in line]
    for text in ("tokens=64", "3.00", "2.50 – 3.50", "12.0", "1.50", "2.0"):
        assert text in line


def run_command(*arguments):
    return subprocess.run([sys.executable, "-m", "moe_numba", *arguments], capture_output=True, text=True)


def test_the_package_runs_as_a_module():
    done = run_command("--help")
    assert done.returncode == 0 and all(command in done.stdout for command in ("doctor", "bench", "plot"))
    assert done.stdout.startswith("usage: python -m moe_numba ")
    assert run_command("--version").stdout == f"moe_numba {moe_numba.__version__}\n"
    without = run_command()
    assert without.returncode == 2 and without.stderr == done.stdout, "what a command is, not only that it is missing"


@pytest.mark.parametrize("command", ["stale", "readme"])
def test_commands_that_need_a_clone_say_so(command, monkeypatch, tmp_path, capsys):
    repository = records.repository
    monkeypatch.setattr(records, "repository", lambda root=None: repository(tmp_path))
    monkeypatch.setattr(records, "PACKAGED", ROOT / "docs" / "results")
    assert cli.main([command]) == 2
    assert f"this needs a clone of moe_numba's repository, with its notebooks, docs/ and tests; {tmp_path} is none" in (
        capsys.readouterr().err
    )


def test_stale_results_as_json(repository, monkeypatch, capsys):
    monkeypatch.setattr(records, "repository", lambda root=None: repository)
    assert cli.main(["stale", "--json"]) == 0 and json.loads(capsys.readouterr().out) == {}
    write(repository)
    file = repository / "docs" / "results" / "h200" / "gate.json"
    record = json.loads(file.read_text())
    file.write_text(records.dump({name: value for name, value in record.items() if name != "functions"}))
    assert cli.main(["stale", "--json"]) == 1
    sentences = ["measured at commit 1a2b3c4, before kernels were hashed"]
    assert json.loads(capsys.readouterr().out) == {"h200/gate": sentences}
    assert cli.main(["stale"]) == 1 and capsys.readouterr().out == f"h200/gate: {sentences[0]}\n"


# The repository's own records


@pytest.mark.parametrize("path", RECORDS, ids=name)
def test_record_is_valid(path):
    record = json.loads(path.read_text())
    assert records.invalid(record) == []
    assert record["topic"] == path.stem and records.folder(record["gpu"]) == path.parent.name


@pytest.mark.parametrize("path", [path for path in RECORDS if path.stem in bench.topic_names()], ids=name)
def test_figures_of_each_record_are_drawn(path):
    record = json.loads(path.read_text())
    assert all(bench.topic(path.stem).figures(record).values())


def test_generated_blocks_are_up_to_date():
    assert readme.regenerate(check=True) == []


def test_the_table_of_topics_names_every_notebook_record_and_bench_topic():
    assert [topic.notebook for topic in topics.TOPICS] == sorted(p.stem for p in (ROOT / "notebooks").glob("*.py"))
    written = {name for topic in topics.TOPICS for name in topic.records}
    named = {*topics.BENCH_TOPICS, *topics.FIRST_EDITION, *written}
    missing = named - {path.stem for path in RECORDS}
    for topic in topics.TOPICS:  # a notebook that no H200 has executed as it is may have new records
        path = ROOT / "notebooks" / f"{topic.notebook}.ipynb"
        about = json.loads(path.read_text())["metadata"]["moe_numba"]
        executed = about["code"] == code_hash.hash_cells(path.with_suffix(".py").read_text())
        is_timed = executed and records.folder(about["gpu"]) == "h200" and topic.gpus == 1
        missing -= set() if is_timed else set(topic.records)
    assert named >= {path.stem for path in RECORDS} and missing <= set(topics.BENCH_TOPICS)  # not yet measured
    assert set(topics.BENCH_TOPICS) == set(bench.topic_names())


def test_the_best_of_a_row_is_bold():
    assert tables.bold_best(["2.0", "1.5", "", "1.5 (torch)"]) == ["2.0", "**1.5**", "", "**1.5 (torch)**"]
    assert tables.bold_best(["3", "2", "8 %"], slice(1)) == ["**3**", "2", "8 %"] and tables.bold_best([""]) == [""]


def test_only_peers_of_a_folder_keep_a_record_from_being_measured_again():
    names = ["DeepGEMM", "NCCL all-to-all", "transformers grouped_mm"]
    assert cli._peers_of_a_folder(names) == ["DeepGEMM"]
