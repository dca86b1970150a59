// Shadow memory: for each byte the last writer and the readers since, to find two accesses that no barrier orders.
namespace emulator {

// An access: by which thread (counted through the grid from 1; 0 is nobody), and how often each barrier that the thread
// belongs to had been passed. A cluster's barrier counts twice: an odd number is of an access between arriving there and waiting.
struct Stamp {
  u32 thread = 0;
  u32 warp_epoch = 0;
  u32 block_epoch = 0;
  u32 cluster_epoch = 0;
  u32 sent = 0;   // rounds of pushes to the blocks of the cluster that the thread's warp has begun
  u32 heard = 0;  // of which the thread has waited for those of all warps
};

// The smallest group that contains two threads.
enum class Scope { thread, warp, block, cluster, grid };

struct Shape {
  u32 block_threads;
  u32 cluster_threads;
};

inline Scope common_scope(u32 a, u32 b, Shape shape) {
  if (a == b) return Scope::thread;
  u32 first = a - 1, second = b - 1;
  if (first / shape.cluster_threads != second / shape.cluster_threads) return Scope::grid;
  if (first / shape.block_threads != second / shape.block_threads) return Scope::cluster;
  bool one_warp = first % shape.block_threads / 32 == second % shape.block_threads / 32;
  return one_warp ? Scope::warp : Scope::block;
}

// Whether the current thread, `then`, has waited for a counter that the block of `first` advanced afterwards.
inline bool is_counted(const Stamp& first, const Stamp& then, Shape shape);

// Groups nest, and a barrier has all threads of its group as members. So two accesses are ordered exactly if the barrier of
// a group that contains both threads completed in between.
inline bool happens_before(const Stamp& first, const Stamp& then, Shape shape) {
  if (first.thread == 0 || first.thread == then.thread) return true;
  switch (common_scope(first.thread, then.thread, shape)) {
    case Scope::warp:
      if (first.warp_epoch < then.warp_epoch) return true;
      [[fallthrough]];
    case Scope::block:
      if (first.block_epoch < then.block_epoch) return true;
      [[fallthrough]];
    case Scope::cluster:
      return (first.cluster_epoch + 1) / 2 < then.cluster_epoch / 2;
    default:
      return is_counted(first, then, shape);
  }
}

// Whether a thread has heard from the warp of an earlier access since: warps push in every round, and after what they did before.
inline bool heard_of(const Stamp& first, const Stamp& then) { return first.sent < then.heard; }

struct ShadowByte {
  Stamp writer;
  Stamp readers[2];

  // Two readers stand for all: any that is ordered before a new one can go, since a later write that races with it
  // races with the new one; of the rest, a write that is ordered after the two furthest apart is ordered after all.
  void remember_reader(const Stamp& now, Shape shape) {
    for (Stamp& reader : readers) {
      if (happens_before(reader, now, shape)) reader = Stamp{};
    }
    if (readers[0].thread == 0) {
      readers[0] = now;
    } else if (readers[1].thread == 0 || common_scope(readers[0].thread, now.thread, shape) >
                                             common_scope(readers[0].thread, readers[1].thread, shape)) {
      readers[1] = now;
    }
  }

  // Notes a read and returns the write that races with it, or null.
  const Stamp* read(const Stamp& now, Shape shape) {
    if (!happens_before(writer, now, shape)) return &writer;
    remember_reader(now, shape);
    return nullptr;
  }

  // Notes a write and returns the access that races with it, or null.
  const Stamp* write(const Stamp& now, Shape shape, bool pushed) {
    if (!happens_before(writer, now, shape)) return &writer;
    for (const Stamp& reader : readers) {
      if (!happens_before(reader, now, shape) && !(pushed && heard_of(reader, now))) return &reader;
    }
    *this = ShadowByte{now, {}};
    return nullptr;
  }
};

}  // namespace emulator
