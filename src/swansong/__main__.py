"""`python -m swansong`."""

from swansong.cli.main import run

run()
