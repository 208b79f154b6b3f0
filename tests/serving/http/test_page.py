"""The page at /: what it tells, whom it tells it, and how it behaves in a real browser."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from branchline.core.errors import AdapterNotFoundError
from branchline.core.route import Route
from branchline.policies.plan import OutOfService
from branchline.serving.engine.requests import EngineStats, FinishReason
from branchline.serving.http import admin, metrics, page
from branchline.serving.http.audits import KeptAudits
from branchline.serving.http.errors import install_error_handlers
from branchline.serving.http.metrics import Metrics
from branchline.serving.http.page_numbers import Throughput, duration, readable_bytes
from branchline.serving.http.page_view import PageSource, shares
from branchline.serving.http.route_checks import RouteChecks
from branchline.serving.http.start import guarded
from branchline.serving.self_check import check_numerics
from branchline.serving.serve_config import ServeConfig
from tests.models import token_ids
from tests.serving.http.browser import Page, chromium, find_chromium

EVIL = "<script>window.stolen=1</script>'\"><img src=x onerror=window.stolen=2>"


@dataclass
class FakeEngine:
    """An engine whose state a test sets."""

    alive: bool = True
    error: BaseException | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def stats(self) -> EngineStats:
        nothing = {"running_by_adapter": {}, "waiting_by_adapter": {}}
        numbers = dict.fromkeys(
            "running waiting blocks used_blocks steps prompt_tokens cached_tokens "
            "generated_tokens failed_requests preemptions".split(),
            0,
        )
        return EngineStats(**{**numbers, **nothing, **self.state})


@pytest.fixture(scope="module")
def family(make_family):
    return make_family("llama")


@pytest.fixture(scope="module")
def wrapped(family):
    return family.wrap(max_loras=2)


@pytest.fixture
def served(wrapped):
    yield wrapped
    for info in wrapped.adapters.list():
        wrapped.adapters.unload(info.name)


_threads = ThreadPoolExecutor(2, "test-page")


def state_for(served, root: Path, **settings: Any) -> Any:
    """What the routes are given, without a process."""
    settings.setdefault("allow_runtime_lora_updating", True)
    config = ServeConfig(max_loras=2, allowed_roots=(str(root),), **settings)
    engine = FakeEngine(state={"blocks": 64})
    return SimpleNamespace(
        config=config,
        served=served,
        engine=engine,
        base_names=("tiny",),
        base_name="tiny",
        metrics=Metrics(config, served, engine, model_name="tiny"),
        started_at=time.monotonic() - 60,
        stopping=False,
        readiness=None,
        checks=RouteChecks(served, _threads.submit),
        audits=KeptAudits(served),
        load_threads=_threads,
        look_threads=_threads,
    )


@pytest.fixture
def state(served, family) -> Any:
    return state_for(served, family.folders["attn"].parent)


def app_of(state: Any) -> Any:
    app = FastAPI()
    for routes in (admin, metrics, page):
        app.include_router(routes.router)
    install_error_handlers(app)
    app.state.branchline = state
    return guarded(app, state)


def client(state: Any) -> TestClient:
    return TestClient(app_of(state))


def text_of(html: str) -> str:
    """Without scripts, styles and tags; spaces as one."""
    html = re.sub(r"(?s)<(script|style)\b.*?</\1>", "", html)
    return " ".join(re.sub(r"<[^>]+>", " ", html).split())


# --- what it tells ------------------------------------------------------------------------------


def test_it_reads_without_scripts(state, family):
    state.served.adapters.load("sql", family.folders["mlp"])
    state.metrics.began("sql", 1).ended(FinishReason.STOP, generated=1)
    state.engine.state.update(running=1, waiting=4, used_blocks=16, running_by_adapter={"sql": 1})
    answer = client(state).get("/")
    assert answer.status_code == 200
    told = text_of(answer.text)
    info = state.served.adapters.info("sql")
    assert f"sql {info.source} ready device slot {info.slot} {info.digest[:12]} LORA rank 4" in told
    assert "Running 1 Waiting 4 KV cache 25 %" in told
    assert "1 1 running" in told
    assert "As planned for a batch of sql (running now)" in told


def test_routes_name_the_reason_and_who_is_to_blame(state, family):
    state.served.adapters.load("sql", family.folders["mlp"])
    state.served(token_ids(1, 4))
    state.served(token_ids(1, 4), adapter_names=["sql"])
    view = PageSource(state).view()
    rows = {row.name: row for row in view.routes}
    mlp = rows["model.layers.*.mlp.silu_mul"]
    assert (mlp.sites, mlp.base, mlp.live, mlp.blame) == (2, "fused", "unfused", ("sql",))
    assert mlp.reason == "read raw by adapter 'sql' on model.layers.*.mlp.down_proj"
    attention = rows["model.layers.*.input_layernorm"]
    assert (attention.base, attention.live, attention.blame) == ("fused", "fused", ())
    ran = state.served.audit(adapter_sets=[()]).sites
    for name, row in rows.items():
        alike = [s for s in ran if re.sub(r"\d+", "*", s.site) == name]
        assert row.calls == sum(sum(site.ran.values()) for site in alike) > 0
        assert sum(share.width for share in row.shares) == pytest.approx(100, abs=0.01)


def test_an_idle_server_shows_the_adapters_in_slots(state, family):
    assert PageSource(state).view().live_adapters == ()
    state.served.adapters.load("a", family.folders["mlp"])
    view = PageSource(state).view()
    assert (view.live_adapters, view.running_now) == (("a",), False)
    state.engine.state["running_by_adapter"] = {"gone": 1}
    assert PageSource(state).view().live_adapters == ("a",)


def test_the_audit_is_made_once_an_epoch(state, family, monkeypatch):
    made = []
    audit = state.served.audit
    monkeypatch.setattr(type(state.served), "audit", lambda self, **k: made.append(k) or audit(**k))
    source = PageSource(state)
    for _ in range(3):
        source.view()
    assert len(made) == 1
    state.served.adapters.load("a", family.folders["mlp"])
    state.served(token_ids(1, 4), adapter_names=["a"])
    before = source.view()
    state.served(token_ids(1, 4))
    after = source.view()
    assert len(made) == 2
    # What ran is counted all the same.
    assert sum(row.calls for row in after.routes) > sum(row.calls for row in before.routes)


def test_an_adapter_that_goes_meanwhile_is_left_out(state, family, monkeypatch):
    adapters = state.served.adapters
    adapters.load("a", family.folders["mlp"])
    listed = adapters.list()
    adapters.unload("a")
    monkeypatch.setattr(type(adapters), "list", lambda self: listed)
    with pytest.raises(AdapterNotFoundError):
        PageSource(state).view()
    first = iter([listed])
    monkeypatch.setattr(type(adapters), "list", lambda self: next(first, ()))
    assert PageSource(state).view().live_adapters == ()


def test_what_is_wrong_is_told(family, tmp_path):
    state = state_for(family.wrap(max_loras=2), family.folders["attn"].parent)
    state.served.adapters.register("lost", tmp_path / "nowhere")
    with pytest.raises(AdapterNotFoundError):
        state.served.adapters.lease("lost")
    site = next(s for s in state.served.planner.plan({}).sites if s.route == Route.FUSED)
    state.served.planner.withdraw(
        [OutOfService(site.site, site.route, site.producer, "3 of 8 codes differ")]
    )
    state.engine.alive, state.engine.error = False, RuntimeError("device lost")
    told = text_of(client(state).get("/").text)
    assert "engine stopped" in told
    assert "device lost" in told
    assert "broken" in told
    assert "no such folder" in told
    assert f"fused by {site.producer} at {site.site}: 3 of 8 codes differ" in told
    state.stopping = True
    assert "stopping" in text_of(client(state).get("/").text)


def test_the_last_self_check_is_told(state):
    assert "No self-check has run." in client(state).get("/").text
    state.readiness = check_numerics(state.served)
    told = text_of(client(state).get("/").text)
    assert f"compared {state.readiness.routes} routes" in told


def test_a_server_without_an_engine_has_a_page(state):
    state.engine = None
    assert "embeddings only" in client(state).get("/").text


def test_names_are_found_and_long_lists_are_cut(state, family, monkeypatch):
    monkeypatch.setattr("branchline.serving.http.page_view.MOST_LISTED", 3)
    for number in range(9):
        state.served.adapters.register(f"tenant-{number}", family.folders["mlp"])
    all_of_them = client(state).get("/")
    assert all_of_them.text.count('data-act="unload"') == 3
    assert "of 9: those that run or have a slot" in text_of(all_of_them.text)
    found = client(state).get("/", params={"q": "NT-7"})
    assert found.text.count('data-act="unload"') == 1
    assert "tenant-7" in found.text
    assert "No adapter's name contains" in client(state).get("/", params={"q": "<b>"}).text


def test_where_updates_are_off_buttons_say_why(served, family):
    state = state_for(served, family.folders["attn"].parent, allow_runtime_lora_updating=False)
    served.adapters.load("sql", family.folders["mlp"])
    html = client(state).get("/").text
    for act in ("swap", "unload"):
        (button,) = re.findall(rf'<button[^>]*data-act="{act}"[^>]*>', html)
        assert "disabled" in button
        assert 'aria-describedby="no-updates"' in button
    assert "--allow-runtime-lora-updating" in re.findall(r'id="no-updates">([^<]+)<', html)[0]
    assert "load-form" not in re.sub(r"(?s)<script.*?</script>", "", html)


# --- whom it tells it ---------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["api_key", "admin_key"])
def test_with_keys_the_page_shows_nothing_without_one(served, family, which):
    state = state_for(served, family.folders["attn"].parent, **{which: ("secret",)})
    served.adapters.load("confidential", family.folders["mlp"])
    asked = client(state)
    shell = asked.get("/")
    assert shell.status_code == 200
    assert "confidential" not in shell.text
    assert "key" in text_of(shell.text)
    assert asked.get("/audit/page").status_code == 401
    assert asked.get("/audit/page", headers={"Authorization": "Bearer no"}).status_code == 401
    answer = asked.get("/audit/page", headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200
    assert "confidential" in answer.text


def test_a_key_of_requests_does_not_show_what_an_administrator_sees(served, family):
    root = family.folders["attn"].parent
    state = state_for(served, root, api_key=("user",), admin_key=("admin",))
    asked = client(state)
    assert asked.get("/audit/page", headers={"Authorization": "Bearer user"}).status_code == 403
    assert asked.get("/audit/page", headers={"Authorization": "Bearer admin"}).status_code == 200


def test_hostile_names_are_text(state, family):
    state.served.adapters.load(EVIL, family.folders["mlp"])
    for path in ("/", "/audit/page"):
        html = client(state).get(path, params={"q": "<script>"}).text
        assert "<script>window" not in html
        assert "<img src=x" not in html
        assert "&lt;script&gt;window.stolen=1&lt;/script&gt;" in html


def test_only_this_page_s_script_may_run(state):
    asked = client(state)
    first, second = asked.get("/"), asked.get("/")
    policies = [answer.headers["content-security-policy"] for answer in (first, second)]
    nonces = [re.findall(r"script-src 'nonce-([\w-]+)'", policy)[0] for policy in policies]
    assert nonces[0] != nonces[1]
    for answer, policy, nonce in zip((first, second), policies, nonces, strict=True):
        assert re.findall(r'<(?:script|style)[^>]*nonce="([^"]+)"', answer.text) == [nonce] * 2
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
    assert not re.findall(r"""<[^>]+\s(?:on\w+|style)\s*=""", first.text)
    assert not re.findall(r"""(?:src|href|action)="(?!/|data:,")""", first.text)
    assert first.headers["x-content-type-options"] == "nosniff"
    assert first.headers["cache-control"] == "no-store"
    assert "sandbox" in asked.get("/audit/page").headers["content-security-policy"]


# --- numbers ------------------------------------------------------------------------------------


def test_rates_are_of_the_last_seconds():
    def stats(generated: int, prompt: int) -> EngineStats:
        return FakeEngine(state={"generated_tokens": generated, "prompt_tokens": prompt}).stats()

    rates = Throughput(1000.0)
    first = rates.rates(stats(200, 100), 1010.0)
    assert (first.generated, first.prompt, first.time) == (20.0, 10.0, "10 s")
    # Two who look at once are both given a mean of some seconds.
    again = rates.rates(stats(200, 100), 1010.1)
    assert again.generated == pytest.approx(19.8, abs=0.1)
    for second in range(11, 61):
        last = rates.rates(stats(200 + 5 * (second - 10), 100), 1000.0 + second)
    assert last.generated == pytest.approx(5.0, abs=0.01)
    assert last.prompt == 0.0


def test_numbers_are_readable():
    assert readable_bytes(0) == "0 B"
    assert readable_bytes(1536) == "1.5 KiB"
    assert readable_bytes(3 * 2**50) == "3072.0 TiB"
    assert duration(-1) == "0 s"
    assert duration(59.9) == "59 s"
    assert duration(3661) == "1 h 1 min"
    assert duration(86400) == "1 d 0 h"
    assert shares({}) == ()
    (fused, unfused) = shares({Route.UNFUSED: 1, Route.FUSED: 3})
    assert (fused.route, fused.start, fused.width) == ("fused", 0.0, 75.0)
    assert (unfused.route, unfused.start, unfused.width) == ("unfused", 75.0, 25.0)


# --- in a browser -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Page]:
    binary = find_chromium()
    if binary is None:
        pytest.skip("there is no Chromium on this machine")
    with chromium(binary, tmp_path_factory.mktemp("chromium") / "profile") as tab:
        yield tab


@pytest.fixture
def visit(browser):
    """Serve a state at an address of this machine, and go there."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(state: Any, path: str = "/") -> Page:
        listening = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(
            uvicorn.Config(app_of(state), log_level="error", lifespan="off", ws="none")
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        servers.append((server, thread))
        browser.requests.clear()
        browser.problems.clear()
        browser.look(width=1280)
        browser.go(f"http://127.0.0.1:{listening.getsockname()[1]}{path}")
        return browser

    yield start
    browser.go("about:blank")
    for server, thread in servers:
        server.should_exit = True
        thread.join(30)


REFRESHED = "!document.getElementById('fresh').hidden"


@pytest.mark.browser
def test_it_refreshes_itself_and_asks_nobody_else(state, visit):
    tab = visit(state)
    tab.wait_for(REFRESHED)
    state.engine.state["running"] = 42
    tab.wait_for("document.querySelector('.tiles').innerText.includes('42')")
    assert {url.split("/")[2] for url in tab.requests if not url.startswith("data:")} == {
        tab.evaluate("location.host")
    }
    assert tab.problems == []


@pytest.mark.browser
def test_adapters_are_loaded_swapped_and_unloaded_by_keyboard(state, family, visit):
    tab = visit(state)
    tab.wait_for(REFRESHED)
    adapters = state.served.adapters
    tab.evaluate("document.getElementById('load-name').focus()")
    tab.type("sql")
    tab.press("Tab")
    tab.type(str(family.folders["attn"]))
    tab.press("Tab")
    tab.press("Enter")
    tab.wait_for("document.getElementById('told').innerText === 'sql was loaded.'")
    before = adapters.info("sql").digest
    tab.wait_for("document.getElementById('load-name').value === ''")

    tab.evaluate("document.getElementById('swap-1').focus()")
    tab.press("Enter")
    assert tab.evaluate("document.getElementById('swap').open")
    assert tab.evaluate("document.activeElement.id") == "swap-source"
    tab.type(str(family.folders["mlp"]))
    tab.press("Enter")
    tab.wait_for("document.getElementById('told').innerText === 'sql was swapped.'")
    assert adapters.info("sql").digest != before

    tab.evaluate("document.getElementById('unload-1').focus()")
    tab.press("Enter")
    tab.press("Escape")
    assert not tab.evaluate("document.getElementById('unload').open")
    assert [info.name for info in adapters.list()] == ["sql"]
    tab.press("Enter")
    tab.press("Tab")
    tab.press("Enter")
    tab.wait_for("document.getElementById('told').innerText === 'sql was unloaded.'")
    assert adapters.list() == ()
    assert tab.problems == []


@pytest.mark.browser
def test_what_is_refused_is_told(state, family, visit, tmp_path):
    tab = visit(state)
    tab.wait_for(REFRESHED)
    for source, said in ((tmp_path, "allowed"), (family.folders["mlp"].parent / "none", "no such")):
        tab.evaluate(f"document.getElementById('load-name').value = 'x';"
                     f"document.getElementById('load-source').value = {str(source)!r};"
                     "document.getElementById('load-form').requestSubmit()")  # fmt: skip
        tab.wait_for(f"document.getElementById('told').innerText.includes({said!r})")
        assert tab.evaluate("document.getElementById('told').className") == "notice bad"
    assert tab.evaluate("document.getElementById('load-name').value") == "x"


@pytest.mark.browser
def test_hostile_names_run_nothing(state, family, visit):
    state.served.adapters.load(EVIL, family.folders["mlp"])
    tab = visit(state, "/?q=%3Cimg%20src%3Dx%20onerror%3Dwindow.stolen%3D3%3E")
    tab.wait_for(REFRESHED)
    tab.go(tab.evaluate("location.origin") + "/")
    tab.wait_for(REFRESHED)
    assert tab.evaluate("document.querySelector('tbody .name bdi').textContent") == EVIL
    tab.evaluate("document.getElementById('unload-1').click()")
    assert tab.evaluate("document.querySelector('#unload [data-shows]').textContent") == EVIL
    tab.evaluate("document.querySelector('#unload .main').click()")
    tab.wait_for("document.getElementById('told').textContent.endsWith('was unloaded.')")
    assert tab.evaluate("window.stolen === undefined")
    assert tab.evaluate("document.images.length") == 0
    assert state.served.adapters.list() == ()
    assert tab.problems == []


@pytest.mark.browser
def test_the_key_is_asked_for_and_kept_in_the_tab(served, family, visit):
    state = state_for(served, family.folders["attn"].parent, admin_key=("secret",))
    served.adapters.load("sql", family.folders["mlp"])
    tab = visit(state)
    assert tab.evaluate("document.activeElement.id") == "key"
    assert not tab.evaluate("document.getElementById('live').children.length")
    tab.type("wrong")
    tab.press("Enter")
    tab.wait_for("document.getElementById('told').innerText.includes('key is not known')")
    assert tab.evaluate("sessionStorage.length") == 0
    tab.type("secret")
    tab.press("Enter")
    tab.wait_for("document.getElementById('live').innerText.includes('sql')")
    assert tab.evaluate("document.getElementById('key-form').hidden")
    assert tab.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [
        1, 0, "",
    ]  # fmt: skip
    assert not [url for url in tab.requests if "secret" in url]
    tab.evaluate("document.getElementById('unload-1').click()")
    tab.evaluate("document.querySelector('#unload .main').click()")
    tab.wait_for("document.getElementById('told').innerText === 'sql was unloaded.'")
    tab.reload()
    tab.wait_for("document.getElementById('live').innerText.includes('No adapter is loaded')")


@pytest.mark.browser
def test_a_button_that_has_the_focus_is_the_same_adapter_s_after_rows_moved(state, family, visit):
    for name in ("a", "b", "c"):
        state.served.adapters.register(name, family.folders["mlp"])
    tab = visit(state)
    tab.wait_for(REFRESHED)
    tab.evaluate("document.querySelector('[data-act=unload][data-name=b]').focus()")
    state.served.adapters.unload("a")
    tab.wait_for("document.querySelectorAll('[data-act=unload]').length === 2")
    assert tab.evaluate("document.activeElement.dataset.name") == "b"
    state.served.adapters.unload("b")
    tab.wait_for("document.querySelectorAll('[data-act=unload]').length === 1")
    assert tab.evaluate("document.activeElement === document.body")


@pytest.mark.browser
def test_nothing_moves_behind_an_open_dialog(state, family, visit):
    state.served.adapters.register("a", family.folders["mlp"])
    tab = visit(state)
    tab.wait_for(REFRESHED)
    tab.evaluate("document.getElementById('unload-1').focus()")
    tab.press("Enter")
    tab.wait_for("document.getElementById('unload').open")
    state.engine.state["running"] = 42
    asked = tab.requests.count(tab.evaluate("location.origin") + "/audit/page")
    deadline = time.monotonic() + 20
    while tab.requests.count(tab.evaluate("location.origin") + "/audit/page") < asked + 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not tab.evaluate("document.querySelector('.tiles').innerText.includes('42')")
    tab.press("Escape")
    assert tab.evaluate("document.activeElement.id") == "unload-1"
    tab.wait_for("document.querySelector('.tiles').innerText.includes('42')")


@pytest.mark.browser
def test_what_has_the_focus_keeps_it(state, family, visit):
    for number in range(9):
        state.served.adapters.register(f"tenant-{number}", family.folders["mlp"])
    tab = visit(state)
    tab.wait_for(REFRESHED)
    tab.evaluate("document.getElementById('search').focus()")
    tab.type("tenant-3")
    state.engine.state["running"] = 42
    tab.wait_for("document.querySelector('.tiles').innerText.includes('42')")
    assert tab.evaluate("document.activeElement.id") == "search"
    assert tab.evaluate("document.activeElement.value") == "tenant-3"
    tab.press("Enter")
    tab.wait_for("location.search === '?q=tenant-3'")
    tab.wait_for("document.querySelectorAll('[data-act=unload]').length === 1")


@pytest.mark.browser
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_the_screen_and_can_be_read(state, family, visit, tmp_path, width, dark):
    state.served.adapters.load("a-name-" + "x" * 120, family.folders["mlp"])
    state.served(token_ids(1, 4))
    tab = visit(state)
    tab.wait_for(REFRESHED)
    tab.look(width=width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    worst = tab.evaluate(CONTRAST)
    assert worst[0] >= 4.5, worst
    unlabelled = tab.evaluate(
        "[...document.querySelectorAll('input, button')].filter(e => !(e.labels?.length || "
        "e.textContent.trim() || e.ariaLabel)).length"
    )
    assert unlabelled == 0
    small = tab.evaluate(
        "[...document.querySelectorAll('button')].filter(e => e.checkVisibility() && "
        "e.getBoundingClientRect().height < 24).length"
    )
    assert small == 0
    assert tab.screenshot(tmp_path / "page.png").stat().st_size > 10_000


# The least contrast of any text with what is behind it, by WCAG 2's formula, and that text.
CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length === 3 || c[3] === 1) return c;
    }
    return [255, 255, 255];
  };
  let worst = [21, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement, text = walker.currentNode.data.trim();
    if (!text || !e.checkVisibility()) continue;
    if (e.closest("script, style, noscript, button:disabled")) continue;
    const a = light(rgb(getComputedStyle(e).color)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, text];
  }
  return worst;
})()"""


# --- of a server process ------------------------------------------------------------------------


@pytest.mark.browser
def test_a_server_shows_what_it_did(server, browser):
    with server.client() as asked:
        for name in ("attn", server.model):
            body = {"model": name, "prompt": "one two", "max_tokens": 3, "ignore_eos": True}
            answer = asked.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
        told = asked.get("/metrics").text
    for adapter in ("attn", "__base__"):
        labels = f'adapter="{adapter}"'
        assert re.search(rf'branchline_requests_total{{{labels},outcome="length"}} [1-9]', told)
        told_tokens = re.search(rf"branchline_generated_tokens_total{{{labels}}} (\S+)", told)
        assert told_tokens
        assert float(told_tokens[1]) >= 3
    browser.requests.clear()
    browser.problems.clear()
    browser.look(width=1280)
    browser.go(f"{server.url}/")
    browser.wait_for(REFRESHED)
    assert browser.evaluate("document.querySelector('h1').innerText") == server.model
    assert int(browser.evaluate(
        "[...document.querySelectorAll('tbody tr')].find(r => r.querySelector('bdi')?.textContent "
        "=== 'attn').querySelector('[data-label=Answers]').innerText"
    ).split()[0]) >= 1  # fmt: skip
    assert browser.problems == []
