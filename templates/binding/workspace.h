// Offsets of temporaries in the workspace.

struct Slot {
  int64_t size;
  int first, last;  // steps of its lifetime
  int64_t offset = 0;
};

constexpr int64_t kAlignment = 256;  // bytes, as in torch's allocator

inline int64_t aligned(int64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

// Places values in the given order, each at the lowest offset that is free during its lifetime. Returns the end.
inline int64_t placed(std::vector<Slot>& slots, const std::vector<size_t>& order) {
  std::vector<size_t> done;
  int64_t end = 0;
  for (size_t number : order) {
    Slot& slot = slots[number];
    slot.offset = 0;
    std::sort(done.begin(), done.end(), [&](size_t a, size_t b) { return slots[a].offset < slots[b].offset; });
    for (size_t other : done) {
      const Slot& before = slots[other];
      if (before.first > slot.last || slot.first > before.last) continue;
      if (slot.offset + slot.size <= before.offset) break;
      slot.offset = std::max(slot.offset, aligned(before.offset + before.size));
    }
    done.push_back(number);
    end = std::max(end, aligned(slot.offset + slot.size));
  }
  return end;
}

// Places values by the best of three orders: largest first, longest lifetime first, by first step. Returns the bytes.
inline int64_t arrange(std::vector<Slot>& slots) {
  std::vector<Slot> best;
  int64_t bytes = -1;
  for (int way = 0; way < 3; ++way) {
    std::vector<size_t> order(slots.size());
    for (size_t n = 0; n < order.size(); ++n) order[n] = n;
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      const Slot &one = slots[a], &two = slots[b];
      if (way == 0) return std::make_tuple(-one.size, one.first) < std::make_tuple(-two.size, two.first);
      if (way == 1) return std::make_tuple(one.first - one.last, -one.size) < std::make_tuple(two.first - two.last, -two.size);
      return one.first < two.first;
    });
    std::vector<Slot> found = slots;
    const int64_t end = placed(found, order);
    if (bytes < 0 || end < bytes) {
      bytes = end;
      best = found;
    }
  }
  slots = best;
  return std::max<int64_t>(bytes, 0);
}

// Returns the rows per block of a loop; the last block may have fewer. As in `fusegen/program/call.py`.
inline int64_t rows_of_block(int64_t extent, int64_t row_bytes, int64_t sum_bytes, int64_t least_room, int64_t multiple) {
  const int64_t room = std::max(least_room, sum_bytes / 2);
  const int64_t most = std::max<int64_t>(room / std::max<int64_t>(row_bytes, 1), 1);
  if (extent <= most) return extent;
  const int64_t count = (extent + most - 1) / most;
  const int64_t even = (extent + count - 1) / count;
  const int64_t rounded = (even + multiple - 1) / multiple * multiple;
  return rounded <= most ? rounded : even;
}
