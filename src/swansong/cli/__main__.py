"""`python -m swansong.cli`."""

from swansong.cli.main import run

if __name__ == "__main__":
    run()
