// Requests of a thread to the machine: its position, and barriers.
namespace emulator {

i32 thread_index() { return machine->current->index; }
i32 block_index() { return machine->current->block->index; }
i32 grid_size() { return machine->launch.grid; }
i32 cluster_size() { return machine->launch.cluster; }
Block& own_block() { return *machine->current->block; }

void sync_warp() { meet(machine->current->warp->sync); }
void sync_block() { meet(machine->current->block->sync); }

// True until the thread has waited for the previous launch, which may still be running.
inline bool previous_may_run() { return machine->launch.overlaps && !machine->current->waited_for_previous; }
void end_wait_for_previous() { machine->current->waited_for_previous = true; }

// Launches before the previous one have completed only if this one's threads wait first.
void launch_dependents() {
  if (previous_may_run()) fail("launch_dependents with no wait_for_previous before");
}

// If it releases, blocks that wait for the counter see what the block has accessed before its last barrier.
void advance_counter(u32* counter, u32 last, bool releases) {
  if (previous_may_run()) fail("a counter is advanced with no wait_for_previous before");
  Counter& advanced = machine->counters[counter];
  const Block& block = *machine->current->block;
  if (releases) advanced.advanced[static_cast<u32>(block.index)] = block.sync.epoch;
  *counter = *counter >= last ? 0 : *counter + 1;
  ++advanced.meeting.epoch;
}

void wait_for_counter(const u32* counter, u32 count) {
  if (previous_may_run()) fail("counter_wait with no wait_for_previous before");
  Counter& awaited = machine->counters[const_cast<u32*>(counter)];
  Thread& thread = *machine->current;
  while (*counter < count) {
    awaited.meeting.arrived = static_cast<i32>(*counter);
    awaited.meeting.members = static_cast<i32>(count);
    thread.waiting = &awaited.meeting;
    thread.waiting_epoch = awaited.meeting.epoch;
    switch_context(thread.context, machine->scheduler);
  }
  thread.waiting = nullptr;
  Stamp now = stamp_now();
  for (const auto& [block, epoch] : awaited.advanced) thread.block->known[block] = {epoch, now.thread, now.block_epoch};
}

// Publishes the value to the other lanes, and replaces it by that of lane `from`.
void shuffle(void* value, i64 bytes, i32 from) {
  Warp& warp = *machine->current->warp;
  if (from < 0 || from >= warp.shuffle.members) fail("shuffle_xor reads lane %d of a warp of %d", from, warp.shuffle.members);
  u64* passed = warp.passed[warp.shuffle.epoch % 2];
  memcpy(&passed[machine->current->index % 32], value, bytes);
  meet(warp.shuffle);
  memcpy(value, &passed[from], bytes);
}

// The same within the lane's aligned group of `width` lanes.
void shuffle_among(void* value, i64 bytes, i32 from, i32 width) {
  Warp& warp = *machine->current->warp;
  i32 lane = machine->current->index % 32;
  if (from / width != lane / width) fail("shuffle_xor_among reads lane %d, which is none of the %d around lane %d", from, width, lane);
  Meeting& part = warp.parts[lane / width];
  part.name = "shuffle_xor_among";
  part.members = width;
  u64* passed = warp.passed_among[part.epoch % 2];
  memcpy(&passed[lane], value, bytes);
  meet(part);
  memcpy(value, &passed[from], bytes);
}

}  // namespace emulator
