"""The claims of the articles: data without verdicts, one rule, and checks that can fail."""

import copy
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from numba import cuda

from moe_numba.course import claims
from moe_numba.course.articles.claims import (
    align_checks,
    deepep_checks,
    gate_checks,
    hpc_ops_checks,
    shared_experts_checks,
)
from moe_numba.course.bench import records
from moe_numba.course.claims import ARTICLES, LOOKUPS, judge
from moe_numba.course.verdicts import (
    VERDICTS,
    About,
    Claim,
    Found,
    Setup,
    Threshold,
    at_least,
    at_most,
    exactly,
    faster,
    figure,
    no_cost,
    noise,
    percentage,
    verdict,
)

EVERY = [(name, claim) for name, article in ARTICLES.items() for claim in article.claims]
NEGATIVE = {"not reproduced", "arithmetic does not hold", "does not hold for the code"}
EXACTLY_THESE = {
    "reproduced",
    "not reproduced",
    "different setup",
    "arithmetic holds",
    "arithmetic does not hold",
    "holds for the code",
    "does not hold for the code",
    "not measured",
}


def one(about, setup=Setup.SAME):
    """Make a claim that is met from 10 on."""
    return Claim("0x0", "a quote", "a quantity", about, at_least(10), lambda: None, (), setup)


def claim_about(name, quantity, about=None):
    claims_of = [claim for claim in ARTICLES[name].claims if about in (None, claim.about)]
    (found,) = [claim for claim in claims_of if claim.quantity.startswith(quantity)]
    return found


# The rule


def test_there_are_exactly_these_verdicts():
    assert set(VERDICTS) == EXACTLY_THESE


@pytest.mark.parametrize(
    "about, setup, value, expected",
    [
        (About.FIGURE, Setup.SAME, 10, "reproduced"),
        (About.FIGURE, Setup.SAME, 9, "not reproduced"),
        (About.FIGURE, Setup.PORT, 10, "different setup"),
        (About.FIGURE, Setup.OTHER, 10, "different setup"),
        (About.DIRECTION, Setup.SAME, 10, "reproduced"),
        (About.DIRECTION, Setup.SAME, 9, "not reproduced"),
        (About.DIRECTION, Setup.PORT, 10, "reproduced"),
        (About.DIRECTION, Setup.PORT, 9, "different setup"),
        (About.DIRECTION, Setup.OTHER, 10, "different setup"),
        (About.ARITHMETIC, Setup.SAME, 10, "arithmetic holds"),
        (About.ARITHMETIC, Setup.SAME, 9, "arithmetic does not hold"),
        (About.CODE, Setup.SAME, 10, "holds for the code"),
        (About.CODE, Setup.SAME, 9, "does not hold for the code"),
        (About.CODE, Setup.PORT, 10, "holds for the code"),
        (About.CODE, Setup.PORT, 9, "different setup"),
        (About.CODE, Setup.OTHER, 9, "different setup"),
    ],
)
def test_the_rule(about, setup, value, expected):
    claim = one(about, setup)
    assert verdict(claim, Found(value, "")) == expected
    assert verdict(claim, None) == "not measured"


def test_thresholds():
    assert exactly(3).is_met(3) and not exactly(3).is_met(2) and str(exactly(3)) == "3"
    assert at_most(2, " %").is_met(2) and not at_most(2).is_met(2.1) and str(at_most(2, " %")) == "at most 2 %"
    assert not at_least(2).is_met(float("nan"))
    assert figure(10) == at_least(9, " %") and str(percentage(5.9)) == "5.8 to 6 %"
    assert percentage(5.9).is_met(5.988) and not percentage(5.9).is_met(6.1)


# The claims are data


def test_a_claim_names_its_article_and_section_and_quotes_it_in_english():
    for article in ARTICLES.values():
        assert article.title and article.about and article.notebooks and article.code.startswith("https://")
    for name, claim in EVERY:
        assert claim.section and claim.quote and claim.quantity, (name, claim)
        for text in (claim.section, claim.quote, claim.quantity, claim.differs, claim.needs):
            assert not re.search(r"[\u3000-\u9fff\uff00-\uffef]", text), text
        assert isinstance(claim.threshold, Threshold) and str(claim.threshold)
        assert claim.measure is not None or claim.needs, claim.quote
        assert claim.differs or claim.setup is not Setup.OTHER, f"{claim.quote}: it must say what differs"
        assert set(claim.lookups) <= set(LOOKUPS), claim.quote


