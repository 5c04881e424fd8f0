"""Pictures of all pages, light and dark, for the documents: of the made lab, so that anybody can make them again.

python tests/dashboards/browser/screenshots.py [--out docs/images] [PAGE ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from conftest import chromium
from made_lab import MadeLab
from PIL import Image
from playwright.sync_api import sync_playwright

MOST_BYTES = 150_000
WIDTH, HEIGHT = 1280, 900
JOB, OTHER = "qwen7b-metamath", "qwen7b-metamath-lr3e-5"
PAGES = {
    "login": "/login",
    "overview": "/",
    "queue": "/queue",
    "job": f"/jobs/{{{JOB}}}",
    "job-plan": f"/jobs/{{{JOB}}}?tab=plan",
    "job-log": f"/jobs/{{{JOB}}}?tab=log",
    "nodes": "/nodes",
    "plan": "/plan?ask=yes&model=qwen2.5-7b&gpu=RTX3090&batch=16&length=1024",
    "submit": "/submit",
    "compare": f"/compare?job={{{JOB}}}&job={{{OTHER}}}",
}


@contextlib.contextmanager
def served(made: MadeLab) -> Iterator[str]:
    """The lab on any free port."""
    server = uvicorn.Server(uvicorn.Config(made.app, host="127.0.0.1", port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


def take(page: Any, url: str, path: Path) -> None:
    """One picture of a page as it stands after it has loaded all of its parts."""
    page.goto(url)
    page.wait_for_load_state("networkidle")
    if "tab=plan" in url:
        page.locator("#timelines .plot-track").nth(8).wait_for()
    content = page.screenshot(full_page=True, clip=_clip(page), animations="disabled")
    # Few colours are on a page, so that a palette halves the file and nobody sees it.
    picture = Image.open(io.BytesIO(content)).convert("RGB").quantize(192, dither=Image.Dither.NONE)
    picture.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_BYTES:,}")


def _clip(page: Any) -> dict[str, float]:
    whole = page.evaluate("document.documentElement.scrollHeight")
    return {"x": 0, "y": 0, "width": WIDTH, "height": min(whole, 1.6 * HEIGHT)}


def main() -> None:
    """Take them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", metavar="PAGE", help=f"of {', '.join(PAGES)}; all by default")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        made = MadeLab(Path(folder), long_queue=False, planner="full")
        browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        with served(made) as url:
            for scheme in ("light", "dark"):
                context = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme, reduced_motion="reduce"
                )
                page = context.new_page()
                chosen = options.pages or list(PAGES)
                if "login" in chosen:
                    take(page, f"{url}/login", options.out / f"login-{scheme}.png")
                page.goto(f"{url}/login")
                page.fill("#token", made.tokens["root"])
                page.keyboard.press("Enter")
                page.wait_for_url(f"{url}/")
                for name in chosen:
                    if name != "login":
                        path = PAGES[name]
                        for job, job_id in made.jobs.items():
                            path = path.replace(f"{{{job}}}", job_id)
                        take(page, url + path, options.out / f"{name}-{scheme}.png")
                context.close()
        browser.close()
        made.store.close()


if __name__ == "__main__":
    main()
