"""`python -m terrine`."""

from terrine.cli import main

main()
