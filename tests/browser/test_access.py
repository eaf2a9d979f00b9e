"""Who can use the page: without a mouse, with assistive technology, in the dark, on a narrow screen."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from graphkeep.report._read import read
from graphkeep.report._run import Run

from . import sample_run
from .chromium import press

ENOUGH = 4.5  # contrast of text, WCAG 2.2 1.4.3
_CONTRAST = """elements => {
    const rgb = text => text.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
        .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
    const ground = element => {
        for (let e = element; e; e = e.parentElement) {
            const color = rgb(getComputedStyle(e).backgroundColor);
            if (color.length < 4 || color[3] === 1) return color;
        }
        return [255, 255, 255];
    };
    return elements.filter(e => e.checkVisibility() && e.textContent.trim()).map(e => {
        const style = getComputedStyle(e);
        const color = rgb(e.namespaceURI.endsWith("svg") ? style.fill : style.color);
        const [a, b] = [light(color), light(ground(e))].sort((x, y) => y - x);
        return [Math.round((a + .05) / (b + .05) * 100) / 100, e.outerHTML.slice(0, 80)];
    });
}"""
_TEXTS = (
    "h1,h2,h3,h4,p,dt,dd,th,td,code,mark,.n,.id,.severity,button,label,summary,small,legend,.source span,svg text:not(.inside)"
)
_NAMES = """elements => elements.filter(e => e.checkVisibility()).map(e => {
    const by = (e.getAttribute("aria-labelledby") || "").split(" ").map(id => document.getElementById(id)?.textContent ?? "");
    const labels = [...(e.labels || [])].map(label => label.textContent);
    return [e.outerHTML.slice(0, 80), (e.getAttribute("aria-label") || by.join("") || labels.join("") || e.textContent).trim()];
})"""
_STOP = """() => {
    const e = document.activeElement;
    if (e === document.body) return null;
    const name = e.getAttribute("aria-label") || e.labels?.[0]?.textContent || e.textContent || e.id;
    return name.trim().slice(0, 40) + "|" + (e.getAttribute("class") || "");
}"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return read(sample_run.write(tmp_path / "train.py.1.graphkeep", 60, raised=True))


def opened(page: Page) -> Page:
    """With all that can be opened."""
    press(page.locator("path.band").first)
    for summary in page.locator("summary").all():
        summary.click()
    page.locator("[data-part=table] tbody button").first.click()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("by_button", [False, True])
def test_text_has_contrast(show, run, scheme, by_button):
    other = {"light": "dark", "dark": "light"}[scheme]
    page = opened(show([run], color_scheme=other if by_button else scheme))
    if by_button:
        page.get_by_role("button", name="Dark").click()
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (scheme == "light")
    expect(page.get_by_role("button", name="Dark")).to_have_attribute("aria-pressed", str(scheme == "dark").lower())
    found = page.locator(_TEXTS).evaluate_all(_CONTRAST)
    assert len(found) > 200
    assert [one for one in found if one[0] < ENOUGH] == []


def test_everything_that_can_be_used_has_a_name(show, run):
    page = opened(show([run]))
    found = page.locator("a,button,input,select,summary,[tabindex],[role=button],[role=region],svg[role]").evaluate_all(_NAMES)
    assert len(found) > 60
    assert [html for html, name in found if not name] == []


def test_headings_are_in_order_and_there_are_landmarks(show, run):
    page = opened(show([run]))
    levels = page.locator("h1,h2,h3,h4").evaluate_all("all => all.filter(h => h.checkVisibility()).map(h => +h.tagName[1])")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    for role in ("banner", "main", "contentinfo"):
        expect(page.get_by_role(role)).to_have_count(1)
    ids = page.locator("[id]").evaluate_all("all => all.map(e => e.id)")
    assert len(ids) == len(set(ids))
    assert page.locator("html").get_attribute("lang") == "en"


def test_the_tab_key_reaches_every_control_and_each_chart_is_one_stop(show, run):
    page = show([run])
    stops = []
    for _ in range(120):
        page.keyboard.press("Tab")
        stop = page.evaluate(_STOP)
        if stop is None:
            break
        stops.append(stop)
    assert stops[0] == "Skip to the report|skip"
    assert len([stop for stop in stops if stop.endswith("|band kx") or "|band " in stop]) == 1
    assert len([stop for stop in stops if "|bar " in stop]) == 1
    for name in ("Dark", "Steps from", "to", "All", "Last 20", "module", "line", "Show as table", "Filter", "Tensors", "Saved"):
        assert any(stop.split("|")[0] == name for stop in stops), name
    assert any(stop.startswith("model.py:22") for stop in stops)


def test_the_skip_link_leads_to_the_report(show, run):
    page = show([run])
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_focus_can_be_seen(show, run):
    page = show([run])
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.locator("path.band").first.focus()
    page.keyboard.press("ArrowUp")
    assert page.evaluate("getComputedStyle(document.activeElement).strokeWidth") == "2px"


@pytest.mark.parametrize("hostile", [False, True])
def test_a_narrow_screen_scrolls_in_one_direction_only(show, tmp_path, hostile):
    page = opened(show([read(sample_run.write(tmp_path / "train.py.1.graphkeep", 60, hostile=hostile))], width=360))
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    page.locator(".bar.alive").first.click()
    page.locator(".bar").last.focus()
    assert page.evaluate("document.documentElement.scrollWidth") == 360


def test_charts_follow_the_width_of_the_window(show, run):
    page = show([run])
    before = page.locator("figure svg").first.bounding_box()["width"]
    page.set_viewport_size({"width": 500, "height": 900})
    expect(page.locator("figure svg").first).to_have_attribute("viewBox", "0 0 472 283.2")
    assert page.locator("figure svg").first.bounding_box()["width"] < before
