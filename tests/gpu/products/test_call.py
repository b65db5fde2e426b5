"""Calls of `matmul` and `linear`: records, prepared launches, the custom operator and its gradients, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tilewise.errors import ConfigurationError, UnavailableError
from tilewise.gpu.families.family import Launch
from tilewise.gpu.products import call
from tilewise.gpu.products.dispatch import PreparedLaunch, ProductChoice, ProductDispatcher
from tilewise.gpu.products.family import ProductFamily, cublas_call, workspace_sizes
from tilewise.gpu.products.roofline import CUBLAS
from tilewise.store.problem import Problem

torch = pytest.importorskip("torch")


class _Cuda:
    """The parts of `torch.cuda` that a workspace needs, on a CPU."""

    capturing = False

    def is_current_stream_capturing(self) -> bool:
        return self.capturing


class _Dispatcher:
    """A dispatcher whose kernel is PyTorch's product, or fails."""

    def __init__(self, broken: bool = False) -> None:
        self.broken, self.torch = broken, SimpleNamespace(cuda=_Cuda())
        self.choices: dict[Problem, ProductChoice] = {}
        self.problems: list[Problem] = []
        self.runs = 0

    def choose(self, problem: Problem, measure: bool | str) -> ProductChoice:
        self.problems.append(problem)
        return ProductChoice(ProductFamily().configs(problem)[1], bool(measure), 2.0)

    def choose_invariant(self, problem: Problem) -> Any:
        if problem.size("n") == 1:
            raise LookupError("no kernel can run the product")
        self.problems.append(problem)
        return ProductFamily().configs(problem)[1]

    def prepare(self, problem: Problem, operands: Any, config: Any) -> None:
        return None

    def run(self, problem: Problem, operands: Any, config: Any) -> None:
        self.runs += 1
        if self.broken:
            raise RuntimeError("launch failed")
        cublas_call(problem, operands)()


@pytest.fixture
def dispatcher(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Dispatcher]:
    """Serve the CPU's tensors as if they were on a GPU."""
    fake = _Dispatcher()
    monkeypatch.setattr(call, "_dispatcher", lambda: fake)
    monkeypatch.setattr(call, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    call._records.clear()
    yield fake
    call._records.clear()


def _matrices(dtype: Any = None) -> Any:
    dtype = dtype or torch.bfloat16
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator).to(dtype) for size in ((16, 64), (24, 64), (24,), (16, 24))]


def test_a_shape_is_decided_once(dispatcher: _Dispatcher) -> None:
    a, b, bias, _ = _matrices()
    for _ in range(3):
        assert torch.equal(call.matmul(a, b.T), a @ b.T)
        assert torch.equal(call.linear(a, b, bias), torch.addmm(bias, a, b.T))
    assert len(dispatcher.problems) == 2 and dispatcher.runs == 8  # a trial when each record is made
    call.matmul(a, b.T, measure=True)
    call.matmul(a, b.T, measure=True)
    assert len(dispatcher.problems) == 3
    assert torch.equal(call.linear(a.view(2, 8, 64), b), (a @ b.T).view(2, 8, 24))
    assert len(dispatcher.problems) == 3


def test_misaligned_operands_go_to_pytorch(dispatcher: _Dispatcher) -> None:
    storage, b = torch.randn(16 * 64 + 1).bfloat16(), _matrices()[1]
    aligned, misaligned = storage[:-1].view(16, 64), storage[1:].view(16, 64)
    call.matmul(aligned, b.T)
    runs = dispatcher.runs
    assert torch.equal(call.matmul(misaligned, b.T), misaligned @ b.T) and dispatcher.runs == runs


