"""How large the numbers of a 16-bit activation may be: as large as those that read them can bear.

A sum of products has 32 bits, whatever the activations. What they use of them, the weights lack: with many products in
a sum both have about as many steps as leave their errors alike; with few, as in a depthwise layer, all 16 bits are
used. SiLU and GELU bend whole numbers of 16 bits, which must reach to where they are 0 or x.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from tilewise.quantize.calibration import Calibration
from tilewise.quantize.forms import families, shared_parameters
from tilewise.quantize.graph import Graph
from tilewise.quantize.parameters import USUAL, WIDEST, AffineParameters
from tilewise.quantize.reference import BENT_TO

_REACH = 1.5  # farther than bytes: so fine are they that what saturates would be most of their error
_ALIKE = 20.0  # where errors of activations, whose largest is some twenty times the usual, and of weights are alike


def wide_parameters(graph: Graph, calibration: Calibration, wide: Collection[int]) -> dict[int, AffineParameters]:
    """The parameters of every family that is to have 16 bits, by its first step."""
    family_of, parameters = families(graph), shared_parameters(graph, calibration)
    most = dict.fromkeys(wide, WIDEST)
    for index, step in enumerate(graph.steps):
        read = family_of[step.inputs[0]] if step.inputs else -1
        if read in most and step.weight is not None and step.kind in ("conv", "linear"):
            products = math.prod(step.weight.shape[1:])
            most[read] = min(most[read], int(math.sqrt(_ALIKE * 2**31 / max(products, 1))))
        if family_of[index] in most and step.activation in BENT_TO:
            p = parameters[index]
            reach = _REACH * max(p.zero_point, 255 - p.zero_point) * p.scale
            bent = int(min(0.99 * reach * WIDEST / BENT_TO[step.activation], WIDEST))
            most[family_of[index]] = min(most[family_of[index]], max(bent, USUAL))
    return {f: parameters[f].widened(_REACH, max(size, USUAL)) for f, size in most.items()}
