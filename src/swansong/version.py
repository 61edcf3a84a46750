"""The release, in one place."""

VERSION = "0.1.0"
