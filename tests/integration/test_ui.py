"""The page in a real browser (Debian's Chromium, headless) over a real service with two workers."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import StartService
from tests.service import Service, eventually, llama

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")

#: Would run if a name or a line were ever taken for markup; it marks the window, which every test looks at.
EVIL = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>\u202e'
#: Shared by many on two cores.
PATIENCE = 30_000


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The browser's driver outlives a single test; `_browser` ends it, and the services look after themselves."""


@pytest.fixture(scope="module")
def _browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


class Page:
    """One open page; fails on any script error, refused resource, foreign request or injected code."""

    def __init__(self, browser: Any, service: Service, **context: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **context})
        self.tab = self.context.new_page()
        self.tab.set_default_timeout(PATIENCE)
        self.url = service.url
        self.problems: list[str] = []
        self.tab.on("pageerror", lambda error: self.problems.append(f"script: {error}"))
        self.tab.on("console", self._heard)
        self.tab.on("request", self._asked)

    def _heard(self, message: Any) -> None:
        # A dead worker's connection and a refused request are told by the page itself.
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.problems.append(f"console: {message.text}")

    def _asked(self, request: Any) -> None:
        if not request.url.startswith((self.url, "data:", "blob:")):
            self.problems.append(f"foreign: {request.url}")

    def open(self, view: str = "overview") -> Any:
        """Show a view and wait until the status is here."""
        self.tab.goto(f"{self.url}/ui/#{view}")
        self.tab.locator('#link[data-state="live"], #link[data-state="polling"]').wait_for()
        return self.tab

    def close(self) -> None:
        """End it; AssertionError with what went wrong."""
        hacked = self.tab.evaluate("window.hacked")
        self.context.close()
        assert not hacked, "a name or a log line ran as code"
        assert not self.problems


@pytest.fixture
def open_page(_browser: Any) -> Iterator[Callable[..., Page]]:
    """Open pages of a service; each is checked at the end."""
    pages: list[Page] = []

    def make(service: Service, **context: Any) -> Page:
        pages.append(Page(_browser, service, **context))
        return pages[-1]

    yield make
    for page in pages:
        page.close()


def card(tab: Any, model: str) -> Any:
    return tab.locator(f'article[data-model="{model}"]')


def button(where: Any, name: str) -> Any:
    return where.get_by_role("button", name=name, exact=True)


def test_a_real_model_is_loaded_asked_swapped_and_unloaded_while_a_worker_dies(
    start_service: StartService, open_page: Callable[..., Page], llama_server: Path, tiny_gguf: Callable[..., Path]
) -> None:
    models = {
        name: {"cmd": llama(llama_server, tiny_gguf(name, f"I am {name} and I am ready.")), "estVramGB": 9}
        for name in ("alpha", "beta")
    }
    service = start_service({"vramBudgetGB": 16, "models": models}, workers=2, threads=64)
    page = open_page(service)
    tab = page.open()
    button(card(tab, "alpha"), "Load").click()
    card(tab, "alpha").locator(".pill.ready").wait_for()
    assert "9 GiB of 16 GiB" in tab.locator(".pool-head").first.inner_text()

    os.kill(service.leader(), signal.SIGKILL)
    tab.goto(f"{service.url}/ui/#plan/beta")
    tab.locator(".verdict").wait_for()
    assert "alpha" in tab.locator("dl.pairs").inner_text()
    button(tab, "Load it now").click()
    tab.goto(f"{service.url}/ui/#overview")
    card(tab, "beta").locator(".pill.ready").wait_for()
    card(tab, "alpha").get_by_text("evicted for beta").wait_for()

    tab.goto(f"{service.url}/ui/#try/beta")
    tab.get_by_label("Message", exact=True).last.fill("who are you?")
    tab.keyboard.press("Enter")
    tab.locator(".msg.assistant .says", has_text="I am beta and I am ready.").wait_for()
    stats = tab.locator(".msg.assistant .stats", has_text="tokens/s")
    stats.wait_for()
    assert "first token" in stats.inner_text()

    tab.goto(f"{service.url}/ui/#activity")
    row = tab.locator("tbody tr", has_text="beta").first
    row.wait_for()
    assert "200" in row.inner_text()
    row.press("Enter")
    tab.locator("dialog", has_text="who are you?").wait_for()
    tab.keyboard.press("Escape")

    tab.goto(f"{service.url}/ui/#logs/beta")
    tab.locator(".logbox .ln", has_text="listening").first.wait_for()
    tab.goto(f"{service.url}/ui/#overview")
    button(card(tab, "beta"), "Unload").click()
    card(tab, "beta").locator(".pill.stopped").wait_for()
    assert service.running() == []


