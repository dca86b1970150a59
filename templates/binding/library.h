// Functions of torch that are steps of calls and allocate their results; `fusegen/runtime/library.py` has the same in Python.
#pragma once

#include <utility>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

namespace {
namespace fg {

// Results by number, each with the dtype in which it will lie.
using Wanted = std::vector<std::pair<int64_t, at::ScalarType>>;

// The sums by sorting: equal indices are a run. torch's own index_add and gradient of embeddings add in any order on a GPU.
inline at::Tensor sums_of_runs(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& rows, const at::Tensor& index,
                               at::ScalarType total) {
  const int64_t count = index.size(0), length = shape[0];
  const auto [ordered, order] = at::sort(index, true, 0, false);
  const at::Tensor given = at::index_select(rows, 0, order).to(total);
  if (length <= 2 * count) {  // all sums, as `fusegen/runtime/library.py` computes them
    const at::Tensor starts = at::searchsorted(ordered, at::arange(length + 1, index.options()));
    return at::segment_reduce(given, "sum", std::nullopt, std::nullopt, starts, 0, true, 0).to(dtype);
  }
  const at::Tensor next = ordered.narrow(0, 1, count - 1), before = ordered.narrow(0, 0, count - 1);
  const at::Tensor is_last = at::cat({at::ne(next, before), at::ones({1}, ordered.options().dtype(at::kBool))});
  const at::Tensor run = at::sub(at::cumsum(is_last, 0), is_last.to(at::kLong));
  const at::Tensor starts = at::searchsorted(run, at::arange(count + 1, run.options()));  // the count for runs that there are not
  const at::Tensor sums = at::segment_reduce(given, "sum", std::nullopt, std::nullopt, starts, 0, true, 0);
  at::Tensor place = at::full({count + 1}, length, run.options());  // and a row behind the last for these
  place.narrow(0, 0, count).copy_(ordered);
  at::Tensor found = at::zeros({length + 1, shape[1]}, rows.options().dtype(dtype));
  const at::Tensor to = at::index_select(place, 0, starts.narrow(0, 0, count));
  return found.index_copy_(0, to, sums.to(dtype)).narrow(0, 0, length);
}

// The last place of each number below the length in the index; -1 for a number that is not there.
inline std::vector<at::Tensor> last(const Wanted&, int64_t length, const std::vector<at::Tensor>& given) {
  const at::Tensor& index = given[0];
  at::Tensor found = at::full({length}, -1, index.options());
  return {found.scatter_reduce_(0, index, at::arange(index.size(0), index.options()), "amax")};
}

// The first of each row, in order, and where they stand.
inline std::vector<at::Tensor> topk(const Wanted& wanted, double descending, int64_t length, const std::vector<at::Tensor>& given) {
  const at::Tensor& rows = given[0];
  const bool is_falling = descending != 0.0;
  const auto [values, indices] = length == rows.size(-1) ? at::sort(rows, true, -1, is_falling)
                                                         : rows.topk(length, -1, is_falling, true);
  std::vector<at::Tensor> found;
  for (const auto& [number, dtype] : wanted) found.push_back((number ? indices : values).to(dtype));
  return found;
}

// Sums of those rows of which the index names the sum, in float32 at least, in the same order at each call.
inline std::vector<at::Tensor> scatter_add(const Wanted& wanted, int64_t length, const std::vector<at::Tensor>& given) {
  const at::Tensor& index = given[1];
  const at::ScalarType dtype = wanted[0].second;
  const std::vector<int64_t> shape = {length, given[0].size(1)};
  const bool is_narrow = given[0].is_floating_point() && given[0].element_size() < 4;
  const at::ScalarType total = is_narrow ? at::kFloat : given[0].scalar_type();
  const bool is_byte = given[0].element_size() == 1;  // torch cannot place 8-bit floats
  const at::Tensor rows = is_byte ? given[0].to(total) : given[0];
  if (rows.is_cuda() && rows.is_floating_point() && rows.size(0))
    return {sums_of_runs(shape, is_byte ? total : dtype, rows, index, total).to(dtype)};
  at::Tensor sums = at::zeros(shape, rows.options().dtype(total));
  return {sums.index_add_(0, index, rows.to(total)).to(dtype)};
}

}  // namespace fg
}  // namespace
