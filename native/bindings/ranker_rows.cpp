// Python bindings of TileRanker's row network. All shapes and index tables are checked before a kernel reads them.
#include "common/ranker_rows.h"

#include "bindings/arrays.h"

namespace tw {
namespace {

using Arrays = std::vector<FloatArray>;

// Returns whether `starts` rises strictly from 0 to `last`.
bool strictly_rising(const Longs& starts, int64_t last) {
  const std::size_t n = starts.shape(0);
  if (starts.data()[0] != 0 || starts.data()[n - 1] != last) return false;
  for (std::size_t i = 1; i < n; ++i) {
    if (starts.data()[i] <= starts.data()[i - 1]) return false;
  }
  return true;
}

// Checks all arrays. Configurations are a dense (K, C, D) array, whose first `skip_columns` columns are not read.
RankerRows checked_rows(const FloatArray& configs, int64_t skip_columns, const FloatArray& first_weight,
                        const FloatArray& first_bias, const Longs& first_node, const FloatArray& keys,
                        const FloatArray& key_bias, const FloatArray& values, const Arrays& block_weights,
                        const Arrays& block_biases, const FloatArray& out_weight) {
  check(configs.ndim() == 3 && first_weight.ndim() == 2 && first_bias.ndim() == 2 && keys.ndim() == 2 &&
            out_weight.ndim() == 2,
        "configs, first_weight, first_bias, keys and out_weight have 3, 2, 2, 2 and 2 axes");
  RankerRows s;
  s.kernels = static_cast<int64_t>(configs.shape(0));
  s.slots = static_cast<int64_t>(configs.shape(1));
  s.config_stride = static_cast<int64_t>(configs.shape(2));
  s.kernel_stride = s.slots * s.config_stride;
  s.width = static_cast<int64_t>(first_bias.shape(1));
  s.members = static_cast<int64_t>(out_weight.shape(1));
  check(skip_columns >= 0 && skip_columns < s.config_stride, "skip_columns must leave a column of configs");
  check(s.kernels >= 1 && s.slots >= 1 && s.width >= 1 && s.members >= 1,
        "kernels, slots, width and members must be at least 1");
  s.columns = s.config_stride - skip_columns;
  const int64_t nodes = static_cast<int64_t>(keys.shape(0)), hidden_columns = s.members * s.width;
  check(has_shape(first_weight, {s.columns, hidden_columns}) && has_shape(first_bias, {s.kernels, s.width}) &&
            has_shape(out_weight, {hidden_columns, s.members}),
        "first_weight is (columns, members * width), first_bias (kernels, width) and out_weight (members * width, "
        "members)");
  check(has_shape(keys, {nodes, s.width}) && has_shape(key_bias, {nodes}) && has_shape(values, {nodes, s.width}),
        "keys and values are (nodes, width), key_bias (nodes)");
  check(first_node.ndim() == 1 && static_cast<int64_t>(first_node.shape(0)) == s.kernels + 1 &&
            strictly_rising(first_node, nodes),
        "first_node must rise from zero to the number of nodes");
  check(block_weights.size() == block_biases.size(), "block_weights and block_biases must have the same length");
  for (std::size_t l = 0; l < block_weights.size(); ++l) {
    check(
        has_shape(block_weights[l], {s.kernels, s.width, s.width}) && has_shape(block_biases[l], {s.kernels, s.width}),
        "a block's weight is (kernels, width, width) and its bias (kernels, width)");
    s.block_weights.push_back(block_weights[l].data());
    s.block_biases.push_back(block_biases[l].data());
  }
  s.configs = configs.data() + skip_columns;
  s.first_weight = first_weight.data();
  s.first_bias = first_bias.data();
  s.first_node = first_node.data();
  s.keys = keys.data();
  s.key_bias = key_bias.data();
  s.values = values.data();
  s.out_weight = out_weight.data();
  return s;
}

// Returns the scores (kernels, slots, members) and the activations that the backward pass needs.
nb::tuple forward(const FloatArray& configs, int64_t skip_columns, const FloatArray& first_weight,
                  const FloatArray& first_bias, const Longs& first_node, const FloatArray& keys,
                  const FloatArray& key_bias, const FloatArray& values, const Arrays& block_weights,
                  const Arrays& block_biases, const FloatArray& out_weight) {
  const RankerRows s = checked_rows(configs, skip_columns, first_weight, first_bias, first_node, keys, key_bias, values,
                                    block_weights, block_biases, out_weight);
  const NewArray<float> scores = new_array({s.kernels, s.slots, s.members}),
                        saved = new_array({ranker_rows_saved_size(s)});
  without_gil(true, [&] { ranker_rows_forward(s, scores.data, saved.data); });
  return nb::make_tuple(scores.object, saved.object);
}

nb::tuple backward(const FloatArray& grad_scores, const FloatArray& saved, const FloatArray& configs,
                   int64_t skip_columns, const FloatArray& first_weight, const FloatArray& first_bias,
                   const Longs& first_node, const FloatArray& keys, const FloatArray& key_bias,
                   const FloatArray& values, const Arrays& block_weights, const Arrays& block_biases,
                   const FloatArray& out_weight) {
  const RankerRows s = checked_rows(configs, skip_columns, first_weight, first_bias, first_node, keys, key_bias, values,
                                    block_weights, block_biases, out_weight);
  check(has_shape(grad_scores, {s.kernels, s.slots, s.members}), "the gradient must be (kernels, slots, members)");
  check(has_shape(saved, {ranker_rows_saved_size(s)}),
        "saved must come from ranker_rows_forward with the same arguments");
  const int64_t nodes = s.first_node[s.kernels], hidden_columns = s.members * s.width;
  const NewArray<float> hidden = new_array({s.kernels, s.slots, hidden_columns}),
                        grad_first_bias = new_array({s.kernels, s.width});
  const NewArray<float> grad_keys = new_array({nodes, s.width}), grad_key_bias = new_array({nodes}),
                        grad_values = new_array({nodes, s.width});
  const NewArray<float> grad_out_weight = new_array({s.kernels, hidden_columns, s.members});
  RankerRowsGradients grads{hidden.data, grad_first_bias.data, grad_keys.data, grad_key_bias.data, grad_values.data, {},
                            {},          grad_out_weight.data};
  nb::list grad_block_weights, grad_block_biases;
  for (std::size_t l = 0; l < block_weights.size(); ++l) {
    const NewArray<float> weight = new_array({s.kernels, s.width, s.width}), bias = new_array({s.kernels, s.width});
    grads.block_weights.push_back(weight.data);
    grads.block_biases.push_back(bias.data);
    grad_block_weights.append(weight.object);
    grad_block_biases.append(bias.object);
  }
  without_gil(true, [&] { ranker_rows_backward(s, grad_scores.data(), saved.data(), grads); });
  return nb::make_tuple(hidden.object, grad_first_bias.object, grad_keys.object, grad_key_bias.object,
                        grad_values.object, grad_block_weights, grad_block_biases, grad_out_weight.object);
}

}  // namespace

void bind_ranker_rows(nb::module_& m) {
  m.def("ranker_rows_forward", forward, array_arg("configs"), nb::arg("skip_columns"), array_arg("first_weight"),
        array_arg("first_bias"), array_arg("first_node"), array_arg("keys"), array_arg("key_bias"), array_arg("values"),
        nb::arg("block_weights"), nb::arg("block_biases"), array_arg("out_weight"));
  m.def("ranker_rows_backward", backward, array_arg("grad_scores"), array_arg("saved"), array_arg("configs"),
        nb::arg("skip_columns"), array_arg("first_weight"), array_arg("first_bias"), array_arg("first_node"),
        array_arg("keys"), array_arg("key_bias"), array_arg("values"), nb::arg("block_weights"),
        nb::arg("block_biases"), array_arg("out_weight"));
}

}  // namespace tw
