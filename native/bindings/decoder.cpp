// The decoder, seen from Python: it keeps references to the arrays of a model's parameters (float32 weights are read in
// place, so training goes on to show; integer copies are compared with them on request) and checks every index before
// the GIL is released.
#include "common/decoder.h"

#include <string>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "bindings/sparse_weights.h"

namespace tw {
namespace {

[[noreturn]] void refuse(const std::string& sentence) { throw nb::value_error(sentence.c_str()); }

PyArrayObject* array_of(nb::handle object, int type, const char* what) {
  PyObject* raw = object.ptr();
  auto* array = reinterpret_cast<PyArrayObject*>(raw);
  if (!PyArray_Check(raw) || PyArray_TYPE(array) != type || !PyArray_ISCARRAY_RO(array)) {
    refuse(std::string(what) + " must be a C-contiguous array of the documented dtype");
  }
  return array;
}

template <class T>
T* pointer(PyArrayObject* array) {
  return static_cast<T*>(PyArray_DATA(array));
}

class PyDecoder {
 public:
  // A dense layer is a tuple of its weight (outputs, inputs) or None, its BlockMatrix, SparseWeights or None, its bias
  // or None; of two weights the second is used. A norm is None or a tuple of its weight and its bias, which is None in
  // RMS norms. A block is [norm1, [q, k, v together or three], query norm, key norm, out, post1, norm2, [up] or [gate,
  // up], down, post2, window]; `last` is [norm, head]. The settings are the fields of Decoder that are numbers, and the
  // rotary frequencies (as many as pairs of a head are turned) or None.
  PyDecoder(nb::object token_embedding, nb::object position_embedding, nb::list layers, nb::list last,
            nb::object settings) {
    decoder_.token_embedding = embedding(token_embedding);
    decoder_.vocabulary = decoder_.token_embedding.rows;
    decoder_.width = decoder_.token_embedding.columns;
    fill_settings(nb::cast<nb::dict>(settings));
    if (!position_embedding.is_none()) {
      PyArrayObject* places = matrix(position_embedding, "position embedding");
      if (PyArray_DIM(places, 1) != decoder_.width) refuse("the two embeddings have different widths");
      if (PyArray_DIM(places, 0) < decoder_.positions) refuse("there are fewer position embeddings than positions");
      decoder_.position_embedding = keep<float>(position_embedding);
    }
    decoder_.blocks.resize(nb::len(layers));
    for (std::size_t i = 0; i < decoder_.blocks.size(); ++i)
      fill_block(decoder_.blocks[i], nb::cast<nb::list>(layers[i]));
    if (nb::len(last) != 2) refuse("the last layers are a norm and the head");
    decoder_.norm = norm(last[0], decoder_.width);
    fill_dense(decoder_.head, last[1], 0, decoder_.width);
    logits_ = decoder_.head.outputs;
    GilRelease release(true);
    decoder_.settle();
  }

  // rows (n, 3) int64 of token, sequence, position; cache arrays (layers, sequences, heads, capacity, head width)
  nb::object run(nb::handle rows, nb::handle keys, nb::handle values, nb::handle key_scales, nb::handle value_scales,
                 nb::handle output_rows) const {
    PyArrayObject* r = array_of(rows, NPY_INT64, "rows");
    PyArrayObject* w = array_of(output_rows, NPY_INT64, "output_rows");
    if (PyArray_NDIM(r) != 2 || PyArray_DIM(r, 1) != 3 || PyArray_NDIM(w) != 1)
      refuse("rows must be (n, 3), output_rows (m,)");
    DecoderCache cache = cache_of(keys, values, key_scales, value_scales);
    const int64_t count = PyArray_DIM(r, 0), chosen = PyArray_DIM(w, 0);
    const Row* row = reinterpret_cast<const Row*>(pointer<int64_t>(r));
    for (int64_t i = 0; i < count; ++i) check_row(row[i], cache);
    if (chosen > count) refuse("more logits are output_rows than there are rows");
    for (int64_t i = 0; i < chosen; ++i) {
      if (pointer<int64_t>(w)[i] < 0 || pointer<int64_t>(w)[i] >= count) refuse("a output_rows row does not exist");
    }
    const npy_intp shape[2] = {chosen, logits_};
    PyArrayObject* out = new_float_array(2, shape);
    if (out == nullptr) throw nb::python_error();
    nb::object result = nb::steal(reinterpret_cast<PyObject*>(out));
    bool ok;
    {
      GilRelease release(true);
      ok = decoder_.run(row, count, cache, pointer<int64_t>(w), chosen, floats(out));
    }
    if (!ok) throw std::bad_alloc();
    return result;
  }

