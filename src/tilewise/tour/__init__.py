"""The tour: a demonstration of the package, measured on this machine with the data that ships with it."""

from tilewise.tour.guide import Tour, take_tour
from tilewise.tour.stops import Bars, Stop, Table

__all__ = ["Bars", "Stop", "Table", "Tour", "take_tour"]
