"""`tilewise compete`, the board's side: submit, look, serve, verify, and what a teacher does."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewise.errors import ConfigurationError, UnavailableError

BoardOption = Annotated[str, typer.Option("--board", help="A file, or a postgresql:// URL.")]
KeyOption = Annotated[Path | None, typer.Option("--key", help="The board's key file; beside a board file by default.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
ImagesOption = Annotated[
    str | None, typer.Option(help="An npz of digits x and classes y that only you have, to judge accuracy on.")
]
DEFAULT_BOARD = "board.sqlite"
_BY = "command line"  # who did it, in the ledger


def register(compete: typer.Typer) -> None:
    """Attach these commands."""
    token = typer.Typer(no_args_is_help=True, help="Create, list and revoke tokens.")
    token.command("create")(token_create)
    token.command("revoke")(token_revoke)
    token.command("list")(token_list)
    for command in (
        submit,
        board,
        serve,
        verify,
        work,
        rerun,
        event,
        disqualify,
        reinstate,
        roster,
        grades,
        backup,
        restore,
    ):
        compete.command()(command)
    compete.add_typer(token, name="token")


def _open(where: str, key: Path | None = None, create: bool = False) -> Any:
    from tilewise.bench.board import open_board

    return open_board(where, create=create, key=key)


def _say(as_json: bool, sentence: str, **facts: Any) -> None:
    print(json.dumps(facts) if as_json else sentence)


def submit(
    event: Annotated[str, typer.Option("--event", help="The event.")] = "MLP_SPRINT",
    entry: Annotated[str, typer.Option("--entry", help="A recipe file, or `reference`.")] = "reference",
    to: Annotated[str, typer.Option("--board", help="A board file, or a server's http(s):// address.")] = DEFAULT_BOARD,
    team: Annotated[str, typer.Option(help="Your team, on a local board.")] = "me",
    token: Annotated[str | None, typer.Option(help="Your team's token, for a server; or TILEWISE_TOKEN.")] = None,
    plugin: Annotated[Path | None, typer.Option(help="Open division: the plugin's file (needs a server).")] = None,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of both sides.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Put an entry on a board: measured here for a board file, measured by its workers for a server.

    Example: tilewise compete submit --event CNN_MARATHON --entry mine.json --board https://board.example --token tw_…
    """
    from tilewise.bench import CompetitionSubmission
    from tilewise.cli.compete.app import load_entry

    submission = CompetitionSubmission(event, load_entry(event, entry), team, threads=threads)
    if plugin is not None:
        from tilewise.bench.client import submit as send

        if not to.startswith(("http://", "https://")):
            raise ConfigurationError("a plugin goes to a server's board; score it here with `compete run --plugin`")
        receipt = send(to, submission.recipe, token, plugin)
    else:
        receipt = submission.submit_to_leaderboard(to, token)
    if as_json:
        print(json.dumps(receipt))
        return
    score = f", score {receipt['score']:.3f}" if "score" in receipt else ""
    print(f"entry {receipt['entry']}: {receipt['status']}{score}")
    print(f"receipt {receipt['hash']}")


