// Fixed-width scalars, so that the file needs no header. bf16 and f16 are storage only: math widens them first.
typedef signed char i8;
typedef unsigned char u8;
typedef short i16;
typedef unsigned short u16;
typedef int i32;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct f8e4m3 { u8 bits; };
// A TMA descriptor as the driver encodes it; passed to a kernel by value.
struct alignas(64) TensorMap { u64 opaque[16]; };
