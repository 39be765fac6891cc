"""`python -m forkd` is the CLI."""

from forkd.cli.main import main

main()
