// The launch, its threads and their barriers.
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <functional>
#include <map>
#include <vector>

namespace emulator {

// A barrier; `epoch` counts its completed phases.
struct Meeting {
  const char* name = "";
  i32 members = 0;
  i32 arrived = 0;
  u32 epoch = 0;

  void release_if_complete() {
    if (arrived == 0 || arrived < members) return;
    arrived = 0;
    ++epoch;
  }
};

// An mbarrier: a phase completes when all threads and all expected bytes have arrived.
struct Barrier {
  Meeting meeting{"mbarrier_wait"};
  i64 bytes = 0;
  bool visible = false;
  Stamp made;
  u32 sent = 0;  // the last phase in which other blocks sent data
  u32 seen = 0;  // the last of these that a thread has waited for

  void complete() {
    if (bytes == 0) meeting.release_if_complete();
  }
};

struct Warp {
  Meeting sync{"warp_sync"};
  Meeting shuffle{"shuffle_xor"};
  Meeting parts[16];           // for shuffles within a part of the warp
  u64 passed_among[2][32] = {};  // as `passed`
  Meeting sync_products{"wgmma"};
  Meeting matrices{"ldmatrix or mma"};
  u64 passed[2][32] = {};  // by parity of the shuffle, so that a fast lane cannot overwrite the value that a slow one reads
  u32 shown[2][32][6] = {};  // addresses or operands of a warp's matrices, likewise
  u32 sent = 0;              // rounds of pushes that the warp has begun
  i64 pushed_to = -1;        // address of the mbarriers of the last round
};

// The mbarrier and phase that count a byte from another block, or from the copy engine.
struct Arrival {
  const Barrier* barrier = nullptr;
  u32 phase = 0;
};

// A counter in global memory. For each block that has advanced it, the block's barriers before that.
struct Counter {
  Meeting meeting{"counter_wait"};
  std::map<u32, u32> advanced;
};

// A block's knowledge of another one, by a counter: accesses before the other's `epoch` are visible to the thread that waited, and to
// the others after the next barrier.
struct Known {
  u32 epoch, thread, since;
};

struct Block {
  i32 index = 0;
  i32 alive = 0;
  Meeting sync{"block_sync"};
  std::vector<Warp> warps;
  std::vector<u8> memory;
  std::vector<ShadowByte> shadow;
  std::vector<bool> in_flight;  // bytes that an asynchronous copy is bringing
  std::vector<bool> leaving;    // bytes that TMA has yet to read
  std::vector<bool> unfenced;   // written bytes that are not yet visible to TMA
  std::vector<Arrival> pushed;  // bytes that a block of the cluster has sent, or is sending
  std::vector<Arrival> loaded;  // bytes that TMA has brought, or is bringing
  i32 pushes = 0;               // under way to this block
  std::map<i64, Barrier> barriers;
  Meeting named[16];
  Stamp last_remote_read;
  std::map<u32, Known> known;  // by block
};

// A cp.async, which completes when its thread waits for it.
struct Copy {
  i64 offset;
  i64 bytes;
  const u8* from;
  i64 present;  // bytes that are read; zeros follow
  u8 data[16];
  u32 group;
};

// A TMA store in flight.
struct Store {
  u64 map[16];
  i64 offset;
  i32 at[2];
  u32 group;
};

struct Thread {
  Context context;
  std::vector<Store> stores;
  u32 store_groups = 0;
  std::vector<u32> unfenced;  // addresses of words that the thread wrote
  std::vector<Product> products;
  u32 product_groups = 0;
  u32 product_count = 0;
  bool products_fenced = false;
  u32 shown[64][4] = {};  // operands in registers, by the product's number
  std::vector<Copy> copies;  // under way, the oldest first
  u32 copy_groups = 0;       // closed so far
  i32 index = 0;
  bool waited_for_previous = false;
  Block* block = nullptr;
  Warp* warp = nullptr;
  Meeting* waiting = nullptr;
  u32 waiting_epoch = 0;
  bool has_arrived = false;  // at the cluster barrier, without having waited
  u32 arrived_epoch = 0;
  std::map<const Barrier*, u32> seen;  // per mbarrier, the last phase whose data from other blocks the thread may read
  std::map<const Barrier*, u32> waited;  // per mbarrier, the last phase that the thread has waited for
  u32 heard = 0;  // rounds of pushes that the thread has waited for
  bool done = false;