def test_no_claim_has_a_typed_verdict():
    """The value alone decides: one that meets the threshold and one that misses it get different verdicts."""
    assert "verdict" not in {field.name for field in fields(Claim)}
    for _, claim in EVERY:
        texts = " ".join(value for field in fields(claim) if isinstance(value := getattr(claim, field.name), str))
        assert not any(word in texts.lower() for word in [*VERDICTS, "confirmed", "refuted", "more subtle"]), texts
        least, most, _ = claim.threshold
        inside = least if least > float("-inf") else most
        outside = next(value for value in (inside - 1e9, inside + 1e9) if not claim.threshold.is_met(value))
        met, missed = (verdict(claim, Found(value, "")) for value in (inside, outside))
        if claim.is_like_for_like:
            assert met != missed and met not in NEGATIVE, claim.quote
        else:
            assert met == missed == "different setup", claim.quote


def test_only_the_same_setup_gets_a_negative_verdict():
    for _, claim in EVERY:
        if claim.setup is not Setup.SAME:
            assert not NEGATIVE & {verdict(claim, Found(value, "")) for value in (-1e9, 0, 1, 1e9)}, claim.quote


def test_every_lookup_names_a_record_that_exists_or_is_none():
    """To connect a number whose step was renamed, or a time that a notebook now records, change `LOOKUPS`."""
    for name, entry in LOOKUPS.items():
        if entry is not None:
            assert records.recorded(entry.record) is not None, f"{name}: there is no record {entry.record}"
            assert claims.find(name) is not None, f"{name}: the record {entry.record} has no such number"
        else:
            assert claims.find(name) is None
    used = {name for _, claim in EVERY for name in claim.lookups}
    assert {name for name, entry in LOOKUPS.items() if entry is None} <= used


def test_a_version_of_the_alignment_is_the_last_of_its_steps():
    """A version that a notebook builds in several steps is complete after the last one; "0x4, ..." are variants."""
    steps = [row["step"] for row in records.recorded("align_ladder")["rows"]]
    for version in ("0x1", "0x2", "0x3", "0x4", "0x5"):
        *_, last = [step for step in steps if step.startswith(f"{version} ")]
        assert claims.ALIGN_STEPS[version] == last


def test_the_grouped_gemm_is_compared_with_the_tile_that_hpc_ops_chooses():
    beside = {rows: claim_about("hpc-ops", f"time saved beside torch's loop, {rows} rows") for rows in (32, 2048, 8192)}
    assert {rows: claim.lookups[1] for rows, claim in beside.items()} == {
        32: "kTileM 16, 32 rows",
        2048: "vertical scheduler, 2048 rows",
        8192: "vertical scheduler, 8192 rows",
    }
    assert all(claim.quantity.endswith("kTileM 16" if rows == 32 else "kTileM 64") for rows, claim in beside.items())


def margin(threshold):
    """The share of a time by which a threshold differs from no change; None if it is about something else."""
    bound = threshold.least if threshold.least > float("-inf") else threshold.most
    return {"": abs(bound - 1), " %": abs(bound) / 100, " points": abs(bound) / 100}.get(threshold.unit)


def too_fine(claim):
    """Whether a claim decides on less than what measurements of one kernel differ by."""
    if claim.about is About.CODE or not claim.lookups or None in [LOOKUPS[name] for name in claim.lookups]:
        return False
    found = margin(claim.threshold)
    return found is not None and found < noise(claims.are_interleaved(claim.lookups)) - 1e-9


def test_no_claim_decides_on_less_than_the_noise_of_its_measurements():
    assert not [(name, claim.quantity) for name, claim in EVERY if too_fine(claim)]
    for _, claim in EVERY:
        if claim.threshold in (faster(interleaved=False), no_cost(interleaved=False)) and claim.lookups:
            assert not claims.are_interleaved(claim.lookups), f"{claim.quantity}: 2 % would do"


