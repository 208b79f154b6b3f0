"""The audit as JSON under a schema, as Markdown, and as a page in a browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from branchline.core.errors import ConfigError
from branchline.policies.audit.groups import site_groups, without_index
from branchline.policies.audit.markdown import markdown
from branchline.policies.audit.page import page
from branchline.policies.audit.report import SCHEMA_VERSION, AuditReport, Problem
from branchline.policies.audit.rules import Rule, check_rules
from branchline.policies.audit.schema import parse_report, read_report, schema, shipped_schema
from tests.policies.audit.conftest import MARKUP
from tests.serving.http.browser import Page, chromium, find_chromium

# --- JSON ----------------------------------------------------------------------------------------


def test_the_shipped_schema_is_that_of_the_report():
    """Where this fails on purpose, raise SCHEMA_VERSION and ship a schema of the new version."""
    assert shipped_schema() == schema()


def test_reports_validate_and_are_read_again(report, tmp_path):
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.validate(json.loads(report.model_dump_json()), schema())
    file = tmp_path / "audit.json"
    file.write_text(report.model_dump_json())
    assert read_report(file) == report


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is no JSON"),
        ("[]", "has schema version None"),
        ('{"schema_version": 4}', f"has schema version 4, this version reads {SCHEMA_VERSION}"),
        (f'{{"schema_version": {SCHEMA_VERSION}}}', "is no report"),
    ],
)
def test_what_is_no_report_is_refused(text, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_report(text, "report 'x'")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")


# --- Markdown ------------------------------------------------------------------------------------


def test_markdown_tells_sites_costs_and_what_fired(report):
    fired = check_rules([Rule.parse("adapter:sql unfused>3")], report)
    text = markdown(report, fired)
    assert "## Audit of" in text
    assert "Rules that fired" in text
    assert "4 of 6 sites are unfused" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any("silu\\_mul" in row and "(x2)" in row.replace("\\", "") for row in rows)
    assert "policy absorbed recovers" in text
    # No adapter's name is markup, and every row has as many cells as its head.
    assert "<script>" not in text
    for row in rows:
        assert len(re.findall(r"(?<!\\)\|", row)) in (7, 8)


# --- groups --------------------------------------------------------------------------------------


def test_layers_that_are_alike_are_told_once(report):
    groups = {group.name: group for group in site_groups(report.sites)}
    assert groups["model.layers.*.mlp.silu_mul"].layers == "0-1"
    assert len(groups) == 3
    changed = report.sites[0].model_copy(update={"mismatches": ("other",)})
    groups = list(site_groups((changed, *report.sites[1:])))
    assert len(groups) == 4
    assert groups[0].name == changed.site
    assert groups[0].layers == ""


# --- HTML ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium(binary, tmp_path_factory.mktemp("chromium") / "profile") as tab:
        yield tab


def show(browser: Page, report: AuditReport, tmp_path: Path, *, width: int = 1200, **look) -> Page:
    file = tmp_path / "audit.html"
    file.write_text(page(report), encoding="utf-8")
    browser.requests.clear()
    browser.problems.clear()
    browser.look(width=width, **look)
    browser.go(file.as_uri())
    return browser


def choose(tab: Page, field: str, value: str) -> None:
    tab.evaluate(
        f"(() => {{ const f = document.getElementById({json.dumps(field)}); "
        f"f.value = {json.dumps(value)}; f.dispatchEvent(new Event('change')); "
        f"f.dispatchEvent(new Event('input')); }})()"
    )


def stations(tab: Page) -> list[dict[str, str]]:
    return tab.evaluate(
        "[...document.querySelectorAll('.station')].filter(s => !s.hidden).map(s => ({"
        "name: s.querySelector('h3').innerText, route: s.querySelector('.took').innerText, "
        "why: s.querySelector('.why').innerText, bytes: s.querySelector('.bytes').innerText, "
        "branches: [...s.querySelectorAll('.branches li')].map(b => b.innerText).join()}))"
    )


def test_the_page_needs_nothing_else(report):
    text = page(report)
    assert re.findall(r"""(?:src|href)\s*=\s*(\S+?)>""", text) == ['"#line"']
    assert "url(" not in text
    assert "@import" not in text
    assert f"<strong>{MARKUP}" not in text
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
    # Its own script and its data, and no adapter's.
    assert text.count("<script") == 2


def test_what_is_wrong_stands_first(report):
    problem = Problem(part="adapter 'x'", reason="is <b>gone</b>", remedy="find it")
    changed = report.model_copy(update={"problems": (problem,), "assumptions": ("scales",)})
    fired = check_rules([Rule.parse("unfused>0")], changed)
    text = page(changed, fired)
    assert text.index("Findings") < text.index("In short")
    for part in (
        "Not audited: adapter &#39;x&#39;",
        "is &lt;b&gt;gone",
        "Rule unfused&gt;0",
        "scales",
    ):
        assert part in text


def test_the_browser_asks_for_nothing_and_complains_of_nothing(browser, report, tmp_path):
    tab = show(browser, report, tmp_path)
    assert len(tab.requests) == 1
    assert tab.problems == []
    assert tab.evaluate("typeof window.alerted") == "undefined"


def test_every_route_and_reason_is_shown(browser, report, tmp_path):
    tab = show(browser, report, tmp_path)
    for policy in report.policies:
        choose(tab, "policy", policy)
        for names in report.adapter_sets:
            choose(tab, "set", ", ".join(names) or "(no adapter)")
            wanted = [
                route
                for group in site_groups(report.sites)
                for route in group.first.routes
                if (route.policy, route.adapters) == (policy, names)
            ]
            for station, route in zip(stations(tab), wanted, strict=True):
                assert station["route"].startswith(route.route)
                assert station["why"] == without_index(route.reason)
                assert station["bytes"] == f"{route.bytes_per_token:,.0f}"
                assert station["branches"] == ",".join(route.blame)
    rows = tab.evaluate("document.querySelectorAll('.station details tbody tr').length")
    assert rows == sum(len(group.first.routes) for group in site_groups(report.sites))


def test_stations_are_filtered(browser, report, tmp_path):
    tab = show(browser, report, tmp_path)
    choose(tab, "set", "tone")
    assert len(stations(tab)) == 3
    choose(tab, "route", "unfused")
    (only,) = stations(tab)
    assert "input_layernorm" in only["name"]
    assert tab.evaluate("document.getElementById('count').innerText") == "1 of 3 stations"
    choose(tab, "route", "")
    choose(tab, "find", "SILU")
    assert [s["name"].split()[0] for s in stations(tab)] == ["model.layers.*.mlp.silu_mul"]
    choose(tab, "find", "no such thing")
    assert stations(tab) == []


def test_it_fits_a_phone(browser, report, tmp_path):
    tab = show(browser, report, tmp_path, width=360)
    assert tab.evaluate("document.documentElement.scrollWidth") <= 360


def test_it_is_read_without_scripts(browser, report, tmp_path):
    browser.without_scripts()
    try:
        tab = show(browser, report, tmp_path)
        assert (
            tab.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
        )
        assert len(stations(tab)) == 3
        assert tab.evaluate("document.querySelectorAll('details summary').length") > 3
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


#: Contrast as the accessibility guidelines define it, of every text and what lies behind it.
_CONTRASTS = """
(() => {
  const channel = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const parse = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const c = parse(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c;
    }
    return parse(getComputedStyle(document.documentElement).backgroundColor);
  };
  const low = [];
  for (const e of document.querySelectorAll("body *")) {
    const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !e.offsetParent || ["OPTION", "SCRIPT"].includes(e.tagName)) continue;
    const both = [light(parse(getComputedStyle(e).color)), light(behind(e))];
    const [a, b] = both.sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const text = e.textContent.trim().slice(0, 40);
    if (ratio < 4.5) low.push(e.tagName + ": " + text + " " + ratio.toFixed(2));
  }
  return low;
})()
"""

#: What assistive technology goes by.
_STRUCTURE = """
(() => {
  const bad = [];
  const all = (selector) => [...document.querySelectorAll(selector)];
  if (!document.documentElement.lang) bad.push("no language");
  if (!document.title) bad.push("no title");
  if (all("main").length !== 1 || all("h1").length !== 1) bad.push("not one main and one h1");
  let level = 1;
  for (const h of all("h1, h2, h3, h4")) {
    const own = Number(h.tagName[1]);
    if (own > level + 1) bad.push("heading skips a level: " + h.innerText);
    level = own;
  }
  for (const f of all("select, input")) if (!f.labels.length) bad.push("no label: " + f.id);
  for (const s of all("section, [role=region]")) {
    const by = document.getElementById(s.getAttribute("aria-labelledby"));
    if (!s.getAttribute("aria-label") && !by) bad.push("region without a name");
  }
  for (const t of all("table")) if (!t.querySelector("th[scope]")) bad.push("table without heads");
  for (const m of all("meter")) if (!m.getAttribute("aria-label")) bad.push("meter without a name");
  const ids = all("[id]").map((e) => e.id);
  if (new Set(ids).size !== ids.length) bad.push("an id twice");
  for (const s of all(".stop"))
    if (s.getAttribute("aria-hidden") !== "true") bad.push("a sign that is read out");
  for (const r of all(".scroll")) if (r.tabIndex !== 0) bad.push("scrolls, but not by keys");
  return bad;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_is_accessible(browser, report, tmp_path, dark):
    tab = show(browser, report, tmp_path, dark=dark)
    assert tab.evaluate("getComputedStyle(document.body).backgroundColor") == (
        "rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)"
    )
    for names in ("(no adapter)", "sql"):
        choose(tab, "set", names)
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.evaluate(_CONTRASTS) == []
    assert tab.evaluate(_STRUCTURE) == []


def test_it_is_used_by_keys(browser, report, tmp_path):
    tab = show(browser, report, tmp_path)
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    tab.press("Enter")
    tab.wait_for("document.activeElement.id === 'line'")
    tab.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "set"


def test_thousands_of_layers_stay_one_page(report):
    sites = tuple(
        site.model_copy(update={"site": re.sub(r"layers\.\d+", f"layers.{number}", site.site)})
        for number in range(1000)
        for site in report.sites[:3]
    )
    many = tuple(report.adapters[0].model_copy(update={"name": f"adapter{n}"}) for n in range(5000))
    text = page(report.model_copy(update={"sites": sites, "adapters": many}))
    assert len(text) < 200_000
    assert "layers 0-999" in text
    assert "and 4992 more" in text