def test_the_queue_shows_who_waits_and_why_and_cancels(
    start_service: StartService, open_page: Callable[..., Page]
) -> None:
    def config(service: Service) -> dict[str, object]:
        fakes = {
            name: {"cmd": service.fake(name, load_time=0.05, chunks=600, interval=0.1), "estVramGB": 9}
            for name in ("alpha", "beta")
        }
        return {"vramBudgetGB": 16, "models": fakes}

    service = start_service(config, workers=2, threads=64)
    tab = open_page(service).open("queue")
    tab.get_by_text("Nobody waits.").wait_for()
    answers: list[int] = []
    with service.stream("alpha") as stream:
        next(iter(stream))
        waiter = threading.Thread(target=lambda: answers.append(service.chat("beta").status))
        waiter.start()
        waiting = tab.locator("tr", has_text="busy: alpha")
        waiting.wait_for()
        assert tab.locator('nav a[data-view="queue"] .badge').inner_text() == "1"
        button(waiting, "Cancel the request for beta").click()
        waiter.join()
        assert answers == [499]
        tab.get_by_text("Nobody waits.").wait_for()
        flying = tab.locator("tr", has_text="/v1/chat/completions")
        button(flying, "Cancel the request for alpha").click()
        tab.get_by_text("Nothing is in flight.").wait_for()


def test_hostile_names_logs_and_answers_are_only_text(
    start_service: StartService, open_page: Callable[..., Page]
) -> None:
    def config(service: Service) -> dict[str, object]:
        cmd = service.fake("<script>window.hacked=1</script>", load_time=0.05)
        shout = service.fake("shout", load_time=60, exit_after=0.2, exit_message=f"\x1b[31mred\x1b[0m {EVIL} \x1b[2J")
        return {
            "models": {
                EVIL: {"cmd": cmd, "name": EVIL, "description": EVIL, "aliases": [f"{EVIL}2"]},
                "shout": {"cmd": shout},
                "odd/%2F #?&": {"cmd": service.fake("odd")},
            }
        }

    service = start_service(config, workers=2, threads=64)
    page = open_page(service)
    tab = page.open()
    evil = tab.locator("article", has_text="<script>").first
    button(evil, "Load").click()
    evil.locator(".pill.ready").wait_for()
    odd = card(tab, "odd/%2F #?&")
    button(odd, "Load").click()
    odd.locator(".pill.ready").wait_for()
    button(card(tab, "shout"), "Load").click()
    card(tab, "shout").locator(".failure", has_text="<script>").wait_for()
    evil_link = evil.get_by_role("link", name="Try")
    evil_link.click()
    tab.get_by_label("Message", exact=True).last.fill(EVIL)
    button(tab, "Send").click()
    tab.locator(".msg.assistant .says", has_text="<script>").wait_for()
    tab.goto(f"{service.url}/ui/#logs/shout")
    red = tab.locator(".logbox .f1", has_text="red")
    red.wait_for()
    assert "<script>" in tab.locator(".logbox").text_content()
    tab.get_by_label("Show lines with this text").fill("no such text")
    tab.get_by_text("0 lines").wait_for()
    for view in ("queue", "activity", "plan", f"plan/{EVIL}"):
        tab.evaluate("hash => { location.hash = hash }", view)
        tab.locator("main h1").wait_for()
    tab.goto(f"{service.url}/ui/#activity")
    tab.locator("tbody tr", has_text="<script>").first.wait_for()
    assert tab.evaluate("document.querySelectorAll('main img, main script').length") == 0


