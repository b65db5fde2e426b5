"""Other tools' tuning logs as kernel files: every format is a stream of `Record`, and one builder writes them."""

from tilewise.costmodel.importers.build import Imported, import_logs
from tilewise.costmodel.importers.description import Description, read_description
from tilewise.costmodel.importers.formats import FORMATS
from tilewise.costmodel.importers.record import Record

__all__ = ["FORMATS", "Description", "Imported", "Record", "import_logs", "read_description"]
