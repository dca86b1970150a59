// Attention by the kernel that torch selects. If torch would materialize all scores, the efficient kernel runs, which accepts all
// inputs. `fusegen/runtime/library.py` is the same in Python. Only units that call attention include this file.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention.h>
#include <ATen/ops/_scaled_dot_product_cudnn_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention.h>
#include <ATen/ops/_scaled_dot_product_efficient_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_backward.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

namespace {
namespace fg {

constexpr int64_t kFlash = 1, kEfficient = 2, kCudnn = 3, kMultiple = 16, kRows = 32;

using Bias = std::optional<at::Tensor>;

inline int64_t kernel_for(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const Bias& bias, bool causal, double scale) {
  const int64_t chosen = at::_fused_sdp_choice(q, k, v, bias, 0.0, causal, scale, q.size(1) != k.size(1));
  return chosen == kFlash || chosen == kCudnn ? chosen : kEfficient;
}

// Returns the operand in a layout that all kernels accept: contiguous channels, rows aligned to 16 bytes.
inline at::Tensor regular(const at::Tensor& x) {
  bool is_regular = x.stride(-1) == 1 && reinterpret_cast<uintptr_t>(x.data_ptr()) % kMultiple == 0;
  for (int64_t dim = 0; dim < 3; ++dim) is_regular = is_regular && x.stride(dim) * x.element_size() % kMultiple == 0;
  return is_regular ? x : x.clone(at::MemoryFormat::Contiguous);
}

// Repeats keys or values for each query head of a GQA group.
inline at::Tensor of_each_head(const at::Tensor& x, const at::Tensor& q) {
  return x.size(1) == q.size(1) ? x : x.repeat_interleave(q.size(1) / x.size(1), 1);
}

// Adds up the gradients of repeated heads.
inline at::Tensor of_few(const at::Tensor& gradient, int64_t heads) {
  return gradient.size(1) == heads ? gradient : gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

// Returns the bias with one element per key, contiguous along keys.
inline Bias of_each_key(const Bias& bias, const at::Tensor& k) {
  if (!bias || bias->size(-1) == k.size(2)) return bias;
  return bias->expand({bias->size(0), bias->size(1), bias->size(2), k.size(2)}).contiguous();
}

// Returns the bias as the efficient kernel reads it: the shape of the scores, rows aligned to 16 elements.
inline Bias aligned(const Bias& bias, const at::Tensor& q, const at::Tensor& k) {
  if (!bias) return bias;
  const int64_t keys = k.size(2);
  at::Tensor found = *bias;
  bool is_aligned = found.stride(-1) == 1 && reinterpret_cast<uintptr_t>(found.data_ptr()) % kMultiple == 0;
  for (int64_t dim = 0; dim < 3; ++dim) is_aligned = is_aligned && found.stride(dim) % kMultiple == 0;
  if (!is_aligned) found = at::constant_pad_nd(found, {0, (kMultiple - keys % kMultiple) % kMultiple}, 0).slice(-1, 0, keys);
  return found.expand({q.size(0), q.size(1), q.size(2), keys});
}

inline bool is_empty(const at::Tensor& q, const at::Tensor& k) { return q.numel() == 0 || k.numel() == 0; }

inline std::vector<at::Tensor> attention(const Wanted& wanted, const std::vector<double>& numbers,
                                         const std::vector<at::Tensor>& given) {
  const double scale = numbers[0], dropout = numbers[2];
  const bool causal = numbers[1] != 0;
  const at::Tensor q = regular(given[0]), k = regular(given[1]), v = regular(given[2]);
  const Bias bias = of_each_key(given.size() > 3 ? Bias(given[3]) : std::nullopt, k);
  const bool needs_sums = std::any_of(wanted.begin(), wanted.end(), [](const auto& one) { return one.first == 1; });
  at::Tensor values, sums, state;
  if (is_empty(q, k)) {
    values = at::zeros_like(q);
    sums = at::zeros({q.size(0), q.size(1), q.size(2)}, q.options().dtype(c10::promoteTypes(q.scalar_type(), at::kFloat)));
    state = at::zeros({2}, q.options().dtype(at::kLong));
  } else if (!q.is_cuda()) {
    std::tie(values, sums) = at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, bias, scale);
    // If all scores of a query are NaN, this kernel returns 0 for its values and for its logsumexp.
    if (!sums.all().item<bool>() && !std::isfinite(q.sum(at::kDouble).item<double>() + k.sum(at::kDouble).item<double>()))
      values = std::get<0>(at::_scaled_dot_product_attention_math(q, of_each_head(k, q), of_each_head(v, q), bias, 0.0, causal,
                                                                  std::nullopt, scale));
  } else if (const int64_t kernel = dropout ? kFlash : kernel_for(q, k, v, bias, causal, scale); kernel == kCudnn) {
    const auto found = at::_scaled_dot_product_cudnn_attention(q, k, v, bias, needs_sums, 0.0, causal, false, scale);
    values = std::get<0>(found), sums = std::get<1>(found);
  } else if (kernel == kFlash) {
    const auto found = at::_scaled_dot_product_flash_attention(q, k, v, dropout, causal, false, scale);
    values = std::get<0>(found), sums = std::get<1>(found), state = std::get<6>(found).view(at::kLong);
  } else {
    const at::Tensor each_k = of_each_head(k, q), each_v = of_each_head(v, q);
    const Bias whole = aligned(bias, q, k);
    const auto found = at::_scaled_dot_product_efficient_attention(q, each_k, each_v, whole, needs_sums, 0.0, causal, scale);
    values = std::get<0>(found), sums = std::get<1>(found);
  }
  std::vector<at::Tensor> results;
  for (const auto& [number, _] : wanted)
    results.push_back(number == 0 ? values : number == 2 ? state : sums.reshape({q.size(0), q.size(1), -1}).slice(2, 0, q.size(2)));
  return results;
}

inline std::vector<at::Tensor> attention_backward(const Wanted& wanted, const std::vector<double>& numbers,
                                                  const std::vector<at::Tensor>& given) {
  const double scale = numbers[0], dropout = numbers[2];
  const bool causal = numbers[1] != 0;
  const at::Tensor gradient = regular(given[0]), values = regular(given[1]), &sums = given[2];
  const at::Tensor q = regular(given[3]), k = regular(given[4]), v = regular(given[5]);
  const Bias bias = of_each_key(given.size() > 6 && !dropout ? Bias(given[6]) : std::nullopt, k);
  const bool needs_bias = std::any_of(wanted.begin(), wanted.end(), [](const auto& one) { return one.first == 3; });
  const int64_t queries = q.size(2), keys = k.size(2), few = k.size(1);
  const at::Tensor none = at::zeros({}, q.options().dtype(at::kLong));
  std::array<at::Tensor, 4> found;
  if (is_empty(q, k)) {
    for (int64_t number = 0; number < 4; ++number) found[number] = number < 3 || bias ? at::zeros_like(given[3 + number]) : none;
  } else if (!q.is_cuda()) {
    const at::Tensor each_k = of_each_head(k, q), each_v = of_each_head(v, q);
    std::tie(found[0], found[1], found[2]) = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, q, each_k, each_v, values, sums, 0.0, causal, bias, scale);
    found[1] = of_few(found[1], few), found[2] = of_few(found[2], few);
  } else if (const int64_t kernel = needs_bias ? kEfficient : dropout ? kFlash : kernel_for(q, k, v, bias, causal, scale); kernel == kCudnn) {
    std::tie(found[0], found[1], found[2]) = at::_scaled_dot_product_cudnn_attention_backward(
        gradient, q, k, v, values, sums.unsqueeze(-1), none, none, bias.value_or(at::Tensor()), at::Tensor(), at::Tensor(), queries,
        keys, 0.0, causal, scale);
  } else if (kernel == kFlash) {
    std::tie(found[0], found[1], found[2]) = at::_scaled_dot_product_flash_attention_backward(
        gradient, q, k, v, values, sums, at::Tensor(), at::Tensor(), queries, keys, dropout, causal,
        dropout ? given[6].view(at::kUInt64) : none, none, scale);
  } else {
    const at::Tensor each_k = of_each_head(k, q), each_v = of_each_head(v, q);
    const at::Tensor padded = at::constant_pad_nd(sums, {0, (kRows - queries % kRows) % kRows}, INFINITY);
    const at::Tensor whole = aligned(bias, q, k).value_or(at::Tensor());
    std::tie(found[0], found[1], found[2], found[3]) = at::_scaled_dot_product_efficient_attention_backward(
        gradient, q, each_k, each_v, whole, values, padded, none, none, 0.0, {true, true, true, needs_bias}, causal, scale);
    found[1] = of_few(found[1], few), found[2] = of_few(found[2], few);
    if (needs_bias) found[3] = found[3].slice(-1, 0, keys);
  }
  std::vector<at::Tensor> results;
  for (const auto& [number, _] : wanted) results.push_back(found[number]);
  return results;
}

}  // namespace fg
}  // namespace
