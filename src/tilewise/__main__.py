"""Run the `tilewise` command as `python -m tilewise`, for installations whose scripts are not on the path."""

from tilewise.cli.app import main

if __name__ == "__main__":
    main()
