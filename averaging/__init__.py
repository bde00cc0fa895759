"""Agree with a group on one set of contributions: groups, exchange, commit, merge, the log."""
