"""The pages in a real browser: submit, see the entry, sort, filter, by keyboard, on a phone; nothing from elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from tests.bench.site import Served
from tests.bench.test_board import made_up_score, recipe
from tests.chromium import Browser, find_chromium
from tilewise_arena.board import open_board
from tilewise_arena.board.tokens import create_token

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_chromium() is None, reason="there is no Chromium; Debian's package is `chromium`"),
]


class Pages:
    """A served board with five entries, a browser before it, and two tokens."""

    def __init__(self, served: Served, browser: Browser, token: str, teacher: str) -> None:
        self.served, self.browser, self.token, self.teacher = served, browser, token, teacher
        self.pictures = Path(os.environ["TILEWISE_PICTURES"]) if "TILEWISE_PICTURES" in os.environ else None

    def go(self, path: str) -> None:
        self.browser.go(self.served.url + path)

    def look(self, name: str) -> None:
        if self.pictures is not None:
            self.browser.picture(self.pictures / f"{name}.png")

    def column(self, number: int) -> list[str]:
        cells = f"#standings tbody tr:not([hidden]) td:nth-child({number})"
        cell_texts: list[str] = self.browser.js(
            f"[...document.querySelectorAll('{cells}')].map(c => c.innerText.trim())"
        )
        return cell_texts


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pages]:
    folder = tmp_path_factory.mktemp("pages")
    path, key = folder / "board.sqlite", folder / "board.key"
    with open_board(path, key=key) as board:
        token, teacher = create_token(board, "Night owls"), create_token(board, "Ada", admin=True)
        for at, team in enumerate(("Rooks", "Jackdaws", "Crows", "Magpies", "Ravens")):
            with board.write() as transaction:
                number = transaction.submit(team, recipe(f"entry of {team}"))["entry"]
                transaction.result(number, "scored", made_up_score(3.0 + (at * 7) % 5).as_dict())
                transaction.record(number, 0.0, 1.0, None)
    served = Served(str(path), key)
    try:
        with Browser() as browser:
            yield Pages(served, browser, token, teacher)
            assert all(url.startswith((served.url, "about:", "data:")) for url in browser.requests), browser.requests
    finally:
        served.stop()


@pytest.fixture(autouse=True)
def wide(pages: Pages) -> None:
    pages.browser.screen(1200, 900)


def test_a_recipe_is_submitted_and_its_entry_seen(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/submit")
    browser.type("#token", pages.token)
    browser.type("#recipe", json.dumps(recipe("from the browser")))
    browser.js("document.querySelector('form.stack button').click()")
    browser.until("location.pathname.startsWith('/entry/')")
    text = browser.js("document.body.innerText")
    assert "from the browser" in text and "by Night owls" in text and "waiting" in text.lower()
    pages.go("/board/MLP_SPRINT")
    assert "from the browser" in browser.js("document.body.innerText")


def test_a_refusal_is_shown_and_what_was_typed_stays(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/submit")
    browser.type("#token", "tw_wrong")
    browser.type("#recipe", '{"mine": 1}')
    browser.js("document.querySelector('form.stack button').click()")
    browser.until("document.querySelector('[role=alert]') !== null")
    assert "not known here" in browser.js("document.querySelector('[role=alert]').innerText")
    assert browser.js("document.querySelector('#recipe').value") == '{"mine": 1}'


def test_columns_sort_both_ways_with_the_keyboard(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/board/MLP_SPRINT")
    scores = [float(s) for s in pages.column(4) if s != "–"]
    assert scores == sorted(scores, reverse=True)
    browser.js("document.querySelector('th:nth-child(2) button').focus()")
    browser.key("Enter", 13)
    teams = [t.split("\n")[0] for t in pages.column(2)]
    assert teams == sorted(teams, key=str.lower)
    assert browser.js("document.querySelector('th:nth-child(2)').getAttribute('aria-sort')") == "ascending"
    browser.key("Enter", 13)
    again = [t.split("\n")[0] for t in pages.column(2)]
    assert again == sorted(teams, key=str.lower, reverse=True)
    pages.look("board-sorted")


def test_a_filter_leaves_what_fits_and_says_how_many(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/board/MLP_SPRINT")
    browser.type("#team", "crow")
    assert [t.split("\n")[0] for t in pages.column(2)] == ["Crows"]
    assert browser.js("document.querySelector('[data-count]').innerText") == "1 entry"
    browser.type("#team", "nobody at all")
    assert pages.column(2) == []
    assert browser.js("!document.querySelector('[data-none]').hidden")
    browser.type("#team", "crow")
    browser.js(
        "(() => { const s = document.querySelector('#status'); s.value = 'rejected';"
        " s.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    assert pages.column(2) == []


def test_everything_is_reached_with_the_tab_key(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/board/MLP_SPRINT")
    positions = set()
    for _ in range(40):
        browser.key("Tab", 9)
        positions.add(browser.js("(document.activeElement.id || document.activeElement.innerText || '').trim()"))
    assert {"Skip to the content", "Submit", "Open", "team", "status", "Score"} <= positions


@pytest.mark.parametrize("path", ["/", "/board/MLP_SPRINT", "/entry/3", "/submit", "/teacher"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_never_scrolls_sideways(pages: Pages, path: str, dark: bool) -> None:
    browser = pages.browser
    for width in (320, 390, 720, 1200):
        browser.screen(width, 844, dark, phone=width < 500)
        pages.go(path)
        assert browser.js("document.documentElement.scrollWidth") <= width
        pages.look(f"{path.strip('/').replace('/', '-') or 'front'}-{width}-{'dark' if dark else 'light'}")
    colour = browser.js("getComputedStyle(document.body).backgroundColor")
    assert (colour == "rgb(16, 19, 26)") is dark


def test_the_teacher_makes_a_token_and_closes_an_event(pages: Pages) -> None:
    browser = pages.browser
    pages.go("/teacher")
    browser.type("#token", pages.teacher)
    browser.js("document.querySelector('form.stack button').click()")
    browser.until("document.body.innerText.includes('Latest entries')")
    browser.type("#new-team", "Newcomers")
    browser.js("document.querySelector('button[value=token]').click()")
    browser.until("document.querySelector('.secret') !== null")
    assert browser.js("document.querySelector('.secret').innerText").startswith("tw_")
    browser.js("document.querySelector('button[value=close]').click()")
    browser.until("document.body.innerText.includes('MLP_SPRINT is closed.')")
    pages.look("teacher")


def test_no_page_has_an_error_in_its_console(pages: Pages) -> None:
    pages.browser.errors.clear()
    for path in ("/", "/board/MLP_SPRINT", "/board/TILE_OLYMPIAD?division=open", "/entry/3", "/submit", "/teacher"):
        pages.go(path)
    pages.browser.js("1")
    assert pages.browser.errors == []
