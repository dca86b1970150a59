// Asynchronous operations of sm_90a: mbarriers, TMA, wgmma. By Launch.timing they complete at once, or only when a thread waits
// for them; a correct kernel is correct with both.
namespace emulator {

i64 shared_offset(const void* pointer) {
  return static_cast<const u8*>(pointer) - shared_memory();
}

// Barriers.

Barrier& find_barrier(const void* pointer) {
  Block& block = *machine->current->block;
  auto found = block.barriers.find(shared_offset(pointer));
  if (found == block.barriers.end()) fail("byte %lld of shared memory is no barrier yet", shared_offset(pointer));
  return found->second;
}

void init_barrier(const void* pointer, u32 arrivals) {
  i64 offset = shared_offset(pointer);
  check_shared("initialises", offset, 8);
  Block& block = *machine->current->block;
  if (block.barriers.count(offset)) fail("the barrier at byte %lld of shared memory is initialised twice", offset);
  Barrier& barrier = block.barriers[offset];
  barrier.meeting.members = static_cast<i32>(arrivals);
  barrier.made = stamp_now();
}

void show_barriers() {
  for (auto& entry : machine->current->block->barriers) entry.second.visible = true;
}

void arrive(Barrier& barrier, i64 bytes) {
  if (!barrier.visible) fail("arrives at a barrier that is not fenced after its initialisation");
  barrier.bytes += bytes;
  ++barrier.meeting.arrived;
  barrier.complete();
}

void wait_for_phase(Barrier& barrier, u32 parity) {
  Thread& thread = *machine->current;
  if (!barrier.visible) fail("waits at a barrier that is not fenced after its initialisation");
  if (parity > 1) fail("a parity of %u", parity);
  while ((barrier.meeting.epoch & 1) == parity) {
    thread.waiting = &barrier.meeting;
    thread.waiting_epoch = barrier.meeting.epoch;
    switch_context(thread.context, machine->scheduler);
    thread.waiting = nullptr;
  }
  thread.waited[&barrier] = barrier.meeting.epoch;
}

// As above, and the data from other blocks becomes visible.
void wait_for_blocks(Barrier& barrier, u32 parity) {
  if (!happens_before(barrier.made, stamp_now(), machine->shape)) fail("waits at a barrier that may not be initialised yet");
  wait_for_phase(barrier, parity);
  machine->current->seen[&barrier] = barrier.seen = barrier.meeting.epoch;
  ++machine->current->heard;
}

void meet_named(i32 id, i32 threads) {
  if (id < 1 || id > 15 || threads % 32) fail("named_barrier_sync(%d, %d)", id, threads);
  Meeting& meeting = machine->current->block->named[id];
  if (meeting.members == 0) meeting = Meeting{"named_barrier_sync", threads};
  if (meeting.members != threads) fail("the named barrier %d is one of %d threads and of %d", id, meeting.members, threads);
  meet(meeting);
}

// TMA. A tensor map as the launch passes it: sizes from the contiguous dim outwards, strides in bytes.

struct Map {
  u8* base;
  i64 itemsize, rank, shape[4], strides[4], box[4];
};
static_assert(sizeof(Map) <= sizeof(TensorMap), "a map must fit its parameter");

inline Map map_of(const TensorMap& opaque) {
  Map map;
  memcpy(&map, &opaque, sizeof(map));
  return map;
}

inline i64 swizzled(i64 address) { return address ^ (address >> 7 & 7) << 4; }

inline void check_tile(const char* doing, const Map& map, i64 rank, i64 offset) {
  if (map.rank != rank) fail("%s a box of rank %lld by a map of rank %lld", doing, rank, map.rank);
  if (map.box[0] * map.itemsize != 128) fail("%s lines of %lld bytes, and the swizzle is of 128", doing, map.box[0] * map.itemsize);
  if (offset % 1024) fail("misaligned: %s a tile at byte %lld of shared memory, which needs 1024", doing, offset);
}

// Calls each(byte in shared memory, element in global memory or null) for the elements of a box.
template <typename Each>
inline void each_element(const Map& map, i64 offset, const i32* at, const Each& each) {
  i64 index[4] = {}, count = 1;
  for (i64 d = 0; d < map.rank; ++d) count *= map.box[d];
  for (i64 n = 0; n < count; ++n) {
    i64 rest = n;
    u8* element = map.base;
    for (i64 d = 0; d < map.rank; ++d) {
      index[d] = at[d] + rest % map.box[d];
      rest /= map.box[d];
      if (element && index[d] >= 0 && index[d] < map.shape[d]) element += index[d] * map.strides[d];
      else element = nullptr;
    }
    each(swizzled(offset + n * map.itemsize), element);
  }
}

inline i64 box_bytes(const Map& map) {
  i64 bytes = map.itemsize;
  for (i64 d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

inline void deliver(Block& block, const Stamp& issuer, const Map& map, i64 offset, const i32* at, Barrier& barrier) {
  each_element(map, offset, at, [&](i64 to, const u8* from) {
    if (from) memcpy(&block.memory[to], from, map.itemsize);
    else memset(&block.memory[to], 0, map.itemsize);
    for (i64 b = to; b < to + map.itemsize; ++b) {
      block.shadow[b].writer = issuer;
      block.in_flight[b] = false;
    }
  });
  barrier.bytes -= box_bytes(map);
  barrier.complete();
}

void load_tile(void* destination, const TensorMap& opaque, const void* barrier_at, i64 rank, const i32* at) {
  Map map = map_of(opaque);
  Block& block = *machine->current->block;
  i64 offset = shared_offset(destination), bytes = box_bytes(map);
  check_tile("loads", map, rank, offset);
  if (offset < 0 || offset + bytes > machine->launch.shared_bytes) fail("out of bounds: loads a tile to byte %lld of shared memory", offset);
  find_buffer("loads", map.base, map.base, map.itemsize, false);
  Barrier& barrier = find_barrier(barrier_at);
  if (barrier.bytes < bytes) fail("the copy engine brings %lld bytes of which the barrier was not told", bytes - barrier.bytes);
  for (i64 b = offset; b < offset + bytes; ++b) {
    if (block.in_flight[b] || block.leaving[b]) fail("loads over byte %lld of shared memory, which another copy still uses", b);
    block.in_flight[b] = true;
    block.pushed[b] = Arrival{};
    block.loaded[b] = Arrival{&barrier, barrier.meeting.epoch};
  }
  Stamp issuer = stamp_now();
  std::vector<i32> place(at, at + rank);
  auto arrives = [&block, &barrier, issuer, map, offset, place] { deliver(block, issuer, map, offset, place.data(), barrier); };
  if (is_late()) machine->deliveries.push_back(arrives);
  else arrives();
}

// A store in flight to the shared memory of a block of the cluster, counted by an mbarrier there.

inline Barrier& find_barrier_of(Block& block, const void* pointer) {
  i64 offset = shared_offset(pointer);
  auto found = block.barriers.find(offset);
  if (found == block.barriers.end() || !found->second.visible || !happens_before(found->second.made, stamp_now(), machine->shape)) {
    fail("sends to block %d, whose barrier at byte %lld may not be initialised yet: a cluster_sync is missing", block.index, offset);
  }
  return found->second;
}

inline void check_push(Block& block, const Barrier& barrier, i64 offset, i64 bytes) {
  check_shared("sends", offset, bytes);
  for (i64 b = offset; b < offset + bytes; ++b) {
    const Arrival& before = block.pushed[b];
    if (before.barrier == &barrier && before.phase == barrier.meeting.epoch) {
      fail("sends byte %lld of the shared memory of block %d, to which another thread sends", b, block.index);
    }
  }
  check_arrived(block, "sends", offset, bytes);
  note_write(&block.shadow[offset], bytes, "shared memory of another block", offset, true);
}

// The pushes of a warp in one round go to mbarriers at one address, those of the next round to another.
inline void note_round(Warp& warp, i64 barrier) {
  if (warp.pushed_to != barrier) ++warp.sent;
  warp.pushed_to = barrier;
}

inline void take_push(const Thread& sender, Block& block, Barrier& barrier, i64 offset, u64 value, i64 bytes) {
  if (barrier.bytes < bytes) return report(sender, "sends %lld bytes of which the barrier of block %d was not told", bytes, block.index);
  memcpy(&block.memory[offset], &value, bytes);
  for (i64 b = offset; b < offset + bytes; ++b) {
    block.in_flight[b] = false;
    block.shadow[b] = ShadowByte{};
  }
  --block.pushes;
  barrier.bytes -= bytes;
  barrier.complete();
}

void push(i32 rank, i64 offset, const void* from, i64 bytes, const void* barrier_at) {
  if (rank < 0 || rank >= machine->launch.cluster) {
    fail("out of bounds: cluster_push to block %d of a cluster of %d", rank, machine->launch.cluster);
  }
  Block& block = machine->blocks[rank];
  if (block.alive == 0) fail("sends to block %d, which has ended", block.index);
  Barrier& barrier = find_barrier_of(block, barrier_at);
  check_push(block, barrier, offset, bytes);
  note_round(*machine->current->warp, shared_offset(barrier_at));
  for (i64 b = offset; b < offset + bytes; ++b) {
    block.in_flight[b] = true;
    block.pushed[b] = Arrival{&barrier, barrier.meeting.epoch};
    block.loaded[b] = Arrival{};
  }
  ++block.pushes;
  barrier.sent = barrier.meeting.epoch + 1;
  u64 value = 0;
  memcpy(&value, from, bytes);
  const Thread& sender = *machine->current;
  auto arrives = [&sender, &block, &barrier, offset, value, bytes] { take_push(sender, block, barrier, offset, value, bytes); };
  if (is_late()) machine->deliveries.push_back(arrives);
  else arrives();
  if (machine->failed) pause();  // does not return
}

// Called by the scheduler if no thread is runnable. Copies are unordered, so the newest one completes first.
inline bool deliver_one() {
  if (machine->deliveries.empty()) return false;
  auto arrives = machine->deliveries.back();
  machine->deliveries.pop_back();
  arrives();
  return true;
}

void write_word(u32 address, u32 word) {
  Thread& thread = *machine->current;
  Block& block = *thread.block;
  check_shared("writes", address, 4);
  for (i64 b = address; b < address + 4; ++b) {
    if (block.leaving[b]) fail("writes byte %lld of shared memory, which the copy engine still reads", b);
    if (block.in_flight[b]) fail("writes byte %lld of shared memory, which a copy is still bringing", b);
    block.shadow[b].writer = stamp_now();
    block.loaded[b] = Arrival{};
    block.unfenced[b] = true;
  }
  memcpy(&block.memory[address], &word, 4);
  thread.unfenced.push_back(address);
}

void fence_words() {
  Thread& thread = *machine->current;
  for (u32 address : thread.unfenced) {
    for (i64 b = address; b < address + 4; ++b) thread.block->unfenced[b] = false;
  }
  thread.unfenced.clear();
}

inline void leave_shared(const Store& store) {
  Block& block = *machine->current->block;
  Map map;
  memcpy(&map, store.map, sizeof(map));
  each_element(map, store.offset, store.at, [&](i64 from, u8* to) {
    for (i64 b = from; b < from + map.itemsize; ++b) {
      block.leaving[b] = false;
      if (block.shadow[b].writer.thread == 0) fail("uninitialised: stores byte %lld of shared memory, which nobody has written", b);
      if (block.unfenced[b]) fail("stores byte %lld of shared memory without a fence_proxy_async after it was written", b);
    }
    if (!to) return;
    const Buffer& buffer = find_buffer("stores", map.base, to, map.itemsize, true);
    note_write(find_shadow(to, map.itemsize), map.itemsize, buffer.name, to - buffer.begin);
    memcpy(to, &block.memory[from], map.itemsize);
  });
}

void store_tile(const TensorMap& opaque, const void* source, i32 x, i32 y) {
  Thread& thread = *machine->current;
  Map map = map_of(opaque);
  Store store{{}, shared_offset(source), {x, y}, thread.store_groups};
  memcpy(store.map, &map, sizeof(map));
  check_tile("stores", map, 2, store.offset);
  for (i64 b = store.offset; b < store.offset + box_bytes(map); ++b) thread.block->leaving[b] = true;
  if (!is_late()) leave_shared(store);
  else thread.stores.push_back(store);
}

void close_stores() { ++machine->current->store_groups; }

void finish_stores(u32 pending) {
  Thread& thread = *machine->current;
  while (!thread.stores.empty() && thread.stores.front().group + pending < thread.store_groups) {
    leave_shared(thread.stores.front());
    thread.stores.erase(thread.stores.begin());
  }
}

// wgmma. Each thread computes the results of its own registers.

// The byte of an element of an operand that a descriptor names; `line` counts along the dimension that is not the depth.
inline i64 operand_byte(u64 descriptor, bool transposed, i64 line, i64 depth) {
  i64 start = static_cast<i64>(descriptor & 0x3fff) << 4, leading = static_cast<i64>(descriptor >> 16 & 0x3fff) << 4;
  i64 stride = static_cast<i64>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || descriptor & (7ull << 49)) fail("a descriptor without a swizzle of 128 bytes");
  i64 byte = transposed ? line / 64 * leading + depth / 8 * stride + depth % 8 * 128 + line % 64 * 2
                        : line / 8 * stride + line % 8 * 128 + depth * 2;
  return swizzled(start + byte);
}

inline float wide(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
inline float wide(f16 x) {
  u32 exponent = x.bits >> 10 & 31u, fraction = x.bits & 1023u;
  float magnitude = exponent == 31 ? __uint_as_float(0x7f800000u | fraction << 13)
                  : exponent == 0  ? static_cast<float>(fraction) * 0x1p-24f
                                   : __uint_as_float((exponent + 112u) << 23 | fraction << 13);
  return x.bits & 0x8000u ? -magnitude : magnitude;
}

template <typename Element>
inline float operand(u64 descriptor, bool transposed, i64 line, i64 depth) {
  Block& block = *machine->current->block;
  i64 offset = operand_byte(descriptor, transposed, line, depth);
  if (offset < 0 || offset + 2 > machine->launch.shared_bytes || offset % 2) check_shared("multiplies", offset, 2);
  if (block.in_flight[offset]) fail("multiplies byte %lld of shared memory, which a copy is still bringing", offset);
  if (block.shadow[offset].writer.thread == 0) fail("uninitialised: multiplies byte %lld of shared memory", offset);
  Element element;
  memcpy(&element, &block.memory[offset], 2);
  return wide(element);
}

// One of the two rows of a thread. In registers, 2k + h of a lane holds columns 8k + 2 (lane % 4) and the next one: the row's
// others are in the quad's lanes.
template <typename Element>
inline void row_of(const Product& p, i32 lane, i32 line, i32 h, float* row) {
  for (i32 k = 0; k < 16; ++k) {
    if (!p.a_in_registers) {
      row[k] = operand<Element>(p.a, p.a_transposed, line + 8 * h, k);
      continue;
    }
    const u32* registers = machine->threads[p.first_thread + (lane & ~3) + k % 8 / 2].shown[p.number % 64];
    row[k] = wide(Element{static_cast<u16>(registers[k / 8 * 2 + h] >> (k % 2 * 16))});
  }
}

template <typename Element>
inline void multiply(const Product& p) {
  i32 thread = machine->current->index % 128, warp = thread / 32, lane = thread % 32;
  float rows[2][16], column[16];
  for (i32 h = 0; h < 2; ++h) row_of<Element>(p, lane, 16 * warp + lane / 4, h, rows[h]);
  for (i32 i = 0; i < p.count / 4; ++i) {
    for (i32 j = 0; j < 2; ++j) {
      for (i32 k = 0; k < 16; ++k) column[k] = operand<Element>(p.b, p.b_transposed, 8 * i + 2 * (lane % 4) + j, k);
      for (i32 h = 0; h < 2; ++h) {
        float sum = 0.0f;
        for (i32 k = 0; k < 16; ++k) sum += rows[h][k] * column[k];
        float& d = p.d[4 * i + 2 * h + j];
        d = p.accumulate ? d + sum : sum;
      }
    }
  }
}

void multiply_bf16(const Product& p) { multiply<bf16>(p); }
void multiply_f16(const Product& p) { multiply<f16>(p); }

void fence_products() { machine->current->products_fenced = true; }

void start_product(Product product) {
  Thread& thread = *machine->current;
  if (!thread.products_fenced) fail("a product without a wgmma_fence before it");
  product.group = thread.product_groups;
  product.number = thread.product_count++;
  product.first_thread = static_cast<i32>(&thread - machine->threads.data()) / 32 * 32;
  memcpy(thread.shown[product.number % 64], product.a_registers, sizeof(product.a_registers));
  meet(thread.warp->sync_products);  // the lanes of a warp issue together and read each other's registers
  if (is_late()) thread.products.push_back(product);
  else product.run(product);
}

void close_products() {
  ++machine->current->product_groups;
  machine->current->products_fenced = false;
}

void finish_products(u32 pending) {
  Thread& thread = *machine->current;
  while (!thread.products.empty() && thread.products.front().group + pending < thread.product_groups) {
    thread.products.front().run(thread.products.front());
    thread.products.erase(thread.products.begin());
  }
  meet(thread.warp->sync_products);
}

inline void check_nothing_under_way(const Thread& thread) {
  if (!thread.products.empty()) fail("the thread ends before its products are done");
  if (!thread.stores.empty()) fail("the thread ends while the copy engine reads its shared memory: a tma_store_wait<0> is missing");
}

}  // namespace emulator
