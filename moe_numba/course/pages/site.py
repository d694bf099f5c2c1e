"""Gathers the sources of the documentation site in one folder, from which Sphinx builds it; see ``make docs``.

python -m moe_numba.course.pages.site build/site-source

The guides of docs/, the lessons of ``topics.TOPICS``, the README, the changelog and the docstrings' functions lie in
several folders, and GitHub shows them where they are. On the site they are neighbours: this module copies them and
rewrites their links. A link to a file that the site does not have, such as a kernel, becomes its text.
"""

import argparse
import ast
import html
import json
import posixpath
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

import nbformat

from moe_numba.course.bench import records
from moe_numba.course.pages.html import legible, title_of
from moe_numba.course.pages.topics import TOPICS

EXAMPLES = "docs/examples"
# File of the repository -> page of the site, for those that are no page of docs/.
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "moe_numba/simulator/README.md": "simulator_first_steps.md",
    "docs/playground": "playground.md",
    EXAMPLES: "examples.md",
    "README.md": "index.md",
}
# Folder of docs/ -> where it is copied to; what lies in `extra` becomes part of the site as it is.
FOLDERS = {
    "_static": "_static",
    "_templates": "_templates",
    "examples": "examples",
    "figures": "figures",
    "results": "results",
    "playground": "extra/playground",
}
ANCHORS = {"the-course": "course.md", "install": "usage.md#install", "results": "measurements.md"}  # of the README
_CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)[^\n]*$|^(?:    |\t)[^\n]*$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^)\s]+)\)")
_ATTRIBUTE = re.compile(r'\b(?P<name>href|src|srcset)="(?P<target>[^"]+)"')


def pages(root: Path) -> dict[str, str]:
    """Return the page of the site for each file of the repository that is one: ``{file: page}``."""
    found = {f"docs/{path.name}": path.name for path in sorted((root / "docs").glob("*.md"))}
    for topic in TOPICS:
        if (root / "notebooks" / f"{topic.notebook}.ipynb").exists():
            page = f"course/{topic.notebook}.ipynb"
            found |= {f"notebooks/{topic.notebook}.ipynb": page, f"notebooks/{topic.notebook}.py": page}
    return found | {file: page for file, page in ELSEWHERE.items() if (root / file).exists()}


def relink(text: str, file: str, page: str, where: Mapping[str, str], root: Path, *, built: bool = False) -> str:
    """Return the Markdown text of a file with the links that its page needs.

    Parameters
    ----------
    text : str
        Code in it stays as it is.
    file, page : str
        Paths of the file in the repository and of its page on the site.
    where : mapping
        What ``pages`` returns.
    root : path
        The repository.
    built : bool
        Link to ``.html`` files instead of sources, as HTML of a notebook's output must.

    Raises
    ------
    ValueError
        A link leads to a file that the repository lacks.
    """

    def moved(target):
        """Return the link of the site, or None if the site does not have what it leads to."""
        if re.match(r"[a-z]+:|\.\.\.$", target):
            return target
        path, _, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(file), path)) if path else file
        if path == "README.md" and anchor:
            if anchor not in ANCHORS:
                return None
            new, _, anchor = ANCHORS[anchor].partition("#")
        elif path == file:
            return f"#{slug(anchor)}"  # Jupyter keeps capitals and punctuation
        elif path in where:
            new = where[path]
        elif path.startswith(f"{EXAMPLES}/"):
            new, anchor = where[EXAMPLES], slug(posixpath.basename(path))
        elif path.startswith(("docs/figures/", "docs/results/")) and (root / path).is_file():
            new = path.removeprefix("docs/")
        elif (root / path).exists():
            return None
        else:
            raise ValueError(f"{file} links to {target}, which does not exist")
        if built:
            new = re.sub(r"\.(md|ipynb)$", ".html", new)
        new = posixpath.relpath(new, posixpath.dirname(page) or ".")
        return f"{new}#{anchor}" if anchor else new

    def link(found):
        target = moved(found["target"])
        return f"{found['image']}[{found['text']}]({target})" if target else found["text"]

    def attribute(found):
        return f'{found["name"]}="{moved(found["target"]) or "#"}"'

    def rewrite(prose):
        return _ATTRIBUTE.sub(attribute, _LINK.sub(link, prose))

    if built:
        return _ATTRIBUTE.sub(attribute, text)
    # Code in the text of a link belongs to the link, so that it is set aside and put back.
    codes: list[str] = []

    def aside(found):
        codes.append(found[0])
        return f"\0{len(codes) - 1}\0"

    return re.sub(r"\0(\d+)\0", lambda found: codes[int(found[1])], rewrite(_CODE.sub(aside, text)))