def test_phone_keyboard_and_empty_states(start_service: StartService, open_page: Callable[..., Page]) -> None:
    service = start_service({"models": {}}, workers=1, threads=16)
    reply = service.get("/ui/")
    policy = reply.header("Content-Security-Policy") or ""
    assert "script-src 'self'" in policy
    assert "unsafe" not in policy
    assert "<script>" not in reply.body.decode()
    assert b"style=" not in reply.body
    for path, status in (("/ui", 307), ("/", 302), ("/ui/models", 200), ("/ui/nope.js", 404), ("/favicon.ico", 200)):
        assert service.get(path).status == status
    assert service.get("/ui/static/x/..%2f..%2fui.py").status == 404

    page = open_page(service, viewport={"width": 390, "height": 780}, has_touch=True, color_scheme="dark")
    tab = page.open()
    tab.get_by_text("No models are configured yet.").wait_for()
    for view in ("queue", "activity", "logs", "try", "plan", "overview"):
        tab.locator(f'nav a[data-view="{view}"]').click()
        tab.locator(f'nav a[data-view="{view}"][aria-current]').wait_for()
        tab.locator("main h1").wait_for()
        wide = tab.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wide <= 0, f"{view} is {wide} px wider than a phone"
    assert tab.evaluate("document.documentElement.hasAttribute('data-dark')")
    button(tab, "Colours: automatic").click()
    assert tab.evaluate("document.documentElement.dataset.theme") == "light"
    for _ in range(4):
        tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement !== document.body")


def test_a_key_without_admin_is_told_so(start_service: StartService, open_page: Callable[..., Page]) -> None:
    keys = [{"key": "chat-only", "models": ["alpha"], "admin": False}, "all"]
    service = start_service(
        lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}, "apiKeys": keys}, workers=1, threads=32
    )
    assert service.get("/ui/").status == 401
    login = {"http_credentials": {"username": "x", "password": "chat-only"}}
    page = open_page(service, **login)
    page.tab.goto(f"{service.url}/ui/")
    page.tab.get_by_text("it needs a key with admin: true").wait_for()
    admin = open_page(service, http_credentials={"username": "x", "password": "all"}).open()
    button(card(admin, "alpha"), "Load").click()
    card(admin, "alpha").locator(".pill.ready").wait_for()


def test_eight_pages_on_few_slots_all_show_changes(start_service: StartService, open_page: Callable[..., Page]) -> None:
    service = start_service(
        lambda s: {"models": {"alpha": {"cmd": s.fake("alpha", load_time=0.05)}}}, workers=2, threads=16
    )
    tabs = [open_page(service).open() for _ in range(8)]
    assert service.chat("alpha").status == 200
    for tab in tabs:
        card(tab, "alpha").locator(".pill.ready").wait_for()
    assert eventually(lambda: service.get("/api/status").status == 200, "status answers")


