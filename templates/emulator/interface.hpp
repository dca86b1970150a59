// The interface between a kernel's text and the runtime, which is compiled once.
namespace emulator {

struct Buffer {
  const char* name;
  u8* begin;
  i64 bytes;
  i32 writable;
  i32 is_pending;  // the previous launch writes it
};

struct Argument {
  i64 integer;
  double real;
  i32 is_real;
};

struct Launch {
  const char* kernel;
  i32 grid;
  i32 block;
  i32 cluster;
  i32 shared_bytes;
  const Argument* arguments;
  i32 argument_count;
  const Buffer* buffers;
  i32 buffer_count;
  char* message;  // where an error is written
  i32 message_bytes;
  i32 timing;  // 1: asynchronous operations complete as late as possible; 2: threads run from last to first
  i32 overlaps;  // the previous launch may still be running
  i32 resident;  // blocks that run at a time, if blocks wait for earlier ones; 0 if none waits
};

// A wgmma, as seen by the accumulator of one thread.
struct Product {
  float* d;
  i32 count;
  u64 a;
  u32 a_registers[4];
  u64 b;
  bool accumulate, a_transposed, b_transposed, a_in_registers;
  void (*run)(const Product&) = nullptr;
  u32 group = 0;
  u32 number = 0;
  i32 first_thread = 0;  // of the warp
};

struct Barrier;
struct Block;

#pragma GCC visibility push(default)

// Returns 0 if every block completed. Otherwise launch.message describes the error: 2 for an index of the user's, 1 for the kernel.
i32 run(const Launch& launch, void (*kernel)(const Launch&));

// End the launch from within a thread.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);
[[noreturn]] void fail_index(const char* message);  // an index of the user's is out of range

// Position of the thread.
i32 thread_index();
i32 block_index();
i32 grid_size();
i32 cluster_size();
Block& own_block();

// Operations of several threads.
void sync_warp();
void sync_block();
void shuffle(void* value, i64 bytes, i32 from);
void shuffle_among(void* value, i64 bytes, i32 from, i32 width);
void arrive_at_cluster();
void wait_for_cluster();
void meet_named(i32 id, i32 threads);
void pause();
void end_wait_for_previous();
void launch_dependents();
void advance_counter(u32* counter, u32 last, bool releases);
void wait_for_counter(const u32* counter, u32 count);

// Global memory: `offset` bytes from `base`, which selects the buffer.
void global_read(void* to, const void* base, i64 offset, i64 bytes, i64 alignment);
void global_write(void* base, i64 offset, const void* from, i64 bytes, i64 alignment);
void check_global_read(const void* base, i64 offset, i64 bytes, i64 alignment);

// Shared memory: offsets in bytes.
u8* shared_memory();
i64 shared_offset(const void* pointer);
void check_shared(const char* doing, i64 offset, i64 bytes);
void shared_read(Block& block, void* to, i64 offset, i64 bytes);
void shared_write(Block& block, i64 offset, const void* from, i64 bytes);
void cluster_read(i32 rank, void* to, i64 offset, i64 bytes);
void start_copy(i64 offset, const void* base, i64 from, i64 bytes, i64 present);
void close_copies();
void finish_copies(u32 pending);

// mbarriers in shared memory, and stores to other blocks that they count.
void init_barrier(const void* pointer, u32 arrivals);
void show_barriers();
Barrier& find_barrier(const void* pointer);
void arrive(Barrier& barrier, i64 bytes);
void wait_for_phase(Barrier& barrier, u32 parity);
void wait_for_blocks(Barrier& barrier, u32 parity);
void push(i32 rank, i64 offset, const void* from, i64 bytes, const void* barrier_at);

// TMA.
void load_tile(void* destination, const TensorMap& opaque, const void* barrier_at, i64 rank, const i32* at);
void store_tile(const TensorMap& opaque, const void* source, i32 x, i32 y);
void close_stores();
void finish_stores(u32 pending);
void write_word(u32 address, u32 word);
void fence_words();

// wgmma and mma.
void multiply_bf16(const Product& product);
void multiply_f16(const Product& product);
void fence_products();
void start_product(Product product);
void close_products();
void finish_products(u32 pending);
void load_matrices(u32 (&matrices)[4], u32 address, bool transposed);
void multiply_fragments_bf16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right);
void multiply_fragments_f16(float* d, const u32 (&a)[4], u32 b_left, u32 b_right);

#pragma GCC visibility pop

}  // namespace emulator
