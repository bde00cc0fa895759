"""The run specification: one meaning, one form of bytes, one id; and every refusal names the field."""

from __future__ import annotations

from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.facts import SpecFact
from network.identity import Identity
from optimizers.presets import PRESETS, as_settings
from peer.spec import (
    FORMAT,
    SPEC_BYTES_MAX,
    GroupPart,
    InvalidSpec,
    RunSpec,
    load_spec,
    make_spec,
    parse_spec,
    spec_from_toml,
    spec_of,
)

ME = Identity(b"a" * 32)
OTHER = Identity(b"b" * 32)
MINIMAL = {"run": ['name = "test"'], "model": ['name = "gpt-nano"'], "method": ['preset = "muloco"']}
FULL = {
    "run": ['name = "test"', "seed = 7", "rounds = 30"],
    "model": ['name = "gpt-nano"'],
    "data": ['name = "python-stdlib"', f'sha256 = "{"0f" * 32}"'],
    "method": ['preset = "sparseloco"', "inner_steps = 5", "outer.lr = 0.5"],
    "group": ["start_peers = 2", "min_peers = 2", "max_peers = 8"],
}


def toml(sections: dict[str, list[str]]) -> str:
    return "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in sections.items())


def changed(section: str, *lines: str) -> RunSpec:
    return spec_from_toml(toml({**MINIMAL, section: [*MINIMAL.get(section, []), *lines]}), ME.peer_id)


@st.composite
def reordered(draw: st.DrawFn) -> str:
    sections = draw(st.permutations(list(FULL)))
    return toml({name: draw(st.permutations(FULL[name])) for name in sections})


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    start, least, most = sorted(draw(st.lists(st.integers(1, 256), min_size=3, max_size=3)))
    preset = draw(st.sampled_from(sorted(PRESETS)))
    if PRESETS[preset].mode == "gossip":
        least = min(least, PRESETS[preset].gossip.group)
    return make_spec(
        draw(st.sampled_from([ME.peer_id, OTHER.peer_id])),
        name=draw(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)),
        model=draw(st.sampled_from(["gpt-nano", "gpt-mini"])),
        preset=preset,
        settings={"batch": draw(st.integers(1, 64)), "outer": {"lr": draw(st.floats(0.001, 1))}},
        seed=draw(st.integers(0, 2**32 - 1)),
        rounds=draw(st.none() | st.integers(1, 10**9)),
        group=GroupPart(start_peers=start, min_peers=least, max_peers=most),
    )


@given(reordered())
def test_the_same_content_in_any_order_is_the_same_run(text: str) -> None:
    spec = spec_from_toml(text, ME.peer_id)
    assert spec.canonical == spec_from_toml(toml(FULL), ME.peer_id).canonical
    assert spec.training_method.inner_steps == 5
    assert spec.training_method.outer.lr == 0.5


@given(specs())
def test_the_canonical_bytes_give_the_specification_back(spec: RunSpec) -> None:
    again = parse_spec(spec.canonical)
    assert again == spec
    assert again.run_id == spec.run_id
    assert again.training_method == spec.training_method


@settings(max_examples=50)
@given(specs(), specs())
def test_different_specifications_have_different_ids(one: RunSpec, other: RunSpec) -> None:
    assert (one == other) == (one.run_id == other.run_id)


@settings(max_examples=50)
@given(specs(), st.data())
def test_a_changed_byte_is_refused_or_another_run(spec: RunSpec, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(spec.canonical) - 1))
    tampered = bytearray(spec.canonical)
    tampered[position] ^= data.draw(st.integers(1, 255))
    try:
        found = parse_spec(bytes(tampered))
    except InvalidSpec:
        return
    assert found.run_id != spec.run_id
    assert found.canonical == bytes(tampered)


@settings(max_examples=50)
@given(st.binary(max_size=200) | st.recursive(st.none() | st.text() | st.integers(0, 9), st.lists).map(msgpack.packb))
def test_any_bytes_of_a_stranger_are_read_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidSpec):
        parse_spec(data)


def test_all_settings_are_written_so_that_a_preset_may_change() -> None:
    fields = msgpack.unpackb(changed("method", "batch = 3").canonical)
    assert fields["method"]["settings"] == {**as_settings(PRESETS["muloco"]), "batch": 3}


