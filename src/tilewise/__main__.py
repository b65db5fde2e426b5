"""`python -m tilewise`: the same as the command `tilewise`, where its script is not on the path."""

from tilewise.cli.app import main

if __name__ == "__main__":
    main()