@pytest.mark.parametrize(
    "lookups, interleaved",
    [
        (("0x1, 4096 tokens", "0x2, 4096 tokens"), True),
        (("0x1, 64 tokens", "0x2, 64 tokens"), False),
        (("0x1, 1 token", "0x2, 1 token"), False),
        (("0x1, 4096 tokens", "0x2, 4096 tokens", "0x1, 1 token", "0x2, 1 token"), False),
        (("0x1: fill", "0x1: counting", "0x1: serial scan"), True),
        (("fill with 4-byte stores", "fill with 16-byte stores"), True),
        (("0x4, filling first: main kernel", "0x5: CTA 0 of the main kernel"), False),
        (("gate: torch.compile, 64", "gate: moe_fused_gate, 64"), True),
        (("gate: torch.compile, 64", "gate: moe_fused_gate, 1"), False),
        (("torch, 32 rows", "kTileM 16, 32 rows"), False),
        (("16 tokens, not transposed", "16 tokens, transposed"), False),
    ],
)
def test_which_times_are_interleaved(lookups, interleaved):
    assert claims.are_interleaved(lookups) is interleaved
    for threshold in (faster(), no_cost(), at_most(1.02), at_least(2, " points")):
        claim = replace(one(About.DIRECTION, Setup.PORT), lookups=lookups, threshold=threshold)
        assert too_fine(claim) is not interleaved
        assert not too_fine(replace(claim, threshold=faster(interleaved=False)))


def test_a_small_change_counts_only_if_its_times_are_interleaved(recorded):
    for size, field, expected in (
        ("4096 tokens", "kernel_us", "reproduced"),
        ("64 tokens", "few_us", "different setup"),
        ("1 token", "one_us", "different setup"),
    ):
        claim = claim_about("align", f"time saved, 0x1 -> 0x2, {size}")
        change(recorded["align_ladder"], "0x1 baseline", 100.0, field)
        change(recorded["align_ladder"], "0x2 padding inside", 97.0, field)
        assert judge(claim, recorded.get).verdict == expected
        change(recorded["align_ladder"], "0x2 padding inside", 94.0, field)
        assert judge(claim, recorded.get).verdict == "reproduced"


# Records decide


@pytest.fixture
def recorded():
    """Copies of the committed records, to be changed: ``recorded["gate"]``."""
    names = {entry.record for entry in LOOKUPS.values() if entry}
    return {name: copy.deepcopy(records.recorded(name)) for name in names}


def change(record, step, value, field="kernel_us", **where):
    for row in records.select(record, step=step, **where):
        row[field] = dict.fromkeys(("median", "p10", "p90"), value) if isinstance(row[field], dict) else value


def test_each_verdict_once_on_a_made_up_record(recorded, monkeypatch):
    read = recorded.get
    behind = claim_about("gate", "time of torch.compile's kernels", About.DIRECTION)
    assert judge(behind, read).verdict == "reproduced"
    change(recorded["gate"], "torch.compile", 1.0, size={"tokens": 64})
    assert judge(behind, read).verdict == "not reproduced"
    assert judge(behind, {}.get).verdict == "not measured"
    assert judge(claim_about("gate", "time before over time after"), read).verdict == "different setup"

    throughput = claim_about("shared experts", "throughput at QPS 4")
    assert judge(throughput, read).verdict == "arithmetic holds"
    monkeypatch.setattr("moe_numba.course.articles.claims.shared_experts._better", lambda qps, metric: 7.0)
    assert judge(throughput, read).verdict == "arithmetic does not hold"

    templates = claim_about("gate", "shapes and dtypes that reach theirs")
    assert judge(templates, read).verdict == "does not hold for the code"
    mended = gate_checks.LISTING.replace("{0} if", "{0} begin if").replace(
        "launch else if {1}", "launch end else if {1}"
    )
    right = replace(templates, measure=lambda: gate_checks.templates_reached(mended))
    assert judge(right, read).verdict == "holds for the code"


