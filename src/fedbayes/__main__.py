"""`python -m fedbayes` is the command line."""

from fedbayes.cli import main

main()
