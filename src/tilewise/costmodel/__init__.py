"""The learned cost model: measured kernels in, ranked tile configurations out."""

from tilewise.costmodel.dataset import Dataset, load_dataset
from tilewise.costmodel.hlo import featurize_hlo
from tilewise.costmodel.kernel import Kernel

__all__ = ["Dataset", "Kernel", "featurize_hlo", "load_dataset"]
