"""The server: entries get on the board by their own team only, and nothing that is sent brings it down."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from starlette.testclient import TestClient

from tests.bench.test_board import made_up_score, recipe
from tilewise_arena.board import Board, open_board, verify
from tilewise_arena.board.tokens import create_token
from tilewise_arena.sandbox import bubblewrap
from tilewise_arena.server import create_app


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with open_board(tmp_path / "board.sqlite") as board, TestClient(create_app(tmp_path / "board.sqlite")) as client:
        yield Site(client, board)


class Site:
    """A server, its board, and tokens for two teams and a teacher."""

    def __init__(self, client: TestClient, board: Board) -> None:
        self.client, self.board = client, board
        self.tokens = {team: create_token(board, team) for team in ("owls", "rooks")}
        self.tokens["teacher"] = create_token(board, "teacher", admin=True)

    def post(self, path: str, body: Any, who: str = "owls", **options: Any) -> Any:
        return self.client.post(path, json=body, headers=self.header(who), **options)

    def header(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.tokens[who]}"}

    def scored(self, name: str, speedup: float, team: str = "owls") -> int:
        with self.board.write() as transaction:
            number: int = transaction.submit(team, recipe(name))["entry"]
            transaction.result(number, "scored", made_up_score(speedup).as_dict())
        return number


def test_an_entry_is_answered_with_a_receipt_and_waits_for_its_run(site: Site) -> None:
    answer = site.post("/api/entries", {"recipe": recipe()})
    assert answer.status_code == 201
    receipt = answer.json()
    entry = site.client.get(f"/api/entries/{receipt['entry']}").json()
    assert (entry["team"], entry["status"], entry["score"]) == ("owls", "queued", None)
    assert site.client.get("/health").json() == {"status": "ok", "waiting": 1, "workers": None}
    assert verify(site.board, receipt["hash"]).good


def test_a_submission_that_states_figures_is_refused(site: Site) -> None:
    answer = site.post("/api/entries", {"recipe": recipe(), "score": 1000.0})
    assert answer.status_code == 400
    assert "the board measures them" in answer.json()["detail"]
    answer = site.post("/api/entries", {"recipe": recipe() | {"score": 1000.0}})
    assert "the harness measures them" in answer.json()["detail"]


def test_a_replayed_submission_is_refused_and_names_the_entry(site: Site) -> None:
    first = site.post("/api/entries", {"recipe": recipe()}).json()["entry"]
    again = site.post("/api/entries", {"recipe": recipe()})
    assert again.status_code == 409
    assert (again.json()["code"], again.json()["entry"]) == ("replayed", first)


def test_another_teams_token_enters_nothing_for_this_team(site: Site) -> None:
    answer = site.post("/api/entries", {"recipe": recipe(), "team": "owls"}, "rooks")
    assert answer.status_code == 403
    assert "another team" in answer.json()["detail"]
    assert site.board.entries() == []


@pytest.mark.parametrize("token", ["", "tw_0_0", "x" * 5000])
def test_without_a_known_token_nothing_is_entered(site: Site, token: str) -> None:
    site.tokens["nobody"] = token
    assert site.post("/api/entries", {"recipe": recipe()}, "nobody").status_code == 401


def test_a_revoked_token_is_refused(site: Site) -> None:
    identifier = site.tokens["owls"].split("_")[1]
    assert site.client.delete(f"/api/tokens/{identifier}", headers=site.header("teacher")).status_code == 200
    assert site.post("/api/entries", {"recipe": recipe()}).status_code == 401


def test_a_gigabyte_is_refused_before_it_is_read(site: Site) -> None:
    reads = []

    def body() -> Iterator[bytes]:
        for _ in range(2):
            reads.append(1)
            yield b"x" * (1 << 20)

    headers = site.header("owls") | {"content-length": str(1 << 30), "content-type": "application/json"}
    answer = site.client.post("/api/entries", content=b"", headers=headers)
    assert (answer.status_code, answer.json()["code"]) == (413, "too large")
    headers = site.header("owls") | {"content-type": "application/json"}
    answer = site.client.post("/api/entries", content=body(), headers=headers)
    assert answer.status_code == 413


def test_a_json_bomb_is_refused_before_it_is_parsed(site: Site) -> None:
    headers = site.header("owls") | {"content-type": "application/json"}
    for bomb in (b"[" * 200_000, b'{"recipe":' * 20_000, b"[" + b"[]," * 200_000 + b"[]]"):
        answer = site.client.post("/api/entries", content=bomb, headers=headers)
        assert answer.status_code in (400, 413)
        assert answer.json()["code"] in ("too deep", "too large")


def test_a_recipe_naming_a_file_outside_is_refused(site: Site) -> None:
    content = {"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "weights", "file": "../../etc/passwd"}]}
    answer = site.post("/api/entries", {"recipe": content, "files": {"../../etc/passwd": ""}})
    assert (answer.status_code, answer.json()["code"]) == (400, "file outside")


def test_files_come_with_the_recipe_that_names_them(site: Site) -> None:
    content = {"tilewise": 1, "event": "MLP_SPRINT", "steps": [{"step": "weights", "file": "w.safetensors"}]}
    coded = base64.b64encode(b"weights").decode()
    assert site.post("/api/entries", {"recipe": content}).status_code == 400
    assert site.post("/api/entries", {"recipe": content, "files": {"w.safetensors": "!"}}).status_code == 400
    answer = site.post("/api/entries", {"recipe": content, "files": {"w.safetensors": coded}})
    assert site.board.files(answer.json()["entry"]) == {"w.safetensors": b"weights"}


def test_a_team_has_so_much_room_for_its_files_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "board.sqlite"
    with open_board(path) as board, TestClient(create_app(path, most_stored=3 << 20)) as client:
        site = Site(client, board)

        def enter(samples: int, content: bytes, who: str = "owls") -> Any:
            steps = [{"step": "weights", "file": "w"}, {"step": "quantize", "samples": samples}]
            body = {"recipe": {"tilewise": 1, "event": "MLP_SPRINT", "steps": steps}}
            return site.post("/api/entries", body | {"files": {"w": base64.b64encode(content).decode()}}, who)

        large = bytes(2 << 20)
        assert enter(1, large).status_code == 201
        response = enter(2, large[:-1])
        assert (response.status_code, response.json()["code"]) == (413, "room")
        assert response.json()["detail"] == "the files of owls would exceed the 3 MiB that a team may store here"
        assert enter(3, b"small").status_code == 201
        assert enter(4, large, "rooks").status_code == 201  # stored once, so nobody's twice
        with board.write() as transaction:
            assert 2 << 20 < transaction.stored_by("owls") < 3 << 20
            assert transaction.stored_by("rooks") < 1 << 10
        assert verify(board).good


@pytest.mark.skipif(bool(bubblewrap.unavailable_reason()), reason=bubblewrap.unavailable_reason())
def test_a_plugin_stays_unverified_and_is_not_queued(site: Site) -> None:
    body = {"recipe": recipe(), "division": "open", "plugin": "def load(event, folder): ..."}
    answer = site.post("/api/entries", body)
    assert answer.json()["status"] == "unverified"
    assert site.board.waiting() == 0
    assert site.post("/api/entries", {"recipe": recipe("x"), "plugin": "x"}).status_code == 400


def test_a_team_may_not_fill_the_queue(tmp_path: Path) -> None:
    path = tmp_path / "b.sqlite"
    with open_board(path) as board, TestClient(create_app(path, most_queued=2)) as client:
        site = Site(client, board)
        codes = [site.post("/api/entries", {"recipe": recipe(f"r{i}")}).status_code for i in range(3)]
        assert codes == [201, 201, 429]
        plugin_entry = {"recipe": recipe("p"), "division": "open", "plugin": "def load(event, folder): ..."}
        if not bubblewrap.unavailable_reason():
            assert (
                site.post("/api/entries", plugin_entry).status_code == 429
            )  # what waits for the teacher's hand waits too
            assert site.post("/api/entries", plugin_entry, "rooks").status_code == 201


def test_without_a_sandbox_the_open_division_takes_no_entries(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "unavailable_reason", lambda: "the open division is off: no sandbox")
    answer = site.post("/api/entries", {"recipe": recipe(), "division": "open", "plugin": "pass"})
    assert (answer.status_code, answer.json()["detail"]) == (409, "the open division is off: no sandbox")


def test_only_the_teacher_does_what_the_teacher_does(site: Site) -> None:
    number = site.scored("one", 4.0)
    calls = [
        ("/api/tokens", {"team": "new"}),
        ("/api/events/MLP_SPRINT", {"open": False}),
        (f"/api/entries/{number}/disqualify", {"reason": "because"}),
        (f"/api/entries/{number}/reinstate", None),
        (f"/api/entries/{number}/rerun", None),
        (f"/api/entries/{number}/disqualify", {"reason": "because"}),
    ]
    for path, body in calls:
        assert site.post(path, body, "owls").status_code == 403
        assert site.client.post(path, json=body).status_code == 401
        assert site.post(path, body, "teacher").status_code in (200, 201)
    assert site.board.entry(number)["status"] == "disqualified"  # type: ignore[index]
    assert site.post("/api/entries", {"recipe": recipe("late")}).json()["code"] == "event closed"
    assert site.client.get("/api/grades.csv", headers=site.header("owls")).status_code == 403


def test_grades_hold_each_teams_best_entry_and_no_formula(site: Site) -> None:
    site.scored("slow", 2.0)
    site.scored("fast", 6.0)
    site.scored("cheat", 4.0, "=HYPERLINK()")
    text = site.client.get("/api/grades.csv", headers=site.header("teacher")).text.splitlines()
    assert len(text) == 3
    assert text[1].split(",")[3] == "owls" and "fast" in text[1]
    assert "'=HYPERLINK()" in text[2]


def test_lists_are_filtered_sorted_and_checked(site: Site) -> None:
    for at, team in enumerate(("owls", "rooks", "owls")):
        site.scored(f"n{at}", 2.0 + at, team)
    get = site.client.get
    assert len(get("/api/entries?team=OWL").json()["entries"]) == 2
    assert [e["team"] for e in get("/api/entries?sort=team").json()["entries"]] == ["owls", "owls", "rooks"]
    assert get("/api/entries?team=%25").json()["entries"] == []
    for bad in ("sort=x", "limit=0", "offset=-1", "event=X", "division=x"):
        assert get(f"/api/entries?{bad}").status_code == 400
    assert get("/api/entries/999").status_code == 404
    assert get("/api/entries/abc").status_code == 400


def test_the_openapi_document_lists_every_answer(site: Site) -> None:
    document = site.client.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    codes = document["paths"]["/api/entries"]["post"]["responses"].keys()
    assert {"201", "400", "401", "403", "409", "413", "429"} <= codes
    assert "422" not in json.dumps(document)


# --- pages ---


def test_pages_show_the_board_the_entry_and_its_recipe(site: Site) -> None:
    number = site.board.add_scored("owls & co", _parsed("<b>bold</b>"), made_up_score())["entry"]
    text = site.client.get("/board/MLP_SPRINT").text
    assert "owls &amp; co" in text and "&lt;b&gt;bold" in text and "<b>bold" not in text
    text = site.client.get(f"/entry/{number}").text
    assert "Before and after" in text and "quantize" not in text and "shown when the event is closed" in text
    with site.board.write() as transaction:
        transaction.set_open("MLP_SPRINT", False)
    assert "quantize" in site.client.get(f"/entry/{number}").text
    assert "MLP sprint" in site.client.get("/").text
    for path in ("/board/NOTHING", "/entry/999", "/entry/x", "/nothing"):
        assert site.client.get(path, headers={"accept": "text/html"}).status_code == 404


def test_a_recipe_is_its_teams_own_while_the_event_is_open(site: Site) -> None:
    """Another team could hand it in as its own entry."""
    number = site.board.add_scored("owls", _parsed("mine"), made_up_score())["entry"]
    tokens = {team: create_token(site.board, team) for team in ("owls", "mice")}
    tokens["teacher"] = create_token(site.board, "Ada", admin=True)

    def steps(token: str) -> Any:
        headers = {"Authorization": f"Bearer {token}"}
        return site.client.get(f"/api/entries/{number}", headers=headers).json()["recipe"].get("steps")

    assert steps(tokens["owls"]) and steps(tokens["teacher"])
    assert steps(tokens["mice"]) is None and steps("") is None
    with site.board.write() as transaction:
        transaction.set_open("MLP_SPRINT", False)
    assert steps(tokens["mice"])


def _parsed(name: str) -> Any:
    from tilewise.bench import parse_recipe

    return parse_recipe(recipe(name))


def test_pages_ask_no_other_host_and_say_so_to_the_browser(site: Site) -> None:
    site.scored("one", 4.0)
    for path in ("/", "/board/MLP_SPRINT", "/entry/4", "/submit", "/teacher"):
        answer = site.client.get(path)
        assert "default-src 'self'" in answer.headers["content-security-policy"]
        assert "http://" not in answer.text.replace("http://www.w3.org", "") and "https://" not in answer.text
        assert " style=" not in answer.text and "<script>" not in answer.text


def test_the_form_submits_and_explains_what_is_wrong(site: Site) -> None:
    fields = {"token": site.tokens["owls"], "recipe": json.dumps(recipe())}
    answer = site.client.post("/submit", data=fields, follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (303, "/entry/1")
    assert "on the board already" in site.client.post("/submit", data=fields).text
    assert "not known here" in site.client.post("/submit", data=fields | {"token": "x"}).text
    assert "not JSON" in site.client.post("/submit", data=fields | {"recipe": "{"}).text


def test_the_teacher_signs_in_and_does_everything_on_the_page(site: Site) -> None:
    number = site.scored("one", 4.0)
    client = site.client
    assert client.post("/teacher/do", data={"action": "open", "event": "MLP_SPRINT"}).status_code == 403
    assert client.post("/teacher/in", data={"token": site.tokens["owls"]}).status_code == 403
    assert "Sign out" in client.post("/teacher/in", data={"token": site.tokens["teacher"]}).text
    page = client.post("/teacher/do", data={"action": "token", "team": "new team"}).text
    assert 'class="secret">tw_' in page
    assert "closed." in client.post("/teacher/do", data={"action": "close", "event": "MLP_SPRINT"}).text
    page_text = client.post(
        "/teacher/do", data={"action": "disqualify", "entry": str(number), "reason": "why not"}
    ).text
    assert f"Entry {number}: disqualified" in page_text
    assert "Not done" in client.post("/teacher/do", data={"action": "disqualify", "entry": "1e3"}).text
    foreign = {"origin": "https://elsewhere.example"}
    assert (
        client.post("/teacher/do", data={"action": "open", "event": "MLP_SPRINT"}, headers=foreign).status_code == 403
    )
    assert client.get("/teacher/grades.csv").text.startswith("event,division")
    assert client.get("/teacher/backup.jsonl").text.startswith('{"format"')
    assert '"key"' not in client.get("/teacher/backup.jsonl").text
    client.post("/teacher/out")
    assert "Sign in" in client.get("/teacher").text


def test_a_forged_cookie_is_no_teacher(site: Site) -> None:
    identifier = site.tokens["teacher"].split("_")[1]
    site.client.cookies.set("tilewise_teacher", f"{identifier}.99999999999.{'0' * 64}", path="/teacher")
    assert "Sign in" in site.client.get("/teacher").text
