// TMA tensor maps, encoded by the driver with constants of cuda.h.

struct alignas(128) TensorMap {
  unsigned char bytes[128];
};

using Encode = int (*)(void*, int, unsigned, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int,
                       int, int);

// Encodes the tensor map of a view with 128-byte swizzle; shape and strides in elements, outermost dim first. Returns a status.
inline int encoded(Encode encode, TensorMap& map, int64_t address, int kind, int64_t bytes, const std::vector<int64_t>& shape,
                   const std::vector<int64_t>& strides, const std::vector<uint32_t>& box) {
  const size_t rank = shape.size();
  const std::vector<uint64_t> extents(shape.rbegin(), shape.rend());
  const std::vector<uint32_t> tile(box.rbegin(), box.rend()), steps(rank, 1);
  std::vector<uint64_t> apart;
  for (size_t dim = rank - 1; dim-- > 0;) apart.push_back(strides[dim] * bytes);
  apart.resize(std::max<size_t>(rank - 1, 1));
  return encode(&map, kind, static_cast<unsigned>(rank), reinterpret_cast<void*>(address), extents.data(), apart.data(), tile.data(),
                steps.data(), 0, 3, 0, 0);
}
