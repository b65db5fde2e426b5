"""Options that the commands about collections share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewise.cli.every import output_folder

Collection = Annotated[
    str, typer.Argument(help="A folder with train, valid and test, or an embedded collection's name.")
]
CacheDir = Annotated[Path | None, output_folder(help="Folder for the converted data (default: your cache folder).")]
Limit = Annotated[int | None, typer.Option(help="Read at most this many kernels of each split.", min=1)]
Fill = Annotated[
    list[str] | None,
    typer.Option(help="The value of a column that the collection lacks and the model reads, such as group=8."),
]
