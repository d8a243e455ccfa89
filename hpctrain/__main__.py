"""`python -m hpctrain`: the command line, where the script is not on the path."""

from hpctrain.cli.start import main

if __name__ == "__main__":
    main()
