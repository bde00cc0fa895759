"""Methods as settings: presets are valid, settings go there and back, errors say what is wrong and what is allowed."""

from __future__ import annotations

import pytest

from optimizers.presets import PRESETS, Method, as_settings, method_from_settings


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_is_valid_and_its_settings_give_it_back(preset: str) -> None:
    method = method_from_settings(preset, {})
    assert method == PRESETS[preset]
    assert method_from_settings("distro", as_settings(method)) == method
    as_text = {name: str(value) for name, value in as_settings(method).items()}
    assert method_from_settings("allreduce", as_text) == method


def test_settings_are_sorted_and_flat() -> None:
    settings = as_settings(PRESETS["distro"])
    assert list(settings) == sorted(settings)
    assert {"outer.lr", "inner.kind", "schedule.warmup", "chain", "error_feedback"} <= settings.keys()
    assert all(isinstance(value, (str, int, float, bool)) for value in settings.values())


def test_overrides_may_be_text_values_or_nested() -> None:
    expected = method_from_settings("diloco", {"outer.lr": 0.5, "inner_steps": 7, "error_feedback": True})
    assert method_from_settings("diloco", {"outer.lr": "0.5", "inner_steps": "7", "error_feedback": "true"}) == expected
    assert method_from_settings("diloco", {"outer": {"lr": 0.5}, "inner_steps": 7, "error_feedback": True}) == expected
    assert expected.outer.lr == 0.5
    assert expected.inner == PRESETS["diloco"].inner
    assert isinstance(method_from_settings("diloco", {"outer.lr": 1}).outer.lr, float)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"outer.speed": 1}, "outer.speed = 1: there is no such setting; there are batch, blend, chain"),
        ({"outer": 1}, "outer = 1: there is no such setting"),
        ({"outer.lr": "fast"}, "outer.lr = 'fast': must be a finite number"),
        ({"outer.lr": float("nan")}, "outer.lr = nan: must be a finite number"),
        ({"outer.lr": "1e400"}, "outer.lr = '1e400': must be a finite number"),
        ({"outer.lr": True}, "outer.lr = True: must be a finite number"),
        ({"inner_steps": 1.5}, "inner_steps = 1.5: must be a whole number"),
        ({"inner_steps": "inf"}, "inner_steps = 'inf': must be a whole number"),
        ({"inner_steps": 0}, "inner_steps = 0: must lie between 1 and"),
        ({"batch": 10**9}, "batch = 1000000000: must lie between 1 and"),
        ({"error_feedback": "perhaps"}, "error_feedback = 'perhaps': must be true or false"),
        ({"chain": 7}, "chain = 7: must be text"),
        ({"chain": ""}, "chain has 0 characters"),
        ({"merge": "median"}, "merge = 'median': must be one of mean, mean_of_senders, rda, weighted_mean"),
        ({"fragments": 0}, "fragments = 0: must lie between 1 and 64"),
        ({"fragments": 3}, "fragments = 3: must divide inner_steps = 20; inner_steps = 21 would do"),
        ({"fragment_by": "hash"}, "fragment_by = 'hash': must be one of size, layers"),
        ({"overlap": 21}, "overlap = 21: must lie between 0 and inner_steps = 20"),
        ({"overlap": -1}, "overlap = -1: must lie between 0 and"),
        ({"overlap": 5, "fragments": 4}, "overlap = 5: must lie between 0 and inner_steps / fragments - 1 = 4"),
        ({"blend": 1.0}, "blend = 1.0: must be at least 0 and below 1"),
        ({"inner.kind": "none", "fragments": 2}, "fragments = 2, blend = 0.0: must be 1 and 0 where inner.kind"),
        ({"mode": "gossip", "outer.kind": "sgd", "overlap": 1}, "overlap = 1: must be 0 where mode is 'gossip'"),
        ({"residual_decay": 1.5}, "residual_decay = 1.5: must lie between 0 and 1"),
        ({"schedule.kind": "step"}, "schedule.kind = 'step': must be one of constant, cosine, wsd"),
        ({"schedule.warmup": -1}, "schedule.warmup = -1"),
        ({"inner.kind": "lion"}, "inner.kind = 'lion': must be one of none, sgd, adamw, muon"),
    ],
)
def test_a_wrong_setting_names_itself_its_value_and_what_is_allowed(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        method_from_settings("diloco", overrides)


def test_an_unknown_preset_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"preset = 'demo': must be one of allreduce, decoupled-diloco, diloco"):
        method_from_settings("demo", {})


def test_the_default_method_is_valid() -> None:
    Method().validate()
