"""`python -m tests.screenshots [folder]`: renews docs/images, every view in both themes, over real llama-servers.

Needs Debian's chromium and gcc. The card is a stand-in driver that reports what the scene says.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from tests import llama as llamas
from tests import nvml
from tests.service import REPO, Service, eventually, llama

#: Megabytes that the stand-in driver reports for a model's process.
HELD = {
    "llama-3.1-8b": 6_300,
    "qwen3-coder-30b": 17_900,
    "nomic-embed-text": 610,
    "bge-reranker-v2": 1_150,
    "gemma-3-12b": 7_100,
}
VIEWS = ("overview", "queue", "inflight", "activity", "logs", "try", "forms", "plan")
PHONE = ("overview", "activity", "logs", "try", "plan")


class Card(nvml.FakeCard):
    """Gives back what the dead held."""

    def write(self) -> None:
        """As the driver does."""
        self.foreign = {pid: held for pid, held in self.foreign.items() if os.path.exists(f"/proc/{pid}")}
        super().write()


class Scene:
    """A service with something going on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = llamas.server(folder)
        library = nvml.build(folder)
        self.card = Card(folder, library, 24 * 1024)
        self.service = Service(
            folder / "service", {}, workers=2, threads=64, env=self.card.environment() | {"TZ": "UTC"}
        )
        self.service.write_config(self.config())
        self.service.start()

    def gguf(self, name: str, *flags: str) -> Path:
        """A tiny model."""
        path = self.folder / f"{name}.gguf"
        if not path.exists():
            llamas.make_gguf(path, *flags)
        return path

    def config(self) -> dict[str, Any]:
        """Models as people have them."""
        words = "Here is a function that adds two numbers: def add(a, b): return a + b"
        coder = llama(self.server, self.gguf("coder", "--say", words), context=2048)
        embed = llama(self.server, self.gguf("embed"), extra="--embeddings --pooling mean")
        rerank = llama(self.server, self.gguf("rerank", "--arch", "qwen3", "--rerank"), extra="--rerank")
        slow = self.service_fake("gemma-3-12b", load_time=6, chunks=4000, interval=0.1)
        busy = self.service_fake("llama-3.1-8b", chunks=4000, interval=0.05)
        return {
            "vramBudgetGB": 24,
            "ramBudgetGB": 16,
            "performance": {"every": "5s"},
            "models": {
                "qwen3-coder-30b": {
                    "name": "Qwen3 Coder 30B",
                    "cmd": coder,
                    "estVramGB": 18.5,
                    "ttl": 900,
                    "aliases": ["coder", "gpt-4o"],
                },
                "llama-3.1-8b": {"cmd": busy, "estVramGB": 6.5, "aliases": ["fast"]},
                "gemma-3-12b": {"cmd": slow, "estVramGB": 10.5, "description": "vision"},
                "nomic-embed-text": {"cmd": embed, "estVramGB": 0.6},
                "bge-reranker-v2": {"cmd": rerank, "estVramGB": 1.2},
                "flux-dev": {"cmd": f"{self.server} -m /models/flux1-dev.gguf --port ${{PORT}}", "estVramGB": 12},
            },
        }

    def service_fake(self, name: str, **flags: Any) -> str:
        """A scripted server, for what has to take its time."""
        from tests.service import fake

        return fake(name, **flags)

    def hold(self) -> None:
        """Have the driver report the models' memory, and a desktop's."""
        rows = {row["model"]: row for row in self.service.get("/running").json()["running"]}
        held = {rows[name]["pid"]: size for name, size in HELD.items() if name in rows and rows[name]["pid"]}
        self.card.foreign = {os.getpid(): 1_300, **held}

    def past(self) -> None:
        """What was asked before anybody looks: an hour in half a minute."""
        for name in ("coder", "coder", "gpt-4o", "llama-3.1-8b", "nomic-embed-text", "bge-reranker-v2", "flux-dev"):
            body: dict[str, Any] = {"model": name}
            if name.startswith("nomic"):
                self.service.post("/v1/embeddings", {**body, "input": ["a cat", "a dog"]})
            elif name.startswith("bge"):
                self.service.post("/v1/rerank", {**body, "query": "pets", "documents": ["a cat", "a car"]})
            else:
                headers = {"X-Fake": "chunks=12,interval=0.02"}
                for tokens in (12, 24, 6):
                    self.service.chat(name, max_tokens=tokens, headers=headers)
            self.hold()
        self.service.chat("nonsense")

    def close(self) -> None:
        """End it."""
        self.service.close()
        self.card.close()


@contextlib.contextmanager
def asked(service: Service, model: str, **more: Any) -> Iterator[None]:
    """A request under way or in the queue, cancelled at the end."""
    request = {"model": model, "messages": [{"role": "user", "content": "hello"}], "stream": True, **more}
    sock = service.open("/v1/chat/completions", request)
    try:
        yield
    finally:
        sock.close()


