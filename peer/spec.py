"""What a run is: the specification that its creator writes once and every peer follows to the letter.

Written as TOML (`examples/run.toml`), told to the swarm as canonical bytes, whose hash is the run's id.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from averaging.owners import PARTS_MAX
from averaging.record import MEMBERS_MAX
from dht.facts import NAME_CHARACTERS_MAX, SpecFact, run_id_of
from models.registry import model_config
from network.identity import Signer, public_key_of
from network.seam import PeerID
from optimizers.presets import PRESETS, Method, Setting, as_settings, flattened, method_from_settings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FORMAT = 2
"""Of what the peers of a run say to each other and keep as well: raised with every change of these that other releases
do not follow. So who joins with one is told, instead of being refused message by message.
"""
SPEC_BYTES_MAX = 16 * 1024
SETTINGS_MAX = 200
ROUNDS_MAX = 1_000_000_000
SEED_MAX = 2**32 - 1
SHOWN_CHARACTERS_MAX = 80

Name = Annotated[str, Field(pattern=r"\A[A-Za-z0-9][A-Za-z0-9._-]*\z", max_length=NAME_CHARACTERS_MAX)]


class InvalidSpec(ValueError):
    """A specification that cannot be followed; the text names the field, its value and what is allowed."""


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class RunPart(_Strict):
    name: Name
    seed: int = Field(default=0, ge=0, le=SEED_MAX)
    """Of the initial weights."""
    rounds: int | None = Field(default=None, ge=1, le=ROUNDS_MAX)
    """The run ends after so many committed rounds; None: when its peers leave."""


class ModelPart(_Strict):
    name: Name


class DataPart(_Strict):
    name: Name = "python-stdlib"
    """What peers train on who bring no data of their own."""
    sha256: str | None = Field(default=None, pattern=r"\A[0-9a-f]{64}\z")
    """Of the text that `name` stands for, so that a peer notices when it holds another."""


class MethodPart(_Strict):
    preset: str
    """Where the settings began; what counts is `settings`."""
    settings: dict[str, bool | int | float | str] = Field(max_length=SETTINGS_MAX)
    """All settings, also those left as in the preset: a later release may change a preset, but not this run."""


SHARERS_MAX = 4096
"""Peers of a round at most, where owners reduce."""


class GroupPart(_Strict):
    start_peers: int = Field(default=1, ge=1, le=SHARERS_MAX)
    """The first round waits for so many."""
    min_peers: int = Field(default=1, ge=1, le=SHARERS_MAX)
    """No round commits with fewer contributions."""
    max_peers: int = Field(default=64, ge=1, le=SHARERS_MAX)
    """No round takes more."""
    parts: int = Field(default=0, ge=0, le=PARTS_MAX)
    """For large groups: contributions are cut into so many parts, each merged by its owner. 0: all get all of all."""
    recovery_share: float = Field(default=0.0, ge=0, le=1)
    """When no quorum comes: the least share of the last round's peers that may go on without it. 0: even one."""
    voters_max: int = Field(default=8, ge=1, le=MEMBERS_MAX)
    """With parts: so many peers vote and own them."""

    @model_validator(mode="after")
    def _ordered(self) -> GroupPart:
        if self.min_peers > self.max_peers:
            raise ValueError(f"min_peers = {self.min_peers} is more than max_peers = {self.max_peers}")
        if self.max_peers > MEMBERS_MAX and not self.parts:
            raise ValueError(f"max_peers = {self.max_peers}: more than {MEMBERS_MAX} need owners who reduce: set parts")
        if self.start_peers > self.max_peers:
            raise ValueError(f"start_peers = {self.start_peers} is more than max_peers = {self.max_peers}")
        return self


class RunSpec(_Strict):
    """Equal specifications have equal bytes, and so the same id. Made by the functions below, which check all of it."""

    run: RunPart
    model: ModelPart
    data: DataPart = DataPart()
    method: MethodPart
    group: GroupPart = GroupPart()
    creator: str
    """The peer id of the one who wrote it, and signs it."""

    @field_validator("creator")
    @classmethod
    def _is_peer_id(cls, creator: str) -> str:
        public_key_of(PeerID(creator))
        return creator

    @cached_property
    def canonical(self) -> bytes:
        """The only bytes that say this: msgpack, keys sorted, nothing left out."""
        return _pack({"format": FORMAT, **self.model_dump()})

    @property
    def run_id(self) -> str:
        return run_id_of(self.canonical)

    @cached_property
    def training_method(self) -> Method:
        return method_from_settings(self.method.preset, self.method.settings)

    def announced_by(self, signer: Signer) -> SpecFact:
        """The signed form for the directory; only the creator can make it."""
        assert signer.peer_id == self.creator, "a specification is signed by its creator"
        return SpecFact.by(signer, self.canonical)


