"""The files around the package agree with one another."""

import hashlib
import html
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import moe_numba
from moe_numba.course.pages import race
from moe_numba.extras import EXTRA_OF
from moe_numba.runtime.changed_source import define

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


EXTRAS = PROJECT["optional-dependencies"]


def wanted():
    """Return the bounds of every direct dependency of pyproject.toml: ``{name: bounds}``.

    They include all extras but cu12, which cannot be installed together with cu13, the one that the tests run with.
    """
    lines = sum((lines for extra, lines in EXTRAS.items() if extra != "cu12"), PROJECT["dependencies"])
    bounds = {}
    for requirement in map(Requirement, lines):
        if requirement.name == PROJECT["name"]:  # an extra that includes others
            continue
        name = canonicalize_name(requirement.name)
        assert bounds.setdefault(name, requirement.specifier) == requirement.specifier, f"{name} has two bounds"
    return bounds


def pin_problems(text, bounds):
    """List the direct dependencies that constraints.txt does not pin, or pins outside their bounds."""
    pins = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pins[canonicalize_name(name)] = version
    problems = [f"{name} is not pinned" for name in bounds.keys() - pins.keys()]
    for name in bounds.keys() & pins.keys():
        if pins[name] not in bounds[name]:
            problems.append(f"{name}=={pins[name]} is outside {bounds[name]}")
    return problems


def test_conda_brings_python_and_pip_the_rest():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["dependencies"] == [
        f"python {PROJECT['requires-python']}",
        "pip",
        {"pip": ["-c constraints.txt", "-e .[cu13,notebooks,test]"]},
    ]
    assert environment["channels"] == ["conda-forge"]


def test_constraints_pin_every_dependency_inside_its_bounds():
    assert pin_problems((ROOT / "constraints.txt").read_text(), wanted()) == []


@pytest.mark.parametrize(
    "before, after, said",
    [("torch==2.13.0\n", "", "torch is not pinned"), ("numpy==2.4.6", "numpy==2.6.0", "numpy==2.6.0 is outside")],
)
def test_wrong_constraints_are_rejected(before, after, said):
    text = (ROOT / "constraints.txt").read_text()
    assert before in text
    problems = pin_problems(text.replace(before, after), wanted())
    assert [problem for problem in problems if problem.startswith(said)]


def test_known_incompatible_versions_are_excluded():
    bounds = wanted()
    refused = {"numpy": "2.6.0", "numba": "0.69.0", "numba-cuda": "0.31.0", "torch": "2.10.0"}
    for name, version in refused.items():
        assert version not in bounds[name], f"{name} {version} is known to break"


def test_cuda_12_has_the_packages_of_cuda_13():
    """In the versions for CUDA 12, and with a torch that has builds for it, which 2.15 has not."""
    old, new = ({r.name: r for r in map(Requirement, EXTRAS[extra])} for extra in ("cu12", "cu13"))
    for name, requirement in new.items():
        twin = old[name.replace("cuda13x", "cuda12x")]
        assert twin.specifier == requirement.specifier
        assert twin.extras == {extra.replace("cu13", "cu12") for extra in requirement.extras}
    torch = next(r.specifier for r in map(Requirement, EXTRAS["kernels"]) if r.name == "torch")
    assert "2.14.1" in torch & old["torch"].specifier and "2.15.0" not in old["torch"].specifier
    # What torch's builds for CUDA 12.6, 12.8 and 12.9 require.
    for toolkit, linker in (("12.6.2", "12.6.85"), ("12.8.1", "12.8.93"), ("12.9.1", "12.9.86")):
        assert toolkit in old["cuda-toolkit"].specifier and linker in old["nvidia-nvjitlink-cu12"].specifier
    assert "12.3.2" not in old["cuda-toolkit"].specifier and "13.0.0" not in old["cuda-toolkit"].specifier


def test_the_simulator_is_installed_without_extras_and_the_rest_with_them():
    assert {r.name for r in map(Requirement, PROJECT["dependencies"])} == {"numpy", "numba", "numba-cuda", "greenlet"}
    for extra in ("cu13", "cu12", "notebooks", "test"):
        included = next(r for r in map(Requirement, EXTRAS[extra]) if r.name == PROJECT["name"])
        assert included.extras == {"kernels", "plots"}


def test_error_messages_name_the_extra_that_installs_a_module():
    for module, extra in EXTRA_OF.items():
        package = {"nvshmem": "nvshmem4py-cu13"}.get(module, module)
        assert canonicalize_name(package) in {canonicalize_name(Requirement(r).name) for r in EXTRAS[extra]}


