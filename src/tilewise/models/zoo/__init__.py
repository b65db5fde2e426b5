"""Well-known networks with random weights (nothing is downloaded). Each is a plain module that exports to ONNX.

`ZOO` maps names to functions that build the networks; `resnet50` and `mobilenet_v2` are typical ones.
"""

from collections.abc import Callable
from typing import Any

from tilewise.models.zoo.attention import bert_small, vit_tiny
from tilewise.models.zoo.concat import densenet121, shufflenet_v2, squeezenet, unet
from tilewise.models.zoo.mobile import efficientnet_b0, mobilenet_v2, mobilenet_v3
from tilewise.models.zoo.resnet import resnet18, resnet50, resnext50

ZOO: dict[str, Callable[..., Any]] = {
    build.__name__: build
    for build in (
        resnet18,
        resnet50,
        resnext50,
        mobilenet_v2,
        mobilenet_v3,
        efficientnet_b0,
        shufflenet_v2,
        densenet121,
        squeezenet,
        unet,
        vit_tiny,
        bert_small,
    )
}

__all__ = ["ZOO", *ZOO]
