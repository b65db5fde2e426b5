"""The tour: what the package does, measured on this machine with the data that came with it."""

from tilewise.tour.guide import Tour, take_tour
from tilewise.tour.stops import Bars, Stop, Table

__all__ = ["Bars", "Stop", "Table", "Tour", "take_tour"]
