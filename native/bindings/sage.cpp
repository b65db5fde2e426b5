// EarlyJoinSAGE seen from Python: arrays are checked, every neighbour's number included, before a kernel reads them.
#include "common/sage.h"

#include <string>

#include "bindings/tables.h"

namespace tw {
namespace {

using Ints = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;

bool rising(const Longs& starts, int64_t last) {
  const int64_t n = static_cast<int64_t>(starts.shape(0));
  if (starts.data()[0] != 0 || starts.data()[n - 1] != last) return false;
  for (int64_t i = 1; i < n; ++i) {
    if (starts.data()[i] < starts.data()[i - 1]) return false;
  }
  return true;
}

bool within_their_graphs(const SageBatch& batch) {
  for (int64_t g = 0; g < batch.graphs; ++g) {
    const int64_t first = batch.first_node[g], last = batch.first_node[g + 1];
    for (int64_t e = batch.first_edge[first]; e < batch.first_edge[last]; ++e) {
      if (batch.neighbours[e] < 0 || batch.neighbours[e] >= last - first) return false;
    }
  }
  return true;
}

SageBatch batch_of(const FloatArray& nodes, const FloatArray& configs, const FloatArray& bias, const Longs& first_node,
                   const Longs& first_edge, const Ints& neighbours) {
  need(nodes.ndim() == 2 && configs.ndim() == 3 && bias.ndim() == 1, "nodes, configs and bias have 2, 3 and 1 axes");
  need(first_node.ndim() == 1 && first_edge.ndim() == 1 && neighbours.ndim() == 1, "a graph's tables have one axis");
  SageBatch batch;
  batch.graphs = static_cast<int64_t>(configs.shape(0));
  batch.slots = static_cast<int64_t>(configs.shape(1));
  batch.width = static_cast<int64_t>(bias.shape(0));
  const int64_t count = static_cast<int64_t>(nodes.shape(0)), twice = 2 * batch.width;
  need(batch.width >= 1 && static_cast<int64_t>(nodes.shape(1)) == twice &&
           static_cast<int64_t>(configs.shape(2)) == twice,
       "nodes and configs must be twice as wide as bias");
  need(static_cast<int64_t>(first_node.shape(0)) == batch.graphs + 1 &&
           static_cast<int64_t>(first_edge.shape(0)) == count + 1,
       "the graphs' tables do not fit");
  need(rising(first_node, count) && rising(first_edge, static_cast<int64_t>(neighbours.shape(0))),
       "the graphs' tables must rise from zero to the end");
  batch.first_node = first_node.data();
  batch.first_edge = first_edge.data();
  batch.neighbours = neighbours.data();
  need(within_their_graphs(batch), "a neighbour lies outside its graph");
  batch.nodes = nodes.data();
  batch.configs = configs.data();
  batch.bias = bias.data();
  return batch;
}

SageLayers layers_of(const std::vector<FloatArray>& kernels, const std::vector<FloatArray>& biases, int64_t width) {
  need(kernels.size() == biases.size(), "there must be as many biases as kernels");
  SageLayers layers;
  for (std::size_t l = 0; l < kernels.size(); ++l) {
    need(kernels[l].ndim() == 2 && static_cast<int64_t>(kernels[l].shape(0)) == 2 * width &&
             static_cast<int64_t>(kernels[l].shape(1)) == width && biases[l].ndim() == 1 &&
             static_cast<int64_t>(biases[l].shape(0)) == width,
         "a layer's kernel is (2 width, width) and its bias (width)");
    layers.kernels.push_back(kernels[l].data());
    layers.biases.push_back(biases[l].data());
  }
  return layers;
}

nb::object forward(const FloatArray& nodes, const FloatArray& configs, const FloatArray& bias,
                   const std::vector<FloatArray>& kernels, const std::vector<FloatArray>& biases,
                   const Longs& first_node, const Longs& first_edge, const Ints& neighbours, bool keep) {
  const SageBatch batch = batch_of(nodes, configs, bias, first_node, first_edge, neighbours);
  const SageLayers layers = layers_of(kernels, biases, batch.width);
  const Made pooled = made({batch.graphs, batch.slots, batch.width});
  const Made saved = made({keep ? sage_saved_size(batch, static_cast<int>(kernels.size())) : 0});
  {
    nb::gil_scoped_release release;
    sage_forward(batch, layers, pooled.data, keep ? saved.data : nullptr);
  }
  return keep ? nb::object(nb::make_tuple(pooled.object, saved.object)) : pooled.object;
}

nb::tuple backward(const FloatArray& grad, const FloatOut& saved, const FloatArray& nodes, const FloatArray& configs,
                   const FloatArray& bias, const std::vector<FloatArray>& kernels,
                   const std::vector<FloatArray>& biases, const Longs& first_node, const Longs& first_edge,
                   const Ints& neighbours) {
  const SageBatch batch = batch_of(nodes, configs, bias, first_node, first_edge, neighbours);
  const SageLayers layers = layers_of(kernels, biases, batch.width);
  const int64_t width = batch.width;
  need(grad.ndim() == 3 && static_cast<int64_t>(grad.shape(0)) == batch.graphs &&
           static_cast<int64_t>(grad.shape(1)) == batch.slots && static_cast<int64_t>(grad.shape(2)) == width,
       "the gradient does not fit the batch");
  need(saved.ndim() == 1 &&
           static_cast<int64_t>(saved.shape(0)) == sage_saved_size(batch, static_cast<int>(kernels.size())),
       "what was saved does not fit the batch");
  const Made to_nodes = made({batch.first_node[batch.graphs], 2 * width});
  const Made to_configs = made({batch.graphs, batch.slots, 2 * width}), to_bias = made({width});
  SageGradients grads;
  grads.nodes = to_nodes.data;
  grads.configs = to_configs.data;
  grads.bias = to_bias.data;
  nb::list to_kernels, to_biases;
  for (std::size_t l = 0; l < kernels.size(); ++l) {
    const Made kernel = made({2 * width, width}), own = made({width});
    grads.kernels.push_back(kernel.data);
    grads.biases.push_back(own.data);
    to_kernels.append(kernel.object);
    to_biases.append(own.object);
  }
  {
    nb::gil_scoped_release release;
    sage_backward(batch, layers, grad.data(), saved.data(), grads);
  }
  return nb::make_tuple(to_nodes.object, to_configs.object, to_bias.object, to_kernels, to_biases);
}

}  // namespace

void bind_sage(nb::module_& m) {
  m.def("sage_forward", forward, nb::arg("nodes").noconvert(), nb::arg("configs").noconvert(),
        nb::arg("bias").noconvert(), nb::arg("kernels"), nb::arg("biases"), nb::arg("first_node").noconvert(),
        nb::arg("first_edge").noconvert(), nb::arg("neighbours").noconvert(), nb::arg("keep"));
  m.def("sage_backward", backward, nb::arg("grad").noconvert(), nb::arg("saved").noconvert(),
        nb::arg("nodes").noconvert(), nb::arg("configs").noconvert(), nb::arg("bias").noconvert(), nb::arg("kernels"),
        nb::arg("biases"), nb::arg("first_node").noconvert(), nb::arg("first_edge").noconvert(),
        nb::arg("neighbours").noconvert());
}

}  // namespace tw
