"""`python -m terrine`."""

from terrine.cli import main

if __name__ == "__main__":
    main()