class Camera:
    """One browser context; takes pictures of the views."""

    def __init__(self, browser: Any, scene: Scene, out: Path, theme: str, phone: bool = False) -> None:
        size = {"width": 390, "height": 780} if phone else {"width": 1200, "height": 820}
        scheme = "dark" if theme == "dark" else "light"
        self.context = browser.new_context(viewport=size, color_scheme=scheme, has_touch=phone, timezone_id="UTC")
        self.tab = self.context.new_page()
        self.scene, self.out, self.theme = scene, out, "phone" if phone else theme

    def take(self, view: str) -> None:
        """Show a view and take its picture."""
        getattr(self, view)()
        self.tab.wait_for_timeout(700)
        self.tab.screenshot(path=str(self.out / f"{view}-{self.theme}.png"))

    def go(self, place: str) -> None:
        self.tab.goto(f"{self.scene.service.url}/ui/#{place}")
        self.tab.locator('#link[data-state="live"], #link[data-state="polling"]').wait_for()
        self.tab.locator("main h1").wait_for()

    def overview(self) -> None:
        self.go("overview")

    def queue(self) -> None:
        self.go("queue")
        self.tab.get_by_text("Patience left").first.wait_for(state="attached")

    def inflight(self) -> None:
        self.go("queue")

    def activity(self) -> None:
        self.go("activity")
        self.tab.locator("tbody tr").first.wait_for()

    def logs(self) -> None:
        self.go("logs/qwen3-coder-30b")
        self.tab.locator(".logbox .ln").first.wait_for()

    def try_(self) -> None:
        self.go("try/qwen3-coder-30b")
        self.tab.get_by_label("Message", exact=True).last.fill("Write a function that adds two numbers.")
        self.tab.keyboard.press("Enter")
        self.tab.locator(".msg.assistant .stats", has_text="tokens/s").wait_for()

    def forms(self) -> None:
        self.go("try/bge-reranker-v2")
        self.tab.get_by_role("tab", name="Rerank").click()
        self.tab.get_by_label("Query").fill("Which animals purr?")
        texts = "A cat sleeps on the sofa.\nThe car needs new tyres.\nMy dog barks at the mailman."
        self.tab.get_by_label("Documents, one a line").fill(texts)
        self.tab.get_by_role("button", name="Rerank", exact=True).click()
        self.tab.locator(".scorebar").first.wait_for()

    def plan(self) -> None:
        self.go("plan/llama-3.1-8b")
        self.tab.locator(".verdict").wait_for()


setattr(Camera, "try", Camera.try_)


def main() -> int:
    """Take all pictures."""
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else REPO / "docs" / "images"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    with tempfile.TemporaryDirectory(prefix="qmflask-shots-") as name, sync_playwright() as driver:
        scene = Scene(Path(name))
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        try:
            scene.past()
            cameras = [Camera(browser, scene, out, theme) for theme in ("light", "dark")]
            phone = Camera(browser, scene, out, "dark", phone=True)
            quiet(scene, cameras, phone)
            busy(scene, cameras, phone)
        finally:
            browser.close()
            scene.close()
    return 0


def quiet(scene: Scene, cameras: list[Camera], phone: Camera) -> None:
    """The coder is loaded, with what is small beside it."""
    for name in ("coder", "nomic-embed-text", "bge-reranker-v2"):
        scene.service.post(f"/api/models/load/{name}", {})
    scene.hold()
    for view in ("try", "forms", "logs", "plan", "activity"):
        for camera in [*cameras, phone] if view in PHONE else cameras:
            camera.take(view)


def busy(scene: Scene, cameras: list[Camera], phone: Camera) -> None:
    """One model answers for long, one loads, one waits, one has failed."""
    service = scene.service
    service.chat("flux-dev")
    service.post("/api/models/load/gemma-3-12b", {})  # so that its usual time is known
    service.post("/api/models/unload/gemma-3-12b", {})
    with asked(service, "llama-3.1-8b"):
        eventually(lambda: "llama-3.1-8b" in running(service, "ready"), "the stream has begun")
        for camera in cameras:
            camera.take("inflight")
        with asked(service, "qwen3-coder-30b"), asked(service, "coder"):
            for camera in cameras:
                camera.take("queue")
            for camera in [*cameras, phone]:
                service.post("/api/models/unload/gemma-3-12b", {})
                load = threading.Thread(target=service.post, args=("/api/models/load/gemma-3-12b", {}))
                load.start()
                eventually(lambda: loading(service), "gemma loads")
                scene.hold()
                camera.overview()
                camera.tab.wait_for_timeout(2000)
                camera.take("overview")
                load.join()


def loading(service: Service) -> bool:
    """Whether a process of a loading model is known."""
    rows = service.get("/running").json()["running"]
    return any(row["state"] == "starting" and row["pid"] for row in rows)


def running(service: Service, state: str) -> list[str]:
    """The models in a state."""
    rows = service.get("/running").json()["running"]
    return [row["model"] for row in rows if row["state"] == state]


if __name__ == "__main__":
    sys.exit(main())
