// Counters of kernels whose blocks wait for others, as in `fusegen/runtime/cuda.py`: one for a stream's launches, one for each capture.

constexpr int64_t kCounters = 1 << 16;

// Returns the number of a counter; `kCounters` if all are taken.
inline int64_t counter_number(int device, void* stream, unsigned long long capture) {
  static std::mutex mutex;
  static std::map<std::tuple<int, void*, unsigned long long>, int64_t> numbers;
  std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_tuple(device, stream, capture);
  const auto found = numbers.find(key);
  if (found != numbers.end()) return found->second;
  const int64_t number = static_cast<int64_t>(numbers.size());
  return number < kCounters ? numbers[key] = number : kCounters;
}