  bool runnable() const { return !done && (waiting == nullptr || waiting->epoch != waiting_epoch); }
};

// Overlapping buffers are one region, so that an input that is also an output has one shadow.
struct Region {
  u8* begin;
  u8* end;
  std::vector<ShadowByte> shadow;
};

struct Machine {
  const Launch& launch;
  void (*kernel)(const Launch&);
  Shape shape;
  Stacks stacks;
  std::vector<Region> regions;
  Meeting cluster_sync{"cluster_sync"};
  std::vector<Block> blocks;  // of the cluster that runs
  std::vector<Thread> threads;
  std::vector<std::function<void()>> deliveries;  // copies that have not arrived
  std::map<u32*, Counter> counters;
  Thread* current = nullptr;
  Context scheduler;
  bool failed = false;
  bool bad_index = false;  // the failure is an index of the user's that is out of range
};

static thread_local Machine* machine = nullptr;

// True if asynchronous operations complete only when a thread waits for them.
inline bool is_late() { return machine->launch.timing & 1; }

inline Stamp stamp_now() {
  const Thread& thread = *machine->current;
  u32 number = static_cast<u32>(thread.block->index * machine->launch.block + thread.index + 1);
  u32 cluster = thread.has_arrived ? 2 * thread.arrived_epoch + 1 : 2 * machine->cluster_sync.epoch;
  return {number, thread.warp->sync.epoch, thread.block->sync.epoch, cluster, thread.warp->sent, thread.heard};
}

inline bool is_counted(const Stamp& first, const Stamp& then, Shape shape) {
  const auto& known = machine->current->block->known;
  auto found = known.find((first.thread - 1) / shape.block_threads);
  if (found == known.end() || first.block_epoch >= found->second.epoch) return false;
  return then.thread == found->second.thread || then.block_epoch > found->second.since;
}

// Records the error and ends the launch.
inline void report_values(const Thread& thread, const char* format, va_list values) {
  const Launch& launch = machine->launch;
  i32 used = snprintf(launch.message, launch.message_bytes, "%s: block %d, thread %d: ", launch.kernel,
                      thread.block->index, thread.index);
  if (used < launch.message_bytes) vsnprintf(launch.message + used, launch.message_bytes - used, format, values);
  machine->failed = true;
}

__attribute__((format(printf, 2, 3))) inline void report(const Thread& thread, const char* format, ...) {
  va_list values;
  va_start(values, format);
  report_values(thread, format, values);
  va_end(values);
}

// Ends the launch from within a thread; does not return.
void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  report_values(*machine->current, format, values);
  va_end(values);
  switch_context(machine->current->context, machine->scheduler);
  abort();
}

// Ends the launch for an index of the user's that is out of range.
void fail_index(const char* message) {
  snprintf(machine->launch.message, machine->launch.message_bytes, "%s", message);
  machine->failed = machine->bad_index = true;
  switch_context(machine->current->context, machine->scheduler);
  abort();
}

// Yields to the other threads.
void pause() { switch_context(machine->current->context, machine->scheduler); }

// Waits until all members have arrived.
inline void meet(Meeting& meeting) {
  Thread& thread = *machine->current;
  thread.waiting = &meeting;
  thread.waiting_epoch = meeting.epoch;
  ++meeting.arrived;
  meeting.release_if_complete();
  if (!thread.runnable()) switch_context(thread.context, machine->scheduler);
  thread.waiting = nullptr;
}

