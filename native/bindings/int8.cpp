// Integer layers, seen from Python: packed weights with their epilogue, applied to uint8 arrays. The layer owns the only
// copy of its weights; `weights()` unpacks them for saving.
#include "kernels/int8.h"

#include <limits>
#include <string>
#include <tuple>

#include "bindings/bindings.h"
#include "bindings/numpy_api.h"
#include "common/alloc.h"
#include "common/thread_pool.h"
#include "kernels/cached.h"
#include "kernels/int8_ops.h"

namespace tw {
namespace {

int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

PyArrayObject* checked(nb::handle object, int type, int ndim, const char* what) {
  PyObject* raw = object.ptr();
  if (!PyArray_Check(raw)) throw nb::type_error((std::string(what) + " must be a NumPy array").c_str());
  auto* array = reinterpret_cast<PyArrayObject*>(raw);
  if (PyArray_TYPE(array) != type || PyArray_NDIM(array) != ndim || !PyArray_ISCARRAY_RO(array)) {
    throw nb::type_error((std::string(what) + " must be C-contiguous with " + std::to_string(ndim) +
                          " dimensions and the documented dtype").c_str());
  }
  return array;
}

nb::object new_array(int ndim, const npy_intp* shape, int type) {
  PyObject* array = PyArray_SimpleNew(ndim, const_cast<npy_intp*>(shape), type);
  if (array == nullptr) throw nb::python_error();
  return nb::steal(array);
}

template <class T>
T* data(nb::handle array) {
  return static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
}

using IntPair = std::tuple<int, int>;

class Int8Layer {
 public:
  // weights (columns, kh, kw, channels) int8; offset int32 (columns,); scale and bias float32 (columns,) or None
  Int8Layer(nb::handle weights, nb::handle offset, nb::handle scale, nb::handle bias, IntPair stride, IntPair padding)
      : stride_h_(std::get<0>(stride)), stride_w_(std::get<1>(stride)), pad_h_(std::get<0>(padding)),
        pad_w_(std::get<1>(padding)) {
    PyArrayObject* w = checked(weights, NPY_INT8, 4, "weights");
    columns_ = static_cast<int>(PyArray_DIM(w, 0));
    kernel_h_ = static_cast<int>(PyArray_DIM(w, 1));
    kernel_w_ = static_cast<int>(PyArray_DIM(w, 2));
    channels_ = static_cast<int>(PyArray_DIM(w, 3));
    if (PyArray_SIZE(w) > std::numeric_limits<int>::max()) throw nb::value_error("the weights have too many elements");
    if (stride_h_ < 1 || stride_w_ < 1 || pad_h_ < 0 || pad_w_ < 0) throw nb::value_error("bad stride or padding");
    groups_ = static_cast<int>(round_up(channels_, kInt8Group)) / kInt8Group;
    const int taps = kernel_h_ * kernel_w_;
    packed_ = Buffer<int8_t>(int8_packed_bytes(columns_, static_cast<int64_t>(taps) * groups_));
    Buffer<int32_t> sums(columns_);
    pack_int8_weights(static_cast<const int8_t*>(PyArray_DATA(w)), columns_, taps, channels_,
                      static_cast<int64_t>(taps) * channels_, channels_, 1, packed_.data(), sums.data());
    offset_ = padded<int32_t>(offset, NPY_INT32, "offset");
    if (!scale.is_none()) scale_ = padded<float>(scale, NPY_FLOAT32, "scale");
    if (!bias.is_none()) bias_ = padded<float>(bias, NPY_FLOAT32, "bias");
  }

  void set_output(int zero, int low, int high) {
    if (zero < 0 || zero > 255 || low < 0 || high > 255 || low > high) throw nb::value_error("bad output range");
    zero_ = zero;
    low_ = low;
    high_ = high;
  }

  void set_residual(float scale, int zero) {
    if (zero < 0 || zero > 255) throw nb::value_error("bad residual zero point");
    residual_scale_ = scale;
    residual_zero_ = zero;
  }

