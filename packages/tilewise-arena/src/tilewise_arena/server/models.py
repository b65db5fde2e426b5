"""Schemas of the API's requests and responses, for validation and for the OpenAPI document."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StringConstraints

from tilewise.web.routes import Refusal

EventName = Literal["MLP_SPRINT", "CNN_MARATHON", "TRANSFORMER_DECATHLON", "TILE_OLYMPIAD"]
Division = Literal["closed", "open"]
Status = Literal["queued", "scored", "rejected", "noisy", "unverified", "disqualified"]
Team = Annotated[str, StringConstraints(min_length=1, max_length=40)]


_EXAMPLE: dict[str, JsonValue] = {
    "tilewise": 1,
    "event": "MLP_SPRINT",
    "name": "int8",
    "steps": [{"step": "backend", "name": "native"}, {"step": "quantize", "samples": 512}],
}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class RequestError(Refusal):
    """A refusal; that of an entry that is on the board already names it."""

    entry: int | None = None


class Submission(Strict):
    """An entry: a recipe (see docs/competition.md), the files it names in base64, or a plugin of the open division."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"recipe": _EXAMPLE}]})

    recipe: dict[str, Any]
    division: Division = "closed"
    team: Team | None = Field(default=None, description="May be given; it must then be the token's own team.")
    files: dict[str, str] = Field(default_factory=dict, description="Files the recipe names, base64.")
    plugin: str | None = Field(default=None, max_length=65536, description="Open division: the plugin's source.")


class Receipt(BaseModel):
    """A receipt to keep: with the hash, anyone can later prove that the entry was on the board."""

    entry: int
    hash: str
    at: str
    status: str


class EntryRow(BaseModel):
    id: int
    team: str
    event: str
    division: str
    name: str
    digest: str
    submitted_at: str
    status: str
    score: float | None
    reason: str
    verified: bool
    record: bool


class EntryList(BaseModel):
    """One page of entries: how many fit the question, and the offset of the next page where there is one."""

    entries: list[EntryRow]
    total: int
    next: int | None


class StandingRow(EntryRow):
    rank: int | None = Field(description="The place among verified entries; null for others.")
    speedup: float | None
    memory_gain: float | None
    size_gain: float | None
    accuracy: float | None


class Standings(BaseModel):
    """Entries of an event, best first, with their places and gains."""

    entries: list[StandingRow]


class EntryFull(EntryRow):
    recipe: dict[str, Any]
    result: dict[str, Any] | None


class EventRow(BaseModel):
    name: str
    title: str
    rules: str
    open: bool


class EventList(BaseModel):
    events: list[EventRow]


class RecordRow(BaseModel):
    entry: int
    team: str
    score: float | None
    at: str
    p_value: float
    previous: int | None


class RecordList(BaseModel):
    records: list[RecordRow]


class Head(BaseModel):
    links: int
    hash: str


class Health(BaseModel):
    status: str
    waiting: int
    workers: int | None = Field(
        default=None, description="Measuring processes of this server; null where none is its own."
    )


class NewToken(Strict):
    team: Team
    admin: bool = False


class MadeToken(BaseModel):
    token: str
    id: str
    team: str


class TokenRow(BaseModel):
    id: str
    team: str
    role: str
    created_at: str
    revoked_at: str | None


class TokenList(BaseModel):
    tokens: list[TokenRow]


class Opening(Strict):
    open: bool


class Disqualification(Strict):
    reason: Annotated[str, StringConstraints(min_length=3, max_length=300)]


class Done(BaseModel):
    done: str
