// Python bindings of the decoder. It keeps references to the arrays of a model's parameters. float32 weights are read
// in place, so changes by training take effect; integer copies are compared with them on request. Every index is
// checked before the GIL is released.
#include "common/decoder.h"

#include <string>

#include "bindings/arrays.h"
#include "bindings/sparse_weights.h"

namespace tw {
namespace {

class PyDecoder {
 public:
  // A dense layer is a tuple (weight (outputs, inputs) or None; BlockMatrix, SparseWeights or None; bias or None). If
  // both weights are there, the second one is used. A norm is None or a tuple of its weight and its bias, which is None
  // in RMS norms. A block is [norm1, [q, k, v concatenated] or [q, k, v], query norm, key norm, out, post1, norm2, [up]
  // or [gate, up], down, post2, window]. `last` is [norm, head]. `settings` has the fields of Decoder that are numbers,
  // and the frequencies of RoPE, one per rotated pair of a head's numbers, or None.
  PyDecoder(nb::object token_embedding, nb::object position_embedding, nb::list layers, nb::list last,
            nb::object settings) {
    decoder_.token_embedding = embedding(token_embedding);
    decoder_.vocabulary = decoder_.token_embedding.rows;
    decoder_.width = decoder_.token_embedding.columns;
    fill_settings(nb::cast<nb::dict>(settings));
    if (!position_embedding.is_none()) {
      const auto places = keep(position_embedding, 2, "position embedding");
      check(places.dim(1) == decoder_.width, "the two embeddings have different widths");
      check(places.dim(0) >= decoder_.positions, "there are fewer position embeddings than positions");
      decoder_.position_embedding = places.data;
    }
    decoder_.blocks.resize(nb::len(layers));
    for (std::size_t i = 0; i < decoder_.blocks.size(); ++i)
      fill_block(decoder_.blocks[i], nb::cast<nb::list>(layers[i]));
    if (nb::len(last) != 2) refuse("ShapeError", "the last layers are a norm and the head");
    decoder_.norm = norm(last[0], decoder_.width);
    fill_dense(decoder_.head, last[1], 0, decoder_.width);
    logits_ = decoder_.head.outputs;
    without_gil(true, [&] { decoder_.settle(); });
  }

  // rows (n, 3) int64 of token, sequence, position; cache arrays (layers, sequences, heads, capacity, head width)
  nb::object run(nb::handle rows, nb::handle keys, nb::handle values, nb::handle key_scales, nb::handle value_scales,
                 nb::handle output_rows) const {
    const auto r = view_of<int64_t>(rows, 2, "rows"), w = view_of<int64_t>(output_rows, 1, "output_rows");
    check(r.dim(1) == 3, "rows must be (n, 3), output_rows (m,)");
    DecoderCache cache = cache_of(keys, values, key_scales, value_scales);
    const int64_t count = r.dim(0), chosen = w.dim(0);
    const Row* row = reinterpret_cast<const Row*>(r.data);
    for (int64_t i = 0; i < count; ++i) check_row(row[i], cache);
    check(chosen <= count, "more logits are output_rows than there are rows");
    for (int64_t i = 0; i < chosen; ++i) check(w.data[i] >= 0 && w.data[i] < count, "an output row does not exist");
    const NewArray<float> out = new_array({chosen, logits_});
    bool enough_memory;
    without_gil(true, [&] { enough_memory = decoder_.run(row, count, cache, w.data, chosen, out.data); });
    if (!enough_memory) throw std::bad_alloc();
    return out.object;
  }

  void products() const {
    bool enough_memory;
    without_gil(true, [&] { enough_memory = decoder_.products(); });
    if (!enough_memory) throw std::bad_alloc();
  }

  bool fresh() const {
    bool is_fresh;
    without_gil(true, [&] { is_fresh = decoder_.fresh(); });
    return is_fresh;
  }

  int64_t weight_bytes() const { return decoder_.weight_bytes(); }

 private:
  // A float32 array that lives as long as the decoder.
  ArrayView<float> keep(nb::handle object, int ndim, const char* name) {
    const auto array = view_of<float>(object, ndim, name);
    owners_.append(object);
    return array;
  }

  const float* vector(nb::handle object, int64_t size, const char* name) {
    const auto array = keep(object, 1, name);
    if (array.dim(0) != size) refuse("ShapeError", "%s has the wrong size", name);
    return array.data;
  }

  NormLayer norm(nb::handle object, int64_t width, bool optional = false) {
    if (optional && object.is_none()) return {};
    const auto pair = nb::cast<nb::tuple>(object);
    if (nb::len(pair) != 2) refuse("ShapeError", "a norm is a weight and a bias");
    return {vector(pair[0], width, "norm weight"), pair[1].is_none() ? nullptr : vector(pair[1], width, "norm bias")};
  }

