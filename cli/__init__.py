"""The subcommands of `peer`: parse, call, print."""