  // x (images, height + 2 border, width + 2 border, channels rounded up to 4) uint8 with its border; same out.
  nb::object conv(nb::handle x, int border, nb::handle residual, int residual_border, int out_border) const {
    PyArrayObject* in = checked(x, NPY_UINT8, 4, "x");
    const int64_t images = PyArray_DIM(in, 0), full_h = PyArray_DIM(in, 1), full_w = PyArray_DIM(in, 2);
    const int64_t pixel = PyArray_DIM(in, 3);
    const int64_t height = full_h - 2 * border, width = full_w - 2 * border;
    if (pixel != groups_ * kInt8Group) throw nb::value_error("x has another number of channels than the weights");
    if (border < pad_h_ || border < pad_w_ || height < 0 || width < 0 || out_border < 0) {
      throw nb::value_error("the border of x is narrower than the padding");
    }
    const int64_t out_h = (height + 2 * pad_h_ - kernel_h_) / stride_h_ + 1;
    const int64_t out_w = (width + 2 * pad_w_ - kernel_w_) / stride_w_ + 1;
    if (height + 2 * pad_h_ < kernel_h_ || width + 2 * pad_w_ < kernel_w_) {
      throw nb::value_error("the filter is larger than the padded image");
    }
    const int64_t out_pixel = round_up(columns_, kInt8Group);
    const int64_t out_full_h = out_h + 2 * out_border, out_full_w = out_w + 2 * out_border;
    if (scale_.size() == 0) throw nb::value_error("the layer has no output scale");

    Int8Problem p = problem();
    p.images = static_cast<int>(images);
    p.height = static_cast<int>(out_h);
    p.width = static_cast<int>(out_w);
    p.in = data<const uint8_t>(x) + ((border - pad_h_) * full_w + (border - pad_w_)) * pixel;
    p.in_grid = {full_h * full_w * pixel, stride_h_ * full_w * pixel, stride_w_ * pixel};
    p.taps = kernel_h_ * kernel_w_;
    Buffer<int64_t> taps(p.taps);
    for (int i = 0; i < p.taps; ++i) taps[i] = (i / kernel_w_ * full_w + i % kernel_w_) * pixel;
    p.tap_offset = taps.data();
    if (!residual.is_none()) {
      PyArrayObject* r = checked(residual, NPY_UINT8, 4, "residual");
      const int64_t rh = out_h + 2 * residual_border, rw = out_w + 2 * residual_border;
      if (PyArray_DIM(r, 0) != images || PyArray_DIM(r, 1) != rh || PyArray_DIM(r, 2) != rw ||
          PyArray_DIM(r, 3) != out_pixel || residual_border < 0) {
        throw nb::value_error("the residual has another shape than the result");
      }
      p.residual = data<const uint8_t>(residual) + (residual_border * rw + residual_border) * out_pixel;
      p.residual_grid = {rh * rw * out_pixel, rw * out_pixel, out_pixel};
    }
    const npy_intp shape[4] = {images, out_full_h, out_full_w, out_pixel};
    nb::object out = new_array(4, shape, NPY_UINT8);
    uint8_t* base = data<uint8_t>(out);
    p.kind = Int8Out::uint8;
    p.out = base + (out_border * out_full_w + out_border) * out_pixel;
    p.out_grid = {out_full_h * out_full_w * out_pixel, out_full_w * out_pixel, out_pixel};
    p.out_columns = static_cast<int>(out_pixel);
    GilRelease release(true);
    fill_border(base, images, out_full_h, out_full_w, out_pixel, out_border);
    run_int8(p);
    return out;
  }

