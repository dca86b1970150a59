// Library calls: matmuls, and torch functions that allocate their results. `fusegen/runtime/library.py` is the same in Python.
#pragma once

#include <utility>
#include <vector>

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/div.h>
#include <ATen/ops/full.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/segment_reduce.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>

namespace {
namespace fg {

inline int64_t elements(const at::Tensor& tensor) {  // from the first to the last in memory, inclusive
  int64_t reach = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.size(dim) == 0) return 0;
    reach += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return reach;
}

// Matmuls by torch.

inline at::Tensor near(const at::Tensor& operand) {  // a copy if cuBLAS would overflow: offsets from 2^31 on
  return elements(operand) - 1 < (int64_t(1) << 31) || operand.is_contiguous() ? operand : operand.contiguous();
}

inline at::Tensor batched(const at::Tensor& operand, const at::Tensor& out) {
  std::vector<int64_t> shape(out.sizes().begin(), out.sizes().end() - 2);
  shape.insert(shape.end(), operand.sizes().end() - 2, operand.sizes().end());
  return operand.expand(shape).reshape({-1, operand.size(-2), operand.size(-1)});
}

inline void multiply(at::Tensor a, at::Tensor b, at::Tensor out) {
  a = near(a);
  b = near(b);
  if (out.scalar_type() == a.scalar_type()) {
    at::matmul_out(out, a, b);
  } else if (!out.is_cuda()) {
    at::matmul_out(out, a.to(out.scalar_type()), b.to(out.scalar_type()));
  } else if (b.dim() == 2) {
    at::Tensor rows = out.view({-1, out.size(-1)});
    at::mm_out(rows, a.reshape({-1, a.size(-1)}), b, out.scalar_type());
  } else {
    at::Tensor planes = out.view({-1, out.size(-2), out.size(-1)});
    at::bmm_out(planes, batched(a, out), batched(b, out), out.scalar_type());
  }
}

// out += a @ b of matrices.
inline void multiply_into(at::Tensor a, at::Tensor b, at::Tensor out) {
  a = near(a);
  b = near(b);
  if (out.scalar_type() == a.scalar_type()) {
    at::addmm_out(out, out, a, b);
  } else if (out.is_cuda()) {
    at::addmm_out(out, out, a, b, out.scalar_type());
  } else {
    at::addmm_out(out, out, a.to(out.scalar_type()), b.to(out.scalar_type()));
  }
}

// Functions that allocate their results.

// Requested results: the number and the dtype of each.
using Wanted = std::vector<std::pair<int64_t, at::ScalarType>>;

// Returns the sum of each run of rows. A torch thread adds a whole run, so long runs, such as padding, are split into pieces.
inline at::Tensor added(const at::Tensor& rows, const at::Tensor& starts) {
  constexpr int64_t piece = 64;  // rows that one thread adds
  const auto summed = [](const at::Tensor& some, const at::Tensor& offsets) {
    return at::segment_reduce(some, "sum", std::nullopt, std::nullopt, offsets, 0, true, 0);
  };
  const int64_t count = rows.size(0), runs = starts.size(0) - 1;
  if (count <= piece) return summed(rows, starts);
  const at::Tensor lengths = at::sub(starts.narrow(0, 1, runs), starts.narrow(0, 0, runs));
  const at::Tensor pieces = at::div(at::add(lengths, piece - 1), piece, "floor");
  const at::Tensor behind = at::cumsum(pieces, 0);
  const at::Tensor before = at::cat({at::zeros({1}, pieces.options()), behind});  // by run, then the total
  const at::Tensor number = at::arange(count / piece + runs + 1, starts.options());  // an upper bound
  const at::Tensor run = at::searchsorted(behind, number, false, true);
  const at::Tensor within = at::mul(at::sub(number, at::index_select(before, 0, run)), piece);
  const at::Tensor first = at::add(at::index_select(starts, 0, run), within).clamp_max_(count);
  return summed(summed(rows, first), before);
}

// Returns the sums in a deterministic order, by sorting: equal indices form a run. On a GPU, torch's index_add and its gradient of
// embeddings add in any order.
inline at::Tensor sums_of_runs(at::IntArrayRef shape, at::ScalarType dtype, const at::Tensor& rows, const at::Tensor& index,
                               at::ScalarType total) {
  const int64_t count = index.size(0), length = shape[0];
  const auto [ordered, order] = at::sort(index, true, 0, false);
  const at::Tensor given = at::index_select(rows, 0, order).to(total);
  if (length <= 2 * count) {  // sums for all indices, as in `fusegen/runtime/library.py`
    const at::Tensor starts = at::searchsorted(ordered, at::arange(length + 1, index.options()));
    return added(given, starts).to(dtype);
  }
  const at::Tensor next = ordered.narrow(0, 1, count - 1), before = ordered.narrow(0, 0, count - 1);
  const at::Tensor is_last = at::cat({at::ne(next, before), at::ones({1}, ordered.options().dtype(at::kBool))});
  const at::Tensor run = at::sub(at::cumsum(is_last, 0), is_last.to(at::kLong));
  const at::Tensor starts = at::searchsorted(run, at::arange(count + 1, run.options()));  // the count marks missing runs
  at::Tensor place = at::full({count + 1}, length, run.options());  // missing runs go to an extra row
  place.narrow(0, 0, count).copy_(ordered);
  at::Tensor found = at::zeros({length + 1, shape[1]}, rows.options().dtype(dtype));
  const at::Tensor to = at::index_select(place, 0, starts.narrow(0, 0, count));
  return found.index_copy_(0, to, added(given, starts).to(dtype)).narrow(0, 0, length);
}

// Returns the last position of each number below the length in the index; -1 if it is absent.
inline std::vector<at::Tensor> last(const Wanted&, int64_t length, const std::vector<at::Tensor>& given) {
  const at::Tensor& index = given[0];
  at::Tensor found = at::full({length}, -1, index.options());
  return {found.scatter_reduce_(0, index, at::arange(index.size(0), index.options()), "amax")};
}

// Returns the top elements of each row in order, and their indices.
inline std::vector<at::Tensor> topk(const Wanted& wanted, double descending, int64_t length, const std::vector<at::Tensor>& given) {
  const at::Tensor& rows = given[0];
  const bool is_falling = descending != 0.0;
  const auto [values, indices] = length == rows.size(-1) ? at::sort(rows, true, -1, is_falling)
                                                         : rows.topk(length, -1, is_falling, true);
  std::vector<at::Tensor> found;
  for (const auto& [number, dtype] : wanted) found.push_back((number ? indices : values).to(dtype));
  return found;
}

// Adds each row to the sum that its index names: in float32 at least, and in the same order at each call.
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
