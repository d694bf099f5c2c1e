"""What is in the sdist and the wheel, and what an index shows of them."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from readme_renderer import markdown

import moe_numba

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RECORDS = "moe_numba/course/bench/records/results/"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Return the sdist and the wheel."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def tracked():
    """Return the files of the repository, with those that are not committed yet."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a clone")
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


def in_wheel(name):
    """Return where a file of the repository is in the wheel, or None if it is not."""
    if name.startswith("docs/results/"):
        return name.replace("docs/results/", RECORDS)
    return name if name.startswith("moe_numba/") else None


def test_the_sdist_is_the_repository(built, tracked):
    names = {name.partition("/")[2] for name in tarfile.open(built[0]).getnames()}
    assert names - {"PKG-INFO"} == tracked


def test_the_wheel_is_the_package_with_the_records(built, tracked):
    names = set(zipfile.ZipFile(built[1]).namelist())
    info = f"moe_numba-{moe_numba.__version__}.dist-info/"
    assert {name for name in names if not name.startswith(info)} == set(map(in_wheel, tracked)) - {None}
    assert {RECORDS + "h200/gate.json", "moe_numba/py.typed", "moe_numba/ptx/cuda_cpp/wgmma.cu"} <= names
    assert {"METADATA", "entry_points.txt", "licenses/LICENSE"} <= {name.removeprefix(info) for name in names}


def metadata(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
    return Parser().parsestr(archive.read(name).decode())


def dead_links(text):
    """Return the links of a page that lead nowhere where the repository is not, as on PyPI; it must render."""
    page = markdown.render(text)
    assert page is not None
    headings = {f"#{heading}" for heading in re.findall(r'id="(.*?)"', page)}
    links = re.findall(r'(?:href|src)="(.*?)"', page)
    return [link for link in links if not link.startswith("https://") and link not in headings]


def test_an_index_can_show_the_readme(built):
    text = metadata(built[1]).get_payload()
    assert dead_links(text) == []
    assert text.startswith("# moe_numba\n") and "[Lessons](#the-course)" in text
    links = dead_links((ROOT / "README.md").read_text() + "[x](#nowhere)")
    assert {"docs/usage.md", "docs/figures/race.svg", "#user-content-nowhere"} <= set(links), "the check sees them"


def test_the_version_is_one(built):
    version = moe_numba.__version__
    assert metadata(built[1])["Version"] == version and version in built[0].name
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == version


def test_the_console_script_is_the_command_line():
    module, _, function = PROJECT["scripts"]["moe-numba"].partition(":")
    assert callable(getattr(sys.modules.get(module) or __import__(module, fromlist=[function]), function))


def cuda_packages(platform, *extras):
    """Return the direct dependencies of extras on a platform that exist only for CUDA."""
    found, seen, todo = set(), set(), ["", *extras]
    while todo:
        extra = todo.pop()
        seen.add(extra)
        for requirement in map(Requirement, PROJECT["optional-dependencies"].get(extra, PROJECT["dependencies"])):
            if requirement.marker and not requirement.marker.evaluate({"sys_platform": platform}):
                continue
            if requirement.name == PROJECT["name"]:
                todo += requirement.extras - seen
            elif re.match("cuda|cupy|numba-cuda|nvidia|nvshmem", requirement.name):
                found.add(requirement.name)
    return found


@pytest.mark.parametrize("extra", ["kernels", "plots", "transformers", "notebooks", "test", "docs", "cu13"])
def test_macos_needs_no_package_for_cuda(extra):
    assert cuda_packages("darwin", extra) == set()
    assert "numba-cuda" in cuda_packages("linux", extra)
    assert cuda_packages("darwin", "mlir") == {"numba-cuda-mlir"}, "the check sees one"