  // x (rows, channels rounded up to 4) uint8; kind 0: int32, 1: float32, 2: uint8
  nb::object linear(nb::handle x, int kind, nb::handle row_scale, bool relu) const {
    PyArrayObject* in = checked(x, NPY_UINT8, 2, "x");
    const int64_t rows = PyArray_DIM(in, 0), width = PyArray_DIM(in, 1);
    if (kernel_h_ != 1 || kernel_w_ != 1 || width != groups_ * kInt8Group || rows > std::numeric_limits<int>::max()) {
      throw nb::value_error("x does not fit the weights");
    }
    if (kind < 0 || kind > 2 || (kind != 0 && scale_.size() == 0)) throw nb::value_error("the layer has no output scale");
    Int8Problem p = problem();
    p.width = static_cast<int>(rows);
    p.in = data<const uint8_t>(x);
    p.in_grid.column_step = width;
    const int64_t no_offset = 0;
    p.tap_offset = &no_offset;
    p.kind = static_cast<Int8Out>(kind);
    p.relu = relu;
    if (!row_scale.is_none()) {
      if (PyArray_DIM(checked(row_scale, NPY_FLOAT32, 1, "row_scale"), 0) != rows) {
        throw nb::value_error("row_scale needs one number per row");
      }
      p.row_scale = data<const float>(row_scale);
    }
    p.out_columns = kind == 2 ? static_cast<int>(round_up(columns_, kInt8Group)) : columns_;
    const npy_intp shape[2] = {rows, p.out_columns};
    nb::object out = new_array(2, shape, kind == 0 ? NPY_INT32 : kind == 1 ? NPY_FLOAT32 : NPY_UINT8);
    p.out = data<void>(out);
    p.out_grid.column_step = p.out_columns;
    GilRelease release(rows * columns_ * width > 10000);
    run_int8(p);
    return out;
  }

  // The weights as they were given: (columns, kh, kw, channels) int8.
  nb::object weights() const {
    const npy_intp shape[4] = {columns_, kernel_h_, kernel_w_, channels_};
    nb::object out = new_array(4, shape, NPY_INT8);
    int8_t* to = data<int8_t>(out);
    const int taps = kernel_h_ * kernel_w_, step = kInt8Panel * kInt8Group;
    for (int column = 0; column < columns_; ++column) {
      for (int t = 0; t < taps; ++t) {
        const int64_t at = (static_cast<int64_t>(column / kInt8Panel) * taps + t) * groups_ * step +
                           column % kInt8Panel * kInt8Group;
        for (int c = 0; c < channels_; ++c) *to++ = packed_[at + c / kInt8Group * step + c % kInt8Group];
      }
    }
    return out;
  }

  int64_t nbytes() const {
    return static_cast<int64_t>(packed_.size() + 4 * (offset_.size() + scale_.size() + bias_.size()));
  }

 private:
  template <class T>
  Buffer<T> padded(nb::handle values, int type, const char* what) const {
    if (PyArray_DIM(checked(values, type, 1, what), 0) != columns_) {
      throw nb::value_error((std::string(what) + " needs one number per column").c_str());
    }
    Buffer<T> out(round_up(columns_, kInt8Panel));
    for (std::size_t i = 0; i < out.size(); ++i) out[i] = i < static_cast<std::size_t>(columns_) ? data<const T>(values)[i] : T{0};
    return out;
  }

  Int8Problem problem() const {
    Int8Problem p;
    p.groups_per_tap = groups_;
    p.weights = packed_.data();
    p.columns = columns_;
    p.offset = offset_.data();
    p.scale = scale_.data();
    p.bias = bias_.data();
    p.zero = zero_;
    p.low = low_;
    p.high = high_;
    p.residual_scale = residual_scale_;
    p.residual_zero = residual_zero_;
    return p;
  }

  void fill_border(uint8_t* base, int64_t images, int64_t h, int64_t w, int64_t pixel, int border) const {
    if (border == 0) return;
    const int64_t row = w * pixel;
    for (int64_t i = 0; i < images; ++i, base += h * row) {
      std::memset(base, zero_, border * row);
      for (int64_t y = border; y < h - border; ++y) {
        std::memset(base + y * row, zero_, border * pixel);
        std::memset(base + (y + 1) * row - border * pixel, zero_, border * pixel);
      }
      std::memset(base + (h - border) * row, zero_, border * row);
    }
  }

