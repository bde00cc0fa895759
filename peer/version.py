"""The version of this software, as it tells others."""

VERSION = "0.1.0"