  void products() const {
    bool ok;
    {
      GilRelease release(true);
      ok = decoder_.products();
    }
    if (!ok) throw std::bad_alloc();
  }

  bool fresh() const {
    GilRelease release(true);
    return decoder_.fresh();
  }

  int64_t weight_bytes() const { return decoder_.weight_bytes(); }

 private:
  template <class T>
  T* keep(nb::handle object) {
    owners_.append(object);
    return pointer<T>(reinterpret_cast<PyArrayObject*>(object.ptr()));
  }

  static PyArrayObject* matrix(nb::handle object, const char* what) {
    PyArrayObject* array = array_of(object, NPY_FLOAT32, what);
    if (PyArray_NDIM(array) != 2) refuse(std::string(what) + " must have two dimensions");
    return array;
  }

  const float* vector(nb::handle object, int64_t size, const char* what) {
    PyArrayObject* array = array_of(object, NPY_FLOAT32, what);
    if (PyArray_NDIM(array) != 1 || PyArray_DIM(array, 0) != size) refuse(std::string(what) + " has the wrong size");
    return keep<float>(object);
  }

  NormLayer norm(nb::handle object, int64_t width, bool optional = false) {
    if (optional && object.is_none()) return {};
    const auto pair = nb::cast<nb::tuple>(object);
    if (nb::len(pair) != 2) refuse("a norm is a weight and a bias");
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
      refuse("the heads cannot be shared");
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
    PyArrayObject* array = matrix(object, "token embedding");
    return {kBlockFormats[0], keep<uint8_t>(object), PyArray_DIM(array, 0), PyArray_DIM(array, 1)};
  }

  std::vector<float> frequencies(nb::handle object) const {
    if (object.is_none()) return {};
    PyArrayObject* array = array_of(object, NPY_FLOAT32, "frequencies");
    if (PyArray_NDIM(array) != 1 || 2 * PyArray_DIM(array, 0) > decoder_.head_width)
      refuse("frequencies are one per pair of a head");
    return {pointer<float>(array), pointer<float>(array) + PyArray_DIM(array, 0)};
  }

  // outputs = 0: whatever the weight has
  void fill_dense(DenseLayer& layer, nb::handle tuple, int64_t outputs, int64_t inputs) {
    const auto fields = nb::cast<nb::tuple>(tuple);
    if (nb::len(fields) != 3) refuse("a dense layer is a weight, quantized or sparse weights and a bias");
    layer.inputs = inputs;
    if (!fields[0].is_none()) {
      PyArrayObject* w = matrix(fields[0], "a weight");
      if (PyArray_DIM(w, 1) != inputs) refuse("a weight has the wrong shape");
      layer.outputs = PyArray_DIM(w, 0);
      layer.weight = keep<float>(fields[0]);
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
        refuse("quantized or sparse weights have the wrong shape");
      }
      layer.outputs = rows;
    }
    if (layer.in_floats() && layer.weight == nullptr) refuse("a dense layer has no weights");
    if (outputs != 0 && layer.outputs != outputs) refuse("a weight has the wrong shape");
    if (!fields[2].is_none()) layer.bias = vector(fields[2], layer.outputs, "a bias");
  }

  void fill_several(std::vector<DenseLayer>& layers, nb::handle items) {
    const auto list = nb::cast<nb::list>(items);
    layers.resize(nb::len(list));
    for (std::size_t i = 0; i < layers.size(); ++i) fill_dense(layers[i], list[i], 0, decoder_.width);
  }

