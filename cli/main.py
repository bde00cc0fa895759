"""The `peer` command: its subcommands, and how errors become one sentence and an exit code."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Sequence

import click

from cli import bootstrap, compare, identity, join, setup, simulate, start, status
from cli.exit_codes import MEANINGS, ExitCode, explained
from peer.version import VERSION

DEBUG = "--debug"
EPILOG = "\b\nExit codes:\n" + "\n".join(f"  {code:>3}  {meaning}" for code, meaning in MEANINGS.items())


class Commands(click.Group):
    """A group that names the nearest command when there is none of a name."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known:
            near = difflib.get_close_matches(args[0], known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the commands are {', '.join(known)}"
            ctx.fail(f"There is no command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)  # In the order below, not by the alphabet.


@click.group(
    cls=Commands,
    name="peer",
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100, "show_default": True},
)
@click.version_option(VERSION, message="peer %(version)s")
@click.option(DEBUG, is_flag=True, help="Show where an error came from. May stand anywhere on the line.")
def peer(debug: bool) -> None:
    """Train one model together with others, over any network, without a server.

    \b
    Try it on this machine alone:      peer simulate --peers 4 --rounds 10
    Start a run that others can join:  peer start examples/run.toml
    Join one (start prints the line):  peer join --initial-peers /ip4/203.0.113.7/tcp/31337/p2p/12D3Koo...
    """


for command in (
    simulate.command,
    compare.command,
    start.command,
    join.command,
    bootstrap.command,
    status.command,
    identity.command,
    setup.command,
):
    peer.add_command(command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments` (those of the process by default) and returns the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        result = peer.main([each for each in given if each != DEBUG], prog_name="peer", standalone_mode=False)
        sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        return complain("interrupted", ExitCode.INTERRUPTED)
    except (BrokenPipeError, SystemExit):  # click makes an exit of it, and of nothing else here.
        sys.stdout = None  # Who read our output has gone, as in `peer status | head`: nothing to complain about.
        return ExitCode.OK
    except (Exception, KeyboardInterrupt) as error:
        if DEBUG in given:
            traceback.print_exc()
        code, text = explained(error)
        return complain(text, code)
    return result if isinstance(result, int) else ExitCode.OK


def complain(text: str, code: ExitCode) -> ExitCode:
    click.echo(f"peer: {text}", err=True)
    return code
