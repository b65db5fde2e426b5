"""The report and the site in a real browser, opened from disk: wide and narrow, light and dark, a clean console.

Needs Chromium (`make test-pages`). With TILEWISE_PICTURES=FOLDER every view is also written as a picture.
"""

from __future__ import annotations

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.chromium import Browser, find_chromium
from tilewise.tour import Bars, Stop, Table
from tilewise.tour.page import page as report_page

ROOT = Path(__file__).resolve().parents[2]
VIEWS = {
    f"{width}-{'dark' if dark else 'light'}": (width, height, dark)
    for width, height in ((1600, 900), (360, 800))
    for dark in (False, True)
}


class Window:
    """One view of the pages."""

    def __init__(self, browser: Browser, view: str) -> None:
        width, height, self.dark = VIEWS[view]
        self.browser, self.view = browser, view
        browser.screen(width, height, self.dark, phone=width < 600)

    def look(self, url: str, name: str) -> None:
        """Open a page: nothing in the console, nothing from another host, nothing wider than the screen."""
        browser = self.browser
        browser.errors.clear()
        browser.requests.clear()
        browser.go(url)
        browser.js("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        if "TILEWISE_PICTURES" in os.environ:
            browser.picture(Path(os.environ["TILEWISE_PICTURES"]) / f"{name}-{self.view}.png")
        assert browser.errors == []
        hosts = {
            urlsplit(request_url).netloc for request_url in browser.requests if not request_url.startswith("data:")
        }
        assert hosts == {urlsplit(url).netloc}
        wider = browser.js("document.documentElement.scrollWidth - window.innerWidth")
        assert wider <= 0, f"{name} is {wider} pixels wider than the screen"
        colour = browser.js("getComputedStyle(document.body).backgroundColor")
        assert (sum(int(part) for part in colour.strip("rgba()").split(",")[:3]) < 384) is self.dark, colour


pytestmark = pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium; Debian's package is `chromium`")


@pytest.fixture(scope="module", params=VIEWS)
def window(request: pytest.FixtureRequest) -> Iterator[Window]:
    """A fresh browser for each view: the site keeps the colours it was first seen in."""
    with Browser() as browser:
        yield Window(browser, request.param)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The site built from docs/, as a folder and served on this machine."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (make docs installs it)")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield folder, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_a_report_opens_from_disk_with_a_clean_console(window, tmp_path):
    names = {
        "plain (NumPy, float32)": 1.0,
        "cached, INT8 weights": 2345.6,
        "a name that is rather long for a label": 31.0,
    }
    table = Table(
        ("step, on top of those above", "p50", "faster"), [(name, "1 ms", f"{x}×") for name, x in names.items()]
    )
    stop = Stop("A <stop> & more", {}, ["One line."], [table], [Bars("Speed", "× plain", names, log=True)])
    path = tmp_path / "report.html"
    path.write_text(report_page([stop, stop], "today"), encoding="utf-8")
    window.look(path.as_uri(), "made-up-report")
    assert window.browser.requests == [path.as_uri()]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tour")
    command = [sys.executable, "-m", "tilewise.cli.app", "tour", "--quick", "--quiet", "--out", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"BROWSER": "true"})
    return folder / "report.html"


@pytest.mark.slow
def test_the_report_of_a_tour_opens_from_disk_with_a_clean_console(window, report):
    window.look(report.as_uri(), "report")
    assert window.browser.requests == [report.as_uri()]


@pytest.mark.slow
def test_every_page_of_the_site_has_a_clean_console(window, site):
    folder, address = site
    pages = sorted(path.relative_to(folder) for path in folder.rglob("*.html"))
    assert len(pages) > 20
    for path in pages:
        name = path.as_posix().removesuffix(".html").replace("/", "-")
        window.look(f"{address}/{path.as_posix()}", f"site-{name}")


@pytest.mark.slow
def test_every_page_of_the_site_opens_from_disk(window, site):
    folder, _ = site
    for path in sorted(folder.rglob("*.html")):
        if path.name != "404.html":
            window.look(path.as_uri(), f"disk-{path.stem}")


@pytest.mark.slow
@pytest.mark.parametrize("from_disk", [False, True])
def test_the_search_of_the_site_finds_a_page(window, site, from_disk):
    folder, address = site
    browser = window.browser
    browser.errors.clear()
    browser.go((folder / "index.html").as_uri() if from_disk else f"{address}/index.html")
    browser.js("document.querySelector('[data-md-component=search-query]').focus()")
    browser.call("Input.insertText", text="roofline")
    browser.until("document.querySelectorAll('.md-search-result__item').length > 0")
    assert browser.errors == []
