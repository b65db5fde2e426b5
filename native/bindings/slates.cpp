// TileRanker's slates seen from Python: shapes and tables are checked before a kernel reads them.
#include "common/slates.h"

#include "bindings/tables.h"

namespace tw {
namespace {

using Arrays = std::vector<FloatArray>;

bool shaped(const FloatArray& x, std::initializer_list<int64_t> shape) {
  if (x.ndim() != shape.size()) return false;
  std::size_t axis = 0;
  for (int64_t length : shape) {
    if (static_cast<int64_t>(x.shape(axis++)) != length) return false;
  }
  return true;
}

bool rising(const Longs& starts, int64_t last) {
  const std::size_t n = starts.shape(0);
  if (starts.data()[0] != 0 || starts.data()[n - 1] != last) return false;
  for (std::size_t i = 1; i < n; ++i) {
    if (starts.data()[i] <= starts.data()[i - 1]) return false;
  }
  return true;
}

// Configurations are (K, C, D) without gaps, of which the columns from `skipped` on are read.
Slates slates_of(const FloatArray& configs, int64_t skipped, const FloatArray& wide, const FloatArray& first,
                 const Longs& first_node, const FloatArray& keys, const FloatArray& offsets, const FloatArray& values,
                 const Arrays& weights, const Arrays& biases, const FloatArray& last) {
  need(configs.ndim() == 3 && wide.ndim() == 2 && first.ndim() == 2 && keys.ndim() == 2 && last.ndim() == 2,
       "configs, wide, first, keys and last have 3, 2, 2, 2 and 2 axes");
  Slates s;
  s.kernels = static_cast<int64_t>(configs.shape(0));
  s.slots = static_cast<int64_t>(configs.shape(1));
  s.config_row = static_cast<int64_t>(configs.shape(2));
  s.config_slate = s.slots * s.config_row;
  s.width = static_cast<int64_t>(first.shape(1));
  s.members = static_cast<int64_t>(last.shape(1));
  need(skipped >= 0 && skipped < s.config_row, "skipped must leave a column of configs");
  need(s.kernels >= 1 && s.slots >= 1 && s.width >= 1 && s.members >= 1, "a slate may not be empty");
  s.columns = s.config_row - skipped;
  const int64_t nodes = static_cast<int64_t>(keys.shape(0)), across = s.members * s.width;
  need(shaped(wide, {s.columns, across}) && shaped(first, {s.kernels, s.width}) && shaped(last, {across, s.members}),
       "wide is (columns, members width), first (kernels, width) and last (members width, members)");
  need(shaped(keys, {nodes, s.width}) && shaped(offsets, {nodes}) && shaped(values, {nodes, s.width}),
       "keys and values are (nodes, width), offsets (nodes)");
  need(
      first_node.ndim() == 1 && static_cast<int64_t>(first_node.shape(0)) == s.kernels + 1 && rising(first_node, nodes),
      "first_node must rise from zero to the number of nodes");
  need(weights.size() == biases.size(), "there must be as many biases as weights");
  for (std::size_t l = 0; l < weights.size(); ++l) {
    need(shaped(weights[l], {s.kernels, s.width, s.width}) && shaped(biases[l], {s.kernels, s.width}),
         "a block's weights are (kernels, width, width) and its biases (kernels, width)");
    s.weights.push_back(weights[l].data());
    s.biases.push_back(biases[l].data());
  }
  s.configs = configs.data() + skipped;
  s.wide = wide.data();
  s.first = first.data();
  s.first_node = first_node.data();
  s.keys = keys.data();
  s.offsets = offsets.data();
  s.values = values.data();
  s.last = last.data();
  return s;
}

nb::tuple forward(const FloatArray& configs, int64_t skipped, const FloatArray& wide, const FloatArray& first,
                  const Longs& first_node, const FloatArray& keys, const FloatArray& offsets, const FloatArray& values,
                  const Arrays& weights, const Arrays& biases, const FloatArray& last) {
  const Slates s = slates_of(configs, skipped, wide, first, first_node, keys, offsets, values, weights, biases, last);
  const Made scores = made({s.kernels, s.slots, s.members}), saved = made({slates_saved_size(s)});
  {
    nb::gil_scoped_release release;
    slates_forward(s, scores.data, saved.data);
  }
  return nb::make_tuple(scores.object, saved.object);
}

nb::tuple backward(const FloatArray& grad, const FloatArray& saved, const FloatArray& configs, int64_t skipped,
                   const FloatArray& wide, const FloatArray& first, const Longs& first_node, const FloatArray& keys,
                   const FloatArray& offsets, const FloatArray& values, const Arrays& weights, const Arrays& biases,
                   const FloatArray& last) {
  const Slates s = slates_of(configs, skipped, wide, first, first_node, keys, offsets, values, weights, biases, last);
  need(shaped(grad, {s.kernels, s.slots, s.members}), "the gradient does not fit the slates");
  need(shaped(saved, {slates_saved_size(s)}), "what was saved does not fit the slates");
  const int64_t nodes = s.first_node[s.kernels], across = s.members * s.width;
  const Made hidden = made({s.kernels, s.slots, across}), to_first = made({s.kernels, s.width});
  const Made to_keys = made({nodes, s.width}), to_offsets = made({nodes}), to_values = made({nodes, s.width});
  const Made to_last = made({s.kernels, across, s.members});
  SlateGradients grads{hidden.data, to_first.data, to_keys.data, to_offsets.data, to_values.data, {}, {}, to_last.data};
  nb::list to_weights, to_biases;
  for (std::size_t l = 0; l < weights.size(); ++l) {
    const Made weight = made({s.kernels, s.width, s.width}), bias = made({s.kernels, s.width});
    grads.weights.push_back(weight.data);
    grads.biases.push_back(bias.data);
    to_weights.append(weight.object);
    to_biases.append(bias.object);
  }
  {
    nb::gil_scoped_release release;
    slates_backward(s, grad.data(), saved.data(), grads);
  }
  return nb::make_tuple(hidden.object, to_first.object, to_keys.object, to_offsets.object, to_values.object, to_weights,
                        to_biases, to_last.object);
}

}  // namespace

void bind_slates(nb::module_& m) {
  m.def("slates_forward", forward, nb::arg("configs").noconvert(), nb::arg("skipped"), nb::arg("wide").noconvert(),
        nb::arg("first").noconvert(), nb::arg("first_node").noconvert(), nb::arg("keys").noconvert(),
        nb::arg("offsets").noconvert(), nb::arg("values").noconvert(), nb::arg("weights"), nb::arg("biases"),
        nb::arg("last").noconvert());
  m.def("slates_backward", backward, nb::arg("grad").noconvert(), nb::arg("saved").noconvert(),
        nb::arg("configs").noconvert(), nb::arg("skipped"), nb::arg("wide").noconvert(), nb::arg("first").noconvert(),
        nb::arg("first_node").noconvert(), nb::arg("keys").noconvert(), nb::arg("offsets").noconvert(),
        nb::arg("values").noconvert(), nb::arg("weights"), nb::arg("biases"), nb::arg("last").noconvert());
}

}  // namespace tw