def test_a_batch_invariant_product_runs_on_a_kernel_or_is_refused(dispatcher: _Dispatcher) -> None:
    a, b, bias, _ = _matrices()
    for _ in range(2):
        assert torch.equal(call.linear(a, b, bias, batch_invariant=True), torch.addmm(bias, a, b.T))
    assert len(dispatcher.problems) == 1 and dispatcher.runs == 2
    # Misaligned operands are copied, so that the kernel can run.
    misaligned = torch.randn(16 * 64 + 1).bfloat16()[1:].view(16, 64)
    assert torch.equal(call.linear(misaligned, b, batch_invariant=True), misaligned @ b.T)
    assert dispatcher.runs == 3
    with pytest.raises(UnavailableError, match="bf16 or fp16"):
        call.matmul(a.double(), b.T.double(), batch_invariant=True)
    with pytest.raises(UnavailableError, match="no kernel can run"):
        call.matmul(a, b.T[:, :1].contiguous(), batch_invariant=True)
    with pytest.raises(ConfigurationError, match="without measuring"):
        call.matmul(a, b.T, measure=True, batch_invariant=True)
    a.requires_grad_()
    assert torch.equal(call.matmul(a, b.T, batch_invariant=True), a @ b.T) and dispatcher.runs == 4


def test_a_kernel_that_cannot_be_launched_is_replaced_by_cublas(dispatcher: _Dispatcher) -> None:
    dispatcher.broken = True
    a, b, *_ = _matrices()
    assert torch.equal(call.matmul(a, b.T), a @ b.T)
    assert [choice.config for choice in dispatcher.choices.values()] == [CUBLAS]


