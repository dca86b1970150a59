// Attention by torch's kernels for GPUs, called as fusegen/runtime/library.py does, without Python.

#pragma once

#include "native.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/empty.h>

namespace attention {

using Results = std::vector<at::Tensor>;

struct Call {
  double scale;
  bool is_causal;
  std::vector<int64_t> wanted;  // results, by their numbers

  // Those of the forward pass, or of the backward pass; none where it takes more than cuDNN's kernel or the flash kernel.
  Results forward(at::TensorList operands) const;
  Results backward(at::TensorList operands) const;

 private:
  static constexpr int64_t kFlash = 1, kCudnn = 3;  // numbers of torch's kernels

  int64_t kernel(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const std::optional<at::Tensor> &bias) const {
    return at::_fused_sdp_choice(q, k, v, bias, 0, is_causal, scale, q.size(1) != k.size(1));
  }

  bool wants(int64_t number) const { return std::find(wanted.begin(), wanted.end(), number) != wanted.end(); }

  Results chosen(const Results &made) const {
    Results found;
    for (int64_t number : wanted) found.push_back(made.at(number));
    return found;
  }
};

// As all kernels read it: contiguous channels, and rows that begin at multiples of 16 bytes.
bool is_regular(const at::Tensor &x) {
  constexpr int64_t alignment = 16;
  if (!x.is_cuda() || !x.numel() || reinterpret_cast<uintptr_t>(x.const_data_ptr()) % alignment || x.stride(-1) != 1) return false;
  const at::IntArrayRef strides = x.strides().slice(0, x.dim() - 1);
  return std::none_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride * x.element_size() % alignment; });
}

std::optional<at::Tensor> bias_of(at::TensorList operands, size_t place) {
  return operands.size() > place ? std::optional<at::Tensor>(operands[place]) : std::nullopt;
}

Results Call::forward(at::TensorList operands) const {
  const at::Tensor &q = operands[0], &k = operands[1], &v = operands[2];
  const std::optional<at::Tensor> bias = bias_of(operands, 3);
  if (!is_regular(q) || !is_regular(k) || !is_regular(v) || (bias && bias->size(-1) != k.size(2))) return {};
  const int64_t chosen_kernel = kernel(q, k, v, bias);
  const bool needs_sums = wants(1);
  at::Tensor values, sums;
  if (chosen_kernel == kCudnn) {
    const auto made = at::_scaled_dot_product_cudnn_attention(q, k, v, bias, needs_sums, 0, is_causal, false, scale);
    values = std::get<0>(made);
    sums = std::get<1>(made);
  } else if (chosen_kernel == kFlash) {
    const auto made = at::_scaled_dot_product_flash_attention(q, k, v, 0, is_causal, false, scale);
    values = std::get<0>(made);
    sums = std::get<1>(made);
  } else {
    return {};
  }
  if (needs_sums && sums.sizes() != q.sizes().slice(0, 3)) sums = sums.reshape({q.size(0), q.size(1), -1}).narrow(2, 0, q.size(2));
  return chosen({values, sums});
}

Results Call::backward(at::TensorList operands) const {
  const at::Tensor &gradient = operands[0], &values = operands[1], &sums = operands[2];
  const at::Tensor &q = operands[3], &k = operands[4], &v = operands[5];
  const std::optional<at::Tensor> bias = bias_of(operands, 6);
  for (const at::Tensor &each : {gradient, values, q, k, v})
    if (!is_regular(each)) return {};
  if (wants(3) || (bias && bias->size(-1) != k.size(2))) return {};
  const int64_t chosen_kernel = kernel(q, k, v, bias), queries = q.size(2), keys = k.size(2);
  if (chosen_kernel != kCudnn && chosen_kernel != kFlash) return {};
  const at::Tensor none, undrawn = at::empty({}, sums.options().dtype(at::kLong));  // which is read with dropout alone
  std::tuple<at::Tensor, at::Tensor, at::Tensor> made;
  if (chosen_kernel == kCudnn)
    made = at::_scaled_dot_product_cudnn_attention_backward(gradient, q, k, v, values, sums.unsqueeze(-1), undrawn, undrawn,
                                                            bias.value_or(none), none, none, queries, keys, 0, is_causal, scale);
  else
    made = at::_scaled_dot_product_flash_attention_backward(gradient, q, k, v, values, sums, none, none, queries, keys, 0, is_causal,
                                                            undrawn, undrawn, scale);
  return chosen({std::get<0>(made), std::get<1>(made), std::get<2>(made)});
}

}  // namespace attention
