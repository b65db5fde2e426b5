// Python bindings of EarlyJoinSAGE. All arrays, including every neighbour index, are checked before a kernel reads
// them.
#include "common/sage.h"

#include <string>

#include "bindings/arrays.h"

namespace tw {
namespace {

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

// Returns whether `starts` never falls and goes from 0 to `last`.
bool non_decreasing(const Longs& starts, int64_t last) {
  const int64_t n = static_cast<int64_t>(starts.shape(0));
  if (starts.data()[0] != 0 || starts.data()[n - 1] != last) return false;
  for (int64_t i = 1; i < n; ++i) {
    if (starts.data()[i] < starts.data()[i - 1]) return false;
  }
  return true;
}

// Returns whether all neighbours are nodes of their own graph, so that kernels need not check.
bool neighbours_in_range(const SageBatch& batch) {
  for (int64_t g = 0; g < batch.graphs; ++g) {
    const int64_t first = batch.first_node[g], last = batch.first_node[g + 1];
    for (int64_t e = batch.first_edge[first]; e < batch.first_edge[last]; ++e) {
      if (batch.neighbours[e] < 0 || batch.neighbours[e] >= last - first) return false;
    }
  }
  return true;
}

SageBatch checked_batch(const FloatArray& nodes, const FloatArray& configs, const FloatArray& bias,
                        const Longs& first_node, const Longs& first_edge, const Ints& neighbours) {
  check(nodes.ndim() == 2 && configs.ndim() == 3 && bias.ndim() == 1, "nodes, configs and bias have 2, 3 and 1 axes");
  check(first_node.ndim() == 1 && first_edge.ndim() == 1 && neighbours.ndim() == 1,
        "first_node, first_edge and neighbours have one axis");
  SageBatch batch;
  batch.graphs = static_cast<int64_t>(configs.shape(0));
  batch.slots = static_cast<int64_t>(configs.shape(1));
  batch.width = static_cast<int64_t>(bias.shape(0));
  const int64_t count = static_cast<int64_t>(nodes.shape(0)), twice = 2 * batch.width;
  check(batch.width >= 1 && static_cast<int64_t>(nodes.shape(1)) == twice &&
            static_cast<int64_t>(configs.shape(2)) == twice,
        "nodes and configs must be twice as wide as bias");
  check(static_cast<int64_t>(first_node.shape(0)) == batch.graphs + 1 &&
            static_cast<int64_t>(first_edge.shape(0)) == count + 1,
        "first_node must have graphs + 1 numbers and first_edge nodes + 1");
  check(non_decreasing(first_node, count) && non_decreasing(first_edge, static_cast<int64_t>(neighbours.shape(0))),
        "first_node and first_edge must rise from 0 to the number of nodes and of neighbours");
  batch.first_node = first_node.data();
  batch.first_edge = first_edge.data();
  batch.neighbours = neighbours.data();
  check(neighbours_in_range(batch), "a neighbour index is outside its graph");
  batch.nodes = nodes.data();
  batch.configs = configs.data();
  batch.bias = bias.data();
  return batch;
}

SageLayers checked_layers(const std::vector<FloatArray>& kernels, const std::vector<FloatArray>& biases,
                          int64_t width) {
  check(kernels.size() == biases.size(), "kernels and biases must have the same length");
  SageLayers layers;
  for (std::size_t l = 0; l < kernels.size(); ++l) {
    check(kernels[l].ndim() == 2 && static_cast<int64_t>(kernels[l].shape(0)) == 2 * width &&
              static_cast<int64_t>(kernels[l].shape(1)) == width && biases[l].ndim() == 1 &&
              static_cast<int64_t>(biases[l].shape(0)) == width,
          "a layer's kernel is (2 width, width) and its bias (width)");
    layers.kernels.push_back(kernels[l].data());
    layers.biases.push_back(biases[l].data());
  }
  return layers;
}

// Returns the pooled nodes (graphs, slots, width), with `keep` also the activations for the backward pass.
nb::object forward(const FloatArray& nodes, const FloatArray& configs, const FloatArray& bias,
                   const std::vector<FloatArray>& kernels, const std::vector<FloatArray>& biases,
                   const Longs& first_node, const Longs& first_edge, const Ints& neighbours, bool keep) {
  const SageBatch batch = checked_batch(nodes, configs, bias, first_node, first_edge, neighbours);
  const SageLayers layers = checked_layers(kernels, biases, batch.width);
  const NewArray<float> pooled = new_array({batch.graphs, batch.slots, batch.width});
  const NewArray<float> saved = new_array({keep ? sage_saved_size(batch, static_cast<int>(kernels.size())) : 0});
  without_gil(true, [&] { sage_forward(batch, layers, pooled.data, keep ? saved.data : nullptr); });
  return keep ? nb::object(nb::make_tuple(pooled.object, saved.object)) : pooled.object;
}

nb::tuple backward(const FloatArray& grad, const FloatOut& saved, const FloatArray& nodes, const FloatArray& configs,
                   const FloatArray& bias, const std::vector<FloatArray>& kernels,
                   const std::vector<FloatArray>& biases, const Longs& first_node, const Longs& first_edge,
                   const Ints& neighbours) {
  const SageBatch batch = checked_batch(nodes, configs, bias, first_node, first_edge, neighbours);
  const SageLayers layers = checked_layers(kernels, biases, batch.width);
  const int64_t width = batch.width;
  check(grad.ndim() == 3 && static_cast<int64_t>(grad.shape(0)) == batch.graphs &&
            static_cast<int64_t>(grad.shape(1)) == batch.slots && static_cast<int64_t>(grad.shape(2)) == width,
        "the gradient must be (graphs, slots, width)");
  check(saved.ndim() == 1 &&
            static_cast<int64_t>(saved.shape(0)) == sage_saved_size(batch, static_cast<int>(kernels.size())),
        "saved must come from sage_forward with the same arguments");
  const NewArray<float> grad_nodes = new_array({batch.first_node[batch.graphs], 2 * width});
  const NewArray<float> grad_configs = new_array({batch.graphs, batch.slots, 2 * width}),
                        grad_bias = new_array({width});
  SageGradients grads;
  grads.nodes = grad_nodes.data;
  grads.configs = grad_configs.data;
  grads.bias = grad_bias.data;
  nb::list grad_kernels, grad_biases;
  for (std::size_t l = 0; l < kernels.size(); ++l) {
    const NewArray<float> kernel = new_array({2 * width, width}), own = new_array({width});
    grads.kernels.push_back(kernel.data);
    grads.biases.push_back(own.data);
    grad_kernels.append(kernel.object);
    grad_biases.append(own.object);
  }
  without_gil(true, [&] { sage_backward(batch, layers, grad.data(), saved.data(), grads); });
  return nb::make_tuple(grad_nodes.object, grad_configs.object, grad_bias.object, grad_kernels, grad_biases);
}

}  // namespace

void bind_sage(nb::module_& m) {
  m.def("sage_forward", forward, array_arg("nodes"), array_arg("configs"), array_arg("bias"), nb::arg("kernels"),
        nb::arg("biases"), array_arg("first_node"), array_arg("first_edge"), array_arg("neighbours"), nb::arg("keep"));
  m.def("sage_backward", backward, array_arg("grad"), array_arg("saved"), array_arg("nodes"), array_arg("configs"),
        array_arg("bias"), nb::arg("kernels"), nb::arg("biases"), array_arg("first_node"), array_arg("first_edge"),
        array_arg("neighbours"));
}

}  // namespace tw