@pytest.mark.parametrize("needs", ["a", "b", "bias", "residual", "all"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_every_argument_gets_its_gradient(needs: str, activation: str | None) -> None:
    if needs == "residual" and activation is not None:
        return
    a, b, bias, residual = _matrices(torch.float64)
    use_residual = needs == "residual"
    tensors = {"a": a, "b": b.T.contiguous(), "bias": None if use_residual else bias}
    tensors["residual"] = residual if use_residual else None
    for name, tensor in tensors.items():
        if tensor is not None:
            tensor.requires_grad_(needs in (name, "all"))
    out = call.matmul(tensors["a"], tensors["b"], tensors["bias"], activation=activation, residual=tensors["residual"])
    reference = call._torch_product(activation)(*tensors.values())
    assert torch.allclose(out, reference)
    inputs = [tensor for tensor in tensors.values() if tensor is not None and tensor.requires_grad]
    upstream = torch.randn(out.shape, dtype=out.dtype)
    for ours, theirs in zip(torch.autograd.grad(out, inputs, upstream),
                            torch.autograd.grad(reference, inputs, upstream), strict=True):  # fmt: skip
        assert torch.allclose(ours, theirs)


def test_the_operator_is_correct_for_tracing_and_autograd() -> None:
    from tilewise.gpu.products.custom_op import product

    a, b, bias, residual = _matrices(torch.float32)
    for arguments in ((a, b.T, bias.requires_grad_(), None, "gelu"), (a.requires_grad_(), b.T, None, residual, None)):
        torch.library.opcheck(product, arguments)


def test_the_compiler_sees_one_operator() -> None:
    a, b, bias, _ = _matrices(torch.float32)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: call.linear(x, b, bias, activation="relu") + 1, backend=backend, fullgraph=True)
    assert torch.allclose(compiled(a), torch.relu(torch.addmm(bias, a, b.T)) + 1)
    assert sum("tilewise" in str(node.target) for node in graphs[0].graph.nodes) == 1
    with pytest.raises(ConfigurationError, match="needs a bias"):
        call.matmul(a.requires_grad_(), b.T, activation="gelu")


def _kernel(calls: list[Any], with_descriptors: bool) -> Any:
    """A compiled kernel as Triton 3.6 has it: its launcher is wrapped if an argument is a TMA descriptor."""
    launcher = lambda *arguments: calls.append(arguments)  # noqa: E731

    def inner(*arguments: Any) -> Any:
        return launcher(*arguments)

    run = SimpleNamespace(launch=inner if with_descriptors else launcher.__call__, launch_cooperative_grid=False,
                          launch_pdl=False, global_scratch_size=0)  # fmt: skip
    names = ["a", "b", "c", "bias", "residual", "partial_sums", "counters", "m", "n", "BLOCK_M"]
    return SimpleNamespace(
        run=run, function="function", packed_metadata="packed", metadata=SimpleNamespace(tensordesc_meta=["x", "y"]),
        binary=SimpleNamespace(constants=(("BLOCK_M", 64),)), src=SimpleNamespace(fn=SimpleNamespace(arg_names=names)),
    )  # fmt: skip


@pytest.mark.parametrize("transposed", [False, True])
def test_a_prepared_launch_passes_addresses_and_sizes_in_order(transposed: bool) -> None:
    calls: list[Any] = []
    launch = PreparedLaunch(_kernel(calls, False), Launch((5, 1, 1), (*("tensor",) * 7, 11, 12)), transposed)
    launch(100, 200, (300, 301, 302, 303, 304), 9)
    operands = (200, 100) if transposed else (100, 200)
    expected = (5, 1, 1, 9, "function", False, False, None, None, "packed", None, None, None, *operands)
    assert calls == [(*expected, 300, 301, 302, 303, 304, 11, 12, 64)]


def test_descriptors_are_built_once_per_address(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    built: list[Any] = []

    def make(argument: Any, metadata: Any) -> list[Any]:
        built.append((argument.base.data_ptr(), metadata))
        return [f"map of {argument.base.data_ptr()}", *argument.shape]

    driver = SimpleNamespace(make_tensordesc_arg=make)
    monkeypatch.setattr("tilewise.gpu.products.dispatch.importlib.import_module", lambda name: driver)
    descriptors = [SimpleNamespace(block_shape=[1], shape=[n], strides=[1], padding="zero") for n in (64, 32)]
    launch = PreparedLaunch(_kernel(calls, True), Launch((5, 1, 1), (*descriptors, *("tensor",) * 5, 11, 12)), False)
    for bytes_free in (100, 100, 108):
        launch(bytes_free, 200, (300, 301, 302, 303, 304), 9)
    assert built == [(100, "x"), (200, "y"), (108, "x")]
    assert calls[0][13:17] == ("map of 100", 64, "map of 200", 32) and calls[2][13] == "map of 108"


def test_only_split_k_has_a_workspace_and_a_graph_fills_no_counters() -> None:
    fills: list[int] = []

    def zeros(count: int, **_: Any) -> Any:
        fills.append(count)
        return torch.zeros(count, dtype=torch.int32)

    empty = lambda count, **_: torch.empty(count)  # noqa: E731
    fake = SimpleNamespace(cuda=_Cuda(), zeros=zeros, empty=empty, int32=None, float32=None)
    dispatcher = ProductDispatcher.__new__(ProductDispatcher)
    dispatcher.torch, dispatcher._workspaces, dispatcher.multiprocessors = fake, {}, 132
    dispatcher._counters, dispatcher._used_counters = None, 0
    problem = Problem.of("product", dtype="bf16", m=64, n=512, k=4096, layout="nt", epilogue="none")
    configs = ProductFamily().configs(problem)[1:]
    whole = next(config for config in configs if not workspace_sizes(problem, config)[1])
    split = next(config for config in configs if config.size("parts") > 1)
    assert dispatcher._workspace(problem, whole, 1, "out")["counters"] == "out" and not fills
    first = dispatcher._workspace(problem, split, 1, "out")
    assert dispatcher._workspace(problem, split, 1, "out")["counters"] is first["counters"] and len(fills) == 2
    fake.cuda.capturing = True
    captured = [dispatcher._workspace(problem, split, 1, "out")["counters"] for _ in range(2)]
    assert len(fills) == 2 and captured[0].data_ptr() != captured[1].data_ptr() and not captured[0].any()
