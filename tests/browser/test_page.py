"""The report's page, used as people use it: with a mouse, with the keyboard, in the dark, on a narrow screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from graphkeep.report._read import read, read_all
from graphkeep.report._run import Run
from graphkeep.report.html import render_fragment, write

from . import sample_run
from .chromium import press

MODULES = 6  # that hold something, `(no module)` among them


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read(sample_run.write(tmp_path / "train.py.1.graphkeep", 60))


@pytest.fixture
def ranks(tmp_path: Path) -> list[Run]:
    for rank in range(3):
        path = tmp_path / f"train.py.1.rank{rank}.graphkeep"
        sample_run.write(path, 9 if rank == 1 else 12, rank=rank, world_size=3, leaks=rank == 1)
    return read_all([tmp_path / "train.py.1.rank0.graphkeep"])


def table(page: Page) -> Locator:
    return page.locator("[data-part=table] table").first


def column(page: Page, number: int) -> list[str]:
    return table(page).locator(f"tbody tr > :nth-child({number})").all_inner_texts()


def active(page: Page, what: str) -> str:
    return page.evaluate(f"document.activeElement.{what} ?? ''")


# bands


def test_each_module_has_a_band_and_each_line_one(show, run):
    page = show([run])
    expect(page.locator("path.band")).to_have_count(MODULES)
    page.get_by_role("button", name="line", exact=True).first.click()
    expect(page.locator("path.band")).to_have_count(12)  # eleven, and the others
    assert all(
        path and "NaN" not in path
        for path in page.locator("path.band").evaluate_all("all => all.map(p => p.getAttribute('d'))")
    )


def test_steps_are_marked(show, run):
    page = show([run])
    figure = page.locator("figure").first
    assert figure.locator("line.step").count() == 61
    assert figure.get_by_text("step 0").count() == 1


@pytest.mark.parametrize("how", ["click", "Enter", "Space", "legend"])
def test_a_band_opens_its_lines_with_their_source(show, run, how):
    page = show([run])
    band = page.locator("path.band[aria-label^='Block:']")
    if how == "legend":
        page.locator(".legend").get_by_role("button", name="Block").click()
    elif how == "click":
        press(band)
    else:
        band.focus()
        page.keyboard.press(how)
    panel = page.get_by_role("region", name=re.compile("^Lines of Block"))
    expect(panel).to_be_visible()
    assert panel.locator(".sum code").all_inner_texts() == ["model.py:22", "model.py:15", "model.py:14"]
    assert "h = nn.functional.gelu(h)" in panel.locator("mark").first.inner_text()
    assert active(page, "innerText").startswith("Lines of Block")
    expect(band).to_have_attribute("aria-expanded", "true")
    expect(page.locator(".legend button[aria-expanded=true]")).to_contain_text("Block")
    page.keyboard.press("Escape")
    expect(panel).to_have_count(0)
    assert (active(page, "getAttribute('aria-label')") or active(page, "textContent")).startswith("Block")
    assert active(page, "tagName") == ("BUTTON" if how == "legend" else "path")


def test_arrow_keys_go_through_bands_and_time(show, run):
    page = show([run])
    bands = page.locator("path.band")
    bands.first.focus()
    page.keyboard.press("ArrowUp")
    assert active(page, "getAttribute('aria-label')") == bands.nth(1).get_attribute("aria-label")
    page.keyboard.press("ArrowDown")
    assert active(page, "getAttribute('aria-label')") == bands.first.get_attribute("aria-label")
    for _ in range(2):
        page.keyboard.press("ArrowLeft")
    expect(page.get_by_role("status").first).to_contain_text(re.compile(r"step 5\d, .* of "))
    expect(page.locator(".tip:visible")).to_have_count(1)


def test_a_narrower_range_of_steps_is_chosen_by_its_fields_or_by_dragging(show, run):
    page = show([run])
    page.get_by_label("Steps from").fill("50")
    page.get_by_label("Steps from").press("Enter")
    figure = page.locator("figure").first
    expect(figure.locator("line.step")).to_have_count(11)
    page.get_by_role("button", name="All").click()
    expect(figure.locator("line.step")).to_have_count(61)
    page.locator(".overview").scroll_into_view_if_needed()
    box = page.locator(".overview svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 10)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 10)
    page.mouse.up()
    assert 25 < float(page.get_by_label("Steps from").input_value()) < 35
    assert 40 < float(page.get_by_label("to", exact=True).input_value()) < 50


@pytest.mark.parametrize("typed", ["", "-500", "1e9", "59.9"])
def test_any_number_in_the_range_leaves_charts(show, run, typed):
    page = show([run])
    page.get_by_label("Steps from").fill(typed)
    page.get_by_label("Steps from").press("Enter")
    assert "NaN" not in page.locator("[data-part=time]").inner_html()
    expect(page.locator("path.band")).to_have_count(MODULES)


# lives


def test_lives_are_bars_by_what_freed_them_and_the_living_are_on_top(show, run):
    page = show([run])
    tops = {
        kind: page.locator(f".bar.{kind}").evaluate_all("all => all.map(b => +b.getAttribute('y'))")
        for kind in ("alive", "past", "backward", "count")
    }
    assert {kind: len(found) for kind, found in tops.items()} == {"alive": 16, "past": 1, "backward": 60, "count": 20}
    assert max(tops["alive"]) < min(tops["past"]) < min(tops["backward"] + tops["count"])
    assert page.locator(".bar.count").first.get_attribute("fill") == "url(#hatch-r0)"  # told apart without colour, too


def test_a_long_run_draws_some_hundred_bars_and_says_so(show, tmp_path):
    page = show([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 1_000))])
    assert page.locator(".bar").count() < 300
    expect(page.get_by_text("240 of 1,333 freed graphs are drawn")).to_be_visible()
    page.get_by_role("button", name="Last 20").click()
    expect(page.get_by_text("freed graphs are drawn")).to_have_count(0)
    assert page.locator(".bar.backward").count() == 21  # twenty, and the one that died as step 980 began


def test_a_bar_tells_its_life_and_opens_its_lines(show, run):
    page = show([run])
    bar = page.locator(".bar.backward").nth(3)
    for words in ("born at train.py:14", "saved tensors", "freed by backward 4 at train.py:17"):
        assert words in bar.get_attribute("aria-label")
    page.locator(".bar").first.focus()
    page.keyboard.press("End")
    assert active(page, "getAttribute('class')") in ("bar backward", "bar count")
    bar.focus()
    expect(page.locator(".tip:visible")).to_contain_text("Graph born at train.py:14")
    page.keyboard.press("Enter")
    marks = page.locator(".panel mark").all_inner_texts()
    assert "loss = torch.nn.functional.cross_entropy" in marks[0]
    assert "(loss + 1e-4 * penalty).backward()" in marks[1]
    page.keyboard.press("Escape")
    assert active(page, "getAttribute('aria-label')") == bar.get_attribute("aria-label")
    page.locator(".bar.alive").first.click()
    assert "self.losses.append(penalty)" in page.locator(".panel mark").first.inner_text()


def test_charts_are_there_as_tables(show, run):
    page = show([run])
    summaries = page.locator(".as-table > summary")
    summaries.nth(0).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Graph bytes by band").locator("tbody tr")).to_have_count(MODULES)
    summaries.nth(1).click()
    rows = page.get_by_role("region", name="Lives of graphs").locator("tbody tr")
    expect(rows).to_have_count(page.locator(".bar").count())


# tables


def test_the_table_filters_and_sorts(show, run):
    page = show([run])
    assert column(page, 1)[0].startswith("model.py:22")
    table(page).get_by_role("button", name="Tensors").click()
    expect(table(page).locator("th[aria-sort]")).to_have_text("Tensors")
    table(page).get_by_role("button", name="Line", exact=True).click()
    assert [name.split()[0] for name in column(page, 1)][:3] == ["model.py:13", "model.py:14", "model.py:15"]
    table(page).get_by_role("button", name="Line", exact=True).click()
    expect(table(page).locator("th[aria-sort=descending]")).to_have_text("Line")
    assert column(page, 1)[0].startswith("train.py:24")
    page.get_by_label("Filter").fill("layernorm")
    assert len(column(page, 1)) == 2
    expect(page.get_by_text("2 of 16 lines")).to_be_visible()
    page.get_by_label("Filter").fill("nothing is called so")
    assert column(page, 1) == []


def test_the_table_is_by_line_module_or_op(show, run):
    page = show([run])
    group = page.get_by_role("group", name="Rows by")
    group.get_by_role("button", name="module").click()
    assert set(column(page, 1)) == {"Block", "Linear", "LayerNorm", "Embedding", "Model", "(no module)"}
    group.get_by_role("button", name="op").click()
    assert {"gelu", "addmm", "(not asked)"} < set(column(page, 1))
    addmm = table(page).get_by_role("button", name="addmm")
    addmm.focus()
    page.keyboard.press("Enter")
    expect(addmm).to_have_attribute("aria-expanded", "true")
    assert table(page).locator(".detail .sum code").all_inner_texts() == [
        "model.py:23",
        "model.py:13",
        "model.py:16",
        "model.py:21",
        "model.py:32",
    ]
    page.keyboard.press("Enter")
    expect(table(page).locator(".detail")).to_have_count(0)


def test_a_holder_shows_its_line_in_place(show, run):
    page = show([run])
    row = page.locator("tr", has_text="self.losses[0..59]").first
    expect(row.locator("mark")).to_be_hidden()
    row.locator("summary").click()
    expect(row.locator("mark")).to_contain_text("self.losses.append(penalty)")


# safety


def test_names_of_the_program_stay_text(show, tmp_path):
    page = show([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12, hostile=True, raised=True))])
    press(page.locator("path.band").nth(1))
    page.get_by_role("group", name="Rows by").get_by_role("button", name="module").click()
    for row in table(page).locator("tbody button").all():
        row.click()
    for summary in page.locator("summary").all():
        summary.click()
    page.locator(".bar.alive").first.click()
    for mark in [*page.locator(".bar").all()[:20], *page.locator("path.band").all()]:
        mark.dispatch_event("focus")
    assert page.evaluate("window.hacked") is None
    assert page.locator("img, main script:not([type='application/json'])").count() == 0
    assert sample_run.HOSTILE in page.locator("h1").inner_text()
    assert sample_run.HOSTILE in page.locator(".legend").first.inner_text()
    assert any(sample_run.HOSTILE in name for name in column(page, 1))
    assert "# </script><script>window.hacked=1</script>" in page.locator(".finding mark").first.inner_text()


def test_the_policy_stops_a_script_that_gets_in_all_the_same(browser, run, tmp_path):
    write([run], tmp_path / "report.html")
    page = browser.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    refused = page.evaluate(
        """() => new Promise(resolve => {
            document.addEventListener("securitypolicyviolation", event => resolve(event.violatedDirective), {once: true});
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
        })"""
    )
    assert refused == "script-src-elem"
    assert page.evaluate("window.hacked") is None
    page.close()


def test_a_notebook_shows_the_page_in_a_frame(browser, run):
    page = browser.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.set_content("<!doctype html><body>" + render_fragment([run]))
    frame = page.frame_locator("iframe")
    expect(frame.locator("path.band")).to_have_count(MODULES)
    frame.locator("path.band").first.click()
    expect(frame.locator(".panel")).to_be_visible()
    frame.locator(".skip").focus()
    page.keyboard.press("Enter")
    expect(frame.locator("h1")).to_have_text("train.py")
    assert wrong == []
    page.close()


# other runs


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_goes(show, tmp_path):
    page = show([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 12, cut=True))])
    expect(page.get_by_text("The file was cut off.")).to_be_visible()
    expect(page.locator("path.band")).to_have_count(MODULES)
    assert "7.3 MiB" in " ".join(column(page, 4)) or "7.8 MiB" in " ".join(column(page, 4))


def test_an_empty_run_says_so(show):
    page = show([Run(Path("train.py.1.graphkeep"), {"type": "header", "program": "train.py"})])
    expect(page.get_by_text("no graph was seen")).to_be_visible()
    expect(page.get_by_text("Nothing was recorded over time.")).to_be_visible()


def test_a_run_without_steps_has_charts(show, run):
    run.steps.clear()
    page = show([run])
    expect(page.locator("path.band")).to_have_count(MODULES)
    assert "NaN" not in page.locator("[data-part=time]").inner_html()


def test_before_the_first_step_has_its_own_ground(show, run):
    run.lives[0].born_first = 1  # the steps begin at 40
    page = show([run])
    assert page.locator("figure").first.locator("rect.before").count() == 1
    page.get_by_label("to", exact=True).fill("2")
    page.get_by_label("to", exact=True).press("Enter")
    expect(page.locator("figure").first.get_by_text("before the first step")).to_be_visible()


def test_ranks_are_compared_and_one_is_chosen(show, ranks):
    page = show(ranks)
    assert page.locator("tr.differs").count() == 1
    expect(page.locator("tr.differs")).to_contain_text("9 steps, most have 12")
    assert page.locator(".run:visible").count() == 1
    expect(page.locator(".run:visible")).to_contain_text("Verdict of rank 0")
    page.get_by_label("Rank", exact=True).focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator(".run:visible")).to_contain_text("Verdict of rank 1")
    expect(page.locator(".run:visible path.band")).to_have_count(MODULES)


def test_without_javascript_all_but_the_charts_is_there(show, ranks):
    page = show(ranks, java_script_enabled=False)
    for words in ("Verdict of rank 0", "Verdict of rank 1", "GK101", "What freed the graphs", "The charts need JavaScript"):
        assert page.get_by_text(words).first.is_visible()
    assert page.locator(".run:visible").count() == 3
    assert page.locator("button:visible, select:visible").count() == 0
