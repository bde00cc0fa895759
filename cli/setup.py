"""`peer setup`: install again what was missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent


@click.command(name="setup", short_help="Install again what was missing.")
@click.pass_context
def command(ctx: click.Context) -> None:
    """Set up this checkout again: installs what a first start could not, such as libp2p for `peer status`.

    \b
    Example:
      apt-get install gcc libgmp-dev python3-dev && peer setup
    """
    ctx.exit(subprocess.run([sys.executable, str(ROOT / "bin" / "environment.py"), "again"], check=False).returncode)