def test_profiles_and_selectors_are_shown_and_used(start_service: StartService, open_page: Callable[..., Page]) -> None:
    def config(service: Service) -> dict[str, object]:
        return {
            "models": {name: {"cmd": service.fake(name)} for name in ("ant", "bee", "cat")},
            "groups": {"all": {"swap": False, "members": ["ant", "bee", "cat"]}},
            "selectors": {
                "coder": {"strategy": "warm", "targets": ["ant", "bee"], "name": EVIL},
                "spread": {"strategy": "spillover", "targets": ["ant", "cat"], "settings": {"spillover": 2}},
            },
            "profiles": {
                "day": {"description": EVIL, "pins": {"front": "bee", EVIL: None}, "preload": ["bee"]},
                EVIL: {"pins": {"front": "cat"}},
            },
        }

    service = start_service(config, workers=2, threads=64)
    page = open_page(service)
    tab = page.open()
    picker = tab.get_by_label("Profile", exact=True)
    panel = tab.get_by_role("region", name="Selectors and profile")
    row = panel.locator("tr", has_text="coder")
    assert row.locator("li").all_inner_texts() == ["ant\nnot loaded", "bee\nnot loaded"]
    assert "2 requests each" in panel.locator("tr", has_text="spread").inner_text()
    assert panel.locator("h2").all_inner_texts() == ["Selectors"]
    picker.focus()
    tab.keyboard.press("ArrowDown")  # by keyboard: the first profile after "no profile"
    panel.locator("h2", has_text="img").wait_for()
    assert service.get("/api/profiles").json()["active"] == EVIL
    assert tab.evaluate("document.activeElement.id") == "profile"
    picker.select_option("day")
    panel.locator("h2", has_text="Profile day").wait_for()
    panel.locator("tr", has_text="onerror").get_by_text("nothing: requests for it get 404").wait_for()
    row.locator("li", has_text="beeready").wait_for()  # preloaded by the profile
    assert service.chat("front").header("X-QM-Model") == "bee"

    row.get_by_role("link", name="Plan for coder").click()
    tab.locator("dl.pairs", has_text="Goes to").wait_for()
    assert "'coder' (warm) sends a request to 'bee' now" in tab.locator("main").inner_text()
    tab.goto(f"{service.url}/ui/#try/front")
    tab.get_by_label("Message", exact=True).last.fill("who is it?")
    button(tab, "Send").click()
    tab.locator(".msg.assistant .stats", has_text="tokens").wait_for()
    assert service.chat("coder").header("X-QM-Model") == "bee"
    tab.goto(f"{service.url}/ui/#activity")
    asked = tab.locator("tbody tr", has_text="asked: coder").first
    asked.wait_for()
    asked.press("Enter")
    assert "Selector\ncoder" in tab.locator("dialog dl").inner_text()
    tab.keyboard.press("Escape")

    assert service.request("PUT", "/api/profiles/active", {"name": None}).status == 200  # by somebody else
    eventually(lambda: picker.input_value() == "-", "the picker follows")


#: One red pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)


