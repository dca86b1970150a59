// Checked access to global and shared memory.
namespace emulator {

// Describes a race by the smallest group that contains both threads.
inline const char* missing_barrier(Scope scope) {
  switch (scope) {
    case Scope::warp: return "with no warp_sync or block_sync between";
    case Scope::block: return "with no block_sync between";
    case Scope::cluster: return "with no cluster_sync between";
    default: return "and the blocks of a launch have no order";
  }
}

[[noreturn]] inline void fail_race(const char* doing, const char* did, const char* place, i64 offset, const Stamp& other) {
  const Shape& shape = machine->shape;
  u32 thread = (other.thread - 1) % shape.block_threads, block = (other.thread - 1) / shape.block_threads;
  Scope scope = common_scope(other.thread, stamp_now().thread, shape);
  fail("race: %s byte %lld of %s, which thread %u of block %u %s %s", doing, offset, place, thread, block, did,
       missing_barrier(scope));
}

inline void note_read(ShadowByte* shadow, i64 bytes, const char* place, i64 offset) {
  Stamp now = stamp_now();
  for (i64 b = 0; b < bytes; ++b) {
    const Stamp* racing = shadow[b].read(now, machine->shape);
    if (racing) fail_race("reads", "wrote", place, offset + b, *racing);
  }
}

inline void note_write(ShadowByte* shadow, i64 bytes, const char* place, i64 offset, bool pushed = false) {
  Stamp now = stamp_now();
  for (i64 b = 0; b < bytes; ++b) {
    const Stamp* racing = shadow[b].write(now, machine->shape, pushed);
    if (racing) fail_race("writes", racing == &shadow[b].writer ? "wrote" : "read", place, offset + b, *racing);
  }
}

inline bool holds(const Buffer& buffer, const u8* at, i64 bytes) {
  return at >= buffer.begin && at + bytes <= buffer.begin + buffer.bytes;
}

[[noreturn]] inline void fail_bounds(const char* doing, const u8* base, const u8* at, i64 bytes) {
  const Launch& launch = machine->launch;
  for (i32 b = 0; b < launch.buffer_count; ++b) {
    const Buffer& buffer = launch.buffers[b];
    if (!holds(buffer, base, 0)) continue;
    fail("out of bounds: %s %lld bytes at byte %lld of %s, which has %lld bytes", doing, bytes,
         static_cast<i64>(at - buffer.begin), buffer.name, buffer.bytes);
  }
  fail("out of bounds: %s %lld bytes through pointer %p, which lies in no buffer of the launch", doing, bytes,
       static_cast<const void*>(base));
}

// Before the wait, a thread may only read, and only what the previous launch does not write.
inline void check_waited(const char* doing, const u8* at, i64 bytes, bool writes) {
  if (!previous_may_run()) return;
  const Launch& launch = machine->launch;
  bool is_early = writes;
  for (i32 b = 0; b < launch.buffer_count; ++b) is_early |= launch.buffers[b].is_pending && holds(launch.buffers[b], at, bytes);
  if (is_early) {
    fail("%s %lld bytes of global memory with no wait_for_previous before, and the launch before may still be running", doing, bytes);
  }
}

// Returns the pointer's buffer if it contains the whole access; crossing into the next buffer is an error.
inline const Buffer& find_buffer(const char* doing, const u8* base, const u8* at, i64 bytes, bool writes) {
  check_waited(doing, at, bytes, writes);
  const Launch& launch = machine->launch;
  const Buffer* found = nullptr;
  for (i32 b = 0; b < launch.buffer_count; ++b) {
    const Buffer& buffer = launch.buffers[b];
    if (!holds(buffer, base, 0) || !holds(buffer, at, bytes)) continue;
    if (!writes || buffer.writable) return buffer;
    found = &buffer;
  }
  if (!found) fail_bounds(doing, base, at, bytes);
  fail("writes %lld bytes at byte %lld of %s, which is read-only", bytes, static_cast<i64>(at - found->begin), found->name);
}

// The shadow of an access; a check that let through what no buffer holds must not write beyond it.
inline ShadowByte* find_shadow(const u8* at, i64 bytes) {
  for (Region& region : machine->regions) {
    if (at >= region.begin && at + bytes <= region.end) return &region.shadow[at - region.begin];
  }
  fail("%lld bytes at %p, which lie in no region of memory", bytes, static_cast<const void*>(at));
}

inline void check_alignment(const char* doing, const Buffer& buffer, const u8* at, i64 bytes, i64 alignment) {
  if (reinterpret_cast<u64>(at) % static_cast<u64>(alignment) == 0) return;
  fail("misaligned: %s %lld bytes at byte %lld of %s (address %p), which needs an alignment of %lld bytes", doing, bytes,
       static_cast<i64>(at - buffer.begin), buffer.name, static_cast<const void*>(at), alignment);
}

void global_read(void* to, const void* base, i64 offset, i64 bytes, i64 alignment) {
  const u8* from = static_cast<const u8*>(base);
  const Buffer& buffer = find_buffer("reads", from, from + offset, bytes, false);
  check_alignment("reads", buffer, from + offset, bytes, alignment);
  note_read(find_shadow(from + offset, bytes), bytes, buffer.name, from + offset - buffer.begin);
  memcpy(to, from + offset, bytes);
}

void check_global_read(const void* base, i64 offset, i64 bytes, i64 alignment) {
  const u8* from = static_cast<const u8*>(base);
  check_alignment("reads", find_buffer("reads", from, from + offset, bytes, false), from + offset, bytes, alignment);
}

void global_write(void* base, i64 offset, const void* from, i64 bytes, i64 alignment) {
  u8* to = static_cast<u8*>(base) + offset;
  const Buffer& buffer = find_buffer("writes", static_cast<u8*>(base), to, bytes, true);
  check_alignment("writes", buffer, to, bytes, alignment);
  note_write(find_shadow(to, bytes), bytes, buffer.name, to - buffer.begin);
  memcpy(to, from, bytes);
}

inline void add_region(u8* begin, u8* end) {
  std::vector<Region> apart;
  for (Region& region : machine->regions) {
    if (region.end <= begin || end <= region.begin) {
      apart.push_back(region);
    } else {
      begin = region.begin < begin ? region.begin : begin;
      end = region.end > end ? region.end : end;
    }
  }
  apart.push_back({begin, end, {}});
  machine->regions.swap(apart);
}

inline void map_buffers() {
  const Launch& launch = machine->launch;
  for (i32 b = 0; b < launch.buffer_count; ++b) {
    const Buffer& buffer = launch.buffers[b];
    if (buffer.bytes > 0) add_region(buffer.begin, buffer.begin + buffer.bytes);
  }
  for (Region& region : machine->regions) region.shadow.resize(region.end - region.begin);
}

u8* shared_memory() { return machine->current->block->memory.data(); }

void check_shared(const char* doing, i64 offset, i64 bytes) {
  i64 size = machine->launch.shared_bytes;
  if (offset < 0 || offset + bytes > size) {
    fail("out of bounds: %s %lld bytes at byte %lld of shared memory, which has %lld bytes", doing, bytes, offset, size);
  }
  if (offset % bytes != 0) fail("misaligned: %s %lld bytes at byte %lld of shared memory", doing, bytes, offset);
}

inline void check_arrived(const Block& block, const char* doing, i64 offset, i64 bytes) {
  for (i64 b = offset; b < offset + bytes; ++b) {
    if (block.in_flight[b]) fail("%s byte %lld of shared memory, which an asynchronous copy is still bringing", doing, b);
  }
}

// Data from another block is visible to a thread that has waited at the mbarrier that counts it.
inline void check_seen(const Arrival& arrival, i64 offset) {
  const auto& seen = machine->current->seen;
  auto found = seen.find(arrival.barrier);
  if (found == seen.end() || found->second <= arrival.phase) {
    fail("race: reads byte %lld of shared memory, which another block sent, with no mbarrier_wait_cluster between", offset);
  }
}

// Data that the copy engine has brought is visible to a thread that has waited at the mbarrier that counts it.
inline void check_waited(const Arrival& arrival, i64 offset) {
  const auto& waited = machine->current->waited;
  auto found = waited.find(arrival.barrier);
  if (found == waited.end() || found->second <= arrival.phase) {
    fail("race: reads byte %lld of shared memory, which the copy engine brings, with no mbarrier_wait between", offset);
  }
}

void shared_read(Block& block, void* to, i64 offset, i64 bytes) {
  check_shared("reads", offset, bytes);
  check_arrived(block, "reads", offset, bytes);
  for (i64 b = offset; b < offset + bytes; ++b) {
    if (block.loaded[b].barrier) {
      check_waited(block.loaded[b], b);
      block.shadow[b].remember_reader(stamp_now(), machine->shape);
      continue;
    }
    if (block.pushed[b].barrier) check_seen(block.pushed[b], b);
    else if (block.shadow[b].writer.thread == 0) {
      fail("uninitialised: reads byte %lld of the shared memory of block %d, which nobody has written", b, block.index);
    }
    note_read(&block.shadow[b], 1, "shared memory", b);
  }
  memcpy(to, &block.memory[offset], bytes);
}

void shared_write(Block& block, i64 offset, const void* from, i64 bytes) {
  check_shared("writes", offset, bytes);
  check_arrived(block, "writes", offset, bytes);
  note_write(&block.shadow[offset], bytes, "shared memory", offset);
  for (i64 b = offset; b < offset + bytes; ++b) block.pushed[b] = block.loaded[b] = Arrival{};
  memcpy(&block.memory[offset], from, bytes);
}

// From here on, no thread may access the bytes until the copying thread has waited.
void start_copy(i64 offset, const void* base, i64 from, i64 bytes, i64 present) {
  Thread& thread = *machine->current;
  Copy copy{offset, bytes, static_cast<const u8*>(base) + from, present, {}, thread.copy_groups};
  if (present > 0) global_read(copy.data, base, from, present, bytes);
  check_shared("copies", offset, bytes);
  check_arrived(*thread.block, "copies to", offset, bytes);
  note_write(&thread.block->shadow[offset], bytes, "shared memory", offset);
  for (i64 b = offset; b < offset + bytes; ++b) {
    thread.block->in_flight[b] = true;
    thread.block->pushed[b] = thread.block->loaded[b] = Arrival{};
  }
  thread.copies.push_back(copy);
}

void close_copies() { ++machine->current->copy_groups; }

// Completes the copies of all groups except the last `pending`, for this thread; other threads see them after a barrier.
void finish_copies(u32 pending) {
  Thread& thread = *machine->current;
  size_t done = 0;
  for (; done < thread.copies.size() && thread.copies[done].group + pending < thread.copy_groups; ++done) {
    Copy& copy = thread.copies[done];
    if (is_late()) memcpy(copy.data, copy.from, copy.present);
    memcpy(&thread.block->memory[copy.offset], copy.data, copy.bytes);
    for (i64 b = copy.offset; b < copy.offset + copy.bytes; ++b) {
      thread.block->in_flight[b] = false;
      thread.block->shadow[b].writer = stamp_now();
    }
  }
  thread.copies.erase(thread.copies.begin(), thread.copies.begin() + done);
}

void cluster_read(i32 rank, void* to, i64 offset, i64 bytes) {
  if (rank < 0 || rank >= machine->launch.cluster) {
    fail("out of bounds: cluster_load from block %d of a cluster of %d", rank, machine->launch.cluster);
  }
  Block& block = machine->blocks[rank];
  if (block.alive == 0) fail("cluster_load from block %d, which has ended", block.index);
  shared_read(block, to, offset, bytes);
  if (&block != machine->current->block) block.last_remote_read = stamp_now();
}

}  // namespace emulator