@pytest.mark.parametrize(
    "article, quantity, record, step, value, before, after",
    [
        ("gate", "kernels that are left", "gate_ladder", "torch.compile", 1, "reproduced", "not reproduced"),
        ("align", "time saved, 0x2 -> 0x3", "align_ladder", "0x3 binary search", 34.0, "reproduced", "different setup"),
        ("align", "its time over that", "align_ladder", "0x4 two-level scan", 1.0, "different setup", "reproduced"),
        (
            "align",
            "time saved, 0x1 -> 0x2, 4096",
            "align_ladder",
            "0x2 padding inside",
            30.0,
            "different setup",
            "reproduced",
        ),
        (
            "hpc-ops",
            "time saved by the transp",
            "grouped_gemm_dense_ladder",
            "transposed MMA",
            99.0,
            "reproduced",
            "different setup",
        ),
        (
            "DeepEP",
            "time saved beside the same",
            "dispatch_layout_ladder",
            "private counters",
            1.0,
            "different setup",
            "reproduced",
        ),
        (
            "shared experts",
            "experts that the kernel",
            "align",
            "peer:sglang-aot",
            9,
            "different setup",
            "different setup",
        ),
    ],
)
def test_a_wrong_number_in_a_record_flips_the_verdict(recorded, article, quantity, record, step, value, before, after):
    claim = claim_about(article, quantity)
    assert judge(claim, recorded.get).verdict == before
    row_fields = {LOOKUPS[name].field for name in claim.lookups if hasattr(LOOKUPS[name], "field")}
    for field in row_fields:
        for row in records.select(recorded[record], step=step):
            if field in row:
                change(recorded[record], step, value, field)
    assert judge(claim, recorded.get).verdict == after


def test_a_refused_step_is_not_measured(recorded):
    claim = claim_about("hpc-ops", "wrong results without commit")
    assert judge(claim, recorded.get).found is not None
    for row in records.select(recorded["grouped_gemm_ladder"], step="tensor map per group"):
        del row["kernel_us"]
        row["refused"] = "wrong"
    assert judge(claim, recorded.get).verdict == "not measured"


def test_phases_and_diagnosis_decide(recorded):
    """The serial scan is the largest part of 0x1, and the sort kernel's atomics are not small."""
    largest = claim_about("align", "time of 0x1's scan over")
    sort = claim_about("align", "share of 0x1 that the sort kernel's atomics take")
    assert {judge(claim, recorded.get).verdict for claim in (largest, sort)} == {"reproduced"}
    (row,) = records.select(recorded["align_ladder"], step="0x1 baseline")
    row["phases_us"]["scan"] = 9.0
    recorded["align_ladder"]["diagnosis"]["sort kernel"]["a load instead of the atomic"] = 9.0
    assert judge(largest, recorded.get).verdict == "different setup", "counting takes longer"
    assert judge(sort, recorded.get).verdict == "different setup"

    atomics = claim_about("align", "share of 0x1 that the main kernel's atomics take")
    assert judge(atomics, recorded.get).verdict == "different setup"
    slower = judge(atomics, recorded.get).found
    assert slower.value < 0 and slower.text.startswith("the version without atomics is slower: ")
    assert "more instructions per iteration" in slower.text and "-" not in slower.text
    recorded["align_ladder"]["diagnosis"]["counting"]["no atomics"] = 2.0
    assert judge(atomics, recorded.get).verdict == "reproduced"
    assert "slower" not in judge(atomics, recorded.get).found.text
    del recorded["align_ladder"]["diagnosis"]["counting"]
    assert judge(atomics, recorded.get).verdict == "not measured"


# Tables


@pytest.mark.slow
@pytest.mark.parametrize("name", ARTICLES)
def test_a_table_has_a_row_for_each_claim_and_only_known_verdicts(name):
    lines = claims.table(name).data.splitlines()
    assert len(lines) == 2 + len(ARTICLES[name].claims)
    for line in lines:
        assert len(re.split(r"(?<!\\)\|", line)) == 7, line
    found = [re.search(r"\*\*(.*)\*\* \|$", line)[1] for line in lines[2:]]
    assert set(found) <= EXACTLY_THESE
    for claim, line in zip(ARTICLES[name].claims, lines[2:], strict=True):
        assert (judge(claim).found is None) == ("nothing; it needs " in line)
    counted = claims.counts()[name]
    assert counted.total() == len(found) and all(counted[text] == found.count(text) for text in found)
    assert str(counted.total()) in claims.summary().data.splitlines()[-1]