  int columns_, kernel_h_, kernel_w_, channels_, groups_;
  int stride_h_, stride_w_, pad_h_, pad_w_;
  Buffer<int8_t> packed_;
  Buffer<int32_t> offset_;
  Buffer<float> scale_, bias_;
  int zero_ = 0, low_ = 0, high_ = 255, residual_zero_ = 0;
  float residual_scale_ = 0.0f;
};

// An image buffer of the integer layers: shape, border, and where its inside begins.
struct Plane {
  int64_t images, height, width, pixel, border;

  Plane(PyArrayObject* x, int border_) : border(border_) {
    images = PyArray_DIM(x, 0);
    height = PyArray_DIM(x, 1) - 2 * border;
    width = PyArray_DIM(x, 2) - 2 * border;
    pixel = PyArray_DIM(x, 3);
    if (border < 0 || height < 0 || width < 0) throw nb::value_error("the border is wider than the image");
  }
  Plane(int64_t n, int64_t h, int64_t w, int64_t c, int b) : images(n), height(h), width(w), pixel(c), border(b) {
    if (b < 0) throw nb::value_error("a border cannot be negative");
  }
  int64_t row_step() const { return (width + 2 * border) * pixel; }
  int64_t image_step() const { return (height + 2 * border) * row_step(); }
  int64_t inside() const { return border * row_step() + border * pixel; }
  nb::object allocate(int fill) const {
    const npy_intp shape[4] = {images, height + 2 * border, width + 2 * border, pixel};
    nb::object out = new_array(4, shape, NPY_UINT8);
    if (border > 0) std::memset(data<uint8_t>(out), fill, images * image_step());
    return out;
  }
};

void check_zero(int zero) {
  if (zero < 0 || zero > 255) throw nb::value_error("a zero point lies between 0 and 255");
}

nb::object quantize_images(nb::handle x, float scale, int zero, int border) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 4, "x");
  check_zero(zero);
  const int64_t channels = PyArray_DIM(in, 1);
  const Plane plane(PyArray_DIM(in, 0), PyArray_DIM(in, 2), PyArray_DIM(in, 3), round_up(channels, kInt8Group), border);
  nb::object out = plane.allocate(zero);
  GilRelease release(true);
  const int64_t image = channels * plane.height * plane.width;
  parallel_for(static_cast<int>(plane.images), [&](int i) {
    active_int8_ops().quantize_image(data<const float>(x) + i * image, channels, plane.height, plane.width, 1.0f / scale,
                                     zero, data<uint8_t>(out) + i * plane.image_step() + plane.inside(),
                                     plane.row_step(), plane.pixel);
  });
  return out;
}

// x (rows, n) float32 to (rows, n rounded up to 4) bytes by one scale.
nb::object quantize_flat(nb::handle x, float scale, int zero) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 2, "x");
  check_zero(zero);
  const int64_t rows = PyArray_DIM(in, 0), n = PyArray_DIM(in, 1), padded = round_up(n, kInt8Group);
  const npy_intp shape[2] = {rows, padded};
  nb::object out = new_array(2, shape, NPY_UINT8);
  GilRelease release(rows * n > 10000);
  for (int64_t r = 0; r < rows; ++r) {
    active_int8_ops().quantize(data<const float>(x) + r * n, n, 1.0f / scale, zero, data<uint8_t>(out) + r * padded);
    std::memset(data<uint8_t>(out) + r * padded + n, zero, padded - n);
  }
  return out;
}

// x (rows, n) float32 to bytes with 128 added, each row by its own scale: (bytes, scales).
std::tuple<nb::object, nb::object> quantize_rows(nb::handle x) {
  PyArrayObject* in = checked(x, NPY_FLOAT32, 2, "x");
  const int64_t rows = PyArray_DIM(in, 0), n = PyArray_DIM(in, 1), padded = round_up(n, kInt8Group);
  const npy_intp shape[2] = {rows, padded};
  nb::object bytes = new_array(2, shape, NPY_UINT8), scales = new_array(1, shape, NPY_FLOAT32);
  GilRelease release(rows * n > 10000);
  for (int64_t r = 0; r < rows; ++r) {
    data<float>(scales)[r] =
        active_cached().quantize_row(data<const float>(x) + r * n, n, padded, data<uint8_t>(bytes) + r * padded);
  }
  return {bytes, scales};
}

