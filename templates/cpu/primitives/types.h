// Storage types of elements, and the attribute of every primitive: loops vectorize only if their calls are inlined.
#include <stdint.h>

typedef int8_t i8;
typedef uint8_t u8;
typedef int16_t i16;
typedef uint16_t u16;
typedef int32_t i32;
typedef uint32_t u32;
typedef long long i64;  // the type of LL literals, so that overloads are not ambiguous
typedef unsigned long long u64;

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

#define FG_INLINE static inline __attribute__((always_inline, unused))
#define FG_INLINE_BODY __attribute__((always_inline))  // after a lambda's parameters
//% if "f8e4m3" in types
struct f8e4m3 { u8 bits; };
//% endif
//% if "f8e5m2" in types
struct f8e5m2 { u8 bits; };
//% endif