def test_make_has_its_targets():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("help", "notebooks", "test", "lint", "docs", "serve", "test-browser", "clean"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
    assert "-c constraints.txt" in makefile
    listed = subprocess.run(["make", "-C", str(ROOT)], capture_output=True, text=True, check=True).stdout
    assert "make notebooks" in listed and "make test" in listed


def test_make_refuses_an_old_python_in_one_sentence(tmp_path):
    old = tmp_path / "python3.9"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    done = subprocess.run(["make", "-C", str(tmp_path), "test", f"PYTHON={old}"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python 3.11 or newer" in done.stdout + done.stderr
    assert not (tmp_path / ".venv").exists()


@pytest.mark.parametrize(
    "machine, size, cpu_torch, packages",
    [
        (["GPU=yes", "ON_MACOS="], "3.1 GB", False, {".[cu13,notebooks,test]"}),
        (["GPU=", "ON_MACOS="], "0.7 GB (no GPU", True, {".[notebooks,test]", "numba-cuda[cu13]"}),
        (["GPU=", "ON_MACOS=Darwin"], "0.3 GB", False, {".[notebooks,test]"}),
    ],
    ids=["gpu", "linux", "macos"],
)
def test_make_downloads_what_the_machine_needs_and_says_how_much(tmp_path, machine, size, cpu_torch, packages):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    command = ["make", "-C", str(tmp_path), "--dry-run", *machine, ".venv/.ready"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    said = next(number for number, line in enumerate(lines) if f"downloads {size}" in line)
    installed = [(number, shlex.split(line)) for number, line in enumerate(lines) if "pip install" in line]
    assert all(number > said for number, _ in installed), "the size comes before the download"
    assert any("https://download.pytorch.org/whl/cpu" in words for _, words in installed) == cpu_torch
    assert packages == set(installed[-1][1][installed[-1][1].index("-e") + 1 :])


def test_ci_runs_make_test():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o100, ".ci/run is not executable"
    assert re.search(r"^(exec )?make test$", script.read_text(), re.MULTILINE)


def test_the_licence_is_apache_2_complete():
    text = (ROOT / "LICENSE").read_bytes()
    assert hashlib.sha256(text).hexdigest() == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
    assert PROJECT["license"] == "Apache-2.0"


def test_the_readme_names_both_commands():
    readme = (ROOT / "README.md").read_text()
    assert "make notebooks" in readme and "make test" in readme


def run_simulated(*arguments, **options):
    env = {**os.environ, "MOE_NUMBA_SIMULATE": "1"}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env, **options)


def test_importing_the_package_first_chooses_the_simulator():
    done = run_simulated("-c", "import moe_numba, numba.cuda; assert numba.cuda.config.ENABLE_CUDASIM")
    assert done.returncode == 0, done.stderr


def test_subpackages_are_there_without_an_import_of_their_own():
    names = sorted(moe_numba._SUBPACKAGES)
    program = f"import moe_numba; print(*(getattr(moe_numba, name).__name__ for name in {names}))"
    done = run_simulated("-c", program)
    assert done.stdout.split() == [f"moe_numba.{name}" for name in names], done.stderr
    done = run_simulated("-c", "import moe_numba; moe_numba.no_such_name")
    assert "has no attribute 'no_such_name'" in done.stderr


def test_gpu_tests_are_deselected_in_the_simulator(tmp_path):
    for name in ("conftest.py", "costs.json"):
        shutil.copy(ROOT / "tests" / name, tmp_path)
    shutil.copytree(ROOT / "tests" / "helpers", tmp_path / "helpers")
    (tmp_path / "test_tiny.py").write_text(
        "import pytest\n\n"
        "def test_anywhere(device):\n    assert device == 'cpu'\n\n"
        "@pytest.mark.gpu\ndef test_gpu():\n    assert False\n\n"
        "@pytest.mark.multigpu\ndef test_two():\n    assert False\n"
    )
    done = run_simulated("-m", "pytest", "-p", "no:cacheprovider", str(tmp_path), cwd=tmp_path)
    assert "1 passed, 2 deselected" in done.stdout, done.stdout
    assert "skipped" not in done.stdout


PAGES_WITH_CODE = (
    "README.md",
    "docs/usage.md",
    "docs/dispatch_and_combine.md",
    "docs/training.md",
    "docs/transformers.md",
    "docs/writing_ptx.md",
    "docs/measuring.md",
)


@pytest.mark.parametrize("page", PAGES_WITH_CODE)
def test_the_code_of_a_page_runs(page):
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.M | re.S)
    assert blocks
    if any("from transformers import" in block for block in blocks):
        pytest.importorskip("transformers")
    for block in blocks:
        define(block, {"__name__": "page"}, page)


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page):
    """To files, and to headings of the page or of another one, whose anchors are those of GitHub."""
    prose = re.sub(r"^```.*?^```|^    .*?$|`[^`]*`", "", page.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, link


def test_the_readme_shows_what_the_simulator_says_today():
    assert f"]({race.PICTURE})" in (ROOT / "README.md").read_text()
    picture = (ROOT / race.PICTURE).read_text()
    shown = re.sub(r"\s+", " ", html.unescape(" ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture))))
    report = race.run(race.KERNEL)
    assert report.startswith("DataRace") and report in shown
    assert race.run(race.repaired()) in shown and "right: 63 62" in shown


CLOCKS = re.compile(r"\b(perf_counter|monotonic|process_time|time\.time|timeit|datetime\.now)\b")


def test_no_test_reads_the_clock():
    """A loaded machine must not fail a test: count steps, instructions or launches instead of seconds."""
    assert CLOCKS.search("start = time.perf_counter()") and CLOCKS.search("from time import monotonic")
    benchmark = ROOT / "tests" / "helpers" / "simulator_speed.py"  # no test imports it
    files = [path for path in (ROOT / "tests").rglob("*.py") if path not in (Path(__file__), benchmark)]
    assert [str(path.relative_to(ROOT)) for path in files if CLOCKS.search(path.read_text())] == []