  void fill_settings(const nb::dict& settings) {
    Decoder& d = decoder_;
    d.heads = nb::cast<int>(settings["heads"]);
    d.kv_heads = nb::cast<int>(settings["kv_heads"]);
    d.head_width = nb::cast<int>(settings["head_width"]);
    d.positions = nb::cast<int64_t>(settings["positions"]);
    d.eps = nb::cast<float>(settings["eps"]);
    const auto activation = nb::cast<std::string>(settings["activation"]);
    d.activation = activation == "gelu" ? Activation::gelu : Activation::gelu_tanh;
    d.silu_gate = activation == "silu";
    d.score_rule = {nb::cast<float>(settings["attention_scale"]), nb::cast<float>(settings["attention_cap"])};
    d.embedding_scale = nb::cast<float>(settings["embedding_scale"]);
    d.logit_cap = nb::cast<float>(settings["logit_cap"]);
    if (d.heads < 1 || d.kv_heads < 1 || d.head_width < 1 || d.heads % d.kv_heads != 0)
      refuse("ShapeError", "the heads cannot be shared");
    d.frequencies = frequencies(settings["frequencies"]);
    d.window_frequencies = frequencies(settings["window_frequencies"]);
    d.long_frequencies = frequencies(settings["long_frequencies"]);
    d.long_context = nb::cast<int64_t>(settings["long_context"]);
    d.rotary_magnitude = nb::cast<float>(settings["rotary_magnitude"]);
    d.side_by_side = nb::cast<bool>(settings["side_by_side"]);
  }

  // A float32 matrix or BlockRows.
  BlockRows embedding(nb::handle object) {
    if (nb::isinstance<BlockRows>(object)) {
      owners_.append(object);
      return *nb::cast<const BlockRows*>(object);
    }
    const auto array = keep(object, 2, "token embedding");
    return {kBlockFormats[0], reinterpret_cast<uint8_t*>(array.data), array.dim(0), array.dim(1)};
  }

  std::vector<float> frequencies(nb::handle object) const {
    if (object.is_none()) return {};
    const auto array = view_of<float>(object, 1, "frequencies");
    check(2 * array.dim(0) <= decoder_.head_width, "frequencies are one per pair of a head");
    return {array.data, array.data + array.dim(0)};
  }

  // Fills a dense layer; outputs = 0 accepts any number.
  void fill_dense(DenseLayer& layer, nb::handle tuple, int64_t outputs, int64_t inputs) {
    const auto fields = nb::cast<nb::tuple>(tuple);
    if (nb::len(fields) != 3) refuse("ShapeError", "a dense layer is a weight, quantized or sparse weights and a bias");
    layer.inputs = inputs;
    if (!fields[0].is_none()) {
      const auto w = keep(fields[0], 2, "a weight");
      check(w.dim(1) == inputs, "a weight has the wrong shape");
      layer.outputs = w.dim(0);
      layer.weight = w.data;
    }
    if (!fields[1].is_none()) {
      const bool sparse = nb::isinstance<SparseWeights>(fields[1]);
      if (sparse) {
        layer.sparse = &nb::cast<const SparseWeights*>(fields[1])->matrix();
      } else {
        layer.blocks = nb::cast<const BlockMatrix*>(fields[1]);
      }
      owners_.append(fields[1]);
      const int64_t rows = sparse ? layer.sparse->rows() : layer.blocks->outputs();
      const int64_t columns = sparse ? layer.sparse->columns() : layer.blocks->inputs();
      if (columns != inputs || (layer.weight != nullptr && rows != layer.outputs)) {
        refuse("ShapeError", "quantized or sparse weights have the wrong shape");
      }
      layer.outputs = rows;
    }
    if (layer.in_floats() && layer.weight == nullptr) refuse("ShapeError", "a dense layer has no weights");
    if (outputs != 0 && layer.outputs != outputs) refuse("ShapeError", "a weight has the wrong shape");
    if (!fields[2].is_none()) layer.bias = vector(fields[2], layer.outputs, "a bias");
  }

  void fill_several(std::vector<DenseLayer>& layers, nb::handle items) {
    const auto list = nb::cast<nb::list>(items);
    layers.resize(nb::len(list));
    for (std::size_t i = 0; i < layers.size(); ++i) fill_dense(layers[i], list[i], 0, decoder_.width);
  }