  void fill_block(DecoderBlock& block, const nb::list& fields) {
    if (nb::len(fields) != 11) refuse("a block has eleven fields");
    const int64_t width = decoder_.width, head_width = decoder_.head_width, mixed = decoder_.heads * head_width;
    block.norm1 = norm(fields[0], width);
    fill_several(block.qkv, fields[1]);
    int64_t projected = 0;
    for (const DenseLayer& layer : block.qkv) projected += layer.outputs;
    if (projected != mixed + 2 * decoder_.kv_heads * head_width)
      refuse("queries, keys and values have the wrong width");
    block.query_norm = norm(fields[2], head_width, true);
    block.key_norm = norm(fields[3], head_width, true);
    if ((block.query_norm.weight == nullptr) != (block.key_norm.weight == nullptr))
      refuse("queries and keys are normalized together or not at all");
    fill_dense(block.out, fields[4], width, mixed);
    block.post1 = norm(fields[5], width, true);
    block.norm2 = norm(fields[6], width);
    fill_several(block.up, fields[7]);
    if (block.up.empty() || block.up.size() > 2 || block.up.front().outputs != block.up.back().outputs) {
      refuse("a block is widened by one layer, or by a gate and a layer of the same width");
    }
    fill_dense(block.down, fields[8], width, block.up[0].outputs);
    block.post2 = norm(fields[9], width, true);
    block.window = nb::cast<int64_t>(fields[10]);
    const DecoderBlock& first = decoder_.blocks[0];
    if (block.up.size() != first.up.size() || block.up[0].outputs != first.up[0].outputs)
      refuse("the blocks have different widths");
  }

  DecoderCache cache_of(nb::handle keys, nb::handle values, nb::handle key_scales, nb::handle value_scales) const {
    DecoderCache cache;
    if (!PyArray_Check(keys.ptr())) refuse("keys must be an array");
    const int type = PyArray_TYPE(reinterpret_cast<PyArrayObject*>(keys.ptr()));
    if (type != NPY_FLOAT32 && type != NPY_FLOAT16 && type != NPY_INT8) refuse("a cache is float32, float16 or int8");
    cache.kind = type == NPY_FLOAT32 ? CacheKind::float32 : type == NPY_FLOAT16 ? CacheKind::float16 : CacheKind::int8;
    PyArrayObject* k = writable(keys, type, 5, "keys");
    PyArrayObject* v = writable(values, type, 5, "values");
    const int64_t layers = static_cast<int64_t>(decoder_.blocks.size());
    if (PyArray_DIM(k, 0) != layers || PyArray_DIM(k, 2) != decoder_.kv_heads ||
        PyArray_DIM(k, 4) != decoder_.head_width || !PyArray_SAMESHAPE(k, v)) {
      refuse("the cache has another shape than the model needs");
    }
    cache.sequences = PyArray_DIM(k, 1);
    cache.capacity = PyArray_DIM(k, 3);
    cache.keys = pointer<char>(k);
    cache.values = pointer<char>(v);
    if (cache.kind == CacheKind::int8) {
      PyArrayObject* ks = writable(key_scales, NPY_FLOAT32, 4, "key scales");
      PyArrayObject* vs = writable(value_scales, NPY_FLOAT32, 4, "value scales");
      for (int i = 0; i < 4; ++i) {
        if (PyArray_DIM(ks, i) != PyArray_DIM(k, i) || PyArray_DIM(vs, i) != PyArray_DIM(k, i)) {
          refuse("the scales of the cache have another shape than its rows");
        }
      }
      cache.key_scales = pointer<float>(ks);
      cache.value_scales = pointer<float>(vs);
    }
    return cache;
  }

  static PyArrayObject* writable(nb::handle object, int type, int ndim, const char* what) {
    PyArrayObject* array = array_of(object, type, what);
    if (PyArray_NDIM(array) != ndim || !PyArray_ISWRITEABLE(array))
      refuse(std::string(what) + " must be writable, with every dimension");
    return array;
  }

  void check_row(const Row& row, const DecoderCache& cache) const {
    if (row.token < 0 || row.token >= decoder_.vocabulary) refuse("a token is outside the vocabulary");
    if (row.sequence < 0 || row.sequence >= cache.sequences) refuse("a sequence is outside the cache");
    if (row.position < 0 || row.position >= cache.capacity || row.position >= decoder_.positions) {
      refuse("a position is outside the cache or the context");
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
