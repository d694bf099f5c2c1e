"""Every time in docs/claims.md comes from a record; ``python tests/test_claims_page.py`` fills them in again."""

import json
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "claims.md"
# [12.3](results/h200/gate.json "STEP; PATH; KEY=VALUE, KEY=VALUE"): the row of a step, or "diagnosis"; a path in it;
# and some of its config, size and dtype if the step has several rows.
NUMBER = re.compile(r'\[([\d.]+)\]\((results/[^ )]+) "([^"]+)"\)')


def find(record, step, path, where=""):
    """Return the number at a path such as ``phases_us.fill``: of statistics the median, of a list its length."""
    if step == "diagnosis":
        value = record["diagnosis"]
    else:
        wanted = {pair for pair in where.split(", ") if pair}
        found = [row for row in record["rows"] if row["step"] == step and wanted <= settings(row)]
        assert len(found) == 1, f"{len(found)} rows of {record['topic']} are {step!r} with {where!r}"
        value = found[0]
    for key in path.split("."):
        value = value[int(key) if isinstance(value, list) else key]
    return value["median"] if isinstance(value, dict) else len(value) if isinstance(value, list) else value


def settings(row):
    return {f"{k}={v}" for k, v in {**row["config"], **row["size"], "dtype": row.get("dtype")}.items()}


def filled(text):
    """Return the page with the numbers of the records, each with as many decimals as before."""

    def number(match):
        shown, file, source = match.groups()
        value = find(json.loads((PAGE.parent / file).read_text()), *source.split("; "))
        return match[0].replace(shown, f"{value:.{len(shown.partition('.')[2])}f}", 1)

    return NUMBER.sub(number, text)


def test_the_numbers_are_those_of_the_records():
    text = PAGE.read_text()
    assert filled(text) == text, "run `python tests/test_claims_page.py`, and read the verdicts again"
    own = re.sub(r'"[^"]*"', "", NUMBER.sub("", text))  # without what is linked, or quoted from an article
    assert re.findall(r"[\d.]+ us\b", own) == ["5.2 us"]  # 1024 times 10 cycles at 1.98 GHz


def test_a_wrong_number_or_source_is_rejected():
    right = '[10.1](results/h200/align_ladder.json "diagnosis; sort kernel.as it is")'
    assert filled(right) == filled(right.replace("10.1", "10.2")) == right
    for source in ("no step; kernel_us", "0x1 baseline; kernel_us; tokens=64", "0x1 baseline; no_us"):
        with pytest.raises((AssertionError, KeyError)):
            filled(right.replace("diagnosis; sort kernel.as it is", source))


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
