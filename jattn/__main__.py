"""`python -m jattn` is the `jattn` command."""

from jattn.cli import app

if __name__ == "__main__":
    app()