def slug(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def lesson(notebook: nbformat.NotebookNode, file: str, where: Mapping[str, str], root: Path) -> nbformat.NotebookNode:
    """Return a lesson with the links of the site; the theme links it to the lessons before and after."""
    page = where[file]
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            cell.source = relink(cell.source, file, page, where, root)
        elif is_mostly_imports(cell.source):
            cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "hide-input"]
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/svg+xml" in data:  # in the page itself, where its colours can follow the page's
                data["text/html"] = data.pop("image/svg+xml")
            for kind, built in (("text/markdown", False), ("text/html", True)):
                if kind in data:
                    data[kind] = relink(data[kind], file, page, where, root, built=built)
            if "text/html" in data:
                data["text/html"] = legible(data["text/html"])
    return notebook


def is_mostly_imports(source: str) -> bool:
    """Whether at least ten lines of a cell, and more than do anything else, import: a page folds it."""
    lines = {True: 0, False: 0}
    for statement in ast.parse(source).body:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        lines[is_import] += statement.end_lineno - statement.lineno + 1
    return lines[True] >= 10 and lines[True] > lines[False]


def sections(readme: str) -> dict[str, str]:
    """Return the sections of the README, of which pages include some: ``{anchor: text}``."""
    parts = re.split(r"^#{1,2} (.*)$", readme, flags=re.MULTILINE)
    texts = dict(zip(map(slug, parts[1::2]), parts[2::2]))
    introduction = next(iter(texts))
    return {"introduction": texts.pop(introduction)} | texts


def toctree(lessons: list[str], folder: Path) -> str:
    """Return the list of the lessons for the sidebar, with their numbers."""
    lines = ["```{toctree}", ":hidden:", "", "/run_lessons"]
    for page in dict.fromkeys(lessons):
        title = title_of(nbformat.read(folder / page, as_version=4), page)
        number = page.removeprefix("course/").partition("_")[0]
        lines.append(f"{number} {title} </{page.removesuffix('.ipynb')}>")
    return "\n".join([*lines, "```", ""])


def playground_examples(root: Path) -> str:
    """Return a list of the playground's examples, by group, whose links open them."""
    lines, group = [], None
    for example in json.loads((root / "docs/playground/examples/examples.json").read_text()):
        if example["group"] != group:
            group = example["group"]
            lines += ["", f"**{group}**", ""]
        name = example["file"].removesuffix(".py")
        lines.append(f'- <a href="playground/index.html#example={name}">{html.escape(example["title"])}</a>')
    return "\n".join(lines) + "\n"


def examples(root: Path) -> str:
    """Return the page of the programs in docs/examples: for each its docstring and its source."""
    lines = ["# Example programs", "", "Whole programs, which run on a GPU or in the simulator.", ""]
    for path in sorted((root / EXAMPLES).glob("*.py")):
        text = ast.get_docstring(ast.parse(path.read_text())).replace("``", "`")
        lines += [f"## {path.name}", "", text, "", f"```{{literalinclude}} examples/{path.name}"]
        lines += [":language: python", "```", ""]
    return "\n".join(lines)


def gather(target: Path, root: Path | None = None) -> list[str]:
    """Write the sources of the site to an empty or absent folder; return its pages."""
    root = records.repository(root)
    where = pages(root)
    if target.exists():
        shutil.rmtree(target)
    for folder, copy in FOLDERS.items():
        shutil.copytree(root / "docs" / folder, target / copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "docs/conf.py", target)
    for file, page in where.items():
        path = target / page
        path.parent.mkdir(parents=True, exist_ok=True)
        if file.endswith(".ipynb"):
            notebook = lesson(nbformat.read(root / file, as_version=4), file, where, root)
            nbformat.write(notebook, path)
        elif file.endswith(".md") and file != "README.md":
            path.write_text(relink((root / file).read_text(), file, page, where, root))
    parts = sections(relink((root / "README.md").read_text(), "README.md", "index.md", where, root))
    parts |= {"playground_examples": playground_examples(root)}
    parts["lessons"] = toctree([page for page in where.values() if page.startswith("course/")], target)
    (target / "parts").mkdir()
    for name, text in parts.items():
        (target / "parts" / f"{name}.md").write_text(text)
    (target / where[EXAMPLES]).write_text(examples(root))
    return sorted(set(where.values()))


def main() -> None:
    """Gather the sources in the folder that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    print(f"{len(gather(parser.parse_args().target))} pages, and those of the functions, which Sphinx adds")


if __name__ == "__main__":
    main()