def test_a_vertical_bar_does_not_end_a_cell():
    claim = replace(one(About.FIGURE), quote="a | b")
    judged = claims.Judged(claim, Found(1, "c | d"), "reproduced", (), ("gate",))
    assert claims.row(judged).count("|") - claims.row(judged).count("\\|") == 6


def test_found_numbers_read_well():
    assert shared_experts_checks.experts_more_on_a_rank().text.endswith("is removed: 0.875 net")
    assert "rows have 1 byte;" in hpc_ops_checks.box_in_the_other_order().text


def test_contents_links_each_article():
    text = claims.contents().data
    assert all(article.link in text and article.code in text for article in ARTICLES.values())


def test_a_link_to_a_file_is_the_permalink_of_a_notebook():
    """A branch moves on: its file may change or go."""
    notebooks = Path(__file__).parents[2] / "notebooks"
    links = {article: article.code for article in ARTICLES.values() if "/blob/" in article.code}
    assert links
    for article, link in links.items():
        assert re.search(r"/blob/[0-9a-f]{40}/", link)
        assert any(link in (notebooks / f"{name}.py").read_text() for name in article.notebooks), link


def test_the_records_are_named_with_gpu_and_date():
    text = claims.measured().data
    assert all(f"`{entry.record}` | NVIDIA H200 | 20" in text for entry in LOOKUPS.values() if entry)


# Each check can fail


def wrong_row(rows):
    return [[-1, *rows[0][1:]], *rows[1:]]