def test_forms_attachments_filters_and_holds(
    start_service: StartService, open_page: Callable[..., Page], llama_server: Path, tiny_gguf: Callable[..., Path]
) -> None:
    ranks = tiny_gguf("rerank", "", "--arch", "qwen3", "--rerank")
    service = start_service(
        lambda s: {
            "holdMs": 600_000,
            "models": {
                "embedder": {"cmd": llama(llama_server, tiny_gguf("alpha"), extra="--embeddings --pooling mean")},
                "ranker": {"cmd": llama(llama_server, ranks, extra="--rerank")},
                "agent": {"cmd": s.fake("agent", ending="tools")},
            },
            "groups": {"all": {"swap": False, "members": ["embedder", "ranker", "agent"]}},
        },
        workers=2,
        threads=64,
    )
    tab = open_page(service, reduced_motion="reduce").open("try/embedder")
    tab.get_by_role("tab", name="Embeddings").click()
    tab.get_by_label("Texts, one a line").fill("a cat\na dog")
    button(tab, "Embed").click()
    tab.locator("tbody tr", has_text="a dog").wait_for()
    assert "1.000" in tab.locator("tbody tr", has_text="a cat").inner_text()

    tab.goto(f"{service.url}/ui/#try/ranker")
    tab.get_by_role("tab", name="Chat").press("ArrowLeft")  # the tabs go round
    tab.get_by_label("Query").fill("pets")
    tab.get_by_label("Documents, one a line").fill("a cat\na car")
    button(tab, "Rerank").click()
    tab.locator(".scorebar").nth(1).wait_for()

    tab.goto(f"{service.url}/ui/#try/agent")
    tab.locator("#attach").set_input_files({"name": "dot.png", "mimeType": "image/png", "buffer": PNG})
    tab.locator(".thumbs img").wait_for()
    tab.get_by_label("Message", exact=True).last.fill("what is this?")
    button(tab, "Send").click()
    tab.locator(".msg.user img").wait_for()
    tab.locator(".msg.assistant .stats", has_text="in all").wait_for()
    assert '"image_url"' in captured(service, "agent")

    tab.goto(f"{service.url}/ui/#overview")
    held = card(tab, "agent").get_by_text("held for its tool call")
    held.wait_for()
    button(card(tab, "agent"), "Release hold").click()
    held.wait_for(state="detached")

    service.chat("nonsense")
    eventually(lambda: service.get("/api/metrics/activity?failed=1").json()["total"] == 1, "the failure is recorded")
    tab.goto(f"{service.url}/ui/#activity")
    tab.locator("tbody tr", has_text="agent").wait_for()
    tab.get_by_label("failed only").check()
    tab.locator("tbody tr", has_text="agent").wait_for(state="detached")
    assert tab.locator("tbody tr").count() == 1
    tab.get_by_label("Since").select_option("15")
    tab.get_by_text("page 1 of 1 · 1 request").wait_for()
    tab.get_by_label("Model", exact=True).select_option("ranker")
    tab.get_by_text("No request like that has failed.").wait_for()
    moving = "[...document.querySelectorAll('*')].filter(e => getComputedStyle(e).transitionDuration !== '0s').length"
    assert tab.evaluate(moving) == 0


def captured(service: Service, model: str) -> str:
    """The body of the newest request for a model, as it was kept."""
    url = f"/api/metrics/activity?model={model}"
    record = eventually(lambda: service.get(url).json()["data"], "it is recorded")[0]
    return base64.b64decode(service.get(f"/api/captures/{record['id']}").json()["req_body"]).decode()


def test_everything_can_be_reached_and_seen_with_the_keyboard(
    start_service: StartService, open_page: Callable[..., Page]
) -> None:
    service = start_service(lambda s: {"models": {"alpha": {"cmd": s.fake("alpha")}}}, workers=1, threads=32)
    assert service.chat("alpha").status == 200
    page = open_page(service)
    for view in ("overview", "activity", "logs", "try", "plan"):
        tab = page.open(view)
        tab.locator("main h1").wait_for()
        tab.evaluate("document.activeElement.blur()")
        wanted = tab.evaluate(CONTROLS)
        assert wanted, view
        for _ in range(wanted + 5):
            tab.keyboard.press("Tab")
            tab.evaluate("window.reached = (window.reached ?? new Set()).add(document.activeElement)")
            assert tab.evaluate(OUTLINED), f"{view}: focus cannot be seen"
        missed = tab.evaluate(f"({CONTROLS_LEFT})().map(e => e.outerHTML.slice(0, 120))")
        assert not missed, f"{view}: not to be reached"
        tab.reload()


#: Visible controls that take part in the tab order (of tabs, only the chosen one does).
CONTROLS_LIST = """
  [...document.querySelectorAll("a[href], button, input, select, textarea, tr.click")].filter(
    (e) => !e.disabled && e.getAttribute("role") !== "tab" && e.getClientRects().length)"""
CONTROLS = f"({CONTROLS_LIST}).length"
CONTROLS_LEFT = f"() => ({CONTROLS_LIST}).filter((e) => !window.reached.has(e))"
OUTLINED = """(() => {
  const e = document.activeElement;
  if (e === document.body) return true;
  const shown = e.id === "attach" ? document.querySelector('label[for="attach"]') : e;
  return getComputedStyle(shown).outlineStyle !== "none" && parseFloat(getComputedStyle(shown).outlineWidth) >= 1;
})()"""
