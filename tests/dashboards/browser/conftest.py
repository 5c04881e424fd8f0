"""One service with a made lab and one Chromium for all tests; without Chromium they are skipped."""

from __future__ import annotations

import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn

sys.path.insert(0, str(Path(__file__).parent))
import made_lab

AXE = Path(__file__).parent / "axe" / "axe.min.js"
TIMEOUT_MS = 20_000


def chromium() -> str | None:
    """The Chromium of this machine."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Site:
    """The served lab."""

    url: str
    made: made_lab.MadeLab

    def job(self, name: str) -> str:
        """The path of a job's page."""
        return f"/jobs/{self.made.jobs[name]}"


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    # A thousand jobs are a thousand transactions, each of which waits for the disk where there is one.
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory)) if memory.is_dir() else tmp_path_factory.mktemp("lab")
    made = made_lab.MadeLab(folder)
    server = uvicorn.Server(uvicorn.Config(made.app, host="127.0.0.1", port=0, log_level="error"))
    ready, startup = threading.Event(), server.startup

    async def started(*arguments: Any, **options: Any) -> None:
        await startup(*arguments, **options)
        ready.set()

    server.startup = started  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert ready.wait(30)
    port = server.servers[0].sockets[0].getsockname()[1]
    yield Site(f"http://127.0.0.1:{port}", made)
    server.should_exit = True
    thread.join(20)
    made.store.close()
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def chrome() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    with playwright.sync_playwright() as running:
        # Tests may run as root in a container, where Chromium's own sandbox cannot be set up.
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@dataclass
class Person:
    """Somebody with a browser window, and what went wrong in it."""

    page: Any
    site: Site
    wrong: list[str] = field(default_factory=list)
    allowed: set[int] = field(default_factory=set)
    """Statuses of failure that the test means to see."""

    def heard(self, message: Any) -> None:
        """An error on the console; that something could not be loaded is known from its status."""
        if message.type == "error" and not message.text.startswith(
            ("Failed to load resource", "Response Status Error")
        ):
            self.wrong.append(message.text)

    def answered(self, answer: Any) -> None:
        """A status of failure that nobody expects."""
        if answer.status >= 400 and answer.status not in self.allowed:
            self.wrong.append(f"{answer.url}: {answer.status}")

    def go(self, path: str) -> Any:
        """Open a page; its status is 200."""
        answer = self.page.goto(self.site.url + path)
        assert answer.status == 200, (path, answer.status)
        return answer

    def text(self) -> str:
        """What the page says."""
        words: str = self.page.inner_text("body")
        return words


@pytest.fixture(scope="session")
def sign_in(chrome: Any, site: Site) -> Iterator[Callable[[str], Any]]:
    """The cookies of each user, signed in once through the form."""
    known: dict[str, Any] = {}

    def state(user: str) -> Any:
        if user not in known:
            context = chrome.new_context()
            page = context.new_page()
            page.goto(f"{site.url}/login")
            page.fill("#token", site.made.tokens[user])
            page.click("main button[type=submit]")
            page.wait_for_url(f"{site.url}/")
            known[user] = context.storage_state()
            context.close()
        return known[user]

    yield state


@pytest.fixture
def person(chrome: Any, site: Site, sign_in: Callable[[str], Any]) -> Iterator[Callable[..., Person]]:
    """Opens windows of people who are signed in; at the end nothing may have gone wrong in any of them."""
    opened: list[tuple[Any, Person]] = []

    def open_window(user: str | None = "ada", *, width: int = 1400, scheme: str = "light") -> Person:
        state = sign_in(user) if user is not None else None
        context = chrome.new_context(
            storage_state=state, viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        context.set_default_timeout(TIMEOUT_MS)
        page = context.new_page()
        someone = Person(page, site)
        page.on("console", someone.heard)
        page.on("response", someone.answered)
        page.on("pageerror", lambda error: someone.wrong.append(str(error)))
        page.on("dialog", lambda dialog: dialog.accept())
        opened.append((context, someone))
        return someone

    yield open_window
    for context, _ in opened:
        context.close()
    assert [wrong for _, someone in opened for wrong in someone.wrong] == []


@pytest.fixture(scope="session")
def axe() -> str:
    return AXE.read_text(encoding="utf-8")
