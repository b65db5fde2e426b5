// The operators of a graph, by family. `padding`: pixels of padding (halo) to leave around each image of an integer
// result, for the operator that reads it.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "common/int16_layer.h"
#include "common/int8_layer.h"
#include "graph/op.h"
#include "ops/float_layers.h"

namespace tw {

using OpPtr = std::unique_ptr<Op>;

// The layout of a dynamically quantized pixel: its uint8 channels, rounded up to groups of four, then its float scale.
struct RowQuantized {
  static int64_t channels(int64_t floats) { return round_up(floats, kInt8Group) + static_cast<int64_t>(sizeof(float)); }
};

// The output stage of an integer operator: how its accumulators are requantized to uint8 or int16.
struct OutputStage {
  bool is_int16 = false;
  Uint8Stage uint8;
  Int16Stage int16;
};

// --- quantize.cpp ---
OpPtr quantize_op(float scale, int zero_point, int padding);
OpPtr quantize_int16_op(float scale, int limit, int padding);  // clips to [-limit, limit]
OpPtr dequantize_op(float scale, Layout layout = Layout::planes);
// Dynamic quantization: floats to uint8 with zero point 128 and a scale per pixel, stored after it (`RowQuantized`).
OpPtr quantize_rows_op();
OpPtr layout_op(Layout layout);  // converts floats to this layout
OpPtr dense_op();                // copies channels-last floats so that no gaps are left between pixels

// --- conv.cpp: convolutions and linear layers ---
OpPtr conv_op(std::shared_ptr<const Int8Layer> layer, bool residual, int padding);
OpPtr conv_op(std::shared_ptr<const Int8GroupedLayer> layer, bool residual, int padding);
OpPtr conv_op(std::shared_ptr<const Int16Layer> layer, bool residual, bool relu, int padding);
OpPtr conv_op(std::shared_ptr<const FloatConvLayer> layer, const ConvShape& shape, ConvAlgorithm preferred);
OpPtr linear_op(std::shared_ptr<const Int8Layer> layer, bool to_float, bool relu);
OpPtr linear_op(std::shared_ptr<const FloatLinearLayer> layer, int64_t rows, ConvAlgorithm preferred);
// Inputs: the result of `quantize_rows_op`, and optionally a residual of floats. The result is floats.
OpPtr dynamic_linear_op(std::shared_ptr<const Int8Layer> layer, ConvActivation activation);
ConvAlgorithm algorithm_of(const Op& op);  // `automatic` unless it is a float convolution or linear layer

// --- pool.cpp ---
OpPtr pool_op(const PoolWindow& window, bool mean, int padding);
OpPtr global_mean_op();  // of floats
// `scale` belongs to the input. `int16_limit` of 0: the result is uint8.
struct PoolScales {
  float scale, out_scale;
  int out_zero_point, int16_limit;
};
OpPtr global_mean_op(const PoolScales& scales, bool rows, int padding);

// --- elementwise.cpp ---
OpPtr add_op(float a_scale, float b_scale, const OutputStage& stage, int padding);
// `scale` multiplies the product. If `fraction` is not 0, the second input is a gate of one pixel per image, which is
// multiplied by `fraction` and rounded to 16-bit fixed point.
OpPtr mul_op(float scale, float fraction, const OutputStage& stage, int padding);
OpPtr affine_op(const std::vector<float>& scale, const std::vector<float>& shift, const OutputStage& stage,
                int padding);
OpPtr binary_op(BinaryKind kind, ConvActivation activation);  // of floats
OpPtr affine_op(const std::vector<float>& scale, const std::vector<float>& shift, ConvActivation activation);

// --- movement.cpp: all data types ---
OpPtr concat_op(int padding);
OpPtr slice_op(int64_t first, int64_t count, int padding);
OpPtr gather_channels_op(const std::vector<int>& channels, int padding);
OpPtr upsample_op(int64_t by_h, int64_t by_w, int padding);
OpPtr depth_to_space_op(int64_t by_h, int64_t by_w, int padding);  // groups of channels become by_h x by_w pixels
OpPtr flatten_op(bool channels_first = false);                     // in the order (C, H, W) or (H, W, C)
OpPtr pixel_as_row_op(bool rows, int padding);                     // one integer pixel to a row, or back
// Floats: gathers the pixels with these numbers from every image into the shape (n, h, w); all pixels if `index` is
// empty.
OpPtr gather_spatial_op(const std::vector<int>& index, int64_t n, int64_t h, int64_t w);
// Floats: interpolation along rows or columns. `positions` and `weights` have shape (taps, rows or columns of the
// result).
OpPtr resample_op(bool rows, const std::vector<int>& positions, const std::vector<float>& weights, int64_t taps);
OpPtr transpose_op();  // floats (N, C, H, W) to (N, H * W, 1, C)

// --- norm_attention.cpp: floats ---
OpPtr layer_norm_op(const std::vector<float>& weight, const std::vector<float>& bias, float eps);
OpPtr group_norm_op(int64_t groups, const std::vector<float>& weight, const std::vector<float>& bias, float eps);

// Where the heads are in the channels of queries, keys and values: the first channel of head 0, the distance between
// heads, and their sizes.
struct AttentionHeads {
  int64_t count, first[3], step[3], dim, value_dim;
  float scale;
  bool causal;
};
OpPtr attention_op(const AttentionHeads& heads);  // inputs: queries, keys, values, optionally a mask

// One direction of a layer "lstm", "gru" (reset gate applied after the product), "rnn_tanh" or "rnn_relu" over (steps,
// batch, gates). `weight` has shape (size, gates); `bias` (size) belongs to the candidate state of a GRU. The result of
// an LSTM has one more step: the last cell state.
OpPtr recurrent_op(const std::string& kind, int64_t steps, bool reverse, const float* weight, int64_t size,
                   int64_t gates, const float* bias);

// --- strided.cpp: floats of any rank, read through strides ---

// The strides of a channels-last value along the axes of a loop: {pixels, channels} per axis, one of which is 0.
struct StridedOperand {
  int64_t first_pixel = 0, first_channel = 0;
  std::vector<std::array<int64_t, 2>> steps;
};
// A loop over `sizes`, with the shape of its result, whose last axis is contiguous.
struct StridedLoop {
  std::vector<int64_t> sizes;
  std::vector<StridedOperand> operands;
  StridedOperand result;
  int64_t n = 1, channels = 1, height = 1, width = 1;
};
struct GroupedHeads {
  int64_t keys, dim;
  float scale;
  bool causal;
};
OpPtr map_op(StridedLoop loop, const std::string& kind, float low, float high);
OpPtr reduce_op(StridedLoop loop, const std::string& kind, std::size_t reduced);  // over the last `reduced` axes
OpPtr softmax_op(StridedLoop loop);
OpPtr cumulative_sum_op(StridedLoop loop, std::size_t axis);
OpPtr matmul_op(StridedLoop loop, int64_t k);
OpPtr assemble_op(std::vector<StridedLoop> loops, float fill, bool covered);  // covered: the loops write all of it
OpPtr grouped_attention_op(StridedLoop loop, const GroupedHeads& heads);
OpPtr rms_norm_op(const std::vector<float>& weight, float eps);

}  // namespace tw
