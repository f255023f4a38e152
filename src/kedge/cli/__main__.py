"""`python -m kedge.cli`: the command line without an installed script."""

from kedge.cli.main import main

main()
