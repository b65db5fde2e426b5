#include "graph/alias.h"

#include <algorithm>

namespace tw {
namespace {

class Analysis {
 public:
  Analysis(const std::vector<Graph::Node>& nodes, const std::vector<bool>& external, std::vector<TensorDesc>& descs)
      : nodes_(nodes), external_(external), descs_(descs), any_pitch_(descs.size(), true), producer_(descs.size()) {
    sets_.parent.assign(descs.size(), -1);
    sets_.channel.assign(descs.size(), 0);
    sets_.is_alias.assign(nodes.size(), false);
    for (const Graph::Node& node : nodes) {
      producer_[node.output] = node.op.get();
      if (!node.op->reads_any_pitch()) any_pitch_[node.inputs[0]] = false;
    }
  }

  AliasSets run() {
    alias_slices();
    // The last concatenation first: an earlier one may be an input of a later one and is stored inside it.
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      if (nodes_[i].op->is_concat()) alias_concat(i);
    }
    share_pitch_and_padding();
    alias_views();
    return std::move(sets_);
  }

 private:
  // Stores slices of channels, and reshapes that keep all channels, in their source's buffer.
  void alias_slices() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const int value = nodes_[i].output, source = nodes_[i].inputs[0];
      const int64_t first = nodes_[i].op->first_channel();
      if (first < 0 || external_[value] || external_[source] || !any_pitch_[value]) continue;
      sets_.parent[value] = source;
      sets_.channel[value] = first;
      sets_.is_alias[i] = true;
    }
  }

  // Lets the producers of a concatenation's inputs write into its result, where they can. An input that cannot be moved
  // is copied when the graph runs.
  void alias_concat(std::size_t index) {
    const Graph::Node& node = nodes_[index];
    if (concat_is_slice(node)) {
      sets_.parent[node.output] = sets_.root(node.inputs[0]);
      sets_.channel[node.output] = sets_.first_channel(node.inputs[0]);
      sets_.is_alias[index] = true;
      return;
    }
    int64_t channel = 0;
    for (int part : node.inputs) {
      const int root = sets_.root(node.output);
      // With the default pitch an integer layer writes whole groups of four channels, and would overwrite a neighbour.
      const bool fills_pixel =
          descs_[part].is_integer() && descs_[part].default_pitch() == descs_[root].default_pitch();
      const bool movable = producer_[part] != nullptr && producer_[part]->writes_any_pitch() && !fills_pixel;
      if (movable && sets_.parent[part] < 0 && root != part && any_pitch_[part] && !external_[part] &&
          !external_[root]) {
        sets_.parent[part] = node.output;
        sets_.channel[part] = channel;
      }
      channel += descs_[part].channels;
    }
  }

  // Returns whether the inputs of a concatenation are neighbouring slices of one buffer, in this order.
  bool concat_is_slice(const Graph::Node& node) const {
    const int root = sets_.root(node.inputs[0]);
    if (external_[node.output] || external_[root] || sets_.parent[node.output] >= 0 || !any_pitch_[node.output])
      return false;
    int64_t channel = sets_.first_channel(node.inputs[0]);
    for (int part : node.inputs) {
      if (sets_.parent[part] < 0 || sets_.root(part) != root || sets_.first_channel(part) != channel) return false;
      channel += descs_[part].channels;
    }
    return true;
  }

  // All values of a buffer have its pitch, and the widest padding that one of them needs.
  void share_pitch_and_padding() {
    std::vector<int> padding(descs_.size(), 0);
    for (std::size_t v = 0; v < descs_.size(); ++v) {
      int& widest = padding[sets_.root(static_cast<int>(v))];
      widest = std::max(widest, descs_[v].padding);
    }
    for (const Graph::Node& node : nodes_) {
      TensorDesc& desc = descs_[node.output];
      const int root = sets_.root(node.output);
      if (desc.layout == Layout::planes || (external_[node.output] && desc.pitch > 0)) continue;
      desc.pitch = descs_[root].default_pitch();
      desc.padding = padding[root];
    }
  }

  // Views are found last: whether one is possible depends on the pitch and padding of its source.
  void alias_views() {
    for (std::size_t i = 0; i < nodes_.size(); ++i) {
      const int value = nodes_[i].output, source = nodes_[i].inputs[0];
      const bool free = sets_.parent[value] < 0 && sets_.parent[source] < 0;
      if (!free || external_[value] || external_[source] || !nodes_[i].op->is_view(descs_[source])) continue;
      sets_.parent[value] = source;
      sets_.is_alias[i] = true;
    }
  }

  const std::vector<Graph::Node>& nodes_;
  const std::vector<bool>& external_;
  std::vector<TensorDesc>& descs_;
  std::vector<bool> any_pitch_;      // per value: every reader accepts any pitch
  std::vector<const Op*> producer_;  // per value; null: an input
  AliasSets sets_;
};

}  // namespace

AliasSets analyze_aliases(const std::vector<Graph::Node>& nodes, const std::vector<bool>& external,
                          std::vector<TensorDesc>& descs) {
  return Analysis(nodes, external, descs).run();
}

}  // namespace tw
