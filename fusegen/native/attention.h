// Attention by torch's kernels for GPUs, called as fusegen/runtime/library.py does, without Python.

#pragma once

#include "native.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <vector>

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>

namespace attention {

using Results = std::vector<at::Tensor>;

struct Call {
  double scale;
  bool is_causal;
  std::vector<int64_t> wanted;  // results, by their numbers

  // Those of the forward pass, or of the backward pass; none where operands have to be copied first, or repeated for more heads.
  Results forward(at::TensorList operands) const;
  Results backward(at::TensorList operands) const;

 private:
  static constexpr int64_t kFlash = 1, kEfficient = 2, kCudnn = 3;  // numbers of torch's kernels

  // The number of the kernel that torch takes; where it would keep all scores, that of the one that takes everything.
  int64_t kernel(const at::Tensor &q, const at::Tensor &k, const at::Tensor &v, const std::optional<at::Tensor> &bias) const {
    const int64_t found = at::_fused_sdp_choice(q, k, v, bias, 0, is_causal, scale, q.size(1) != k.size(1));
    return found == kFlash || found == kCudnn ? found : kEfficient;
  }

  // True where the kernel reads the operands as they are.
  static bool reads(int64_t kernel, const at::Tensor &q, const at::Tensor &k, const std::optional<at::Tensor> &bias);

  bool wants(int64_t number) const { return std::find(wanted.begin(), wanted.end(), number) != wanted.end(); }

  Results chosen(const Results &made) const {
    Results found;
    for (int64_t number : wanted) found.push_back(made.at(number));
    return found;
  }
};

constexpr int64_t kAlignment = 16;

bool is_aligned(const at::Tensor &x, int64_t size) {
  const at::IntArrayRef strides = x.strides().slice(0, x.dim() - 1);
  return !(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kAlignment) && x.stride(-1) == 1 &&
         std::none_of(strides.begin(), strides.end(), [&](int64_t stride) { return stride * size % kAlignment; });
}

// As all kernels read it: contiguous channels, and rows that begin at multiples of 16 bytes.
bool is_regular(const at::Tensor &x) { return x.is_cuda() && x.numel() && is_aligned(x, x.element_size()); }

bool Call::reads(int64_t kernel, const at::Tensor &q, const at::Tensor &k, const std::optional<at::Tensor> &bias) {
  if (bias && bias->size(-1) != k.size(2)) return false;
  return kernel != kEfficient || (q.size(1) == k.size(1) && (!bias || is_aligned(*bias, 1)));
}

std::optional<at::Tensor> bias_of(at::TensorList operands, size_t place) {
  return operands.size() > place ? std::optional<at::Tensor>(operands[place]) : std::nullopt;
}

// A bias of all scores.
std::optional<at::Tensor> whole(const std::optional<at::Tensor> &bias, const at::Tensor &q, const at::Tensor &k) {
  if (!bias) return bias;
  return bias->expand({q.size(0), q.size(1), q.size(2), k.size(2)});
}

Results Call::forward(at::TensorList operands) const {
  const at::Tensor &q = operands[0], &k = operands[1], &v = operands[2];
  const std::optional<at::Tensor> bias = bias_of(operands, 3);
  if (!is_regular(q) || !is_regular(k) || !is_regular(v)) return {};
  const int64_t by = kernel(q, k, v, bias);
  if (!reads(by, q, k, bias)) return {};
  const bool needs_sums = wants(1);
  at::Tensor values, sums;
  const auto take = [&](const auto &made) {
    values = std::get<0>(made);
    sums = std::get<1>(made);
  };
  if (by == kCudnn) take(at::_scaled_dot_product_cudnn_attention(q, k, v, bias, needs_sums, 0, is_causal, false, scale));
  else if (by == kFlash) take(at::_scaled_dot_product_flash_attention(q, k, v, 0, is_causal, false, scale));
  else take(at::_scaled_dot_product_efficient_attention(q, k, v, whole(bias, q, k), needs_sums, 0, is_causal, scale));
  if (needs_sums && sums.sizes() != q.sizes().slice(0, 3)) sums = sums.reshape({q.size(0), q.size(1), -1}).narrow(2, 0, q.size(2));
  return chosen({values, sums});
}

Results Call::backward(at::TensorList operands) const {
  const at::Tensor &gradient = operands[0], &values = operands[1], &q = operands[3], &k = operands[4], &v = operands[5];
  at::Tensor sums = operands[2];
  const std::optional<at::Tensor> bias = bias_of(operands, 6);
  for (const at::Tensor *each : {&gradient, &values, &q, &k, &v})
    if (!is_regular(*each)) return {};
  const bool needs_bias = wants(3);  // which the efficient kernel alone gives
  const int64_t by = needs_bias ? kEfficient : kernel(q, k, v, bias), queries = q.size(2), keys = k.size(2);
  if (!reads(by, q, k, bias)) return {};
  const at::Tensor none, undrawn = at::empty({}, sums.options().dtype(at::kLong));  // which is read with dropout alone
  if (by == kEfficient) {
    constexpr int64_t rows = 32;  // the kernel's logsumexp has a multiple of so many
    if (queries % rows) sums = at::constant_pad_nd(sums, {0, rows - queries % rows}, std::numeric_limits<double>::infinity());
    const auto [by_q, by_k, by_v, by_bias] = at::_scaled_dot_product_efficient_attention_backward(
        gradient, q, k, v, whole(bias, q, k).value_or(none), values, sums, undrawn, undrawn, 0, {true, true, true, needs_bias}, is_causal, scale);
    return chosen({by_q, by_k, by_v, needs_bias ? by_bias.narrow(-1, 0, keys) : none});
  }
  const auto [by_q, by_k, by_v] =
      by == kCudnn
          ? at::_scaled_dot_product_cudnn_attention_backward(gradient, q, k, v, values, sums.unsqueeze(-1), undrawn, undrawn,
                                                             bias.value_or(none), none, none, queries, keys, 0, is_causal, scale)
          : at::_scaled_dot_product_flash_attention_backward(gradient, q, k, v, values, sums, none, none, queries, keys, 0, is_causal,
                                                             undrawn, undrawn, scale);
  return chosen({by_q, by_k, by_v});
}

}  // namespace attention
