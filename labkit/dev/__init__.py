"""What the Makefile runs: the installer and the suite of checks. Standard library only; left out of the package."""