def load_spec(path: Path, creator: PeerID) -> RunSpec:
    """Raises `InvalidSpec` and `OSError`."""
    try:
        return spec_from_toml(path.read_text(encoding="utf-8"), creator)
    except (InvalidSpec, UnicodeDecodeError) as error:
        raise InvalidSpec(f"{path}: {error}") from error


def spec_from_toml(text: str, creator: PeerID) -> RunSpec:
    """The specification that `text` describes, with every default filled in; raises `InvalidSpec`."""
    try:
        sections = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InvalidSpec(f"not TOML: {error}") from error
    if "creator" in sections:
        raise InvalidSpec("creator: is not written in the file, it is whoever starts the run")
    method, run = sections.get("method"), sections.get("run")
    if isinstance(method, dict):
        overrides = {name: value for name, value in method.items() if name != "preset"}
        rounds = run.get("rounds") if isinstance(run, dict) else None
        sections = {**sections, "method": _method_part(method.get("preset"), overrides, rounds)}
    return _checked({**sections, "creator": str(creator)})


def make_spec(
    creator: PeerID,
    *,
    name: str,
    model: str,
    preset: str,
    settings: Mapping[str, object] | None = None,
    seed: int = 0,
    rounds: int | None = None,
    group: GroupPart | None = None,
) -> RunSpec:
    """For programs: the same as a TOML file with these values; raises `InvalidSpec`."""
    return _checked(
        {
            "run": {"name": name, "seed": seed, "rounds": rounds},
            "model": {"name": model},
            "method": _method_part(preset, settings or {}, rounds),
            "group": (group or GroupPart()).model_dump(),
            "creator": str(creator),
        }
    )


