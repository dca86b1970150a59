// Fibers: each thread of a block runs on a stack of its own and gives way only at a barrier, a shuffle or its end.
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(FUSEGEN_PORTABLE_FIBERS)
#define FUSEGEN_UCONTEXT
#include <ucontext.h>
#endif

namespace emulator {

#if !defined(FUSEGEN_UCONTEXT)

// Written by hand, since ucontext makes a system call at each switch. Saves the callee-saved registers.
extern "C" __attribute__((visibility("hidden"))) void fg_switch_stack(void** save, void* load);
asm(R"(
.text
.hidden fg_switch_stack
.globl fg_switch_stack
.type fg_switch_stack, @function
fg_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fg_switch_stack, .-fg_switch_stack
)");

struct Context { void* stack_pointer = nullptr; };

inline void switch_context(Context& save, Context& load) { fg_switch_stack(&save.stack_pointer, load.stack_pointer); }

inline void prepare_context(Context& context, u8* stack, i64 bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  top[-2] = reinterpret_cast<void*>(entry);  // the return address, with the stack alignment after a call
  context.stack_pointer = top - 8;           // six saved registers, with any initial values
}

#else

struct Context { ucontext_t state; };

inline void switch_context(Context& save, Context& load) { swapcontext(&save.state, &load.state); }

inline void prepare_context(Context& context, u8* stack, i64 bytes, void (*entry)()) {
  getcontext(&context.state);
  context.state.uc_stack.ss_sp = stack;
  context.state.uc_stack.ss_size = static_cast<size_t>(bytes);
  context.state.uc_link = nullptr;
  makecontext(&context.state, entry, 0);
}

#endif

constexpr i64 stack_bytes = 256 * 1024;
constexpr i64 mark_bytes = 64;
constexpr u8 mark = 0xa5;

// One stack a fiber; memory is taken as it is touched. A mark at the far end shows when one ran over, into its
// neighbour's or, for the first, into a spare one, which does no harm before it is reported.
class Stacks {
 public:
  explicit Stacks(i64 count) : bytes_((count + 1) * stack_bytes) {
    void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) base_ = static_cast<u8*>(memory);
  }
  Stacks(const Stacks&) = delete;
  ~Stacks() { if (base_) munmap(base_, bytes_); }

  bool usable() const { return base_ != nullptr; }
  void prepare(Context& context, i64 i, void (*entry)()) {
    memset(stack(i), mark, mark_bytes);
    prepare_context(context, stack(i), stack_bytes, entry);
  }
  bool overrun(i64 i) const {
    for (i64 b = 0; b < mark_bytes; ++b) {
      if (stack(i)[b] != mark) return true;
    }
    return false;
  }

 private:
  u8* stack(i64 i) const { return base_ + (i + 1) * stack_bytes; }

  i64 bytes_;
  u8* base_ = nullptr;
};

}  // namespace emulator
