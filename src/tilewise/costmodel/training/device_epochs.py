"""Whole epochs of TileRanker on a device: inputs, slates and losses are tensors there, and no step waits for the host.

All inputs of the train split are copied to the device once: graphs padded to the largest, configurations of a kernel
sorted by runtime. A step gathers its kernels and their slates by index, and the whole step (gather, forward pass, loss,
backward pass, clipping, Adam, moving average) is captured once as a CUDA graph and replayed. The host only enqueues
indices and learning rates; it reads the loss once per epoch. Without CUDA the same code runs step by step, which tests
compare with the batches of `sampling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewise.costmodel.features.inputs import ModelInputs
from tilewise.costmodel.training.sampling import InputCache, slate_positions

if TYPE_CHECKING:
    from tilewise.costmodel.training.loop import TrainingRun

MAX_BYTES = 16 << 30  # of a split on the device; larger collections are trained batch by batch
_VALIDATION_SLOTS = 1 << 16  # configurations of one forward pass, which takes some 200 MB; arbitrary
_WARM_UP_STEPS = 3  # before a capture, so that libraries have allocated their workspaces


@dataclass(frozen=True, eq=False)
class PaddedAdjacency:
    """Dense matrices (K, N, N) of the graphs of a batch."""

    matrices: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        """Multiply each graph's matrix by its nodes' values: x and the result are (K * N, width)."""
        nodes = x.view(len(self.matrices), -1, x.shape[-1])
        return torch.bmm(self.matrices.to(x.dtype), nodes).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class PaddedPooling:
    """Sums over the real nodes of each graph; `slots` is (K, N)."""

    slots: Tensor

    def __matmul__(self, x: Tensor) -> Tensor:
        nodes = x.view(*self.slots.shape, x.shape[-1])
        return (nodes * self.slots[..., None].to(x.dtype)).sum(1)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """K kernels with N node slots and C configuration slots each; it has the attributes that TileRanker reads."""

    node: Tensor  # (K * N, F)
    opcode: Tensor  # (K * N,)
    node_slots: Tensor  # (K, N), False where a node is padding
    node_counts: Tensor  # (K,)
    matrices: Tensor  # (K, N, N): A + I divided by its row sums
    config: Tensor  # (K, C, D)
    mask: Tensor  # (K, C)
    target: Tensor  # (K, C)

    @property
    def normalized_adjacency(self) -> tuple[PaddedAdjacency, PaddedAdjacency]:
        return PaddedAdjacency(self.matrices), PaddedAdjacency(self.matrices.transpose(1, 2))

    @property
    def pooling(self) -> PaddedPooling:
        return PaddedPooling(self.node_slots)

    def pad_nodes(self, x: Tensor) -> Tensor:
        """Reshape node values (K * N, width) to (K, N, width); the nodes are padded already."""
        return x.view(*self.node_slots.shape, x.shape[-1])


@dataclass(frozen=True, eq=False)
class DeviceSplit:
    """A train split on the device. K kernels, R configurations in all."""

    node: Tensor  # (K, N, F)
    opcode: Tensor  # (K, N)
    node_slots: Tensor  # (K, N)
    matrices: Tensor  # (K, N, N)
    kernel_wide: Tensor  # (K, G)
    config: Tensor  # (R, D - G), for training each kernel's from fastest to slowest
    target: Tensor  # (R,)
    first: Tensor  # (K,): first configuration of each kernel
    counts: Tensor  # (K,): configurations of each kernel

    @classmethod
    def from_cache(cls, cache: InputCache, global_width: int, device: str, *, by_runtime: bool = True) -> DeviceSplit:
        """Copy the inputs of a whole split to the device; configurations are sorted by runtime if `by_runtime`.

        The first `global_width` columns, equal in all configurations of a kernel, are stored once per kernel.
        """
        inputs, targets = [], []
        # Sorted by runtime, the fastest configurations of a kernel are its first rows, which slates draw from.
        for index in range(len(cache)):
            target = cache.target(index)
            order = np.argsort(target, kind="stable") if by_runtime else np.arange(len(target))
            inputs.append(cache.rows(index, order))
            targets.append(target[order].astype(np.float32))
        most = max(len(kernel.node) for kernel in inputs)
        counts = np.array([len(target) for target in targets])
        tables = [_padded_graph(kernel, most) for kernel in inputs]
        columns = [torch.from_numpy(np.stack(column)).to(device) for column in zip(*tables, strict=True)]
        return cls(
            node=columns[0], opcode=columns[1], node_slots=columns[2], matrices=columns[3],
            kernel_wide=torch.from_numpy(np.stack([kernel.config[0, :global_width] for kernel in inputs])).to(device),
            config=torch.from_numpy(np.concatenate([kernel.config[:, global_width:] for kernel in inputs])).to(device),
            target=torch.from_numpy(np.concatenate(targets)).to(device),
            first=torch.from_numpy(np.cumsum(counts) - counts).to(device),
            counts=torch.from_numpy(counts).to(device),
        )  # fmt: skip

    @staticmethod
    def fits(cache: InputCache, width: int) -> bool:
        """Tell whether a split, its graphs padded to the largest, fits into the GPU memory set aside for it."""
        nodes = max(len(kernel.node_opcode) for kernel in cache.kernels)
        rows = sum(kernel.n_configs for kernel in cache.kernels)
        node_bytes = len(cache) * nodes * (nodes + cache.preparation.node_width + 3) * 4
        return bool(rows * width * 4 + node_bytes <= MAX_BYTES)

    def gather(self, kernels: Tensor, positions: Tensor) -> PaddedBatch:
        """Build a batch of `kernels` (K,) with the configurations at sorted `positions` (K, C)."""
        # Batches have one shape: slots beyond a kernel's configurations read its first one and are masked.
        mask = positions < self.counts[kernels, None]
        rows = self.first[kernels, None] + torch.where(mask, positions, 0)
        # The columns that describe the kernel are stored once and repeated for each configuration: (K, C, G).
        kernel_inputs = self.kernel_wide[kernels][:, None].expand(-1, positions.shape[1], -1)
        slots = self.node_slots[kernels]
        return PaddedBatch(
            node=self.node[kernels].flatten(0, 1),
            opcode=self.opcode[kernels].flatten(0, 1),
            node_slots=slots,
            node_counts=slots.sum(1),
            matrices=self.matrices[kernels],
            config=torch.cat([kernel_inputs, self.config[rows]], dim=-1),
            mask=mask,
            target=self.target[rows] * mask,
        )


def _padded_graph(kernel: ModelInputs, most: int) -> tuple[np.ndarray, ...]:
    """Return node inputs, opcodes, mask and normalized adjacency of one graph, padded to `most` nodes."""
    count = len(kernel.node)
    node = np.zeros((most, kernel.node.shape[1]), np.float32)
    node[:count] = kernel.node
    opcode = np.zeros(most, np.int64)
    opcode[:count] = kernel.opcode
    matrix = np.zeros((most, most), np.float32)
    # Rows are producers, columns consumers; repeated edges count.
    np.add.at(matrix, (kernel.edges[:, 1], kernel.edges[:, 0]), 1.0)
    # Self-loops, then the mean over neighbours instead of their sum.
    matrix[np.arange(count), np.arange(count)] += 1.0
    matrix /= np.maximum(matrix.sum(axis=1, keepdims=True), 1.0)
    return node, opcode, np.arange(most) < count, matrix


class DeviceEpochs:
    """Training steps of a run on the device; on CUDA they are replays of one captured graph."""

    def __init__(self, run: TrainingRun, capture: bool | None = None) -> None:
        """Copy the split to the device and allocate the inputs of a step."""
        self.run, settings = run, run.settings
        self.device = run.device
        self.split = DeviceSplit.from_cache(run.inputs, int(run.kwargs["global_width"]), run.device)
        self.capture = run.device.startswith("cuda") if capture is None else capture
        kernels = min(settings.batch, len(run.inputs))
        slots = min(settings.configs, int(self.split.counts.max()))
        self.kernels = torch.zeros(kernels, dtype=torch.long, device=run.device)
        self.positions = torch.zeros((kernels, slots), dtype=torch.long, device=run.device)
        self.total_loss = torch.zeros((), device=run.device)
        self._replay: Callable[[], None] | None = None

    @cached_property
    def _validation(self) -> DeviceSplit:
        width = int(self.run.kwargs["global_width"])
        return DeviceSplit.from_cache(self.run.validation, width, self.device, by_runtime=False)

    def validation_scores(self) -> list[npt.NDArray[np.float32]]:
        """Score the validation kernels, many at a time: one by one a GPU would wait for the host."""
        split, scores = self._validation, []
        counts = split.counts.tolist()
        slots = torch.arange(max(counts), device=self.device)
        group = max(1, _VALIDATION_SLOTS // len(slots))
        with torch.inference_mode():
            for start in range(0, len(counts), group):
                kernels = torch.arange(start, min(start + group, len(counts)), device=self.device)
                table = self.run.module(split.gather(kernels, slots.expand(len(kernels), -1))).float().cpu().numpy()
                scores += [row[: counts[i]] for i, row in zip(kernels.tolist(), table, strict=True)]
        return scores

    def epoch(self, seed: int, epoch: int) -> Iterator[None]:
        """Run the steps of an epoch; yields before each, when the caller may set the learning rate or stop."""
        generator = torch.Generator(device=self.device).manual_seed(seed * 1_000_003 + epoch)
        batch, total = len(self.kernels), len(self.run.inputs)
        order = torch.randperm(total, generator=generator, device=self.device)
        # Every step has the same shape, so the last batch is filled with the first kernels of the order.
        steps = -(-total // batch)
        order = torch.cat([order, order[: steps * batch - total]])
        # Draw the slates of all steps at once: a step then has twenty kernels less.
        uniform = torch.rand((len(order), self.positions.shape[1]), generator=generator, device=self.device)
        positions = slate_positions(self.split.counts[order], uniform, self.run.settings.fastest)
        self.total_loss.zero_()
        for step in range(steps):
            rows = slice(step * batch, (step + 1) * batch)
            self.kernels.copy_(order[rows])
            self.positions.copy_(positions[rows])
            yield
            self._take_step()

    def _take_step(self) -> None:
        """Run one training step, as a replay of the captured CUDA graph if there is one."""
        optimizer = self.run.optimizer
        optimizer.prepare_device_step()
        if not self.capture:
            self._step()
            return
        if self._replay is None:
            self._replay = self._capture_step()
        self._replay()

    def _capture_step(self) -> Callable[[], None]:
        """Capture a training step into a CUDA graph, restore the weights, and return the graph's replay."""
        optimizer, run = self.run.optimizer, self.run
        state = [optimizer.values, optimizer.mean, optimizer.square, self.total_loss]
        state += [optimizer.count] + ([run.average] if run.average is not None else [])
        before = [tensor.clone() for tensor in state]
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        # Warm up on a side stream, as CUDA graphs require (PyTorch's notes on CUDA semantics).
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        # Capture records the step without running it; afterwards the state from before the warm-up is restored.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        torch.set_float32_matmul_precision(precision)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        return lambda: graph.replay()

    def _step(self) -> None:
        """Run one training step by tensor operations alone, without reading a value on the host.

        A GPU takes a microsecond for each of some two hundred tiny operations, so their number is what counts. Hence
        products read float32 rounded to TF32: bfloat16 copies of weights and activations would be sixty operations
        more. Gradients of scores come with the loss, and those of weights go to the optimizer's vector in one copy.
        """
        run, batch = self.run, self.split.gather(self.kernels, self.positions)
        scores = self._scores(batch)
        loss, grad = run.loss.on_device(scores, batch.target, batch.mask)
        grads = torch.autograd.grad(scores, run.optimizer.parameters, grad)
        torch.cat([grad.flatten() for grad in grads], out=run.optimizer.grads)
        run.optimizer.device_step()
        if run.average is not None:
            # A plain mean of the first steps turns into an exponential moving average.
            weight = torch.clamp(1 / run.optimizer.count, min=1 - run.settings.average)
            run.average.lerp_(run.optimizer.values, weight)
        self.total_loss += loss

    def _scores(self, batch: PaddedBatch) -> Tensor:
        """Return the scores of the members in training, (K, members, C)."""
        scores: Tensor = self.run.module(batch)
        return scores
