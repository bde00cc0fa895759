"""Every training method as settings of one shape: the `Method`, the presets, and how settings override them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from optimizers.gossip import GOSSIP_OUTERS, MODES, GossipSettings, variance_factor
from optimizers.inner import InnerSettings
from optimizers.outer import OuterSettings
from optimizers.schedule import Schedule

MERGE_NAMES = ("mean", "mean_of_senders", "rda", "weighted_mean")
Setting = str | int | float | bool
_Settings = TypeVar("_Settings")

INNER_STEPS_MAX = 100_000
BATCH_MAX = 65_536
FRAGMENTS_MAX = 64
FRAGMENT_RULES = ("size", "layers")
CHAIN_CHARACTERS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Method:
    """One round: H inner steps, `wanted = decay * residual + delta`, compress, merge, one outer step.

    `schedule` moves the inner learning rate, and the outer one where there is no inner optimiser.
    `chain` names a compressor as `compression` reads it: transform, selection, values (`bits(1)`: signs).
    `batch` is in sequences, a peer and inner step.
    `mode` is `consensus` (one chain of rounds, one anchor for all) or `gossip` (every peer has a replica of its own,
    and a round is a meeting with `gossip.group` - 1 others).
    Without `error_feedback` what a committed packet left out is dropped; what missed its round is kept in any case.
    `fragments`: a round concerns one of so many parts of the model, in turn, and comes after H / fragments inner steps;
    `fragment_by` says how the parts are chosen (`size`: equal sizes; `layers`: every n-th layer).
    `overlap`: inner steps of the next round that are done while a round is in the air. They begin at the weights that
    the peer had when it made its contribution (without inner optimiser: where its contribution alone would lead), and
    what they do is kept when the round is committed.
    `blend`: where local weights go then: that far from the anchor towards what they were (Streaming DiLoCo's alpha); at
    0 all that is left of them is what was done since the contribution.
    """

    mode: str = "consensus"
    inner: InnerSettings = field(default_factory=InnerSettings)
    outer: OuterSettings = field(default_factory=OuterSettings)
    schedule: Schedule = field(default_factory=Schedule)
    gossip: GossipSettings = field(default_factory=GossipSettings)
    inner_steps: int = 1
    batch: int = 16
    fragments: int = 1
    fragment_by: str = "size"
    overlap: int = 0
    blend: float = 0.0
    error_feedback: bool = False
    residual_decay: float = 1.0
    chain: str = "identity all fp32"
    merge: str = "mean"

    def validate(self) -> None:
        """Raises `ValueError` naming the setting, its value and what is allowed."""
        self.inner.validate()
        self.outer.validate()
        self.schedule.validate()
        self._validate_mode()
        for name, highest in (("inner_steps", INNER_STEPS_MAX), ("batch", BATCH_MAX)):
            if not 1 <= getattr(self, name) <= highest:
                raise ValueError(f"{name} = {getattr(self, name)}: must lie between 1 and {highest}")
        self._validate_streaming()
        if not 0 <= self.residual_decay <= 1:
            raise ValueError(f"residual_decay = {self.residual_decay}: must lie between 0 and 1")
        if not 0 < len(self.chain) <= CHAIN_CHARACTERS_MAX:
            raise ValueError(f"chain has {len(self.chain)} characters: must be 1 to {CHAIN_CHARACTERS_MAX}")
        if self.merge not in MERGE_NAMES:
            raise ValueError(f"merge = {self.merge!r}: must be one of {', '.join(MERGE_NAMES)}")

    @property
    def round_steps(self) -> int:
        """Inner steps of one round."""
        return self.inner_steps // self.fragments

    def _validate_streaming(self) -> None:
        if not 1 <= self.fragments <= FRAGMENTS_MAX:
            raise ValueError(f"fragments = {self.fragments}: must lie between 1 and {FRAGMENTS_MAX}")
        if self.inner_steps % self.fragments:
            raise ValueError(
                f"fragments = {self.fragments}: must divide inner_steps = {self.inner_steps}; "
                f"inner_steps = {-(-self.inner_steps // self.fragments) * self.fragments} would do"
            )
        if self.fragment_by not in FRAGMENT_RULES:
            raise ValueError(f"fragment_by = {self.fragment_by!r}: must be one of {', '.join(FRAGMENT_RULES)}")
        highest = self.round_steps if self.fragments == 1 else self.round_steps - 1
        if not 0 <= self.overlap <= highest:
            below = "inner_steps" if self.fragments == 1 else "inner_steps / fragments - 1"
            raise ValueError(f"overlap = {self.overlap}: must lie between 0 and {below} = {highest}")
        if not 0 <= self.blend < 1:
            raise ValueError(f"blend = {self.blend}: must be at least 0 and below 1")
        if self.inner.kind == "none" and (self.fragments > 1 or self.blend):
            raise ValueError(
                f"fragments = {self.fragments}, blend = {self.blend}: must be 1 and 0 where inner.kind is 'none', "
                "as there are no local weights between rounds"
            )

    def _validate_mode(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode = {self.mode!r}: must be one of {', '.join(MODES)}")
        if self.mode != "gossip":
            return
        self.gossip.validate()
        for name, only in (("fragments", 1), ("overlap", 0), ("blend", 0.0)):
            if getattr(self, name) != only:
                raise ValueError(f"{name} = {getattr(self, name)}: must be {only} where mode is 'gossip'")
        if not 0 < len(self.gossip.chain) <= CHAIN_CHARACTERS_MAX:
            raise ValueError(
                f"gossip.chain has {len(self.gossip.chain)} characters: must be 1 to {CHAIN_CHARACTERS_MAX}"
            )
        if self.outer.kind not in GOSSIP_OUTERS:
            kinds = ", ".join(GOSSIP_OUTERS)
            raise ValueError(f"outer.kind = {self.outer.kind!r}: must be one of {kinds} where mode is 'gossip'")
        momentum = self.outer.momentum if self.outer.kind == "heavyball" else 0.0
        if not variance_factor(self.gossip.group, self.gossip.mixing, momentum) < 1:
            raise ValueError(
                f"gossip.mixing = {self.gossip.mixing}: replicas would never come closer with outer.momentum = "
                f"{momentum} in groups of {self.gossip.group}; lower one of the two"
            )
        if self.inner.kind == "none":
            raise ValueError("inner.kind = 'none': where mode is 'gossip' peers need an inner optimiser")
        if self.merge in ("mean_of_senders", "rda"):
            raise ValueError(f"merge = {self.merge!r}: where mode is 'gossip' it must be mean or weighted_mean")


# Chosen for runs of about 80 inner steps with benchmarks/tune.py on gpt-nano, 4 peers: docs/RESULTS.md has every point
# that was tried. Such a run has 4 to 16 outer steps: for thousands of them the papers' .7 and .9 (Nesterov) are better
# than .9 and .3, and lower inner learning rates.
PRESETS = {
    "allreduce": Method(
        inner=InnerSettings(kind="none", lr=1.0),
        outer=OuterSettings(kind="adamw", lr=2e-2),
        schedule=Schedule(warmup=1),
        chain="identity all fp32",
    ),
    "distro": Method(
        inner=InnerSettings(kind="none", lr=1.0),
        outer=OuterSettings(kind="sign", lr=1e-2),
        schedule=Schedule(warmup=4),
        error_feedback=True,
        residual_decay=0.99,
        chain="dct(64) topk(20/4096) bits(1)",
    ),
    "decoupled-diloco": Method(
        inner=InnerSettings(kind="adamw", lr=2e-2),
        outer=OuterSettings(kind="nesterov", lr=0.9, momentum=0.3),
        schedule=Schedule(warmup=1),
        inner_steps=20,
        fragments=4,
        overlap=4,
        error_feedback=True,
        merge="rda",
        chain="identity all bits(4)",
    ),
    "diloco": Method(
        inner=InnerSettings(kind="adamw", lr=2e-2),
        outer=OuterSettings(kind="nesterov", lr=0.9, momentum=0.3),
        schedule=Schedule(warmup=0),
        inner_steps=20,
        merge="weighted_mean",
        chain="identity all fp16",
    ),
    "muloco": Method(
        inner=InnerSettings(kind="muon", lr=3e-2),
        outer=OuterSettings(kind="nesterov", lr=0.9, momentum=0.3),
        schedule=Schedule(warmup=1),
        inner_steps=20,
        error_feedback=True,
        residual_decay=0.9,
        chain="identity all bits(2)",
    ),
    "noloco": Method(
        mode="gossip",
        inner=InnerSettings(kind="adamw", lr=2e-2),
        outer=OuterSettings(kind="heavyball", lr=0.7, momentum=0.3),
        gossip=GossipSettings(group=2, mixing=0.7, chain="identity all fp16"),
        schedule=Schedule(warmup=0),
        inner_steps=20,
        chain="identity all fp16",
    ),
    "sparseloco": Method(
        inner=InnerSettings(kind="adamw", lr=2e-2),
        outer=OuterSettings(kind="sgd", lr=1.0),
        schedule=Schedule(warmup=1),
        inner_steps=5,
        error_feedback=True,
        residual_decay=0.95,
        chain="identity topk(64/4096) bits(2)",
    ),
    "streaming-diloco": Method(
        inner=InnerSettings(kind="adamw", lr=2e-2),
        outer=OuterSettings(kind="nesterov", lr=0.9, momentum=0.3),
        schedule=Schedule(warmup=1),
        inner_steps=20,
        fragments=4,
        overlap=2,
        merge="weighted_mean",
        chain="identity all e3m0",
    ),
}


def method_from_settings(preset: str, overrides: Mapping[str, object]) -> Method:
    """The preset with some settings changed, validated.

    `overrides` maps names as `as_settings` gives them (`outer.lr`), or nests them (`{"outer": {"lr": ...}}`), to
    values or their text. Raises `ValueError` naming the setting, the value and what is allowed.
    """
    if preset not in PRESETS:
        raise ValueError(f"preset = {preset!r}: must be one of {', '.join(sorted(PRESETS))}")
    settings = as_settings(PRESETS[preset])
    for name, value in flattened(overrides).items():
        if name not in settings:
            raise ValueError(f"{name} = {value!r}: there is no such setting; there are {', '.join(sorted(settings))}")
        settings[name] = converted(name, value, type(settings[name]))
    method = _method_of(settings)
    method.validate()
    return method


def as_settings(method: Method) -> dict[str, Setting]:
    """All settings by dotted name, sorted: equal methods give equal mappings, and the mapping gives the method back."""
    nested = dataclasses.asdict(method)
    flat = flattened(nested)
    return {name: converted(name, flat[name], type(flat[name])) for name in sorted(flat)}


def flattened(settings: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested mappings as one with dotted names."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def converted(name: str, value: object, kind: type) -> Setting:
    """`value`, or what its text says, as `kind`; raises `ValueError` if it is not one."""
    text = str(value).strip()
    if kind is str and isinstance(value, str):
        return value
    if kind is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind in (int, float) and not isinstance(value, bool):
        try:
            number = float(text)
            if kind is float and number - number == 0:
                return number
            if kind is int and number == int(number):
                return int(number)
        except (ValueError, OverflowError):
            pass
    expected = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise ValueError(f"{name} = {value!r}: must be {expected}")


def _method_of(settings: Mapping[str, Setting]) -> Method:
    def part(name: str) -> dict[str, object]:
        return {key.split(".")[1]: value for key, value in settings.items() if key.startswith(f"{name}.")}

    whole: dict[str, object] = {key: value for key, value in settings.items() if "." not in key}
    nested: dict[str, object] = {
        "inner": built(InnerSettings, part("inner")),
        "outer": built(OuterSettings, part("outer")),
        "schedule": built(Schedule, part("schedule")),
        "gossip": built(GossipSettings, part("gossip")),
    }
    return built(Method, whole | nested)


def built(kind: type[_Settings], values: Mapping[str, object]) -> _Settings:
    return kind(**values)