// A cluster barrier in two steps, arrive and wait.
void arrive_at_cluster() {
  Thread& thread = *machine->current;
  if (thread.has_arrived) fail("arrives at the cluster's barrier twice, with no cluster_wait between");
  thread.has_arrived = true;
  thread.arrived_epoch = machine->cluster_sync.epoch;
  ++machine->cluster_sync.arrived;
  machine->cluster_sync.release_if_complete();
}

void wait_for_cluster() {
  Thread& thread = *machine->current;
  if (!thread.has_arrived) fail("waits at the cluster's barrier, at which it has not arrived");
  thread.waiting = &machine->cluster_sync;
  thread.waiting_epoch = thread.arrived_epoch;
  if (!thread.runnable()) switch_context(thread.context, machine->scheduler);
  thread.waiting = nullptr;
  thread.has_arrived = false;
}

// As on the hardware, an exited thread counts as arrived at cluster barriers, and the shared memory of an exited block is invalid.
inline void leave(Thread& thread) {
  if (thread.has_arrived) fail("ends between cluster_arrive and cluster_wait");
  thread.done = true;
  --machine->cluster_sync.members;
  machine->cluster_sync.release_if_complete();
  if (--thread.block->alive > 0) return;
  bool comes = thread.block->pushes > 0;
  for (auto& entry : thread.block->barriers) comes = comes || entry.second.sent > entry.second.seen;
  if (comes) fail("the block ends while another one may still send to its shared memory");
  const Stamp& reader = thread.block->last_remote_read;
  if (!happens_before(reader, stamp_now(), machine->shape)) {
    fail("the block ends while block %d may still read its shared memory: a cluster_sync is missing after the last "
         "cluster_load", static_cast<i32>((reader.thread - 1) / machine->shape.block_threads));
  }
}

inline void check_nothing_under_way(const Thread& thread);
inline bool deliver_one();

inline void thread_entry() {
  machine->kernel(machine->launch);
  check_nothing_under_way(*machine->current);
  leave(*machine->current);
  switch_context(machine->current->context, machine->scheduler);
  abort();
}

// True if the barrier at which `stuck` waits also waits for this thread.
inline bool expected(const Thread& thread, const Thread& stuck) {
  if (stuck.waiting == &machine->cluster_sync) return !thread.done;
  if (stuck.waiting == &stuck.block->sync) return thread.block == stuck.block;
  const Warp& warp = *stuck.warp;
  bool of_warp = stuck.waiting == &warp.sync || stuck.waiting == &warp.shuffle || stuck.waiting == &warp.matrices;
  return of_warp && thread.warp == stuck.warp;
}

// Reports a deadlock: some threads wait at a barrier that others will never reach. Names the first of each.
inline void report_deadlock() {
  const Thread* stuck = nullptr;
  for (const Thread& thread : machine->threads) stuck = stuck || thread.done ? stuck : &thread;
  const Thread* absent = nullptr;
  i32 waiting = 0;
  for (const Thread& thread : machine->threads) {
    if (!expected(thread, *stuck)) continue;
    if (thread.waiting == stuck->waiting) ++waiting;
    else if (!absent) absent = &thread;
  }
  if (!absent) {
    report(*stuck, "waits for ever at %s: %d of %d came", stuck->waiting->name, stuck->waiting->arrived, stuck->waiting->members);
    return;
  }
  report(*stuck, "waits for ever at %s: %d of %d threads came; thread %d of block %d %s%s", stuck->waiting->name, waiting,
         stuck->waiting->members, absent->index, absent->block->index, absent->done ? "has ended" : "waits at ",
         absent->done ? "" : absent->waiting->name);
}

inline void resume(Thread& thread, i64 i) {
  machine->current = &thread;
  switch_context(machine->scheduler, thread.context);
  if (!machine->failed && machine->stacks.overrun(i)) report(thread, "used more than %lld bytes of stack", stack_bytes);
}

