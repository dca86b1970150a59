// Ends the launch: the next synchronisation raises cudaErrorAssert, and the message is printed.
extern "C" __device__ void __assertfail(const char*, const char*, u32, const char*, unsigned long)
    __attribute__((noreturn));
__device__ __noinline__ void refuse_index(const char* message) { __assertfail(message, "fusegen", 0, "", 1); }