def test_the_schedule_is_as_long_as_the_run_unless_it_says_otherwise() -> None:
    assert changed("run", "rounds = 30").training_method.schedule.rounds == 30
    assert changed("method", "schedule.rounds = 99").training_method.schedule.rounds == 99
    assert changed("run").training_method.schedule.rounds == 0


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("run", "round = 3", "run.round: unknown; did you mean 'rounds'?"),
        ("group", "max_pers = 3", "group.max_pers: unknown; did you mean 'max_peers'?"),
        ("method", "inner_step = 3", "method.inner_step: unknown; did you mean 'inner_steps'?"),
        ("method", "outer.lrx = 3", "method.outer.lrx: unknown; did you mean 'outer.lr'?"),
        ("grup", "max_peers = 3", "grup: unknown; did you mean 'group'?"),
        ("run", 'seed = "x"', "run.seed: 'x': must be a valid integer"),
        ("run", "rounds = true", "run.rounds: True: must be a valid integer"),
        ("run", "rounds = 0", "run.rounds: 0: must be greater than or equal to 1"),
        ("method", "inner_steps = 0", "method.inner_steps = 0"),
        ("method", 'outer.lr = "fast"', "method.outer.lr = 'fast': must be a finite number"),
        ("method", "outer.lr = nan", "method.outer.lr = nan: must be a finite number"),
        ("group", "min_peers = 65", "min_peers = 65 is more than max_peers = 64"),
        ("group", "start_peers = 65", "start_peers = 65 is more than max_peers = 64"),
        ("data", 'sha256 = "0"', "data.sha256: '0': must be letters"),
        ("data", 'name = "../etc"', "data.name: '../etc': must be letters"),
    ],
)
def test_a_wrong_value_is_named(section: str, line: str, message: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        changed(section, line)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[run", "not TOML"),
        ("", "run: missing"),
        ('creator = "me"', "creator: is not written in the file"),
        (toml({**MINIMAL, "model": ['name = "gpt-nan"']}), "must be one of gpt-mini, gpt-nano"),
        (toml({**MINIMAL, "method": ['preset = "mulco"']}), "method.preset: 'mulco' is not one of allreduce"),
        (toml({**MINIMAL, "method": []}), "method.preset: None is not one of allreduce"),
        (toml({**MINIMAL, "run": ['name = "a b"']}), "run.name: 'a b': must be letters"),
        (toml({**MINIMAL, "run": [f'name = "{"a" * 65}"']}), "run.name: 'aaa"),
        ("model = 3\n" + toml({k: MINIMAL[k] for k in ("run", "method")}), "model: 3: must be a section"),
    ],
)
def test_a_wrong_file_is_explained(text: str, message: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        spec_from_toml(text, ME.peer_id)
    assert message in str(refused.value)


def test_a_file_is_named_with_what_is_wrong_in_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(toml({**MINIMAL, "run": []}))
    with pytest.raises(InvalidSpec) as refused:
        load_spec(path, ME.peer_id)
    assert str(path) in str(refused.value)
    assert "run.name: missing" in str(refused.value)


def test_the_example_is_a_valid_run() -> None:
    spec = load_spec(Path(__file__).parents[2] / "examples" / "run.toml", ME.peer_id)
    # It says of itself that the optional values in it are the defaults.
    assert (
        spec.method == make_spec(ME.peer_id, name="x", model="gpt-nano", preset="distro", rounds=spec.run.rounds).method
    )
    assert spec.group == GroupPart()


def fields_of(spec: RunSpec) -> dict[str, object]:
    found = msgpack.unpackb(spec.canonical)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": FORMAT + 1}, f"format: {FORMAT + 1} is not {FORMAT}; this peer's release is older than the run"),
        ({"format": FORMAT - 1}, f"format: {FORMAT - 1} is not {FORMAT}; the run is of an older release"),
        ({"format": float(FORMAT)}, f"format: {FORMAT}.0 is not {FORMAT}"),
        ({"format": True}, f"format: True is not {FORMAT}"),
        ({"format": None}, f"format: None is not {FORMAT}"),
        ({"creator": "nobody"}, "creator: peer id 'nobody'"),
        ({"group": {}}, "not in canonical form"),
        ({"extra": 1}, "extra: unknown"),
        ({"method": {"preset": "muloco", "settings": {}}}, "method.settings.batch: missing"),
        (
            {"method": {"preset": "muloco", "settings": {**as_settings(PRESETS["muloco"]), "batch": 16.0}}},
            "settings.batch: 16.0",
        ),
        ({"method": {"preset": "muloco", "settings": {"chain": "x" * 1001}}}, "chain has 1001 characters"),
        ({"method": {"preset": "muloco", "settings": {str(n): 1 for n in range(201)}}}, "method.settings"),
    ],
)
def test_a_strangers_field_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSpec) as refused:
        parse_spec(msgpack.packb({**fields_of(changed("run")), **change}))
    assert message in str(refused.value)


def test_too_many_bytes_are_not_even_read() -> None:
    with pytest.raises(InvalidSpec, match=f"at most {SPEC_BYTES_MAX} are read"):
        parse_spec(bytes(SPEC_BYTES_MAX + 1))


def test_keys_out_of_order_are_refused() -> None:
    with pytest.raises(InvalidSpec, match="canonical"):
        parse_spec(msgpack.packb(dict(reversed(fields_of(changed("run")).items()))))


def test_only_the_creators_signature_counts() -> None:
    spec = changed("run")
    fact = spec.announced_by(ME)
    assert spec_of(SpecFact.decode(fact.encode(), spec.run_id)) == spec
    with pytest.raises(InvalidSpec, match="has signed it"):
        spec_of(SpecFact.by(OTHER, spec.canonical))
    with pytest.raises(AssertionError):
        spec.announced_by(OTHER)