def board(
    where: Annotated[
        str, typer.Option("--board", help="A file, a database URL, or a server's address.")
    ] = DEFAULT_BOARD,
    event: Annotated[str | None, typer.Option(help="One event only.")] = None,
    division: Annotated[str, typer.Option(help="closed or open.")] = "closed",
    limit: Annotated[int, typer.Option(min=1, max=500, help="Rows shown.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show a board, best entries first; a server's needs no token.

    Example: tilewise compete board --board https://board.example --event MLP_SPRINT
    """
    from tilewise.bench.events import TinyMLPerf

    if division not in ("closed", "open"):
        raise ConfigurationError(f"a division is closed or open, not {division[:40]!r}")
    names = [TinyMLPerf.event(event).name] if event else [e.name for e in TinyMLPerf.events()]
    if where.startswith(("http://", "https://")):
        from tilewise.bench.client import standings

        rows = {name: standings(where, name, division, limit) for name in names}
    else:
        with _open(where) as opened:
            rows = {name: opened.standings(name, division, limit=limit) for name in names}
    if as_json:
        print(json.dumps(rows))
        return
    if not any(rows.values()):
        print(f"{where} has no entries in the {division} division yet")
    for name, found in rows.items():
        if found or event:
            _print_board(name, division, found)


def _print_board(name: str, division: str, rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=f"{name}, {division} division", title_justify="left")
    for heading in ("", "team", "entry", "score", "speed", "memory", "size", "status"):
        table.add_column(heading, justify="right" if heading in ("", "score", "speed", "memory", "size") else "left")
    for row in rows:
        gains = ["–" if row[n] is None else f"{row[n]:.2f}×" for n in ("speedup", "memory_gain", "size_gain")]
        score = "–" if row["score"] is None else f"{row['score']:.3f}"
        status = row["status"] + (" (record)" if row["record"] else "")
        shown = (str(row["rank"] or ""), row["team"], f"{row['id']} {row['name']}".strip(), score, *gains, status)
        table.add_row(*(Text(cell) for cell in shown))  # what teams write is text, not markup
    Console().print(table)


def serve(
    where: BoardOption = DEFAULT_BOARD,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0 takes a free one.")] = 8000,
    workers: Annotated[int, typer.Option(min=0, max=16, help="Processes that re-run entries.")] = 1,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of a re-run.")] = 1,
    truth: Annotated[str | None, typer.Option(help="TILE_OLYMPIAD: the collection only you have.")] = None,
    images: ImagesOption = None,
    most_queued: Annotated[int, typer.Option(min=1, help="Entries of one team that may wait.")] = 100,
    most_stored: Annotated[int, typer.Option(min=1, help="MiB that one team's files may take.")] = 256,
    rate: Annotated[float, typer.Option(min=0, help="Requests a second of one client in the long run; 0: any.")] = 40.0,
    access_log: Annotated[Path | None, typer.Option(help="A file for one line a request; else to the screen.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Believe a local proxy's X-Forwarded-For.")
    ] = False,
    key: KeyOption = None,
) -> None:
    """Serve a board with its pages and API, and re-run entries in worker processes beside it.

    Example: tilewise compete serve --board board.sqlite --port 8000
    """
    try:
        import uvicorn
    except ImportError:
        raise UnavailableError("a server needs uvicorn: pip install 'tilewise[server]'") from None
    from tilewise.bench.server import create_app
    from tilewise.bench.server.connections import HEADER_BYTES, GuardedProtocol, GuardedServer, allow_files
    from tilewise.bench.server.workers import Workers

    _log_accesses(access_log)
    allow_files()
    _open(where, key, create=True).close()  # the board is there, and its key fits, before anything is started
    _check_settings(truth, images)
    listening = _listen(host, port)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # uvicorn raises it once more when it has ended in order
    crew = Workers(workers, where, threads, {"truth": truth, "images": images}, key)
    try:
        counted = crew.alive if workers else None
        app = create_app(
            where,
            most_queued=most_queued,
            most_stored=most_stored << 20,
            key=key,
            rate=rate,
            has_truth=truth is not None,
            workers=counted,
        )
        gc.collect()
        gc.freeze()  # what there is by now stays: looking through all of it again would hold up everybody for 0.2 s
        config = uvicorn.Config(
            app,
            http=GuardedProtocol,
            ws="none",
            log_level="error",  # what strangers send is in the access log, not here
            access_log=False,
            proxy_headers=behind_proxy,
            timeout_keep_alive=10,
            timeout_graceful_shutdown=2,
            h11_max_incomplete_event_size=HEADER_BYTES,
        )
        print(f"the board is at http://{_shown_address(listening)}", flush=True)
        sys.setswitchinterval(1e-3)  # requests are short: a thread that reads the board gives way sooner
        GuardedServer(config, listening, app.health).run(sockets=[])
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        crew.close()
        logging.shutdown()
    os._exit(0)  # whoever still reads a large board in a thread does not hold up the end


def _listen(host: str, port: int) -> socket.socket:
    """A socket on this address, or a sentence that says why there is none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, backlog=1024)
        # inherited by what is accepted; asyncio does not see that these are TCP, and an answer's body would wait 40 ms
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listening
    except OSError as error:
        raise UnavailableError(f"nothing can listen on {host}, port {port}: {error.strerror or error}") from None


def _shown_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _check_settings(truth: str | None, images: str | None) -> None:
    """What only the teacher has is there and can be read, before anybody's entry depends on it."""
    from tilewise.bench.events import TinyMLPerf
    from tilewise.bench.validation import read_images
    from tilewise.costmodel import load_dataset

    if truth is not None:
        load_dataset(truth)
    if images is not None:
        read_images(Path(images), TinyMLPerf.MLP_SPRINT)


def _log_accesses(path: Path | None) -> None:
    """One line a request: when, from where, whose token, what, the answer, its bytes and its time."""
    from logging.handlers import RotatingFileHandler

    handler = logging.StreamHandler() if path is None else RotatingFileHandler(path, maxBytes=16 << 20, backupCount=8)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("tilewise.access")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def work(
    where: BoardOption = DEFAULT_BOARD,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of both sides.")] = 1,
    truth: Annotated[str | None, typer.Option(help="TILE_OLYMPIAD: the collection only you have.")] = None,
    images: ImagesOption = None,
    key: KeyOption = None,
) -> None:
    """Re-run every entry that waits, on this machine, then end.

    Example: tilewise compete work --board postgresql://teacher@db/board
    """
    from tilewise.bench import Settings
    from tilewise.bench.worker import work as run

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(where, Settings(truth=truth, images=images), threads, once=True, key=key)


def rerun(
    number: Annotated[int, typer.Argument(help="An entry of the open division.")],
    where: BoardOption = DEFAULT_BOARD,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of both sides.")] = 1,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the plugin of an open entry here, apart and with limits, and put what was found on the board.

    Example: tilewise compete rerun 17 --board board.sqlite
    """
    from tilewise.bench.worker import rerun_plugin

    with _open(where, key) as opened:
        entry = rerun_plugin(opened, number, threads)
    shown = {name: entry[name] for name in ("id", "team", "event", "status", "score", "reason")}
    print(json.dumps(shown) if as_json else f"entry {number}: {entry['status']} {entry['reason'] or entry['score']}")


def verify(
    where: BoardOption = DEFAULT_BOARD,
    head: Annotated[str | None, typer.Option(help="A hash noted earlier, such as a receipt's.")] = None,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Walk the chain of a board and compare what it shows with what the chain says; exit code 1 if anything is wrong.

    Example: tilewise compete verify --board board.sqlite
    """
    from tilewise.bench.board import verify as check

    with _open(where, key) as opened:
        verdict = check(opened, head)
    if as_json:
        print(json.dumps(verdict.as_dict()))
    else:
        print(f"links: {verdict.links}, entries: {verdict.entries}, last hash: {verdict.head}")
        print("the board is whole" if verdict.good else "\n".join(verdict.faults))
        if not verdict.sealed:
            print("the board's key is not here, so its seals were not checked")
    if not verdict.good:
        raise typer.Exit(1)


def token_create(
    team: Annotated[str, typer.Argument(help="The team, or the teacher's name.")],
    where: BoardOption = DEFAULT_BOARD,
    admin: Annotated[bool, typer.Option("--admin", help="A teacher's token.")] = False,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token; it is shown once and stored only as a hash.

    Example: tilewise compete token create owls --board board.sqlite
    """
    from tilewise.bench.board.tokens import create_token

    with _open(where, key, create=True) as opened:
        before = [row["id"] for row in opened.teams() if row["team"] == team and row["revoked_at"] is None]
        made = create_token(opened, team, admin, _BY)
    print(json.dumps({"team": team, "token": made}) if as_json else made)
    if not as_json:
        print(f"This is {team}'s token; it is shown only once. Submit with --token or TILEWISE_TOKEN.", file=sys.stderr)
    if before and not as_json:
        named = ", ".join(before)
        print(f"{team} had a token before ({named}); it still works until `compete token revoke`.", file=sys.stderr)


def token_revoke(
    identifier: Annotated[str, typer.Argument(help="The token's public name, or the token.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token useless.

    Example: tilewise compete token revoke 3f9a12bc
    """
    from tilewise.bench.board.tokens import revoke_token

    with _open(where, key) as opened:
        revoke_token(opened, identifier, _BY)
    _say(as_json, "revoked", revoked=True)


def token_list(where: BoardOption = DEFAULT_BOARD, as_json: JsonOption = False) -> None:
    """List tokens by name.

    Example: tilewise compete token list
    """
    with _open(where) as opened:
        rows = opened.teams()
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        ended = f", revoked {row['revoked_at'][:16]}" if row["revoked_at"] else ""
        print(f"{row['id']}  {row['team']}  {row['role']}  since {row['created_at'][:16]}{ended}")


def event(
    name: Annotated[str, typer.Argument(help="The event.")],
    state: Annotated[str, typer.Argument(help="open or close.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Open or close an event for new entries.

    Example: tilewise compete event MLP_SPRINT close
    """
    if state not in ("open", "close"):
        raise ConfigurationError("an event can be opened or closed: say open or close")
    with _open(where, key) as opened, opened.write() as transaction:
        transaction.set_open(name, state == "open", _BY)
    _say(as_json, f"{name} is {'open' if state == 'open' else 'closed'}", event=name, open=state == "open")


def disqualify(
    number: Annotated[int, typer.Argument(help="The entry.")],
    reason: Annotated[str, typer.Argument(help="Why; it stays to be seen.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take an entry out of the ranking, with a reason.

    Example: tilewise compete disqualify 17 "two members in two teams"
    """
    with _open(where, key) as opened, opened.write() as transaction:
        transaction.disqualify(number, reason, _BY)
    _say(as_json, f"entry {number} is disqualified", entry=number, disqualified=reason)


def reinstate(
    number: Annotated[int, typer.Argument(help="The entry.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lift a disqualification; the entry is measured again.

    Example: tilewise compete reinstate 17
    """
    with _open(where, key) as opened, opened.write() as transaction:
        transaction.reinstate(number, _BY)
    _say(as_json, f"entry {number} is back and waits for a run", entry=number, reinstated=True)


def roster(
    path: Annotated[
        Path, typer.Argument(help="The class as CSV: a column `name`, and `team` where they work together.")
    ],
    out: Annotated[Path, typer.Option(help="The file for the new tokens; they are shown nowhere else.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a token for every team of a class that has none yet, and write who gets which.

    Example: tilewise compete roster class.csv --out tokens.csv --board board.sqlite
    """
    from tilewise._files import write_whole
    from tilewise.bench.board.roster import make_tokens, read_roster, tokens_csv

    students = read_roster(path)
    if out.exists():
        raise ConfigurationError(f"{out} is there, and may hold tokens that are shown nowhere else; name another file")
    write_whole(out, "")  # a place that cannot be written to is found before a token is made
    out.chmod(0o600)
    with _open(where, key, create=True) as opened:
        made = make_tokens(opened, students, _BY)
    write_whole(out, tokens_csv(students, made))
    out.chmod(0o600)
    _say(as_json, f"{len(made)} new tokens for {len(students)} students in {out}", tokens=len(made), file=str(out))


def grades(
    where: BoardOption = DEFAULT_BOARD,
    out: Annotated[Path | None, typer.Option(help="A file instead of the screen.")] = None,
    roster: Annotated[Path | None, typer.Option(help="The class as CSV: one line for each student.")] = None,
) -> None:
    """The best verified entry of every team in every event, as CSV; with a roster, a line for every student.

    Example: tilewise compete grades --roster class.csv --out grades.csv
    """
    from tilewise._files import write_whole
    from tilewise.bench.board.grades import grades_csv
    from tilewise.bench.board.roster import class_grades_csv, read_roster

    students = None if roster is None else read_roster(roster)
    with _open(where) as opened:
        text = grades_csv(opened) if students is None else class_grades_csv(opened, students)
    if out is None:
        print(text, end="")
    else:
        write_whole(out, text)
        print(f"{text.count(chr(10)) - 1} lines of grades in {out}")


def backup(
    path: Annotated[Path, typer.Argument(help="The file to write.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the whole board, its key included, to one file that only you can read.

    Example: tilewise compete backup monday.jsonl --board board.sqlite
    """
    from tilewise.bench.board.backup import back_up

    with _open(where, key) as opened:
        lines = back_up(opened, path)
    _say(as_json, f"{lines} lines in {path}", lines=lines, file=str(path))


def restore(
    path: Annotated[Path, typer.Argument(help="A backup.")],
    where: BoardOption = DEFAULT_BOARD,
    key: KeyOption = None,
    new_key: Annotated[bool, typer.Option("--new-key", help="Seal it anew, where the old key is lost.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a new board from a backup; the chain is checked before anything is written, and the board after.

    Example: tilewise compete restore monday.jsonl --board new.sqlite
    """
    from tilewise.bench.board.backup import restore as run

    links = run(path, where, key, new_key)
    _say(as_json, f"{links} links in {where}", links=links, board=where)