// Runs each runnable thread to its next barrier; returns false if there is none.
inline bool run_round() {
  bool progress = false;
  size_t count = machine->threads.size();
  for (size_t n = 0; n < count && !machine->failed; ++n) {
    size_t i = machine->launch.timing & 2 ? count - 1 - n : n;
    if (!machine->threads[i].runnable()) continue;
    progress = true;
    resume(machine->threads[i], static_cast<i64>(i));
  }
  return progress;
}

inline bool all_done() {
  for (const Thread& thread : machine->threads) {
    if (!thread.done) return false;
  }
  return true;
}

inline void start_block(Block& block, i32 index) {
  const Launch& launch = machine->launch;
  block.index = index;
  block.alive = block.sync.members = launch.block;
  block.warps.resize((launch.block + 31) / 32);
  block.memory.assign(launch.shared_bytes, 0xff);  // NaN in every floating type
  block.shadow.resize(launch.shared_bytes);
  block.in_flight.resize(launch.shared_bytes);
  block.leaving.resize(launch.shared_bytes);
  block.unfenced.resize(launch.shared_bytes);
  block.pushed.resize(launch.shared_bytes);
  block.loaded.resize(launch.shared_bytes);
  for (i32 t = 0; t < launch.block; ++t) {
    Warp& warp = block.warps[t / 32];
    ++warp.sync.members;
    ++warp.shuffle.members;
    ++warp.sync_products.members;
    ++warp.matrices.members;
  }
}

inline void start_thread(Thread& thread, i32 i) {
  thread.block = &machine->blocks[i / machine->launch.block];
  thread.index = i % machine->launch.block;
  thread.warp = &thread.block->warps[thread.index / 32];
  machine->stacks.prepare(thread.context, i, thread_entry);
}

inline void prepare_blocks(i32 count) {
  machine->blocks.assign(count, Block{});
  machine->threads.assign(count * machine->launch.block, Thread{});
  machine->cluster_sync = Meeting{"cluster_sync", count * machine->launch.block};
}

inline void run_cluster(i32 first_block) {
  const Launch& launch = machine->launch;
  prepare_blocks(launch.cluster);
  for (i32 b = 0; b < launch.cluster; ++b) start_block(machine->blocks[b], first_block + b);
  for (i32 i = 0; i < launch.cluster * launch.block; ++i) start_thread(machine->threads[i], i);
  while (!machine->failed && (run_round() || deliver_one())) {}
  if (!machine->failed && !all_done()) report_deadlock();
}

// Starts blocks in order in the places of those that have ended; returns the number of the next block.
inline i32 start_waiting_blocks(i32 next) {
  const Launch& launch = machine->launch;
  for (size_t place = 0; place < machine->blocks.size() && next < launch.grid; ++place) {
    if (machine->blocks[place].alive > 0) continue;
    machine->blocks[place] = Block{};
    start_block(machine->blocks[place], next++);
    i32 first = static_cast<i32>(place) * launch.block;
    for (i32 i = first; i < first + launch.block; ++i) start_thread(machine->threads[i] = Thread{}, i);
  }
  return next;
}

// Runs a grid whose blocks wait for earlier ones, few at a time.
inline void run_waiting_grid() {
  prepare_blocks(machine->launch.resident);
  for (Thread& thread : machine->threads) thread.done = true;
  i32 next = 0;
  do {
    next = start_waiting_blocks(next);
  } while (!machine->failed && run_round());
  if (!machine->failed && !all_done()) report_deadlock();
  for (auto& [counter, _] : machine->counters) {
    if (!machine->failed && *counter) {
      snprintf(machine->launch.message, machine->launch.message_bytes, "%s: leaves a counter at %u", machine->launch.kernel, *counter);
      machine->failed = true;
    }
    *counter = 0;  // for the next launch
  }
}

}  // namespace emulator
