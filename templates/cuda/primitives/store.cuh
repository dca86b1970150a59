// Stores one element to global memory.
//% for t in stored
__device__ __forceinline__ void store({{ t.name }}* base, i64 i, {{ t.name }} value) {
    {{ t.register }} bits = bit_cast<{{ t.unsigned }}>(value);
    asm volatile("st.global.{{ t.access }} [%0], %1;" :: "l"(base + i), "{{ t.letter }}"(bits) : "memory");
}
//% endfor