nb::object max_pool(nb::handle x, int border, IntPair kernel, IntPair stride, IntPair padding, int out_border, int zero) {
  const Plane in(checked(x, NPY_UINT8, 4, "x"), border);
  check_zero(zero);
  const PoolWindow w{std::get<0>(kernel), std::get<1>(kernel), std::get<0>(stride),
                     std::get<1>(stride), std::get<0>(padding), std::get<1>(padding)};
  if (w.kernel_h < 1 || w.kernel_w < 1 || w.stride_h < 1 || w.stride_w < 1 || w.pad_h < 0 || w.pad_w < 0 ||
      2 * w.pad_h > w.kernel_h || 2 * w.pad_w > w.kernel_w || in.height + 2 * w.pad_h < w.kernel_h ||
      in.width + 2 * w.pad_w < w.kernel_w) {
    throw nb::value_error("the pooling window does not fit the image");
  }
  const Plane out(in.images, (in.height + 2 * w.pad_h - w.kernel_h) / w.stride_h + 1,
                  (in.width + 2 * w.pad_w - w.kernel_w) / w.stride_w + 1, in.pixel, out_border);
  nb::object result = out.allocate(zero);
  GilRelease release(true);
  parallel_for(static_cast<int>(in.images), [&](int i) {
    active_int8_ops().max_pool(data<const uint8_t>(x) + i * in.image_step() + in.inside(), in.height, in.width,
                               in.row_step(), in.pixel, w, out.height, out.width,
                               data<uint8_t>(result) + i * out.image_step() + out.inside(), out.row_step());
  });
  return result;
}

nb::object sum_pixels(nb::handle x, int border) {
  const Plane in(checked(x, NPY_UINT8, 4, "x"), border);
  const npy_intp shape[2] = {in.images, in.pixel};
  nb::object sums = new_array(2, shape, NPY_INT32);
  GilRelease release(true);
  for (int64_t i = 0; i < in.images; ++i) {
    active_int8_ops().sum_pixels(data<const uint8_t>(x) + i * in.image_step() + in.inside(), in.height, in.width,
                                 in.row_step(), in.pixel, data<int32_t>(sums) + i * in.pixel);
  }
  return sums;
}

}  // namespace

void bind_int8(nb::module_& m) {
  m.def("int8_quantize_images", quantize_images, nb::arg("x"), nb::arg("scale"), nb::arg("zero"), nb::arg("border"));
  m.def("int8_quantize", quantize_flat, nb::arg("x"), nb::arg("scale"), nb::arg("zero"));
  m.def("int8_quantize_rows", quantize_rows, nb::arg("x"));
  m.def("int8_max_pool", max_pool, nb::arg("x"), nb::arg("border"), nb::arg("kernel"), nb::arg("stride"),
        nb::arg("padding"), nb::arg("out_border"), nb::arg("zero"));
  m.def("int8_sum_pixels", sum_pixels, nb::arg("x"), nb::arg("border"));
  nb::class_<Int8Layer>(m, "Int8Layer")
      .def(nb::init<nb::handle, nb::handle, nb::handle, nb::handle, IntPair, IntPair>(), nb::arg("weights"),
           nb::arg("offset"), nb::arg("scale").none(), nb::arg("bias").none(), nb::arg("stride"), nb::arg("padding"))
      .def("set_output", &Int8Layer::set_output)
      .def("set_residual", &Int8Layer::set_residual)
      .def("conv", &Int8Layer::conv, nb::arg("x"), nb::arg("border"), nb::arg("residual").none(),
           nb::arg("residual_border"), nb::arg("out_border"))
      .def("linear", &Int8Layer::linear, nb::arg("x"), nb::arg("kind"), nb::arg("row_scale").none(), nb::arg("relu"))
      .def("weights", &Int8Layer::weights)
      .def_prop_ro("nbytes", &Int8Layer::nbytes);
}

}  // namespace tw
