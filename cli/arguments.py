"""The kinds of values that subcommands share: addresses, files, settings, and options that take several values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from cli.exit_codes import ExitCode
from peer.options import check_address, check_place

STDOUT = Path("-")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_SETTING = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)*")


class NotFound(click.UsageError):
    """A file or folder that is named on the command line and is not there."""

    exit_code = ExitCode.NOT_FOUND


class Command(click.Command):
    """A command whose repeatable options also take several values at once: `--data a b` is `--data a --data b`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        flags = {flag for option in self.params if option_repeats(option) for flag in option.opts}
        return super().parse_args(ctx, repeated(args, flags))


def option_repeats(option: click.Parameter) -> bool:
    return isinstance(option, click.Option) and option.multiple


def repeated(arguments: Sequence[str], flags: Collection[str]) -> list[str]:
    """`--data a b` becomes `--data a --data b` for each of `flags`, up to the next option."""
    result: list[str] = []
    current, values = "", 0
    for position, argument in enumerate(arguments):
        if argument == "--":
            return result + list(arguments[position:])
        if argument.startswith("-") and len(argument) > 1:
            flag, equals, _ = argument.partition("=")
            current, values = (flag, len(equals)) if flag in flags else ("", 0)
        elif current:
            if values:
                result.append(current)
            values += 1
        result.append(argument)
    return result


class Place(click.ParamType[str]):
    """Where a peer can be reached, with or without its id."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_place(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class Address(click.ParamType[str]):
    """A multiaddress with a peer id at its end."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            check_address(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        return str(value)


class ExistingPath(click.ParamType[Path]):
    """A file or a folder that is there."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.exists():
            named = f"{param.opts[0]} {value}" if isinstance(param, click.Option) else value
            raise NotFound(f"{named}: there is no such file or folder (relative to {Path.cwd()})", ctx)
        return path


class OutputFile(click.ParamType[Path]):
    """A file to be written in the end, in a folder that is there from the start; `-` is stdout."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(value)
        if not path.parent.is_dir():
            named = param.opts[0] if param else ""
            raise NotFound(f"{named} {value}: there is no folder {path.parent}", ctx)
        return path


class Setting(click.ParamType[tuple[str, str]]):
    """`KEY=VALUE`, where the method knows the key and the type of its value."""

    name = "key=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):  # click converts what has been converted again.
            return value
        key, equals, text = str(value).partition("=")
        if not equals or not text or not _SETTING.fullmatch(key):
            self.fail(f"{value!r} is not KEY=VALUE, such as inner_steps=10 or outer.lr=0.7", param, ctx)
        return key, text


class Finite(click.FloatRange):
    """A float in a range, which NaN and infinity never are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number


def data_option(function: _Function) -> _Function:
    return click.option(
        "--data",
        multiple=True,
        type=ExistingPath(),
        metavar="PATH...",
        help="Text to train on: files, and folders with all in them. Default: what the run says.",
    )(function)


def peer_options(function: _Function) -> _Function:
    """What `start` and `join` have in common."""
    for option in reversed(
        (
            data_option,
            click.option("--device", default="auto", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps."),
            click.option(
                "--precision",
                type=click.Choice(("auto", "fp32", "bf16")),
                default="auto",
                help="Of the products in training. auto: bf16 on a CUDA device that has it.",
            ),
            click.option(
                "--micro-batch",
                type=click.IntRange(min=0),
                default=0,
                metavar="N",
                help="So many sequences at once, where memory is short; the same steps. 0: the whole batch.",
            ),
            click.option(
                "--name",
                default="",
                metavar="NAME",
                show_default=False,
                help="What others see beside your peer id. Default: nothing.",
            ),
            click.option(
                "--linger",
                "linger_seconds",
                type=Finite(min=0),
                default=0.0,
                metavar="SECONDS",
                help="Stay at least so long after the run's goal, for peers that are late.",
            ),
            click.option(
                "--json-events", is_flag=True, help="Print one JSON object a line on stdout, for programs, not people."
            ),
        )
    ):
        function = option(function)
    return function


def listening_options(function: _Function) -> _Function:
    """Where a peer listens and keeps its state."""
    for option in reversed(
        (
            click.option("--host", "--listen", default="0.0.0.0", metavar="IP", help="The address to listen on."),
            click.option(
                "--port",
                default=0,
                type=click.IntRange(0, 65535),
                metavar="PORT",
                help="The TCP port to listen on; 0: any free one. Choose one to forward it in a router or a firewall.",
            ),
            click.option(
                "--announce",
                multiple=True,
                type=Place(),
                metavar="ADDR...",
                help="Where others can reach you, if not where you think: the outer address of a forwarded port.",
            ),
            click.option(
                "--folder",
                type=click.Path(path_type=Path),
                metavar="DIR",
                help="Identity, progress and remembered peers: the same folder is the same peer, and goes on where it "
                "stopped. Default: a folder of its own under ~/.peer (or $PEER_HOME).",
            ),
        )
    ):
        function = option(function)
    return function


def initial_peers_option(*, required: bool, help: str) -> Callable[[_Function], _Function]:
    return click.option(
        "--initial-peers", multiple=True, type=Address(), required=required, metavar="ADDR...", help=help
    )
