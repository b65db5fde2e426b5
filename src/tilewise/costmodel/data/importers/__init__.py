"""Other tools' tuning logs as kernel files: every format is a stream of `Record`, and one builder writes them."""

from tilewise.costmodel.data.importers.build import Imported, import_logs
from tilewise.costmodel.data.importers.description import Description, read_description
from tilewise.costmodel.data.importers.formats import FORMATS
from tilewise.costmodel.data.importers.record import Record

__all__ = ["FORMATS", "Description", "Imported", "Record", "import_logs", "read_description"]