  void fill_block(DecoderBlock& block, const nb::list& fields) {
    if (nb::len(fields) != 11) refuse("ShapeError", "a block has eleven fields");
    const int64_t width = decoder_.width, head_width = decoder_.head_width, mixed = decoder_.heads * head_width;
    block.norm1 = norm(fields[0], width);
    fill_several(block.qkv, fields[1]);
    int64_t projected = 0;
    for (const DenseLayer& layer : block.qkv) projected += layer.outputs;
    if (projected != mixed + 2 * decoder_.kv_heads * head_width)
      refuse("ShapeError", "queries, keys and values have the wrong width");
    block.query_norm = norm(fields[2], head_width, true);
    block.key_norm = norm(fields[3], head_width, true);
    if ((block.query_norm.weight == nullptr) != (block.key_norm.weight == nullptr))
      refuse("ShapeError", "queries and keys are normalized together or not at all");
    fill_dense(block.out, fields[4], width, mixed);
    block.post1 = norm(fields[5], width, true);
    block.norm2 = norm(fields[6], width);
    fill_several(block.up, fields[7]);
    if (block.up.empty() || block.up.size() > 2 || block.up.front().outputs != block.up.back().outputs) {
      refuse("ShapeError", "the feed-forward of a block is one layer, or a gate and a layer of the same width");
    }
    fill_dense(block.down, fields[8], width, block.up[0].outputs);
    block.post2 = norm(fields[9], width, true);
    block.window = nb::cast<int64_t>(fields[10]);
    const DecoderBlock& first = decoder_.blocks[0];
    if (block.up.size() != first.up.size() || block.up[0].outputs != first.up[0].outputs)
      refuse("ShapeError", "the blocks have different widths");
  }

  DecoderCache cache_of(nb::handle keys, nb::handle values, nb::handle key_scales, nb::handle value_scales) const {
    DecoderCache cache;
    const int type = PyArray_Check(keys.ptr()) ? PyArray_TYPE(as_array(keys)) : NPY_OBJECT;
    if (type != NPY_FLOAT32 && type != NPY_FLOAT16 && type != NPY_INT8)
      refuse("DtypeError", "a cache is float32, float16 or int8");
    cache.kind = type == NPY_FLOAT32 ? CacheKind::float32 : type == NPY_FLOAT16 ? CacheKind::float16 : CacheKind::int8;
    PyArrayObject *k = writable(keys, type, 5, "keys"), *v = writable(values, type, 5, "values");
    check(PyArray_DIM(k, 0) == static_cast<int64_t>(decoder_.blocks.size()) && PyArray_DIM(k, 2) == decoder_.kv_heads &&
              PyArray_DIM(k, 4) == decoder_.head_width && PyArray_SAMESHAPE(k, v),
          "the cache has another shape than the model needs");
    cache.sequences = PyArray_DIM(k, 1);
    cache.capacity = PyArray_DIM(k, 3);
    cache.keys = data<char>(keys);
    cache.values = data<char>(values);
    if (cache.kind != CacheKind::int8) return cache;
    PyArrayObject* ks = writable(key_scales, NPY_FLOAT32, 4, "key scales");
    PyArrayObject* vs = writable(value_scales, NPY_FLOAT32, 4, "value scales");
    check(PyArray_CompareLists(PyArray_DIMS(ks), PyArray_DIMS(k), 4) && PyArray_SAMESHAPE(ks, vs),
          "the scales of the cache have another shape than its rows");
    cache.key_scales = data<float>(key_scales);
    cache.value_scales = data<float>(value_scales);
    return cache;
  }

  static PyArrayObject* writable(nb::handle object, int type, int ndim, const char* name) {
    PyArrayObject* array = checked(object, type, ndim, name);
    if (!PyArray_ISWRITEABLE(array)) refuse("DtypeError", "%s must be writable", name);
    return array;
  }

  void check_row(const Row& row, const DecoderCache& cache) const {
    if (row.token < 0 || row.token >= decoder_.vocabulary) refuse("ShapeError", "a token is outside the vocabulary");
    if (row.sequence < 0 || row.sequence >= cache.sequences) refuse("ShapeError", "a sequence is outside the cache");
    if (row.position < 0 || row.position >= cache.capacity || row.position >= decoder_.positions) {
      refuse("ShapeError", "a position is outside the cache or the context");
    }
  }

  Decoder decoder_;
  int64_t logits_ = 0;
  nb::list owners_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<PyDecoder>(m, "Decoder")
      .def(nb::init<nb::object, nb::object, nb::list, nb::list, nb::object>(), nb::arg("token_embedding"),
           nb::arg("position_embedding").none(), nb::arg("layers"), nb::arg("last"), nb::arg("settings"))
      .def("run", &PyDecoder::run, nb::arg("rows"), nb::arg("keys"), nb::arg("values"), nb::arg("key_scales").none(),
           nb::arg("value_scales").none(), nb::arg("output_rows"))
      .def("products", &PyDecoder::products)
      .def("fresh", &PyDecoder::fresh)
      .def_prop_ro("weight_bytes", &PyDecoder::weight_bytes);
}

}  // namespace tw