def parse_spec(data: bytes) -> RunSpec:
    """A stranger's canonical bytes; raises `InvalidSpec`, also where this release cannot follow them."""
    if len(data) > SPEC_BYTES_MAX:
        raise InvalidSpec(f"specification: has {len(data)} bytes, at most {SPEC_BYTES_MAX} are read")
    try:
        fields = msgpack.unpackb(data, raw=False, strict_map_key=True, use_list=True)
    # msgpack's errors for truncated, nested and misformed bytes are all of these two kinds.
    except (ValueError, msgpack.UnpackException) as error:
        raise InvalidSpec(f"specification: not msgpack: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidSpec("specification: not a map")
    found = fields.pop("format", None)
    if type(found) is not int or found != FORMAT:
        raise InvalidSpec(f"format: {found!r} is not {FORMAT}{_which_is_older(found)}")
    spec = _checked(fields)
    if spec.canonical != data:
        raise InvalidSpec("specification: not in canonical form (a field left out, or not in order)")
    return spec


def _which_is_older(found: object) -> str:
    if type(found) is not int:
        return ""
    if found > FORMAT:
        return "; this peer's release is older than the run: take a newer one"
    return "; the run is of an older release than this peer's: take that one, or start a new run"


def spec_of(fact: SpecFact) -> RunSpec:
    """The specification in a verified fact; raises `InvalidSpec`, also if another than its creator has signed it."""
    spec = parse_spec(fact.spec)
    if fact.creator != spec.creator:
        raise InvalidSpec(f"creator: the specification names {spec.creator}, but {fact.creator} has signed it")
    return spec


def _checked(fields: Mapping[str, object]) -> RunSpec:
    try:
        spec = RunSpec.model_validate(fields)
    except ValidationError as error:
        raise InvalidSpec(_explained(error)) from error
    _check_method(spec.method)
    _check_group(spec)
    try:
        model_config(spec.model.name)
    except ValueError as error:
        raise InvalidSpec(f"model.name: {error}") from error
    try:
        size = len(spec.canonical)
    # A whole number beyond 64 bits, or text that is not Unicode.
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidSpec(f"method.settings: cannot be written: {error}") from error
    if size > SPEC_BYTES_MAX:
        raise InvalidSpec(f"specification: has {size} bytes, at most {SPEC_BYTES_MAX} are allowed")
    return spec


def _method_part(preset: object, overrides: Mapping[str, object], rounds: object = None) -> dict[str, object]:
    """All settings of the preset, some of them changed. A schedule is as long as the run unless it says otherwise."""
    if not isinstance(preset, str) or preset not in PRESETS:
        raise InvalidSpec(f"method.preset: {preset!r} is not one of {', '.join(sorted(PRESETS))}")
    known = as_settings(PRESETS[preset])
    changed = flattened(overrides)
    for name in changed:
        if name not in known:
            raise InvalidSpec(f"method.{name}: unknown{_nearest(name, known)}")
    if type(rounds) is int and rounds > 0:  # Else the check of `run.rounds` says what is wrong.
        changed = {"schedule.rounds": rounds} | changed
    try:
        settings = as_settings(method_from_settings(preset, changed))
    except ValueError as error:
        raise InvalidSpec(f"method.{error}") from error
    return {"preset": preset, "settings": settings}


def _check_method(method: MethodPart) -> None:
    """The settings are complete and of the right types: a preset that changes must not change a run."""
    complete = _method_part(method.preset, method.settings)["settings"]
    assert isinstance(complete, dict)
    for name, value in complete.items():
        if name not in method.settings:
            raise InvalidSpec(f"method.settings.{name}: missing")
        given = method.settings[name]
        if type(given) is not type(value) or given != value:
            raise InvalidSpec(f"method.settings.{name}: {given!r} is not written as {value!r}")


def _check_group(spec: RunSpec) -> None:
    method = spec.training_method
    if spec.group.parts and (method.mode == "gossip" or method.fragments > 1):
        raise InvalidSpec(
            f"group.parts: {spec.group.parts}; owners reduce whole models in consensus: set parts = 0, or"
            " method.mode = 'consensus' and method.fragments = 1"
        )
    if method.mode == "gossip" and spec.group.min_peers > method.gossip.group:
        raise InvalidSpec(
            f"group.min_peers: {spec.group.min_peers} never meet where method.gossip.group = {method.gossip.group}"
        )


def _explained(error: ValidationError) -> str:
    """One thing that is wrong (an unknown name before all else: it is often why another is missing), and what to do."""
    errors = error.errors(include_url=False)
    first = next((found for found in errors if found["type"] == "extra_forbidden"), errors[0])
    # A union of types appears in the location once for each of them.
    location = [str(part) for part in first["loc"] if part not in ("bool", "int", "float", "str")]
    field = ".".join(location) or "specification"
    if first["type"] == "extra_forbidden":
        return f"{field}: unknown{_nearest(location[-1], _fields_at(location[:-1]))}"
    if first["type"] == "missing":
        return f"{field}: missing"
    if first["type"] == "value_error":
        return f"{field}: {first['ctx']['error']}"
    value = repr(first["input"])
    shown = value if len(value) <= SHOWN_CHARACTERS_MAX else value[:SHOWN_CHARACTERS_MAX] + "..."
    return f"{field}: {shown}: {_what_is_allowed(first['type'], first['msg'])}"


def _what_is_allowed(kind: str, message: str) -> str:
    if kind == "model_type":
        return "must be a section with names of its own"
    if kind == "string_pattern_mismatch":
        return "must be letters, digits, dots, dashes and underscores, or the 64 hexadecimal digits of a hash"
    return (
        message.replace("Input should be", "must be")
        .replace("String should", "must")
        .replace("Dictionary should", "must")
    )


def _fields_at(location: list[str]) -> list[str]:
    part: Any = RunSpec
    for name in location:
        part = part.model_fields[name].annotation
    return list(part.model_fields)


def _nearest(name: str, known: Mapping[str, Setting] | list[str]) -> str:
    """`; did you mean "rounds"?`, or what there is if nothing is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"


def _pack(value: Mapping[str, object]) -> bytes:
    packed: bytes = msgpack.packb(_sorted(value), use_bin_type=True)
    return packed


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return value
