"""Importers of other tools' tuning logs: a reader per format yields `LogRecord`s; `import_logs` writes kernel files."""

from tilewise.costmodel.data.importers.build import FORMATS, ImportReport, import_logs
from tilewise.costmodel.data.importers.description import KernelDescription, read_description
from tilewise.costmodel.data.importers.record import LogRecord

__all__ = ["FORMATS", "ImportReport", "KernelDescription", "LogRecord", "import_logs", "read_description"]