@pytest.mark.parametrize(
    "module, name, value, check, right, wrong",
    [
        (align_checks, "BLELLOCH_ROWS", wrong_row(align_checks.BLELLOCH_ROWS), "blelloch_rows", 7, 6),
        (align_checks, "WARP_ROWS", wrong_row(align_checks.WARP_ROWS), "warp_scan_rows", 4, 3),
        (align_checks, "WARP_SIZE", 16, "warp_scan_iterations", 5, 4),
        (align_checks, "CTA_THREADS", 512, "shared_bytes_added", 128, 64),
        (align_checks, "CTA_THREADS", 128, "busiest_thread", 2, 16),
        (align_checks, "STORE_WIDTHS", (4, 4), "store_requests", 4, 1),
        (align_checks, "STORE_WIDTHS", (8, 16), "store_requests", 4, 2),
        (align_checks, "shared_bytes", lambda experts: 4 * experts, "shared_bytes_0x3", 1540, 512),
        (
            align_checks,
            "Counter",
            lambda ids: {0: 128 * len(list(ids)) + 1},
            "blocks_per_slot",
            1,
            pytest.approx(129, rel=0.01),
        ),
        (gate_checks, "MAX_VPT", 64, "room_above_vpt", 0, 32),
        (gate_checks, "WARP_SIZE", 16, "right_comments", 3, 0),
        (gate_checks, "accepts", lambda e, g: e // g >= 8, "small_groups_accepted", 9, 0),
        (gate_checks, "DTYPES", ("float32",), "templates_reached", 6, 2),
        (gate_checks, "butterfly", lambda scores, ids, _: ids, "ties_of_groups", 0, 200),
        (gate_checks, "butterfly", lambda scores, ids, _: ids, "ties_of_experts", 0, 200),
        (shared_experts_checks, "SCALING", 1.0, "error_without_the_division", pytest.approx(0.39, abs=0.1), 0),
        (hpc_ops_checks, "select_tile_m", lambda average: 12, "tiles_as_n", 4, 0),
    ],
)
def test_a_check_notices_other_code(monkeypatch, module, name, value, check, right, wrong):
    assert getattr(module, check)().value == right
    monkeypatch.setattr(module, name, value)
    assert getattr(module, check)().value == wrong


def test_vector_stores_merge_requests_and_not_sectors(monkeypatch):
    claim = claim_about("align", "requests of a warp")
    assert judge(claim).verdict == "holds for the code"
    assert judge(claim).found.text == "32 -> 8 requests of a warp for 4 KiB, but 128 -> 128 sectors of 32 bytes"
    monkeypatch.setattr(align_checks, "STORE_WIDTHS", (16, 16))
    assert judge(claim).verdict == "does not hold for the code"


def test_blocks_are_counted_per_slot_and_not_per_token(monkeypatch):
    claim = claim_about("align", "blocks per slot")
    assert judge(claim).verdict == "holds for the code"
    assert judge(claim).found.text == "at most 1 in 300 random cases; a token with 8 experts takes 8 blocks"
    assert align_checks.number_of_blocks([3, 3, 3, 5], 2) == 3
    per_token = lambda ids, block_size: 8 * len(list(ids))  # what the claim would mean for tokens with top-8
    monkeypatch.setattr(align_checks, "number_of_blocks", per_token)
    assert judge(claim).verdict == "does not hold for the code"


def test_scans_are_checked_for_their_result(monkeypatch):
    assert align_checks.two_level_barriers().value == 3 and align_checks.blelloch_barriers().value == 14
    monkeypatch.setattr(align_checks, "accumulate", lambda values, **_: list(values))
    assert not exactly(3).is_met(align_checks.two_level_barriers().value)


def test_a_correct_sweep_would_be_noticed_for_other_sizes(monkeypatch):
    def right(values):
        values[:] = [sum(values[:i]) for i in range(len(values))]

    assert align_checks.blelloch_other_sizes().value == 0
    monkeypatch.setattr(align_checks, "blelloch", right)
    assert align_checks.blelloch_other_sizes().value == 57


def test_the_search_is_tried_for_all_experts(monkeypatch):
    (claim,) = [claim for _, claim in EVERY if claim.measure is align_checks.search_iterations]
    found = align_checks.search_iterations()
    assert found == (9, "8 to 9 iterations for 256 experts; expert 0 is the first that needs 9")
    assert claim.threshold.is_met(found.value)

    def linear(prefix, block):
        expert = max(e for e in range(len(prefix)) if prefix[e] <= block)
        return expert, expert + 1

    monkeypatch.setattr(align_checks, "find_expert", linear)
    assert align_checks.search_iterations().value == 256 and not claim.threshold.is_met(256)


@pytest.mark.parametrize("expert", [0, 7, 255])
def test_a_search_that_is_wrong_for_one_expert_is_noticed(monkeypatch, expert):
    right = align_checks.find_expert

    def shifted(prefix, block):
        found, iterations = right(prefix, block)
        return found - (found == expert), iterations

    monkeypatch.setattr(align_checks, "find_expert", shifted)
    found = align_checks.search_iterations()
    assert found.value == float("inf") and f"of expert {expert} is given to expert {expert - 1}" in found.text


def test_an_else_belongs_to_the_nearest_if():
    assert gate_checks.launches("if a if b launch else launch", {"a"}) == 1
    assert gate_checks.launches("if a if b launch else launch", set()) == 0
    assert gate_checks.launches("if a begin if b launch end else launch", set()) == 1


def test_wrong_gate_loops_are_noticed(monkeypatch):
    assert gate_checks.wrong_runs(True, 2) == 0

    def forgets_the_exclusion(with_barrier):
        @cuda.jit
        def kernel(choices, ids):
            row = cuda.grid(1) // gate_checks.GROUPS
            if cuda.threadIdx.x % gate_checks.GROUPS < gate_checks.TOPK:
                ids[row * gate_checks.TOPK + cuda.threadIdx.x % gate_checks.GROUPS] = cuda.threadIdx.x

        return kernel

    monkeypatch.setattr(gate_checks, "make_gate_loops", forgets_the_exclusion)
    assert gate_checks.wrong_runs(True, 2) == 2


@cuda.jit
def sort_without_atomics(topk_ids, sorted_ids, cumsum, numel):
    i = cuda.grid(1)
    if i < numel:
        place = cumsum[topk_ids[i]]
        cumsum[topk_ids[i]] = place + 1
        sorted_ids[place] = i


def test_a_wrong_sort_kernel_is_noticed(monkeypatch):
    assert align_checks.align_under_seeds(2)[1:] == (0, 0)
    monkeypatch.setattr(align_checks, "sort", sort_without_atomics)
    _, races, wrong = align_checks.align_under_seeds(2)
    assert races + wrong == 2


def test_the_simulator_refuses_barriers_in_two_branches():
    assert align_checks.refusals() == ["DivergentBarrier"]


@pytest.fixture
def facts(monkeypatch):
    """What DeepEP's checks get from the simulator, to be changed."""
    found = copy.deepcopy(deepep_checks._simulated())
    monkeypatch.setattr(deepep_checks, "_simulated", lambda: found)
    return found


def test_deepep_checks_notice_other_results(facts):
    def values():
        checks = (
            deepep_checks.rank_prefix_matrix,
            deepep_checks.channel_prefix_matrix,
            deepep_checks.tokens_per_expert,
            deepep_checks.words_left,
            deepep_checks.order_of_recv_x,
            deepep_checks.offsets_of_channels,
            deepep_checks.rows_in_a_ring,
            deepep_checks.counts_per_rank,
        )
        return [check().value for check in checks]

    assert values() == [0] * 8
    facts["played"]["matrices"][0]["rank_prefix_matrix"][0][0] += 1
    facts["played"]["matrices"][1]["channel_prefix_matrix"][0][0] += 1
    facts["notify"]["experts"][0][0] += 4
    facts["notify"]["not cleared"] = 5
    facts["slow"]["received"][0].reverse()
    first = next(moment for moment in facts["played"]["moments"] if moment[0] == "end")
    first[4] -= 1
    facts["most"][0] += 1
    facts["layout"]["per rank"][0] += 1
    assert values() == [1, 1, 1, 5, 1, 1, 1, 1]


def test_deepep_checks_need_a_right_kernel_to_compare_with(facts):
    assert deepep_checks.without_the_barrier().value > 0
    facts["faults"][""] = 1
    assert deepep_checks.without_the_barrier().value < 0
    facts["notify"]["kept"] = [True, False]
    assert deepep_checks.words_left().value < 0


def test_packed_scales_are_compared_bit_by_bit(monkeypatch):
    assert deepep_checks.packed_scales_below_2().value == 0 < deepep_checks.packed_scales_from_2().value
    monkeypatch.setattr(
        deepep_checks, "_cast_back", lambda s: (s.view(torch.uint8).int() << 23).view(torch.float32).view(-1)
    )
    assert deepep_checks.packed_scales_from_2().value == 0


def test_hpc_ops_checks_notice_other_results(monkeypatch):
    found = copy.deepcopy(hpc_ops_checks._simulated())
    monkeypatch.setattr(hpc_ops_checks, "_simulated", lambda: found)
    checks = (
        hpc_ops_checks.flat_box,
        hpc_ops_checks.box_of_two_groups,
        hpc_ops_checks.bytes_after_the_copy,
        hpc_ops_checks.box_in_the_other_order,
        hpc_ops_checks.exclusive_scan,
    )
    assert [check().value for check in checks] == [0] * 5
    assert hpc_ops_checks.load_without_acquire().value == 1 and hpc_ops_checks.new_barrier_passes_phase_0().value == 0
    found |= {"flat box": False, "box of two groups": False, "bytes after the copy": False, "other order": ""}
    found |= {"scan": [[0, 3, 3, 7], 10], "with acquire": "group 0 is wrong", "new barrier": [True, False]}
    assert [check().value for check in checks] == [1] * 5
    assert hpc_ops_checks.load_without_acquire().value < 0 and hpc_ops_checks.new_barrier_passes_phase_0().value == 1


def test_the_fused_layer_is_exact_only_with_the_divided_weight():
    assert shared_experts_checks.layer_error(1 / shared_experts_checks.SCALING) < 1e-12
    assert shared_experts_checks.layer_error(0.41) > 1e-3
